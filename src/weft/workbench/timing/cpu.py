"""Timing backend of a CPU: one sample is a loop of calls over distinct buffers between two readings
of the wall clock.

Where the buffers do not outgrow the last-level cache, a buffer of twice its size is written first.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from weft import machine
from weft.workbench.calls import heap
from weft.workbench.calls.buffers import InputBuffers, MakeBuffers, Outputs, tensors_of
from weft.workbench.calls.make_calls import call_once, make_calls, schedule, schedule_row
from weft.workbench.timing.composed_candidate import ComposedCandidate
from weft.workbench.timing.hooks import HookMonitor
from weft.workbench.timing.local_candidate import prepare
from weft.workbench.timing.output_inspector import OutputInspector
from weft.workbench.timing.plan import COLD, Candidate, Estimate, Plan, RunTimes

# Bound at import, so that a candidate that replaces `time`'s functions changes nothing here.
_now = time.perf_counter_ns
_cpu_now = time.process_time_ns
_random = random.SystemRandom()  # a candidate could reproduce a seeded generator

SLOW_US = 60_000.0  # above it a rotation over buffers is replaced by a flush
IDLE_SHARE = 0.2  # share of a core below which the process counts as idle
# Consecutive idle readings: on a busy machine one reading may only show that the process waited
# for a core.
IDLE_READINGS = 4
INSPECTED_REPEATS = 8  # outputs of repeats that are inspected: all would take too much of the wall time


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CpuTimingBackend:
    """Timing on the CPU of this process."""

    slow_us = SLOW_US

    def __init__(self) -> None:
        heap.keep_freed_memory()
        self.cache_bytes = machine.l2_bytes("cpu")
        self.cores = _cores()
        # Ones and not zeros: a system may map zeros to one page until they are written.
        self.flush_buffer = torch.ones(2 * self.cache_bytes // 4, dtype=torch.float32)
        self.loop_ns = self._measure_loop()
        # A CPU sample subtracts the loop's cost for each call, not once for the sample.
        self.overhead_us = self.loop_ns / 1000
        self.spin_ns = max(self._measure_spin() for _ in range(3))

    def _measure_loop(self) -> float:
        """Return the ns that the timing loop itself costs for each call: the median of empty calls."""
        empty = torch.empty(0)
        runner = CpuRunner(self, [lambda: empty] * 100, Plan(calls=100, flush=False), subtract=0.0)
        return 10 * sorted(runner.run(range(100)).total_us for _ in range(21))[10]

    def _measure_spin(self) -> int:
        """Return the ns of CPU time that torch's threads spin after a call, waiting for the next.

        It is not work that a call left behind, so ``cross_check`` allows it.
        """
        torch.tanh(self.flush_buffer[: 1 << 20])
        before = _cpu_now()
        wait_until_idle()
        return _cpu_now() - before

    def context(self) -> AbstractContextManager[None]:
        return nullcontext()

    def available_memory(self) -> int:
        """Return the bytes that a measurement may take: a quarter of the machine's memory."""
        return (machine.query("cpu").memory_bytes or 4 << 30) // 4

    def flush(self) -> None:
        self.flush_buffer.add_(1.0)

    def evict(self) -> None:
        """Fill the cache with clean lines by reading alone: no write-back remains for later."""
        self.flush_buffer.sum()

    def estimate(self, candidate: Candidate, buffers: InputBuffers) -> Estimate:
        call = candidate.bind(buffers)
        output_bytes = sum(t.nbytes for t in tensors_of(call_once(call)))
        least = float("inf")
        # 20 ms: a slow call is known well enough after two. The call before started threads and took memory
        # from the system; the first of a process may last 10 ms for it.
        deadline = _now() + 20_000_000
        for _ in range(5):
            start = _now()
            call_once(call)
            least = min(least, (_now() - start) / 1000)
            if _now() > deadline:
                break
        return Estimate(us=least, output_bytes=output_bytes)

    def prepare(
        self, candidate: Candidate, buffer_sets: Sequence[InputBuffers], contents: MakeBuffers, plan: Plan
    ) -> ComposedCandidate:
        return prepare(self.make_runner(candidate, buffer_sets, plan), buffer_sets, contents, "cpu")

    def make_runner(self, candidate: Candidate, buffer_sets: Sequence[InputBuffers], plan: Plan) -> CpuRunner:
        calls = [candidate.bind(buffers) for buffers in buffer_sets]
        inspector = OutputInspector(buffer_sets, candidate.output_forms) if candidate.inspected else None
        return CpuRunner(
            self,
            calls,
            plan,
            subtract=self.loop_ns,
            inspector=inspector,
            hooks=candidate.hooks,
        )


