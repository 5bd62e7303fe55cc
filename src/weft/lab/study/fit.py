"""Fits of time over a size: a line, a power law, and two power laws that meet at a break.

All fits minimise squared relative errors, since a timing's noise is in proportion to it: a line is
weighted by 1 / time, a power law is a line of logarithms. Intervals are 95 %, from the residuals and
Student's t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.core import WeftError

# Student's t at 97.5 % for 1, 2, ... degrees of freedom. Beyond the table, 1.96 + 2.72 / n approximates it.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
GRID = 400  # candidate breaks, evenly spaced in log x
ROUNDING = 1e-12  # sums of squared relative errors that differ by less are equal
MIN_BEND = 0.2  # a break counts if the exponent grows by this much
Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Line:
    """``y = fixed + each * x``; ``rms`` is the root mean square of the relative residuals."""

    fixed: float
    each: float
    fixed_interval: Interval
    each_interval: Interval
    rms: float


@dataclass(frozen=True, kw_only=True)
class Power:
    """``y ~ x ** slope``; ``rms`` is the root mean square of the residuals of log y."""

    slope: float
    interval: Interval
    rms: float


@dataclass(frozen=True, kw_only=True)
class BrokenPower:
    """``y ~ x ** below`` up to ``at`` and ``x ** above`` from there.

    ``significant``: the exponent grows by at least ``MIN_BEND``, and some breaks fit worse than ``at``.
    """

    at: float
    interval: Interval
    below: float
    above: float
    rms: float
    significant: bool


def student(freedom: int) -> float:
    """Return the 97.5 % point of Student's t; raises ``ValueError`` for no degree of freedom."""
    if freedom < 1:
        raise ValueError("no degree of freedom")
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.72 / freedom


def line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """Fit a line through positive ``ys``; raises :class:`WeftError` for under three points."""
    x, y = _validated(xs, ys, 3)
    # Divided by y, so that the residuals are relative.
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
    """Fit the power of x by which y grows; raises :class:`WeftError` for under three points."""
    x, y = _validated(xs, ys, 3)
    columns = np.stack([np.ones_like(x), np.log(x)], axis=1)
    (_, slope), errors, rms = _solve(columns, np.log(y))
    return Power(slope=slope, interval=(slope - errors[1], slope + errors[1]), rms=rms)


def broken_power(xs: Sequence[float], ys: Sequence[float]) -> BrokenPower:
    """Fit two power laws that meet at the break with the smallest residuals.

    Each segment has at least two points. The interval contains every break whose residuals are not
    worse by an F test at 95 %. Raises :class:`WeftError` for under five points.
    """
    x, y = _validated(xs, ys, 5)
    u, v = np.log(x), np.log(y)
    breaks = np.linspace(u[1], u[-2], GRID)
    sums = np.array([_residual_sum(u, v, at) for at in breaks])
    best = int(np.argmin(sums))
    # Four parameters: a level, two slopes and the break.
    freedom = max(1, len(u) - 4)
    # The 95 % point of F with one degree of freedom is the square of Student's t.
    plausible = breaks[sums <= sums[best] * (1 + student(freedom) ** 2 / freedom) + ROUNDING]
    (_, below, bend), _, rms = _solve(_broken_line_columns(u, breaks[best]), v)
    return BrokenPower(
        at=float(np.exp(breaks[best])),
        interval=(float(np.exp(plausible.min())), float(np.exp(plausible.max()))),
        below=below,
        above=below + bend,
        rms=rms,
        # If every break is plausible, the data do not say where the break is, so there is none.
        significant=bend >= MIN_BEND and len(plausible) < len(breaks),
    )


def _validated(
    xs: Sequence[float], ys: Sequence[float], least: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    if x.size < least or x.size != y.size:
        raise WeftError("a fit", expected=f"{least} points or more", got=f"{x.size} and {y.size}")
    if not ((x > 0).all() and (y > 0).all() and (np.diff(x) > 0).all()):
        raise WeftError("a fit", expected="positive sizes in rising order, positive times", got=xs)
    return x, y


def _broken_line_columns(u: NDArray[np.float64], at: float) -> NDArray[np.float64]:
    # The third column is a hinge: its coefficient is the change of slope at the break.
    return np.stack([np.ones_like(u), u, np.maximum(0.0, u - at)], axis=1)


def _residual_sum(u: NDArray[np.float64], v: NDArray[np.float64], at: float) -> float:
    columns = _broken_line_columns(u, at)
    coefficients = np.linalg.lstsq(columns, v, rcond=None)[0]
    return float(((columns @ coefficients - v) ** 2).sum())


def _solve(
    columns: NDArray[np.float64], targets: NDArray[np.float64]
) -> tuple[list[float], list[float], float]:
    """Return the coefficients, half the width of each one's interval, and the residuals' root mean square."""
    coefficients = np.linalg.lstsq(columns, targets, rcond=None)[0]
    residuals = columns @ coefficients - targets
    freedom = max(1, len(targets) - columns.shape[1])
    covariance = float((residuals**2).sum()) / freedom * np.linalg.inv(columns.T @ columns)
    # Rounding can leave a tiny negative variance where the fit is exact.
    errors = student(freedom) * np.sqrt(np.maximum(0.0, np.diag(covariance)))
    return coefficients.tolist(), errors.tolist(), float(np.sqrt((residuals**2).mean()))
