"""Measurements of the MLP study: the model, the time of each point, and a profile of a step.

All points are sampled round by round in random order, with the runners of the project's timing. A
sample is one call. On a GPU it is a captured graph, so that it contains no launch from the host, and
the same call runs untimed before it; on a CPU it is the call between two readings of the wall clock.
A call meets the cache as the call before left it, as in a long training. Each point notes whether its
weights outgrow the cache, since inside the cache no memory bandwidth bounds anything.

The profile divides a step's time by kind of operator and by layer, as torch.profiler reports it. By
kind: each operator's own time; a GPU's kernels count for the operator that launched them. By layer:
the i-th linear and the i-th gelu belong to layer i, and the backward pass goes from the last layer to
the first. The optimizer updates all layers at once and is in no layer's time.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch.nn import functional

from weft import machine
from weft.core import Interrupted, Log, WeftError
from weft.lab.study.workload import KINDS, Point, Sizes, resident_bytes
from weft.machine.clocks import Sampler
from weft.machine.measure_cpu import all_threads
from weft.machine.measure_gpu import product_precision
from weft.workbench.calls.buffers import InputBuffers
from weft.workbench.timing.gpu_clocks import Readings, summarise_clocks
from weft.workbench.timing.measure import timing_backend
from weft.workbench.timing.plan import Candidate, Plan, TimedCandidate, TimingBackend
from weft.workbench.timing.stats import Summary, summarise

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Learning rate times width: a step of Adam changes a product in proportion to the width (Yang and
# others 2022), and the weights must stay finite over thousands of timed steps on changing batches.
SCALED_LEARNING_RATE = 3e-3

_now = time.perf_counter
MIN_ROUNDS, MIN_ROUNDS_QUICK = 5, 3  # also if the seconds are over
QUICK_BUDGET = 3.0  # seconds up to which a run counts as quick
MAX_ROUNDS = 200
NOISY = 0.05  # an interval wider than this share of the median is flagged

MATMUL = ("aten::addmm", "aten::mm", "aten::linear", "aten::matmul")
GELU = ("aten::gelu", "aten::gelu_backward")
OPTIMIZER = ("aten::_fused_adam", "aten::_foreach", "Optimizer.")
PROFILED_STEPS, WARM_UP_STEPS = 3, 2
Key = TypeVar("Key")  # what a round samples: points of a study, or variants of a program
NODE = "autograd::engine::evaluate_function: "
# Events of one layer by the start of their name: forward's in layer order, backward's reversed.
FORWARD = {"linear": "aten::linear", "gelu": "aten::gelu"}
BACKWARD = {"linear backward": f"{NODE}AddmmBackward", "gelu backward": f"{NODE}GeluBackward"}


class Mlp(torch.nn.Module):
    """``depth`` layers of ``gelu(linear(x))``, x of shape (batch, width).

    One model serves every depth at its width: a call uses its first layers only, and the optimizer
    skips a layer without gradients.
    """

    def __init__(self, depth: int, width: int, dtype: str, device: str) -> None:
        super().__init__()
        # A tuple for the loop of `forward`: a slice of a ModuleList builds a new module at each call.
        self._linears = tuple(
            torch.nn.Linear(width, width, dtype=DTYPES[dtype], device=device) for _ in range(depth)
        )
        self.layers = torch.nn.ModuleList(self._linears)
        for layer in self._linears:
            # He's initialisation keeps the activations' size from layer to layer (2015).
            torch.nn.init.kaiming_normal_(layer.weight)
            torch.nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor, depth: int | None = None) -> torch.Tensor:
        """Apply the first ``depth`` layers (default: all) to x (batch, width)."""
        for layer in self._linears[:depth]:
            x = functional.gelu(layer(x))
        return x


class Trainer:
    """A model with its AdamW (Loshchilov and Hutter 2019), fused: one pass over each weight."""

    def __init__(self, depth: int, width: int, dtype: str, device: str) -> None:
        self.model = Mlp(depth, width, dtype, device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=SCALED_LEARNING_RATE / width,
            fused=True,
            capturable=device == "cuda",  # the step counter stays on the GPU, so a graph can hold it
        )

    def forward(self, x: torch.Tensor, depth: int | None = None) -> torch.Tensor:
        """Run the forward pass as in inference, without an autograd graph."""
        with torch.no_grad():
            y: torch.Tensor = self.model(x, depth)
        return y

    def gradients(self, x: torch.Tensor, target: torch.Tensor, depth: int | None = None) -> torch.Tensor:
        """Compute the loss and new gradient tensors; nothing is accumulated. Return the loss."""
        # None, not zeros: the optimizer skips layers without a gradient, those above the call's depth.
        self.optimizer.zero_grad(set_to_none=True)
        loss = functional.mse_loss(self.model(x, depth), target)
        torch.autograd.backward(loss)
        return loss.detach()

    def step(self, x: torch.Tensor, target: torch.Tensor, depth: int | None = None) -> torch.Tensor:
        """Run forward, backward and optimizer; return the scalar loss before the update."""
        loss = self.gradients(x, target, depth)
        self.optimizer.step()
        return loss


def random_batch(batch: int, width: int, dtype: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate normal inputs and targets, (batch, width) each.

    Zeros would not do: they switch fewer transistors, so a GPU draws less power and clocks higher.
    """
    x, target = (torch.randn(batch, width, device=device) for _ in range(2))
    return x.to(DTYPES[dtype]), target.to(DTYPES[dtype])


