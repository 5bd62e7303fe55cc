"""A call of a candidate, and what must be looked at where it was made: memory, addresses, types.

What is seen here needs the very memory that the candidate was given; values are judged elsewhere
(``check_rules``), from what the call returned, be it in this process or in another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.core import BACKWARD, Implementation
from weft.workbench.bind import bind
from weft.workbench.memory import Arena, bits, prepoison, served_from, span
from weft.workbench.stage import Stage


@dataclass(frozen=True)
class Lay:
    """How an output lay in memory: shape, dtype and device as torch names them, strides."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    strides: tuple[int, ...]

    @staticmethod
    def of(out: torch.Tensor) -> Lay:
        return Lay(tuple(out.shape), str(out.dtype), str(out.device), tuple(out.stride()))


@dataclass(kw_only=True)
class Observed:
    """What one call left: its outputs and where they lay, and what each rule at hand found wrong.

    ``seconds`` is its wall time; ``unguarded`` counts allocations that were too large to guard.
    """

    outputs: tuple[torch.Tensor, ...] = ()
    lays: tuple[Lay, ...] = ()
    found: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    unguarded: int = 0


@dataclass
class Call:
    """One call as it stands in memory: ``bound`` holds what was allocated while binding (the
    forward before a backward), ``served`` what the call itself allocated."""

    stage: Stage
    result: Any = None
    raised: str = ""
    seconds: float = 0.0
    bound: Arena | None = None
    served: Arena | None = None
    kept: list[torch.Tensor] = field(default_factory=list)

    @property
    def outputs(self) -> tuple[Any, ...]:
        """What came back, as a tuple."""
        return self.result if isinstance(self.result, tuple) else (self.result,)


def call(
    implementation: Implementation, stage: Stage, stream: torch.cuda.Stream | None = None
) -> Call:
    """Call the implementation on the staged inputs; whatever it raises is kept, not passed on."""
    scene = stage.scene
    made = Call(stage)
    if implementation.backend != "compile":  # compiled code allocates below any mode
        limit = _arena_limit(scene.device)
        made.bound = Arena(scene.device, stage.poison, limit)
        made.served = Arena(scene.device, stage.poison, limit)
    prepoison(scene.device, [form.nbytes for form in scene.forms], stage.poison)
    try:
        with stage.on(stream):
            grad = None if stage.grad is None else stage.grad.tensor
            place = (scene.operator, implementation, scene.case, scene.direction)
            with served_from(made.bound):
                closure = bind(*place, stage.tensors, grad)
            if made.bound is not None:
                made.kept = [block.payload.clone() for block in made.bound.blocks]
            began = time.perf_counter()
            with served_from(made.served):
                made.result = closure()
        if scene.device.startswith("cuda"):
            torch.cuda.synchronize()  # a failed launch shows here, and here it is the candidate's
        made.seconds = time.perf_counter() - began
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is the candidate's, and reported
        text = " ".join(str(error).split())
        made.raised = f"{type(error).__name__}: {text[:300]}"
    return made


