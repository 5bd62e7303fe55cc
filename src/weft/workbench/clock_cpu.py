"""One sample on a CPU: calls over distinct slots between two readings of the wall clock.

Where the slots do not outgrow the last-level cache, a buffer of twice its size is written first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from weft import machine
from weft.workbench.local_rig import LocalRig
from weft.workbench.plan import AIM, CROSS_TRIES, SHORTEST, Candidate, Estimate, Plan
from weft.workbench.slots import MakeSlot, Result, Slot, poison, storages, tensors_of

_now = time.perf_counter_ns
_cpu_now = time.process_time_ns

SLOW = 60_000.0  # us: a rotation that lasts longer gives way to a flush
BATCH = 2_000.0  # us that a batch of warm calls lasts
AUDIT = 2 * AIM  # us that an audit's calls last at least, where there are as many
CROSS = 20_000.0  # us that the two clocks are compared over
SLACK = 5_000_000  # ns of CPU time that is let pass: the clock's own, the interpreter's
IDLE = 0.2  # share of a core under which the process counts as idle
QUIET = 4  # readings in a row, since a busy machine may leave it waiting for its turn


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CpuStand:
    """Where a CPU's rigs are made."""

    slow = SLOW

    def __init__(self) -> None:
        self.cache = machine.l2_bytes("cpu")
        self.cores = _cores()
        # Ones and not zeros, which a system may back by one page until they are written.
        self.flusher = torch.ones(2 * self.cache // 4, dtype=torch.float32)
        self.per_call = self._empty_call()
        self.overhead = self.per_call / 1000
        self.tail = max(self._spinning() for _ in range(3))

    def _empty_call(self) -> float:
        """Nanoseconds that the timing loop itself costs a call: the median of empty ones."""
        nothing = torch.empty(0)
        rig = CpuRig(self, [lambda: nothing] * 100, Plan(calls=100, flush=False), subtract=0.0)
        return 1000 * sorted(rig.sample() for _ in range(21))[10]

    def _spinning(self) -> int:
        """Nanoseconds of CPU time that torch's own threads spin for after a call, waiting for the
        next: it is no work left over."""
        torch.tanh(self.flusher[: 1 << 20])
        before = _cpu_now()
        wait_until_idle()
        return _cpu_now() - before

    def context(self) -> AbstractContextManager[None]:
        return nullcontext()

    def memory(self) -> int:
        """Bytes that a measurement may take: a quarter of the machine's."""
        return (machine.query("cpu").memory_bytes or 4 << 30) // 4

    def flush(self) -> None:
        self.flusher.add_(1.0)

    def evict(self) -> None:
        """Fill the cache with lines that nobody will have to write back, by reading alone."""
        self.flusher.sum()

    def estimate(self, candidate: Candidate, slot: Slot) -> Estimate:
        call = candidate.bind(slot)
        output_bytes = sum(t.nbytes for t in tensors_of(call()))
        least = float("inf")
        until = _now() + 20_000_000
        for _ in range(5):
            start = _now()
            call()
            least = min(least, (_now() - start) / 1000)
            if _now() > until:
                break
        return Estimate(us=least, output_bytes=output_bytes)

    def entrant(
        self, candidate: Candidate, slots: Sequence[Slot], contents: MakeSlot, plan: Plan
    ) -> LocalRig:
        return LocalRig(self.rig(candidate, slots, plan), slots, contents)

    def rig(self, candidate: Candidate, slots: Sequence[Slot], plan: Plan) -> CpuRig:
        calls = [candidate.bind(slot) for slot in slots]
        return CpuRig(self, calls, plan, subtract=self.per_call, protected=storages(slots))


class CpuRig:
    """A candidate bound to its slots. Times are in us a call."""

    def __init__(
        self,
        stand: CpuStand,
        closures: Sequence[Callable[[], Result]],
        plan: Plan,
        *,
        subtract: float,
        protected: frozenset[int] = frozenset(),
    ) -> None:
        self.stand, self.plan, self.subtract = stand, plan, subtract
        self._protected = protected
        self.flags: set[str] = set()
        self._closures = list(closures)
        # An output lives until its slot's next call, so that outputs rotate through memory too.
        self._outputs: list[Result | None] = [None] * len(self._closures)
        self._least = float("inf")  # us of a sample's call

    @property
    def calls(self) -> int:
        return len(self._closures)

    @property
    def audited(self) -> int:
        """As many calls as make a long sample: drawing contents for all would take too long."""
        return min(self.calls, max(1, int(-(-AUDIT // max(self._least, 0.1)))))

    def sample(self) -> float:
        if self.plan.flush:
            self.stand.flush()
        us = self._timed(self._closures)
        self._least = min(self._least, us)
        return us

    def _timed(self, closures: Sequence[Callable[[], Result]]) -> float:
        outputs = self._outputs
        start = _now()
        for i, call in enumerate(closures):
            outputs[i] = call()
        spent = _now() - start
        return max(0.0, spent / len(closures) - self.subtract) / 1000

    def repeat(self, repeats: int, warm: bool) -> float:
        """The timed calls many times over with nothing in between; ``warm`` the first alone. The
        time (us) that all of it took by this process's clock."""
        closures = [self._closures[0]] * self.calls if warm else self._closures
        start = _now()
        for _ in range(repeats):
            self._timed(closures)
        return (_now() - start) / 1000

    def once(self, calls: int) -> tuple[float | None, list[Result]]:
        """The first calls once more from a clean cache, over poisoned answers. A call beyond them
        goes before, where there is one: code that has gone cold is no part of it."""
        for output in self._outputs:
            if output is not None:
                poison(output, self._protected)
        lead = self._closures[-1] if calls < self.calls else None
        self.stand.evict()
        if lead is not None:
            lead()
        us = self._timed(self._closures[:calls])
        outputs = [o for o in self._outputs[:calls] if o is not None]
        self._outputs = [None] * self.calls
        return us, outputs

    def warm(self) -> float:
        """The same input again and again, for at least a sample's length."""
        call, n, spent = self._closures[0], 0, 0
        start = _now()
        while spent < SHORTEST * 1000 or (spent < BATCH * 1000 and n < 10):
            call()
            n += 1
            spent = _now() - start
        return spent / n / 1000

    host = warm  # a CPU has no launch that could be left out: a warm call is all there is

    def cross_check(self, cold: float = 0.0, busy: float = 1.0) -> list[str]:
        """CPU time against wall time: work that goes on after a call returned is CPU time that no
        wall clock saw, and no more cores than there are can have been busy meanwhile."""
        for _ in range(CROSS_TRIES):
            wall, cpu = self._both_clocks()
            if cpu <= self.stand.cores * (1.1 * wall + 30_000) + 2 * self.stand.tail + SLACK:
                return []
        return [f"suspect: clocks disagree ({cpu / 1e6:.1f} ms of CPU time in {wall / 1e6:.1f} ms)"]

    def _both_clocks(self) -> tuple[int, int]:
        """Wall time of many calls, and the CPU time until the process is idle again (ns)."""
        call, n, wall, cpu = self._closures[0], 0, 0, _cpu_now()
        start = _now()
        while wall < CROSS * 1000 and n < 1000:
            call()
            n += 1
            wall = _now() - start
        self.wait()
        return wall, _cpu_now() - cpu

    def replay(self) -> list[Result]:
        """The timed calls once more, and what they returned."""
        self.sample()
        outputs = [o for o in self._outputs if o is not None]
        self._outputs = [None] * self.calls
        return outputs

    def call(self, index: int) -> Result:
        return self._closures[index]()

    def wait(self) -> None:
        wait_until_idle()


def wait_until_idle() -> None:
    """Wait, half a second at most, until this process uses no CPU time."""
    quiet = 0
    for _ in range(250):
        before = _cpu_now()
        time.sleep(0.002)
        quiet = quiet + 1 if _cpu_now() - before < IDLE * 2_000_000 else 0
        if quiet == QUIET:
            return
