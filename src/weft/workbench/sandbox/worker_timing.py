"""Timing of a candidate in a worker process: the part that runs in the worker.

It prepares the candidate, takes samples, overwrites inputs, runs again and sends the requested
outputs. The parent process keeps the session, the oracle and a clock of its own
(:mod:`remote_timing`). It generates the inputs, where no code of the candidate can do work in passing,
and sends them; it receives numbers and the outputs that it picks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    tensors_of,
)
from weft.workbench.calls.staging import TensorForm
from weft.workbench.timing import cpu
from weft.workbench.timing.altered_inputs import alter
from weft.workbench.timing.hooks import HookMonitor
from weft.workbench.timing.integrity import protected_functions, replaced_functions, snapshot
from weft.workbench.timing.local_candidate import BufferCache, LocalTimedCandidate
from weft.workbench.timing.measure import timing_backend
from weft.workbench.timing.plan import Candidate, IntegrityError, Plan, TimedOutputs, TimingBackend
from weft.workbench.timing.threads import ThreadMonitor

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

    backend: TimingBackend
    candidate: Candidate
    allocate: Callable[[], InputBuffers]
    contents: BufferCache
    buffers: list[InputBuffers] = field(default_factory=list)
    received: list[torch.Tensor] = field(default_factory=list)  # of the request that is answered
    prepared: LocalTimedCandidate | None = None
    rerun_passes: Iterator[TimedOutputs] | None = None
    outputs: TimedOutputs | None = None
    working_threads: set[str] = field(default_factory=set)

    @property
    def timed(self) -> LocalTimedCandidate:
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
        steps = (
            *(
                _memory,
                _allocate,
                _load,
                _generate,
                _estimate,
                _prepare,
                _sample,
                _side_sample,
                _cross_check,
                _repeat,
            ),
            *(_audit, _repeat_audit, _rerun, _pick, _clock),
        )
        on_a_timing: dict[str, Handler] = {
            f"timing.{step.__name__.removeprefix('_')}": partial(self._run_step, step) for step in steps
        }
        return on_a_timing | {
            "timing.first_call": self._first_call,
            "timing.create": self._create,
            "timing.replaced_functions": self._replaced_functions,
            "timing.nothing": lambda payload, _: ({}, ()),
        }

    def _replaced_functions(self, payload: Payload, _: list[torch.Tensor]) -> Result:
        return {"replaced": replaced_functions(), "hooks": self.hooks.look_at_all()}, ()

    def _run_step(self, step: Step, payload: Payload, tensors_received: list[torch.Tensor]) -> Result:
        """Run one step in the backend's context; report flags and threads that work after it."""
        timing = self.timings[payload["timing"]]
        timing.received = tensors_received
        self.threads.begin_step()
        with timing.backend.context():
            fields, tensors = step(timing, payload)
        timing.received = []
        # Threads that a step left behind could go on with its work while nothing is timed.
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
        bind(operator, implementation, case, direction, buffers.inputs, buffers.grad)()
        if device == "cuda":
            torch.cuda.synchronize()
        return {}, ()

    def _create(self, payload: Payload, _: list[torch.Tensor]) -> Result:
        operator, implementation, case, direction, device = self.state.point(payload)
        self.threads.reset()  # other requests than this timing's may have come before
        backend = timing_backend(device, payload["without"])
        self.n_timings += 1
        self.timings[self.n_timings] = WorkerTiming(
            backend=backend,
            candidate=Candidate(
                name=implementation.name,
                bind=lambda b: bind(operator, implementation, case, direction, b.inputs, b.grad),
                inspected=True,
                output_forms=self.state.output_forms(payload),
                hooks=self.hooks,
            ),
            allocate=partial(allocate_empty, case, device, _grad_form(payload, direction)),
            contents=BufferCache(partial(allocate_buffers, case, device, _grad_form(payload, direction))),
        )
        return {
            "timing": self.n_timings,
            "cache_bytes": backend.cache_bytes,
            "overhead_us": backend.overhead_us,
            "slow_us": backend.slow_us,
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
    timing.prepared = timing.rerun_passes = timing.outputs = None
    timing.buffers.clear()
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
    contents = timing.contents(payload["seed"])
    for index in payload["indexes"]:
        buffers = timing.buffers[index]
        for position in payload["positions"]:
            overwrite(buffers.all_tensors[position], contents.all_tensors[position])
        if payload["alteration"] is not None:
            other, seed, many = payload["alteration"]
            alter(buffers, timing.contents(other), seed, many=many)
    return {}, ()


def _estimate(timing: WorkerTiming, payload: Payload) -> Result:
    estimate = timing.backend.estimate(timing.candidate, timing.buffers[0])
    return {"us": estimate.us, "output_bytes": estimate.output_bytes}, ()


def _prepare(timing: WorkerTiming, payload: Payload) -> Result:
    plan = Plan(calls=payload["calls"], flush=payload["flush"])
    prepared = timing.backend.prepare(timing.candidate, timing.buffers, timing.contents, plan)
    assert isinstance(prepared, LocalTimedCandidate)
    timing.prepared = prepared
    return {"calls": prepared.calls}, ()


def _sample(timing: WorkerTiming, payload: Payload) -> Result:
    timing.outputs = None
    us = timing.timed.sample()
    timing.outputs = timing.timed.sampled_outputs()
    return {"us": us, "audit_calls": timing.timed.audit_calls}, ()


def _side_sample(timing: WorkerTiming, payload: Payload) -> Result:
    """Take one sample with a warm cache, or of the host's time."""
    timed = timing.timed
    return {"us": timed.sample_warm() if payload["warm"] else timed.sample_host()}, ()


def _cross_check(timing: WorkerTiming, payload: Payload) -> Result:
    return {"suspicions": timing.timed.cross_check()}, ()


def _repeat(timing: WorkerTiming, payload: Payload) -> Result:
    return {"us": timing.timed.runner.repeat(payload["repeats"], payload["warm"])}, ()


def _clock(timing: WorkerTiming, payload: Payload) -> Result:
    """Read the clock that takes the samples on a CPU."""
    return {"ns": cpu._now()}, ()


def _audit(timing: WorkerTiming, payload: Payload) -> Result:
    """Time calls on contents that the candidate has never seen, which were loaded before."""
    try:
        us, timing.outputs = timing.timed.audit_loaded(payload["calls"])
    except IntegrityError as error:
        return {"integrity_error": str(error)}, ()
    return {"us": us, "count": len(timing.outputs)}, ()


def _repeat_audit(timing: WorkerTiming, payload: Payload) -> Result:
    """Time the calls of the audit again, on the same contents."""
    return {"us": timing.timed.repeat_audit(payload["calls"])}, ()


def _rerun(timing: WorkerTiming, payload: Payload) -> Result:
    """Start a rerun on the contents that were loaded before, or continue to its next pass."""
    if payload["starts"]:
        timing.rerun_passes = timing.timed.rerun_loaded(payload["round_number"])
    assert timing.rerun_passes is not None, "a rerun was not started"
    timing.outputs = None
    try:
        timing.outputs = next(timing.rerun_passes, None)
    except IntegrityError as error:
        return {"integrity_error": str(error)}, ()
    if timing.outputs is None:
        return {}, ()
    return {"label": timing.outputs.label, "count": len(timing.outputs)}, ()


def _pick(timing: WorkerTiming, payload: Payload) -> Result:
    assert timing.outputs is not None, "no outputs: audit or rerun comes before"
    picked = timing.outputs.pick(payload["indexes"])
    # The picked outputs leave the process; the others stay, so that a recheck of large outputs is cheap.
    groups = [tensors_of(picked[i]) for i in payload["indexes"]]
    is_single = [isinstance(picked[i], torch.Tensor) for i in payload["indexes"]]
    tensors = [t.detach() for group in groups for t in group]
    return {"group_sizes": [len(group) for group in groups], "is_single": is_single}, tensors


def handlers(state: PointResolver) -> Mapping[str, Handler]:
    """Return the timing handlers; call it before any of the candidate's code is loaded."""
    snapshot()
    return TimingHandlers(state).handlers()
