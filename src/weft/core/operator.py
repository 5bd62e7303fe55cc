"""An operator is a mathematical function with a contract: reference, cases, cost, properties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.core.cases import Case
from weft.core.cost import Cost
from weft.core.errors import WeftError

if TYPE_CHECKING:
    import torch

FORWARD, BACKWARD = "forward", "backward"
DIRECTIONS = (FORWARD, BACKWARD)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far an implementation may stand from the float64 reference.

    Its error may be ``c`` times the error of the ``baseline`` implementation at the same case and
    dtype, plus ``ulps`` units in the last place of the output dtype, scaled by the RMS of the
    reference (or by the operator's own ``scale``), plus ``chain`` units in the last place of the
    accumulator (float32, or float64 for that dtype), for what the free order of a long sum may
    lose: next to nothing in a half type. ``reason`` is due where a default is changed.
    """

    c: float = 2.0
    ulps: float = 2.0
    chain: float = 0.0
    baseline: str = "eager"
    reason: str = ""

    def __post_init__(self) -> None:
        changed = (self.c, self.ulps, self.chain, self.baseline) != (2.0, 2.0, 0.0, "eager")
        if changed and not self.reason:
            raise ValueError("a tolerance that differs from the house's needs its reason")


@dataclass(frozen=True, kw_only=True)
class Property:
    """A fact that must hold of an output whatever the reference says, e.g. 'rows sum to 1'.

    ``holds(output, *inputs, **params)`` returns the largest deviation, as a share of what the
    output's dtype allows: at most 1.0 passes. ``applies(case)`` says where it is meant to hold.
    """

    name: str
    holds: Callable[..., float]
    applies: Callable[[Case], bool] = lambda case: True


def _the_inputs(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    return inputs


def _any_call(*inputs: Any, **params: Any) -> None:
    """The default of ``validate``: every call has an answer, or raises on its own."""


Draw = Callable[[Case, int, str], Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Operator:
    """What it means to compute this function, whoever computes it.

    ``reference(*inputs, **params)`` gets float64 tensors and returns a float64 tensor; it is the
    only oracle, and autograd through it gives the oracle of the backward. It may return a tuple of
    them, and forward only integers too, which must be met exactly. ``graded`` says how many of the
    outputs, from the first on, a gradient comes in for; several must be of one shape and dtype.
    ``save(inputs, output)`` names what an implementation's backward is given besides these:
    ``backward(grad, *save(inputs, output), **params)``, with one ``grad`` after the other where
    several are ``graded``, returns one gradient for each name in ``differentiable``.
    ``cost(case, direction)`` is the compulsory work. ``validate(*inputs, **params)`` raises
    :class:`WeftError` on a call that has no answer. ``scale(*inputs64, **params)`` replaces the RMS
    of the reference in the tolerance where a result may rightly be near zero;
    ``gradient_scale(grad64, *inputs64, **params)`` gives the sizes of a gradient's terms, element
    by element, before they cancel: of the one gradient, or a tuple with one for each, None where
    nothing cancels.
    ``signature`` is the call as one would type it: ``softmax(x)``. ``in_place`` names the inputs
    that a call may overwrite: it is given copies of these, and what they hold is the answer where
    it returns None. ``draw(case, seed, device)`` gives a case's inputs, where Weft's own values
    would not do.
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
    graded: int = 1
    save: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] = _the_inputs
    properties: tuple[Property, ...] = ()
    tolerance: Tolerance = Tolerance()
    scale: Callable[..., torch.Tensor] | None = None
    gradient_scale: Callable[..., Any] | None = None
    scale_reason: str = ""
    backward_note: str = ""
    in_place: tuple[str, ...] = ()
    draw: Draw | None = None

    def __post_init__(self) -> None:
        self._fill_in("dtypes", tuple(dict.fromkeys(c.dtype for c in self.cases)))
        arguments = [i.name for i in self.cases[0].inputs] if self.cases else []
        self._fill_in("signature", f"{self.name}({', '.join(arguments)})")
        if self.draw is not None:
            drawn = tuple(replace(c, draw=partial(self.draw, c)) for c in self.cases)
            object.__setattr__(self, "cases", drawn)
        names = [c.name for c in self.cases]
        twice = {n for n in names if names.count(n) > 1}
        if twice:
            raise ValueError(f"{self.name}: two cases share a name: {sorted(twice)}")

    def _fill_in(self, field: str, value: object) -> None:
        if not getattr(self, field):
            object.__setattr__(self, field, value)

    @property
    def directions(self) -> tuple[str, ...]:
        return DIRECTIONS if self.differentiable else (FORWARD,)

    def select(self, tag: str, device: str) -> tuple[Case, ...]:
        """The cases with this tag that are meant for ``device`` ('cpu' or 'cuda')."""
        return tuple(c for c in self.cases if tag in c.tags and device in c.devices)

    def case(self, name: str) -> Case:
        """The case of this name; raises :class:`WeftError` naming the near ones."""
        for c in self.cases:
            if c.name == name:
                return c
        raise unknown_name(f"case of {self.name}", name, [c.name for c in self.cases])


def unknown_name(what: str, got: str, known: list[str]) -> WeftError:
    """The error for a name that is not there, with the nearest that is."""
    import difflib

    near = difflib.get_close_matches(got, known, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else None
    return WeftError(f"unknown {what}", expected="one of " + ", ".join(known), got=got, hint=hint)
