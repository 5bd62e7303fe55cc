"""Locks that let a test which measures time run while no other test runs (marker ``alone``).

The pytest-xdist workers share two lock files. An ordinary test holds the ``run`` lock shared, a test
marked ``alone`` holds it exclusively. Each test takes the ``queue`` lock first, in the same mode, and
releases it once it has the ``run`` lock. An ``alone`` test that waits therefore blocks the start of new
tests; otherwise overlapping ordinary tests could keep the ``run`` lock shared for ever.
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
def _locked(path: Path, mode: int) -> Iterator[None]:
    """Hold a lock of ``mode`` (``fcntl.LOCK_SH`` or ``LOCK_EX``) on the file ``path``."""
    with path.open("w") as file:
        fcntl.flock(file, mode)
        yield  # closing the file releases the lock


def settle(most: float = 5.0, others: int = 0) -> None:
    """Wait until the CPUs are nearly idle, since processes of earlier tests may still be ending.

    The wait is at most ``most`` seconds: on a machine that is always busy the test runs nevertheless.
    ``others`` is the number of processes that run tests on other GPUs, each with a CPU of its own.
    """
    until = time.monotonic() + most
    while time.monotonic() < until and _busy(0.25) > 0.2 + others:
        pass


def _busy(seconds: float) -> float:
    """Return the average number of busy CPUs over ``seconds``; 0 without /proc/stat."""
    counts = []
    for wait in (seconds, 0.0):
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        except OSError:
            return 0.0
        user, nice, system, _idle, _waiting, *more = map(int, fields)
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
    """Wait until no other worker checks a large case: two of them do not fit on one GPU.

    At the end, return cached memory to the GPU: other workers cannot use this process's cache.
    """
    with _locked(Path(tempfile.gettempdir()) / "weft-large-cases.lock", fcntl.LOCK_EX):
        try:
            yield
        finally:
            torch.cuda.empty_cache()


@contextmanager
def execution_lock(alone: bool, folder: Path | None = None, others: int = 0) -> Iterator[None]:
    """Hold the lock that one test runs under, exclusively if ``alone``.

    Without pytest-xdist, and without ``folder`` for the lock files, there is no lock to take. An
    ``alone`` test begins once the machine is idle, but for ``others``, the runs on other GPUs.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    stem = (folder or Path(tempfile.gettempdir())) / f"weft-tests-{run}"
    mode = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with ExitStack() as locks:
        if folder or run:
            with _locked(stem.with_suffix(".queue"), mode):
                locks.enter_context(_locked(stem.with_suffix(".run"), mode))
        if alone:
            settle(others=others)
        yield
