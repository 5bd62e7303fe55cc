"""Operators whose answers have parts of very different size, with kernels that are wrong in the small ones.

Such an error is far below the RMS of the whole answer, so that only the rule ``local`` can see it. This
file is loaded like any file of a user; its implementations without a fault are controls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

import weft
from weft.workbench.selftest.mutants.mutant import Mutant

HALVING = 0.75  # binary orders of magnitude between neighbouring rows
SMALL = 2.0**-40  # share of the largest element below which the faulty kernels are wrong
OFFSET = 4096.0


def _cost(c: weft.Case, direction: str) -> weft.Cost:
    (x,) = c.inputs
    return weft.Cost(read=x.nbytes, written=x.nbytes)


def _cases(*shapes: tuple[int, ...]) -> list[weft.Case]:
    checked = [weft.case(weft.Input(name="x", shape=s)) for s in shapes]
    return [*checked, weft.case(weft.Input(name="x", shape=(64, 8192)), tags="bench")]


def _row_scales(x: torch.Tensor) -> torch.Tensor:
    return torch.exp2(-HALVING * torch.arange(x.shape[0], device=x.device))[:, None].to(x.dtype)


def _small(y: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements that the faulty kernels get wrong."""
    return y.abs() < SMALL * y.abs().amax()


# -- rows, columns and blocks --------------------------------------------------------------------


@weft.operator("fade_rows", cases=_cases((96, 65), (80, 33)), cost=_cost)
def fade_rows(x: torch.Tensor) -> torch.Tensor:
    """Compute x with each row smaller than the one before it."""
    return x * _row_scales(x)


@weft.implementation("fade_rows", backend="eager", name="eager", directions=("forward",))
def _fade_rows(x: torch.Tensor) -> torch.Tensor:
    return x * _row_scales(x)


@weft.implementation("fade_rows", backend="eager", name="zeros", directions=("forward",))
def _rows_zero(x: torch.Tensor) -> torch.Tensor:
    """Leave zeros in the small rows."""
    y = x * _row_scales(x)
    # Row 60 is about 2^-45 of the first one, below SMALL.
    y[60:] = 0.0
    return y


@weft.implementation("fade_rows", backend="eager", name="repeated", directions=("forward",))
def _rows_repeated(x: torch.Tensor) -> torch.Tensor:
    """Repeat one of the small rows in those after it."""
    y = x * _row_scales(x)
    y[60:] = y[59]
    return y


@weft.implementation("fade_rows", backend="eager", name="short", directions=("forward",))
def _rows_short(x: torch.Tensor) -> torch.Tensor:
    """Compute the small rows in bfloat16."""
    y = x * _row_scales(x)
    y[60:] = y[60:].bfloat16().float()
    return y


@weft.implementation("fade_rows", backend="eager", name="logarithms", directions=("forward",))
def _rows_by_logarithms(x: torch.Tensor) -> torch.Tensor:
    """Add exponents where the baseline multiplies: honest, with other roundings."""
    exponents = torch.log2(x.abs()) - HALVING * torch.arange(x.shape[0], device=x.device)[:, None]
    return x.sign() * torch.exp2(exponents)


@weft.operator("fade_columns", cases=_cases((65, 96), (33, 80)), cost=_cost)
def fade_columns(x: torch.Tensor) -> torch.Tensor:
    """Compute x with each column smaller than the one before it."""
    return x * _row_scales(x.mT).mT


@weft.implementation("fade_columns", backend="eager", name="eager", directions=("forward",))
def _fade_columns(x: torch.Tensor) -> torch.Tensor:
    return x * _row_scales(x.mT).mT


@weft.implementation("fade_columns", backend="eager", name="zeros", directions=("forward",))
def _columns_zero(x: torch.Tensor) -> torch.Tensor:
    """Skip the last columns, where zeros were written before."""
    y = x * _row_scales(x.mT).mT
    y[:, 60:] = 0.0
    return y


@weft.implementation("fade_columns", backend="eager", name="tenth-off", directions=("forward",))
def _columns_off(x: torch.Tensor) -> torch.Tensor:
    """Scale the small columns wrongly by a tenth."""
    y = x * _row_scales(x.mT).mT
    y[:, 60:] *= 1.1
    return y


@weft.operator("fade_along", cases=_cases((6000,), (4097,)), cost=_cost)
def fade_along(x: torch.Tensor) -> torch.Tensor:
    """Compute x with smaller elements the further they are from the first."""
    flat = torch.arange(x.numel(), device=x.device).view(x.shape).to(x.dtype)
    return x * torch.exp2(-64.0 * flat / x.numel())


