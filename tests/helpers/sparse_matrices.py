"""Sparse matrices of whole numbers for tests: families of row lengths, and products by the reference."""

from __future__ import annotations

import torch

from helpers.guarded_pages import place
from weft.ops.sparse.cases import Family
from weft.ops.sparse.spec import reference

Csr = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
FAMILIES = (
    Family("uniform", 150, 40, 4),
    Family("banded", 90, 90, 3),
    Family("stencil", 81, 81),
    Family("power-law", 200, 150, 6),
    Family("dense-row", 50, 1500, 3),
    Family("empty-rows", 301, 60, 3),
    Family("all-empty", 500, 5),
    Family("unsorted", 40, 50, 9),
    Family("uniform", 1, 7, 3000),  # one row of many tiles
)


class Regions(Family):
    """Regions of rows that fill tiles and shares in each manner that spmv.cu treats apart."""

    def lengths(self, device: str | torch.device = "cpu") -> torch.Tensor:
        short = torch.arange(700) * 7 % 4 + 1  # tiles that end inside a row, and that two full shares have
        few = (torch.arange(900) % 3 == 1).long()  # thin shares inside a tile
        # Long rows among short ones.
        with_long = torch.full((300,), 2).index_fill(0, torch.arange(20, 300, 50), 90)
        empty, longest = torch.zeros(600, dtype=torch.int64), torch.tensor([6000])
        # The first tiles have long rows, and thin shares with the same numbers.
        first = torch.cat((with_long, few, short, empty, longest))
        return torch.cat((first, short[:50], empty[:300], longest // 20, empty))

    @property
    def nonzeros(self) -> int:
        return int(self.lengths().sum())


REGIONS = Regions("uniform", int(Regions("uniform", 0, 0).lengths().numel()), 60)


def matrix_of(family: Family, dtype: torch.dtype = torch.float32, offsets: torch.dtype = torch.int32) -> Csr:
    """Return a matrix of small whole numbers, whose sums are exact in every order."""
    generator = torch.Generator().manual_seed(family.rows)
    lengths = family.lengths()
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    values = torch.randint(-4, 5, (family.nonzeros,), generator=generator).to(dtype)
    return values, family.column_indices(lengths, generator), starts.to(offsets)


def vector_of(family: Family, dtype: torch.dtype = torch.float32, k: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(family.columns + 1)
    shape = (family.columns,) if k is None else (family.columns, k)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def at_end(x: torch.Tensor) -> torch.Tensor:
    """Return a copy that ends where no memory may be read; an empty tensor as it is."""
    return place(x, True) if x.numel() else x


def expected_product(matrix: Csr, dense: torch.Tensor) -> torch.Tensor:
    values, columns, offsets = matrix
    return reference(values.double(), columns, offsets, dense.double())