@dataclass(frozen=True, kw_only=True)
class PointTiming:
    """A point's samples in us a call, its runner's flags, and its loss (forward pass: the output's mean).

    ``cold``: the bytes that every call touches are at least twice the last-level cache.
    """

    summary: Summary
    flags: tuple[str, ...]
    loss: float
    cold: bool


@contextmanager
def timing_context(device: str) -> Iterator[TimingBackend]:
    """Yield the timing backend with all CPU threads, fp32 products in fp32, and a fixed, private seed."""
    with ExitStack() as stack:
        # By default fork_rng saves the generators of all GPUs of the machine.
        devices = [0] if device == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=devices))
        torch.manual_seed(0)
        if device == "cuda":
            stack.enter_context(product_precision(torch, "ieee"))
            # The optimizer warns about capturable=True at each warm-up step outside a capture.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=".*capturable=True.*")
        else:
            stack.enter_context(all_threads(torch, machine.query("cpu").threads))
        backend = timing_backend(device)
        stack.enter_context(backend.context())
        yield backend


class Bench:
    """The models of a study, one for each width, and the calls on them."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self.device = device
        self.trainers = {w: Trainer(sizes.model_depth(w), w, sizes.dtype, device) for w in sizes.widths}

    def call(self, point: Point) -> Callable[[], torch.Tensor]:
        """Return the closure to time at a point; it returns the loss, or a forward pass's output."""
        shape = point.shape
        trainer = self.trainers[shape.width]
        x, target = random_batch(shape.batch, shape.width, shape.dtype, self.device)
        if point.phase == "forward":
            return lambda: trainer.forward(x, shape.depth)

        def steps() -> torch.Tensor:
            for _ in range(point.steps):
                loss = trainer.step(x, target, shape.depth)
            return loss

        return steps


def require_memory(sizes: Sizes, backend: TimingBackend, device: str) -> None:
    """Raise :class:`WeftError` if the study needs more than half of a computer's memory, or more than
    nine tenths of a GPU's free memory."""
    # A CPU's backend reports a quarter of the memory as available, so twice that is half of it.
    needed, allowed = sizes.memory(), backend.available_memory() * (0.9 if device == "cuda" else 2.0)
    if needed > allowed:
        raise WeftError(
            "the study's sizes",
            expected=f"at most {allowed / 1e9:.1f} GB of memory",
            got=f"{needed / 1e9:.1f} GB",
            hint="smaller --widths, --depths or --batches",
        )


def time_points(
    bench: Bench, points: Sequence[Point], backend: TimingBackend, seconds: float, log: Log
) -> tuple[dict[Point, PointTiming], dict[str, object]]:
    """Time each point, in about ``seconds`` after the warm-up; return timings and the clocks meanwhile.

    ``log`` gets a line for each tenth of the time, with the time that is left. Raises
    :class:`Interrupted` for a ``KeyboardInterrupt``, with the same result from the rounds so far, if
    there are enough.
    """
    runners: dict[Point, TimedCandidate] = {}
    calls = {}
    for number, point in enumerate(points):
        if number % 10 == 0:
            log(f"prepared {number} of {len(points)} points")
        calls[point] = bench.call(point)
        runners[point] = _prepared(backend, point.title, calls[point])
    interrupt = None
    try:
        samples, clocks = sample_rounds(runners, Readings(Sampler(bench.device)), seconds, log)
    except Interrupted as error:
        if error.partial is None:
            raise
        interrupt, (samples, clocks) = error, error.partial
    # After an interrupt the user waits for the results: no further measurement then.
    for point in points if interrupt is None else ():
        # The cross-check of two clocks is slow, so only the base's own points have one.
        if point.steps == 1 and point.shape == points[0].shape:
            runners[point].flags.update(runners[point].cross_check())
    timings = {}
    for point, runner in runners.items():
        summary = summarise(samples[point])
        noisy = {"noisy"} if summary.width > NOISY else set()
        timings[point] = PointTiming(
            summary=summary,
            flags=tuple(sorted(runner.flags | noisy)),
            loss=float(calls[point]().float().mean()),
            cold=resident_bytes(point.shape, point.phase) >= 2 * backend.cache_bytes,
        )
    if interrupt is not None:
        raise Interrupted((timings, clocks)) from interrupt
    return timings, clocks


def _prepared(backend: TimingBackend, name: str, call: Callable[[], torch.Tensor]) -> TimedCandidate:
    # The call owns its tensors, so it ignores the empty buffers that it is bound to.
    candidate = Candidate(name=name, bind=lambda _: call)
    # Not flushed: a call meets the cache as the call before left it, as in a training.
    return backend.prepare(
        candidate, [InputBuffers([])], lambda seed: InputBuffers([]), Plan(calls=1, flush=False)
    )


