"""``weft judge`` end to end: sixteen problems, three candidates each, and every way of failing."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from weft import machine
from weft.cli import main
from weft.core import WeftError
from weft.workbench.cell import Limits
from weft.workbench.formats.judge import Wanted, judge
from weft.workbench.formats.judgement import Judgement

ROOT = Path(__file__).resolve().parent.parent
PROBLEMS = ROOT / "examples" / "judge"
LIMITS = Limits(seconds=60.0, memory_bytes=4 << 30)

# What each wrong and cheating candidate must be refused by: the check, and a word of the reason.
FAULTS = {
    "kernelbench": {
        "softmax": (("error", "got 0"), ("provenance", "declared triton")),
        "gelu": (("error", "times what is allowed"), ("error", "times what is allowed")),
        "layernorm": (("error", "times what is allowed"), ("replaced", "torch.equal")),
        "rmsnorm": (("error", "times what is allowed"), ("written", "poison")),
        "matmul": (("error", "times what is allowed"), ("error", "got 0")),
        "linear_relu": (("error", "expected 0"), ("error", "weights-2")),
        "cross_entropy": (("error", "times what is allowed"), ("channel", "ended itself")),
        "cumulative_sum": (("error", "times what is allowed"), ("error", "times what")),
        "max_reduction": (("error", "times what is allowed"), ("type", "Later")),
        "conv1d": (("error", "times what is allowed"), ("error", "weights-2")),
        "attention": (("error", "times what is allowed"), ("written", "poison")),
        "embedding": (("error", "times what is allowed"), ("kept", "changed under it")),
    },
    "gpumode": {
        "vector_add": (("error", "times what is allowed"), ("alias", "data[1]")),
        "prefix_sum": (("error", "times what is allowed"), ("written", "poison")),
        "histogram": (("error", "got 0"), ("error", "expected")),
        "matmul_fp16": (("error", "times what is allowed"), ("error", "times what")),
    },
}
ALL = [(kind, name) for kind, names in FAULTS.items() for name in names]
# Candidates that a format's own comparison lets pass, which Weft's does not.
LET_PASS = {"softmax", "layernorm", "rmsnorm", "linear_relu", "cross_entropy", "max_reduction"}
LET_PASS |= {"attention", "prefix_sum", "matmul_fp16"}


def reference(kind: str, name: str) -> Path:
    folder = PROBLEMS / kind / name
    return folder if kind == "gpumode" else folder / "reference.py"


def judged(
    kind: str, name: str, candidate: str, device: str = "cpu", timed: bool = False
) -> Judgement:
    file = PROBLEMS / kind / name / candidate
    wanted = Wanted(device=device, time=timed, limits=LIMITS)
    return judge(reference(kind, name), file, wanted)


def check_problem(kind: str, name: str, device: str) -> None:
    right = judged(kind, name, "right.py", device)
    assert right.correct and not right.reason, right.reason
    assert {c.status for c in right.checks} == {"pass"} and right.kernels
    assert right.own is not None and right.own.passed, right.own
    for candidate, (rule, word) in zip(("wrong", "cheat"), FAULTS[kind][name], strict=True):
        found = judged(kind, name, f"{candidate}.py", device)
        assert not found.correct and rule in found.reason.split(":")[0], found.reason
        assert word in found.reason and "\n" not in found.reason
        assert next(c for c in found.checks if c.check == rule).status == "fail"
        # Near the file's own limit; a GPU's products round otherwise than a CPU's.
        if candidate == "wrong" and name in LET_PASS and device == "cpu":
            assert found.own is not None and found.own.passed, found.own


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), ALL)
def test_problems_without_a_gpu(kind: str, name: str) -> None:
    if machine.has_gpu():
        pytest.skip("on a GPU Triton is not interpreted: see the test below")
    check_problem(kind, name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "name"), ALL)
def test_problems_on_a_gpu(kind: str, name: str) -> None:
    check_problem(kind, name, "cuda")


def test_every_problem_is_judged() -> None:
    found = [(p.parent.parent.name, p.parent.name) for p in PROBLEMS.glob("*/*/right.py")]
    assert sorted(found) == sorted(ALL)
    assert [len(FAULTS[k]) for k in ("kernelbench", "gpumode")] == [12, 4]


@pytest.mark.slow
@pytest.mark.alone
def test_what_is_right_is_timed_against_its_reference() -> None:
    device = machine.default_device()
    found = judged("kernelbench", "gelu", "right.py", device, timed=True)
    assert found.correct, found.reason
    told = found.to_json()
    assert told["time_us"] > 0 and told["baseline"] > 0
    assert told["speedup"] == pytest.approx(told["baseline"] / told["time_us"])


# -- candidates that do not answer -------------------------------------------------------------

BAD = {
    "hangs": ("import time\ntime.sleep(600)", "ran longer than"),
    "hangs in a call": (
        "import torch, time\nclass ModelNew(torch.nn.Module):\n"
        "    def forward(self, x): time.sleep(600)",
        "ran longer than",
    ),
    "segfaults": (
        "import ctypes, torch\nclass ModelNew(torch.nn.Module):\n"
        "    def forward(self, x): ctypes.string_at(0)",
        "SIGSEGV",
    ),
    "exhausts memory": (
        "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n"
        "        kept = []\n        while True: kept.append(bytearray(b'x') * (1 << 26))",
        "of memory",
    ),
    "raises at import": ("raise OSError('not today')", "OSError: not today"),
    "has a syntax error": ("def f(:\n  pass", "SyntaxError"),
    "is no text": ("\x00\xff", "null bytes"),  # a ValueError before Python 3.11.4
    "has no ModelNew": ("x = 1", "ModelNew"),
    "raises in a call": (
        "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x): return 1 / 0",
        "ZeroDivisionError",
    ),
    "returns no tensor": (
        "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x): return 'x'",
        "type",
    ),
    "exits": ("import os\nos._exit(0)", "ended itself"),
}


def bad(folder: Path, text: str) -> Path:
    path = folder / "candidate.py"
    path.write_text(text)
    return path


def children() -> set[int]:
    """The processes that this one has, but for the server that forks cells."""
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(n) for task in tasks for n in task.read_text().split()}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_what_does_not_answer_is_one_line(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, word = BAD[name]
    # What hangs is waited for, in a call twice; what ends by itself has the time that it takes.
    seconds = 3.0 if name.startswith("hangs") else 8.0
    limits = Limits(seconds=seconds, memory_bytes=3 << 29)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    began = time.monotonic()
    found = judge(
        reference("kernelbench", "gelu"), bad(tmp_path, text), Wanted(time=False, limits=limits)
    )
    assert time.monotonic() - began < 90
    assert not found.correct and word in found.reason and "\n" not in found.reason, found.reason
    assert len(found.reason) < 500
    assert list(folder.iterdir()) == []
    assert len(children()) <= 1


@pytest.mark.slow
def test_a_megabyte_of_print_changes_nothing(tmp_path: Path) -> None:
    text = (PROBLEMS / "kernelbench" / "gelu" / "right.py").read_text()
    loud = text.replace("        u =", "        print('x' * (1 << 20))\n        u =")
    assert loud != text
    found = judge(reference("kernelbench", "gelu"), bad(tmp_path, loud), Wanted(time=False))
    assert found.correct, found.reason


@pytest.mark.slow
def test_cuda_sources_without_a_gpu_are_not_run(tmp_path: Path) -> None:
    if machine.has_gpu():
        pytest.skip("there is a GPU")
    text = (
        "from torch.utils.cpp_extension import load_inline\n"
        "built = load_inline(name='k', cpp_sources='', cuda_sources='')\nclass ModelNew: ..."
    )
    found = judge(reference("kernelbench", "gelu"), bad(tmp_path, text))
    assert not found.correct and found.reason.startswith("not run: needs a GPU")
    lazy = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n"
    lazy += "        torch.cuda.synchronize()\n        return x"
    found = judge(reference("kernelbench", "gelu"), bad(tmp_path, lazy), Wanted(time=False))
    assert not found.correct and found.reason.startswith("not run: needs a GPU")


# -- the command -------------------------------------------------------------------------------


@pytest.fixture
def weft(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command line in this process, where torch is there already; its exit code."""
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["weft", "judge", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        return int(done.value.code or 0)

    return run


@pytest.mark.slow
def test_the_contract_of_the_command(
    weft: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = PROBLEMS / "gpumode" / "prefix_sum"
    assert weft(folder, folder / "right.py", "--json", "--no-time") == 0
    told = json.loads(capsys.readouterr().out)
    keys = {"correct", "reason", "checks", "speedup", "time_us", "baseline", "kernels", "flags"}
    assert keys <= set(told) and told["correct"] is True and told["own_check"]["passed"] is True
    assert all(set(c) == {"name", "status", "detail"} for c in told["checks"])
    assert weft(folder, folder / "cheat.py", "--no-time", "--case", "size1023") == 1
    said = capsys.readouterr()
    assert "not right: written" in said.out and "own check" in said.out and not said.err


def test_a_wrong_call_exits_2(
    tmp_path: Path, weft: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = PROBLEMS / "kernelbench" / "gelu"
    broken = tmp_path / "reference.py"
    broken.write_text("def f(:")
    for arguments in (
        (folder / "none.py", folder / "right.py"),
        (folder / "reference.py", folder / "none.py"),
        (broken, folder / "right.py"),
        (folder / "reference.py", folder / "right.py", "--case", "no-such-case"),
        (folder / "reference.py", folder / "right.py", "--memory", "0"),
    ):
        assert weft(*arguments) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("error: "), said.err


@pytest.mark.slow
def test_a_reference_that_raises_at_some_seed_is_a_wrong_call(tmp_path: Path) -> None:
    text = (PROBLEMS / "kernelbench" / "gelu" / "reference.py").read_text()
    fails = "if abs(float(x[0, 0]) - {first}) > 1e-4: raise ValueError('no such number')"
    torch.manual_seed(0)
    line = fails.format(first=float(torch.randn(64, 257)[0, 0]))
    broken = tmp_path / "broken.py"
    broken.write_text(text.replace("        return F", f"        {line}\n        return F"))
    with pytest.raises(WeftError, match="no such number"):
        judge(broken, PROBLEMS / "kernelbench" / "gelu" / "right.py", Wanted(time=False))


def test_a_case_that_is_not_there_is_a_wrong_call() -> None:
    with pytest.raises(WeftError, match="inputs"):
        judge(
            reference("kernelbench", "gelu"),
            PROBLEMS / "kernelbench" / "gelu" / "right.py",
            Wanted(cases=("input",)),
        )
