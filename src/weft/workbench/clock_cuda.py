"""One sample on an NVIDIA GPU: a CUDA graph of calls over distinct slots, between two events.

Events, graph launch and what goes before them are queued while the GPU is still busy with a spin,
so that no launch from the host falls between the events; a sample where the GPU was sooner is taken
again. What two events and a graph launch cost by themselves is measured and subtracted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from weft import machine
from weft.workbench import persisting
from weft.workbench.local_rig import LocalRig
from weft.workbench.plan import CROSS_TRIES, Candidate, Estimate, Plan
from weft.workbench.slots import MakeSlot, Result, Slot, poison, storages, tensors_of

_now = time.perf_counter_ns
_Event, _Graph = torch.cuda.Event, torch.cuda.CUDAGraph
_synchronize, _sleep = torch.cuda.synchronize, torch.cuda._sleep

SLOW = 50_000.0  # us: a rotation that lasts longer gives way to a flush
SPIN = 200_000  # clock cycles, about 0.1 ms; doubled until the queue is ahead
LONGEST_SPIN = 40_000_000
CROSS = 5_000.0  # us that the two clocks are compared over
HOST_CALLS = 20  # in a batch: far fewer than the launch queue holds
EMPTY = (1, 33)  # empty kernels in the graphs that show the overhead


class CudaStand:
    """Where a GPU's rigs are made: one stream for all, the buffer that flushes, the overhead.

    ``whole_cache`` says that no part of the L2 may be set aside.
    """

    slow = SLOW

    def __init__(self, *, whole_cache: bool = True) -> None:
        self.whole_cache, self.held = whole_cache, 0
        _synchronize()  # so that there is a context: a limit is one context's
        persisting.release()
        self.cache = machine.l2_bytes("cuda")
        self.stream = torch.cuda.Stream()
        self.flusher = torch.zeros(2 * self.cache // 4, dtype=torch.int32, device="cuda")
        self.events = [_Event(enable_timing=True) for _ in range(2)]
        with self.context():
            self.overhead = self._overhead(graphed=True)
            self.plain_overhead = self._overhead(graphed=False)

    @contextmanager
    def context(self) -> Iterator[None]:
        """Everything, inputs and oracle included, on the stand's own stream: a graph is captured
        on a stream that is not the default one, and backward runs where its forward ran."""
        _synchronize()
        if self.whole_cache and (held := persisting.reserved()):
            self.held = held
            persisting.release()
        with torch.cuda.stream(self.stream):
            yield
        _synchronize()

    def memory(self) -> int:
        free, _ = torch.cuda.mem_get_info()
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())

    def flush(self) -> None:
        self.flusher.zero_()

    def evict(self) -> None:
        """Fill the cache with lines that nobody will have to write back, by reading alone."""
        self.flusher.sum()

    def timed(self, before: Callable[[], object], body: Callable[[], object], spin: int) -> float:
        """Microseconds between two events around ``body``; negative where the GPU reached the
        first before all was queued, so that the host's launches would be in the time."""
        start, end = self.events
        if spin:
            _sleep(spin)
        before()
        start.record()
        body()
        end.record()
        late = spin > 0 and start.query()
        end.synchronize()
        us = 1000.0 * float(start.elapsed_time(end))
        return -us if late else us

    def _overhead(self, graphed: bool) -> float:
        """What events (and a graph launch) cost: the intercept of the time of 1 and of 33 empty
        kernels, medians of 21."""
        medians = []
        for count in EMPTY:
            body = _empties(count)
            if graphed:
                graph, _ = capture([_empties(count)], keep=False)
                body = graph.replay
            seen = [abs(self.timed(lambda: None, body, 10 * SPIN)) for _ in range(24)]
            medians.append(float(np.median(seen[3:])))
        slope = (medians[1] - medians[0]) / (EMPTY[1] - EMPTY[0])
        return max(0.0, medians[0] - EMPTY[0] * slope)

    def estimate(self, candidate: Candidate, slot: Slot) -> Estimate:
        """Launches included where they cannot be queued."""
        call = candidate.bind(slot)
        output_bytes = sum(t.nbytes for t in tensors_of(call()))
        call()
        _synchronize()
        least = min(abs(self.timed(lambda: None, call, 5 * SPIN)) for _ in range(4))
        return Estimate(us=least, output_bytes=output_bytes)

    def entrant(
        self, candidate: Candidate, slots: Sequence[Slot], contents: MakeSlot, plan: Plan
    ) -> LocalRig:
        return LocalRig(self.rig(candidate, slots, plan), slots, contents)

    def rig(self, candidate: Candidate, slots: Sequence[Slot], plan: Plan) -> CudaRig:
        return CudaRig(self, candidate, slots, plan)


def _empties(count: int) -> Callable[[], None]:
    def launch() -> None:
        for _ in range(count):
            _sleep(0)

    return launch


def capture(
    calls: Sequence[Callable[[], Any]], *, keep: bool, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, list[Result]]:
    """One CUDA graph of these calls, on the current stream; their outputs if ``keep``.

    Raises what a call raises, and ``RuntimeError`` for what a capture forbids.
    """
    graph = _Graph()
    outputs: list[Result] = []
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), pool=pool):
        for call in calls:
            output = call()
            if keep:
                outputs.append(output)
            del output
    return graph, outputs


