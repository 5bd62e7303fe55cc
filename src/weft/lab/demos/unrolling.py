"""Unrolling: a short loop spends most of its instructions on the loop itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.backends.nvrtc import CudaSource
from weft.lab.demos.demo import CODE, Counter, Demo, Fact, Variant, elementwise, uniform

if TYPE_CHECKING:
    import torch

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("rolled", "unrolled"))
N, BLOCK, STEPS, UNROLL = 1 << 21, 256, 1024, 8
METRIC = "smsp__inst_executed.sum"
WARPS = N // 32
TRIPS = (4.0, (UNROLL + 3) / UNROLL)  # instructions a step: the step itself, and count, compare, branch


def _facts(arch: str) -> Sequence[Fact]:
    from weft.lab.demos.evidence import instructions_per_step

    steps = [instructions_per_step(SOURCE, arch, kernel, "FFMA") for kernel in ("rolled", "unrolled")]
    return [Fact(label="instructions in the loop for each step", bad=steps[0], good=steps[1], source=CODE)]


def _reference(x: torch.Tensor) -> torch.Tensor:
    """Compute the same steps in float64."""
    v = wide = x.double()
    for _ in range(STEPS):
        v = v * v - wide
    return v


DEMO = Demo(
    name="unrolling",
    sentence="a short loop should be unrolled, so that the loop itself costs little",
    source=SOURCE,
    bad=Variant(
        kernel="rolled",
        how="#pragma unroll 1",
        call=elementwise(SOURCE, "rolled", per_block=BLOCK, scalars=(STEPS,)),
    ),
    good=Variant(
        kernel="unrolled",
        how="#pragma unroll 8",
        call=elementwise(SOURCE, "unrolled", per_block=BLOCK, scalars=(STEPS,)),
    ),
    expected=2.9,
    because=(
        "A scheduler issues one instruction a cycle. Rolled, a step takes four: itself, count, compare "
        "and branch. Unrolled by eight, eight steps take eleven: 4 / 1.375 is 2.9."
    ),
    at_least=1.5,
    see=(
        "The number of instructions falls as much as the time, though the arithmetic is the same, bit "
        "for bit. (The compiler unrolls such a loop by itself unless a pragma forbids it.)"
    ),
    facts=_facts,
    inputs=lambda seed: [uniform(seed, N, high=0.5)],
    reference=_reference,
    tolerance=1e-5,  # a step shrinks an error by a quarter, so a few ulps of 1 remain
    counter=Counter(
        label="warp instructions executed",
        metrics=(METRIC,),
        of=lambda v: v[METRIC],
        predicted=(WARPS * STEPS * TRIPS[0], WARPS * STEPS * TRIPS[1]),
    ),
)
