"""Rules that every call of a candidate is held to: one small function for each, by name.

A rule gets a :class:`CheckedCall` and returns what is wrong, or an empty string. The order counts:
a rule may rely on those before it, and the first that fails gives the verdict its reason. The rules
here judge what a call returned; ``calls.call`` has those that need the memory of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch

from weft.core import BACKWARD, FORWARD
from weft.workbench.calls.call import CallResult, TensorLayout, describe_bit_differences
from weft.workbench.calls.guarded_memory import bits, dense_strides, pattern_of
from weft.workbench.check.local_error import LocalCall
from weft.workbench.check.oracle import Oracle
from weft.workbench.check.tolerance import Measured, numbers


@dataclass
class CheckedCall:
    """Call with its result and the oracle that it is judged by.

    ``label`` tells a reader which call this is; ``poison`` is the pattern of unwritten memory;
    ``notes`` say, by the rule's name, what a rule could not judge. ``local_share`` is the largest share
    of a slice's bound that the rule ``local`` saw. ``passed`` is a call on the same inputs that passed and
    returned the same bits, if there is one.
    """

    oracle: Oracle
    seed: int
    label: str
    poison: int
    result: CallResult
    notes: dict[str, str] = field(default_factory=dict)
    local_share: float = 0.0
    passed: CheckedCall | None = None

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        return self.result.outputs

    @cached_property
    def errors(self) -> list[Measured]:
        """Error of each output against the oracle's answer at this seed."""
        if self.passed is not None:
            return self.passed.errors
        return self.oracle.errors(self.seed, self.outputs, self.oracle.bounds)

    def has_same_bits(self, other: CheckedCall) -> bool:
        """Return True if both calls returned the same bits in the same form."""
        forms = [[(o.shape, o.dtype) for o in call.outputs] for call in (self, other)]
        return forms[0] == forms[1] and not describe_bit_differences(self.outputs, other.outputs)

    def copy(self) -> CheckedCall:
        """Return the call with outputs in memory of their own."""
        outputs = tuple(out.clone() for out in self.outputs)
        copied = replace(self, result=replace(self.result, outputs=outputs))
        copied.errors = self.errors
        return copied

    @property
    def share(self) -> float:
        """Largest share of the tolerance that an output uses."""
        return max(b.share(e) for b, e in zip(self.oracle.bounds, self.errors, strict=True))

    def output_label(self, index: int) -> str:
        """Return the operator's name of an output as the start of a reason; empty if it has none.

        The outputs of a backward are gradients, which are named after their inputs.
        """
        operator = self.oracle.operator
        if not operator.output_names:
            return ""
        if self.oracle.direction == BACKWARD:
            return f"gradient of {operator.differentiable[index]}: "
        return f"{operator.output_names[index]}: "


Rule = Callable[[CheckedCall], str]


def shape(call: CheckedCall) -> str:
    """Require the exact shape, not one that broadcasts to it."""
    for i, (actual, form) in enumerate(zip(call.result.layouts, call.oracle.forms, strict=True)):
        if actual.shape != form.shape:
            return f"{call.output_label(i)}shape {actual.shape}, expected {form.shape}"
    return ""


def dtype(call: CheckedCall) -> str:
    """Require the baseline's dtype of an output, and the input's own of a gradient."""
    for actual, form in zip(call.result.layouts, call.oracle.forms, strict=True):
        if actual.dtype != str(form.dtype):
            return f"dtype {actual.dtype}, expected {form.dtype}"
    return ""


def device(call: CheckedCall) -> str:
    """Require the device of the inputs."""
    want = torch.device(call.oracle.device)
    for actual in call.result.layouts:
        got = torch.device(actual.device)
        # 'cuda' without an index and 'cuda:0' are the same device here.
        if got.type != want.type or (got.index or 0) != (want.index or 0):
            return f"on {actual.device}, expected {want}"
    return ""


def layout(call: CheckedCall) -> str:
    """Require contiguous outputs or the baseline's strides. A gradient may have any strides.

    Where the oracle accepts any dense layout, a permuted output without gaps and overlaps passes with a note.
    """
    if call.oracle.direction == BACKWARD:
        return ""
    for actual, form in zip(call.result.layouts, call.oracle.forms, strict=True):
        dense = dense_strides(actual.shape)
        if 0 in actual.shape or form.strides is None or _same_strides(actual, dense):
            continue
        if _same_strides(actual, form.strides):
            continue
        if call.oracle.accepts_dense_layouts and _is_dense(actual):
            call.notes["layout"] = f"strides {actual.strides}, not contiguous and not {form.strides}"
            continue
        return (
            f"strides {actual.strides}, expected contiguous or {form.strides} (the baseline's); "
            "return .contiguous()"
        )
    return ""


