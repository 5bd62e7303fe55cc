"""``Operator``: a mathematical function with a contract (reference, cases, cost, properties)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.core.cases import Case
from weft.core.cost import Cost
from weft.core.errors import WeftError, check_name

if TYPE_CHECKING:
    import torch

FORWARD, BACKWARD = "forward", "backward"
DIRECTIONS = (FORWARD, BACKWARD)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest allowed distance of an implementation from the float64 reference.

    The error may be ``c`` times the error of the ``baseline`` implementation at the same case and dtype,
    plus ``ulps`` units in the last place of the output dtype scaled by the RMS of the reference (or by the
    operator's own ``scale``), plus ``chain`` units in the last place of the accumulator (float32, or
    float64 for that dtype). ``chain`` allows for the free order of a long sum; it is next to nothing in a
    16-bit type. ``sum_length(case)`` is the number of terms of the longest sum, where a library adds it in
    a few lanes: the allowance then grows with it (:meth:`chain_at`). ``reason`` must be given if a default
    is changed.
    """

    c: float = 2.0
    ulps: float = 2.0
    chain: float = 0.0
    baseline: str = "eager"
    reason: str = ""
    sum_length: Callable[[Case], int] | None = None

    def __post_init__(self) -> None:
        # A tolerance may only be widened together with the reason that reports print beside it.
        default = (self.c, self.ulps, self.chain, self.baseline) == (2.0, 2.0, 0.0, "eager")
        if not (default and self.sum_length is None) and not self.reason:
            raise ValueError("a tolerance that differs from the default needs its reason")

    def chain_at(self, case: Case) -> float:
        """Return the units of the accumulator that the order of a sum may cost at ``case``.

        One lane that adds n positive terms one after another is off by 0.12 sqrt(n) units of their sum
        (standard deviation); L lanes by 0.12 sqrt(n) / L. A CPU's vector has at least eight float32
        lanes. Five deviations are allowed, so that an honest sum fails less than once in a million rows.
        """
        if self.sum_length is None:
            return self.chain
        return max(self.chain, 5 * 0.12 / 8 * float(self.sum_length(case)) ** 0.5)


@dataclass(frozen=True, kw_only=True)
class Property:
    """A fact that must hold for every output, e.g. 'rows sum to 1'.

    ``holds(output, *inputs, **params)`` returns the largest deviation as a share of what the output's
    dtype allows: at most 1.0 passes. ``applies(case)`` says at which cases it must hold.
    """

    name: str
    holds: Callable[..., float]
    applies: Callable[[Case], bool] = lambda case: True


