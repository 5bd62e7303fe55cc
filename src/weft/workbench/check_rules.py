"""The rules that every call of a candidate is held to: named, one small function each.

A rule gets a :class:`Run` and returns what is wrong, or an empty string. They stand in order: each
may rely on those before it, and the first that finds something gives the verdict its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from weft.core import BACKWARD, FORWARD
from weft.workbench.check_run import Run
from weft.workbench.memory import bits, pattern_of, span

Rule = Callable[[Run], str]


def raised(run: Run) -> str:
    """The call returns: it raises nothing, and no launch of it fails."""
    return f"raised {run.raised}" if run.raised else ""


def is_tensor(run: Run) -> str:
    """Plain strided ``torch.Tensor`` objects come back, as many as there are outputs."""
    want = len(run.oracle.forms)
    if run.oracle.direction == BACKWARD and not isinstance(run.result, tuple):
        return f"the backward returned {type(run.result).__name__}, not a tuple of {want} gradients"
    if len(run.outputs) != want:
        return f"returned {len(run.outputs)} tensors, expected {want}"
    for i, out in enumerate(run.outputs):
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


def shape(run: Run) -> str:
    """The shape exactly, not one that broadcasts to it."""
    for out, form in zip(run.outputs, run.oracle.forms, strict=True):
        if tuple(out.shape) != form.shape:
            return f"shape {tuple(out.shape)}, expected {form.shape}"
    return ""


def dtype(run: Run) -> str:
    """The baseline's dtype for an output, the input's own for a gradient."""
    for out, form in zip(run.outputs, run.oracle.forms, strict=True):
        if out.dtype != form.dtype:
            return f"dtype {out.dtype}, expected {form.dtype}"
    return ""


def device(run: Run) -> str:
    """The device of the inputs."""
    want = run.stage.tensors[0].device
    for out in run.outputs:
        if out.device != want:
            return f"on {out.device}, expected {want}"
    return ""


def layout(run: Run) -> str:
    """An output is contiguous, or strided as the baseline's. A gradient's strides are its own."""
    if run.oracle.direction == BACKWARD:
        return ""
    for out, form in zip(run.outputs, run.oracle.forms, strict=True):
        if out.numel() == 0 or out.is_contiguous() or form.strides is None:
            continue
        pairs = zip(out.shape, out.stride(), form.strides, strict=True)
        if any(got != want for n, got, want in pairs if n > 1):
            return f"strides {out.stride()}, expected contiguous or {form.strides} (the baseline's)"
    return ""


def alias(run: Run) -> str:
    """No output lies in the memory of an input or of a saved tensor.

    But for a gradient that is one of the gradient's own elements repeated with stride 0.
    """
    blocks = list(run.stage.arena.blocks)
    if run.bound is not None:
        blocks += run.bound.blocks
    for i, out in enumerate(run.outputs):
        if out.numel() == 0:
            continue
        first = out.data_ptr()
        past = first + span(out.shape, out.stride()) * out.element_size()
        for block in blocks:
            low, high = block.address
            if past <= low or first >= high:
                continue
            broadcast = any(n > 1 and s == 0 for n, s in zip(out.shape, out.stride(), strict=True))
            if run.oracle.direction == BACKWARD and block.name == "input 'grad'" and broadcast:
                continue
            return f"output {i} lies in the memory of {block.name}"
    return ""


def inputs(run: Run) -> str:
    """The inputs, and what was saved for the backward, are unchanged to the bit."""
    changed = run.stage.changed()
    if run.bound is not None:
        pairs = zip(run.bound.blocks, run.kept, strict=True)
        changed += ["a saved tensor" for b, k in pairs if not torch.equal(b.payload, k)]
    return f"changed {', '.join(changed)}" if changed else ""


def guards(run: Run) -> str:
    """The guard bands around inputs and around what was allocated are intact."""
    arenas = [a for a in (run.stage.arena, run.bound, run.served) if a is not None]
    return "; ".join(line for arena in arenas for line in arena.broken())


def written(run: Run) -> str:
    """No element of an output still holds the poison that its memory was filled with."""
    for i, out in enumerate(run.outputs):
        if not out.is_floating_point() or out.numel() == 0:
            continue
        pattern = pattern_of(run.stage.arena.pattern_for(out.dtype), out.element_size())
        left = int((bits(out) == pattern).sum())
        if left:
            return (
                f"{left} of {out.numel()} elements of output {i} hold poison: never written, "
                "or computed from memory that is no input's"
            )
    return ""


def special(run: Run) -> str:
    """NaN and Inf stand where the reference's do, and nowhere else, with the same signs."""
    for out, error in zip(run.outputs, run.errors, strict=True):
        if error.misplaced:
            at, got, want = error.first_misplaced
            where = _index(at, out.shape)
            return (
                f"{error.misplaced} of {out.numel()} elements are NaN or Inf where the reference "
                f"is not, or the reverse: first at {where}, got {got:g}, expected {want:g}"
            )
    return ""


def error(run: Run) -> str:
    """No element is further from the reference than the bound on the largest error."""
    for out, found, bound in zip(run.outputs, run.errors, run.oracle.bounds, strict=True):
        if not found.maximum <= bound.maximum:
            at, got, want = found.worst
            return (
                f"largest error {found.maximum:.3g} at {_index(at, out.shape)} (got {got:.6g}, "
                f"expected {want:.6g}) is {found.maximum / bound.maximum:.3g} times what is allowed"
            )
    return ""


def drift(run: Run) -> str:
    """The RMS error is within the bound on it: many small errors count as one large does."""
    for found, bound in zip(run.errors, run.oracle.bounds, strict=True):
        if not found.rms <= bound.rms:
            return (
                f"RMS error {found.rms:.3g} is {found.rms / bound.rms:.3g} times what is allowed "
                f"(the baseline's is {bound.baseline_rms:.3g})"
            )
    return ""


def properties(run: Run) -> str:
    """The operator's own properties hold of the output."""
    operator, case = run.oracle.operator, run.oracle.case
    if run.oracle.direction != FORWARD:
        return ""
    for one in operator.properties:
        if one.applies(case):
            try:
                off = float(one.holds(run.outputs[0], *run.stage.tensors, **case.params))
            except torch.OutOfMemoryError:
                run.notes["property"] = f"{one.name}: not looked at, for want of memory"
                continue
            if not off <= 1.0:
                return f"{one.name}: off by {off:.3g} times what the dtype allows"
    return ""


def _index(flat: int, shape: torch.Size) -> list[int]:
    """A flat index as one for each dimension."""
    found = []
    for n in reversed(shape):
        found.append(flat % n if n else 0)
        flat //= max(n, 1)
    return found[::-1]


RULES: dict[str, Rule] = {
    "returns": raised,
    "type": is_tensor,
    "shape": shape,
    "dtype": dtype,
    "device": device,
    "layout": layout,
    "alias": alias,
    "inputs": inputs,
    "guards": guards,
    "written": written,
    "special": special,
    "error": error,
    "drift": drift,
    "property": properties,
}


def same_bits(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> str:
    """What differs between two answers that should be one, bit for bit; all NaNs are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        differ = bits(x) != bits(y)
        if x.is_floating_point():
            differ &= ~(x.isnan() & y.isnan())
        count = int(differ.sum())
        if count:
            x64, y64 = x.double(), y.double()
            gap = torch.where(differ, (x64 - y64).abs(), 0.0).max().item()
            by = f"by up to {gap:.3g}" if math.isfinite(gap) else "in NaN or Inf too"
            return f"{count} of {x.numel()} elements of output {i} differ, {by}"
    return ""
