"""Conditions of the processes that are timed: the cores, niceness and scheduling policy of their threads.

A process may change them for each other process of its user. A candidate that binds the reference to
one core, or lowers its priority, makes it slow. So this module reads the conditions of the reference and of
Weft's own process whenever a candidate may have run, and compares. It never asks for certain conditions: a
user may bind all of Weft to one core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

# CPU time in stops, of all turns together, above which a candidate did not stay stopped.
MAX_PAUSED_CPU_SECONDS = 0.01
WATCH_SECONDS = 0.1  # at the end of a session, with all workers stopped
_POLICIES = {
    getattr(os, name): name for name in dir(os) if name.startswith("SCHED_") and name != "SCHED_RESET_ON_FORK"
}


class ThreadConditions(NamedTuple):
    """Conditions of one thread: its cores, its niceness, its scheduling policy and real-time priority."""

    cores: frozenset[int]
    niceness: int
    policy: int
    priority: int


@dataclass(frozen=True)
class Conditions:
    """Conditions of the threads of a process, by thread id; empty where the system does not tell."""

    threads: Mapping[int, ThreadConditions] = field(default_factory=dict)

    @property
    def cores(self) -> frozenset[int]:
        """Cores that at least one thread may use."""
        return frozenset(core for thread in self.threads.values() for core in thread.cores)

    @property
    def least_niceness(self) -> int:
        return min((thread.niceness for thread in self.threads.values()), default=0)

    @property
    def highest_priority(self) -> int:
        """Largest real-time priority of a thread; 0 without a real-time policy."""
        return max((thread.priority for thread in self.threads.values()), default=0)


class Worker(Protocol):
    """Worker process of a candidate, which can be stopped and whose conditions can be read.

    ``parent_conditions`` and ``start_conditions`` are those of Weft's process and of the worker before
    the candidate's code was loaded; the latter has one reading for each start of the worker.
    """

    @property
    def pid(self) -> int: ...
    @property
    def parent_conditions(self) -> Conditions: ...
    @property
    def start_conditions(self) -> list[Conditions]: ...
    @property
    def paused_cpu_seconds(self) -> float: ...
    def pause(self) -> None: ...


def read(pid: int) -> Conditions:
    """Return the conditions of a process; threads that end meanwhile are left out."""
    threads: dict[int, ThreadConditions] = {}
    if not hasattr(os, "sched_getaffinity"):
        return Conditions()
    with suppress(OSError):
        for tid in map(int, os.listdir(f"/proc/{pid}/task")):
            with suppress(OSError):
                threads[tid] = ThreadConditions(
                    cores=frozenset(os.sched_getaffinity(tid)),
                    niceness=os.getpriority(os.PRIO_PROCESS, tid),
                    policy=os.sched_getscheduler(tid),
                    priority=os.sched_getparam(tid).sched_priority,
                )
    return Conditions(threads)


def restore(conditions: Conditions) -> None:
    """Set the conditions of these threads again, as far as the system permits it."""
    for tid, thread in conditions.threads.items():
        with suppress(OSError):
            os.sched_setaffinity(tid, thread.cores)
            os.sched_setscheduler(tid, thread.policy, os.sched_param(thread.priority))
            os.setpriority(os.PRIO_PROCESS, tid, thread.niceness)  # last: lowering it takes a privilege


def describe_change(before: Conditions, after: Conditions) -> str:
    """Describe how a thread that is in both differs; empty if none does."""
    for tid, old in before.threads.items():
        new = after.threads.get(tid, old)
        if new != old:
            return _describe_difference(old, new)
    return ""


def describe_start(expected: Conditions, got: Conditions) -> str:
    """Describe how a process's first thread differs from another's; empty if it does not."""
    if not expected.threads or not got.threads:
        return ""
    old, new = next(iter(expected.threads.values())), next(iter(got.threads.values()))
    return _describe_difference(old, new) if old != new else ""


def describe_advantage(candidate: Conditions, reference: Conditions) -> str:
    """Describe what the candidate may use that the reference may not; empty if there is nothing."""
    if not candidate.threads or not reference.threads:
        return ""
    if cores := candidate.cores - reference.cores:
        return f"the candidate may use {_cores(cores)}, which the reference may not"
    if candidate.least_niceness < reference.least_niceness:
        return f"niceness {candidate.least_niceness}, the reference's is {reference.least_niceness}"
    if candidate.highest_priority > reference.highest_priority:
        return f"real-time priority {candidate.highest_priority}, the reference has none as high"
    return ""


def _describe_difference(old: ThreadConditions, new: ThreadConditions) -> str:
    if new.cores != old.cores:
        return f"{_cores(new.cores)} instead of {_cores(old.cores)}"
    if new.niceness != old.niceness:
        return f"niceness {new.niceness} instead of {old.niceness}"
    names = [_POLICIES.get(thread.policy, str(thread.policy)) for thread in (new, old)]
    return f"scheduling policy {names[0]} instead of {names[1]}, priority {new.priority}"


def _cores(cores: Iterable[int]) -> str:
    names = ", ".join(map(str, sorted(cores)))
    return f"core {names}" if names.isdigit() else f"cores {names}"


class ConditionsMonitor:
    """Conditions of Weft's process and of the trusted workers in one timing session.

    A thread's conditions must stay what they were when it was first seen. ``violations`` has the first
    violation of each external candidate, by name. ``workers`` and ``trusted`` are by candidate's name.
    """

    def __init__(self, workers: Mapping[str, Worker], trusted: Iterable[str]) -> None:
        self.external = {name: w for name, w in workers.items() if name not in set(trusted)}
        self.trusted = {name: w for name, w in workers.items() if name not in self.external}
        self.violations: dict[str, str] = {}
        # A thread of the reference's own pool may be bound while it warms up, as OpenMP does on request.
        self.is_settled = False
        self._seen: dict[int, Conditions] = {}
        if not self.external:
            return
        for worker in workers.values():
            worker.pause()
        self._compare_start()

    def _compare_start(self) -> None:
        """Compare with the readings from before the candidates were loaded."""
        own = self._seen[os.getpid()] = read(os.getpid())
        first = next(iter(self.external.values()))
        for worker in self.external.values():
            if change := describe_change(worker.parent_conditions, own):
                self._report("", f"Weft's own process has {change}")
                restore(worker.parent_conditions)  # or it would stay so for all that comes later
                own = self._seen[os.getpid()] = read(os.getpid())
        for worker in self.trusted.values():
            self._seen[worker.pid] = read(worker.pid)
            if difference := describe_start(first.start_conditions[0], worker.start_conditions[-1]):
                self._report("", f"the reference's process began with {difference}")

    def end_turn(self, name: str) -> None:
        """Stop the worker of the candidate whose turn ends, and compare all conditions."""
        if not self.external:
            return
        workers = {**self.external, **self.trusted}
        own_pid = os.getpid()
        if name in workers:
            workers[name].pause()
        for pid, whose in self._watched():
            # Before sampling a process may change its own threads in its own turn.
            its_turn = pid == workers[name].pid if name in workers else pid == own_pid
            now = read(pid)
            if self.is_settled or not its_turn:
                if change := describe_change(self._seen[pid], now):
                    self._report(name, f"{whose} has {change}")
                    restore(self._seen[pid])
                now = Conditions({**now.threads, **self._known(pid, now)})
            self._seen[pid] = now
        if name in self.external:
            self._compare_advantage(name)

    def _watched(self) -> list[tuple[int, str]]:
        own = (os.getpid(), "Weft's own process")
        return [own, *((w.pid, "the reference's process") for w in self.trusted.values())]

    def _known(self, pid: int, now: Conditions) -> dict[int, ThreadConditions]:
        """Return the first readings of the threads that are still there."""
        return {tid: c for tid, c in self._seen[pid].threads.items() if tid in now.threads}

    def _compare_advantage(self, name: str) -> None:
        candidate = read(self.external[name].pid)
        for worker in self.trusted.values():
            if advantage := describe_advantage(candidate, self._seen[worker.pid]):
                self._report(name, advantage)

    def watch_stopped(self) -> None:
        """Wait a little while all workers are stopped, and compare the CPU time that they used so far."""
        if self.external:
            time.sleep(WATCH_SECONDS)  # the pauses before may have been short
        for name, worker in self.external.items():
            if (seconds := worker.paused_cpu_seconds) > MAX_PAUSED_CPU_SECONDS:
                self._report(
                    name, f"its processes ran for {1000 * seconds:.0f} ms although they were stopped"
                )

    def _report(self, name: str, what: str) -> None:
        """Store a violation of the candidate whose turn it was, or of all that are external."""
        for culprit in [name] if name in self.external else self.external:
            self.violations.setdefault(culprit, what)
