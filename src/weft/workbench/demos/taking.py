"""Times of both ways: by the house's clock, or by events around a few calls; answers come first."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.workbench.demos.demo import SIDES, Demo, Say, Taken

if TYPE_CHECKING:
    import torch

    from weft.workbench.slots import Slot

SEED = 20260101
SECONDS = 3.0  # of sampling, both ways together
AHEAD = 200_000  # clock cycles of spinning, so that a call is queued before its event is due
MOST_AHEAD = 40_000_000


def judge(demo: Demo, slot: Slot) -> Callable[[Any], str | None]:
    """What compares an output with the float64 reference on a slot's contents."""
    assert demo.reference is not None
    wanted = demo.reference(*slot.inputs)

    def look(output: torch.Tensor) -> str | None:
        return differs(output, wanted, demo.tolerance)

    return look


def differs(output: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> str | None:
    """Why an output is not within ``tolerance`` (absolute) of the float64 answer; None if it is."""
    if output.shape != wanted.shape:
        return f"its shape is {tuple(output.shape)}, not {tuple(wanted.shape)}"
    error = (output.double() - wanted).abs().max().item()
    if error <= tolerance:  # false for NaN
        return None
    return f"it is off by {error:.3g}, where {tolerance:.3g} is allowed"


def both(demo: Demo, say: Say, device: str = "cuda") -> Mapping[str, Taken]:
    """The times of both ways; a wrong answer has no time. ``device`` is the clock's."""
    if demo.take is not None:
        return demo.take(say)
    from weft.workbench import clock
    from weft.workbench.plan import Budget, Candidate
    from weft.workbench.slots import Slot

    assert demo.inputs is not None
    make = demo.inputs
    slot = Slot(make(SEED), seed=SEED)
    look = judge(demo, slot)
    for side in SIDES:
        if wrong := look(_bind(demo, side, slot)()):
            return {side: Taken(wrong=f"{demo.way(side).kernel}: {wrong}")}
    del slot, look
    say(f"{demo.name}: both answers are right; timing")
    found = clock.measure(
        [Candidate(name=side, bind=partial(_bind, demo, side)) for side in SIDES],
        lambda seed: Slot(make(seed), seed=seed),
        device=device,
        budget=Budget(seconds=SECONDS, warmup=SECONDS / 6),
        make_judge=partial(judge, demo),
    )
    return {side: _taken(outcome) for side, outcome in found.items()}


def _bind(demo: Demo, side: str, slot: Slot) -> Callable[[], Any]:
    call = demo.way(side).call
    assert call is not None
    return partial(call, *slot.inputs)


def _taken(outcome: Any) -> Taken:
    timing = outcome.timing
    if timing is None:
        return Taken(wrong=outcome.refusal or outcome.trouble)
    return Taken(samples=timing.samples, warm=timing.warm, flags=timing.flags)


def interleaved(
    names: Sequence[str], sample: Callable[[str], float], rounds: int
) -> dict[str, list[float]]:
    """``rounds`` samples of each, in an order drawn anew each round, after one that is dropped."""
    order = random.Random(SEED)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in order.sample(list(names), len(names)):
            us = sample(name)
            if turn:
                found[name].append(us)
    return found


def by_events() -> Callable[[Callable[[], object]], float]:
    """A sampler: microseconds of one call between two events, queued behind a spin, with the
    events' own cost taken off."""
    from weft.workbench.clock_cuda import CudaStand

    stand = CudaStand()

    def sample(call: Callable[[], object]) -> float:
        spin = AHEAD
        while spin <= MOST_AHEAD:
            us = stand.timed(lambda: None, call, spin)
            if us >= 0:  # else the GPU was there before the call was queued
                return max(0.0, us - stand.plain_overhead)
            spin *= 2
        return abs(us)

    return sample
