"""Tolerance: the error of an output against its float64 reference, and the bound on it.

At each element ``|error| <= c * (the baseline's max) + ulps * eps * max(scale, |reference|)``, and the
same for the RMS error. The baseline is the eager implementation in the same dtype at the same case,
pooled over the seeds. The scale is the RMS of the reference: an element far above it may be off by
units in its own last place. NaN and Inf are compared by position and sign, so that no comparison with
a NaN decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from weft.core import Case, Tolerance

if TYPE_CHECKING:
    from weft.workbench.check.slices import SliceLayout

# Elements compared at once: the float64 temporaries are ten times as large on a GPU, where small pieces
# would leave it idle, and fit into a cache on a CPU.
PIECES = {"cpu": 1 << 20, "cuda": 1 << 24}
SAMPLE = 512  # elements whose distinct values are counted, to notice answers of equal elements
FLUSHED = 1e-30  # smallest normal number below which kernels may flush subnormal ones to zero
MAX_SHARE = 1e9  # largest reported share of the tolerance: infinity is no number in JSON


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Error of one output over the elements where both it and the reference are finite.

    ``misplaced`` counts elements whose NaN or Inf stands where the reference, rounded to the
    output's dtype, has none, or the other way round, or with the other sign. ``worst`` and
    ``first_misplaced`` are (flat index, value of the output, value of the reference). ``compared``
    counts the elements that the RMS is over. ``squares`` are the sums of the squared errors by slice,
    where a layout was given.
    """

    maximum: float
    rms: float
    worst: tuple[int, float, float] = (0, 0.0, 0.0)
    misplaced: int = 0
    first_misplaced: tuple[int, float, float] = (0, 0.0, 0.0)
    compared: int = 0
    squares: torch.Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Bound on one output's error: ``maximum`` and ``rms``; ``scale`` is the reference's RMS.

    An element whose reference exceeds ``scale`` may be off by ``own`` times the excess in addition.
    ``least`` is what a flush of subnormal numbers to zero may lose; ``c`` is the tolerance's factor of the
    baseline's error.
    """

    own: float
    maximum: float
    rms: float
    scale: float
    baseline_rms: float
    least: float = 0.0
    c: float = 2.0

    @property
    def passes_zeros(self) -> bool:
        """True if an output of zeros could pass: the reference is no larger than the bound."""
        return self.scale <= self.rms

    def share(self, error: Measured) -> float:
        """Return the larger of the two errors as a share of its bound; above 1.0 is a failure."""
        return max(_share(error.maximum, self.maximum), _share(error.rms, self.rms))


def _share(error: float, allowed: float) -> float:
    if error == 0.0:
        return 0.0
    return min(error / allowed, MAX_SHARE) if allowed > 0.0 and math.isfinite(error) else MAX_SHARE


def bound(
    tolerance: Tolerance,
    dtype: torch.dtype,
    scale: float,
    baseline: list[Measured],
    count: float,
    case: Case | None = None,
) -> Bound:
    """Return the bound for an output whose RMS ``count`` elements make, from the baseline's errors.

    The least bound on the maximum is ``ulps`` units in the last place at ``scale``. An RMS averages over
    many elements, so its least bound is a quarter of that. Over few elements it averages little, and
    over one it is the maximum itself, hence the square root. ``count`` is :func:`participants`. The
    rounding of a long sum is shared by all elements divided by it, so it does not average. Integers
    must be exact.
    """
    if not dtype.is_floating_point:
        return Bound(own=0.0, maximum=0.0, rms=0.0, scale=scale, baseline_rms=0.0)
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps  # the step between subnormals
    floor = tolerance.ulps * info.eps * scale + least
    # Sums are accumulated in float32 at least, so a chain of roundings has float32's unit.
    accumulator = torch.finfo(torch.promote_types(dtype, torch.float32))
    chain = (tolerance.chain if case is None else tolerance.chain_at(case)) * accumulator.eps
    averaged = max(0.25, 1.0 / math.sqrt(max(count, 1.0)))
    worst_max = max((b.maximum for b in baseline), default=0.0)
    worst_rms = max((b.rms for b in baseline), default=0.0)
    return Bound(
        own=tolerance.ulps * info.eps + chain,
        maximum=tolerance.c * worst_max + floor + chain * scale,
        rms=tolerance.c * worst_rms + floor * averaged + chain * scale,
        scale=scale,
        baseline_rms=worst_rms,
        # Kernels flush subnormals of float32's range only: a conversion to float16 keeps its own.
        least=info.smallest_normal if info.smallest_normal < FLUSHED else least,
        c=tolerance.c,
    )


def measure(
    output: torch.Tensor,
    reference: torch.Tensor,
    within: Bound | None = None,
    terms: torch.Tensor | None = None,
    slices: SliceLayout | None = None,
    offset: int = 0,
) -> Measured:
    """Measure the error of ``output`` against the float64 ``reference`` of the same shape.

    With a bound, the maximum is over each error less the element's own allowance: the units in the
    last place by which it exceeds the scale. ``terms`` are the sizes of an element's terms before
    they cancelled, used where they are larger. With ``slices``, errors are summed by slice too;
    ``offset`` is the flat index of the first element where both are some rows of the whole. Pieces are
    compared one at a time, so that no temporary is as large as the output.
    """
    if not output.dtype.is_floating_point:
        return _measure_integers(output, reference)
    info = torch.finfo(output.dtype)
    maximum, squares, compared, misplaced = 0.0, 0.0, 0, 0
    worst = first = (0, 0.0, 0.0)
    for start, got, want64 in _pieces(output, reference):
        if terms is None and (quick := _measure_finite(got, want64, info.max, within)) is not None:
            at, largest, sum_of_squares, value, expected = quick
            if largest > maximum:
                maximum, worst = largest, (start + at, value, expected)
            squares += sum_of_squares
            compared += got.numel()
            continue
        # Rounded to the output's dtype: a reference above its range is Inf there, and Inf is then right.
        want = want64.to(output.dtype).double()
        # At the edge of the range rounding may give Inf or the largest finite number: both are right.
        edge = (want64.abs() - info.max).abs() <= 4 * info.eps * info.max
        infinite = (got.isinf() | want.isinf()) & (got != want) & ~edge
        wrong = (got.isnan() != want.isnan()) | (infinite & ~got.isnan() & ~want.isnan())
        both = got.isfinite() & want.isfinite() & want64.isfinite()
        error = torch.where(both, got - want64, 0.0).abs()
        left = error
        if within is not None:
            size = want64.abs()
            if terms is not None:
                size = torch.maximum(size, terms.reshape(-1)[start : start + size.numel()])
            # The bound is set at the RMS scale. An element far above the RMS has a larger unit in its last
            # place, so the excess gets an allowance of its own.
            own = within.own * (size - within.scale).clamp(min=0.0)
            left = torch.where(both, error - own, 0.0)
        largest_left, where = left.max(0)
        totals = (error.square().sum(), both.count_nonzero(), wrong.count_nonzero())
        largest, index, value, expected, sum_of_squares, finite_count, wrong_count = numbers(
            largest_left, where, *at_index(where, got, want64), *totals
        )
        if largest > maximum:
            maximum, worst = largest, (start + int(index), value, expected)
        squares += sum_of_squares
        compared += int(finite_count)
        if wrong_count and not misplaced:
            where = wrong.to(torch.uint8).argmax()
            index, value, expected = numbers(where, *at_index(where, got, want))
            first = (start + int(index), value, expected)
        misplaced += int(wrong_count)
    return Measured(
        maximum=maximum,
        rms=math.sqrt(squares / max(compared, 1)),
        worst=worst,
        misplaced=misplaced,
        first_misplaced=first,
        compared=compared,
        squares=slices.error_sums(output, reference, offset) if slices is not None else None,
    )


def numbers(*scalars: torch.Tensor) -> list[float]:
    """Return tensors of one element as numbers, exact up to 2^53, in one transfer from their device.

    Each transfer waits until the device has done all that was asked of it.
    """
    return torch.stack([s.reshape(()).double() for s in scalars]).tolist()


def at_index(where: torch.Tensor, *vectors: torch.Tensor) -> list[torch.Tensor]:
    """Return each vector's element at an index that is on their device, and stays there."""
    return [vector.index_select(0, where.reshape(1)) for vector in vectors]


