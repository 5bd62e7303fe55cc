"""Timing of a candidate in a worker process: the part that runs in the parent process.

The worker takes the samples with its own clock, because a request takes longer than a kernel. The
parent therefore checks them with its clock: it requests the timed calls many times back to back,
so often that the cost of a request is small. The wall time of that request must not be longer than
the samples claimed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from weft.core.text import printable
from weft.workbench.calls.buffers import (
    InputBuffers,
    MakeBuffers,
    Outputs,
    ShapeDtype,
    are_sent,
    changing_tensors,
    distinct_elements,
)
from weft.workbench.sandbox.memory_map import MapHidden, MemoryRange, describe_lazy_memory, read_map
from weft.workbench.timing.altered_inputs import altered, choose
from weft.workbench.timing.call_rows import FOREIGN, RETAINED
from weft.workbench.timing.composed_candidate import ComposedCandidate
from weft.workbench.timing.plan import (
    COLD,
    MAX_BUSY_FACTOR,
    SINGLE_CALL_BYTES,
    Candidate,
    ContentSource,
    Estimate,
    IntegrityError,
    Plan,
    RunTimes,
)
from weft.workbench.timing.threads import WORKED

_now = time.perf_counter_ns

MIN_WALL_US = 20_000.0  # the repeats last at least this long by the parent's clock
TRIES = 8  # times that the clocks may disagree before the candidate is suspect
PAUSE_SECONDS = 0.01  # before the second try; longer by as much before each further one
LOAD_SAMPLES = 5  # samples that show how busy the machine is now
EMPTY_REQUESTS = 9  # empty requests that show the cost of a request
SENT_AT_ONCE = 1 << 25  # bytes of contents after which a request is sent
MARGIN = 1.1  # the wall time may exceed the claimed time by 10 %


# Clocks that all processes of a machine share, by the first words of their names: only then can the worker's
# reading be compared with the parent's.
SHARED_CLOCKS = ("clock_gettime(CLOCK_MONOTONIC", "mach_absolute_time", "QueryPerformanceCounter")
PROC = Path("/proc")


def scheduled_seconds(pid: int | None) -> float | None:
    """Return how long the threads of a process have run or waited for a core; None if it is unknown.

    The kernel counts both for each thread. Time in which a thread sleeps is in neither.
    """
    if pid is None:
        return None
    total = 0
    try:
        for thread in (PROC / str(pid) / "task").iterdir():
            running, waiting = (thread / "schedstat").read_text().split()[:2]
            total += int(running) + int(waiting)
    except (OSError, ValueError):  # no such file here, or a thread that ended just now
        return None
    return total / 1e9


class Requester(Protocol):
    """Part of a :class:`~weft.workbench.sandbox.process.Sandbox` that sends requests."""

    def request(
        self,
        verb: str,
        payload: dict[str, Any] | None = None,
        tensors: Sequence[torch.Tensor] = (),
        *,
        seconds: float | None = None,
        device: str = "cpu",
    ) -> Any: ...


def describe_point(
    operator: str, implementation: str, case: str, direction: str, device: str, grad: ShapeDtype | None
) -> dict[str, Any]:
    """Describe a bench point to a worker: names, and the gradient's form for a backward."""
    point: dict[str, Any] = {
        "operator": operator,
        "implementation": implementation,
        "case": case,
        "direction": direction,
        "device": device,
    }
    if grad is not None:
        point["grad"] = [list(grad[0]), str(grad[1]).removeprefix("torch.")]
    return point


def measure_first_call(sandbox: Requester, point: Mapping[str, Any], seed: int) -> float:
    """Return the wall time (us) of the first call in a worker, by the parent's clock.

    It includes binding the implementation and generating its inputs.
    """
    start = _now()
    sandbox.request("timing.first_call", {**point, "seed": seed})
    return (_now() - start) / 1000


