"""Fits of time over a size: a line, a power, and two powers that meet where the slope turns.

Least squares of relative errors, since a timing's noise is in proportion to it: a line is weighted
by 1 / time, powers are lines of logarithms. Intervals are 95 %, from the residuals and Student's t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.core import WeftError

# Student's t at 97.5 % for 1, 2, ... degrees of freedom; beyond them 1.96 + 2.72 / n is near.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
GRID = 400  # places between two sizes where a turn is looked for
ROUNDING = 1e-12  # a sum of squared relative errors below which nothing is told apart
BEND = 0.2  # the slope must grow by this much, or nothing turned
Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Line:
    """``y = fixed + each * x``; ``rms`` is the residuals' share of y."""

    fixed: float
    each: float
    fixed_interval: Interval
    each_interval: Interval
    rms: float


@dataclass(frozen=True, kw_only=True)
class Power:
    """``y ~ x ** slope``."""

    slope: float
    interval: Interval
    rms: float


@dataclass(frozen=True, kw_only=True)
class Turn:
    """``y ~ x ** below`` up to ``at`` and ``x ** above`` from there.

    ``turns``: the slope grows by ``BEND`` at least, and not every place fits as well.
    """

    at: float
    interval: Interval
    below: float
    above: float
    rms: float
    turns: bool


def student(freedom: int) -> float:
    """The 97.5 % point of Student's t; raises ``ValueError`` for no degree of freedom."""
    if freedom < 1:
        raise ValueError("no degree of freedom")
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.72 / freedom


def line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """The line through positive ``ys``; raises :class:`WeftError` for under three points."""
    x, y = _checked(xs, ys, 3)
    columns = np.stack([1 / y, x / y], axis=1)
    (fixed, each), errors, rms = _solve(columns, np.ones_like(y))
    return Line(
        fixed=fixed,
        each=each,
        fixed_interval=(fixed - errors[0], fixed + errors[0]),
        each_interval=(each - errors[1], each + errors[1]),
        rms=rms,
    )


def power(xs: Sequence[float], ys: Sequence[float]) -> Power:
    """The power of x by which y grows; raises :class:`WeftError` for under three points."""
    x, y = _checked(xs, ys, 3)
    columns = np.stack([np.ones_like(x), np.log(x)], axis=1)
    (_, slope), errors, rms = _solve(columns, np.log(y))
    return Power(slope=slope, interval=(slope - errors[1], slope + errors[1]), rms=rms)


def turn(xs: Sequence[float], ys: Sequence[float]) -> Turn:
    """Where the slope of log y over log x changes: the break that leaves the least residuals.

    Each segment holds two points at least. The interval has every break whose residuals are not
    worse by an F test at 95 %. Raises :class:`WeftError` for under five points.
    """
    x, y = _checked(xs, ys, 5)
    u, v = np.log(x), np.log(y)
    places = np.linspace(u[1], u[-2], GRID)
    sums = np.array([_residuals(u, v, place) for place in places])
    best = int(np.argmin(sums))
    freedom = max(1, len(u) - 4)
    # The 95 % point of F with one degree of freedom is the square of Student's t.
    near = places[sums <= sums[best] * (1 + student(freedom) ** 2 / freedom) + ROUNDING]
    (_, below, more), _, rms = _solve(_bent(u, places[best]), v)
    return Turn(
        at=float(np.exp(places[best])),
        interval=(float(np.exp(near.min())), float(np.exp(near.max()))),
        below=below,
        above=below + more,
        rms=rms,
        turns=more >= BEND and len(near) < len(places),
    )


def _checked(
    xs: Sequence[float], ys: Sequence[float], least: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    if x.size < least or x.size != y.size:
        raise WeftError("a fit", expected=f"{least} points or more", got=f"{x.size} and {y.size}")
    if not ((x > 0).all() and (y > 0).all() and (np.diff(x) > 0).all()):
        raise WeftError("a fit", expected="positive sizes in rising order, positive times", got=xs)
    return x, y


def _bent(u: NDArray[np.float64], place: float) -> NDArray[np.float64]:
    return np.stack([np.ones_like(u), u, np.maximum(0.0, u - place)], axis=1)


def _residuals(u: NDArray[np.float64], v: NDArray[np.float64], place: float) -> float:
    columns = _bent(u, place)
    found = np.linalg.lstsq(columns, v, rcond=None)[0]
    return float(((columns @ found - v) ** 2).sum())


def _solve(
    columns: NDArray[np.float64], wanted: NDArray[np.float64]
) -> tuple[list[float], list[float], float]:
    """Coefficients, half the width of each one's interval, and the residuals' root mean square."""
    found = np.linalg.lstsq(columns, wanted, rcond=None)[0]
    residuals = columns @ found - wanted
    freedom = max(1, len(wanted) - columns.shape[1])
    spread = float((residuals**2).sum()) / freedom * np.linalg.inv(columns.T @ columns)
    errors = student(freedom) * np.sqrt(np.maximum(0.0, np.diag(spread)))
    return found.tolist(), errors.tolist(), float(np.sqrt((residuals**2).mean()))
