"""The rules that every call of a candidate is held to: named, one small function each.

A rule gets a :class:`Run` and returns what is wrong, or an empty string. They stand in order: each
may rely on those before it, and the first that finds something gives the verdict its reason. Those
here judge what a call returned; those that need its memory are in ``at_hand``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from weft.core import BACKWARD, FORWARD
from weft.workbench.at_hand import Lay, Observed
from weft.workbench.memory import bits, dense_strides, pattern_of
from weft.workbench.oracle import Oracle
from weft.workbench.tolerance import Measured, measure


@dataclass
class Run:
    """One call as the judge sees it: what was observed, and what was due.

    ``label`` says which call this was, for a reader; ``poison`` is what unwritten memory held;
    ``notes`` what a rule could not look at, by the rule's name.
    """

    oracle: Oracle
    seed: int
    label: str
    poison: int
    seen: Observed
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        return self.seen.outputs

    @cached_property
    def errors(self) -> list[Measured]:
        """The error of each output against the oracle's answer at this seed."""
        answers = self.oracle.answer(self.seed)
        pairs = [torch.broadcast_tensors(o, a) for o, a in zip(self.outputs, answers, strict=True)]
        all_of = zip(pairs, self.oracle.bounds, self.oracle.terms(self.seed), strict=True)
        return [measure(out, answer, bound, terms) for (out, answer), bound, terms in all_of]

    @property
    def share(self) -> float:
        """The largest share of the tolerance that an output uses."""
        return max(b.share(e) for b, e in zip(self.oracle.bounds, self.errors, strict=True))


Rule = Callable[[Run], str]


def shape(run: Run) -> str:
    """The shape exactly, not one that broadcasts to it."""
    for lay, form in zip(run.seen.lays, run.oracle.forms, strict=True):
        if lay.shape != form.shape:
            return f"shape {lay.shape}, expected {form.shape}"
    return ""


def dtype(run: Run) -> str:
    """The baseline's dtype for an output, the input's own for a gradient."""
    for lay, form in zip(run.seen.lays, run.oracle.forms, strict=True):
        if lay.dtype != str(form.dtype):
            return f"dtype {lay.dtype}, expected {form.dtype}"
    return ""


def device(run: Run) -> str:
    """The device of the inputs."""
    want = torch.device(run.oracle.device)
    for lay in run.seen.lays:
        got = torch.device(lay.device)
        if got.type != want.type or (got.index or 0) != (want.index or 0):
            return f"on {lay.device}, expected {want}"
    return ""


def layout(run: Run) -> str:
    """An output is contiguous, or strided as the baseline's. A gradient's strides are its own."""
    if run.oracle.direction == BACKWARD:
        return ""
    for lay, form in zip(run.seen.lays, run.oracle.forms, strict=True):
        dense = dense_strides(lay.shape)
        if 0 in lay.shape or form.strides is None or _alike(lay, dense):
            continue
        if not _alike(lay, form.strides):
            return f"strides {lay.strides}, expected contiguous or {form.strides} (the baseline's)"
    return ""


def _alike(lay: Lay, strides: tuple[int, ...]) -> bool:
    """Whether it lies as these strides say; a dimension of one element has no stride."""
    return all(a == b for n, a, b in zip(lay.shape, lay.strides, strides, strict=True) if n > 1)


def written(run: Run) -> str:
    """No element of an output still holds the poison that its memory was filled with."""
    for i, out in enumerate(run.outputs):
        if not out.is_floating_point() or out.numel() == 0:
            continue
        pattern = pattern_of(run.poison, out.element_size())
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
                f"expected {want:.6g}) is {_times(found.maximum, bound.maximum)}"
            )
    return ""


def _times(error: float, allowed: float) -> str:
    return f"{error / allowed:.3g} times what is allowed" if allowed else "where none is allowed"


def drift(run: Run) -> str:
    """The RMS error is within the bound on it: many small errors count as one large does."""
    for found, bound in zip(run.errors, run.oracle.bounds, strict=True):
        if not found.rms <= bound.rms:
            return (
                f"RMS error {found.rms:.3g} is {_times(found.rms, bound.rms)} "
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
                off = float(one.holds(run.outputs[0], *run.oracle.inputs(run.seed), **case.params))
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


# In the order that they are applied. Those of None were looked at where the call was made.
RULES: dict[str, Rule | None] = {
    "replaced": None,
    "returns": None,
    "type": None,
    "shape": shape,
    "dtype": dtype,
    "device": device,
    "layout": layout,
    "alias": None,
    "inputs": None,
    "guards": None,
    "written": written,
    "special": special,
    "error": error,
    "drift": drift,
    "property": properties,
    "kept": None,
}
