"""References of large problems in float64, a piece of the rows at a time.

A whole answer in float64 is twice as large as the output, and its temporaries several times that. Where
the rows of the inputs are independent, a piece of them is computed, compared and freed before the next.
That is proved by comparison: three rows at once must equal one and two apart, and the caller compares
the result with the baseline at full size (:data:`DISTRUST`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from weft.core import Case, Operator
from weft.workbench.calls import heap
from weft.workbench.calls.buffers import tensors_of
from weft.workbench.check.slices import SliceLayout
from weft.workbench.check.tolerance import SAMPLE, Bound, Measured, measure

MIN_BYTES = 1 << 26  # bytes of inputs from which a reference is computed in pieces
PIECES = 32  # parts that the largest input is cut into, between the two limits
PIECE_ELEMENTS = (1 << 18, 1 << 27)
PROOF_ROWS = 3
MAX_CACHED_BYTES = 1 << 30  # of a GPU's memory that this process may keep for later
# A baseline further from the pieces' answer than this share of its RMS: the rows may be dependent after
# all, so the whole reference is computed.
DISTRUST = 0.05
_random = random.SystemRandom()  # a candidate must not predict which rows are compared


@dataclass(frozen=True)
class RowReference:
    """A reference that may be computed by rows. ``cut`` says which inputs are cut, ``mean`` that the
    outputs are means over the rows instead of rows."""

    operator: Operator
    case: Case
    cut: tuple[bool, ...]
    mean: bool = False

    def piece(self, x: Sequence[torch.Tensor], rows: slice) -> tuple[torch.Tensor, ...]:
        """Return the outputs in float64 for some rows."""
        cut = [v[rows] if c else v for v, c in zip(x, self.cut, strict=True)]
        # A clone only of what is not widened: the reference must not write into the caller's inputs.
        wide = [v.double() if v.dtype.is_floating_point else v for v in cut]
        copies = [w.clone() if w is v else w for w, v in zip(wide, cut, strict=True)]
        with torch.no_grad():
            return tuple(tensors_of(self.operator.reference(*copies, **self.case.params)))

    def pieces(
        self, x: Sequence[torch.Tensor], share: float = 1.0
    ) -> Iterator[tuple[int, int, tuple[torch.Tensor, ...]]]:
        """Yield first row, count and outputs of each piece in turn, or of a random share of the pieces."""
        total = next(v.shape[0] for v, c in zip(x, self.cut, strict=True) if c)
        elements = max(v.numel() for v, c in zip(x, self.cut, strict=True) if c)
        low, high = PIECE_ELEMENTS
        rows = max(1, min(max(elements // PIECES, low), high) * total // max(elements, 1))
        starts = list(range(0, total, rows))
        if share < 1.0:
            starts = sorted(_random.sample(starts, math.ceil(share * len(starts))))
        for start in starts:
            count = min(rows, total - start)
            yield start, count, self.piece(x, slice(start, start + count))

    def whole(self, x: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the whole outputs, where they are needed in one tensor."""
        if self.mean:
            return self.means(x)
        parts = [outputs for _, _, outputs in self.pieces(x)]
        return tuple(torch.cat(output) for output in zip(*parts, strict=True))

    def means(self, x: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return outputs that are means over the rows."""
        sums: list[torch.Tensor] = []
        total = 0
        for _, count, outputs in self.pieces(x):
            total += count
            weighted = [o * count for o in outputs]
            sums = [s + w for s, w in zip(sums, weighted, strict=True)] if sums else weighted
        return tuple(s / total for s in sums)


def row_reference(operator: Operator, x: Sequence[torch.Tensor], case: Case) -> RowReference | None:
    """Return how the reference can be computed by rows, or None where that changes the answer."""
    if not operator.splits_rows or sum(v.nbytes for v in x) < MIN_BYTES:
        return None
    largest = max(x, key=lambda v: v.numel())
    rows = largest.shape[0] if largest.dim() else 0
    if rows <= PROOF_ROWS:
        return None
    # First the first input of the largest size alone (a product's), then all with as many rows.
    alone = tuple(v is largest for v in x)
    together = tuple(v.dim() > 0 and v.shape[0] == rows for v in x)
    for cut in dict.fromkeys((together, alone)):
        for mean in (False, True):
            candidate = RowReference(operator, case, cut, mean)
            try:
                if _is_equal(candidate, x):
                    return candidate
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                break  # with the other outputs it would raise as well
    return None


def _is_equal(reference: RowReference, x: Sequence[torch.Tensor]) -> bool:
    both = reference.piece(x, slice(0, PROOF_ROWS))
    first, rest = reference.piece(x, slice(0, 1)), reference.piece(x, slice(1, PROOF_ROWS))
    for whole, one, others in zip(both, first, rest, strict=True):
        if reference.mean:
            if not (whole.shape == one.shape == others.shape) or not whole.dtype.is_floating_point:
                return False
            separate = (one + others * (PROOF_ROWS - 1)) / PROOF_ROWS
        else:
            if not whole.dim() or [t.shape[:1] for t in (whole, one)] != [(PROOF_ROWS,), (1,)]:
                return False
            separate = torch.cat((one, others))
        # Not bit for bit: float64 sums of another shape may be added in another order.
        if whole.shape != separate.shape or not torch.allclose(
            whole.double(), separate.double(), rtol=1e-11, atol=1e-300, equal_nan=True
        ):
            return False
    return True


def return_freed_memory() -> None:
    """Return the memory of freed pieces to the system, on the host and on a GPU, where much is cached.

    glibc and PyTorch's allocator would keep it for this process, and the candidate's needs it.
    """
    if torch.cuda.is_initialized():
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if cached > MAX_CACHED_BYTES:
            torch.cuda.empty_cache()
    heap.trim()


class Moments:
    """RMS of an output's finite elements, and how many elements make it, from its pieces in turn.

    The same figures as :func:`~weft.workbench.check.tolerance.rms` and ``participants`` of the whole.
    With a layout, ``sizes`` are the counts and squares by slice, as an output of ``dtype`` has them.
    """

    def __init__(self, numel: int, dtype: torch.dtype, layout: SliceLayout | None = None) -> None:
        self.numel, self.step = numel, max(1, numel // SAMPLE)
        self.dtype, self.layout = dtype, layout
        self.sizes: torch.Tensor | None = None
        self.start = self.count = 0
        self.peak = self.squares = self.fourths = 0.0
        self.sample: list[torch.Tensor] = []

    def add(self, piece: torch.Tensor) -> None:
        flat = piece.reshape(-1).double()
        # A copy: a view would hold the whole piece.
        self.sample.append(flat[-self.start % self.step :: self.step].clone().cpu())
        if self.layout is not None:
            sizes = self.layout.size_sums(flat, self.dtype, start=self.start)
            self.sizes = sizes if self.sizes is None else self.sizes.add_(sizes)
        self.start += flat.numel()
        if not flat.numel():
            return
        peak = float(flat.abs().max())
        finite = flat.numel()
        if not math.isfinite(peak):
            is_finite = flat.isfinite()
            finite = int(is_finite.count_nonzero())
            flat = torch.where(is_finite, flat, 0.0)
            peak = float(flat.abs().max())
        self.count += finite
        if peak > self.peak:
            shrink = (self.peak / peak) ** 2
            self.squares, self.fourths, self.peak = self.squares * shrink, self.fourths * shrink**2, peak
        if self.peak:
            # Divided by the peak: the fourth power of a large value would overflow.
            square = flat.div(self.peak).square_()
            self.squares += float(square.sum())
            self.fourths += float(torch.dot(square, square))

    @property
    def rms(self) -> float:
        return self.peak * math.sqrt(self.squares / max(self.count, 1))

    @property
    def participants(self) -> float:
        if self.peak == 0.0:
            return float(max(self.numel, 1))
        sample = torch.cat(self.sample)
        distinct = sample.unique().numel()
        count = self.squares**2 / self.fourths
        return count if 2 * distinct > sample.numel() else min(count, float(distinct))


def merge(parts: Sequence[tuple[int, Measured]]) -> Measured:
    """Return the error of a whole output from those of its pieces, each with its first flat index."""
    worst_start, worst = max(parts, key=lambda p: p[1].maximum)
    misplaced = [(start, m) for start, m in parts if m.misplaced]
    count = sum(m.compared for _, m in parts)
    squares = sum(m.rms**2 * m.compared for _, m in parts)
    by_slice = [m.squares for _, m in parts if m.squares is not None]
    first = (0, 0.0, 0.0)
    if misplaced:
        start, m = misplaced[0]
        first = (start + m.first_misplaced[0], *m.first_misplaced[1:])
    return Measured(
        maximum=worst.maximum,
        rms=math.sqrt(squares / max(count, 1)),
        worst=(worst_start + worst.worst[0], *worst.worst[1:]),
        misplaced=sum(m.misplaced for _, m in parts),
        first_misplaced=first,
        compared=count,
        squares=torch.stack(by_slice).sum(0) if by_slice else None,
    )


def compare_by_rows(
    rows: RowReference,
    x: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    limits: Sequence[Bound | None],
    slices: Sequence[SliceLayout | None],
    share: float = 1.0,
) -> tuple[list[Measured], list[Moments]]:
    """Return the errors of outputs and the moments of their answers, a piece of the rows at a time.

    Without moments where the outputs have limits: those of a candidate need no more than their errors. With
    a ``share`` below 1 so many of the pieces, picked at random, are compared and no others.
    """
    moments = [
        Moments(o.numel(), o.dtype, n)
        for o, n, limit in zip(outputs, slices, limits, strict=False)
        if limit is None
    ]
    parts: list[list[tuple[int, Measured]]] = [[] for _ in outputs]
    for start, count, pieces in rows.pieces(x, share):
        for i, (out, piece) in enumerate(zip(outputs, pieces, strict=True)):
            part = out[start : start + count]
            assert part.shape == piece.shape, "the baseline has another shape"
            first = start * (part.numel() // count)
            error = measure(part, piece, limits[i], slices=slices[i], offset=first)
            parts[i].append((first, error))
            if moments:
                moments[i].add(piece)
    return [merge(p) for p in parts], moments
