"""Timing of a candidate in a worker process: the part that runs in the worker.

One request, ``timing.run``, makes calls of the candidate, between two readings of the clock. All others
make none: they overwrite inputs, poison old outputs, empty the cache or look at memory. The parent process
composes samples, audits and re-checks of them, so that nothing here tells which of these a run belongs to
(:mod:`remote_timing`). It keeps the session, the oracle and a clock of its own. It generates the inputs,
where no code of the candidate can do work in passing, and sends them; it receives numbers and the outputs
that it picks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from weft.core import BACKWARD, Case, Implementation, Operator
from weft.workbench.calls.bind import bind
from weft.workbench.calls.buffers import (
    InputBuffers,
    ShapeDtype,
    allocate_buffers,
    allocate_empty,
    overwrite,
    regenerate,
    release_unused_memory,
    tensors_of,
)
from weft.workbench.calls.make_calls import call_once
from weft.workbench.calls.staging import TensorForm
from weft.workbench.sandbox.memory_map import MemoryRange
from weft.workbench.timing import cpu
from weft.workbench.timing.altered_inputs import ElementChoices, alter, choose
from weft.workbench.timing.hooks import HookMonitor
from weft.workbench.timing.integrity import protected_functions, replaced_functions, snapshot
from weft.workbench.timing.local_candidate import BufferCache, LocalSteps
from weft.workbench.timing.measure import timing_backend
from weft.workbench.timing.plan import Candidate, LocalTimingBackend, Plan
from weft.workbench.timing.threads import ThreadMonitor

UNUSED_BYTES = 1 << 28  # of GPU memory that the allocator may keep when contents were generated
Payload = dict[str, Any]
Result = tuple[dict[str, Any], Sequence[torch.Tensor]]
Handler = Callable[[Payload, list[torch.Tensor]], Result]


class PointResolver(Protocol):
    """Part of the worker's state that finds the objects which a request names."""

    def point(self, payload: Mapping[str, Any]) -> tuple[Operator, Implementation, Case, str, str]: ...
    def output_forms(self, payload: Mapping[str, Any]) -> Sequence[TensorForm] | None: ...


@dataclass(kw_only=True)
class WorkerTiming:
    """Candidate at one point: its backend, and the objects prepared from it."""

    backend: LocalTimingBackend
    device: str
    candidate: Candidate
    allocate: Callable[[], InputBuffers]
    regenerate: Callable[[InputBuffers, int, Sequence[int]], None]
    contents: BufferCache
    buffers: list[InputBuffers] = field(default_factory=list)
    received: list[torch.Tensor] = field(default_factory=list)  # of the request that is answered
    prepared: LocalSteps | None = None
    working_threads: set[str] = field(default_factory=set)

    @property
    def steps(self) -> LocalSteps:
        assert self.prepared is not None, "timing.prepare comes before"
        return self.prepared


