"""Slices of an output: its rows, its columns, its blocks, and its elements of like magnitude.

One vector holds a sum for each slice of a layout, so that figures of the same output are compared slice
by slice. Elements arrive in contiguous pieces, so that no temporary is as large as the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from weft.workbench.check.tolerance import piece_elements

MIN_ELEMENTS = 32  # a smaller slice is not judged: the baseline's error there may be 0 by luck
BLOCKS = 128  # blocks that a flattened output is cut into, where they have MIN_ELEMENTS
LEVEL_BITS = 3  # elements of like magnitude lie within a factor of 2^3
MAX_EXPONENT, EXPONENT_BIAS = 2047, 1023  # of a float64
LEVELS = (MAX_EXPONENT + LEVEL_BITS - 1) // LEVEL_BITS + 1  # the first is for elements that are exactly 0
EXPONENTS = 1 + (LEVELS - 1) * LEVEL_BITS  # those of all levels
WIDEST_ROW = 1 << 26  # elements of a row above which there are no columns: a piece holds whole rows


@dataclass(frozen=True)
class Part:
    """One way to cut an output: ``count`` slices of ``size`` elements; the last may be shorter.

    ``inner`` is the distance between neighbours of a column; 0 if slices are contiguous, and -1 if
    they are magnitudes, whose elements may be anywhere.
    """

    title: str
    count: int
    size: int
    inner: int = 0

    def add(self, sums: torch.Tensor, start: int, values: torch.Tensor, exponents: torch.Tensor) -> None:
        """Add values, which begin at flat index ``start``, to the sums of their slices."""
        if self.inner < 0:
            # Counted by exponent, and by level afterwards: a division of each exponent would take longer.
            counted = torch.bincount(exponents, weights=values, minlength=EXPONENTS)
            sums[0] += counted[0]
            sums[1:] += counted[1:].view(-1, LEVEL_BITS).sum(1)
        elif self.inner:
            sums += values.view(-1, self.count, self.inner).sum((0, 2))
        else:
            self._add_contiguous(sums, start, values)

    def _add_contiguous(self, sums: torch.Tensor, start: int, values: torch.Tensor) -> None:
        head = min(-start % self.size, values.numel())
        first = start // self.size
        if head:
            sums[first] += values[:head].sum()
            first += 1
        whole = (values.numel() - head) // self.size
        end = head + whole * self.size
        if whole:
            sums[first : first + whole] += values[head:end].view(whole, self.size).sum(1)
        if end < values.numel():
            sums[first + whole] += values[end:].sum()


@dataclass(frozen=True)
class SliceLayout:
    """All slices of an output of this shape, one part after another in a vector."""

    shape: tuple[int, ...]

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Rows of each depth, columns of each further dimension, blocks, and magnitudes."""
        axes = [(axis, n) for axis, n in enumerate(self.shape) if n > 1]
        numel = math.prod(self.shape)
        parts: list[Part] = []
        for position, (axis, n) in enumerate(axes):
            rows, inner = math.prod(self.shape[: axis + 1]), math.prod(self.shape[axis + 1 :])
            if inner >= MIN_ELEMENTS:
                parts.append(Part(f"row {{}} of {rows}", rows, inner))
            column = numel // n
            if position and column >= MIN_ELEMENTS and self.aligned:
                parts.append(Part(f"index {{}} of dimension {axis}", n, column, inner))
        length = max(MIN_ELEMENTS, -(-numel // BLOCKS))
        if numel >= 2 * MIN_ELEMENTS:
            parts.append(Part("block {} of the flattened output", -(-numel // length), length))
        parts.append(Part("", LEVELS, 0, -1))
        return tuple(parts)

    @property
    def aligned(self) -> bool:
        """True if every piece holds whole rows of the first dimension that has more than one index."""
        first = next((axis for axis, n in enumerate(self.shape) if n > 1), 0)
        return math.prod(self.shape[first + 1 :]) <= WIDEST_ROW

    @property
    def length(self) -> int:
        return sum(part.count for part in self.parts)

    def name(self, index: int) -> str:
        """Return the slice at this index of the vector in words."""
        for part in self.parts:
            if index < part.count:
                if part.inner >= 0:
                    return part.title.format(index)
                low = (index - 1) * LEVEL_BITS + 1 - EXPONENT_BIAS
                return f"the elements between 2^{low} and 2^{low + LEVEL_BITS}"
            index -= part.count
        raise IndexError(index)

    def split(self, vector: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the slices of each part in turn."""
        return iter(vector.split([part.count for part in self.parts]))

    def error_sums(
        self, output: torch.Tensor, reference: torch.Tensor, start: int = 0, power: int = 2
    ) -> torch.Tensor:
        """Return for each slice the sum of |output - reference|^power over its finite elements.

        ``start`` is the flat index of the first element, where both are some rows of the whole.
        """
        sums = torch.zeros(self.length, dtype=torch.float64, device=reference.device)
        got, want = output.detach().reshape(-1), reference.reshape(-1)
        for begin, end in self._pieces(want):
            expected = want[begin:end].double()
            error = (got[begin:end].double() - expected).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            self._add(sums, start + begin, error.abs_().pow_(power), _exponents(expected))
        return sums

    def size_sums(
        self,
        reference: torch.Tensor,
        dtype: torch.dtype,
        terms: torch.Tensor | None = None,
        start: int = 0,
    ) -> torch.Tensor:
        """Return for each slice the number of its finite elements and the sum of their squares.

        The result has two rows. Finite is what is so in ``dtype``. ``terms`` are the sizes of an
        element's terms before they cancelled, used where they are larger.
        """
        sums = torch.zeros(2, self.length, dtype=torch.float64, device=reference.device)
        want = reference.reshape(-1)
        for begin, end in self._pieces(want):
            expected = want[begin:end].double()
            finite = expected.to(dtype).isfinite()
            size = torch.where(finite, expected, 0.0)
            exponents = _exponents(size)
            if terms is not None:
                size = torch.maximum(size.abs(), terms.reshape(-1)[begin:end].double())
            self._add(sums[0], start + begin, finite.double(), exponents)
            self._add(sums[1], start + begin, size.square(), exponents)
        return sums

    def _pieces(self, flat: torch.Tensor) -> Iterator[tuple[int, int]]:
        length = piece_elements(flat)
        if self.aligned:
            first = next((n for n in self.shape if n > 1), 1)
            row = max(1, math.prod(self.shape) // first)
            length = max(1, length // row) * row
        for begin in range(0, flat.numel(), length):
            yield begin, min(begin + length, flat.numel())

    def _add(self, sums: torch.Tensor, start: int, values: torch.Tensor, exponents: torch.Tensor) -> None:
        for part, part_sums in zip(self.parts, self.split(sums), strict=True):
            part.add(part_sums, start, values, exponents)


def _exponents(reference: torch.Tensor) -> torch.Tensor:
    """Return the biased exponent of each element of a flat float64 tensor; 0 for 0."""
    # From the upper 16 bits of each element (sign, exponent, 4 bits of the mantissa), the last of four pieces
    # in the byte order of all processors that PyTorch supports: frexp takes many times as long.
    return (reference.contiguous().view(torch.int16)[3::4] >> 4) & MAX_EXPONENT


def layouts(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[SliceLayout | None]:
    """Return the layout of each output; None for one that is not judged by slices."""
    return [
        SliceLayout(tuple(shape)) if dtype.is_floating_point and math.prod(shape) >= MIN_ELEMENTS else None
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