def _measure_finite(
    got: torch.Tensor, want: torch.Tensor, largest_finite: float, within: Bound | None
) -> tuple[int, float, float, float, float] | None:
    """Measure a piece without special values; None for one with them.

    The result is the index of the largest error, that error, the sum of squared errors, and output and
    reference at the index. Special are NaN, Inf, and a reference near or above the largest finite number of
    the dtype.
    """
    error = (got - want).abs_()
    squares = torch.dot(error, error)
    size = want.abs()
    longest = size.max()
    if within is not None:
        error -= size.sub_(within.scale).clamp_(min=0.0).mul_(within.own)
    largest, where = error.max(0)
    maximum, at, value, expected, total, peak = numbers(
        largest, where, *at_index(where, got, want), squares, longest
    )
    # Any NaN or Inf, on either side, is in the sum and in the peak.
    if not (math.isfinite(total) and peak < 0.99 * largest_finite):
        return None
    return int(at), maximum, total, value, expected


def _measure_integers(output: torch.Tensor, reference: torch.Tensor) -> Measured:
    """Measure the error of integers, compared as integers: float64 cannot hold all of them."""
    got, want = output.detach().reshape(-1), reference.reshape(-1)
    off = torch.where(got == want, 0.0, (got.double() - want.double()).abs().clamp(min=1.0))
    if not off.numel():
        return Measured(maximum=0.0, rms=0.0)
    largest, where = off.max(0)
    maximum, at, value, expected, square = numbers(
        largest, where, *at_index(where, got, want), off.square().mean()
    )
    return Measured(
        maximum=maximum, rms=math.sqrt(square), worst=(int(at), value, expected), compared=off.numel()
    )