def _same_strides(actual: TensorLayout, strides: tuple[int, ...]) -> bool:
    """Compare strides; the stride of a dimension of one element does not count."""
    return all(a == b for n, a, b in zip(actual.shape, actual.strides, strides, strict=True) if n > 1)


def _is_dense(actual: TensorLayout) -> bool:
    """Return True for a permutation of a contiguous tensor: its elements fill their memory, each alone."""
    following = 1
    for step, n in sorted((s, n) for n, s in zip(actual.shape, actual.strides, strict=True) if n > 1):
        if step != following:
            return False
        following *= n
    return True


def written(call: CheckedCall) -> str:
    """Require that no output element still holds the poison of its memory."""
    judged = [(i, o) for i, o in enumerate(call.outputs) if o.is_floating_point() and o.numel()]
    # By bits: a NaN that the kernel computed is right where the reference has one, the poison never is.
    # Counted without a sum: torch adds booleans by a copy of eight bytes an element.
    unwritten = [(bits(o) == pattern_of(call.poison, o.element_size())).count_nonzero() for _, o in judged]
    for (i, out), count in zip(judged, numbers(*unwritten) if unwritten else (), strict=True):
        if count:
            return (
                f"{count:.0f} of {out.numel()} elements of output {i} hold poison: never written, "
                "or computed from memory that is no input's"
            )
    return ""


def special(call: CheckedCall) -> str:
    """Require NaN and Inf exactly where the reference has them, with the same signs."""
    for i, (out, error) in enumerate(zip(call.outputs, call.errors, strict=True)):
        if error.misplaced:
            index, got, expected = error.first_misplaced
            where = _index(index, out.shape)
            return (
                f"{call.output_label(i)}{error.misplaced} of {out.numel()} elements are NaN or Inf "
                f"where the reference is not, or the reverse: first at {where}, got {got:g}, "
                f"expected {expected:g}"
            )
    return ""


def error(call: CheckedCall) -> str:
    """Require that no element is further from the reference than the bound on the largest error."""
    rows = zip(call.outputs, call.errors, call.oracle.bounds, strict=True)
    for i, (out, measured, bound) in enumerate(rows):
        # `not <=` and not `>`: a NaN in the measurement must fail.
        if not measured.maximum <= bound.maximum:
            index, got, expected = measured.worst
            return (
                f"{call.output_label(i)}largest error {measured.maximum:.3g} at "
                f"{_index(index, out.shape)} (got {got:.6g}, expected {expected:.6g}) "
                f"is {_times(measured.maximum, bound.maximum)}"
            )
    return ""


def _times(error: float, allowed: float) -> str:
    return f"{error / allowed:.3g} times what is allowed" if allowed else "where none is allowed"


def drift(call: CheckedCall) -> str:
    """Require the RMS error within its bound: many small errors count like one large one."""
    for i, (measured, bound) in enumerate(zip(call.errors, call.oracle.bounds, strict=True)):
        if not measured.rms <= bound.rms:
            return (
                f"{call.output_label(i)}RMS error {measured.rms:.3g} is {_times(measured.rms, bound.rms)} "
                f"(the baseline's is {bound.baseline_rms:.3g})"
            )
    return ""


def local(call: CheckedCall) -> str:
    """Require that no slice of an output is wrong at its own scale, however small it is."""
    oracle = call.oracle
    local_call = LocalCall(call.seed, call.outputs, partial(oracle.answer, call.seed))
    for i, (measured, bound) in enumerate(zip(call.errors, oracle.bounds, strict=True)):
        share, violation = oracle.local.judge(local_call, i, measured, bound)
        call.local_share = max(call.local_share, share)
        if violation:
            return f"{call.output_label(i)}{violation}"
    return ""


def properties(call: CheckedCall) -> str:
    """Require the operator's own properties of the output."""
    operator, case = call.oracle.operator, call.oracle.case
    if call.oracle.direction != FORWARD:
        return ""
    for rule in operator.properties:
        if rule.applies(case):
            try:
                off = float(rule.holds(call.outputs[0], *call.oracle.inputs(call.seed), **case.params))
            except torch.OutOfMemoryError:
                # A property's temporaries may not fit beside a huge case; the verdict reports it.
                call.notes["property"] = f"{rule.name}: not looked at, for want of memory"
                continue
            if not off <= 1.0:
                return f"{rule.name}: off by {off:.3g} times what the dtype allows"
    return ""


def _index(flat: int, shape: torch.Size) -> list[int]:
    """Return a flat index as one index for each dimension."""
    indexes = []
    for n in reversed(shape):
        indexes.append(flat % n if n else 0)
        flat //= max(n, 1)
    return indexes[::-1]


# Rules whose answer follows from the bits of the outputs and the inputs: same bits, same answer.
OF_BITS = ("special", "error", "drift", "local", "property")
# In the order of application. Rules of None are applied where the call is made (``calls.call``).
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
    "local": local,
    "property": properties,
    "kept": None,
}
