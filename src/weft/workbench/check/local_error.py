"""Rule ``local``: the error of each slice of an output, judged at the slice's own scale.

The rules ``error`` and ``drift`` have one scale, the RMS of the whole output. A row a million times
smaller than the others is below their notice, and zeros there would pass. Here each slice
(:mod:`~weft.workbench.check.slices`) has a bound of its own:

    RMS(error) <= FACTOR * (baseline_rms + (ulps * eps + chain * eps_acc) * scale)

with the baseline's error and the reference's RMS in that slice. Where an error comes near it, the bound
is taken again with twice the factor, the baseline's largest error at any seed, and the noise of the
computation, which honest code may show where numbers cancel: the change of the answer when each input
changes by one ``eps`` of itself, and the error of the reference's formula in float32. Only an error of
several elements counts: a single one is what the rule ``error`` judges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from weft.workbench.check.slices import MIN_ELEMENTS, SliceLayout
from weft.workbench.check.tolerance import Bound, Measured, numbers

FACTOR, USUAL_C = 8.0, 2.0
# With the noise of the computation. An error that all elements of a row share (of its logarithm of a sum) is
# one number, which the baseline and the noise may have by luck: 8 gave a share of 71 % once.
FACTOR_OF_NOISE = 16.0
NEAR = 0.5  # share of a limit from the baseline alone above which the noise is looked at
# An error that fewer elements make is a matter of single elements: a rounding that falls to the other side.
MIN_PARTICIPANTS, PARTICIPANTS_SHARE = 4.0, 1 / 64
# Without the noise of the computation only an error is refused that is as large as the slice itself, as
# zeros in its place are.
GROSS = 0.5
NOISY = 1 / 16  # error of the baseline in a slice, as a share of its RMS, above which the slice is noise


@dataclass(frozen=True, eq=False)
class SliceBound:
    """Bound on the error in each slice of one output, in the order of its layout.

    ``counts`` are the finite elements, ``sizes`` the RMS of the reference, ``baseline`` the RMS of the
    baseline's error and ``limits`` the largest RMS error that is allowed.
    """

    layout: SliceLayout
    counts: torch.Tensor
    sizes: torch.Tensor
    baseline: torch.Tensor
    limits: torch.Tensor

    @property
    def judged(self) -> torch.Tensor:
        """Mask of the slices that are judged: not of few elements, and not exactly 0."""
        return (self.counts >= MIN_ELEMENTS) & (self.sizes > 0)

    def rms(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the RMS of each slice from its sum of squares."""
        return (squares / self.counts.clamp(min=1)).sqrt()

    def shares(self, squares: torch.Tensor) -> torch.Tensor:
        """Return each slice's error as a share of its limit; 0 where the slice is not judged."""
        return torch.where(self.judged, self.rms(squares) / self.limits, 0.0)

    def noise_floors(self) -> torch.Tensor:
        """Return the largest error of the baseline in a slice that is noise, for all slices of its part."""
        noise = torch.where(self.judged & (self.baseline >= NOISY * self.sizes), self.baseline, 0.0)
        return torch.cat([p.max().expand_as(p) if p.numel() else p for p in self.layout.split(noise)])

    def zero_share(self, whole: Bound) -> float:
        """Return an upper estimate of the share of elements that could be zeros without notice.

        Elements that are zeros already do not count. It follows from the magnitudes: of elements of
        like size, so many may be wrong by all of their size as their slice's limit allows.
        """
        *_, counts = self.layout.split(self.counts)
        *_, sizes = self.layout.split(self.sizes)
        *_, limits = self.layout.split(self.limits)
        counts = counts.clone()
        counts[0] = 0.0
        few = torch.maximum(MIN_PARTICIPANTS / counts.clamp(min=1), counts.new_tensor(PARTICIPANTS_SHARE))
        share = (limits / sizes.clamp(min=1e-300)).square().maximum(few).clamp(max=1.0)
        share = torch.where(counts < MIN_ELEMENTS, 1.0, share)
        share = torch.where(sizes <= whole.maximum, share, 0.0)  # a larger one fails the rule `error`
        zeros, total = numbers((share * counts).sum(), counts.sum())
        return zeros / total if total else 0.0


