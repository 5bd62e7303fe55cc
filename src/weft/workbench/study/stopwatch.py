"""Every point timed side by side, round by round in random order, with the clock's own rigs.

A sample is one call. Before it on a GPU goes the same call untimed, and what is timed is a captured
graph, so that no launch from the host is in it; on a CPU it is the call between two readings of the
wall clock. A call meets the cache as the one before it left it, as in a long training: whether the
weights outgrow the cache is noted, since inside it no memory bounds anything.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from weft import machine
from weft.core import WeftError
from weft.machine.clocks import Sampler
from weft.machine.measure_cpu import all_threads
from weft.machine.measure_gpu import product_precision
from weft.workbench.clock import stand_for
from weft.workbench.plan import Candidate, Plan, Sampled, Stand
from weft.workbench.readings import Readings, summarise_clocks
from weft.workbench.slots import Slot
from weft.workbench.statistics import Summary, summarise
from weft.workbench.study.cost import resident_bytes
from weft.workbench.study.model import Trainer, draw
from weft.workbench.study.sizes import Point, Sizes

Say = Callable[[str], None]
_now = time.perf_counter
MINIMUM, HURRIED = 5, 3  # rounds, whatever the seconds; and where those are few
FEW = 3.0  # seconds
MOST = 200
NOISY = 0.05  # an interval wider than this share of the median is flagged


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A point's samples in us a call, the flags of its rig, and its loss (of a forward: its mean).

    ``cold``: what it goes through again and again is at least twice the last-level cache.
    """

    summary: Summary
    flags: tuple[str, ...]
    loss: float
    cold: bool


@contextmanager
def ready(device: str) -> Iterator[Stand]:
    """The measuring stand, all threads of a CPU, fp32 products in fp32, and a seed of its own."""
    with ExitStack() as stack:
        devices = [0] if device == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=devices))
        torch.manual_seed(0)
        if device == "cuda":
            stack.enter_context(product_precision(torch, "ieee"))
            # The optimizer says so of each step that warms up what is captured.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=".*capturable=True.*")
        else:
            stack.enter_context(all_threads(torch, machine.query("cpu").threads))
        stand = stand_for(device)
        stack.enter_context(stand.context())
        yield stand


class Bench:
    """The models of a study, one a width, and the calls on them."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self.device = device
        self.trainers = {
            w: Trainer(sizes.depth_at(w), w, sizes.dtype, device) for w in sizes.widths
        }

    def call(self, point: Point) -> Callable[[], torch.Tensor]:
        """What is timed at a point: a closure that gives the loss, of a forward its output."""
        shape = point.shape
        trainer = self.trainers[shape.width]
        x, target = draw(shape.batch, shape.width, shape.dtype, self.device)
        if point.phase == "forward":
            return lambda: trainer.forward(x, shape.depth)

        def steps() -> torch.Tensor:
            for _ in range(point.steps):
                loss = trainer.step(x, target, shape.depth)
            return loss

        return steps


def fits(sizes: Sizes, stand: Stand, device: str) -> None:
    """Raise :class:`WeftError` where the study would take more memory than it may: half of a
    computer's, nine tenths of what a GPU has free."""
    wanted, room = sizes.memory(), stand.memory() * (0.9 if device == "cuda" else 2.0)
    if wanted > room:
        raise WeftError(
            "the study's sizes",
            expected=f"at most {room / 1e9:.1f} GB of memory",
            got=f"{wanted / 1e9:.1f} GB",
            hint="smaller --widths, --depths or --batches",
        )


def time_points(
    bench: Bench, points: Sequence[Point], stand: Stand, seconds: float, say: Say
) -> tuple[dict[Point, Timed], dict[str, object]]:
    """Each point's timing, in about ``seconds`` once all are warm, and the clocks meanwhile.

    ``say`` gets a line for each tenth of it, with the time that is left.
    """
    rigs: dict[Point, Sampled] = {}
    calls = {}
    for number, point in enumerate(points):
        if number % 10 == 0:
            say(f"made ready: {number} of {len(points)} points")
        calls[point] = bench.call(point)
        rigs[point] = _rig(stand, point.title, calls[point], bench.device)
    samples, clocks = _rounds(rigs, Readings(Sampler(bench.device)), seconds, say)
    for point in points:
        if point.steps == 1 and point.shape == points[0].shape:
            rigs[point].flags.update(rigs[point].cross_check())
    found = {}
    for point, rig in rigs.items():
        summary = summarise(samples[point])
        noisy = {"noisy"} if summary.width > NOISY else set()
        found[point] = Timed(
            summary=summary,
            flags=tuple(sorted(rig.flags | noisy)),
            loss=float(calls[point]().float().mean()),
            cold=resident_bytes(point.shape, point.phase) >= 2 * stand.cache,
        )
    return found, clocks


def _rig(stand: Stand, name: str, call: Callable[[], torch.Tensor], device: str) -> Sampled:
    one = Plan(calls=1, flush=False)
    if device == "cuda":
        from weft.workbench.clock_cuda import CudaRig, CudaStand

        assert isinstance(stand, CudaStand)
        return CudaRig(stand, Candidate(name=name, bind=lambda slot: call), [Slot([])], one)
    from weft.workbench.clock_cpu import CpuRig, CpuStand

    assert isinstance(stand, CpuStand)
    return CpuRig(stand, [call], one, subtract=stand.per_call)


def _rounds(
    rigs: Mapping[Point, Sampled], readings: Readings, seconds: float, say: Say
) -> tuple[dict[Point, list[float]], dict[str, object]]:
    """A round unkept, then as many as the seconds hold, and the least at least."""
    order, names = np.random.default_rng(0), list(rigs)
    samples: dict[Point, list[float]] = {p: [] for p in names}
    seen = []
    began, told, least = _now(), -1, MINIMUM if seconds > FEW else HURRIED
    for number in range(MOST + 1):
        for index in order.permutation(len(names)):
            us = rigs[names[index]].sample()
            if number:
                samples[names[index]].append(us)
            seen.append(readings.read())
        if number == 0:
            began = _now()
            say("warm")
            continue
        spent = _now() - began
        left = max(seconds - spent, (least - number) * spent / number)
        if left <= 0:
            break
        if int(10 * spent / seconds) > told:
            told = int(10 * spent / seconds)
            say(f"round {number}: about {left:.0f} s left")
    return samples, summarise_clocks(seen)
