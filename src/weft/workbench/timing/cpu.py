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
from weft.workbench.calls.buffers import (
    InputBuffers,
    MakeBuffers,
    Outputs,
    poison,
    storages,
    tensors_of,
)
from weft.workbench.timing.hooks import HookMonitor
from weft.workbench.timing.local_candidate import LocalTimedCandidate
from weft.workbench.timing.output_inspector import OutputInspector
from weft.workbench.timing.plan import (
    CROSS_CHECK_TRIES,
    MIN_SAMPLE_US,
    TARGET_SAMPLE_US,
    Candidate,
    Estimate,
    Plan,
)

# Bound at import, so that a candidate that replaces `time`'s functions changes nothing here.
_now = time.perf_counter_ns
_cpu_now = time.process_time_ns
_random = random.SystemRandom()  # a candidate could reproduce a seeded generator

SLOW_US = 60_000.0  # above it a rotation over buffers is replaced by a flush
WARM_BATCH_US = 2_000.0  # length of a batch of warm calls
AUDIT_US = 2 * TARGET_SAMPLE_US  # least length of an audit's calls, where there are enough
CROSS_CHECK_US = 20_000.0  # the two clocks are compared over this time
CPU_TIME_SLACK_NS = 5_000_000  # CPU time of the clock itself and the interpreter
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
        return 1000 * sorted(runner.sample() for _ in range(21))[10]

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
        output_bytes = sum(t.nbytes for t in tensors_of(call()))
        least = float("inf")
        deadline = _now() + 20_000_000  # 20 ms: a slow call is known well enough after two
        for _ in range(5):
            start = _now()
            call()
            least = min(least, (_now() - start) / 1000)
            if _now() > deadline:
                break
        return Estimate(us=least, output_bytes=output_bytes)

    def prepare(
        self, candidate: Candidate, buffer_sets: Sequence[InputBuffers], contents: MakeBuffers, plan: Plan
    ) -> LocalTimedCandidate:
        return LocalTimedCandidate(self.make_runner(candidate, buffer_sets, plan), buffer_sets, contents)

    def make_runner(self, candidate: Candidate, buffer_sets: Sequence[InputBuffers], plan: Plan) -> CpuRunner:
        calls = [candidate.bind(buffers) for buffers in buffer_sets]
        inspector = OutputInspector(buffer_sets, candidate.output_forms) if candidate.inspected else None
        return CpuRunner(
            self,
            calls,
            plan,
            subtract=self.loop_ns,
            protected=storages(buffer_sets),
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
        protected: frozenset[int] = frozenset(),
        inspector: OutputInspector | None = None,
        hooks: HookMonitor | None = None,
    ) -> None:
        self.backend, self.plan, self.subtract = backend, plan, subtract
        self._inspector, self._hooks = inspector, hooks
        self._protected = protected
        self.flags: set[str] = set()
        self._closures = list(closures)
        # An output lives until its buffer's next call, so that outputs rotate through memory too.
        self._outputs: list[Outputs | None] = [None] * len(self._closures)
        self._least = float("inf")  # us for a call, over all samples

    @property
    def calls(self) -> int:
        return len(self._closures)

    @property
    def outputs(self) -> Sequence[Outputs]:
        # The list itself: a copy would keep the outputs alive, and the next sample would need other memory.
        return self._outputs  # type: ignore[return-value]  # complete after a sample

    @property
    def violation(self) -> str:
        return self._inspector.violation if self._inspector else ""

    def _inspect(self, outputs: Sequence[object], first_call: int = 0) -> None:
        if self._inspector is not None:
            self._inspector.inspect(outputs, first_call)

    @property
    def audit_calls(self) -> int:
        """Calls that make one long sample: new contents for all buffers would take too long."""
        return min(self.calls, max(1, int(-(-AUDIT_US // max(self._least, 0.1)))))

    def sample(self) -> float:
        if self.plan.flush:
            self.backend.flush()
        us = self._time(self._closures)
        self._inspect(self._outputs)
        self._least = min(self._least, us)
        return us

    def _time(self, closures: Sequence[Callable[[], Outputs]]) -> float:
        outputs = self._outputs
        # One pair of readings around all calls: a reading costs as much as a small call.
        start = _now()
        for i, call in enumerate(closures):
            outputs[i] = call()
        spent = _now() - start
        if self._hooks is not None:
            self._hooks.after_clock(_now, start, spent)
        return max(0.0, spent / len(closures) - self.subtract) / 1000

    def repeat(self, repeats: int, warm: bool) -> float:
        """Repeat the timed calls back to back (``warm``: the first alone); return the total us."""
        closures = [self._closures[0]] * self.calls if warm else self._closures
        start = _now()
        for _ in range(repeats):
            self._time(closures)
        spent = (_now() - start) / 1000
        first = _random.randrange(max(1, self.calls - INSPECTED_REPEATS))
        self._inspect(self._outputs[first : first + INSPECTED_REPEATS], first)
        return spent

    def run_once(self, calls: int) -> tuple[float | None, list[Outputs]]:
        """Time the first calls once, from a clean cache and over poisoned outputs.

        A call on another buffer precedes them where there is one, so that the time does not include
        code that has left the instruction cache.
        """
        # A call that returns an earlier output without computing it would now return poison.
        for output in self._outputs:
            if output is not None:
                poison(output, self._protected)
        lead = self._closures[-1] if calls < self.calls else None
        self.backend.evict()
        if lead is not None:
            lead()
        us = self._time(self._closures[:calls])
        self._inspect(self._outputs[:calls])
        outputs = [o for o in self._outputs[:calls] if o is not None]
        self._outputs = [None] * self.calls
        return us, outputs

    def sample_warm(self) -> float:
        """Time calls on one buffer, for at least the length of a sample."""
        call, n, spent = self._closures[0], 1, 0
        # Random, so that no call can know that it is the last one, whose output is inspected. The other
        # outputs are not kept: with them alive the calls would need other memory.
        least = MIN_SAMPLE_US * 1000 * (1.0 + _random.random())
        start = _now()
        while spent < least or (spent < WARM_BATCH_US * 1000 and n < 10):
            call()
            n += 1
            spent = _now() - start
        output = call()
        spent = _now() - start
        self._inspect([output])
        return spent / n / 1000

    sample_host = sample_warm  # a CPU has no launch to leave out: a warm call is the host's time

    def cross_check(self, cold: float = 0.0, busy: float = 1.0) -> list[str]:
        """Compare CPU time with wall time, until the process is idle again.

        Work that continues after a call returned takes CPU time that the wall clock did not count.
        All cores together cannot take more CPU time than their number times the wall time.
        """
        for _ in range(CROSS_CHECK_TRIES):
            wall, cpu = self._wall_and_cpu_time()
            # 10 % and 30 us for the resolution of the CPU clock, and twice the spinning of torch's pool.
            allowed = self.backend.cores * (1.1 * wall + 30_000) + 2 * self.backend.spin_ns
            if cpu <= allowed + CPU_TIME_SLACK_NS:
                return []
        return [f"suspect: clocks disagree ({cpu / 1e6:.1f} ms of CPU time in {wall / 1e6:.1f} ms)"]

    def _wall_and_cpu_time(self) -> tuple[int, int]:
        """Return the wall time of many calls and the CPU time until the process is idle (ns)."""
        call, n, wall, cpu = self._closures[0], 0, 0, _cpu_now()
        start = _now()
        while wall < CROSS_CHECK_US * 1000 and n < 1000:
            call()
            n += 1
            wall = _now() - start
        self.wait()
        return wall, _cpu_now() - cpu

    def replay(self) -> list[Outputs]:
        """Make the timed calls once more; return their outputs."""
        self.sample()
        outputs = [o for o in self._outputs if o is not None]
        self._outputs = [None] * self.calls
        return outputs

    def call(self, index: int) -> Outputs:
        output = self._closures[index]()
        self._inspect([output], index)
        return output

    def wait(self) -> None:
        wait_until_idle()


def wait_until_idle() -> None:
    """Wait until this process uses no CPU time, for half a second at most."""
    idle = 0
    for _ in range(250):
        before = _cpu_now()
        time.sleep(0.002)
        idle = idle + 1 if _cpu_now() - before < IDLE_SHARE * 2_000_000 else 0
        if idle == IDLE_READINGS:
            return