class RemoteTimingBackend:
    """Timing backend in a worker process, for one candidate at one point (:func:`describe_point`)."""

    def __init__(
        self,
        sandbox: Requester,
        point: Mapping[str, Any],
        device: str,
        without: Collection[str] = (),
        trusted: bool = False,
    ) -> None:
        self.sandbox, self.device, self.trusted = sandbox, device, trusted
        self.without = frozenset(without)
        payload = dict(point) | {"without": sorted(without), "trusted": trusted}
        backend = sandbox.request("timing.create", payload).payload
        self.timing_id = int(backend["timing"])
        self.cache_bytes, self.slow_us = int(backend["cache_bytes"]), float(backend["slow_us"])
        self.overhead_us = float(backend["overhead_us"])
        cores, spin_ns = backend["cpu_limits"]
        self.cpu_limits = int(cores), int(spin_ns)
        # Known by the estimate: bytes of a call and its outputs, its tensors, and which change between calls.
        self.call_bytes = self.output_bytes = 0
        self.rests = False  # frees all memory but the inputs' after each sample
        self.all_positions: list[int] = []
        self.changing_positions: list[int] = []
        self.flags: set[str] = set()
        self.violations: dict[str, str] = {}

    def context(self) -> AbstractContextManager[None]:
        return nullcontext()

    def request(
        self, verb: str, device: str = "cpu", tensors: Sequence[torch.Tensor] = (), **payload: Any
    ) -> Any:
        """Send a request on this timing; add the flags that the worker raised to this process's.

        The tensors of the reply arrive on ``device``.
        """
        request = {"timing": self.timing_id, **payload}
        reply = self.sandbox.request(f"timing.{verb}", request, tensors, device=device)
        # Flags and names come from the candidate's process.
        self.flags.update(printable(str(flag)) for flag in reply.payload.get("flags", ()))
        if names := ", ".join(map(str, reply.payload.get("threads", ()))):
            self.flags.add(f"suspect: threads: {printable(names)} {WORKED}")
        for name, why in reply.payload.get("violations", {}).items():
            self.violations.setdefault(str(name), printable(str(why)))
        return reply

    def available_memory(self) -> int:
        return int(self.request("memory").payload["bytes"])

    def estimate(self, candidate: Candidate, buffers: InputBuffers) -> Estimate:
        self.call_bytes = buffers.nbytes
        self.all_positions = list(range(len(buffers.all_tensors)))
        self.changing_positions = changing_tensors(buffers)
        self.request("allocate", count=1)
        self.write({0: ContentSource(buffers.seed)}, lambda _: buffers, self.all_positions)
        estimate = self.request("estimate").payload
        self.output_bytes = output_bytes = int(estimate["output_bytes"])
        # The reference of a large problem on a GPU, where its candidate and the judge need the memory.
        is_large = self.call_bytes + output_bytes > SINGLE_CALL_BYTES
        self.rests = self.trusted and self.device == "cuda" and is_large
        return Estimate(us=float(estimate["us"]), output_bytes=output_bytes)

    def prepare(
        self,
        candidate: Candidate,
        buffer_sets: Sequence[InputBuffers],
        contents: MakeBuffers,
        plan: Plan,
    ) -> RemoteTimedCandidate:
        seeds = [buffers.seed for buffers in buffer_sets]
        self.request("allocate", count=len(seeds))
        sources = {index: ContentSource(seed) for index, seed in enumerate(seeds)}
        self.write(sources, contents, self.all_positions)
        return RemoteTimedCandidate(self, RemoteSteps(self, contents, plan, self.call_bytes), seeds)

    def write(
        self, sources: Mapping[int, ContentSource], contents: MakeBuffers, positions: Sequence[int]
    ) -> None:
        """Write contents into the worker's buffers of these indexes: their tensors at these positions."""
        indexes: dict[ContentSource, list[int]] = {}
        for index, source in sources.items():
            indexes.setdefault(source, []).append(index)
        # Contents of a large problem on a GPU would take seconds through the host: by seed, as its check.
        if not are_sent(self.call_bytes, self.device):
            for source, places in indexes.items():
                self.request(
                    "generate",
                    seed=source.seed,
                    indexes=places,
                    positions=list(positions),
                    alteration=source.alteration,
                )
            return
        # One at a time: the worker's buffers together may be much larger than one set of contents.
        unaltered = {s: i for s, i in indexes.items() if s.alteration is None}
        self._send(((contents(s.seed), i) for s, i in unaltered.items()), positions)
        for source, places in indexes.items():
            if source.alteration is not None:
                other, seed, many = source.alteration
                choices = choose(contents(other), seed, many)
                with altered(contents(source.seed), choices) as changed:
                    # Sent inside of the block, which restores the contents when it ends.
                    self._send([(changed, places)], positions)

    def _send(self, writes: Iterable[tuple[InputBuffers, list[int]]], positions: Sequence[int]) -> None:
        """Send contents; each tensor once, whatever buffers get it."""
        tensors: list[torch.Tensor] = []
        places: list[tuple[int, list[int]]] = []
        for buffers, indexes in writes:
            for position in positions:
                tensors.append(distinct_elements(buffers.all_tensors[position]))
                places.append((position, indexes))
                if sum(t.nbytes for t in tensors) >= SENT_AT_ONCE:
                    self.request("load", tensors=tensors, writes=places)
                    tensors, places = [], []
        if tensors:
            self.request("load", tensors=tensors, writes=places)


