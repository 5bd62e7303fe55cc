"""Wave quantization: blocks run in waves of as many as fit, and a wave of one costs a whole one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from weft.backends.nvrtc import CudaSource
from weft.workbench.demos.arithmetic import waves
from weft.workbench.demos.demo import ARITHMETIC, Demo, Fact, Say, Sweep, Way, uniform

if TYPE_CHECKING:
    import torch

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("shares",))
BLOCK, EACH, STEPS = 256, 4096, 256  # STEPS as in the .cu; EACH: elements of a block in a full wave
WAVES, ROUNDS = 4, 9


def _facts(arch: str) -> Sequence[Fact]:
    from weft.machine.capability import multiprocessor

    units = multiprocessor(int(re.sub(r"\D", "", arch))).usual_units
    busy = [100 * b / (waves(b, units) * units) for b in (units + 1, units)]
    return [
        Fact(
            label=f"waves of {units + 1} and of {units} blocks on {units} SMs",
            bad=waves(units + 1, units),
            good=waves(units, units),
            source=ARITHMETIC,
        ),
        Fact(label="SMs at work, on average (%)", bad=busy[0], good=busy[1], source=ARITHMETIC),
    ]


def _launch(x: torch.Tensor, y: torch.Tensor, blocks: int, chunk: int) -> None:
    from weft.workbench.demos.evidence import shared_of_a_block

    SOURCE["shares"](blocks, BLOCK, x, y, x.numel(), chunk, shared=shared_of_a_block())


def _call(more: int) -> Callable[..., torch.Tensor]:
    """n elements dealt to as many blocks as there are SMs, and ``more``."""

    def call(x: torch.Tensor) -> torch.Tensor:
        import torch

        from weft.workbench.demos.evidence import sms

        y = torch.empty_like(x)
        blocks = sms() + more
        _launch(x, y, blocks, -(-x.numel() // blocks))
        return y

    return call


def _inputs(seed: int) -> list[torch.Tensor]:
    from weft.workbench.demos.evidence import sms

    return [uniform(seed, sms() * EACH, high=0.5)]


def _reference(x: torch.Tensor) -> torch.Tensor:
    """The same steps in float64."""
    v = wide = x.double()
    for _ in range(STEPS):
        v = v * v - wide
    return v


def counts(units: int) -> list[int]:
    """Numbers of blocks from 1 to four waves and one: eighths of a wave, and both sides of its
    edges.

    >>> counts(8)[:10], counts(8)[-3:]
    ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [31, 32, 33])
    """
    edges = (w * units + off for w in range(1, WAVES + 1) for off in (-1, 0, 1))
    eighths = (round(units * k / 8) for k in range(1, 8 * WAVES + 1))
    return sorted({1, *edges, *eighths})


def _sweep(say: Say) -> Sweep:
    """The rate of 1 to 4 waves of blocks that all have the same to do, their data in the L2."""
    import torch

    from weft.workbench.demos.evidence import sms
    from weft.workbench.demos.taking import SEED, by_events, interleaved

    units = sms()
    blocks = counts(units)
    say(f"wave-quantization: {len(blocks)} numbers of blocks from 1 to {blocks[-1]}")
    x = uniform(SEED, blocks[-1] * EACH, high=0.5)
    y = torch.empty_like(x)
    sample = by_events()
    found = interleaved(
        [str(b) for b in blocks],
        lambda name: sample(lambda: _launch(x, y, int(name), EACH)),
        ROUNDS,
    )
    return sawtooth(units, {b: median(found[str(b)]) for b in blocks})


def sawtooth(units: int, us: Mapping[int, float]) -> Sweep:
    """The rate of each number of blocks as a share of the best, from their times."""
    best = max(b / t for b, t in us.items())
    return Sweep(
        title="What a number of blocks reaches of the GPU, one block to an SM",
        x="blocks, each with the same work",
        y="blocks per time, share of the best (%)",
        says=(
            f"It rises while a wave fills and falls after every multiple of the {units} SMs: the "
            "first block of a new wave takes as long as the whole wave. The more waves, the less "
            "it matters."
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
    bad=Way(kernel="shares", how="dealt to as many blocks as SMs, and one more", call=_call(1)),
    good=Way(kernel="shares", how="dealt to as many blocks as there are SMs", call=_call(0)),
    expected=2.0,
    because=(
        "The work is the same, in shares that are smaller by less than 1 %. But the one block that "
        "is left over begins when the others have ended, and takes as long as they did: twice."
    ),
    at_least=1.6,
    see=(
        "Time over blocks is a staircase whose steps are as wide as the number of SMs, and what is "
        "reached of the GPU a sawtooth (--picture). Here the time itself is the counter."
    ),
    facts=_facts,
    inputs=_inputs,
    reference=_reference,
    tolerance=1e-5,  # a step shrinks an error by a quarter, so that a few ulps of 1 remain
    sweep=_sweep,
)
