"""Strangers' files through the real commands: right, wrong, and every way of not answering."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from started import started
from weft.cli import app
from weft.core import Implementation, registry
from weft.workbench.bring import Source
from weft.workbench.ran import of_stranger

ROOT = Path(__file__).resolve().parent.parent
HEAD = "import torch, weft\n\n\n"
DECLARED = HEAD + '@weft.implementation("softmax", backend="eager")\ndef mine(x):\n'
RIGHT = DECLARED + "    return torch.softmax(x, -1) if x.dim() else torch.ones_like(x)\n"

# What the file holds, and the words that the one line about it must have.
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


def weft(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "weft", *arguments],
        env=known | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def left(folder: Path) -> list[str]:
    """The folders of cells in here, and the processes that were told to use it."""
    return [p.name for p in folder.glob("weft-cell-*")] + started(f"MARK={folder}")


def mine(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(text)
    return str(path)


SOME = ("fp32-3x129", "bf16-3x129", "fp32-0x5", "fp32-33x65-sliced", "fp16-2x70000")


@pytest.mark.slow
def test_a_right_one_passes(tmp_path: Path) -> None:
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
def test_a_right_one_is_timed_beside_the_others(tmp_path: Path) -> None:
    file = mine(tmp_path, RIGHT)
    # In this process, whose imports and fork server stand: nobody is beside it, and all wait.
    call = ["bench", "softmax", "--with", file, "--impl", "torch", "--direction", "forward"]
    timed = CliRunner().invoke(app, [*call, "--quick", "--device", "cpu", "--json"])
    assert timed.exit_code == 0, timed.output
    records = {r["implementation"]: r for r in json.loads(timed.stdout)}
    assert set(records) == {"mine", "torch"}
    assert records["mine"]["time_us"]["cold"] > 0
    assert 0.5 < records["mine"]["time_us"]["cold"] / records["torch"]["time_us"]["cold"] < 2.0
    assert not any(f.startswith("suspect") for f in records["mine"]["flags"])


def arguments(folder: Path, how: str) -> list[str]:
    call = ["check", "softmax", "--with", mine(folder, BROKEN[how][0]), "--device", "cpu"]
    seconds = "5" if "ran longer" in BROKEN[how][1] else "60"
    limits = ["--seconds", seconds, "--memory", "2"]
    return [*call, *limits, "--case", "fp32-3x129", "--direction", "forward"]


def told_in_a_line(how: str, printed: str) -> None:
    failures = [line for line in printed.splitlines() if line.startswith("failed")]
    assert [line for line in failures if BROKEN[how][1] in line], printed
    assert all(len(line) < 600 for line in failures)


@pytest.mark.parametrize("how", BROKEN)
def test_one_that_does_not_answer_is_told_of_in_a_line(how: str, tmp_path: Path) -> None:
    start = time.monotonic()
    done = CliRunner().invoke(app, arguments(tmp_path, how))
    assert done.exit_code == 1, done.output
    told_in_a_line(how, done.output)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(("how", "why"), [("exits", "without an answer"), ("raises", "not now")])
def test_dying_while_its_kernels_are_looked_at_is_held_against_it(
    how: str, why: str, tmp_path: Path
) -> None:
    raises = DECLARED + "    raise RuntimeError('not now')\n"
    file = mine(tmp_path, raises if how == "raises" else BROKEN[how][0])
    operator = registry.operator("softmax")
    one = Implementation(operator="softmax", name="mine", backend="eager", forward=torch.softmax)
    ran = of_stranger(Source(kind="file", path=file), one, operator.case("fp32-3x129"), "cpu")
    assert set(ran.against) == {"observed"} and why in ran.against["observed"]
    (flag,) = ran.flags
    assert flag.startswith("suspect: kernels: while its kernels were looked at")


@pytest.mark.slow
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Of one that hangs and one that is killed, in one file and one command."""
    hangs, segfaults = BROKEN["hangs"][0], BROKEN["segfaults"][0].removeprefix(HEAD)
    both = hangs + "\n\n" + segfaults.replace("mine(x)", "other(x)")
    call = arguments(tmp_path, "hangs")
    mine(tmp_path, both)
    done = weft(*call, TMPDIR=str(tmp_path), MARK=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    for how, name in (("hangs", "mine"), ("segfaults", "other")):
        told_in_a_line(how, done.stdout + done.stderr)
        assert f"failed: softmax {name} " in done.stdout + done.stderr
    assert not left(tmp_path), "a process or a folder was left behind"


def test_a_file_that_is_not_there_is_a_wrong_call(tmp_path: Path) -> None:
    done = weft("check", "softmax", "--with", str(tmp_path / "none.py"))
    assert done.returncode == 2
    assert "none.py" in done.stderr