@dataclass(frozen=True, eq=False)
class SliceFigures:
    """Figures of one output at one seed: ``sizes`` are counts and sums of squares of the reference by slice,
    ``squares`` those of the baseline's error; ``floor`` is the least scale of a slice, or of each of them."""

    sizes: torch.Tensor
    squares: torch.Tensor
    floor: float | torch.Tensor


@dataclass(frozen=True, eq=False)
class LocalCall:
    """Outputs of a call at a seed. ``answers()`` returns the reference's; it is called only in need."""

    seed: int
    outputs: Sequence[torch.Tensor]
    answers: Callable[[], Sequence[torch.Tensor]]


@dataclass(eq=False)
class LocalJudge:
    """Bounds by slices at each seed of an oracle, from the baseline's outputs there.

    ``noise(seed)`` returns answers that differ from the right one as those of honest code may, each a
    tensor for each output; None if they cannot be computed. ``figures`` are by seed and output.
    ``elsewhere(index)`` returns limits with noise, as they are at other contents of the same case; where the
    noise here cannot be known, it is asked before an output is refused.
    """

    layouts: Sequence[SliceLayout | None]
    noise: Callable[[int], Sequence[Sequence[torch.Tensor]] | None] | None
    figures: dict[tuple[int, int], SliceFigures] = field(default_factory=dict)
    elsewhere: Callable[[int], torch.Tensor | None] | None = None
    _noisy: dict[tuple[int, int], SliceBound | None] = field(default_factory=dict)

    def without_noise(self, elsewhere: Callable[[int], torch.Tensor | None]) -> LocalJudge:
        """Return the judge apart from its oracle, and so without the noise of the computation there."""
        return LocalJudge(self.layouts, None, dict(self.figures), elsewhere)

    def magnitude_limits(self, call: LocalCall, index: int, whole: Bound) -> torch.Tensor | None:
        """Return the limits with noise of elements of like magnitude; None if the noise cannot be known.

        The result has a limit for each slice of the layout. It is 0 for slices that depend on where an
        element stands, and infinite for magnitudes that hardly occur here.
        """
        bound = self._noisy_bound(call, index, whole) if self.layouts[index] is not None else None
        if bound is None:
            return None
        limits = torch.zeros_like(bound.limits)
        *_, own = bound.layout.split(limits)
        *_, known = bound.layout.split(torch.where(bound.judged, bound.limits, math.inf))
        own.copy_(known)
        return limits

    def bound(self, seed: int, index: int, whole: Bound) -> SliceBound | None:
        """Return the bound from the baseline alone; None for an output that is not judged by slices."""
        layout, figures = self.layouts[index], self.figures.get((seed, index))
        if layout is None or figures is None:
            return None
        counts, size_squares = figures.sizes
        divisor = counts.clamp(min=1)
        baseline = (figures.squares / divisor).sqrt()
        sizes = (size_squares / divisor).sqrt()
        bound = SliceBound(layout, counts, sizes, baseline, sizes)
        return _with_limits(bound, baseline, whole, figures.floor)

    def zero_share(self, wholes: Sequence[Bound]) -> float | None:
        """Return the largest share of an output's elements that could be zeros without notice.

        None if no output is judged by slices.
        """
        shares = [
            bound.zero_share(wholes[index])
            for seed, index in self.figures
            if index < len(wholes)
            and (bound := self._noisy.get((seed, index)) or self.bound(seed, index, wholes[index]))
        ]
        return max(shares, default=None)

    def judge(self, call: LocalCall, index: int, measured: Measured, whole: Bound) -> tuple[float, str]:
        """Return the largest share of a limit that an output uses, and what is wrong, if anything is."""
        bound, squares = self.bound(call.seed, index, whole), measured.squares
        if bound is None or squares is None:
            return 0.0, ""
        share = float(bound.shares(squares).max())
        if share <= NEAR:
            return share, ""
        noisy = self._noisy_bound(call, index, whole)
        if noisy is None:
            # Other slices of the part show how large an error is where all is noise.
            gross = torch.maximum(GROSS * bound.sizes, FACTOR * bound.noise_floors())
            bound = replace(bound, limits=torch.maximum(bound.limits, gross))
            # A sum that cancels leaves an error as large as its terms', in elements of any small size.
            if float(bound.shares(squares).max()) > 1.0 and self.elsewhere is not None:
                limits = self.elsewhere(index)
                if limits is not None:
                    bound = replace(bound, limits=torch.maximum(bound.limits, limits))
        else:
            bound = noisy
            fourths = bound.layout.error_sums(call.outputs[index], call.answers()[index], power=4)
            participants = squares.square() / fourths.clamp(min=1e-300)
            least = (PARTICIPANTS_SHARE * bound.counts).clamp(min=MIN_PARTICIPANTS)
            squares = torch.where(participants >= least, squares, 0.0)
        shares = bound.shares(squares)
        share, worst = numbers(*shares.max(0))
        return share, "" if share <= 1.0 else _describe(bound, squares, int(worst), share)

    def _noisy_bound(self, call: LocalCall, index: int, whole: Bound) -> SliceBound | None:
        """Return the bound with the noise of the computation; None if that cannot be known."""
        key = call.seed, index
        if key not in self._noisy:
            bound, noise = self.bound(*key, whole), self.noise(call.seed) if self.noise else None
            if bound is not None and noise is not None:
                largest = torch.maximum(bound.baseline, self._baseline_share(index, whole) * bound.sizes)
                for answers in noise:
                    squares = bound.layout.error_sums(answers[index], call.answers()[index])
                    largest = torch.maximum(largest, bound.rms(squares))
                bound = _with_limits(bound, largest, whole, self.figures[key].floor, FACTOR_OF_NOISE)
            self._noisy[key] = bound if noise is not None else None
        return self._noisy[key]

    def _baseline_share(self, index: int, whole: Bound) -> torch.Tensor:
        """Return the baseline's largest error in each slice at any seed, as a share of the slice's RMS.

        At one seed the baseline may be exact by luck: an error that all elements of a row share is one number
        a row, and an output may have two rows. Seeds at which a slice is noise do not count.
        """
        shares = []
        for seed, at in self.figures:
            bound = self.bound(seed, index, whole) if at == index else None
            if bound is not None:
                counts = bound.judged & (bound.baseline < NOISY * bound.sizes)
                shares.append(torch.where(counts, bound.baseline / bound.sizes, 0.0))
        return torch.stack(shares).amax(0)


def _with_limits(
    bound: SliceBound,
    errors: torch.Tensor,
    whole: Bound,
    floor: float | torch.Tensor,
    factor: float = FACTOR,
) -> SliceBound:
    """Return the bound with the limits that follow from these errors of honest code."""
    scale = bound.sizes.clamp(min=floor)
    wider = max(1.0, whole.c / USUAL_C)  # where the operator's own tolerance is
    return replace(bound, limits=factor * (wider * errors + whole.own * scale) + whole.least)


def _describe(bound: SliceBound, squares: torch.Tensor, index: int, share: float) -> str:
    error, size = float(bound.rms(squares)[index]), float(bound.sizes[index])
    return (
        f"RMS error {error:.3g} in {bound.layout.name(index)} is {share:.3g} times what is allowed there "
        f"(the reference's RMS is {size:.3g}, the baseline's error {float(bound.baseline[index]):.3g})"
    )
