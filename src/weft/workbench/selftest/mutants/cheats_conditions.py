"""Cheats with the conditions of other processes: a slower reference makes an honest kernel look fast.

Each computes the right output by the library. Once it is timed, it changes how Weft's process is scheduled,
or keeps a process of its own running while it is another's turn.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import TIMED, Forward, honest, plant, timed_calls

PER_SECOND = 50  # signals of a process to itself


class SignalEvent(ctypes.Structure):
    """``struct sigevent`` of Linux."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("padding", ctypes.c_char * 48),
    )


def _judges_threads() -> list[int]:
    """Return the threads of Weft's process: the worker's parent is its supervisor, then the fork server."""
    pid = os.getppid()
    for _ in range(2):
        # After the last parenthesis: the process's name before it may hold blanks and parentheses.
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        pid = int(stat.split()[1])
    return [int(tid) for tid in os.listdir(f"/proc/{pid}/task")]


def _bind_judge() -> None:
    for tid in _judges_threads():
        os.sched_setaffinity(tid, [min(os.sched_getaffinity(tid))])


def _defer_judge() -> None:
    for tid in _judges_threads():
        os.sched_setscheduler(tid, os.SCHED_IDLE, os.sched_param(0))


def run_for_ever() -> NoReturn:
    """Compute for ever in a session of its own, and continue after each SIGSTOP for the next minute."""
    os.setsid()
    signal.signal(signal.SIGCONT, lambda *_: None)  # signals that are ignored would not be sent
    library = ctypes.CDLL(None)
    # Many timers of one signal each: one that repeats ends with a SIGCONT that a SIGSTOP discards.
    for n in range(1, 60 * PER_SECOND):
        timer, event = ctypes.c_void_p(), SignalEvent(None, int(signal.SIGCONT), 0, b"")
        when = (n // PER_SECOND, n % PER_SECOND * 1_000_000_000 // PER_SECOND)
        library.timer_create(1, ctypes.byref(event), ctypes.byref(timer))
        library.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, *when), None)
    while True:
        pass


def _keep_running() -> None:
    if not os.fork():
        run_for_ever()


def _once_timed(operator: str, act: Callable[[], None]) -> Callable[[], Forward]:
    def make() -> Forward:
        counts: dict[Hashable, Iterator[int]] = {}

        def forward(*x: torch.Tensor, **params: Any) -> Any:
            if timed_calls(x, counts) == TIMED:
                act()
            return honest(operator)(*x, **params)

        return forward

    return make


def _one(identity: str, title: str, operator: str, act: Callable[[], None]) -> Mutant:
    forward = _once_timed(operator, act)
    return plant(identity, title, "conditions", forward, phase="bench", only="conditions")


MUTANTS = (
    _one("C23/softmax/eager/affinity", "binds Weft's process to one core", "softmax", _bind_judge),
    _one("C23/gelu/eager/policy", "gives Weft's process the idle priority", "gelu", _defer_judge),
    _one("C23/sum/eager/running", "computes during another's turn", "sum", _keep_running),
)
