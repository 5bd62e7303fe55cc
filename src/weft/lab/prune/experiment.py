"""Iterative magnitude pruning with rewinding, and the two controls of the lottery ticket hypothesis.

A round prunes a share of the weights that are left, those of the smallest magnitude after training, takes
the other weights back to their values of step k, and trains again. The sparse network at step k is the
*winning ticket* (Frankle and Carbin 2019, arXiv:1803.03635; k = 0). Frankle and others 2020
(arXiv:1912.05671) take k > 0, since large networks have no winning ticket at step 0. Two controls have the
same number of weights in every layer: the same mask with a fresh initialisation (*reinitialised*), and a
random mask with the original values of step k (*random mask*).

Pruning is by layer, the same share in each: the layers' initial weights have different sizes, so that one
threshold for all would compare initialisations, and would prune the widest layer most.

A network of one seed meets the same batches in all three conditions, so that differences are paired. The
experiment runs on one thread: its products are small, and its result depends on no number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from weft import machine
from weft.core import Interrupted, Log, WeftError
from weft.lab.prune import networks
from weft.lab.prune.images import ImageSet
from weft.lab.prune.networks import Masks, Snapshot
from weft.lab.study.fit import student

FORMAT = 1
CONDITIONS = ("winning ticket", "reinitialised", "random mask")
VERDICT_DENSITY = 0.1
NEAREST = (0.08, 0.125)  # densities that count as 10 %
MAX_STEPS, MAX_NETWORKS, MAX_ROUNDS = 1_000_000, 100, 100
CALIBRATION_STEPS = 4
PRIOR_STEPS = 50
LOG_EVERY = 20  # steps between two lines of progress
# Purposes of random numbers: each has a stream of its own, so that a change of one leaves the others.
INITIAL, ORDER, REINITIALISED, RANDOM_MASK = range(4)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of an experiment. Raises :class:`WeftError` for settings that show nothing.

    ``networks`` seeds are trained; a round prunes ``share`` of the weights that are left; training has
    ``steps`` steps and is rewound to step ``rewind``.
    """

    hidden: tuple[int, ...] = (300, 100)
    networks: int = 5
    steps: int = 1000
    rewind: int = 0
    share: float = 0.369  # five rounds leave 10.0 %
    rounds: int = 8
    batch: int = 64
    learning_rate: float = 1.2e-3
    seed: int = 0

    def __post_init__(self) -> None:
        bounds = {
            "networks": (3, MAX_NETWORKS),  # below three seeds an interval says nothing
            "steps": (1, MAX_STEPS),
            "rewind": (0, self.steps - 1),
            "rounds": (1, MAX_ROUNDS),
        }
        for field, (least, most) in bounds.items():
            if not least <= getattr(self, field) <= most:
                expected = f"a whole number from {least} to {most}"
                raise WeftError(f"--{field}", expected=expected, got=getattr(self, field))
        if not 0 < self.share < 1:  # also false for nan
            raise WeftError("--share", expected="a number between 0 and 1", got=self.share)
        if not NEAREST[0] <= self.density(self.verdict_round) <= NEAREST[1]:
            raise WeftError(
                "--share and --rounds",
                expected="a round that leaves about 10 % of the weights",
                got=f"{100 * self.density(self.verdict_round):.3g} % at the nearest",
            )

    def density(self, round_number: int) -> float:
        return (1 - self.share) ** round_number

    @property
    def verdict_round(self) -> int:
        """Return the round whose density is nearest to 10 %."""
        target = VERDICT_DENSITY
        return min(range(self.rounds + 1), key=lambda r: abs(np.log(max(self.density(r), 1e-99) / target)))

    def counts(self, shapes: Sequence[tuple[int, int]], round_number: int) -> list[int]:
        """Return the weights that each layer has after a round; one at least."""
        return [max(1, round(a * b * self.density(round_number))) for a, b in shapes]


QUICK = Plan(hidden=(100, 50), networks=3, steps=150, rounds=5)
TRAIN_IMAGES, TEST_IMAGES = 8000, 5000
QUICK_IMAGES = 2000, 1000


def stream(plan: Plan, purpose: int, round_number: int = 0) -> list[int]:
    """Return a seed for each network, of one purpose in one round."""
    keys = [(plan.seed, purpose, round_number, i) for i in range(plan.networks)]
    states = [np.random.SeedSequence(key).generate_state(1, np.uint64)[0] for key in keys]
    return [int(state) & (2**63 - 1) for state in states]


