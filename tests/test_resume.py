"""A run of tests continues a stopped one (``--resume FILE``): nothing runs twice, and nothing is lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
SUITE = """
import os, pytest
@pytest.mark.parametrize("n", range(20))
def test_number(n):
    assert n != int(os.environ["BROKEN"])
def test_skipped():
    pytest.skip("not here")
"""


def run(folder: Path, broken: int, *arguments: str, commit: str = "aaa") -> tuple[dict[str, int], str]:
    """Run the small suite, whose test of the number ``broken`` fails; return the counts of outcomes."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "conftest", str(folder)]
    command += ["--resume", str(folder / "outcomes"), *arguments]
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("WEFT_TESTS_DONE", "PYTEST_"))}
    environment |= {"BROKEN": str(broken), "WEFT_COMMIT": commit, "PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    counts = {outcome: int(n) for n, outcome in re.findall(r"(\d+) (passed|failed|skipped)", last)}
    return counts, done.stdout + done.stderr


def test_a_run_continues_a_stopped_one(tmp_path: Path) -> None:
    workers = ("-n", "2")
    file = tmp_path / "outcomes"
    (tmp_path / "test_numbers.py").write_text(SUITE)
    first, output = run(tmp_path, 7, "-k", "number and (7 or 1)", *workers)
    assert first == {"failed": 1, "passed": 11}, output
    second, output = run(tmp_path, 99, *workers)
    assert second == {"passed": 9, "skipped": 1}, output
    third, output = run(tmp_path, 99, *workers)
    assert third == {}, output
    lines = file.read_text().splitlines()
    assert lines[0] == "commit aaa"
    assert Counter(line.split()[0] for line in lines[1:]) == {"passed": 20, "failed": 1, "skipped": 1}
    other, output = run(tmp_path, 99, *workers, commit="bbb")
    assert other == {} and "expected outcomes of commit bbb, got 'commit aaa'" in output
