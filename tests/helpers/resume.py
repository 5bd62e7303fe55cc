"""Runs of tests in parts: a file keeps the outcomes, and later runs leave out what passed or was skipped.

Its first line names the commit that was tested; each further line is the outcome, the seconds and the name of
a test. Several runs may write to one file at once, as those of ``tools/gpu_tests.py`` do.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from weft.machine.fingerprint import commit

DONE = ("passed", "skipped")
# File and how much of it a run reads: its workers must leave out the same tests, while the file grows.
VARIABLE = "WEFT_TESTS_DONE"


def _header() -> str:
    revision, dirty = commit()
    return f"commit {revision}{'-dirty' if dirty else ''}\n"


def begin(path: Path) -> None:
    """Create the file if it is missing, and let this run and its workers read what it holds now.

    Raises UsageError if it belongs to another commit.
    """
    with suppress(FileExistsError), path.open("x") as file:
        file.write(_header())
    content = path.read_text()
    if not content.startswith(_header()):
        first = content.partition("\n")[0]
        raise pytest.UsageError(
            f"--resume {path}: expected outcomes of {_header().strip()}, got {first!r}; hint: name a new file"
        )
    os.environ[VARIABLE] = f"{len(content.encode())}:{path.resolve()}"


def finished() -> set[str]:
    """Return the names of the tests that this run leaves out."""
    size, _, path = os.environ.get(VARIABLE, "").partition(":")
    if not path:
        return set()
    with Path(path).open("rb") as file:
        lines = file.read(int(size)).decode().splitlines()[1:]
    outcomes = (line.split(" ", 2) for line in lines)
    return {name for outcome, _seconds, name in outcomes if outcome in DONE}


class Recorder:
    """Plugin that appends each test's outcome to the file when the test has ended."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", buffering=1)  # a line at once
        self.outcomes: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        if report.failed or (report.skipped and self.outcomes.get(name) != "failed"):
            self.outcomes[name] = report.outcome
        if report.when == "teardown":
            outcome = self.outcomes.pop(name, "passed")
            self.file.write(f"{outcome} {self.seconds.pop(name):.2f} {name}\n")
