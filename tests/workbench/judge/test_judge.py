"""``weft judge`` end to end: sixteen problems, three candidates each, and every kind of failure."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.by_chance import repeat
from helpers.paths import ROOT
from weft import machine
from weft.cli import main
from weft.core import WeftError
from weft.workbench.check import check
from weft.workbench.judge.judge import JudgeOptions, judge
from weft.workbench.judge.judgement import Judgement
from weft.workbench.sandbox import caller
from weft.workbench.sandbox.process import Limits
from weft.workbench.selftest import mutants

PROBLEMS = ROOT / "examples" / "judge"
LIMITS = Limits(seconds=60.0, memory_bytes=4 << 30)

# The check that must refuse each wrong and each cheating candidate, and a word of its reason.
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
        "embedding": (("error", "times what is allowed"), ("kept", "the call changed the output")),
    },
    "gpumode": {
        "vector_add": (("error", "times what is allowed"), ("alias", "data[1]")),
        "prefix_sum": (("error", "times what is allowed"), ("written", "poison")),
        "histogram": (("error", "got 0"), ("error", "expected")),
        "matmul_fp16": (("error", "times what is allowed"), ("error", "times what")),
    },
}
ALL = [(kind, name) for kind, names in FAULTS.items() for name in names]
# Wrong candidates that pass the format's own comparison.
LET_PASS = {"softmax", "layernorm", "rmsnorm", "linear_relu", "cross_entropy", "max_reduction"}
LET_PASS |= {"attention", "prefix_sum", "matmul_fp16"}


def reference(kind: str, name: str) -> Path:
    folder = PROBLEMS / kind / name
    return folder if kind == "gpumode" else folder / "reference.py"


def judge_example(
    kind: str, name: str, candidate: str, device: str = "cpu", timed: bool = False
) -> Judgement:
    file = PROBLEMS / kind / name / candidate
    options = JudgeOptions(device=device, time=timed, limits=LIMITS)
    return judge(reference(kind, name), file, options)


def check_problem(kind: str, name: str, device: str) -> None:
    right = judge_example(kind, name, "right.py", device)
    assert right.correct and not right.reason, right.reason
    assert {c.status for c in right.checks} == {"pass"} and right.kernels
    assert right.own is not None and right.own.passed, right.own
    for candidate, (rule, word) in zip(("wrong", "cheat"), FAULTS[kind][name], strict=True):
        judgement = judge_example(kind, name, f"{candidate}.py", device)
        assert not judgement.correct and rule in judgement.reason.split(":")[0], judgement.reason
        assert word in judgement.reason and "\n" not in judgement.reason
        assert next(c for c in judgement.checks if c.check == rule).status == "fail"
        # Near the file's own limit; a GPU's products round otherwise than a CPU's.
        if candidate == "wrong" and name in LET_PASS and device == "cpu":
            assert judgement.own is not None and judgement.own.passed, judgement.own


@pytest.mark.slow
@pytest.mark.sampled(2, each=lambda kind, name: kind)
@pytest.mark.parametrize(("kind", "name"), ALL)
def test_problems_without_a_gpu(kind: str, name: str) -> None:
    if machine.has_gpu():
        pytest.skip("on a GPU Triton is not interpreted: see the test below")
    check_problem(kind, name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "name"), ALL)
def test_problems_on_a_gpu(kind: str, name: str) -> None:
    check_problem(kind, name, "cuda")


def test_every_example_problem_is_tested() -> None:
    judgement = [(p.parent.parent.name, p.parent.name) for p in PROBLEMS.glob("*/*/right.py")]
    assert sorted(judgement) == sorted(ALL)
    assert [len(FAULTS[k]) for k in ("kernelbench", "gpumode")] == [12, 4]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.pooled(1, "timed alone")
def test_a_correct_candidate_is_timed_against_its_reference() -> None:
    device = machine.default_device()
    judgement = repeat(
        lambda: judge_example("kernelbench", "gelu", "right.py", device, timed=True),
        lambda judged: judged.flags,
    )
    assert judgement.correct, judgement.reason
    contract = judgement.to_json()
    assert contract["time_us"] > 0 and contract["baseline"] > 0
    parts = contract["parts_by_step"]
    assert (
        parts["observing kernels"]["request kernels"]["calls"] == 1
        and "request kernels" not in parts["timing"]
    )
    for step, times in parts.items():
        assert sum(p["seconds"] for p in times.values()) <= contract["seconds_by_step"][step] + 0.1, step
    (timed,) = judgement.times
    assert timed.speedup == pytest.approx(contract["baseline"] / contract["time_us"])
    assert contract["speedup"] == (pytest.approx(timed.speedup) if timed.comparison.is_known else None)
    (low, high), itself = timed.comparison.interval, timed.comparison.against_itself
    assert low <= timed.speedup <= high and itself.value > 0 and timed.comparison.against_itself.spread >= 1


@pytest.mark.slow
def test_repeats_are_made_once_for_each_case_and_of_the_candidate_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference and the second timing make few calls at a case that is checked before it is timed."""
    many, few = 60, check.CALLS
    monkeypatch.setattr(check, "MAX_CALLS", many)
    monkeypatch.setattr(check, "MAX_SECONDS", 60.0)  # a busy machine makes fewer calls in the usual time
    monkeypatch.setattr(caller, "REPEAT_SECONDS", 60.0)
    # Also where a busy machine's first time is left out, so that there is none to confirm.
    monkeypatch.setattr(Judgement, "shows_difference", lambda self, case: True)
    monkeypatch.setattr(Judgement, "confirm", lambda self, records, candidate: None)
    judgement = judge_example("gpumode", "prefix_sum", "right.py", timed=True)
    assert judgement.correct, judgement.reason
    parts = judgement.to_json()["parts_by_step"]
    calls = {step: parts[step]["request call"]["calls"] for step in ("checking", "timing", "timing again")}
    file_check = 1  # call of the problem's own check at each case
    assert calls == {"checking": 2 * (many + file_check), "timing": many + few, "timing again": 2 * few}


