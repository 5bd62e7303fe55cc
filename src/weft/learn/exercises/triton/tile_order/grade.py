"""Grade the order by definition: each tile once, groups in order, and few rows and columns in each wave."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import require
from weft.learn.probes.returned import function_returning

WRONG = "rows and columns are touched"
LUCKY = "outside the matrix"


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    tile_of, touched = (
        function_returning("a pair of numbers", candidate, "tile_of"),
        function_returning("a number", candidate, "touched"),
    )
    shapes = [(12, 12, 3), (8, 5, 4), (8, 7, 3), (1, 9, 4), (5, 1, 2)]
    shapes.append((int(generator.integers(5, 20)) * 4 + 3, int(generator.integers(5, 20)), 4))
    for tiles_m, tiles_n, group in shapes:
        case = f"tiles_m = {tiles_m}, tiles_n = {tiles_n}, group = {group}"
        order = [tuple(tile_of(pid, tiles_m, tiles_n, group)) for pid in range(tiles_m * tiles_n)]
        for pid, (i, j) in enumerate(order):
            reason = f"program {pid} gets tile ({i}, {j}), outside the matrix: the last group has fewer rows"
            require(0 <= i < tiles_m and 0 <= j < tiles_n, case, reason)
        missing = tiles_m * tiles_n - len(set(order))
        yield require(not missing, f"{case}, all tiles", f"{missing} tiles get no program, others several")
        wave = 4 * group
        for start in range(0, len(order), wave):
            tiles = order[start : start + wave]
            count = len({i for i, _ in tiles}) + len({j for _, j in tiles})
            limit = _distinct(start, start + len(tiles), tiles_m, tiles_n, group)
            reason = f"{count} rows and columns are touched by programs {start} to {start + len(tiles) - 1}"
            check = f"{case}, wave at {start}"
            require(count == limit, check, f"{reason}; the grouped order, column by column, touches {limit}")
            got = touched(list(tiles))
            require(got == count, check, f"touched: expected {count} for these tiles, got {got}")
        yield f"{case}, traffic"


def _distinct(begin: int, end: int, tiles_m: int, tiles_n: int, group: int) -> int:
    """Count rows and columns of programs ``begin`` to ``end`` - 1 by writing the whole order down."""
    order = []
    for first in range(0, tiles_m, group):
        rows = range(first, min(first + group, tiles_m))
        order += [(i, j) for j in range(tiles_n) for i in rows]
    tiles = order[begin:end]
    return len({i for i, _ in tiles}) + len({j for _, j in tiles})
