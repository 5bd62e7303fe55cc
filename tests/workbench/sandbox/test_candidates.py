"""External candidates through the real commands: right, wrong, and every kind of failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from helpers.by_chance import repeat
from helpers.marked_processes import marked_processes
from helpers.paths import ROOT
from weft.cli import app
from weft.core import Ceilings, Implementation, registry
from weft.core.record import Record
from weft.workbench import bench
from weft.workbench.sandbox import observed_kernels
from weft.workbench.sandbox.caller import WorkerProcess
from weft.workbench.sandbox.observed_kernels import observe_in_worker
from weft.workbench.sources.source import Source
from weft.workbench.timing.plan import Budget, timing_check_of

HEAD = "import torch, weft\n\n\n"
DECLARED = HEAD + '@weft.implementation("softmax", backend="eager")\ndef mine(x):\n'
RIGHT = DECLARED + "    return torch.softmax(x, -1) if x.dim() else torch.ones_like(x)\n"

# Source of the file, and the words that the one line about it must contain.
BROKEN = {
    "hangs": (DECLARED + "    while True:\n        pass\n", "ran longer than 5 s"),
    "segfaults": (DECLARED + "    import ctypes\n    ctypes.string_at(0)\n", "SIGSEGV"),
    "exits": (
        DECLARED + "    import os\n    print('PASS')\n    os._exit(0)\n",
        "without an answer",
    ),
    "eats memory": (
        DECLARED + "    kept = []\n    while True:\n        kept.append(torch.ones(1 << 24))\n",
        "used more than 2 GiB",
    ),
    "raises at import": (HEAD + "raise RuntimeError('no such thing')\n", "no such thing"),
    "has a syntax error": (HEAD + "def mine(x:\n    return x\n", "mine.py:4: syntax error"),
    "hangs at import": (HEAD + "import time\ntime.sleep(600)\n", "ran longer than 5 s"),
    "declares nothing": (HEAD, "weft.implementation"),
    "cannot say what it takes": (
        HEAD + '@weft.implementation("softmax", backend="eager", supports=lambda *_: 1 / 0)\n'
        "def mine(x):\n    return torch.softmax(x, -1)\n",
        "asked what it supports: ZeroDivisionError",
    ),
    "dies of what it takes": (
        HEAD + "import os\n"
        '@weft.implementation("softmax", backend="eager", supports=lambda *_: os._exit(0))\n'
        "def mine(x):\n    return torch.softmax(x, -1)\n",
        "asked what it supports: ended",
    ),
    "prints a megabyte": (DECLARED + "    print('x' * (1 << 20))\n    return x\n", "alias"),
}

WAITS = ("hangs", "hangs at import", "eats memory")  # each takes over five seconds


def weft(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "weft", *arguments],
        env=known | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def leftovers(folder: Path) -> list[str]:
    """Return the folders of sandboxes in ``folder``, and the processes with it in their environment."""
    return [p.name for p in folder.glob("weft-sandbox-*")] + marked_processes(f"MARK={folder}")


def mine(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(text)
    return str(path)


SOME = ("fp32-3x129", "bf16-3x129", "fp32-0x5", "fp32-33x65-sliced", "fp16-2x70000")


@pytest.mark.slow
def test_a_right_candidate_passes(tmp_path: Path) -> None:
    file = mine(tmp_path, RIGHT)
    cases = [word for name in SOME for word in ("--case", name)]
    call = ["check", "softmax", "--with", file, "--json", "--device", "cpu", *cases]
    checked = CliRunner().invoke(app, call)
    assert checked.exit_code == 0, checked.output
    verdicts = json.loads(checked.stdout)["verdicts"]
    assert {v["implementation"] for v in verdicts} == {"mine"}
    assert {v["direction"] for v in verdicts} == {"forward", "backward"}
    assert len(verdicts) == 2 * len(SOME)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.pooled(1, "timed alone")
def test_a_right_candidate_is_timed_beside_the_others(tmp_path: Path) -> None:
    file = mine(tmp_path, RIGHT)
    # In this process, whose imports and fork server are ready; the test runs alone.
    call = ["bench", "softmax", "--with", file, "--impl", "torch", "--direction", "forward"]
    timed = repeat(
        lambda: CliRunner().invoke(app, [*call, "--quick", "--device", "cpu", "--json"]),
        lambda done: [flag for r in json.loads(done.stdout) for flag in r["flags"]],
    )
    assert timed.exit_code == 0, timed.output
    records = {r["implementation"]: r for r in json.loads(timed.stdout)}
    assert set(records) == {"mine", "torch"}
    assert records["mine"]["time_us"]["cold"] > 0
    assert not any(f.startswith("suspect") for f in records["mine"]["flags"])


def arguments(folder: Path, kind: str) -> list[str]:
    call = ["check", "softmax", "--with", mine(folder, BROKEN[kind][0]), "--device", "cpu"]
    seconds = "5" if "ran longer" in BROKEN[kind][1] else "60"
    limits = ["--seconds", seconds, "--memory", "2"]
    return [*call, *limits, "--case", "fp32-3x129", "--direction", "forward"]


def assert_one_line(kind: str, printed: str) -> None:
    failures = [line for line in printed.splitlines() if line.startswith("failed")]
    assert [line for line in failures if BROKEN[kind][1] in line], printed
    assert all(len(line) < 600 for line in failures)


@pytest.mark.sampled(1, each=lambda kind: "waits" if kind in WAITS else kind)
@pytest.mark.parametrize("kind", BROKEN)
def test_a_candidate_that_fails_is_reported_in_one_line(kind: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, arguments(tmp_path, kind))
    assert done.exit_code == 1, done.output
    assert_one_line(kind, done.output)


@pytest.mark.parametrize(("kind", "why"), [("exits", "without an answer"), ("raises", "not now")])
def test_a_failure_while_kernels_are_observed_is_a_violation(kind: str, why: str, tmp_path: Path) -> None:
    raises = DECLARED + "    raise RuntimeError('not now')\n"
    file = mine(tmp_path, raises if kind == "raises" else BROKEN[kind][0])
    operator = registry.operator("softmax")
    one = Implementation(operator="softmax", name="mine", backend="eager", forward=torch.softmax)
    observed = observe_in_worker(Source(kind="file", path=file), one, operator.case("fp32-3x129"), "cpu")
    assert set(observed.violations) == {"observed"} and why in observed.violations["observed"]
    (flag,) = observed.flags
    assert flag.startswith("suspect: kernels: while its kernels were observed")


def test_a_list_without_anything_that_computes_is_a_note_and_no_violation(tmp_path: Path) -> None:
    unnamed = DECLARED + "    y = torch.empty_like(x)\n    y.numpy()[...] = x.numpy()\n    return y\n"
    operator = registry.operator("softmax")
    one = Implementation(operator="softmax", name="mine", backend="eager", forward=torch.softmax)
    source = Source(kind="file", path=mine(tmp_path, unnamed))
    observed = observe_in_worker(source, one, operator.case("fp32-3x129"), "cpu")
    assert not observed.violations and "called by its address" in observed.note
    assert not any(flag.startswith("suspect") for flag in observed.flags)


class WorkerWithoutProfiler:
    """Stand-in for a worker whose profiler listed nothing, as may happen beside other profiled processes."""

    def __init__(self, **_: Any) -> None:
        self.one = {"shares": [1.0], "origins": ["aten"], "counts": [1], "source": "", "note": ""}

    def __enter__(self) -> WorkerWithoutProfiler:
        return self

    def __exit__(self, *_: object) -> None: ...

    def request(self, verb: str, _: Any = None) -> Any:
        nothing = {k: [] if isinstance(v, list) else v for k, v in self.one.items()}
        payload = {
            "kernels": {
                "profiled": {**nothing, "names": [], "seen": [], "note": "not looked at: nothing ran"},
                "unprofiled": {**self.one, "names": ["aten::gelu"], "seen": ["aten::gelu"]},
            },
            "timing.replaced_functions": {"replaced": [], "hooks": []},
            "idle_kernels": {"idle": False},
        }[verb]
        return SimpleNamespace(payload=payload)


@pytest.mark.parametrize(("backend", "violations"), [("numba", {"provenance"}), ("eager", set())])
def test_a_profiler_that_lists_nothing_does_not_hide_a_library(
    backend: str, violations: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observed_kernels, "Sandbox", WorkerWithoutProfiler)
    case = registry.operator("gelu").select("check", "cpu")[0]
    one = Implementation(operator="gelu", name="mine", backend=backend, forward=torch.relu)
    observed = observe_in_worker(Source(kind="file", path="mine.py"), one, case, "cpu")
    assert set(observed.violations) == violations and observed.note.startswith("not looked at")


@pytest.mark.slow
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Check a file with one candidate that hangs and one that is killed, in one command."""
    hangs, segfaults = BROKEN["hangs"][0], BROKEN["segfaults"][0].removeprefix(HEAD)
    both = hangs + "\n\n" + segfaults.replace("mine(x)", "other(x)")
    call = arguments(tmp_path, "hangs")
    mine(tmp_path, both)
    done = weft(*call, TMPDIR=str(tmp_path), MARK=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    for kind, name in (("hangs", "mine"), ("segfaults", "other")):
        assert_one_line(kind, done.stdout + done.stderr)
        assert f"failed: softmax {name} " in done.stdout + done.stderr
    assert not leftovers(tmp_path), "a process or a folder was leftovers behind"


def test_a_missing_file_is_a_mistake_in_the_request(tmp_path: Path) -> None:
    done = weft("check", "softmax", "--with", str(tmp_path / "none.py"))
    assert done.returncode == 2
    assert "none.py" in done.stderr


TIMED = """
import torch, weft

@weft.implementation("gelu", backend="torch", name="honest")
def honest(x):
    return torch.nn.functional.gelu(x, approximate="tanh")

cache = {}

@weft.implementation("gelu", backend="torch", name="first-bytes")
def first_bytes(x):
    key = (x.shape, x.dtype, x.stride(), x.flatten()[:16].numpy().tobytes())
    if key not in cache:
        cache[key] = honest(honest(x) * 0 + x)
    return cache[key].clone()
"""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.pooled(1, "timed alone")
def test_a_file_is_timed_in_its_own_process(tmp_path: Path) -> None:
    path = tmp_path / "theirs.py"
    path.write_text(TIMED)
    budget = Budget(
        seconds=0.6, warmup=0.1, min_samples=8, max_rounds=30, side_samples=2, recheck_seconds=2.0
    )
    ceilings = Ceilings(device="toy", copy=1e12, read=1e12, fill=1e12, matrix={"fp32": 1e12}, measured="")

    def time_all() -> dict[str, Record]:
        (records,) = bench.run_points(
            ["gelu"],
            ["torch", *worker.implementations],
            directions=["forward"],
            device="cpu",
            budget=budget,
            workers={i.name: worker for i in worker.implementations},
            ceilings=ceilings,
        )
        return {r.implementation: r for r in records}

    with WorkerProcess(Source(kind="file", path=str(path))) as worker:
        outcomes = repeat(time_all, lambda them: [*them["torch"].flags, *them["honest"].flags])
    for name in ("torch", "honest"):
        assert outcomes[name].timing is not None, outcomes[name].verdict.reason
        assert not [f for f in outcomes[name].flags if f.startswith("suspect")], outcomes[name].flags
    cheat = outcomes["first-bytes"]
    refused_as = {timing_check_of(text) for text in (*cheat.flags, cheat.verdict.reason)}
    assert refused_as & {"altered", "fresh"}, (cheat.verdict, cheat.flags)
    assert bench.went_against([cheat]) and not bench.went_against([outcomes["honest"]])
