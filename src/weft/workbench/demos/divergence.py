"""Divergence: a warp whose threads go four ways walks all four, one after another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weft.backends.nvrtc import CudaSource
from weft.workbench.demos.arithmetic import WARP, lanes_together
from weft.workbench.demos.demo import ARITHMETIC, Counter, Demo, Fact, Way, elementwise, uniform

if TYPE_CHECKING:
    import torch

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("diverging", "together"))
N, BLOCK, WAYS, STEPS = 1 << 22, 256, 4, 512  # WAYS and STEPS as in the .cu
LANES = (
    lanes_together([lane % WAYS for lane in range(WARP)]),
    lanes_together([lane * WAYS % WAYS for lane in range(WARP)]),
)
LABEL = "threads of a warp that take part in an instruction"
METRIC = "smsp__thread_inst_executed_per_inst_executed.ratio"


def _reference(x: torch.Tensor) -> torch.Tensor:
    """The four ways in float64, each on its quarter of the elements."""
    import torch

    wide = x.double()
    y = torch.empty_like(wide)
    for way in range(WAYS):
        part = wide[way::WAYS]
        v = part.clone()
        for _ in range(STEPS):
            v = (v * v - part, v * 0.5 + part, v * -0.5 + part, v * part + 0.25)[way]
        y[way::WAYS] = v
    return y


DEMO = Demo(
    name="divergence",
    sentence="threads of one warp should go the same way at a branch",
    source=SOURCE,
    bad=Way(
        kernel="diverging",
        how="each warp has elements of all four kinds",
        call=elementwise(SOURCE, "diverging", per_block=BLOCK),
    ),
    good=Way(
        kernel="together",
        how="each warp has elements of one kind",
        call=elementwise(SOURCE, "together", per_block=BLOCK),
    ),
    expected=3.6,
    because=(
        "Four ways of the same length one after another are four times the instructions; what both "
        "pay alike, the loads and stores, makes it a little less."
    ),
    at_least=2.0,
    see=(
        "The branch is in both kernels. What counts is whether the threads of one warp disagree at "
        "it, so it can be enough to deal the elements out in another order."
    ),
    facts=lambda arch: [Fact(label=LABEL, bad=LANES[0], good=LANES[1], source=ARITHMETIC)],
    inputs=lambda seed: [uniform(seed, N, high=0.5)],
    reference=_reference,
    tolerance=1e-5,  # every step shrinks an error by a quarter or more: a few ulps of 1 remain
    counter=Counter(label=LABEL, metrics=(METRIC,), of=lambda v: v[METRIC], predicted=LANES),
)
