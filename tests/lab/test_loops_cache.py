"""The loop study's simulated cache: misses counted by hand, addresses that the loop nests make, counters."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.paths import ROOT
from weft.lab.loops import addresses, counters, in_c, in_numba
from weft.lab.loops.cache import DEFAULTS, CacheLevel, Misses, cache_levels, simulate
from weft.lab.loops.variants import STRIP, TILE, VARIANTS, Variant, variants

WRITTEN = [v for v in VARIANTS if in_numba.source(v) is not None]


def variant_of(program: str, name: str) -> Variant:
    return next(v for v in variants(program) if v.name == name)


TOY = (
    CacheLevel(name="L1", size=4 * 64, associativity=2, line=64),
    CacheLevel(name="L2", size=16 * 64, associativity=4, line=64),
)


def at_lines(*lines: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    return [64 * np.array(lines, dtype=np.int64)]


@pytest.mark.parametrize(
    ("lines", "l1", "l2"),
    [
        ((0, 0, 0, 0), 1, 1),
        ((0, 2, 0, 2), 2, 2),  # two lines of one set
        ((0, 2, 4, 0), 4, 3),  # a third evicts the oldest; L2 still has it
        ((0, 2, 0, 4, 0), 3, 3),  # 0 was used last, so that 2 is evicted
        ((0, 2, 0, 4, 2), 4, 3),
        ((0, 1, 2, 3, 0, 1, 2, 3), 4, 4),  # four lines fill both sets
        ((0, 4, 8, 12, 16, 0), 6, 6),  # five lines of one set of L2
    ],
)
def test_misses_are_those_counted_by_hand(lines: tuple[int, ...], l1: int, l2: int) -> None:
    assert simulate(at_lines(*lines), TOY) == Misses(len(lines), l1, l2)
    # The same accesses in pieces.
    pieces = [np.array([64 * line + 60], dtype=np.int64) for line in lines]
    assert simulate(pieces, TOY) == Misses(len(lines), l1, l2)


L1_L2 = (
    CacheLevel(name="L1", size=48 << 10, associativity=12, line=64),
    CacheLevel(name="L2", size=2 << 20, associativity=16, line=64),
)


def misses_of(program: str, name: str, *shape: int, levels: tuple[CacheLevel, CacheLevel] = L1_L2) -> Misses:
    return simulate(addresses.stream(variant_of(program, name), shape), levels)


def test_a_stream_misses_once_a_line() -> None:
    n = 100_000
    assert misses_of("sum", "naive", n) == Misses(n + 1, n * 4 // 64 + 1, n * 4 // 64 + 1)


def down_columns(rows: int, columns: int, walked: int) -> Misses:
    """Return the misses of a walk down the first ``walked`` columns of a matrix, one after the other."""
    (matrix,) = addresses.layouts((rows, columns))
    return simulate([matrix(np.arange(rows), np.arange(walked)[:, None]).reshape(-1)], L1_L2)


def test_a_walk_down_a_tall_matrix_misses_at_each_element() -> None:
    # A row of 16 floats is a line, and L1 has 64 sets of 12: at 13 lines a set no line is there when the next
    # column needs it; at 12 all of them are.
    assert down_columns(13 * 64, 16, 16) == Misses(832 * 16, 832 * 16, 832)
    assert down_columns(12 * 64, 16, 16) == Misses(768 * 16, 768, 768)
    # Rows of 4 KiB, a power of two: a column is in a single set, so that 13 rows are too many and 12 are not.
    assert down_columns(13, 1024, 32) == Misses(13 * 32, 13 * 32, 13 * 2)
    assert down_columns(12, 1024, 32) == Misses(12 * 32, 12 * 2, 12 * 2)


def test_transformations_save_the_misses_that_the_page_says() -> None:
    n = 4 * TILE
    small = (
        CacheLevel(name="L1", size=32 << 10, associativity=8, line=64),
        CacheLevel(name="L2", size=128 << 10, associativity=8, line=64),
    )
    # Rows of b of 17 lines: at a power of two the rows of a tile would share few sets.
    products = {s: misses_of("product", s, 8, n + 16, n, levels=small) for s in ("interchange", "tiling")}
    b_lines = n * (n + 16) // 16
    assert products["interchange"].l1 > 8 * b_lines and products["interchange"].l2 > 8 * b_lines
    # Each tile of b is read once, and pieces of eight rows of a and c with it.
    assert b_lines < products["tiling"].l1 < 2 * b_lines
    rows, columns = 12, 8 * STRIP + 16
    grid = {
        s: misses_of("stencil", s, rows, columns, levels=small) for s in ("interchange", "tiling", "fusion")
    }
    lines = rows * columns // 16
    assert grid["tiling"].l1 < 0.6 * grid["interchange"].l1
    assert grid["fusion"].l2 < 2.6 * lines < 3.5 * lines < grid["interchange"].l2


class Recorded:
    """Float32 array that records the address of each access, as the functions of in_numba make them."""

    def __init__(
        self,
        values: np.ndarray[Any, np.dtype[np.float32]],
        layout: Any,
        log: list[int],
        origin: tuple[int, int],
    ) -> None:
        self.values, self.layout, self.log, self.origin = values, layout, log, origin

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple) and isinstance(index[1], slice):
            row, columns = index
            assert 0 <= columns.start <= columns.stop <= self.shape[1]
            return Recorded(self.values[row, columns], self.layout, self.log, (row, columns.start))
        self.log.append(self._address(index))
        return self.values[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.log.append(self._address(index))
        self.values[index] = value

    def _address(self, index: Any) -> int:
        i, j = index if isinstance(index, tuple) else (0, index)
        assert i >= 0 and j >= 0  # a negative index would be another element in C
        return int(self.layout(i + self.origin[0], j + self.origin[1]))


def recorded_stream(variant: Variant, shape: tuple[int, ...]) -> list[int]:
    if variant.program == "product":
        m, n, k = shape
        shapes = [(m, k), (k, n), (m, n)]
    elif variant.program == "stencil":
        rows, columns = shape
        shapes = [shape, (3 if variant.name == "fusion" else rows, columns), shape]
    else:
        shapes = [(1, shape[0]), (1, 1)]
    log: list[int] = []
    arrays = []
    for size, layout in zip(shapes, addresses.layouts(*shapes), strict=True):
        values = np.ones(size, dtype=np.float32)
        arrays.append(Recorded(values[0] if variant.program == "sum" else values, layout, log, (0, 0)))
    source = in_numba.source(variant)
    assert source is not None
    source(*arrays, 2)
    return log


@pytest.mark.parametrize("variant", WRITTEN, ids=[f"{v.program}-{v.name}" for v in WRITTEN])
def test_simulated_accesses_are_those_that_the_loop_nest_makes(variant: Variant) -> None:
    shapes = {
        "product": [(1, 1, 1), (2, TILE + 3, TILE + 2), (3, 5, 6)],
        "stencil": [(3, 3), (6, 11), (4, STRIP + 9)],
        "sum": [(1,), (37,)],
    }
    for shape in shapes[variant.program]:
        stream = np.concatenate(list(addresses.stream(variant, shape)))
        recorded = recorded_stream(variant, shape)
        assert len(recorded) == stream.size
        assert recorded == stream.tolist(), shape


def test_caches_are_read_from_the_system(tmp_path: Path) -> None:
    def describe(number: int, kind: str, level: int, size: str, associativity: int) -> None:
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        fields = {"type": kind, "level": level, "size": size, "coherency_line_size": 64}
        for name, value in {**fields, "ways_of_associativity": associativity}.items():
            (folder / name).write_text(f"{value}\n")

    assert cache_levels(tmp_path) == DEFAULTS
    describe(0, "Data", 1, "48K", 12)
    describe(1, "Instruction", 1, "32K", 8)
    assert cache_levels(tmp_path) == DEFAULTS
    describe(2, "Unified", 2, "2048K", 16)
    describe(3, "Unified", 3, "30M", 12)
    assert cache_levels(tmp_path) == L1_L2
    assert [level.sets for level in L1_L2] == [64, 2048]
    (tmp_path / "index2" / "ways_of_associativity").write_text("0\n")  # as some virtual machines say
    assert cache_levels(tmp_path) == DEFAULTS


# Counters

PERF = """#!{python}
import sys
event = "L1-dcache-load-misses:u"
assert sys.argv[1:5] == ["stat", "-x", ",", "-e"] and event == sys.argv[5], sys.argv
calls = int(sys.argv[-1]) if sys.argv[-1].isdigit() else 0
print(str(1_000_000 + 2500 * calls) + ",," + event + ",9000,100.00,,", file=sys.stderr)
"""


def fake_perf(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "perf"
    program.write_text(text)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder))


def test_counted_misses_are_those_of_the_calls_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_perf(tmp_path, PERF.format(python=sys.executable), monkeypatch)
    assert counters.reason_without_counters() == ""
    library = in_c.Library(path=Path("programs.so"), compiler="", version="")
    assert counters.l1_load_misses(library, VARIANTS[0], 300) == 2500


@pytest.mark.parametrize(
    ("line", "status", "reason"),
    [
        ("<not supported>,,L1-dcache-load-misses:u,0,100.00,,", 0, "is not supported here"),
        ("<not counted>,,L1-dcache-load-misses:u,0,0.00,,", 0, "is not counted here"),
        ("Error: No permission to enable the event.", 255, "perf stat failed: Error: No permission"),
        ("", 1, "perf stat failed: exit 1"),
    ],
)
def test_why_nothing_is_counted_is_a_reason(
    line: str, status: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_perf(tmp_path, f"#!/bin/sh\necho '{line}' >&2\nexit {status}\n", monkeypatch)
    assert reason in counters.reason_without_counters()


def test_without_perf_nothing_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert counters.reason_without_counters() == "perf is not installed"


@pytest.mark.skipif(not any(map(shutil.which, in_c.COMPILERS)), reason="needs a C compiler (gcc or clang)")
def test_counted_process_makes_the_calls(tmp_path: Path) -> None:
    arguments = [str(in_c.build(tmp_path).path), "sum_naive", "sum", "1000", "3"]
    command = [sys.executable, "-m", "weft.lab.loops.counters", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
