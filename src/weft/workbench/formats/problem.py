"""A problem out of somebody's file: an operator whose oracle is the file's own code in float64.

Both formats come to the same: a generator of data, a function of the data, and perhaps weights.
A :class:`Point` is one set of the generator's arguments with one set of weights, and becomes a
case. The same points are made in the judge's process and in the guest's, where the function is the
candidate's and the reference is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from weft.core import Case, Cost, Implementation, Operator, Tolerance, WeftError
from weft.workbench.formats.data import Form, results, take_apart
from weft.workbench.formats.on_cpu import generating_on_cpu, on_cpu

Data = Any
Compute = Callable[[Data, "Point"], Any]  # what a file's function gives for data at a point
OwnCheck = Callable[[Case, int, Any], tuple[bool, str]]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One set of arguments of a file's generator, and the seed of the weights where it has any."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    weights: int | None = None
    tags: frozenset[str] = frozenset({"check"})
    form: Form | None = None


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How a reference behaves, found by running it: plain data, so that a guest can be told.

    ``buffers`` are the numbers of the data's tensors that are only written to, ``in_place`` the
    names of those that are read and then overwritten. ``random``: it draws random numbers as it
    runs. ``steady``: the same data and the same random numbers give the same bits. ``longest`` is
    how many terms a sum in it may have.
    """

    buffers: Sequence[int] = ()
    in_place: Sequence[str] = ()
    random: bool = False
    steady: bool = True
    longest: int = 1


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a candidate is judged by. ``baseline`` is the file's own function in its own dtype.

    ``own_check(case, seed, output)`` is what the file, or its format, would have said of an output;
    ``own_seed`` is the seed it is asked at. ``extra`` is what the guest is told; ``notes`` what a
    reader should know.
    """

    kind: str
    path: Path
    operator: Operator
    baseline: Implementation
    own_check: OwnCheck
    own_seed: int
    own_rule: str
    extra: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def own_random() -> Any:
    """Within it random numbers are drawn at will: the state of torch's generators comes back."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    return torch.random.fork_rng(devices=devices)


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A file's generator: ``draw(point, seed)`` gives data; ``names`` those of its parts.

    ``elsewhere`` is true where a file names a GPU and is judged on the CPU.
    """

    draw: Callable[[Point, int], Data]
    names: Sequence[str] = ()
    elsewhere: bool = False

    def data(self, point: Point, seed: int) -> tuple[Form, list[torch.Tensor]]:
        """The generator's answer, taken apart; torch's random state is left as it was."""
        where = generating_on_cpu() if self.elsewhere else nullcontext()
        with own_random(), torch.no_grad(), where:
            return take_apart(self.draw(point, seed), self.names)

    def formed(self, point: Point, habits: Habits) -> Point:
        """The point with the form of its data, from one call of the generator."""
        form, tensors = self.data(point, 0)
        form = replace(form, buffers=frozenset(habits.buffers))
        if not form.given:
            raise WeftError(f"the file's generator at {point.name}: no tensor among its data")
        del tensors
        return replace(point, form=form)

    def inputs(self, point: Point, seed: int, device: str) -> list[torch.Tensor]:
        """A seed's tensors on ``device``; raises :class:`WeftError` where their form is another."""
        form, tensors = self.data(point, seed)
        assert point.form is not None
        if (form.tree, form.inputs) != (point.form.tree, point.form.inputs):
            raise WeftError(
                f"the file's generator at {point.name}",
                expected="the same shapes, dtypes and plain values for every seed",
                got="others",
            )
        return [t.to(device) for t in point.form.without_buffers(tensors)]


def make_operator(
    name: str,
    points: Sequence[Point],
    generator: Generator,
    habits: Habits,
    exact: Compute | None,
    weight_bytes: int = 0,
) -> Operator:
    """The operator of these points; without its exact function, as a guest knows it."""
    by_name = {p.name: p for p in points}

    def answer(*inputs: torch.Tensor, point: str) -> Any:
        assert exact is not None, "a guest knows no reference"
        at = by_name[point]
        with torch.no_grad(), running(generator, habits):
            data, buffers = _form(at).build(inputs, wide=True)
            given = results(exact(data, at), buffers)
            return _written(given, inputs, at, habits)

    def draw(case: Case, seed: int, device: str) -> list[torch.Tensor]:
        return generator.inputs(by_name[str(case.params["point"])], seed, device)

    def cost(case: Case, direction: str) -> Cost:
        return Cost(read=sum(i.nbytes for i in case.inputs) + weight_bytes, written=0)

    return Operator(
        name=name,
        reference=answer,
        cases=tuple(_case(p) for p in points),
        cost=cost,
        summary="from a file",
        in_place=tuple(habits.in_place),
        draw=draw,
        tolerance=foreign_tolerance(habits.longest),
    )


def _written(given: Any, inputs: Sequence[torch.Tensor], at: Point, habits: Habits) -> Any:
    """What was returned; where nothing was, the inputs that were overwritten."""
    if given is not None:
        return given
    names = [i.name for i in _form(at).given]
    written = [x for x, n in zip(inputs, names, strict=True) if n in habits.in_place]
    return results(tuple(written))


def _form(point: Point) -> Form:
    assert point.form is not None
    return point.form


def _case(point: Point) -> Case:
    return Case(
        name=point.name,
        inputs=_form(point).given,
        params={"point": point.name},
        tags=point.tags,
    )


def foreign_tolerance(longest: int) -> Tolerance:
    """The house's rule; what the order of a sum may lose grows with how long a sum there can be."""
    chain = min(64.0, max(8.0, 0.75 * longest**0.5))
    return Tolerance(
        chain=chain,
        reason="the order of a sum is free, and a foreign reference's own is as good as another: "
        "n roundings of random sign, one after another, lose sqrt(n) / 6 units of the sum, and the "
        "worst of many elements some five times that",
    )


def make_implementation(
    operator: Operator,
    name: str,
    points: Sequence[Point],
    generator: Generator,
    habits: Habits,
    compute: Compute,
    backend: str = "eager",
    deterministic: bool = True,
) -> Implementation:
    """A function of data as an implementation: its inputs are put back into their form."""
    by_name = {p.name: p for p in points}

    def forward(*inputs: torch.Tensor, point: str) -> Any:
        at = by_name[point]
        data, buffers = _form(at).build(inputs)
        with torch.no_grad(), running(generator, habits):
            return results(compute(data, at), buffers)

    return Implementation(
        operator=operator.name,
        name=name,
        backend=backend,
        forward=forward,
        directions=("forward",),
        deterministic=deterministic and habits.steady,
    )


@contextmanager
def _running(generator: Generator, habits: Habits) -> Iterator[None]:
    if habits.random:
        torch.manual_seed(0)
    with on_cpu() if generator.elsewhere else nullcontext():
        yield


def running(generator: Generator, habits: Habits) -> Any:
    """What a file's function runs within: nothing, unless it draws or names a missing GPU."""
    plain = not (habits.random or generator.elsewhere)
    return nullcontext() if plain else _running(generator, habits)