class RemoteSteps:
    """Steps of a candidate that is prepared in its worker; each is one request (:class:`CandidateSteps`)."""

    is_local = False

    def __init__(
        self, backend: RemoteTimingBackend, contents: MakeBuffers, plan: Plan, call_bytes: int
    ) -> None:
        self.backend, self.contents, self.plan = backend, contents, plan
        self.flags, self.violations, self.device = backend.flags, backend.violations, backend.device
        self.call_bytes, self.output_bytes = call_bytes, backend.output_bytes
        reply = backend.request("prepare", calls=plan.calls, flush=plan.flush, spare=plan.spare)
        self.calls = int(reply.payload["calls"])
        if self.calls != plan.calls:
            raise IntegrityError("its process prepared another number of calls than requested")

    def run(
        self,
        indexes: Sequence[int],
        repeats: int = 1,
        mode: str = COLD,
        kept_positions: Sequence[int] | None = None,
    ) -> RunTimes:
        positions = None if kept_positions is None else list(kept_positions)
        payload = self.backend.request(
            "run", indexes=list(indexes), repeats=repeats, mode=mode, kept_positions=positions
        ).payload
        us = payload["us"]
        return RunTimes(
            us=None if us is None else float(us),
            total_us=float(payload["total_us"]),
            wall_us=float(payload["wall_us"]),
            cpu_ns=int(payload["cpu_ns"]),
        )

    def load(self, sources: Mapping[int, ContentSource]) -> None:
        """Write contents into the buffers of these indexes; in the backward, gradients alone."""
        self.backend.write(sources, self.contents, self.backend.changing_positions)

    def poison(self) -> None:
        self.backend.request("poison")

    def evict(self) -> None:
        self.backend.request("evict")

    def wait(self) -> int:
        return int(self.backend.request("wait").payload["cpu_ns"])

    def pick(self, indexes: Sequence[int]) -> Mapping[int, Outputs]:
        """Return outputs of the last run by index; only these are sent to this process."""
        reply = self.backend.request("pick", self.backend.device, indexes=list(indexes))
        tensors = iter(reply.tensors)
        outputs: dict[int, Outputs] = {}
        sizes, singles = reply.payload["group_sizes"], reply.payload["is_single"]
        for index, size, is_single in zip(indexes, sizes, singles, strict=True):
            group = tuple(next(tensors) for _ in range(int(size)))
            outputs[index] = group[0] if is_single and len(group) == 1 else group
        return outputs

    def shared_memory(self) -> str:
        return printable(str(self.backend.request("shared_memory").payload["reason"]))

    def lazy_memory(self, indexes: Sequence[int]) -> str:
        pid = getattr(self.backend.sandbox, "pid", None)
        if self.device != "cpu":  # its driver serves page faults of a GPU's memory
            return ""
        reply = self.backend.request("ranges", indexes=list(indexes)).payload["ranges"]
        ranges = [MemoryRange(**{name: int(value) for name, value in each.items()}) for each in reply]
        try:
            why = describe_lazy_memory(read_map(pid), ranges)
        except MapHidden:
            why = "its process hides its memory map"
        return f"returned an output that may be computed when it is read: {why}" if why else ""

    def unwritten(self) -> int | None:
        index = self.backend.request("unwritten").payload["index"]
        return None if index is None else int(index)

    def ring_suspicion(self) -> str:
        suspicion = self.backend.request("ring_suspicion").payload["suspicion"]
        return suspicion if suspicion in (RETAINED, FOREIGN) else ""

    def hold(self, indexes: Sequence[int]) -> None:
        self.backend.request("hold", indexes=list(indexes))

    def store_digests(self, indexes: Sequence[int]) -> None:
        self.backend.request("store_digests", indexes=list(indexes))

    def has_changed(self) -> bool:
        return bool(self.backend.request("has_changed").payload["changed"])

    def digests(self, indexes: Sequence[int]) -> Sequence[object]:
        reply = self.backend.request("digests", indexes=list(indexes)).payload["digests"]
        return [str(digest) for digest in reply]

    def cpu_limits(self) -> tuple[int, int]:
        return self.backend.cpu_limits

    def replaced_functions(self) -> list[str]:
        payload = self.backend.sandbox.request("timing.replaced_functions").payload
        if hooks := "; ".join(map(str, payload.get("hooks", ()))):
            self.backend.violations.setdefault("hooks", printable(hooks))
        return [str(n) for n in payload["replaced"]]