def batch_order(images: int, plan: Plan) -> torch.Tensor:
    """Return the indices of each step's images, (steps, networks, batch): a new shuffle in each epoch."""
    batch = min(plan.batch, images)
    full = images // batch * batch
    orders = []
    for seed in stream(plan, ORDER):
        generator = torch.Generator().manual_seed(seed)
        epochs = -(-plan.steps * batch // full)
        shuffles = [torch.randperm(images, generator=generator)[:full] for _ in range(epochs)]
        orders.append(torch.cat(shuffles)[: plan.steps * batch].view(plan.steps, batch))
    return torch.stack(orders, 1)


class Experiment:
    """Networks of a plan on a set of images, and the training of each round."""

    def __init__(self, images: ImageSet, plan: Plan) -> None:
        self.plan = plan
        self.train_x, self.train_y = torch.from_numpy(images.train_x), torch.from_numpy(images.train_y)
        self.test_x, self.test_y = torch.from_numpy(images.test_x), torch.from_numpy(images.test_y)
        self.sizes = (images.features, *plan.hidden, images.classes)
        self.shapes = list(pairwise(self.sizes))
        self._order = batch_order(len(images.train_x), plan)
        self.initial = networks.initial(self.sizes, stream(plan, INITIAL))
        self.full_masks: Masks = tuple(torch.ones_like(w, dtype=torch.bool) for w in self.initial.weights)

    def train(
        self, snapshot: Snapshot, masks: Masks, until: int, on_step: Callable[[int], None] = lambda step: None
    ) -> Snapshot:
        """Train a stack of one or several conditions, each with the networks of all seeds."""
        conditions = snapshot.networks // self.plan.networks

        def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
            index = self._order[step].repeat(conditions, 1)
            return self.train_x[index], self.train_y[index]

        rate = self.plan.learning_rate
        return networks.train(snapshot, masks, batches, until=until, learning_rate=rate, on_step=on_step)

    def conditions(self, rewound: Snapshot, masks: Masks, round_number: int) -> tuple[Snapshot, Masks]:
        """Return the networks of all conditions at the step of rewinding, with their masks.

        The reinitialised networks train up to that step under their mask, so that they get as many steps.
        """
        reinitialised = networks.initial(self.sizes, stream(self.plan, REINITIALISED, round_number))
        reinitialised = self.train(reinitialised, masks, self.plan.rewind)
        shuffled = networks.random_masks(masks, stream(self.plan, RANDOM_MASK, round_number))
        all_masks = networks.joined_masks([masks, masks, shuffled])
        return networks.masked(networks.joined([rewound, reinitialised, rewound]), all_masks), all_masks

    def accuracies(self, trained: Snapshot) -> dict[str, list[float]]:
        """Return the test accuracies of each condition that the stack has."""
        values, count = networks.accuracy(trained, self.test_x, self.test_y), self.plan.networks
        conditions = CONDITIONS[: len(values) // count]
        return {name: values[i * count : (i + 1) * count] for i, name in enumerate(conditions)}

    def step_seconds(self) -> float:
        """Time a training step of all conditions."""
        stack, masks = self.initial.repeated(len(CONDITIONS)), [self.full_masks] * len(CONDITIONS)
        times: list[float] = []
        steps = min(CALIBRATION_STEPS, self.plan.steps)
        self.train(stack, networks.joined_masks(masks), steps, lambda step: times.append(time.perf_counter()))
        # The first step starts libraries; it is left out if there is another.
        return (times[-1] - times[0]) / (steps - 1) if steps > 1 else 0.0


class Work:
    """Training steps of all conditions that are done and left, to estimate the seconds that are left."""

    def __init__(self, plan: Plan, step_seconds: float) -> None:
        self.done, self._step_seconds, self._start = 0.0, step_seconds, time.perf_counter()
        self._total = plan.steps * (plan.rounds + 1 / len(CONDITIONS))  # the dense networks are one condition

    def remaining(self) -> float:
        """Return the estimated seconds; the calibration counts like ``PRIOR_STEPS`` measured steps."""
        seconds = time.perf_counter() - self._start + PRIOR_STEPS * self._step_seconds
        return seconds / (self.done + PRIOR_STEPS) * max(0.0, self._total - self.done)


@contextmanager
def one_thread() -> Iterator[None]:
    """Context with one thread for torch, and without denormal numbers, which would slow products down.

    Adam's moments of a unit that is always off decay to denormal numbers.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


def run(
    images: ImageSet, plan: Plan, *, log: Log, expect: Callable[[Callable[[], float]], None]
) -> dict[str, Any]:
    """Run the experiment; return its record. ``expect`` gets a function of the seconds left before the start.

    Raises :class:`Interrupted` for a ``KeyboardInterrupt``, with the record of the rounds so far.
    """
    rows: list[dict[str, Any]] = []
    try:
        with one_thread():
            experiment = Experiment(images, plan)
            work = Work(plan, experiment.step_seconds())
            expect(work.remaining)
            for row in _rounds(experiment, work, log):
                rows.append(row)
    except KeyboardInterrupt as error:
        if not rows:
            raise
        raise Interrupted(_record(images, plan, rows)) from error
    return _record(images, plan, rows)


def _rounds(experiment: Experiment, work: Work, log: Log) -> Iterator[dict[str, Any]]:
    plan = experiment.plan

    def progress(round_number: int) -> Callable[[int], None]:
        def on_step(step: int) -> None:
            work.done += 1 if round_number else 1 / len(CONDITIONS)
            if step % LOG_EVERY == 0 or step == plan.steps:
                density = 100 * plan.density(round_number)
                head = f"[{round_number + 1}/{plan.rounds + 1}] density {density:.3g} %"
                log(f"{head}: step {step} of {plan.steps}")

        return on_step

    masks = experiment.full_masks
    rewound = experiment.train(experiment.initial, masks, plan.rewind, progress(0))
    trained = experiment.train(rewound, masks, plan.steps, progress(0))
    counts = plan.counts(experiment.shapes, 0)
    yield _row(0, experiment, counts, trained)
    for number in range(1, plan.rounds + 1):
        counts = plan.counts(experiment.shapes, number)
        masks = networks.pruned([w[: plan.networks] for w in trained.weights], masks, counts)
        start, all_masks = experiment.conditions(rewound, masks, number)
        trained = experiment.train(start, all_masks, plan.steps, progress(number))
        yield _row(number, experiment, counts, trained)


def _row(number: int, experiment: Experiment, counts: list[int], trained: Snapshot) -> dict[str, Any]:
    total = sum(a * b for a, b in experiment.shapes)
    return {
        "round": number,
        "density": sum(counts) / total,
        "weights": counts,
        "accuracy": experiment.accuracies(trained),
        "bytes": storage(experiment.shapes, counts),
    }


def storage(shapes: Sequence[tuple[int, int]], counts: Sequence[int]) -> dict[str, int]:
    """Return the bytes of a network's float32 values and biases, and of what locates the values.

    ``bitmask`` has one bit for each weight, whole bytes for each layer. ``indices`` are those of compressed
    rows: 2 bytes for each weight, its input's number, and 4 for the start of each output's row and the end.
    """
    return {
        "dense": 4 * sum((a + 1) * b for a, b in shapes),
        "values": 4 * (sum(counts) + sum(b for _, b in shapes)),
        "bitmask": sum(-(-a * b // 8) for a, b in shapes),
        "indices": sum(2 * count + 4 * (b + 1) for count, (_, b) in zip(counts, shapes, strict=True)),
    }


def _record(images: ImageSet, plan: Plan, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "experiment": "prune",
        "format": FORMAT,
        "plan": asdict(plan),
        "images": {
            "name": images.name,
            "train": len(images.train_x),
            "test": len(images.test_x),
            "features": images.features,
            "classes": images.classes,
        },
        "rows": rows,
        "verdict": verdict(plan, rows),
        "machine": machine.fingerprint("cpu"),
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of at least two values and half the width of its 95 % interval by Student's t."""
    deviation = float(np.std(values, ddof=1))
    return float(np.mean(values)), student(len(values) - 1) * deviation / len(values) ** 0.5


def verdict(plan: Plan, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return whether winning tickets beat both controls at about 10 %; None if that round is missing.

    They beat a control if the 95 % interval of the paired difference, network by network, is above 0.
    """
    row = next((r for r in rows if r["round"] == plan.verdict_round), None)
    if row is None:
        return None
    winning, *controls = CONDITIONS
    margins = {}
    for name in controls:
        pairs = zip(row["accuracy"][winning], row["accuracy"][name], strict=True)
        mean, half = interval([a - b for a, b in pairs])
        margins[name] = {"mean": mean, "low": mean - half, "high": mean + half}
    return {
        "density": row["density"],
        "margins": margins,
        "beats_both": all(m["low"] > 0 for m in margins.values()),
    }