def _save_inputs(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    return inputs


def _any_call(*inputs: Any, **params: Any) -> None:
    """Default of ``validate``: accept every call."""


Draw = Callable[[Case, int, str], Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A mathematical function with a contract that every implementation must meet.

    ``reference(*inputs, **params)`` gets float64 tensors and returns a float64 tensor or a tuple of them. It
    is the only oracle, and autograd through it is the oracle of the backward. An operator without gradients
    may also return integers, which must be met exactly. A gradient comes in for the first
    ``differentiable_outputs`` outputs; if there are several they share one shape and dtype.

    ``save(inputs, output)`` returns what a backward gets besides the gradients:
    ``backward(*grads, *save(inputs, output), **params)`` returns one gradient for each name in
    ``differentiable``. With ``save_gets_params`` it is ``save(inputs, output, **params)``; callers use
    :meth:`saved`.

    ``cost(case, direction)`` is the compulsory work. ``validate(*inputs, **params)`` raises
    :class:`WeftError` for an invalid call. ``signature`` is the call as a user types it: ``softmax(x)``.
    ``in_place`` names the inputs that a call may overwrite: it gets copies of them, and their contents are
    the answer if it returns None. ``draw(case, seed, device)`` generates a case's inputs if Weft's own
    values do not suit. ``output_names`` name the outputs in the reasons of verdicts. ``splits_rows``: the
    reference has no side effects and no random numbers, so the oracle may compute it for some rows at a
    time where a comparison shows that this changes nothing.

    ``scale(*inputs64, **params)`` replaces the RMS of the reference in the tolerance if a result may
    legitimately be near zero. ``gradient_scale(grad64, *inputs64, **params)`` returns, element by element,
    the size of a gradient's terms before they cancel: for one gradient, or a tuple with one entry for each
    (None if nothing cancels). ``path_scale(grad64, *inputs64, **params)`` returns, element by element, the
    size of the results on the way to an output of the forward (``grad64`` is None) or to the gradient: an
    output that is small by cancellation inherits their roundings, so that a slice of such outputs is judged
    at their scale. It is for operators with one output and one gradient.

    ``gradient_units`` are pairs of inputs' names. The gradient of the first comes from a saved output, which
    was rounded to the dtype of the second: if that is coarser, its last place is the tolerance's unit.

    ``rows`` names the inputs whose first dimension counts rows that do not depend on each other. Each output
    then has these rows, and so has the gradient of each of these inputs.

    ``public_arguments(arguments)`` turns a case's inputs and params, by name, into the arguments of
    ``weft.ops.NAME`` if that function has others; by default they are the same.
    """

    name: str
    reference: Callable[..., Any]
    cases: tuple[Case, ...]
    cost: Callable[[Case, str], Cost]
    summary: str = ""
    formula: str = ""
    signature: str = ""
    validate: Callable[..., None] = _any_call
    dtypes: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()
    differentiable_outputs: int = 1
    save: Callable[..., tuple[Any, ...]] = _save_inputs
    save_gets_params: bool = False
    properties: tuple[Property, ...] = ()
    tolerance: Tolerance = Tolerance()
    scale: Callable[..., torch.Tensor] | None = None
    gradient_scale: Callable[..., Any] | None = None
    path_scale: Callable[..., torch.Tensor] | None = None
    scale_reason: str = ""
    gradient_units: tuple[tuple[str, str], ...] = ()
    backward_note: str = ""
    in_place: tuple[str, ...] = ()
    draw: Draw | None = None
    output_names: tuple[str, ...] = ()
    public_arguments: Callable[[dict[str, Any]], dict[str, Any]] = dict
    splits_rows: bool = False
    rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name("operator", self.name)
        self._fill_in("dtypes", tuple(dict.fromkeys(c.dtype for c in self.cases)))
        arguments = [i.name for i in self.cases[0].inputs] if self.cases else []
        self._fill_in("signature", f"{self.name}({', '.join(arguments)})")
        if self.draw is not None:
            # The generator is bound to its case here, so that a case alone suffices to make inputs.
            cases = tuple(replace(c, draw=partial(self.draw, c)) for c in self.cases)
            object.__setattr__(self, "cases", cases)
        names = [c.name for c in self.cases]
        twice = {n for n in names if names.count(n) > 1}
        if twice:
            raise ValueError(f"{self.name}: two cases share a name: {sorted(twice)}")

    def _fill_in(self, field: str, value: object) -> None:
        # The dataclass is frozen: only its own __post_init__ may call this.
        if not getattr(self, field):
            object.__setattr__(self, field, value)

    def saved(self, inputs: tuple[Any, ...], output: Any, params: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what a backward gets besides the gradients and ``params``."""
        return self.save(inputs, output, **params) if self.save_gets_params else self.save(inputs, output)

    @property
    def directions(self) -> tuple[str, ...]:
        return DIRECTIONS if self.differentiable else (FORWARD,)

    def select(self, tag: str, device: str) -> tuple[Case, ...]:
        """Return the cases with this tag that are meant for ``device`` ('cpu' or 'cuda')."""
        return tuple(c for c in self.cases if tag in c.tags and device in c.devices)

    def case(self, name: str) -> Case:
        """Return the case of this name. Raise :class:`WeftError` with the nearest names if there is none."""
        # Cases are few (tens): a search needs no index.
        for c in self.cases:
            if c.name == name:
                return c
        raise unknown_name(f"case of {self.name}", name, [c.name for c in self.cases])


MAX_NAMED = 40  # names in an error; of more, the first few stand for all


def unknown_name(what: str, got: object, known: list[str], *, listed_by: str = "") -> WeftError:
    """Return the error for an unknown name, with the nearest known names as a hint.

    ``listed_by`` is the command that lists the known names, for an error that cannot name all.
    """
    import difflib

    expected = "one of " + ", ".join(known)
    hint = f"{listed_by} lists them" if listed_by else None
    if len(known) > MAX_NAMED:
        expected = f"one of {len(known)}, such as {', '.join(known[:3])}"
    if not isinstance(got, str):
        return WeftError(f"unknown {what}", expected=expected, got=f"{got!r:.80}", hint=hint)
    # 0.4 is below difflib's default of 0.6: a short or abbreviated name still gets a hint.
    near = difflib.get_close_matches(got, known, n=3, cutoff=0.4)
    if near:
        hint = f"did you mean {', '.join(near)}?" + (f" {hint}" if hint else "")
    return WeftError(f"unknown {what}", expected=expected, got=got, hint=hint)