class RemoteTimedCandidate(ComposedCandidate):
    """A candidate prepared in its worker. Times are in us for one call, as the worker claims them."""

    def __init__(self, backend: RemoteTimingBackend, steps: RemoteSteps, seeds: Sequence[int]) -> None:
        super().__init__(steps, seeds)
        self.backend = backend
        self.pid: int | None = getattr(backend.sandbox, "pid", None) if backend.device == "cpu" else None

    def release(self) -> None:
        """Free the buffers and outputs in the worker."""
        self.backend.request("allocate", count=0)

    def sample(self) -> float:
        start, scheduled = _now(), scheduled_seconds(self.pid)
        us = super().sample()
        self._count_sleep((_now() - start) / 1e9, scheduled)
        if self.backend.rests:
            self.backend.request("rest")
        return us

    def _count_sleep(self, seconds: float, before: float | None) -> None:
        """Add the part of a sample's wall time in which no thread of the worker ran or waited for a core."""
        after = scheduled_seconds(self.pid)
        # A thread that ended takes its time along: the difference is then unknown.
        if before is not None and after is not None and after >= before:
            self.asleep_seconds = (self.asleep_seconds or 0.0) + max(0.0, seconds - (after - before))

    def cross_check(self, cold: float = 0.0, busy: float = 1.0) -> list[str]:
        """Compare the worker's two clocks, and the parent's clock with the claimed times."""
        flags = super().cross_check(cold, busy)
        if "wall" in self.backend.without:
            return flags
        flags += self._compare_readings()
        flags += self._compare_wall_time(cold, busy, warm=False)
        if self.plan.flush:
            # The samples have a cold cache but their repeats do not: compare warm with warm, too.
            warm = float(np.median([self.sample_warm() for _ in range(5)]))
            flags += self._compare_wall_time(warm, busy, warm=True)
        return flags

    def _compare_readings(self) -> list[str]:
        """Compare a reading of the worker's clock with readings of the parent's before and after it.

        All processes share this clock, so the worker's reading lies between the two however busy the machine
        is. A clock that runs slower than it should falls behind.
        """
        clock = time.get_clock_info("perf_counter").implementation
        if self.backend.device != "cpu" or not clock.startswith(SHARED_CLOCKS):
            return []
        before = _now()
        reading = int(self.backend.request("clock").payload["ns"])
        after = _now()
        if before <= reading <= after:
            return []
        behind = max(before - reading, reading - after) / 1e9
        return [f"suspect: the parent's clock disagrees (the worker's reading is off by {behind:.3g} s)"]

    def _compare_wall_time(self, claimed: float, busy: float, warm: bool) -> list[str]:
        """Repeat the timed calls and compare with the parent's clock; return a flag if it disagrees.

        If the machine has become busier since the samples, the worker's time of the repeats shows
        it. That time is accepted up to ``busy`` times the claimed time or the time of new samples,
        and up to ``MAX_BUSY_FACTOR`` times the claimed time at most.
        """
        sample_us = max(claimed, 0.01) * self.calls
        # Three times the usual request: a reply may wait for a core on a busy machine.
        request_us = 3.0 * self._empty_request_us()
        repeats, min_wall = 1, max(MIN_WALL_US, 10.0 * request_us)
        wall = repeated = 0.0
        for attempt in range(TRIES):
            wall, repeated = self._repeat(repeats, warm)
            # Double until the cost of the request is small against the work (10 times at least).
            while wall < min_wall and repeats * sample_us < min_wall and repeats < 1 << 20:
                repeats *= 2
                wall, repeated = self._repeat(repeats, warm)
            current = sample_us if attempt == 0 else self.calls * self._current_sample_us(warm)
            limit = float("inf")
            # The worker's own time of the repeats is as little trusted as its samples: it is bounded.
            if self._runs_without_gaps:
                limit = min(busy * max(sample_us, current), MAX_BUSY_FACTOR * sample_us)
            accepted = min(max(repeated / repeats, sample_us), limit)
            # On a CPU the overhead (of the loop) is for each call, on a GPU for each sample.
            overhead = self.backend.overhead_us * (self.calls if self.backend.device == "cpu" else 1)
            if wall <= repeats * (MARGIN * accepted + overhead) + request_us:
                return []
            time.sleep(attempt * PAUSE_SECONDS)
        return [
            f"suspect: the parent's clock disagrees ({wall / repeats / self.calls:.1f} us a call "
            f"by its watch, {repeated / repeats / self.calls:.1f} by the worker's, {claimed:.1f} us claimed"
            f"{' warm' if warm else ''})"
        ]

    def _current_sample_us(self, warm: bool) -> float:
        """Return the mean of new samples: a single one may fall between two bursts of other work."""
        take_sample = self.sample_warm if warm else self.sample
        return float(np.mean([take_sample() for _ in range(LOAD_SAMPLES)]))

    @property
    def _runs_without_gaps(self) -> bool:
        """True if repeats run without gaps, as samples do.

        Calls outside a graph are launched one by one; then only two clocks around the same repeats
        can be compared.
        """
        return not any(f.startswith(("no-graph", "host-bound")) for f in self.flags)

    def _repeat(self, repeats: int, warm: bool) -> tuple[float, float]:
        """Repeat the timed calls; return the wall time here and the worker's time (us)."""
        start = _now()
        total_us = self.repeat(repeats, warm).total_us
        return (_now() - start) / 1000, total_us

    def _empty_request_us(self) -> float:
        """Return the median wall time (us) of a request without work.

        It is a step of this timing, with all that surrounds one: on a GPU that takes 2 ms, of which a
        request without a step has 0.1 (an H200, 2026-11-26).
        """
        times = []
        for _ in range(EMPTY_REQUESTS):
            start = _now()
            self.backend.request("nothing")
            times.append((_now() - start) / 1000)
        return float(np.median(times))
