"""Observe the kernels that an implementation runs, and compare them with its declared backend.

An external candidate is observed in a new worker process, once with a profiler and once by other
means, since a cheating candidate may behave differently under a profiler. The worker lists the
kernels; :mod:`weft.workbench.kernels.provenance` judges the lists in the parent process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from weft.core import BACKWARD, FORWARD, Case, Implementation
from weft.workbench.calls import inputs as call_inputs
from weft.workbench.calls.bind import bind, differentiable_outputs
from weft.workbench.calls.buffers import ShapeDtype, allocate_buffers
from weft.workbench.calls.errors import SandboxDied, WorkerError
from weft.workbench.calls.make_calls import call_once
from weft.workbench.calls.seeds import fresh_seeds
from weft.workbench.calls.selection import BenchPoint
from weft.workbench.kernels import provenance
from weft.workbench.kernels.provenance import Kernels
from weft.workbench.sandbox import worker as worker_handlers
from weft.workbench.sandbox.caller import WorkerProcess
from weft.workbench.sandbox.process import Limits, Sandbox
from weft.workbench.sandbox.worker import Handler, Result, WorkerState
from weft.workbench.sources.source import Source

OBSERVERS = ("kernels.provenance", "sandbox.observed_kernels")  # modules whose functions may not change


@dataclass(frozen=True, kw_only=True)
class ObservedKernels:
    """Names of the kernels, the longest-running first.

    ``violations`` are reasons by check: ``provenance`` (a library's kernel although the candidate
    declared its own) or ``observed`` (other kernels without a profiler). ``note`` says what could
    not be observed, which is no confirmation.
    """

    kernels: tuple[str, ...] = ()
    violations: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def flags(self) -> set[str]:
        """Flags of a record."""
        flags = {f"suspect: kernels: {why}" for why in self.violations.values()}
        return flags | ({f"kernels {self.note}"} if self.note else set())


def observe_kernels(
    point: BenchPoint, implementation: Implementation, grad: ShapeDtype | None, worker: WorkerProcess | None
) -> ObservedKernels:
    """Observe the kernels of one call of an implementation that was timed.

    Weft's own implementations are observed in this process by the profiler alone. On a CPU compiled
    code has no kernels to name, so an own implementation without kernels gets no note there.
    """
    case, device, direction = point.case, point.device, point.direction
    if worker is not None:
        return observe_in_worker(worker.source, implementation, case, device, direction, worker.limits)
    buffers = allocate_buffers(case, device, grad, fresh_seeds(1)[0])

    def call() -> object:
        return bind(point.operator, implementation, case, direction, buffers.inputs, buffers.grad)()

    try:
        kernels = provenance.kernels(call, device)
    except torch.OutOfMemoryError:
        return ObservedKernels(note=provenance.NOT_LISTED + "out of memory")
    why = provenance.verdict(implementation.backend_of(direction), kernels, implementation.wraps_library)
    note = kernels.note if device != "cpu" else ""
    return ObservedKernels(kernels=kernels.names, violations={"provenance": why} if why else {}, note=note)


def observe_in_worker(
    source: Source,
    implementation: Implementation,
    case: Case,
    device: str,
    direction: str = FORWARD,
    limits: Limits | None = None,
) -> ObservedKernels:
    """Observe an external implementation in a new process, with a profiler and without.

    A candidate that passed its check but ends or raises while it is observed is a violation.
    """
    point = {
        "operator": implementation.operator,
        "implementation": implementation.name,
        "case": case.name,
        "direction": direction,
        "device": device,
        "seed": fresh_seeds(1)[0],
    }
    try:
        with Sandbox(limits=limits, argument={"source": source.to_json()}) as sandbox:
            reply = sandbox.request("kernels", point).payload
            integrity = sandbox.request("timing.replaced_functions").payload
            idle = _idle_kernels(sandbox, implementation, point)
        profiled, unprofiled = _kernels(reply["profiled"]), _kernels(reply["unprofiled"])
        dispatched = _kernels(reply["dispatched"]) if "dispatched" in reply else None
    except (SandboxDied, WorkerError) as error:
        if "OutOfMemoryError" in str(error):
            return ObservedKernels(note=provenance.NOT_LISTED + "out of memory")
        why = error.reason if isinstance(error, SandboxDied) else f"raised {error}"
        return ObservedKernels(violations={"observed": f"while its kernels were observed, it {why}"})
    # Both lists come from the candidate's own process: a mismatch between them is the evidence.
    violations = {}
    # Of what observes alone: the checks and the timing look for the rest, under names of their own.
    reported = (str(name) for key in ("replaced", "hooks") for name in integrity[key])
    if replaced := [name for name in reported if any(module in name for module in OBSERVERS)]:
        names = ", ".join(replaced[:3])
        violations["observed"] = f"functions were replaced while its kernels were observed: {names}"
    # On a CPU a library's operators count by their names, so the list without a profiler will do for one that
    # the profiler did not make. On a GPU they count by their times, which that list does not have.
    instead = unprofiled if profiled.note and device == "cpu" else None
    for listing in (profiled, dispatched, instead):
        if listing is not None and (foreign := provenance.verdict(implementation.backend, listing)):
            violations["provenance"] = foreign
            break
    else:
        if idle:
            violations["provenance"] = idle
    difference = provenance.compare(profiled, unprofiled, dispatched)
    if difference.startswith(provenance.NOT_LISTED):
        return ObservedKernels(kernels=profiled.names, violations=violations, note=difference)
    if difference:
        violations.setdefault("observed", difference)
    note = provenance.unnamed_work(profiled) if device == "cpu" else ""
    return ObservedKernels(kernels=profiled.names, violations=violations, note=note)


def _idle_kernels(sandbox: Sandbox, implementation: Implementation, point: Mapping[str, Any]) -> str:
    """Return that the answer is not computed by the candidate's kernels, if it is so; on a CPU alone.

    There the time of an interpreted kernel says nothing about the work that it does.
    """
    if point["device"] != "cpu" or implementation.backend not in provenance.OWN:
        return ""
    try:
        reply = sandbox.request("idle_kernels", {**point, "seed": fresh_seeds(1)[0]}).payload
    except (SandboxDied, WorkerError):  # it cannot go on without its kernels, so they do something
        return ""
    if not reply["idle"]:
        return ""
    return f"declared {implementation.backend}, but its output is the same where its kernels do nothing"


def _kernels(fields: Mapping[str, Any]) -> Kernels:
    """Read a list of kernels from a reply; the worker is not trusted, so convert every field."""
    return Kernels(
        names=tuple(map(str, fields["names"])),
        shares=tuple(map(float, fields["shares"])),
        source=str(fields["source"]),
        origins=tuple(map(str, fields["origins"])),
        counts=tuple(map(int, fields["counts"])),
        seen=frozenset(map(str, fields["seen"])),
        note=str(fields["note"]),
    )


# -- in the worker process ---------------------------------------------------------------------


def handlers(argument: Mapping[str, Any]) -> Mapping[str, Handler]:
    """Return the handlers of every worker: of checks and timings, and those that observe kernels.

    A worker that observes kernels has the same modules as all others, so that a candidate cannot tell by
    ``sys.modules`` where it is.
    """
    own = worker_handlers.handlers(argument)
    state = WorkerState(Source.from_json(argument["source"]))
    return {
        **own,
        "kernels": lambda payload, tensors: _list_kernels(state, payload),
        "idle_kernels": lambda payload, tensors: _look_for_idle_kernels(state, payload),
    }


def _list_kernels(state: WorkerState, payload: Mapping[str, Any]) -> Result:
    """List the kernels of a point with a profiler and without, on inputs of the given seed."""
    call, device = _bound_call(state, payload)
    listings = {"profiled": provenance.kernels(call, device)}
    if device == "cpu":
        listings["dispatched"] = provenance.kernels(call, device, dispatched=True)
    listings["unprofiled"] = provenance.observed(call, device)  # the last pass of a process
    return {name: _to_json(listing) for name, listing in listings.items()}, ()


def _look_for_idle_kernels(state: WorkerState, payload: Mapping[str, Any]) -> Result:
    """Compare the output with that of a call whose kernels do nothing, on inputs of a new seed."""
    call, _ = _bound_call(state, payload)
    return {"idle": provenance.is_same_without_kernels(call)}, ()


def _bound_call(state: WorkerState, payload: Mapping[str, Any]) -> tuple[Callable[[], Any], str]:
    """Return a call of the point's implementation on inputs of the given seed, and its device."""
    operator, implementation, case, direction, device = state.point(payload)
    inputs = call_inputs.make(case, device, payload["seed"])
    grad = None
    if direction == BACKWARD:
        outputs = implementation.forward(*inputs, **case.params)
        like = differentiable_outputs(operator, outputs)
        grad = call_inputs.gradient_like(like, payload["seed"], device=device)
    # The same innermost function as in a check and a timing; a profiler is seen by other means anyway.
    return partial(call_once, bind(operator, implementation, case, direction, inputs, grad)), device


def _to_json(kernels: Kernels) -> dict[str, Any]:
    return asdict(kernels) | {"seen": sorted(kernels.seen)}
