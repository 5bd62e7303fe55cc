"""Wave quantization: blocks run in waves, and a wave with one block takes as long as a full one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from weft.backends.nvrtc import CudaSource
from weft.core.log import Log
from weft.lab.demos.arithmetic import waves
from weft.lab.demos.demo import ARITHMETIC, Demo, Fact, Sweep, Variant, uniform

if TYPE_CHECKING:
    import torch

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("shares",))
BLOCK, BLOCK_ELEMENTS, STEPS = 256, 4096, 256  # STEPS as in the .cu
WAVES, ROUNDS = 4, 9


def _facts(arch: str) -> Sequence[Fact]:
    from weft.machine.capability import sm_limits

    units = sm_limits(int(re.sub(r"\D", "", arch))).usual_num_sms
    busy = [100 * b / (waves(b, units) * units) for b in (units + 1, units)]
    return [
        Fact(
            label=f"waves of {units + 1} and of {units} blocks on {units} SMs",
            bad=waves(units + 1, units),
            good=waves(units, units),
            source=ARITHMETIC,
        ),
        Fact(label="busy SMs, on average (%)", bad=busy[0], good=busy[1], source=ARITHMETIC),
    ]


def _launch(x: torch.Tensor, y: torch.Tensor, blocks: int, chunk: int) -> None:
    from weft.lab.demos.evidence import max_shared_per_block

    SOURCE["shares"](blocks, BLOCK, x, y, x.numel(), chunk, shared=max_shared_per_block())


def _call(extra_blocks: int) -> Callable[..., torch.Tensor]:
    """Return a call that divides the elements among one block for each SM, plus ``extra_blocks``."""

    def call(x: torch.Tensor) -> torch.Tensor:
        import torch

        from weft.lab.demos.evidence import num_sms

        y = torch.empty_like(x)
        blocks = num_sms() + extra_blocks
        _launch(x, y, blocks, -(-x.numel() // blocks))
        return y

    return call


def _inputs(seed: int) -> list[torch.Tensor]:
    from weft.lab.demos.evidence import num_sms

    return [uniform(seed, num_sms() * BLOCK_ELEMENTS, high=0.5)]


def _reference(x: torch.Tensor) -> torch.Tensor:
    """Compute the same steps in float64."""
    v = wide = x.double()
    for _ in range(STEPS):
        v = v * v - wide
    return v


def counts(units: int) -> list[int]:
    """Return numbers of blocks from 1 to four waves plus one: eighths of a wave, and both sides of its
    edges.

    >>> counts(8)[:10], counts(8)[-3:]
    ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [31, 32, 33])
    """
    edges = (w * units + off for w in range(1, WAVES + 1) for off in (-1, 0, 1))
    eighths = (round(units * k / 8) for k in range(1, 8 * WAVES + 1))
    return sorted({1, *edges, *eighths})


def _sweep(log: Log) -> Sweep:
    """Measure the rate of 1 to 4 waves of blocks with equal work, their data in the L2."""
    import torch

    from weft.lab.demos.evidence import num_sms
    from weft.lab.demos.run import SEED, event_timer, interleaved

    units = num_sms()
    blocks = counts(units)
    log(f"wave-quantization: {len(blocks)} numbers of blocks from 1 to {blocks[-1]}")
    x = uniform(SEED, blocks[-1] * BLOCK_ELEMENTS, high=0.5)
    y = torch.empty_like(x)
    timer = event_timer()
    samples = interleaved(
        [str(b) for b in blocks],
        lambda name: timer(lambda: _launch(x, y, int(name), BLOCK_ELEMENTS)),
        ROUNDS,
    )
    return sawtooth(units, {b: median(samples[str(b)]) for b in blocks})


def sawtooth(units: int, us: Mapping[int, float]) -> Sweep:
    """Return the rate of each number of blocks as a share of the best, from their times."""
    best = max(b / t for b, t in us.items())
    return Sweep(
        title="Throughput over the number of blocks, one block to an SM",
        x="blocks, each with the same work",
        y="blocks per time, share of the best (%)",
        says=(
            f"The rate rises while a wave fills and falls after every multiple of the {units} SMs: the "
            "first block of a new wave takes as long as the whole wave. The more waves, the smaller "
            "the effect."
        ),
        xs=tuple(map(float, us)),
        ys=tuple(100 * b / t / best for b, t in us.items()),
        predicted=tuple(100 * b / (waves(b, units) * units) for b in us),
        us=tuple(us.values()),
        marks=tuple((float(w * units), f"{w} x {units} blocks") for w in range(1, WAVES + 1)),
    )


DEMO = Demo(
    name="wave-quantization",
    sentence="the number of blocks should fill whole waves of the SMs",
    source=SOURCE,
    bad=Variant(kernel="shares", how="one block for each SM, and one more", call=_call(1)),
    good=Variant(kernel="shares", how="one block for each SM", call=_call(0)),
    expected=2.0,
    because=(
        "The work is the same, in blocks that are smaller by less than 1 %. But the extra block starts "
        "when the others have ended and takes as long as they did: twice the time."
    ),
    at_least=1.6,
    see=(
        "Time over blocks is a staircase whose steps are as wide as the number of SMs, and throughput "
        "is a sawtooth (--picture). The time itself is the evidence."
    ),
    facts=_facts,
    inputs=_inputs,
    reference=_reference,
    tolerance=1e-5,  # a step shrinks an error by a quarter, so a few ulps of 1 remain
    sweep=_sweep,
)
