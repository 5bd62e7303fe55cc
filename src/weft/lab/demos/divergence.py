"""Divergence: a warp whose threads take four branches runs all four, one after another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weft.backends.nvrtc import CudaSource
from weft.lab.demos.arithmetic import WARP, active_lanes
from weft.lab.demos.demo import ARITHMETIC, Counter, Demo, Fact, Variant, elementwise, uniform

if TYPE_CHECKING:
    import torch

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("diverging", "together"))
N, BLOCK, BRANCHES, STEPS = 1 << 22, 256, 4, 512  # BRANCHES and STEPS as in the .cu
LANES = (
    active_lanes([lane % BRANCHES for lane in range(WARP)]),
    active_lanes([lane * BRANCHES % BRANCHES for lane in range(WARP)]),
)
LABEL = "active threads of a warp, on average"
METRIC = "smsp__thread_inst_executed_per_inst_executed.ratio"


def _reference(x: torch.Tensor) -> torch.Tensor:
    """Compute the four branches in float64, each for its quarter of the elements."""
    import torch

    wide = x.double()
    y = torch.empty_like(wide)
    for branch in range(BRANCHES):
        part = wide[branch::BRANCHES]
        v = part.clone()
        for _ in range(STEPS):
            v = (v * v - part, v * 0.5 + part, v * -0.5 + part, v * part + 0.25)[branch]
        y[branch::BRANCHES] = v
    return y


DEMO = Demo(
    name="divergence",
    sentence="the threads of a warp should take the same branch",
    source=SOURCE,
    bad=Variant(
        kernel="diverging",
        how="each warp has elements of all four kinds",
        call=elementwise(SOURCE, "diverging", per_block=BLOCK),
    ),
    good=Variant(
        kernel="together",
        how="each warp has elements of one kind",
        call=elementwise(SOURCE, "together", per_block=BLOCK),
    ),
    expected=3.6,
    because=(
        "Four branches of the same length, one after another, are four times the instructions. Both "
        "kernels have the same loads and stores, so the ratio is a little smaller."
    ),
    at_least=2.0,
    see=(
        "Both kernels have the branch. It is slow only if the threads of one warp disagree, so another "
        "assignment of elements to threads can be enough."
    ),
    facts=lambda arch: [Fact(label=LABEL, bad=LANES[0], good=LANES[1], source=ARITHMETIC)],
    inputs=lambda seed: [uniform(seed, N, high=0.5)],
    reference=_reference,
    tolerance=1e-5,  # a step shrinks an error by a quarter or more, so a few ulps of 1 remain
    counter=Counter(label=LABEL, metrics=(METRIC,), of=lambda v: v[METRIC], predicted=LANES),
)
