"""Workload of a profile: an implementation that passed its check, bound to inputs as bench generates them.

A step calls the implementation once on each of a set of distinct inputs, which together exceed twice the
last-level cache if memory allows, and waits until the device is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from weft import backends
from weft.core import BACKWARD, Case, Implementation, Operator, Verdict, WeftError, registry
from weft.core.operator import DIRECTIONS, unknown_name
from weft.core.record import PASS
from weft.workbench.bench import CHECK_SEEDS, synchronise
from weft.workbench.calls.bind import bind
from weft.workbench.calls.buffers import InputBuffers, Outputs, ShapeDtype, allocate_buffers
from weft.workbench.calls.seeds import fresh_seeds
from weft.workbench.check.check import check
from weft.workbench.check.oracle import Oracle
from weft.workbench.timing.plan import MAX_CALLS, Candidate, TimingBackend

DEFAULT_IMPLEMENTATION = "torch"  # the vendor's own fused call, which every operator has
MIN_STEP_US = 5_000.0  # a step repeats its calls up to this time, so that the gap between steps is small
MAX_STEP_US = 200_000.0  # a step uses fewer inputs than the cache asks for to stay below this time
FEW_INPUTS = 8  # inputs if not even the largest number of them would exceed the cache


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Implementation at one case, in one direction, on one device ('cuda' or 'cpu')."""

    operator: Operator
    implementation: Implementation
    case: Case
    direction: str
    device: str

    def bind(self, buffers: InputBuffers) -> Callable[[], Outputs]:
        call = (self.operator, self.implementation, self.case, self.direction)
        return bind(*call, buffers.inputs, buffers.grad)


def select_subject(
    operator: str, implementation: str | None, case: str | None, direction: str, device: str
) -> Subject:
    """Return the subject of these names: by default the vendor's call at the device's first bench case.

    Raises :class:`WeftError` for an unknown name, and for a subject that cannot be timed here.
    """
    if direction not in DIRECTIONS:
        raise unknown_name("direction", direction, list(DIRECTIONS))
    chosen = registry.operator(operator)
    name = implementation or DEFAULT_IMPLEMENTATION
    known = registry.implementation_names(operator)
    if name not in known:
        raise unknown_name(f"implementation of {operator}", name, known)
    candidate = registry.implementation(operator, name)
    point = chosen.case(case) if case else next(iter(chosen.select("bench", device)), chosen.cases[0])
    if not chosen.cost(point, direction).written:
        raise WeftError(
            f"{operator} {point.name} {direction} moves no bytes: there is nothing to profile",
            hint="the gradient is a view; try --direction forward",
        )
    support = backends.support(candidate, point, device, direction)
    if not (support.ok and support.timed):
        raise WeftError(
            f"{operator} {name} {point.name} cannot be profiled here",
            expected=f"an implementation that can be timed on this {device} device",
            got=support.reason,
        )
    return Subject(operator=chosen, implementation=candidate, case=point, direction=direction, device=device)


def check_subject(subject: Subject) -> tuple[Verdict, ShapeDtype | None]:
    """Return the verdict on a subject, by bench's check, and shape and dtype of its incoming gradient."""
    operator, implementation, case = subject.operator, subject.implementation, subject.case
    direction, device = subject.direction, subject.device
    oracle = Oracle(operator, case, direction, device, fresh_seeds(CHECK_SEEDS))
    verdict = check(operator, implementation, case, direction, device, oracle=oracle)
    if verdict.status != PASS or direction != BACKWARD:
        return verdict, None
    form = oracle.grad_form
    return verdict, (form.shape, form.dtype)


class Workload:
    """Subject bound to its inputs.

    ``calls`` is the number of calls in a step, ``inputs`` the number of distinct inputs that they rotate
    over. ``cold`` is True if these exceed twice the last-level cache.
    """

    def __init__(self, device: str, closures: Sequence[Callable[[], Outputs]], rounds: int) -> None:
        self.device, self.cold = device, False
        self._closures = list(closures) * rounds
        self.inputs = len(closures)
        # An output lives until its input's next call, so that outputs rotate through memory too.
        self._outputs: list[Outputs | None] = [None] * self.inputs

    @property
    def calls(self) -> int:
        return len(self._closures)

    def enqueue(self) -> None:
        """Make the calls of a step; on a GPU they may still run when this returns."""
        outputs, inputs = self._outputs, self.inputs
        for i, call in enumerate(self._closures):
            outputs[i % inputs] = call()

    def step(self) -> None:
        """Make the calls of a step and wait until the device is done."""
        self.enqueue()
        synchronise(self.device)


def prepare(subject: Subject, grad: ShapeDtype | None, backend: TimingBackend) -> Workload:
    """Generate the inputs of a step, bind them, and run the step once.

    Call it within ``backend.context()``: a backward runs on the stream of its forward.
    """
    allocate = partial(allocate_buffers, subject.case, subject.device, grad)
    first = replace(allocate(0), seed=0)
    estimate = backend.estimate(Candidate(name=subject.implementation.name, bind=subject.bind), first)
    # Outputs count as well: one is held for each input, so they displace inputs from the cache.
    footprint = max(1, first.nbytes + estimate.output_bytes)
    available = backend.available_memory() // 2  # the other half is for outputs and workspaces
    inputs, rounds = step_size(footprint, estimate.us, backend.cache_bytes, available)
    buffers = [first, *(allocate(seed) for seed in range(1, inputs))]
    workload = Workload(subject.device, [subject.bind(b) for b in buffers], rounds)
    # At twice the cache an input has left it before its next call.
    workload.cold = inputs * footprint >= 2 * backend.cache_bytes
    workload.step()
    return workload


def step_size(footprint: int, us: float, cache: int, available: int) -> tuple[int, int]:
    """Return how many distinct inputs a step of calls rotates over, and how often.

    ``footprint`` is bytes a call, ``us`` its time, ``cache`` and ``available`` memory are bytes.

    >>> step_size(1 << 20, 100.0, 8 << 20, 1 << 30), step_size(64, 2.0, 8 << 20, 1 << 30)
    ((16, 4), (8, 32))
    """
    # Avoids a division by zero: a view takes no time.
    us = max(us, 0.1)
    for_cache = max(1, -(-2 * cache // footprint))
    # Tiny inputs would need more calls than a step may have. They stay in the cache, so a few are enough.
    inputs = for_cache if for_cache <= MAX_CALLS else FEW_INPUTS
    # Two inputs even if one call fills the step, so that consecutive calls differ if memory allows it.
    inputs = max(1, min(inputs, available // footprint, max(2, int(MAX_STEP_US // us))))
    # Rounded up: a step lasts at least MIN_STEP_US unless MAX_CALLS limits it.
    rounds = -(-MIN_STEP_US // (inputs * us))
    return inputs, int(max(1, min(rounds, MAX_CALLS // inputs)))