class CudaRig:
    """A candidate bound to its slots and captured. Times are in us a call."""

    def __init__(
        self, stand: CudaStand, candidate: Candidate, slots: Sequence[Slot], plan: Plan
    ) -> None:
        self.stand, self.plan, self.spin = stand, plan, SPIN
        self.flags: set[str] = set()
        self._protected = storages(slots)
        self._closures = [candidate.bind(slot) for slot in slots]
        for call in (*self._closures[:2], self._closures[-1]):
            call()
        _synchronize()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: list[Result] = []
        self._replay_warm: Callable[[], object] | None = None
        self._lead: Callable[[], object] = self._closures[-1]
        try:
            self._graph, self._outputs = capture(self._closures, keep=True)
            lead, _ = capture(self._closures[-1:], keep=False, pool=self._graph.pool())
            self._lead = lead.replay
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - each library has its own for what is forbidden
            self._graph, self._outputs = None, []
            self._not_captured(error)

    def _not_captured(self, error: Exception) -> None:
        """What cannot be captured is timed call by call; work left on a side stream is suspect."""
        _synchronize()
        self.flags.add("no-graph")
        if "unjoined" in str(error).lower():
            self.flags.add("suspect: side-stream: work was left running on another stream")

    @property
    def calls(self) -> int:
        return len(self._closures)

    def _body(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        for call in self._closures:
            call()

    def _timed(self, before: Callable[[], object], body: Callable[[], object]) -> float:
        """A sample behind a spin that is long enough; without one where none ever is."""
        while self.spin:
            us = self.stand.timed(before, body, self.spin)
            if us >= 0:
                return us
            self.spin *= 2
            if self.spin > LONGEST_SPIN:
                self.spin = 0
                self.flags.add("host-bound: the call waits for the host, which its time includes")
        return self.stand.timed(before, body, 0)

    def sample(self) -> float:
        """With a flush, the cache is full of another's lines. Without, the last call comes first,
        untimed: the timed ones then find the cache, and the lines that wait to be written back, as
        in a long run of such calls."""
        before = self.stand.flush if self.plan.flush else self._lead
        us = self._per_call(self._timed(before, self._body))
        if self.stand.whole_cache and (held := persisting.reserved() or self.stand.held):
            persisting.release()
            self.flags.add(f"suspect: L2 set aside: {held} bytes that outlive a flush")
        return us

    @property
    def audited(self) -> int:
        """All of them: one graph holds them."""
        return self.calls

    def once(self, calls: int) -> tuple[float | None, list[Result]]:
        """The timed calls once, from a clean cache, over poisoned outputs; no time where the GPU
        was ahead of the queue, since a second look at the same contents would be another's."""
        for output in self._outputs:
            poison(output, self._protected)
        made: list[Result] = []

        def body() -> None:
            if self._graph is not None:
                self._graph.replay()
            else:
                made.extend(call() for call in self._closures)

        us = self.stand.timed(self.stand.evict, body, self.spin)
        if us < 0:
            self.spin = min(2 * self.spin, LONGEST_SPIN)
        return (None if us < 0 else self._per_call(us)), made or self._outputs

    def repeat(self, repeats: int, warm: bool) -> float:
        """The timed calls many times over with nothing in between; ``warm`` the first alone. The
        time (us) by events around them all."""
        return self._both_clocks(repeats, self._warm_body() if warm else self._body)[1]

    def _per_call(self, us: float) -> float:
        graphed = self._graph is not None
        overhead = self.stand.overhead if graphed else self.stand.plain_overhead
        return max(0.0, us - overhead) / self.calls

    def warm(self) -> float:
        """The same input every time, the call before it untimed."""
        return self._per_call(self._timed(self._closures[0], self._warm_body()))

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

    def host(self) -> float:
        """Wall time a call on the host, back to back, the queue emptied before and after."""
        call = self._closures[0]
        call()
        _synchronize()
        start = _now()
        for _ in range(HOST_CALLS):
            call()
        spent = _now() - start
        _synchronize()
        return spent / HOST_CALLS / 1000

    def cross_check(self, cold: float = 0.0, busy: float = 1.0) -> list[str]:
        """Events around many samples against the wall clock around them and a synchronisation of
        the whole device: they differ where work runs where the events do not see it."""
        once = max(1.0, self._timed(self._lead, self._body))
        repeats = min(1000, max(1, round(CROSS / once)))
        for _ in range(CROSS_TRIES):  # a host that was kept waiting for a core is no cheat
            wall, events = self._both_clocks(repeats)
            if abs(wall - events) <= 0.1 * events + 30.0:
                return []
        return [f"suspect: clocks disagree ({wall:.0f} us by the wall, {events:.0f} us by events)"]

    def _both_clocks(
        self, repeats: int, body: Callable[[], object] | None = None
    ) -> tuple[float, float]:
        body = body or self._body
        first, last = self.stand.events
        _synchronize()
        start = _now()
        first.record()
        for _ in range(repeats):
            body()
        last.record()
        _synchronize()
        wall = (_now() - start) / 1000
        return wall, 1000.0 * float(first.elapsed_time(last))

    def replay(self) -> list[Result]:
        """The timed calls once more, over poisoned outputs, and what they wrote."""
        if self._graph is None:
            return [call() for call in self._closures]
        for output in self._outputs:
            poison(output, self._protected)
        self._graph.replay()
        return self._outputs

    def call(self, index: int) -> Result:
        return self._closures[index]()

    def wait(self) -> None:
        _synchronize()