class TimingHandlers:
    """Handlers of the timing requests, and the timings in this worker by id."""

    def __init__(self, state: PointResolver) -> None:
        self.state = state
        self.threads = ThreadMonitor()
        self.hooks = HookMonitor(protected_functions())
        self.timings: dict[int, WorkerTiming] = {}
        self.n_timings = 0

    def handlers(self) -> dict[str, Handler]:
        calling = (_estimate, _prepare, _run)
        others = (
            *(_memory, _allocate, _load, _generate, _poison, _rest, _evict, _wait, _clock, _nothing),
            *(_pick, _ranges, _shared_memory, _unwritten, _hold, _store_digests, _has_changed),
            *(_digests, _ring_suspicion),
        )
        on_a_timing: dict[str, Handler] = {
            f"timing.{step.__name__.removeprefix('_')}": partial(self._run_step, step, step in calling)
            for step in (*calling, *others)
        }
        return on_a_timing | {
            "timing.first_call": self._first_call,
            "timing.create": self._create,
            "timing.replaced_functions": self._replaced_functions,
        }

    def _replaced_functions(self, payload: Payload, _: list[torch.Tensor]) -> Result:
        return {"replaced": replaced_functions(), "hooks": self.hooks.look_at_all()}, ()

    def _run_step(
        self, step: Step, calls: bool, payload: Payload, tensors_received: list[torch.Tensor]
    ) -> Result:
        """Run one step in the backend's context; report flags and threads that work outside of calls."""
        timing = self.timings[payload["timing"]]
        timing.received = tensors_received
        if calls:
            self.threads.begin_step()
        with timing.backend.context():
            fields, tensors = step(timing, payload)
        timing.received = []
        if calls:
            # Threads that a step left behind could go on with its work while nothing is timed. No other step
            # makes calls, so what they use while contents arrive counts as well.
            timing.working_threads |= self.threads.working_threads()
        flags = sorted(timing.prepared.flags) if timing.prepared else []
        violations = dict(timing.prepared.violations) if timing.prepared else {}
        # Before the reply: a hook could do the work, and remove itself, when the next request arrives.
        if hooks := self.hooks.look():
            violations["hooks"] = "; ".join(hooks)
        reports = {"flags": flags, "threads": sorted(timing.working_threads), "violations": violations}
        return {**fields, **reports}, tensors

    def _first_call(self, payload: Payload, _: list[torch.Tensor]) -> Result:
        """Bind and call for the first time; the parent measures the wall time."""
        operator, implementation, case, direction, device = self.state.point(payload)
        buffers = allocate_buffers(case, device, _grad_form(payload, direction), payload["seed"])
        call_once(bind(operator, implementation, case, direction, buffers.inputs, buffers.grad))
        if device == "cuda":
            torch.cuda.synchronize()
        del buffers  # other processes need the memory before this one does again
        release_unused_memory(UNUSED_BYTES)
        return {}, ()

    def _create(self, payload: Payload, _: list[torch.Tensor]) -> Result:
        operator, implementation, case, direction, device = self.state.point(payload)
        self.threads.reset()  # other requests than this timing's may have come before
        backend = timing_backend(device, payload["without"])
        trusted = bool(payload.get("trusted"))  # a reference may return what a candidate may not
        self.n_timings += 1
        self.timings[self.n_timings] = WorkerTiming(
            backend=backend,
            device=device,
            candidate=Candidate(
                name=implementation.name,
                bind=lambda b: bind(operator, implementation, case, direction, b.inputs, b.grad),
                inspected=not trusted,
                output_forms=self.state.output_forms(payload),
                hooks=None if trusted else self.hooks,
            ),
            allocate=partial(allocate_empty, case, device, _grad_form(payload, direction)),
            regenerate=lambda buffers, seed, positions: regenerate(buffers, case, seed, positions),
            contents=BufferCache(partial(allocate_buffers, case, device, _grad_form(payload, direction))),
        )
        return {
            "timing": self.n_timings,
            "cache_bytes": backend.cache_bytes,
            "overhead_us": backend.overhead_us,
            "slow_us": backend.slow_us,
            "cpu_limits": [getattr(backend, "cores", 1), getattr(backend, "spin_ns", 0)],
        }, ()


Step = Callable[[WorkerTiming, Payload], Result]


def _grad_form(payload: Payload, direction: str) -> ShapeDtype | None:
    if direction != BACKWARD:
        return None
    shape, dtype = payload["grad"]
    return tuple(shape), getattr(torch, dtype)


def _memory(timing: WorkerTiming, payload: Payload) -> Result:
    return {"bytes": timing.backend.available_memory()}, ()


def _allocate(timing: WorkerTiming, payload: Payload) -> Result:
    """Allocate buffers without values; release those before, and what was prepared on them."""
    timing.prepared = None
    timing.buffers.clear()
    release_unused_memory(UNUSED_BYTES)
    timing.buffers += [timing.allocate() for _ in range(payload["count"])]
    return {}, ()


def _load(timing: WorkerTiming, payload: Payload) -> Result:
    """Write each received tensor into the buffers of the request's indexes, at its position."""
    for tensor, (position, indexes) in zip(timing.received, payload["writes"], strict=True):
        for index in indexes:
            overwrite(timing.buffers[index].all_tensors[position], tensor)
    return {}, ()


def _generate(timing: WorkerTiming, payload: Payload) -> Result:
    """Write contents from a seed, for those that are too large to be sent."""
    if timing.prepared is not None:
        timing.prepared.drop_spare_outputs()
    # Before, too: the problem's own generator needs as much memory as the inputs have.
    release_unused_memory(UNUSED_BYTES)
    first, *others = (timing.buffers[index] for index in payload["indexes"])
    choices: list[ElementChoices] = []
    if payload["alteration"] is not None:
        other, seed, many = payload["alteration"]
        timing.regenerate(first, other, payload["positions"])  # in place too, before they are overwritten
        choices = choose(first, seed, many)
    timing.regenerate(first, payload["seed"], payload["positions"])
    alter(first, choices)
    for buffers in others:
        for position in payload["positions"]:
            overwrite(buffers.all_tensors[position], first.all_tensors[position])
    release_unused_memory(UNUSED_BYTES)
    return {}, ()


