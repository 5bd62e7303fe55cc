"""How far an answer stands from its float64 reference, and how far it may.

``|error| <= c * (the baseline's max) + ulps * eps * max(scale, |reference|)`` at each element, and
the same of the RMS error, where the baseline is the eager implementation in the same dtype at the
same case, pooled over the seeds, and the scale is the RMS of the reference: an element far above it
may be off by units in its own last place. NaN and Inf are compared by place and sign, so that no
comparison with a NaN ever decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from weft.core import Tolerance

PIECE = 1 << 25  # elements compared at once: a few float64 temporaries of 256 MiB each
SAMPLE = 512  # elements, by which equal ones are noticed
MOST = 1e9  # a share of the tolerance is shown up to here, so that it stays a number in JSON


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The error of one output: over the elements where both it and the reference are finite.

    ``misplaced`` counts elements whose NaN or Inf stands where the reference, rounded to the
    output's dtype, has none, or the other way round, or with the other sign. ``worst`` and
    ``first_misplaced`` are flat indices; each comes with what was got and what was wanted.
    """

    maximum: float
    rms: float
    worst: tuple[int, float, float] = (0, 0.0, 0.0)
    misplaced: int = 0
    first_misplaced: tuple[int, float, float] = (0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What one output's error may be: ``maximum`` and ``rms``; ``scale`` is the reference's RMS.

    An element whose reference is above ``scale`` may add ``own`` times what it is above by.
    """

    own: float
    maximum: float
    rms: float
    scale: float
    baseline_rms: float

    @property
    def blunt(self) -> bool:
        """Whether an answer of zeros could pass: the reference is no larger than the bound."""
        return self.scale <= self.rms

    def share(self, error: Measured) -> float:
        """The larger of the two errors as a share of what was allowed: above 1.0 is too far."""
        return max(_share(error.maximum, self.maximum), _share(error.rms, self.rms))


def _share(error: float, allowed: float) -> float:
    if error == 0.0:
        return 0.0
    return min(error / allowed, MOST) if allowed > 0.0 and math.isfinite(error) else MOST


def bound(
    tolerance: Tolerance, dtype: torch.dtype, scale: float, baseline: list[Measured], count: float
) -> Bound:
    """The bound for an output whose RMS ``count`` elements make, from the baseline's errors.

    The floor under the maximum is ``ulps`` units in the last place at ``scale``. An RMS averages
    over many elements, so its floor is a quarter of that; over a few it averages little, and over
    one it is the maximum itself, hence the square root. ``count`` is :func:`participants`. What a
    long sum loses is shared by all that is divided by it, and does not average. Integers have no
    error at all: they are met.
    """
    if not dtype.is_floating_point:
        return Bound(own=0.0, maximum=0.0, rms=0.0, scale=scale, baseline_rms=0.0)
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps  # the step between subnormals
    floor = tolerance.ulps * info.eps * scale + least
    accumulator = torch.finfo(torch.promote_types(dtype, torch.float32))
    chain = tolerance.chain * accumulator.eps
    averaged = max(0.25, 1.0 / math.sqrt(max(count, 1.0)))
    worst_max = max((b.maximum for b in baseline), default=0.0)
    worst_rms = max((b.rms for b in baseline), default=0.0)
    return Bound(
        own=tolerance.ulps * info.eps + chain,
        maximum=tolerance.c * worst_max + floor + chain * scale,
        rms=tolerance.c * worst_rms + floor * averaged + chain * scale,
        scale=scale,
        baseline_rms=worst_rms,
    )


def measure(
    output: torch.Tensor,
    reference: torch.Tensor,
    within: Bound | None = None,
    terms: torch.Tensor | None = None,
) -> Measured:
    """The error of ``output`` against the float64 ``reference``, every element counted.

    With a bound the maximum is of what is left of each error once the element's own units in the
    last place, above those at the scale, are taken off; ``terms`` are the sizes that elements had
    before they cancelled, where those are larger. Both have one shape; they are compared
    a piece at a time, so that no temporary is as large as the answer.
    """
    if not output.dtype.is_floating_point:
        return _measure_integers(output, reference)
    info = torch.finfo(output.dtype)
    maximum, squares, compared, misplaced = 0.0, 0.0, 0, 0
    worst = first = (0, 0.0, 0.0)
    for start, got, want64 in _pieces(output, reference):
        want = want64.to(output.dtype).double()
        # At the edge of the range, rounding one way gives Inf and the other the largest number.
        edge = (want64.abs() - info.max).abs() <= 4 * info.eps * info.max
        infinite = (got.isinf() | want.isinf()) & (got != want) & ~edge
        wrong = (got.isnan() != want.isnan()) | (infinite & ~got.isnan() & ~want.isnan())
        both = got.isfinite() & want.isfinite() & want64.isfinite()
        error = torch.where(both, got - want64, 0.0).abs()
        left = error
        if within is not None:
            size = want64.abs()
            if terms is not None:
                size = torch.maximum(size, terms.reshape(-1)[start : start + PIECE])
            own = within.own * (size - within.scale).clamp(min=0.0)
            left = torch.where(both, error - own, 0.0)
        at = int(left.argmax())
        largest = float(left[at])
        if largest > maximum:
            maximum, worst = largest, (start + at, float(got[at]), float(want64[at]))
        squares += float(error.square().sum())
        compared += int(both.sum())
        here = int(wrong.sum())
        if here and not misplaced:
            at = int(wrong.to(torch.uint8).argmax())
            first = (start + at, float(got[at]), float(want[at]))
        misplaced += here
    return Measured(
        maximum=maximum,
        rms=math.sqrt(squares / max(compared, 1)),
        worst=worst,
        misplaced=misplaced,
        first_misplaced=first,
    )


def _measure_integers(output: torch.Tensor, reference: torch.Tensor) -> Measured:
    """How far integers are off: compared as they are, since not all of them are float64 numbers."""
    got, want = output.detach().reshape(-1), reference.reshape(-1)
    off = torch.where(got == want, 0.0, (got.double() - want.double()).abs().clamp(min=1.0))
    if not off.numel():
        return Measured(maximum=0.0, rms=0.0)
    at = int(off.argmax())
    return Measured(
        maximum=float(off[at]),
        rms=math.sqrt(float(off.square().mean())),
        worst=(at, float(got[at]), float(want[at])),
    )


def _pieces(
    output: torch.Tensor, reference: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    flat, want = output.detach().reshape(-1), reference.reshape(-1)
    for start in range(0, flat.numel(), PIECE):
        yield start, flat[start : start + PIECE].double(), want[start : start + PIECE]


def rms(reference: torch.Tensor) -> float:
    """The root mean square of a float64 tensor's finite elements; 0 where there is none."""
    squares, count = 0.0, 0
    flat = reference.reshape(-1)
    for start in range(0, flat.numel(), PIECE):
        piece = flat[start : start + PIECE].double()
        finite = piece.isfinite()
        squares += float(torch.where(finite, piece, 0.0).square().sum())
        count += int(finite.sum())
    return math.sqrt(squares / max(count, 1))


def participants(reference: torch.Tensor) -> float:
    """How many elements make the RMS of a float64 tensor: (sum a^2)^2 / sum a^4, finite ones only.

    All of them where they are alike, a third for normal values, one where one towers over the rest.
    Equal elements have one error between them: they count as often as they differ, by a sample.
    """
    squares, fourths = 0.0, 0.0
    flat = reference.reshape(-1)
    peak = 0.0
    for start in range(0, flat.numel(), PIECE):
        piece = flat[start : start + PIECE].double()
        peak = max(peak, float(torch.where(piece.isfinite(), piece, 0.0).abs().max()))
    if peak == 0.0:
        return float(max(flat.numel(), 1))
    for start in range(0, flat.numel(), PIECE):
        piece = flat[start : start + PIECE].double()
        square = torch.where(piece.isfinite(), piece / peak, 0.0).square()
        squares += float(square.sum())
        fourths += float(square.square().sum())
    sample = flat[:: max(1, flat.numel() // SAMPLE)]
    distinct = sample.unique().numel()
    found = squares * squares / fourths
    return found if 2 * distinct > sample.numel() else min(found, float(distinct))
