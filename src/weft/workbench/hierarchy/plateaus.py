"""Plateaus of a curve over sizes, and the sizes at which it leaves them. A pure function.

Costs (time a load, time a byte) over working sets make a staircase: flat while a level holds the
set, a ramp, flat again. The logarithm of the cost is fitted by a piecewise constant function: least
squares, and a penalty for each change point, minimised exactly by dynamic programming (Jackson et
al., "An algorithm for optimal partitioning of data on an interval", 2005). Pieces that are long and
flat are plateaus, the rest is ramp. Where a piece ends says little, for a ramp may join it to the
next; so a break is read off the curve itself. Of a load, the cost is in between the two plateaus'
by the share of loads that miss, hence two readings:

- ``leaves``: the size at which ``SHARE`` of the loads miss, interpolated between two sizes; more
  than that where the step is so small that noise would reach it;
- ``holds``: the most bytes found in the level, size times share of hits, at any size. Where lines
  are replaced in an order other than the oldest first, or two halves of a cache hold copies, the
  curve leaves early and this is nearer to what the level has room for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SHARE = 0.1  # of the step to the next plateau; and at least
CLEAR = 3.0  # times the noise of a point
PENALTY = 4.0  # times noise^2 log(n) for each change point; 2 is Schwarz's criterion
NOISE = (0.02, 0.05)  # of a point, as a share: the least and the most that is assumed
SPAN = 0.5  # doublings that a plateau is long, at least
POINTS = 3  # that a plateau has, at least
FLAT = 0.2  # log cost a doubling: what is steeper is a ramp
STEP = 1.15  # two plateaus less far apart are one
INNER = 3  # sizes measured in addition between the two around a break


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """A flat stretch: the median cost, and the first and the last size (bytes) in it."""

    cost: float
    first: float
    last: float


@dataclass(frozen=True, kw_only=True)
class Break:
    """Where a plateau ends, in bytes, by both readings; ``before`` and ``after`` are the costs."""

    leaves: float
    holds: float
    before: float
    after: float


@dataclass(frozen=True)
class _Piece:
    """Points ``first`` to ``last``, both included; ``pieces`` that were merged keep their ends."""

    first: int
    last: int
    head: float  # cost of its first part
    tail: float  # and of its last


def find(sizes: Sequence[float], costs: Sequence[float]) -> tuple[list[Plateau], list[Break]]:
    """The plateaus from small sizes to large, and the break between each and the next.

    ``sizes`` in bytes, rising; ``costs`` positive, in any unit of time. There is one break less
    than plateaus; both are empty where nothing is flat for long enough. Raises ``ValueError`` for
    sizes that do not rise, costs that are not positive, and lists of unequal length.
    """
    x, v = np.log2(np.asarray(sizes, float)), np.asarray(costs, float)
    if len(x) != len(v) or not (np.all(np.diff(x) > 0) and np.all(v > 0)):
        raise ValueError("sizes must rise, costs be positive, and there be as many of each")
    if len(x) < POINTS:
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


def sweep(
    measure: Callable[[int], float], sizes: Sequence[int], unit: int
) -> tuple[list[int], list[float]]:
    """Measure at ``sizes``, then at more sizes, multiples of ``unit``, about every break found.

    A break falls between two sizes, and nothing tells where: the closer they are, the better.
    """
    found = {size: measure(size) for size in sizes}
    for at in [b.leaves for b in find(sorted(found), [found[s] for s in sorted(found)])[1]]:
        ordered = sorted(found)
        low = max(s for s in ordered if s <= at)
        high = min((s for s in ordered if s > at), default=low)
        for k in range(1, INNER + 1):
            size = round(low * (high / low) ** (k / (INNER + 1)) / unit) * unit
            if size not in found and low < size < high:
                found[size] = measure(size)
    ordered = sorted(found)
    return ordered, [found[s] for s in ordered]


def noise(y: Array) -> float:
    """The standard deviation of a point, from the median step between neighbours: most of a
    staircase is flat, so that its ramps do not count."""
    return float(np.clip(1.4826 * np.median(np.abs(np.diff(y))) / np.sqrt(2), *NOISE))


def _pieces(x: Array, y: Array) -> list[_Piece]:
    """The best piecewise constant fit: ``best[j]`` is the least cost of the first j points."""
    n = len(y)
    penalty = PENALTY * noise(y) ** 2 * np.log(n)
    sums, squares = (np.concatenate([[0.0], np.cumsum(y**k)]) for k in (1, 2))
    best, start = np.zeros(n + 1), np.zeros(n + 1, int)
    for j in range(1, n + 1):
        from_ = np.arange(j)
        residue = squares[j] - squares[from_] - (sums[j] - sums[from_]) ** 2 / (j - from_)
        total = best[from_] + residue + penalty
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
    if piece.last - piece.first + 1 < POINTS or x[piece.last] - x[piece.first] < SPAN:
        return False
    return abs(float(np.polyfit(x[inside], y[inside], 1)[0])) <= FLAT


def _merged(pieces: list[_Piece]) -> list[_Piece]:
    """Neighbours that are less than ``STEP`` apart become one, the closest first."""
    pieces = list(pieces)
    while len(pieces) > 1:
        gaps = [abs(np.log(b.head / a.tail)) for a, b in pairwise(pieces)]
        k = int(np.argmin(gaps))
        if gaps[k] >= np.log(STEP):
            break
        a, b = pieces[k : k + 2]
        pieces[k : k + 2] = [_Piece(a.first, b.last, a.head, b.tail)]
    return pieces


def _between(a: _Piece, b: _Piece, x: Array, v: Array, spread: float) -> Break:
    """Both readings of the break. Seen from the later plateau, so that a noisy point within the
    earlier one is not taken for its end."""
    miss = (v - a.tail) / (b.head - a.tail)
    share = max(SHARE, min(0.5, CLEAR * spread * a.tail / abs(b.head - a.tail)))
    i = b.first - 1
    while i > a.first and miss[i] >= share:
        i -= 1
    low, high = min(miss[i], share), max(miss[i + 1], share)
    part = (share - low) / (high - low) if high > low else 0.5
    leaves = 2.0 ** (x[i] + part * (x[i + 1] - x[i]))
    inside = slice(a.first, b.first)
    held = 2.0 ** x[inside] * (1 - np.clip(miss[inside], 0.0, 1.0))
    return Break(leaves=float(leaves), holds=float(held.max()), before=a.tail, after=b.head)
