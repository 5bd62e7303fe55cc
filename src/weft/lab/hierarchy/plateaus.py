"""Plateaus of a curve over sizes, and the breaks between them. Pure functions.

Costs (time of a load, time of a byte) over working sets form a staircase: flat while the set fits in
a level, then a ramp, then flat again. A piecewise constant function is fitted to the logarithm of the
cost: least squares with a penalty for each change point, minimised exactly by dynamic programming
(Jackson et al., "An algorithm for optimal partitioning of data on an interval", 2005). Pieces that
are long and flat are plateaus; the rest is ramp. The end of a piece is not the break, since a ramp
may join a piece to the next, so the break is read from the curve itself. Between two plateaus the
cost of a load rises with the share of loads that miss. This gives two readings:

- ``leaves``: the size at which ``SHARE`` of the loads miss, interpolated between two sizes; a larger
  share if the step is so small that noise would reach it;
- ``holds``: the maximum over all sizes of size times share of hits, that is, of the bytes in the
  level. If a cache does not replace the oldest line first, or keeps copies in two halves, the curve
  leaves its plateau early, and this reading is nearer to the level's capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SHARE = 0.1  # of the step to the next plateau, or the following if that is larger:
CLEAR = 3.0  # times the noise of a point
PENALTY = 4.0  # times noise^2 log(n) for each change point; 2 is Schwarz's criterion
NOISE = (0.02, 0.05)  # relative noise of a point: the minimum and the maximum that is assumed
MIN_SPAN = 0.5  # length of a plateau in doublings
MIN_POINTS = 3  # points of a plateau
MAX_SLOPE = 0.2  # of log cost in a doubling; a steeper piece is a ramp
MIN_STEP = 1.15  # ratio of two plateaus; closer ones are merged
INNER = 3  # additional sizes between the two around a break


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """A flat part of the curve: its median cost, and its first and last size in bytes."""

    cost: float
    first: float
    last: float


@dataclass(frozen=True, kw_only=True)
class Break:
    """The end of a plateau in bytes, by both readings; ``before`` and ``after`` are the costs."""

    leaves: float
    holds: float
    before: float
    after: float


@dataclass(frozen=True)
class _Piece:
    """Points ``first`` to ``last``, both included. A merged piece keeps the costs of its two ends."""

    first: int
    last: int
    head: float  # cost of its first piece
    tail: float  # cost of its last piece


def find(sizes: Sequence[float], costs: Sequence[float]) -> tuple[list[Plateau], list[Break]]:
    """Return the plateaus from small sizes to large, and the break between each and the next.

    ``sizes`` in bytes, rising; ``costs`` positive, in any unit of time. There is one break less than
    plateaus; both lists are empty if no part is flat for long enough. Raises ``ValueError`` for sizes
    that do not rise, costs that are not positive, and lists of unequal length.
    """
    x, v = np.log2(np.asarray(sizes, float)), np.asarray(costs, float)
    if len(x) != len(v) or not (np.all(np.diff(x) > 0) and np.all(v > 0)):
        raise ValueError("sizes must rise, costs be positive, and there be as many of each")
    if len(x) < MIN_POINTS:
        return [], []
    pieces = _merged([p for p in _pieces(x, np.log(v)) if _is_flat(p, x, np.log(v))])
    plateaus = [
        Plateau(
            cost=float(np.median(v[p.first : p.last + 1])),
            first=float(sizes[p.first]),
            last=float(sizes[p.last]),
        )
        for p in pieces
    ]
    breaks = [_between(a, b, x, v, noise(np.log(v))) for a, b in pairwise(pieces)]
    return plateaus, breaks


def sweep(measure: Callable[[int], float], sizes: Sequence[int], unit: int) -> tuple[list[int], list[float]]:
    """Measure at ``sizes``, then at more sizes, multiples of ``unit``, around every break.

    A break is known only as finely as the two sizes around it are close.
    """
    costs = {size: measure(size) for size in sizes}
    _, breaks = find(sorted(costs), [costs[s] for s in sorted(costs)])
    for at in [b.leaves for b in breaks]:
        ordered = sorted(costs)
        low = max(s for s in ordered if s <= at)
        high = min((s for s in ordered if s > at), default=low)
        for k in range(1, INNER + 1):
            size = round(low * (high / low) ** (k / (INNER + 1)) / unit) * unit
            if size not in costs and low < size < high:
                costs[size] = measure(size)
    ordered = sorted(costs)
    return ordered, [costs[s] for s in ordered]


def noise(y: Array) -> float:
    """Estimate the standard deviation of a point from the median step between neighbours.

    Most of a staircase is flat, so its ramps do not move the median.
    """
    # 1.4826 turns a median absolute deviation into a standard deviation; a step has two points' noise.
    return float(np.clip(1.4826 * np.median(np.abs(np.diff(y))) / np.sqrt(2), *NOISE))


def _pieces(x: Array, y: Array) -> list[_Piece]:
    """Return the best piecewise constant fit; ``best[j]`` is the smallest loss of the first j points."""
    n = len(y)
    penalty = PENALTY * noise(y) ** 2 * np.log(n)
    sums, squares = (np.concatenate([[0.0], np.cumsum(y**k)]) for k in (1, 2))
    best, start = np.zeros(n + 1), np.zeros(n + 1, int)
    for j in range(1, n + 1):
        origin = np.arange(j)
        residue = squares[j] - squares[origin] - (sums[j] - sums[origin]) ** 2 / (j - origin)
        total = best[origin] + residue + penalty
        start[j] = int(np.argmin(total))
        best[j] = total[start[j]]
    pieces: list[_Piece] = []
    j = n
    while j:
        i = int(start[j])
        level = float(np.exp(np.median(y[i:j])))
        pieces.insert(0, _Piece(i, j - 1, level, level))
        j = i
    return pieces


def _is_flat(piece: _Piece, x: Array, y: Array) -> bool:
    inside = slice(piece.first, piece.last + 1)
    if piece.last - piece.first + 1 < MIN_POINTS or x[piece.last] - x[piece.first] < MIN_SPAN:
        return False
    return abs(float(np.polyfit(x[inside], y[inside], 1)[0])) <= MAX_SLOPE


def _merged(pieces: list[_Piece]) -> list[_Piece]:
    """Merge neighbours that are less than ``MIN_STEP`` apart, the closest first."""
    pieces = list(pieces)
    while len(pieces) > 1:
        gaps = [abs(np.log(b.head / a.tail)) for a, b in pairwise(pieces)]
        k = int(np.argmin(gaps))
        if gaps[k] >= np.log(MIN_STEP):
            break
        a, b = pieces[k : k + 2]
        pieces[k : k + 2] = [_Piece(a.first, b.last, a.head, b.tail)]
    return pieces


def _between(a: _Piece, b: _Piece, x: Array, v: Array, spread: float) -> Break:
    """Return both readings of the break between two pieces.

    The search starts at the later plateau, so that a noisy point inside the earlier one is not taken
    for its end.
    """
    miss = (v - a.tail) / (b.head - a.tail)
    share = max(SHARE, min(0.5, CLEAR * spread * a.tail / abs(b.head - a.tail)))
    i = b.first - 1
    while i > a.first and miss[i] >= share:
        i -= 1
    low, high = min(miss[i], share), max(miss[i + 1], share)
    part = (share - low) / (high - low) if high > low else 0.5
    leaves = 2.0 ** (x[i] + part * (x[i + 1] - x[i]))
    inside = slice(a.first, b.first)
    resident = 2.0 ** x[inside] * (1 - np.clip(miss[inside], 0.0, 1.0))
    return Break(leaves=float(leaves), holds=float(resident.max()), before=a.tail, after=b.head)
