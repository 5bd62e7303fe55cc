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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from weft import machine
from weft.machine import driver
from weft.workbench.calls.buffers import InputBuffers, MakeBuffers, Outputs, tensors_of
from weft.workbench.calls.graph_capture import graph_capture
from weft.workbench.calls.make_calls import call_once, make_calls, schedule, schedule_row
from weft.workbench.timing.composed_candidate import ComposedCandidate
from weft.workbench.timing.local_candidate import prepare
from weft.workbench.timing.output_inspector import OutputInspector
from weft.workbench.timing.plan import COLD, PLAIN, REPEATED, Candidate, Estimate, Plan, RunTimes

# Bound at import, so that a candidate that replaces them in `time` or `torch` changes nothing here.
_now = time.perf_counter_ns
_Event, _Graph = torch.cuda.Event, torch.cuda.CUDAGraph
_synchronize, _sleep = torch.cuda.synchronize, torch.cuda._sleep

SLOW_US = 50_000.0  # above it a rotation over buffers is replaced by a flush
SPIN_CYCLES = 200_000  # about 0.1 ms; doubled until the host's queue is ahead of the GPU
MAX_SPIN_CYCLES = 40_000_000
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
        output_bytes = sum(t.nbytes for t in tensors_of(call_once(call)))
        call_once(call)  # a second call: the first one compiles, tunes and fills the allocator
        _synchronize()
        once = partial(call_once, call)
        least = min(abs(self.timed(lambda: None, once, 5 * SPIN_CYCLES)) for _ in range(4))
        return Estimate(us=least, output_bytes=output_bytes)

    def prepare(
        self, candidate: Candidate, buffer_sets: Sequence[InputBuffers], contents: MakeBuffers, plan: Plan
    ) -> ComposedCandidate:
        return prepare(self.make_runner(candidate, buffer_sets, plan), buffer_sets, contents, "cuda")

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
    spare = len(calls)
    outputs: list[Any] = [None] * (spare + 1)
    # An output that is not kept is released before the next call of the same graph, which gets its memory.
    scheduled = [(spare, index if keep else spare, call) for index, call in enumerate(calls)]
    with graph_capture(graph, torch.cuda.current_stream(), pool=pool):
        make_calls(scheduled, outputs)
        outputs[spare] = None
    return graph, outputs[:spare] if keep else []


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
        self._inspector = (
            OutputInspector(buffer_sets, candidate.output_forms) if candidate.inspected else None
        )
        self._closures = [candidate.bind(buffers) for buffers in buffer_sets]
        # Compile, tune and allocate before the capture, which forbids all of that.
        for call in (*self._closures[:2], self._closures[-1]):
            call_once(call)
        _synchronize()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured: list[Outputs] = []  # outputs of every replay of the graph
        # Outputs of calls outside the graph; each lives until the next call of its buffer.
        self._made: list[Outputs | None] = [None] * (len(self._closures) + 1)
        self._row: list[Outputs | None] = []  # by position, of the last run if it kept them so
        self._timed_closures = self._closures[: plan.calls]
        self._scheduled = schedule(self._closures, range(self.calls))
        self._replay_warm: Callable[[], object] | None = None
        self._lead: Callable[[], object] = partial(call_once, self._timed_closures[-1])
        self._last_mode, self._rests = COLD, False
        try:
            self._capture()
        except torch.OutOfMemoryError:
            raise  # timing call by call would need the same memory
        except Exception as error:  # noqa: BLE001 - libraries raise types of their own
            self._graph, self._captured = None, []
            self._flag_failed_capture(error)

    def _capture(self) -> None:
        """Capture the calls, and the lead where no flush takes its place."""
        self._graph, self._captured = capture(self._timed_closures, keep=True)
        # A replay returns no new objects: these are the outputs of all samples.
        self._inspect(self._captured)
        if not self.plan.flush:
            # The same memory pool: of what the calls freed in it, the lead uses what it can.
            lead, _ = capture(self._timed_closures[-1:], keep=False, pool=self._graph.pool())
            self._lead = lead.replay

    def rest(self) -> None:
        """Drop the graph and all outputs until the next run, whose memory others need meanwhile."""
        if self._graph is None:
            return
        self._rests = True
        self._graph, self._captured, self._replay_warm = None, [], None
        self._lead = partial(call_once, self._timed_closures[-1])
        self._made, self._row = [None] * (len(self._closures) + 1), []

    def _wake(self) -> None:
        """Capture the calls again after a rest; the first replay of a graph is no sample."""
        self._rests = False
        self._capture()
        assert self._graph is not None
        self._graph.replay()

    def _flag_failed_capture(self, error: Exception) -> None:
        """Time call by call without a graph; work left on a side stream is suspect."""
        _synchronize()
        self.flags.add("no-graph")
        if "unjoined" in str(error).lower():
            self.flags.add("suspect: side-stream: work was left running on another stream")

    @property
    def calls(self) -> int:
        return self.plan.calls

    @property
    def violation(self) -> str:
        return self._inspector.violation if self._inspector else ""

    def _inspect(self, outputs: Sequence[object], first_call: int = 0) -> None:
        if self._inspector is not None:
            self._inspector.inspect(outputs, first_call)

    def outputs(self) -> Sequence[Outputs | None]:
        """Return the outputs of the last run, by index or position."""
        if self._row:
            return self._row
        return self._captured if self._graph is not None and self._last_mode != PLAIN else self._made

    def kept_outputs(self) -> Sequence[Outputs | None]:
        return [*self._captured, *self._made, *self._row]

    def drop_spare_outputs(self) -> None:
        """Drop the outputs of calls outside of the graph; without a graph all outputs are such."""
        self._row = []
        if self._graph is not None:
            self._made = [None] * (len(self._closures) + 1)

    def run(
        self,
        indexes: Sequence[int],
        repeats: int = 1,
        mode: str = COLD,
        kept_positions: Sequence[int] | None = None,
    ) -> RunTimes:
        """Make the calls of these indexes: in the graph, or one by one where there is none or in PLAIN mode.

        The graphs hold all calls, and as many calls of the first. ``us`` is None where the GPU was ahead of
        the queue: the sample may be taken again, now behind a longer spin.
        """
        self._last_mode = mode
        self._row = [] if kept_positions is None else [None] * (len(indexes) + 1)
        if mode == PLAIN:
            return self._run_plainly(indexes, kept_positions)
        if self._rests:
            self._wake()
        if self._graph is not None and mode == COLD:
            self.drop_spare_outputs()
        body = self._warm_body() if len(set(indexes)) < len(indexes) else self._body
        if mode == REPEATED:
            wall, events = self._wall_and_event_time(repeats, body)
            times = RunTimes(us=self._per_call(events / repeats), total_us=events, wall_us=wall)
        else:
            times = self._timed_run(body, mode)
        if self._graph is None:
            first, last = indexes[0], indexes[-1]
            self._inspect(self._made[first : last + 1], first)
        if self.backend.whole_cache:
            set_aside = persisting_l2_bytes() or self.backend.set_aside_bytes
            if set_aside:
                release_persisting_l2()
                self.flags.add(f"suspect: L2 set aside: {set_aside} bytes that outlive a flush")
        return times

    def _timed_run(self, body: Callable[[], object], mode: str) -> RunTimes:
        """Run ``body`` between two events, once, behind a spin that is longer the next time if it must be.

        In COLD mode a flush leaves other lines in the cache. Without one the last call comes first, untimed:
        the timed calls then find the cache, and the lines that wait for write-back, as in a long
        run of such calls.
        """
        before: Callable[[], object] = partial(call_once, self._closures[0])
        if mode == COLD:
            before = self.backend.flush if self.plan.flush else self._lead
        elif self._graph is not None and self.calls == 1:
            before = self._graph.replay  # a call outside of the graph would need as much memory again
        us = self.backend.timed(before, body, self.spin)
        if us < 0:
            self.spin *= 2  # the host was slow this time; the longer spin is kept for later samples
            if self.spin > MAX_SPIN_CYCLES:
                self.spin = 0
                self.flags.add("host-bound: the call waits for the host, which its time includes")
        return RunTimes(us=None if us < 0 else self._per_call(us), total_us=abs(us), wall_us=abs(us))

    def _body(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            make_calls(self._scheduled, self._made)

    def _warm_body(self) -> Callable[[], object]:
        """Return what makes as many calls as a sample, all on the first buffer."""
        if self._replay_warm is None:
            if self._graph is not None and self.calls == 1:
                self._replay_warm = self._graph.replay
            elif self._graph is not None:
                graph, _ = capture([self._closures[0]] * self.calls, keep=False, pool=self._graph.pool())
                self._replay_warm = graph.replay
            else:
                same = schedule(self._closures, [0] * self.calls)
                self._replay_warm = lambda: make_calls(same, self._made)
            self._replay_warm()
        return self._replay_warm

    def _per_call(self, us: float) -> float:
        graphed = self._graph is not None
        overhead = self.backend.overhead_us if graphed else self.backend.plain_overhead
        return max(0.0, us - overhead) / self.calls

    def _run_plainly(self, indexes: Sequence[int], kept_positions: Sequence[int] | None = None) -> RunTimes:
        """Make calls by the host, with an empty queue around them; the time is the host's."""
        scheduled, outputs = schedule(self._closures, indexes), self._made
        if kept_positions is not None:
            scheduled, outputs = schedule_row(self._closures, indexes, kept_positions), self._row
        _synchronize()  # an empty queue: a full one would make the host wait for the GPU
        start = _now()
        make_calls(scheduled, outputs)
        spent = (_now() - start) / 1000
        _synchronize()
        first, last = indexes[0], indexes[-1]
        if kept_positions is None:
            self._inspect(self._made[first : last + 1], first)
        else:
            self._inspect([self._row[p] for p in kept_positions])
        return RunTimes(us=spent / len(indexes), total_us=spent, wall_us=spent)

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

    def evict(self) -> None:
        self.backend.evict()

    def wait(self) -> int:
        """Wait until the device is idle."""
        _synchronize()
        return 0
