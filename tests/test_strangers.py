"""Strangers' files through the real commands: right, wrong, and every way of not answering."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAD = "import torch, weft\n\n\n"
DECLARED = HEAD + '@weft.implementation("softmax", backend="eager")\ndef mine(x):\n'
RIGHT = DECLARED + "    return torch.softmax(x, -1) if x.dim() else torch.ones_like(x)\n"

# What the file holds, and the words that the one line about it must have.
BROKEN = {
    "hangs": (DECLARED + "    while True:\n        pass\n", "ran longer than 5 s"),
    "segfaults": (DECLARED + "    import ctypes\n    ctypes.string_at(0)\n", "SIGSEGV"),
    "exits": (DECLARED + "    import os\n    print('PASS')\n    os._exit(0)\n", "without an answer"),
    "eats memory": (
        DECLARED + "    kept = []\n    while True:\n        kept.append(torch.ones(1 << 24))\n",
        "used more than 2 GiB",
    ),
    "raises at import": (HEAD + "raise RuntimeError('no such thing')\n", "no such thing"),
    "has a syntax error": (HEAD + "def mine(x:\n    return x\n", "SyntaxError"),
    "hangs at import": (HEAD + "import time\ntime.sleep(600)\n", "ran longer than 5 s"),
    "declares nothing": (HEAD, "weft.implementation"),
    "prints a megabyte": (DECLARED + "    print('x' * (1 << 20))\n    return x\n", "alias"),
}


def weft(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weft", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def cells() -> set[str]:
    """The folders of cells, and the processes that bear a cell's mark."""
    found = {p.name for p in Path(tempfile.gettempdir()).glob("weft-cell-*")}
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if b"WEFT_CELL=" in entry.read_bytes():
                found.add(entry.parent.name)
        except OSError:
            continue  # it has ended, or is another user's
    return found


def mine(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(text)
    return str(path)


@pytest.mark.slow
def test_a_right_one_passes_and_is_timed_beside_the_others(tmp_path: Path) -> None:
    file = mine(tmp_path, RIGHT)
    checked = weft("check", "softmax", "--with", file, "--json")
    verdicts = json.loads(checked.stdout)["verdicts"]
    assert checked.returncode == 0, checked.stderr
    assert {v["implementation"] for v in verdicts} == {"mine"}
    assert {v["direction"] for v in verdicts} == {"forward", "backward"}
    assert len(verdicts) > 50
    timed = weft(
        "bench", "softmax", "--with", file, "--impl", "torch", "--direction", "forward", "--quick",
        "--device", "cpu", "--json",
    )  # fmt: skip
    records = {r["implementation"]: r for r in json.loads(timed.stdout)}
    assert timed.returncode == 0, timed.stderr
    assert set(records) == {"mine", "torch"}
    assert records["mine"]["time_us"]["cold"] > 0
    assert 0.5 < records["mine"]["time_us"]["cold"] / records["torch"]["time_us"]["cold"] < 2.0
    assert not any(f.startswith("suspect") for f in records["mine"]["flags"])


@pytest.mark.slow
@pytest.mark.parametrize("how", BROKEN)
def test_one_that_does_not_answer_is_told_of_in_a_line(how: str, tmp_path: Path) -> None:
    text, words = BROKEN[how]
    before, start = cells(), time.monotonic()
    limits = ("--seconds", "5", "--memory", "2")
    done = weft("check", "softmax", "--with", mine(tmp_path, text), *limits, "--device", "cpu")
    assert done.returncode == 1, done.stdout + done.stderr
    told = [line for line in (done.stdout + done.stderr).splitlines() if "failed" in line]
    lines = [line for line in told if words in line]
    assert lines, done.stdout + done.stderr
    assert all(len(line) < 600 for line in lines)
    assert time.monotonic() - start < 90
    assert cells() <= before, "a process or a folder was left behind"


def test_a_file_that_is_not_there_is_a_wrong_call(tmp_path: Path) -> None:
    done = weft("check", "softmax", "--with", str(tmp_path / "none.py"))
    assert done.returncode == 2
    assert "none.py" in done.stderr
