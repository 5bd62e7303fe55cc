"""Call of a candidate, and the rules that need the memory of the call: addresses, guards, types.

These rules are applied in the process that makes the call, which may be a worker. ``check.rules``
judges the values of the outputs, always in the parent process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from weft.core import BACKWARD, Implementation
from weft.workbench.calls.bind import bind
from weft.workbench.calls.guarded_memory import Arena, are_equal, bits, digest, prepoison, served_from, span
from weft.workbench.calls.make_calls import call_once
from weft.workbench.calls.staging import CallSpec, StagedCall

COPIED_BYTES = 1 << 26  # outputs above it are remembered by a digest in place of a copy
COMPARED_AT_ONCE = 1 << 24  # elements of two outputs


@dataclass(frozen=True)
class TensorLayout:
    """Layout of an output in memory: shape, dtype and device as torch names them, strides."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    strides: tuple[int, ...]

    @staticmethod
    def of(out: torch.Tensor) -> TensorLayout:
        return TensorLayout(tuple(out.shape), str(out.dtype), str(out.device), tuple(out.stride()))


@dataclass(kw_only=True)
class CallResult:
    """Result of one call: its outputs with their layouts, and the violations of the rules applied here.

    ``seconds`` is the wall time; ``unguarded`` counts allocations that were too large to guard.
    """

    outputs: tuple[torch.Tensor, ...] = ()
    layouts: tuple[TensorLayout, ...] = ()
    violations: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    unguarded: int = 0