def _estimate(timing: WorkerTiming, payload: Payload) -> Result:
    estimate = timing.backend.estimate(timing.candidate, timing.buffers[0])
    return {"us": estimate.us, "output_bytes": estimate.output_bytes}, ()


def _prepare(timing: WorkerTiming, payload: Payload) -> Result:
    plan = Plan(calls=payload["calls"], flush=payload["flush"], spare=payload["spare"])
    runner = timing.backend.make_runner(timing.candidate, timing.buffers, plan)
    timing.prepared = LocalSteps(runner, timing.buffers, timing.contents, timing.device)
    release_unused_memory(UNUSED_BYTES)  # outputs of the calls before a capture, which has memory of its own
    return {"calls": runner.calls}, ()


def _run(timing: WorkerTiming, payload: Payload) -> Result:
    """Make the calls of these indexes and keep their outputs: of a sample, a re-check or anything else."""
    names = ("indexes", "repeats", "mode", "kept_positions")
    return vars(timing.steps.run(*(payload[name] for name in names))), ()


def _poison(timing: WorkerTiming, payload: Payload) -> Result:
    timing.steps.poison()
    return {}, ()


def _rest(timing: WorkerTiming, payload: Payload) -> Result:
    timing.steps.rest()
    release_unused_memory(UNUSED_BYTES)
    return {}, ()


def _evict(timing: WorkerTiming, payload: Payload) -> Result:
    timing.steps.evict()
    return {}, ()


def _wait(timing: WorkerTiming, payload: Payload) -> Result:
    return {"cpu_ns": timing.steps.wait()}, ()


def _nothing(timing: WorkerTiming, payload: Payload) -> Result:
    """Take what every step costs: the synchronisations, and the looks at hooks and at the L2's limit."""
    return {}, ()


def _clock(timing: WorkerTiming, payload: Payload) -> Result:
    """Read the clock that takes the samples on a CPU."""
    return {"ns": cpu._now()}, ()


def _shared_memory(timing: WorkerTiming, payload: Payload) -> Result:
    return {"reason": timing.steps.shared_memory()}, ()


def _unwritten(timing: WorkerTiming, payload: Payload) -> Result:
    return {"index": timing.steps.unwritten()}, ()


def _ring_suspicion(timing: WorkerTiming, payload: Payload) -> Result:
    return {"suspicion": timing.steps.ring_suspicion()}, ()


def _hold(timing: WorkerTiming, payload: Payload) -> Result:
    timing.steps.hold(payload["indexes"])
    return {}, ()


def _store_digests(timing: WorkerTiming, payload: Payload) -> Result:
    timing.steps.store_digests(payload["indexes"])
    return {}, ()


def _has_changed(timing: WorkerTiming, payload: Payload) -> Result:
    return {"changed": timing.steps.has_changed()}, ()


def _digests(timing: WorkerTiming, payload: Payload) -> Result:
    return {"digests": timing.steps.digests(payload["indexes"])}, ()


def _ranges(timing: WorkerTiming, payload: Payload) -> Result:
    """Say where outputs lie; nothing of them is read."""
    tensors = timing.steps.outputs_of(payload["indexes"])
    return {"ranges": [asdict(MemoryRange.of(t)) for t in tensors if t.numel()]}, ()


def _pick(timing: WorkerTiming, payload: Payload) -> Result:
    release_unused_memory(UNUSED_BYTES)  # of the calls' temporaries: the parent process needs it for its copy
    picked = timing.steps.pick(payload["indexes"])
    # The picked outputs leave the process; the others stay, so that a recheck of large outputs is cheap.
    groups = [tensors_of(picked[i]) for i in payload["indexes"]]
    is_single = [isinstance(picked[i], torch.Tensor) for i in payload["indexes"]]
    tensors = [t.detach() for group in groups for t in group]
    return {"group_sizes": [len(group) for group in groups], "is_single": is_single}, tensors


def handlers(state: PointResolver) -> Mapping[str, Handler]:
    """Return the timing handlers; call it before any of the candidate's code is loaded."""
    snapshot()
    return TimingHandlers(state).handlers()
