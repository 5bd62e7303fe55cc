"""Cases of products with a weight stored in blocks: patterns whose rows have fixed lengths.

A pattern fixes the number of blocks of every row of blocks, from the case alone, because shapes and
compulsory bytes depend on them. Columns and values come from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.core import Case, Input, WeftError
from weft.core.cases import SHORT
from weft.ops.block_sparse import blocks

DTYPES = ("float32", "float16", "bfloat16")
HALVES = DTYPES[1:]
GPU = ("cuda",)
SPECIAL = (math.nan, math.inf, -math.inf)
PATTERNS = {
    "even": "each row of blocks has the same share of the columns",
    "uneven": "rows have between none and twice the share",
    "empty-rows": "one row of three has three times the share; the first and the last are empty",
    "all-empty": "no row has a block",
    "dense-row": "one row has all blocks, the others one",
    "repeated": "as even, but columns come in any order and also more than once",
}


@dataclass(frozen=True)
class Pattern:
    """Rows and columns in units of blocks, the name of the pattern, and its share of blocks."""

    kind: str
    rows: int
    columns: int
    density: float

    def __post_init__(self) -> None:
        if self.kind not in PATTERNS:
            raise WeftError("pattern of blocks", expected=" or ".join(PATTERNS), got=repr(self.kind))

    def lengths(self) -> list[int]:
        """Return the number of blocks of each row of blocks."""
        share = round(self.density * self.columns)
        if self.kind == "all-empty":
            return [0] * self.rows
        if self.kind == "dense-row":
            return [self.columns if i == self.rows // 2 else min(1, self.columns) for i in range(self.rows)]
        if self.kind == "empty-rows":
            full = min(3 * share, self.columns)
            return [full if i % 3 == 1 and i < self.rows - 1 else 0 for i in range(self.rows)]
        if self.kind == "uneven":
            return [min(7 * i % (2 * share + 1), self.columns) for i in range(self.rows)]
        return [share] * self.rows

    def columns_of_rows(self, generator: torch.Generator, device: str) -> Tensor:
        """Return the column of each block, (blocks,) int32."""
        lengths = torch.tensor(self.lengths(), dtype=torch.int64, device=device)
        if self.kind == "repeated":
            shape = (int(lengths.sum()),)
            return torch.randint(self.columns, shape, generator=generator, device=device, dtype=torch.int32)
        # The first columns of a random order of each row, sorted again.
        keys = torch.rand(self.rows, self.columns, generator=generator, device=device)
        rank = keys.argsort(1).argsort(1)
        return (rank < lengths[:, None]).nonzero()[:, 1].int()


_PATTERN_OF: dict[str, Pattern] = {}  # by the name of a case


def pattern_of(case: Case) -> Pattern:
    """Return the pattern of a case that :func:`block_case` made."""
    return _PATTERN_OF[case.name]


def draw(case: Case, seed: int, device: str) -> Sequence[Tensor]:
    """Generate x, the blocks with their indices, and a bias."""
    generator = torch.Generator(device).manual_seed(seed)
    pattern = pattern_of(case)
    x, values, bias = (_floats(case.inputs[i], generator, device) for i in (0, 1, 5))
    col = pattern.columns_of_rows(generator, device)
    lengths = torch.tensor([0, *pattern.lengths()], device=device)
    crow = lengths.cumsum(0).int()
    # An empty index is a case too: the backward computes it.
    has_index = case.inputs[4].shape[0] > 0
    empty = torch.empty(0, dtype=torch.int32, device=device)
    transposed = blocks.transposed_index(crow, col, pattern.columns) if has_index else empty
    return x, values, crow, col, transposed, bias


def _floats(spec: Input, generator: torch.Generator, device: str) -> Tensor:
    x = torch.randn(spec.shape, generator=generator, device=device, dtype=torch.float32)
    x = x.to(getattr(torch, spec.dtype))
    if spec.values == "special" and x.numel():
        places = torch.randint(x.numel(), (len(SPECIAL),), generator=generator, device=device)
        x.view(-1)[places] = torch.tensor(SPECIAL, device=device, dtype=x.dtype)
    return x


def block_case(
    rows: int | tuple[int, ...],
    n: int,
    k: int,
    block: int,
    kind: str = "even",
    density: float = 0.5,
    *,
    dtype: str = "bfloat16",
    index: bool = True,
    layouts: tuple[str, str] = ("contiguous", "contiguous"),
    values: str = "normal",
    tags: str = "check",
    devices: tuple[str, ...] = ("cpu", "cuda"),
) -> Case:
    """Return a case named by dtype, M x N x K, block, pattern and density: ``bf16-64x96x80-b16-even-0.5``.

    ``layouts`` are those of x and of the values; ``values`` those of x. ``index``: the transposed index is
    given. An infinity or NaN of x meets stored blocks alone, also in the reference.
    """
    lead = rows if isinstance(rows, tuple) else (rows,)
    pattern = Pattern(kind, n // block, k // block, density)
    words = [SHORT[dtype], "x".join(map(str, (*lead, n, k))), f"b{block}", kind, f"{density:g}"]
    words += [] if index else ["no-index"]
    words += ["-".join(layouts)] if layouts != ("contiguous", "contiguous") else []
    words += [values] if values != "normal" else []
    name, count = "-".join(words), sum(pattern.lengths())
    _PATTERN_OF[name] = pattern
    index_length = pattern.columns + 1 + 2 * count if index else 0
    inputs = (
        Input(name="x", shape=(*lead, k), dtype=dtype, layout=layouts[0], values=values),
        Input(name="values", shape=(count, block, block), dtype=dtype, layout=layouts[1]),
        Input(name="crow", shape=(pattern.rows + 1,), dtype="int32"),
        Input(name="col", shape=(count,), dtype="int32"),
        Input(name="transposed", shape=(index_length,), dtype="int32"),
        Input(name="bias", shape=(n,), dtype=dtype),
    )
    return Case(name=name, inputs=inputs, tags=frozenset({tags}), devices=devices)


def cases() -> tuple[Case, ...]:
    """Return all cases."""
    bench: dict[str, Any] = {"tags": "bench", "devices": GPU}
    return (
        *(block_case(5, 64, 96, 16, dtype=d) for d in DTYPES),
        *(block_case(19, 96, 64, 32, "uneven", dtype=d) for d in HALVES),
        block_case(33, 128, 192, 64, dtype="float16"),
        block_case(9, 128, 256, 128, index=False),
        block_case((2, 7), 80, 112, 16, "uneven", 0.3, dtype="float32", index=False),
        block_case(17, 112, 64, 16, "repeated", 0.75, dtype="float16"),
        *(block_case(300, 256, 320, 64, "uneven", 0.4, dtype=d, devices=GPU) for d in HALVES),
        *(block_case(700, 384, 512, 128, "uneven", 0.5, dtype=d, devices=GPU) for d in HALVES),
        block_case(11, 96, 64, 16, "empty-rows", 0.25, dtype="float32", tags="edge"),
        block_case(6, 32, 48, 16, "all-empty", 0.0, dtype="float32", tags="edge"),
        block_case(7, 80, 96, 16, "dense-row", 0.1, dtype="float32", tags="edge"),
        block_case(4, 32, 48, 16, "even", 1.0, dtype="float16", tags="edge"),
        block_case(8, 48, 96, 16, dtype="float32", values="special", tags="edge"),
        block_case(8, 128, 192, 64, dtype="float16", values="special", tags="edge"),
        *(block_case(*s, 16, dtype="float32", tags="edge") for s in ((0, 32, 48), (3, 0, 32), (3, 32, 0))),
        block_case(40, 48, 32, 16, dtype="float16", layouts=("transposed", "transposed"), tags="edge"),
        block_case(40, 48, 32, 16, dtype="float16", layouts=("shifted", "shifted"), tags="edge"),
        block_case(70, 128, 192, 64, layouts=("sliced", "shifted"), tags="edge", devices=GPU),
        *(block_case(4096, 4096, 4096, b, "even", 0.1, **bench) for b in blocks.SIDES),
        block_case(4096, 4096, 4096, 128, "even", 0.5, **bench),
        block_case(16384, 3072, 768, 64, "even", 0.25, **bench),
        block_case(16, 4096, 4096, 64, "even", 0.1, **bench),
        block_case(256, 512, 512, 32, "even", 0.25, dtype="float32", tags="bench", devices=("cpu",)),
    )
