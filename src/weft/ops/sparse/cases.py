"""Cases of sparse products: matrices in CSR whose rows have the lengths of a family.

A family fixes the length of every row, from the case alone, because shapes and compulsory bytes depend on
them. Columns and values come from a seed. CSR (compressed sparse row) is three tensors: the ``values`` of the
nonzeros row after row, their ``columns``, and ``offsets``, where each row begins, with their number at the
end.
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

DTYPES = ("float32", "float64", "float16", "bfloat16")
GPU = ("cuda",)
SPECIAL = (math.nan, math.inf, -math.inf, 0.0)
FAMILIES = {
    "uniform": "each row has `mean` random columns",
    "banded": "a row has the columns up to `mean` places from its diagonal",
    "stencil": "five points of a square grid: a cell and its neighbours",
    "power-law": "row lengths fall as rank^-0.8, in a random order of rows",
    "dense-row": "each row has `mean` columns, and one row has all",
    "empty-rows": "one row of three has 3 `mean` columns; the first and the last rows are empty",
    "all-empty": "no row has a nonzero",
    "duplicates": "as uniform, but three columns alone occur",
    "unsorted": "as uniform, with the columns of a row in a random order",
}


@dataclass(frozen=True)
class Family:
    """A matrix's sizes, the name of its family, and the parameter ``mean``, see ``FAMILIES``."""

    kind: str
    rows: int
    columns: int
    mean: int = 0

    def __post_init__(self) -> None:
        if self.kind not in FAMILIES:
            raise WeftError("sparse family", expected=" or ".join(FAMILIES), got=repr(self.kind))

    @property
    def nonzeros(self) -> int:
        rows, columns, mean = self.rows, self.columns, self.mean
        if self.kind == "all-empty":
            return 0
        if self.kind == "stencil":
            side = math.isqrt(rows)
            return 5 * side * side - 4 * side
        if self.kind == "banded":
            return rows * (2 * mean + 1) - mean * (mean + 1)
        if self.kind == "dense-row":
            return (rows - 1) * mean + columns
        return 3 * mean * max(0, (rows - 1) // 3) if self.kind == "empty-rows" else rows * mean

    @property
    def longest_row(self) -> int:
        """Return the length of the longest row, or a bound of it."""
        if self.kind == "dense-row":
            return self.columns
        return min(self.columns, self.nonzeros) if self.kind == "power-law" else 3 * self.mean + 5

    def lengths(self, device: str | torch.device = "cpu") -> Tensor:
        """Return the length of each row, (rows,) int64."""
        row = torch.arange(self.rows, device=device)
        if self.kind == "stencil":
            side = math.isqrt(self.rows)
            across, down = row % side, row // side
            inner = [(c > 0).long() + (c < side - 1) for c in (across, down)]
            return 1 + inner[0] + inner[1]
        if self.kind == "banded":
            return torch.clamp(row + self.mean, max=self.rows - 1) - torch.clamp(row - self.mean, min=0) + 1
        lengths = torch.full_like(row, self.mean)
        if self.kind == "dense-row":
            lengths[self.rows // 3] = self.columns
        elif self.kind == "empty-rows":
            lengths = 3 * self.mean * ((row % 3 == 1) & (row < self.rows - 1))
        elif self.kind == "all-empty":
            lengths.zero_()
        elif self.kind == "power-law":
            lengths = self._power_law(row)
        return lengths

    def _power_law(self, row: Tensor) -> Tensor:
        """Return lengths that fall with a row's rank, at most all columns each; they add up exactly."""
        # A generator of the CPU: the lengths are the same on each device.
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(1)).to(row.device)
        weights = (row.double() + 1) ** -0.8
        by_rank = (weights * (self.nonzeros / weights.sum())).long().clamp(max=self.columns)
        missing = self.nonzeros - int(by_rank.sum())
        by_rank += missing // self.rows
        by_rank[self.rows - missing % self.rows :] += 1
        lengths = torch.empty_like(by_rank)
        lengths[order] = by_rank
        return lengths

    def column_indices(self, lengths: Tensor, generator: torch.Generator) -> Tensor:
        """Return the columns of all nonzeros, (nonzeros,) int32; sorted in each row unless the family says
        otherwise."""
        device = lengths.device
        row = torch.repeat_interleave(torch.arange(self.rows, device=device), lengths)
        ends = lengths.cumsum(0)
        rank = torch.arange(row.numel(), device=device) - (ends - lengths)[row]
        if self.kind == "banded":
            return ((row - self.mean).clamp(min=0) + rank).int()
        if self.kind == "stencil":
            side = math.isqrt(self.rows)
            steps = torch.tensor((-side, -1, 0, 1, side), device=device)
            near = torch.arange(self.rows, device=device)[:, None] + steps
            across = torch.arange(self.rows, device=device)[:, None] % side + steps * (steps.abs() == 1)
            inside = (near >= 0) & (near < self.rows) & (across >= 0) & (across < side)
            return near[inside].int()
        options = 3 if self.kind == "duplicates" else max(self.columns, 1)
        columns = torch.randint(options, row.shape, generator=generator, device=device)
        if self.kind == "dense-row":
            columns = torch.where(row == self.rows // 3, rank, columns)
        if self.kind != "unsorted":
            columns = (row * max(self.columns, 1) + columns).sort().values % max(self.columns, 1)
        return columns.int()


_FAMILY_OF: dict[str, Family] = {}  # by the name of a case


def family_of(case: Case) -> Family:
    """Return the family of a case that :func:`sparse_case` made."""
    return _FAMILY_OF[case.name]


def draw(case: Case, seed: int, device: str) -> Sequence[Tensor]:
    """Generate a matrix of the case's family and a dense factor, with the case's kinds of values."""
    generator = torch.Generator(device)
    generator.manual_seed(seed)
    values, _, offsets, dense = case.inputs
    family = family_of(case)
    lengths = family.lengths(device)
    starts = torch.zeros(family.rows + 1, dtype=torch.int64, device=device)
    torch.cumsum(lengths, 0, out=starts[1:])
    columns = family.column_indices(lengths, generator)
    floats = [_floats(spec, generator, device) for spec in (values, dense)]
    return floats[0], columns, starts.to(getattr(torch, offsets.dtype)), floats[1]


def _floats(spec: Input, generator: torch.Generator, device: str) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    if spec.values == "equal":
        factor = 0.5 + torch.rand((), generator=generator, device=device)
        return factor.to(dtype).expand(spec.shape).contiguous()
    x = torch.randn(spec.shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
    if spec.values == "special" and x.numel():
        count = max(1, x.numel() // 40)
        for value in SPECIAL:
            places = torch.randint(x.numel(), (count,), generator=generator, device=device)
            x.view(-1)[places] = value
    return x


def sparse_case(
    kind: str,
    rows: int,
    columns: int,
    mean: int = 0,
    *,
    k: int | None = None,
    dtype: str = "float32",
    offsets: str = "int32",
    layouts: tuple[str, str] = ("contiguous", "contiguous"),
    values: tuple[str, str] = ("normal", "normal"),
    tags: str = "check",
    devices: tuple[str, ...] = ("cpu", "cuda"),
) -> Case:
    """Return a case with ``k`` columns of the dense factor, None for a vector.

    ``layouts`` and ``values`` are those of the nonzeros and of the dense factor. The name tells sizes and
    family, ``fp32-300x200-uniform-16``, with ``k`` after the sizes: ``fp32-300x200x64-uniform-16``.
    """
    family = Family(kind, rows, columns, mean)
    sizes = f"{rows}x{columns}" + ("" if k is None else f"x{k}")
    words = [SHORT[dtype], sizes, kind] + [str(mean)] * (mean > 0)
    words += [offsets] if offsets != "int32" else []
    words += ["-".join(layouts)] if layouts != ("contiguous", "contiguous") else []
    words += ["-".join(values)] if values != ("normal", "normal") else []
    count = family.nonzeros
    shape = (columns,) if k is None else (columns, k)
    _FAMILY_OF["-".join(words)] = family
    return Case(
        name="-".join(words),
        inputs=(
            Input(name="values", shape=(count,), dtype=dtype, layout=layouts[0], values=values[0]),
            Input(name="columns", shape=(count,), dtype="int32"),
            Input(name="offsets", shape=(rows + 1,), dtype=offsets),
            Input(name="x" if k is None else "b", shape=shape, dtype=dtype, layout=layouts[1],
                  values=values[1]),
        ),
        tags=frozenset({tags}),
        devices=devices,
    )  # fmt: skip


def cases_of(k: int | None) -> tuple[Case, ...]:
    """Return the cases of a product with ``k`` columns of the dense factor, None for a vector."""

    def one(*sizes: Any, **more: Any) -> Case:
        return sparse_case(*sizes, k=k, **more)

    checks = [
        *(one("uniform", 20, 30, 4, dtype=d) for d in DTYPES),
        one("banded", 40, 40, 2, offsets="int64"),
        one("stencil", 49, 49),
        one("power-law", 60, 80, 5),
        one("dense-row", 30, 200, 2),
        one("empty-rows", 31, 20, 2, dtype="bfloat16", offsets="int64"),
        one("duplicates", 25, 20, 4),
        one("unsorted", 25, 40, 4, layouts=("shifted", "sliced")),
    ]
    edges = [
        one("all-empty", 7, 5, tags="edge"),
        one("uniform", 0, 4, 3, tags="edge"),
        one("all-empty", 3, 0, tags="edge"),
        one("uniform", 9, 40, 3, values=("special", "special"), tags="edge"),
        one("dense-row", 20, 300, 2, dtype="float16", values=("equal", "equal"), tags="edge"),
    ]
    on_gpu = [
        one("power-law", 3001, 4001, 20, dtype="bfloat16", tags="edge", devices=GPU),
        one("dense-row", 5003, 30011, 5, offsets="int64", tags="edge", devices=GPU),
        one("empty-rows", 30001, 999, 3, layouts=("sliced", "shifted"), tags="edge", devices=GPU),
        one("all-empty", 20011, 3, tags="edge", devices=GPU),
    ]
    return (*checks, *edges, *on_gpu)