def _arena_limit(device: str) -> int:
    """Bytes that may be held, guarded, for one call; past it memory comes unguarded."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(torch.device(device)).total_memory // 4
    return 2 << 30


def raised(made: Call) -> str:
    """The call returns: it raises nothing, and no launch of it fails."""
    return f"raised {made.raised}" if made.raised else ""


def is_tensor(made: Call) -> str:
    """Plain strided ``torch.Tensor`` objects come back, as many as there are outputs."""
    want = len(made.stage.scene.forms)
    if made.stage.scene.direction == BACKWARD and not isinstance(made.result, tuple):
        return f"the backward returned {type(made.result).__name__}, not a tuple of {want}"
    if len(made.outputs) != want:
        return f"returned {len(made.outputs)} tensors, expected {want}"
    for i, out in enumerate(made.outputs):
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


def alias(made: Call) -> str:
    """No output lies in the memory of an input or of a saved tensor.

    But for a gradient that is one of the gradient's own elements repeated with stride 0.
    """
    blocks = list(made.stage.arena.blocks)
    if made.bound is not None:
        blocks += made.bound.blocks
    for i, out in enumerate(made.outputs):
        if out.numel() == 0:
            continue
        first = out.data_ptr()
        past = first + span(out.shape, out.stride()) * out.element_size()
        for block in blocks:
            low, high = block.address
            if past <= low or first >= high:
                continue
            broadcast = any(n > 1 and s == 0 for n, s in zip(out.shape, out.stride(), strict=True))
            backward = made.stage.scene.direction == BACKWARD
            if backward and block.name == "input 'grad'" and broadcast:
                continue
            return f"output {i} lies in the memory of {block.name}"
    return ""


def inputs(made: Call) -> str:
    """The inputs, and what was saved for the backward, are unchanged to the bit."""
    changed = made.stage.changed()
    if made.bound is not None:
        pairs = zip(made.bound.blocks, made.kept, strict=True)
        changed += ["a saved tensor" for b, k in pairs if not torch.equal(b.payload, k)]
    return f"changed {', '.join(changed)}" if changed else ""


def guards(made: Call) -> str:
    """The guard bands around inputs and around what was allocated are intact."""
    arenas = [a for a in (made.stage.arena, made.bound, made.served) if a is not None]
    return "; ".join(line for arena in arenas for line in arena.broken())


FIRST: dict[str, Callable[[Call], str]] = {"returns": raised, "type": is_tensor}
THEN: dict[str, Callable[[Call], str]] = {"alias": alias, "inputs": inputs, "guards": guards}


class Hand:
    """A candidate called on one stage, call after call: each must leave the answer before alone."""

    def __init__(self, implementation: Implementation, stage: Stage) -> None:
        self.implementation, self.stage = implementation, stage
        self._before: tuple[torch.Tensor, ...] = ()
        self._stream: torch.cuda.Stream | None = None

    def fill(self, seed: int) -> None:
        self.stage.fill(seed)

    def call(self, aside: bool, without: Collection[str] = ()) -> Observed:
        """One call, on a stream of its own if ``aside``; every rule at hand but those left out."""
        if aside:
            self._stream = self._stream or torch.cuda.Stream()
        held = tuple(out.clone() for out in self._before)
        made = call(self.implementation, self.stage, self._stream if aside else None)
        seen = Observed(seconds=made.seconds)
        if made.served is not None:
            seen.unguarded = made.served.turned_away
        for name, rule in FIRST.items():
            if wrong := _apply(rule, made):
                seen.found[name] = wrong
                if name not in without or made.raised:
                    return seen
        for name, rule in THEN.items():
            if name not in without and (wrong := _apply(rule, made)):
                seen.found[name] = wrong
        if not all(isinstance(out, torch.Tensor) for out in made.outputs):
            return seen
        if held and "kept" not in without and (differ := same_bits(self._before, held)):
            seen.found["kept"] = f"the answer before this call changed under it: {differ}"
        seen.outputs = tuple(out.detach().as_subclass(torch.Tensor) for out in made.outputs)
        seen.lays = tuple(Lay.of(out) for out in seen.outputs)
        self._before = seen.outputs
        return seen

    def close(self) -> None:
        """Let go of the stage and of the last answer."""
        self._before = ()
        del self.stage


def _apply(rule: Callable[[Call], str], made: Call) -> str:
    try:
        return rule(made)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        # Only an answer of a form that cannot be looked at gets here.
        return f"could not be judged: {type(error).__name__}: {error}"


def same_bits(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> str:
    """What differs between two answers that should be one, bit for bit; all NaNs are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        differ = bits(x) != bits(y)
        if x.is_floating_point():
            differ &= ~(x.isnan() & y.isnan())
        count = int(differ.sum())
        if count:
            x64, y64 = x.double(), y.double()
            gap = float(torch.where(differ, (x64 - y64).abs(), 0.0).max())
            by = f"by up to {gap:.3g}" if gap < float("inf") else "in NaN or Inf too"
            return f"{count} of {x.numel()} elements of output {i} differ, {by}"
    return ""
