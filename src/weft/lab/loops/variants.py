"""Catalogue of the loop study: programs, their sizes and data, and the variants with one idea each.

The loop nests themselves are in programs.c and in_numba.py; ``addresses`` has the order of their accesses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.core import WeftError

TILE = 64  # rows and columns of a tile of the product's b: 16 KiB
STRIP = 512  # columns of a strip of the stencil: three rows of it are 6 KiB
NAIVE = "naive"
LANGUAGES = ("c", "numba")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program of the study. ``work`` names one unit of its work: misses are counted for 1000 of them.

    ``size`` and ``quick_size`` are the default sizes. A size is at least ``smallest``, the least that has an
    inner point, and at most ``largest``: float32's bound of the error exists, and memory suffices.
    """

    name: str
    formula: str
    work: str
    size: int
    quick_size: int
    largest: int
    smallest: int = 1
    # A column of the stencil's grid must have more lines than the L1 cache, and a row of it more than a third
    # of them: hence wide grids. 1000 and 8016 floats are 62.5 and 501 lines, so that the elements of a column
    # are in many sets of a cache. A power of two puts them in few.

    def shape(self, size: int) -> tuple[int, ...]:
        """Return (m, n, k) of a product, (rows, columns) of a stencil, (n,) of a sum."""
        if self.name == "product":
            return size, size, size
        return (max(3, size // 10), size) if self.name == "stencil" else (size,)

    def simulated_shape(self, size: int, rows: int) -> tuple[int, ...]:
        """Return the shape of the simulated nest: of a product only ``rows`` rows of a and c."""
        m, *rest = self.shape(size)
        return (min(m, rows), *rest) if self.name == "product" else (m, *rest)


PROGRAMS: Mapping[str, Program] = {
    p.name: p
    for p in (
        Program(
            name="product",
            formula="C = A B, square, float32",
            work="multiply-adds",
            size=1000,
            quick_size=784,
            largest=4096,
        ),
        Program(
            name="stencil",
            formula="two sweeps of x / 2 + the four neighbours / 8, float32",
            work="updates of a point",
            size=8016,
            quick_size=5008,
            largest=1 << 14,
            smallest=3,
        ),
        Program(
            name="sum",
            formula="the sum of n float32",
            work="additions",
            size=1 << 22,
            quick_size=1 << 20,
            largest=1 << 23,
        ),
    )
}


def units_of_work(program: str, shape: tuple[int, ...]) -> int:
    """Return the multiply-adds of a product, the updated points of both sweeps, the additions of a sum."""
    if program == "product":
        m, n, k = shape
        return m * n * k
    return 2 * (shape[0] - 2) * (shape[1] - 2) if program == "stencil" else shape[0]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One transformation of a program. ``base`` is the variant that it changes; None for the naive one.

    ``stream`` is the variant whose accesses it makes, in the same order: its own, or that of its base.
    ``gpu`` says what the transformation becomes in a GPU kernel; ``kernel`` is a file of Weft that does it.
    """

    program: str
    name: str
    base: str | None
    change: str
    gpu: str
    kernel: str
    stream: str

    @property
    def function(self) -> str:
        """Name of the function in programs.c and in_numba.py."""
        return f"{self.program}_{self.name.replace('-', '_')}"


LADDER = "src/weft/ops/matmul/ladder"
DEMOS = "src/weft/lab/demos"


def _variant(
    program: str, name: str, base: str | None, change: str, gpu: str, kernel: str, stream: str = ""
) -> Variant:
    return Variant(
        program=program, name=name, base=base, change=change, gpu=gpu, kernel=kernel, stream=stream or name
    )


VARIANTS: tuple[Variant, ...] = (
    _variant(
        "product",
        NAIVE,
        None,
        "i, j, k: a row of A times a column of B; the inner loop walks down B",
        "neighbouring threads in neighbouring rows: 32 lines for one load of a warp",
        f"{LADDER}/01_naive.cu",
    ),
    _variant(
        "product",
        "interchange",
        NAIVE,
        "i, k, j: the inner loop walks along rows of B and C",
        "coalescing: the threads of a warp read neighbouring columns",
        f"{LADDER}/02_coalesced.cu",
    ),
    _variant(
        "product",
        "tiling",
        "interchange",
        f"{TILE} x {TILE} of B stay in L1 for all rows of A",
        "a tile in shared memory, read once for all threads of a block",
        f"{LADDER}/03_shared_tile.cu",
    ),
    _variant(
        "product",
        "unrolling",
        "interchange",
        "four columns in one turn of the inner loop: fewer branches",
        "#pragma unroll: fewer branches, more loads in flight (ILP)",
        f"{DEMOS}/unrolling.cu",
        "interchange",
    ),
    _variant(
        "product",
        "unroll-and-jam",
        "interchange",
        "four steps of k in one pass over C: C is loaded and stored once for four",
        "a register tile: each thread keeps several elements of C",
        f"{LADDER}/04_register_column.cu",
    ),
    _variant(
        "product",
        "vectorisation",
        "interchange",
        "eight columns in one instruction",
        "SIMT lanes; float4: 16 bytes in one load",
        f"{LADDER}/06_vectors.cu",
        "interchange",
    ),
    _variant(
        "product",
        "parallelisation",
        "interchange",
        "the rows of C are divided among the cores",
        "blocks: each computes its own tile of C",
        f"{LADDER}/01_naive.cu",
        "interchange",
    ),
    _variant(
        "stencil",
        NAIVE,
        None,
        "columns outside, rows inside: the inner loop walks down a column",
        "neighbouring threads in neighbouring rows: uncoalesced",
        f"{DEMOS}/coalescing.cu",
    ),
    _variant(
        "stencil",
        "interchange",
        NAIVE,
        "rows outside, columns inside: the inner loop walks along a row",
        "coalescing: the threads of a warp read neighbouring columns",
        f"{DEMOS}/coalescing.cu",
    ),
    _variant(
        "stencil",
        "tiling",
        "interchange",
        f"strips of {STRIP} columns: three rows of a strip stay in L1",
        "a tile with its halo in shared memory",
        f"{LADDER}/03_shared_tile.cu",
    ),
    _variant(
        "stencil",
        "fusion",
        "interchange",
        "both sweeps in one pass, a row apart; three rows between them",
        "one kernel instead of two: the value between them stays on the chip",
        "src/weft/ops/norms/forward.cu",
    ),
    _variant(
        "stencil",
        "fission",
        "interchange",
        "each sweep in two loops: along the row, then across rows",
        "two kernels: fewer registers and more warps, for more bytes",
        "src/weft/ops/norms/dropout_add.cu",
    ),
    _variant(
        "stencil",
        "vectorisation",
        "interchange",
        "eight columns in one instruction",
        "SIMT lanes; float4: 16 bytes in one load",
        f"{DEMOS}/vectorised_loads.cu",
        "interchange",
    ),
    _variant(
        "stencil",
        "parallelisation",
        "interchange",
        "the rows are divided among the cores; they meet between the sweeps",
        "blocks; sweeps meet only at the end of a kernel",
        f"{DEMOS}/launch_overhead.cu",
        "interchange",
    ),
    _variant(
        "sum",
        NAIVE,
        None,
        "one accumulator: each addition waits for the one before",
        "one thread adds everything, or all add to one address",
        "src/weft/ops/sum/ladder/01_global_atomics.cu",
    ),
    _variant(
        "sum",
        "unrolling",
        NAIVE,
        "four accumulators: four chains of additions overlap",
        "several elements a thread, in independent registers (ILP)",
        f"{DEMOS}/unrolling.cu",
        NAIVE,
    ),
    _variant(
        "sum",
        "vectorisation",
        NAIVE,
        "one accumulator of eight lanes",
        "lanes of a warp; float4 loads in a grid-stride loop",
        "src/weft/ops/sum/ladder/05_vectorised_grid_stride.cu",
        NAIVE,
    ),
    _variant(
        "sum",
        "parallelisation",
        NAIVE,
        "one accumulator a core, added at the end",
        "a partial sum for each block, then a tree",
        "src/weft/ops/sum/ladder/02_shared_tree.cu",
        NAIVE,
    ),
)


def variants(program: str) -> tuple[Variant, ...]:
    """Return the variants of a program, the naive one first."""
    return tuple(v for v in VARIANTS if v.program == program)


def parse_programs(text: str | None, quick: bool) -> dict[str, int]:
    """Return the size of each program that ``text`` names: ``product=300,sum``; None: all programs.

    Raises :class:`WeftError` for an unknown or repeated program, and a size that is no number or too small.
    """
    if text is None:
        return {p.name: p.quick_size if quick else p.size for p in PROGRAMS.values()}
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        program = PROGRAMS.get(name)
        if program is None or name in sizes:
            expected = f"different names of {', '.join(PROGRAMS)}, each with =SIZE or without"
            raise WeftError("--programs", expected=expected, got=text)
        size = program.quick_size if quick else program.size
        if equals:
            if not (number.isascii() and number.isdigit() and len(number) <= 12):
                raise WeftError(f"--programs {name}", expected="a size such as 300", got=number)
            size = int(number)
        if not program.smallest <= size <= program.largest:
            expected = f"a size from {program.smallest} to {program.largest}"
            raise WeftError(f"--programs {name}", expected=expected, got=size)
        sizes[name] = size
    return sizes


def parse_languages(text: str | None) -> tuple[str, ...]:
    """Return the languages that ``text`` names: ``c,numba``; None: all. Raises :class:`WeftError`."""
    names = LANGUAGES if text is None else tuple(part.strip() for part in text.split(","))
    if len(set(names)) != len(names) or not set(names) <= set(LANGUAGES):
        raise WeftError("--languages", expected=" or ".join(LANGUAGES) + ", or both", got=text)
    return names