@dataclass
class RawCall:
    """Call with the memory that it used.

    ``bound`` is the arena of the allocations made while binding (the forward before a backward),
    ``served`` the arena of those that the call itself made.
    """

    stage: StagedCall
    result: Any = None
    raised: str = ""
    seconds: float = 0.0
    bound: Arena | None = None
    served: Arena | None = None
    saved_copies: list[torch.Tensor] = field(default_factory=list)

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The outputs as a tuple."""
        return self.result if isinstance(self.result, tuple) else (self.result,)


def call(
    implementation: Implementation, stage: StagedCall, stream: torch.cuda.Stream | None = None
) -> RawCall:
    """Call the implementation on the staged inputs; store whatever it raises."""
    spec = stage.spec
    raw = RawCall(stage)
    if implementation.backend != "compile":  # compiled code allocates below any mode
        limit = _guarded_bytes_limit(spec.device)
        raw.bound = Arena(spec.device, stage.poison, limit)
        raw.served = Arena(spec.device, stage.poison, limit)
    prepoison(spec.device, [form.nbytes for form in spec.output_forms], stage.poison)
    try:
        with stage.on(stream):
            grad = None if stage.grad is None else stage.grad.tensor
            point = (spec.operator, implementation, spec.case, spec.direction)
            with served_from(raw.bound):
                closure = bind(*point, stage.tensors, grad)
            if raw.bound is not None:
                raw.saved_copies = [block.payload.clone() for block in raw.bound.blocks]
            # The clock starts after binding: a backward's forward is not part of the call.
            began = time.perf_counter()
            with served_from(raw.served):
                raw.result = call_once(closure)
        if spec.device.startswith("cuda"):
            # A failed launch is reported at the next synchronisation: here it is the candidate's own.
            torch.cuda.synchronize()
        raw.seconds = time.perf_counter() - began
    except (Exception, SystemExit) as error:  # noqa: BLE001 - external code may raise anything
        text = " ".join(str(error).split())
        raw.raised = f"{type(error).__name__}: {text[:300]}"
    return raw


def _guarded_bytes_limit(device: str) -> int:
    """Return the bytes of guarded memory for one call; allocations past it are not guarded."""
    # An arena frees nothing until the call is judged, so a call with many temporaries would
    # otherwise run out of memory that it needs only once at a time.
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(torch.device(device)).total_memory // 4
    return 2 << 30


def raised(raw: RawCall) -> str:
    """Require that the call returns: it raises nothing and none of its launches fails."""
    return f"raised {raw.raised}" if raw.raised else ""


def is_tensor(raw: RawCall) -> str:
    """Require plain strided ``torch.Tensor`` objects, as many as the operator has outputs.

    A subclass may answer each comparison as it likes; a lazy conjugate or a tensor without memory has no
    elements of its own to judge.
    """
    want = len(raw.stage.spec.output_forms)
    if raw.stage.spec.direction == BACKWARD and not isinstance(raw.result, tuple):
        return f"the backward returned {type(raw.result).__name__}, not a tuple of {want}"
    if len(raw.outputs) != want:
        return f"returned {len(raw.outputs)} tensors, expected {want}"
    for i, out in enumerate(raw.outputs):
        if type(out) is not torch.Tensor:
            return f"output {i} is {_kind(out)}, expected exactly torch.Tensor"
        if out.layout is not torch.strided or out.is_conj() or out.is_neg():
            return f"output {i} is not a plain strided tensor"
        need = (out.storage_offset() + span(out.shape, out.stride())) * out.element_size()
        if out.untyped_storage().nbytes() < need and out.numel():
            return f"output {i} has no memory behind it"
    return ""


def _kind(out: object) -> str:
    return "None" if out is None else f"a {type(out).__module__}.{type(out).__name__}"


def alias(raw: RawCall) -> str:
    """Require that no output shares memory with an input or a saved tensor.

    Exception: in a backward, an output that expands the incoming gradient with stride 0 may be a view
    of it (the gradient of a sum).
    """
    blocks = list(raw.stage.arena.blocks)
    if raw.bound is not None:
        blocks += raw.bound.blocks
    for i, out in enumerate(raw.outputs):
        if out.numel() == 0:
            continue
        first = out.data_ptr()
        past = first + span(out.shape, out.stride()) * out.element_size()
        for block in blocks:
            low, high = block.address
            if past <= low or first >= high:
                continue
            # Of one element it is the same gradient: autograd returns that for a sum, too.
            broadcast = out.numel() == 1 or any(
                n > 1 and s == 0 for n, s in zip(out.shape, out.stride(), strict=True)
            )
            backward = raw.stage.spec.direction == BACKWARD
            if backward and block.name == "input 'grad'" and broadcast:
                continue
            return f"output {i} lies in the memory of {block.name}"
    return ""


def inputs(raw: RawCall) -> str:
    """Require that the inputs and the tensors saved for the backward are unchanged, bit for bit."""
    changed = raw.stage.changed()
    if raw.bound is not None:
        pairs = zip((b.payload for b in raw.bound.blocks), raw.saved_copies, strict=True)
        changed += ["a saved tensor" for same in are_equal(list(pairs)) if not same]
    return f"changed {', '.join(changed)}" if changed else ""


def guards(raw: RawCall) -> str:
    """Require intact guard bands around inputs and allocations."""
    arenas = [a for a in (raw.stage.arena, raw.bound, raw.served) if a is not None]
    return "; ".join(line for arena in arenas for line in arena.broken())


BLOCKING_RULES: dict[str, Callable[[RawCall], str]] = {"returns": raised, "type": is_tensor}
MEMORY_RULES: dict[str, Callable[[RawCall], str]] = {"alias": alias, "inputs": inputs, "guards": guards}


@dataclass
class RepeatBudget:
    """Seconds that further repeats of a candidate may still take, in all checks of one direction.

    ``least_is_done``: one case had the least number of calls, which is made however long it takes.
    """

    seconds: float
    least_is_done: bool = False


class Caller(Protocol):
    """A candidate at one case and direction: loaded with a seed's inputs, then called.

    ``sends_copies``: the outputs of a call are copies that no later call can change.
    ``repeat_budget`` limits the repeats that are made of external code only.
    """

    sends_copies: bool
    repeat_budget: RepeatBudget

    def load(self, seed: int) -> None: ...
    def call(self, on_side_stream: bool, without: Collection[str] = ()) -> CallResult: ...
    def close(self) -> None: ...


CallerFactory = Callable[[Implementation, CallSpec, int], Caller]


def make_local_caller(implementation: Implementation, spec: CallSpec, poison: int) -> Caller:
    """Return a caller that makes the calls in this process."""
    return LocalCaller(implementation, StagedCall(spec, poison))


class LocalCaller:
    """Candidate called many times on one set of staged inputs; no call may change earlier outputs."""

    sends_copies = False

    def __init__(self, implementation: Implementation, stage: StagedCall) -> None:
        self.implementation, self.stage = implementation, stage
        self.repeat_budget = RepeatBudget(0.0, least_is_done=True)
        self._previous: tuple[torch.Tensor, ...] = ()
        self._stream: torch.cuda.Stream | None = None

    def load(self, seed: int) -> None:
        self.stage.load(seed)

    def call(self, on_side_stream: bool, without: Collection[str] = ()) -> CallResult:
        """Make one call and apply this module's rules, except those named in ``without``.

        ``on_side_stream`` makes the call on a stream other than the current one.
        """
        if on_side_stream:
            self._stream = self._stream or torch.cuda.Stream()
        # Rule "kept": a candidate that reuses one output buffer changes the outputs it returned before.
        copies = _snapshot(self._previous)
        raw = call(self.implementation, self.stage, self._stream if on_side_stream else None)
        checked = CallResult(seconds=raw.seconds)
        if raw.served is not None:
            checked.unguarded = raw.served.unguarded
        for name, rule in BLOCKING_RULES.items():
            if violation := _apply(rule, raw):
                checked.violations[name] = violation
                # The other rules need tensors: without one there is nothing more to judge.
                if name not in without or raw.raised:
                    return checked
        for name, rule in MEMORY_RULES.items():
            if name not in without and (violation := _apply(rule, raw)):
                checked.violations[name] = violation
        if not all(isinstance(out, torch.Tensor) for out in raw.outputs):
            return checked
        if copies and "kept" not in without and (differ := _describe_change(self._previous, copies)):
            checked.violations["kept"] = f"the call changed the output of the call before it: {differ}"
        checked.outputs = tuple(out.detach().as_subclass(torch.Tensor) for out in raw.outputs)
        checked.layouts = tuple(TensorLayout.of(out) for out in checked.outputs)
        self._previous = checked.outputs
        return checked

    def close(self) -> None:
        """Release the staged inputs and the last outputs."""
        self._previous = ()
        del self.stage


def _apply(rule: Callable[[RawCall], str], raw: RawCall) -> str:
    try:
        return rule(raw)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        # Reached only by outputs that cannot be inspected, such as one without a storage.
        return f"could not be judged: {type(error).__name__}: {error}"


Snapshot = torch.Tensor | tuple[int, int]  # a copy, or the digest of a large tensor


def _snapshot(tensors: Sequence[torch.Tensor]) -> tuple[Snapshot, ...]:
    """Return what shows later that a tensor has changed."""
    return tuple(digest(t) if t.nbytes > COPIED_BYTES else t.clone() for t in tensors)


def _describe_change(tensors: Sequence[torch.Tensor], before: Sequence[Snapshot]) -> str:
    """Describe how tensors differ from what :func:`_snapshot` returned, or return ''."""
    for i, (tensor, old) in enumerate(zip(tensors, before, strict=True)):
        if not isinstance(old, torch.Tensor) and digest(tensor) != old:
            return f"elements of output {i} differ"
    # An empty pair stands for a tensor that was not copied, so that the others keep their numbers.
    pairs = [
        (t, old) if isinstance(old, torch.Tensor) else (t.new_empty(0), t.new_empty(0))
        for t, old in zip(tensors, before, strict=True)
    ]
    return describe_bit_differences([t for t, _ in pairs], [old for _, old in pairs])


def describe_bit_differences(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> str:
    """Describe the bits that differ between two outputs, or return ''; all NaNs are equal."""
    for i, (x, count) in enumerate(zip(a, _count_differences(a, b), strict=True)):
        if not count:
            continue
        gap = 0.0
        for one, other in _pieces(x, b[i]):
            distance = (one.double() - other.double()).abs()
            largest = float(torch.where(_differ(one, other), distance, 0.0).max())
            gap = math.inf if math.isnan(largest) else max(gap, largest)
        by = f"by up to {gap:.3g}" if gap < math.inf else "in NaN or Inf too"
        return f"{count} of {x.numel()} elements of output {i} differ, {by}"
    return ""


def _count_differences(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> list[int]:
    """Return for each pair of tensors how many elements differ, in one transfer from a GPU."""
    pairs = zip(a, b, strict=True)
    counts = [[_differ(one, other).count_nonzero() for one, other in _pieces(x, y)] for x, y in pairs]
    together = iter(torch.stack(flat).tolist() if (flat := [c for each in counts for c in each]) else [])
    return [sum(next(together) for _ in each) for each in counts]


def _pieces(x: torch.Tensor, y: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Return adjacent elements of both in pieces: of gigabytes the temporaries would not fit beside them."""
    split = [t.reshape(-1).split(COMPARED_AT_ONCE) for t in (x, y)]
    return zip(*split, strict=True) if x.numel() else ()


def _differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements whose bits differ; all NaNs are equal."""
    differ = bits(one) != bits(other)
    if one.is_floating_point():
        differ &= ~(one.isnan() & other.isnan())
    return differ