@weft.implementation("fade_along", backend="eager", name="eager", directions=("forward",))
def _fade_along(x: torch.Tensor) -> torch.Tensor:
    return fade_along(x)


@weft.implementation("fade_along", backend="eager", name="last-blocks", directions=("forward",))
def _blocks_zero(x: torch.Tensor) -> torch.Tensor:
    """Leave zeros in the last third."""
    y = fade_along(x)
    y.view(-1)[2 * y.numel() // 3 :] = 0.0
    return y


# -- elements of like size, wherever they are -----------------------------------------------------


@weft.operator("powers", cases=_cases((64, 65), (5000,)), cost=_cost)
def powers(x: torch.Tensor) -> torch.Tensor:
    """Compute e^(12 x), whose elements differ by many orders of magnitude."""
    return torch.exp(12.0 * x)


@weft.implementation("powers", backend="eager", name="eager", directions=("forward",))
def _powers(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(12.0 * x)


@weft.implementation("powers", backend="eager", name="zeros", directions=("forward",))
def _powers_zero(x: torch.Tensor) -> torch.Tensor:
    """Write zeros for all elements that are small."""
    y = torch.exp(12.0 * x)
    return torch.where(_small(y), 0.0, y)


@weft.implementation("powers", backend="eager", name="one-value", directions=("forward",))
def _powers_constant(x: torch.Tensor) -> torch.Tensor:
    """Write one value for all elements that are small."""
    y = torch.exp(12.0 * x)
    return torch.where(_small(y), 1e-3 * SMALL * y.amax(), y)


@weft.implementation("powers", backend="eager", name="linear", directions=("forward",))
def _powers_linear(x: torch.Tensor) -> torch.Tensor:
    """Write half of each element that is small."""
    y = torch.exp(12.0 * x)
    return torch.where(_small(y), 0.5 * y, y)


@weft.implementation("powers", backend="eager", name="squared", directions=("forward",))
def _powers_squared(x: torch.Tensor) -> torch.Tensor:
    """Square e^(6 x): honest, with twice its relative error."""
    return torch.exp(6.0 * x).square()


# -- parts that are noise -------------------------------------------------------------------------


@weft.operator("residue", cases=_cases((64, 65), (40, 33)), cost=_cost)
def residue(x: torch.Tensor) -> torch.Tensor:
    """Compute x scaled by rows, after an offset was added and taken away: small rows are noise."""
    return (x * _row_scales(x) + OFFSET) - OFFSET


@weft.implementation("residue", backend="eager", name="eager", directions=("forward",))
def _residue(x: torch.Tensor) -> torch.Tensor:
    return (x * _row_scales(x) + OFFSET) - OFFSET


@weft.implementation("residue", backend="eager", name="half-offset", directions=("forward",))
def _residue_of_halves(x: torch.Tensor) -> torch.Tensor:
    """Add the offset in halves: honest, with noise of its own."""
    return ((x * _row_scales(x) + OFFSET / 2) + OFFSET / 2) - OFFSET


FAULTS = {
    _rows_zero: "zeros in the rows that are small",
    _rows_repeated: "one small row again in the next ones",
    _rows_short: "works in bf16 in the rows that are small",
    _columns_zero: "zeros in the columns that are small",
    _columns_off: "a tenth off in the columns that are small",
    _blocks_zero: "zeros in the last third, which is small",
    _powers_zero: "zeros for the elements that are small",
    _powers_constant: "one value for the elements that are small",
    _powers_linear: "half of the elements that are small",
}
CONTROLS = {
    _rows_by_logarithms: "small rows by logarithms",
    _powers_squared: "small elements as squares",
    _residue_of_halves: "rows that are noise, with noise of its own",
}


def _same(implementation: weft.Implementation) -> weft.Implementation:
    return implementation


def mutants_of(faults: Mapping[Any, str], controls: Mapping[Any, str]) -> Iterator[Mutant]:
    """Yield a mutant of the rule ``local`` for each faulty function, and a control for each right one."""
    for row, rule, functions in (("W25", ("local",), faults), ("H7", (), controls)):
        for function, title in functions.items():
            implementation = function.__weft__  # type: ignore[attr-defined]
            yield Mutant(
                id=f"{row}/{implementation.operator}/eager/{implementation.name}",
                operator=implementation.operator,
                title=title,
                killed_by=rule,
                make=partial(_same, implementation),
                only="local" if rule else "",
                honest=not rule,
            )


MUTANTS = tuple(mutants_of(FAULTS, CONTROLS))