SLOW = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        for _ in range(60):
            y = x * 2.0
        return y
def get_inputs():
    return [torch.rand(512, 512)]
def get_init_inputs():
    return []
"""
# The first process that loads it is timed, the next lists its kernels, and the third is timed again.
FAST_AT_FIRST = """
import torch
from pathlib import Path
LOADS = Path({counter!r})
LOADS.write_text(LOADS.read_text() + ".")
CALLS = 1 if len(LOADS.read_text()) <= {lucky} else 60
class ModelNew(torch.nn.Module):
    def forward(self, x):
        for _ in range(CALLS):
            y = x * 2.0
        return y
"""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.pooled(1, "timed alone")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("lucky", "is_shown"), [(2, False), (99, True)])
def test_a_speed_up_of_some_processes_alone_is_not_told(lucky: int, is_shown: bool, tmp_path: Path) -> None:
    slow, fast, counter = tmp_path / "slow.py", tmp_path / "fast.py", tmp_path / "counter"
    slow.write_text(SLOW)
    fast.write_text(FAST_AT_FIRST.format(counter=str(counter), lucky=lucky))

    def judge_again() -> Judgement:
        counter.write_text("")
        return judge(slow, fast, JudgeOptions(limits=LIMITS))

    judgement = repeat(judge_again, lambda judged: judged.flags)
    assert judgement.correct and judgement.seconds["timing again"] > 0
    assert len(counter.read_text()) == 3
    if is_shown:
        assert judgement.speedup is not None and judgement.speedup > 3
    else:
        # None, or what chance makes of the same code: not the tens of the first processes.
        assert judgement.speedup is None or judgement.speedup < 3, judgement.times


# -- candidates that fail -------------------------------------------------------------

BAD = {
    "hangs": ("import time\ntime.sleep(600)", "ran longer than"),
    "hangs in a call": (
        "import torch, time\nclass ModelNew(torch.nn.Module):\n    def forward(self, x): time.sleep(600)",
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
    "forges lines of output": (
        "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n"
        "        raise ValueError('no\\n\\x1b[2Kall passed\\u202e')",
        "all passed",
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
    """Child processes of this process."""
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(n) for task in tasks for n in task.read_text().split()}


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", BAD)
def test_a_candidate_that_fails_is_reported_in_one_line(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, word = BAD[name]
    before = children()  # fork servers that earlier tests of this worker started
    # A hang takes the whole limit, in a call twice; the others need time to start.
    seconds = 3.0 if name.startswith("hangs") else 8.0
    limits = Limits(seconds=seconds, memory_bytes=3 << 29)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    judgement = judge(
        reference("kernelbench", "gelu"), bad(tmp_path, text), JudgeOptions(time=False, limits=limits)
    )
    assert not judgement.correct and word in judgement.reason and "\n" not in judgement.reason, (
        judgement.reason
    )
    assert len(judgement.reason) < 500
    # This process imports PyTorch's compiler here if no earlier test has; that makes its cache folder.
    assert [p for p in folder.iterdir() if not p.name.startswith("torchinductor_")] == []
    assert len(children() - before) <= 1


@pytest.mark.slow
def test_a_megabyte_of_output_does_not_disturb_the_judge(tmp_path: Path) -> None:
    text = (PROBLEMS / "kernelbench" / "gelu" / "right.py").read_text()
    loud = text.replace("        u =", "        print('x' * (1 << 20))\n        u =")
    assert loud != text
    judgement = judge(reference("kernelbench", "gelu"), bad(tmp_path, loud), JudgeOptions(time=False))
    assert judgement.correct, judgement.reason


@pytest.mark.slow
def test_cuda_sources_without_a_gpu_are_not_run(tmp_path: Path) -> None:
    if machine.has_gpu():
        pytest.skip("there is a GPU")
    text = (
        "from torch.utils.cpp_extension import load_inline\n"
        "built = load_inline(name='k', cpp_sources='', cuda_sources='')\nclass ModelNew: ..."
    )
    judgement = judge(reference("kernelbench", "gelu"), bad(tmp_path, text))
    assert not judgement.correct and judgement.reason.startswith("not run: needs a GPU")
    lazy = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n"
    lazy += "        torch.cuda.synchronize()\n        return x"
    judgement = judge(reference("kernelbench", "gelu"), bad(tmp_path, lazy), JudgeOptions(time=False))
    assert not judgement.correct and judgement.reason.startswith("not run: needs a GPU")


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
def test_the_contract_of_the_command(weft: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    folder = PROBLEMS / "gpumode" / "prefix_sum"
    assert weft(folder, folder / "right.py", "--json", "--no-time") == 0
    contract = json.loads(capsys.readouterr().out)
    keys = {"correct", "reason", "checks", "speedup", "time_us", "baseline", "kernels", "flags"}
    assert keys <= set(contract) and contract["correct"] is True and contract["own_check"]["passed"] is True
    assert all(set(c) == {"name", "status", "detail"} for c in contract["checks"])
    assert weft(folder, folder / "cheat.py", "--no-time", "--case", "size1023") == 1
    captured = capsys.readouterr()
    assert "is not correct (" in captured.out and "): written" in captured.out and "own check" in captured.out
    # On a slow machine stderr has lines of progress, and nothing else.
    assert all(line.endswith((" s)", " left)")) for line in captured.err.splitlines())


def test_a_mistake_in_the_request_exits_2(
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
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("error: "), captured.err


@pytest.mark.slow
def test_a_reference_that_raises_at_some_seed_is_refused(tmp_path: Path) -> None:
    text = (PROBLEMS / "kernelbench" / "gelu" / "reference.py").read_text()
    fails = "if abs(float(x[0, 0]) - {first}) > 1e-4: raise ValueError('no such number')"
    torch.manual_seed(0)
    line = fails.format(first=float(torch.randn(64, 257)[0, 0]))
    broken = tmp_path / "broken.py"
    broken.write_text(text.replace("        return F", f"        {line}\n        return F"))
    with pytest.raises(WeftError, match="no such number"):
        judge(broken, PROBLEMS / "kernelbench" / "gelu" / "right.py", JudgeOptions(time=False))


def test_an_unknown_case_is_refused() -> None:
    with pytest.raises(WeftError, match="inputs"):
        judge(
            reference("kernelbench", "gelu"),
            PROBLEMS / "kernelbench" / "gelu" / "right.py",
            JudgeOptions(cases=("input",)),
        )


@pytest.mark.slow
def test_an_output_in_another_order_is_right_and_gets_no_time(tmp_path: Path) -> None:
    control = mutants.find("H12/by_columns/eager/honest").problem
    assert control is not None
    for name, text in (("reference.py", control.reference), ("candidate.py", control.candidate)):
        (tmp_path / name).write_text(text)
    options = JudgeOptions(device="cpu", limits=LIMITS)
    judgement = judge(tmp_path / "reference.py", tmp_path / "candidate.py", options)
    assert judgement.correct and not judgement.times, judgement.reason
    (untimed,) = [flag for flag in judgement.flags if flag.startswith("not timed")]
    assert "strides (1, 6)" in untimed and "return .contiguous()" in untimed


def test_a_few_wrong_calls_are_found_without_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows are zeros in the 60th call alone. A quick call is repeated so often on any machine.

    On a busy one the time for repeats ends sooner; here there is none.
    """
    monkeypatch.setattr(caller, "REPEAT_SECONDS", 0.0)
    model = (
        "import torch\n\n\nclass {name}(torch.nn.Module):\n    calls = 0\n\n    def forward(self, x):\n"
        "        {name}.calls += 1\n        y = torch.nn.functional.gelu(x)\n{rest}        return y\n\n\n"
        "def get_inputs():\n    return [torch.randn(96, 256)]\n\n\ndef get_init_inputs():\n    return []\n"
    )
    reference, candidate = tmp_path / "reference.py", tmp_path / "candidate.py"
    reference.write_text(model.format(name="Model", rest=""))
    wrong = "        if ModelNew.calls == 60:\n            y[3:9] = 0\n"
    candidate.write_text(model.format(name="ModelNew", rest=wrong))
    options = JudgeOptions(device="cpu", time=False, limits=LIMITS)
    judgement = judge(reference, candidate, options)
    assert judgement.reason.startswith("error: ") and "call" in judgement.reason
    assert judge(reference, candidate, replace(options, without=("many",))).correct
