"""Tests side by side, and those that measure time with nobody beside them (marker ``alone``).

Workers share two lock files. A test holds ``room`` together with the others, an ``alone`` one by
itself. Whoever comes passes the ``gate`` first, which one that waits to be alone keeps shut: else
the others, who come and go, would never leave it the room.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from weft.core import FORWARD, Case, Operator


@contextmanager
def _held(path: Path, how: int) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, how)
        yield  # closing the file lets go


def settle(most: float = 5.0) -> None:
    """Wait until the machine has hardly anything to do: what tests before this one left is ending.

    At most ``most`` seconds; a machine that never rests is no reason not to measure.
    """
    until = time.monotonic() + most
    while time.monotonic() < until and _busy(0.25) > 0.2:
        pass


def _busy(seconds: float) -> float:
    """CPUs that worked, on average, over so many seconds; 0 where the system does not tell."""
    counts = []
    for wait in (seconds, 0.0):
        try:
            words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        except OSError:
            return 0.0
        user, nice, system, _idle, _waiting, *more = map(int, words)
        counts.append(user + nice + system + sum(more))
        time.sleep(wait)
    return (counts[1] - counts[0]) / os.sysconf("SC_CLK_TCK") / seconds


LARGE_ELEMENTS = 1 << 28  # of one input
LARGE_OUTPUT = 1 << 30  # bytes


def is_large(operator: Operator, case: Case) -> bool:
    """Return True if a check of the case takes a large part of a GPU's memory."""
    written = operator.cost(case, FORWARD).written
    return max(i.numel for i in case.inputs) > LARGE_ELEMENTS or written > LARGE_OUTPUT


@contextmanager
def only_large_case() -> Iterator[None]:
    """Wait until no other worker checks a large case: two do not fit on a card together.

    The memory goes back to the card at the end: a neighbour cannot use what PyTorch caches here.
    """
    with _held(Path(tempfile.gettempdir()) / "weft-large-cases.lock", fcntl.LOCK_EX):
        try:
            yield
        finally:
            torch.cuda.empty_cache()


@contextmanager
def place(alone: bool, folder: Path | None = None) -> Iterator[None]:
    """A place to run a test in, among pytest-xdist's workers; no lock where there is one worker.

    Who is alone begins once the machine is quiet.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    stem = (folder or Path(tempfile.gettempdir())) / f"weft-tests-{run}"
    gate, room = stem.with_suffix(".gate"), stem.with_suffix(".room")
    how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with ExitStack() as kept:
        if folder or run:
            with _held(gate, how):
                kept.enter_context(_held(room, how))
        if alone:
            settle()
        yield
