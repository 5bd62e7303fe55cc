"""Timing backend of an NVIDIA GPU: one sample is a CUDA graph of calls over distinct buffers between
two events.

The events, the graph launch and the work before them are queued while the GPU still runs a spin
kernel, so that no launch from the host falls between the events. A sample where the GPU was ahead of
the queue is taken again. The cost of two events and a graph launch is measured and subtracted.

Part of the L2 can be set aside for accesses marked persisting
(``CU_LIMIT_PERSISTING_L2_CACHE_SIZE``). Such lines outlive any flush, so a timing resets the limit.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch

from weft import machine
from weft.machine import driver
from weft.workbench.calls.buffers import (
    InputBuffers,
    MakeBuffers,
    Outputs,
    poison,
    storages,
    tensors_of,
)
from weft.workbench.calls.graph_capture import graph_capture
from weft.workbench.timing.local_candidate import LocalTimedCandidate
from weft.workbench.timing.output_inspector import OutputInspector
from weft.workbench.timing.plan import CROSS_CHECK_TRIES, Candidate, Estimate, Plan

# Bound at import, so that a candidate that replaces them in `time` or `torch` changes nothing here.
_now = time.perf_counter_ns
_Event, _Graph = torch.cuda.Event, torch.cuda.CUDAGraph
_synchronize, _sleep = torch.cuda.synchronize, torch.cuda._sleep
_random = random.SystemRandom()  # a candidate could reproduce a seeded generator

SLOW_US = 50_000.0  # above it a rotation over buffers is replaced by a flush
SPIN_CYCLES = 200_000  # about 0.1 ms; doubled until the host's queue is ahead of the GPU
MAX_SPIN_CYCLES = 40_000_000
CROSS_CHECK_US = 5_000.0  # the two clocks are compared over this time
HOST_CALLS = 20  # calls in a batch: far fewer than the launch queue holds
EMPTY_KERNELS = (1, 33)  # sizes of the two empty graphs whose times give the overhead
PERSISTING_L2_LIMIT = 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE in cuda.h


@cache
def _driver_library() -> ctypes.CDLL | None:
    return driver.library()


def persisting_l2_bytes() -> int:
    """Return the bytes of L2 that this process has set aside; 0 where the card has no such limit."""
    library, size = _driver_library(), ctypes.c_size_t()
    if library is None or library.cuCtxGetLimit(ctypes.byref(size), PERSISTING_L2_LIMIT):
        return 0
    return size.value


def release_persisting_l2() -> None:
    """Set no part of the L2 aside, and make the persisting lines ordinary ones."""
    library = _driver_library()
    if library is not None:
        library.cuCtxResetPersistingL2Cache()
        library.cuCtxSetLimit(PERSISTING_L2_LIMIT, ctypes.c_size_t(0))


class CudaTimingBackend:
    """Timing on a GPU: one stream for all candidates, the flush buffer and the measured overhead.

    With ``whole_cache`` no part of the L2 may be set aside: it is released, and flagged.
    """

    slow_us = SLOW_US

    def __init__(self, *, whole_cache: bool = True) -> None:
        self.whole_cache, self.set_aside_bytes = whole_cache, 0
        _synchronize()  # creates the context: the L2 limit belongs to a context
        release_persisting_l2()
        self.cache_bytes = machine.l2_bytes("cuda")
        self.stream = torch.cuda.Stream()
        # Twice the L2: writing it once leaves none of a candidate's lines, whatever the replacement.
        self.flush_buffer = torch.zeros(2 * self.cache_bytes // 4, dtype=torch.int32, device="cuda")
        self.events = [_Event(enable_timing=True) for _ in range(2)]
        with self.context():
            self.overhead_us = self._measure_overhead(graphed=True)
            self.plain_overhead = self._measure_overhead(graphed=False)

    @contextmanager
    def context(self) -> Iterator[None]:
        """Run everything, inputs and oracle included, on the backend's own stream.

        A graph cannot be captured on the default stream, and a backward runs on the stream of its
        forward.
        """
        _synchronize()
        if self.whole_cache and (size := persisting_l2_bytes()):
            self.set_aside_bytes = size
            release_persisting_l2()
        with torch.cuda.stream(self.stream):
            yield
        _synchronize()

    def available_memory(self) -> int:
        free, _ = torch.cuda.mem_get_info()
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())

    def flush(self) -> None:
        self.flush_buffer.zero_()

    def evict(self) -> None:
        """Fill the cache with clean lines by reading alone: no write-back remains for later."""
        self.flush_buffer.sum()

    def timed(self, before: Callable[[], object], body: Callable[[], object], spin: int) -> float:
        """Return the us between two events around ``body``.

        The result is negative where the GPU reached the first event before all was queued: the
        time then includes launches from the host.
        """
        start, end = self.events
        # The GPU spins while the host queues everything below: no launch then falls between the events.
        if spin:
            _sleep(spin)
        before()
        start.record()
        body()
        end.record()
        # Asked after all is queued: if the first event has already happened, the spin was too short.
        gpu_was_ahead = spin > 0 and start.query()
        end.synchronize()
        us = 1000.0 * float(start.elapsed_time(end))
        return -us if gpu_was_ahead else us

    def _measure_overhead(self, graphed: bool) -> float:
        """Return the us that events (and a graph launch) cost.

        It is the intercept of the line through the times of 1 and of 33 empty kernels, medians of
        21 samples after 3 that are dropped.
        """
        medians = []
        for count in EMPTY_KERNELS:
            body = _launch_empty_kernels(count)
            if graphed:
                graph, _ = capture([_launch_empty_kernels(count)], keep=False)
                body = graph.replay
            samples = [abs(self.timed(lambda: None, body, 10 * SPIN_CYCLES)) for _ in range(24)]
            medians.append(float(np.median(samples[3:])))
        # An empty kernel costs time, too; the slope is that cost and the rest is the events' own.
        slope = (medians[1] - medians[0]) / (EMPTY_KERNELS[1] - EMPTY_KERNELS[0])
        return max(0.0, medians[0] - EMPTY_KERNELS[0] * slope)

    def estimate(self, candidate: Candidate, buffers: InputBuffers) -> Estimate:
        """Estimate one call; the time includes launches where they cannot be queued ahead."""
        call = candidate.bind(buffers)
        output_bytes = sum(t.nbytes for t in tensors_of(call()))
        call()  # a second call: the first one compiles, tunes and fills the allocator
        _synchronize()
        least = min(abs(self.timed(lambda: None, call, 5 * SPIN_CYCLES)) for _ in range(4))
        return Estimate(us=least, output_bytes=output_bytes)

    def prepare(
        self, candidate: Candidate, buffer_sets: Sequence[InputBuffers], contents: MakeBuffers, plan: Plan
    ) -> LocalTimedCandidate:
        return LocalTimedCandidate(self.make_runner(candidate, buffer_sets, plan), buffer_sets, contents)

    def make_runner(
        self, candidate: Candidate, buffer_sets: Sequence[InputBuffers], plan: Plan
    ) -> CudaRunner:
        return CudaRunner(self, candidate, buffer_sets, plan)


def _launch_empty_kernels(count: int) -> Callable[[], None]:
    def launch() -> None:
        for _ in range(count):
            _sleep(0)

    return launch


def capture(
    calls: Sequence[Callable[[], Any]], *, keep: bool, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, list[Outputs]]:
    """Capture calls into one CUDA graph on the current stream; return their outputs if ``keep``.

    Raises whatever a call raises, and ``RuntimeError`` for operations that a capture forbids.
    """
    # A graph replays without the host: a launch from Python costs more than a small kernel takes.
    graph = _Graph()
    outputs: list[Outputs] = []
    with graph_capture(graph, torch.cuda.current_stream(), pool=pool):
        for call in calls:
            output = call()
            if keep:
                outputs.append(output)
            del output  # frees its memory for the next call of the same graph
    return graph, outputs


class CudaRunner:
    """Candidate bound to its buffers and captured in a graph. Times are us for each call."""

    def __init__(
        self,
        backend: CudaTimingBackend,
        candidate: Candidate,
        buffer_sets: Sequence[InputBuffers],
        plan: Plan,
    ) -> None:
        self.backend, self.plan, self.spin = backend, plan, SPIN_CYCLES
        self.flags: set[str] = set()
        self._protected = storages(buffer_sets)
        self._inspector = (
            OutputInspector(buffer_sets, candidate.output_forms) if candidate.inspected else None
        )
        self._closures = [candidate.bind(buffers) for buffers in buffer_sets]
        # Compile, tune and allocate before the capture, which forbids all of that.
        for call in (*self._closures[:2], self._closures[-1]):
            call()
        _synchronize()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: list[Outputs] = []
        self._replay_warm: Callable[[], object] | None = None
        self._lead: Callable[[], object] = self._closures[-1]
        try:
            self._graph, self._outputs = capture(self._closures, keep=True)
            # A replay returns no new objects: these are the outputs of all samples.
            self._inspect(self._outputs)
            # The same memory pool: the lead needs no memory beside the graph's.
            lead, _ = capture(self._closures[-1:], keep=False, pool=self._graph.pool())
            self._lead = lead.replay
        except torch.OutOfMemoryError:
            raise  # timing call by call would need the same memory
        except Exception as error:  # noqa: BLE001 - libraries raise types of their own
            self._graph, self._outputs = None, []
            self._flag_failed_capture(error)

    def _flag_failed_capture(self, error: Exception) -> None:
        """Time call by call without a graph; work left on a side stream is suspect."""
        _synchronize()
        self.flags.add("no-graph")
        if "unjoined" in str(error).lower():
            self.flags.add("suspect: side-stream: work was left running on another stream")

    @property
    def calls(self) -> int:
        return len(self._closures)

    @property
    def outputs(self) -> Sequence[Outputs]:
        return self._outputs

    @property
    def violation(self) -> str:
        return self._inspector.violation if self._inspector else ""

    def _inspect(self, outputs: Sequence[object], first_call: int = 0) -> None:
        if self._inspector is not None:
            self._inspector.inspect(outputs, first_call)

    def _body(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        if self._inspector is None:
            for call in self._closures:
                call()
            return
        # An output lives until its buffer's next call, as those of a graph do: all of them are inspected.
        self._outputs = self._outputs or [None] * self.calls  # type: ignore[list-item]  # complete below
        for index, call in enumerate(self._closures):
            self._outputs[index] = call()

    def _time(self, before: Callable[[], object], body: Callable[[], object]) -> float:
        """Take a sample behind a spin that is long enough, or without a spin where none is."""
        while self.spin:
            us = self.backend.timed(before, body, self.spin)
            if us >= 0:
                return us
            self.spin *= 2  # the host was slow this time; the longer spin is kept for later samples
            if self.spin > MAX_SPIN_CYCLES:
                self.spin = 0
                self.flags.add("host-bound: the call waits for the host, which its time includes")
        return self.backend.timed(before, body, 0)

    def sample(self) -> float:
        """Take a cold sample.

        With a flush the cache holds other lines. Without one the last call comes first, untimed:
        the timed calls then find the cache, and the lines that wait for write-back, as in a long
        run of such calls.
        """
        before = self.backend.flush if self.plan.flush else self._lead
        # Without a flush a lead call puts the cache into the state between two calls of a long run.
        us = self._per_call(self._time(before, self._body))
        if self._graph is None:
            self._inspect(self._outputs)
        if self.backend.whole_cache:
            set_aside = persisting_l2_bytes() or self.backend.set_aside_bytes
            if set_aside:
                release_persisting_l2()
                self.flags.add(f"suspect: L2 set aside: {set_aside} bytes that outlive a flush")
        return us

    @property
    def audit_calls(self) -> int:
        """All calls: one graph holds them."""
        return self.calls

    def run_once(self, calls: int) -> tuple[float | None, list[Outputs]]:
        """Time the calls once, from a clean cache and over poisoned outputs.

        The time is None where the GPU was ahead of the queue. The sample is not taken again, since
        the candidate has seen the contents by then.
        """
        for output in self._outputs:
            if output is not None:
                poison(output, self._protected)
        plain_outputs: list[Outputs] = []

        def body() -> None:
            if self._graph is not None:
                self._graph.replay()
            else:
                plain_outputs.extend(call() for call in self._closures)

        us = self.backend.timed(self.backend.evict, body, self.spin)
        self._inspect(plain_outputs)
        if us < 0:
            self.spin = min(2 * self.spin, MAX_SPIN_CYCLES)
        return (None if us < 0 else self._per_call(us)), plain_outputs or self._outputs

    def repeat(self, repeats: int, warm: bool) -> float:
        """Repeat the timed calls back to back (``warm``: the first alone); return the us by events."""
        return self._wall_and_event_time(repeats, self._warm_body() if warm else self._body)[1]

    def _per_call(self, us: float) -> float:
        graphed = self._graph is not None
        overhead = self.backend.overhead_us if graphed else self.backend.plain_overhead
        return max(0.0, us - overhead) / self.calls

    def sample_warm(self) -> float:
        """Time calls on one buffer, after an untimed call on it."""
        return self._per_call(self._time(self._closures[0], self._warm_body()))

    def _warm_body(self) -> Callable[[], object]:
        if self._replay_warm is None:
            same = [self._closures[0]] * self.calls
            if self._graph is not None:
                graph, _ = capture(same, keep=False, pool=self._graph.pool())
                self._replay_warm = graph.replay
            else:
                self._replay_warm = lambda: [call() for call in same]
            self._replay_warm()
        return self._replay_warm

    def sample_host(self) -> float:
        """Return the host's wall time for a call, back to back, with an empty queue around them."""
        call = self._closures[0]
        call()
        # Random, so that no call can know that it is the last one, whose output is inspected.
        calls = HOST_CALLS - _random.randrange(HOST_CALLS // 2)
        _synchronize()  # an empty queue: a full one would make the host wait for the GPU
        start = _now()
        for _ in range(calls - 1):
            call()
        output = call()
        spent = _now() - start
        _synchronize()
        self._inspect([output])
        return spent / calls / 1000

    def cross_check(self, cold: float = 0.0, busy: float = 1.0) -> list[str]:
        """Compare events around many samples with the wall clock around them.

        A synchronisation of the whole device ends the wall time, so the clocks differ where work
        runs on a stream that the events do not see.
        """
        sample_us = max(1.0, self._time(self._lead, self._body))
        repeats = min(1000, max(1, round(CROSS_CHECK_US / sample_us)))
        for _ in range(CROSS_CHECK_TRIES):  # a host that waited for a core must not look like a cheat
            wall, events = self._wall_and_event_time(repeats, self._body)
            # 30 us: a synchronisation and the launch of the first graph are in the wall time alone.
            if abs(wall - events) <= 0.1 * events + 30.0:
                return []
        return [f"suspect: clocks disagree ({wall:.0f} us by the wall, {events:.0f} us by events)"]

    def _wall_and_event_time(self, repeats: int, body: Callable[[], object]) -> tuple[float, float]:
        first, last = self.backend.events
        _synchronize()
        start = _now()
        first.record()
        for _ in range(repeats):
            body()
        last.record()
        _synchronize()
        wall = (_now() - start) / 1000
        return wall, 1000.0 * float(first.elapsed_time(last))

    def replay(self) -> list[Outputs]:
        """Make the timed calls once more over poisoned outputs; return what they wrote."""
        if self._graph is None:
            outputs = [call() for call in self._closures]
            self._inspect(outputs)
            return outputs
        # A graph that was captured without the work would leave the poison in its outputs.
        for output in self._outputs:
            poison(output, self._protected)
        self._graph.replay()
        return self._outputs

    def call(self, index: int) -> Outputs:
        output = self._closures[index]()
        self._inspect([output], index)
        return output

    def wait(self) -> None:
        _synchronize()
