"""The suite in parts: every test is in exactly one shard, and a run continues a stopped one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
NOT_INHERITED = ("WEFT_TESTS_DONE", "WEFT_SAMPLE", "PYTEST_")
SUITE = """
import os, pytest
from helpers import sampling
@pytest.mark.parametrize("sampled", sampling.sample(range(1000), 100, "another one each run"))
def test_sampled(sampled):
    pass
@pytest.mark.parametrize("n", range(100))
def test_number(n):
    assert n != int(os.environ["BROKEN"])
def test_skipped():
    pytest.skip("not here")
"""


def run(folder: Path, *arguments: str, commit: str = "aaa", broken: int = 999) -> tuple[dict[str, int], str]:
    """Run a small suite by the project's own conftest; return the counts of outcomes, and the output.

    The test of the number ``broken`` fails.
    """
    (folder / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "conftest", str(folder)]
    environment = {n: v for n, v in os.environ.items() if not n.startswith(NOT_INHERITED)}
    environment |= {"BROKEN": str(broken), "WEFT_COMMIT": commit, "PYTHONPATH": str(TESTS)}
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, cwd=folder)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    counts = {outcome: int(n) for n, outcome in re.findall(r"(\d+) (passed|failed|skipped)", last)}
    return counts, done.stdout + done.stderr


def test_every_test_is_in_exactly_one_shard(tmp_path: Path) -> None:
    """The samples of two runs differ otherwise, and with them the places of all tests behind them."""
    names = [
        re.findall(r"::(test_\S+) (?:PASSED|SKIPPED)", run(tmp_path, "--shard", f"{i}/2")[1]) for i in (0, 1)
    ]
    assert min(map(len, names)) > 80
    both = Counter(names[0] + names[1])
    assert set(both.values()) == {1} and len(both) == 201
    assert {f"test_number[{n}]" for n in range(100)} < set(both)


def test_a_run_continues_a_stopped_one(tmp_path: Path) -> None:
    file = tmp_path / "outcomes"
    arguments = ("--resume", str(file), "-n", "2", "-k", "number or skipped")
    first, output = run(tmp_path, *arguments[:-1], "number and (7 or 1)", broken=7)
    assert first == {"failed": 1, "passed": 35}, output
    second, output = run(tmp_path, *arguments)
    assert second == {"passed": 65, "skipped": 1}, output
    lines = file.read_text().splitlines()
    assert lines[0] == "commit aaa"
    assert Counter(line.split()[0] for line in lines[1:]) == {"passed": 100, "failed": 1, "skipped": 1}
    other, output = run(tmp_path, *arguments, commit="bbb")
    assert other == {} and "expected outcomes of commit bbb, got 'commit aaa'" in output