class CpuRunner:
    """Candidate bound to its buffers on a CPU. Times are us for each call."""

    def __init__(
        self,
        backend: CpuTimingBackend,
        closures: Sequence[Callable[[], Outputs]],
        plan: Plan,
        *,
        subtract: float,
        inspector: OutputInspector | None = None,
        hooks: HookMonitor | None = None,
    ) -> None:
        self.backend, self.plan, self.subtract = backend, plan, subtract
        self._inspector, self._hooks = inspector, hooks
        self.flags: set[str] = set()
        self._closures = list(closures)
        # An output lives until its buffer's next call, so that outputs rotate through memory too.
        self._outputs: list[Outputs | None] = [None] * (len(self._closures) + 1)
        self._row: list[Outputs | None] = []  # by position, of the last run if it kept them so

    @property
    def calls(self) -> int:
        return self.plan.calls

    @property
    def violation(self) -> str:
        return self._inspector.violation if self._inspector else ""

    def outputs(self) -> Sequence[Outputs | None]:
        """Return the outputs of the last run, by index or position."""
        # The list itself: a copy would keep the outputs alive, and the next sample would need other memory.
        return self._row or self._outputs

    def kept_outputs(self) -> Sequence[Outputs | None]:
        return [*self._outputs, *self._row]

    def rest(self) -> None:
        """Do nothing: there is no graph, and the memory of outputs is used again by the next call."""

    def drop_spare_outputs(self) -> None:
        """Drop nothing: the next calls free them, which then find the same memory."""

    def run(
        self,
        indexes: Sequence[int],
        repeats: int = 1,
        mode: str = COLD,
        kept_positions: Sequence[int] | None = None,
    ) -> RunTimes:
        """Make the calls of these indexes, ``repeats`` times, between two readings of the clock."""
        self._row = [] if kept_positions is None else [None] * (len(indexes) + 1)
        scheduled, outputs = schedule(self._closures, indexes), self._outputs
        if kept_positions is not None:
            scheduled, outputs = schedule_row(self._closures, indexes, kept_positions), self._row
        if self._hooks is not None:
            self._hooks.before_clock()
        if mode == COLD and self.plan.flush:
            self.backend.flush()
        cpu_ns = _cpu_now()
        # One pair of readings around all calls: a reading costs as much as a small call.
        start = _now()
        for _ in range(repeats):
            make_calls(scheduled, outputs)
        spent = _now() - start
        if self._hooks is not None:
            self._hooks.after_clock(_now, start, spent)
        if kept_positions is None:
            self._inspect(indexes, repeats)
        elif self._inspector is not None:
            self._inspector.inspect([self._row[p] for p in kept_positions])
        us = max(0.0, spent / (repeats * len(indexes)) - self.subtract) / 1000
        return RunTimes(us=us, total_us=spent / 1000, wall_us=spent / 1000, cpu_ns=cpu_ns)

    def _inspect(self, indexes: Sequence[int], repeats: int) -> None:
        """Inspect the outputs of a run; of many repeats, a random few."""
        if self._inspector is None:
            return
        first, last = indexes[0], indexes[-1]
        if repeats > 1 and last - first >= INSPECTED_REPEATS:
            first += _random.randrange(last - first - INSPECTED_REPEATS + 2)
            last = first + INSPECTED_REPEATS - 1
        self._inspector.inspect(self._outputs[first : last + 1], first)

    def evict(self) -> None:
        self.backend.evict()

    def wait(self) -> int:
        """Wait until this process is idle; return its CPU clock."""
        wait_until_idle()
        return _cpu_now()


def wait_until_idle() -> None:
    """Wait until this process uses no CPU time, for half a second at most."""
    idle = 0
    for _ in range(250):
        before = _cpu_now()
        time.sleep(0.002)
        idle = idle + 1 if _cpu_now() - before < IDLE_SHARE * 2_000_000 else 0
        if idle == IDLE_READINGS:
            return