def _pieces(
    output: torch.Tensor, reference: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    flat, want = output.detach().reshape(-1), reference.reshape(-1)
    size = piece_elements(flat)
    for start in range(0, flat.numel(), size):
        yield start, flat[start : start + size].double(), want[start : start + size]


def _float64_pieces(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    if flat.numel():
        yield from (piece.double() for piece in flat.split(piece_elements(flat)))


def piece_elements(tensor: torch.Tensor) -> int:
    """Return how many elements of a tensor are compared at once."""
    return PIECES.get(tensor.device.type, PIECES["cuda"])


def rms(reference: torch.Tensor) -> float:
    """Return the root mean square of a float64 tensor's finite elements; 0 without any."""
    sums = []
    for piece in _float64_pieces(reference.reshape(-1)):
        finite = piece.isfinite()
        sums += [torch.where(finite, piece, 0.0).square().sum(), finite.count_nonzero()]
    each = numbers(*sums) if sums else []
    return math.sqrt(sum(each[::2]) / max(sum(each[1::2]), 1))


def participants(reference: torch.Tensor) -> float:
    """Return how many elements make the RMS of a float64 tensor: (sum a^2)^2 / sum a^4, finite ones only.

    The result is the number of elements where they are alike, a third of it for normal values, and 1
    where one element dominates. Equal elements share one error: they count as often as they differ,
    by a sample.
    """
    flat = reference.reshape(-1)
    if not flat.numel():
        return 1.0
    peaks = [torch.where(p.isfinite(), p, 0.0).abs().max() for p in _float64_pieces(flat)]
    peak = torch.stack(peaks).max()
    sums = [peak]
    for piece in _float64_pieces(flat):
        # Divided by the peak: the fourth power of a large fp64 value would overflow.
        square = torch.where(piece.isfinite(), piece / peak, 0.0).square()
        sums += [square.sum(), square.square().sum()]
    largest, *each = numbers(*sums)
    if largest == 0.0:
        return float(flat.numel())
    squares, fourths = sum(each[::2]), sum(each[1::2])
    sample = flat[:: max(1, flat.numel() // SAMPLE)]
    distinct = sample.unique().numel()
    count = squares * squares / fourths
    return count if 2 * distinct > sample.numel() else min(count, float(distinct))