class Sampled(Protocol):
    """Anything that can be sampled round by round."""

    def sample(self) -> float:
        """Take one sample; return the us of a call."""


def sample_rounds(
    runners: Mapping[Key, Sampled], readings: Readings, seconds: float, log: Log
) -> tuple[dict[Key, list[float]], dict[str, object]]:
    """Run one discarded warm-up round, then as many rounds as fit in the seconds, with a minimum.

    An interrupt after ``MIN_ROUNDS_QUICK`` rounds raises :class:`Interrupted` with the result so far.
    """
    order, points = np.random.default_rng(0), list(runners)
    samples: dict[Key, list[float]] = {p: [] for p in points}
    clocks = []
    start, reported_tenth = _now(), -1
    minimum = MIN_ROUNDS if seconds > QUICK_BUDGET else MIN_ROUNDS_QUICK
    try:
        # One more: the first round warms up and is discarded.
        for number in range(MAX_ROUNDS + 1):
            # Another order in each round: a point meets the cache and clocks that the one before left.
            for index in order.permutation(len(points)):
                us = runners[points[index]].sample()
                if number > 0:
                    samples[points[index]].append(us)
                clocks.append(readings.read())
            if number == 0:
                start = _now()
                log("warm")
                continue
            spent = _now() - start
            # If rounds are missing from the minimum, their time at the rate so far.
            left = max(seconds - spent, (minimum - number) * spent / number)
            if left <= 0:
                break
            if int(10 * spent / seconds) > reported_tenth:
                reported_tenth = int(10 * spent / seconds)
                log(f"round {number}: about {left:.0f} s left")
    except KeyboardInterrupt as error:
        enough = min(map(len, samples.values())) >= MIN_ROUNDS_QUICK
        raise Interrupted((samples, summarise_clocks(clocks)) if enough else None) from error
    return samples, summarise_clocks(clocks)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Times of a step. ``shares`` by kind sum to 1; ``us`` is the time of all operators of a step.

    ``layers`` has one mapping a layer, from operator to us a step; it is empty if the events did not
    come layer by layer.
    """

    shares: dict[str, float]
    layers: tuple[dict[str, float], ...]
    us: float


def kind_of(name: str) -> str:
    """Return the kind of an operator by its event's name.

    >>> kind_of("aten::addmm"), kind_of("aten::_fused_adamw_"), kind_of("aten::sum")
    ('matmul', 'optimizer', 'other')
    """
    if name in MATMUL:
        return "matmul"
    if name in GELU:
        return "gelu"
    return "optimizer" if name.startswith(OPTIMIZER) else "other"


def profile(call: Callable[[], object], depth: int, device: str) -> Profile:
    """Profile ``PROFILED_STEPS`` runs of ``call``, a step through ``depth`` layers.

    Raises ``RuntimeError`` if the profiler recorded no time at all.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else Kineto writes to stderr
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for _ in range(WARM_UP_STEPS):
        call()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(PROFILED_STEPS):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
    # A GPU's kernels are also events of their own, beside the operators that launched them. Their
    # times are already in those operators' device times.
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CPU]
    return summarise_events(events, depth, on_gpu=device == "cuda")


def summarise_events(events: Iterable[Any], depth: int, *, on_gpu: bool) -> Profile:
    """Sum up the host events of ``PROFILED_STEPS`` steps."""
    events = sorted(events, key=lambda e: e.time_range.start)
    own = dict.fromkeys(KINDS, 0.0)
    for event in events:
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        own[kind_of(event.name)] += us
    whole = sum(own.values())
    if whole <= 0:
        raise RuntimeError("the profiler saw no time: are its GPU activities forbidden here?")
    shares = {kind: us / whole for kind, us in own.items()}
    return Profile(shares=shares, layers=_layer_times(events, depth, on_gpu), us=whole / PROFILED_STEPS)


def _layer_times(events: list[Any], depth: int, on_gpu: bool) -> tuple[dict[str, float], ...]:
    layers: list[dict[str, float]] = [{} for _ in range(depth)]
    for prefixes, backward in ((FORWARD, False), (BACKWARD, True)):
        for operator, prefix in prefixes.items():
            # Forward names must match whole: aten::gelu is also the start of aten::gelu_backward.
            matching = [e for e in events if (e.name.startswith(prefix) if backward else e.name == prefix)]
            if len(matching) != PROFILED_STEPS * depth:
                return ()  # better no table than times of the wrong layer
            for number, event in enumerate(matching):
                # Sorted by time, a step's layers follow one another, and the next step starts at 0.
                position = number % depth
                us = event.device_time_total if on_gpu else event.cpu_time_total
                layer = layers[depth - 1 - position if backward else position]
                layer[operator] = layer.get(operator, 0.0) + us / PROFILED_STEPS
    return tuple(layers)
