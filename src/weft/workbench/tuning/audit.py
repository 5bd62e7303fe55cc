"""Audit of dispatch: Weft's calls as dispatched against torch's own, at random points of real models.

Each point is timed by Weft's clock, both sides interleaved in random order over the same rotating inputs:
eager points by the wall time of back-to-back calls, which counts the host, captured ones by a CUDA graph.
At a compiled point torch.compile compiles both sides, which are timed like eager ones. A ratio is torch's
time over Weft's: below 1, Weft is slower. A point that seems slower than ``LEAST_RATIO`` is measured again
for longer, and the second measurement counts.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from weft.core.log import Log, no_log
from weft.dispatch import choice, plan_cache
from weft.workbench.bench import free_memory
from weft.workbench.calls.buffers import InputBuffers, tensors_of
from weft.workbench.calls.make_calls import call_once, make_calls, schedule
from weft.workbench.timing.measure import timing_backend
from weft.workbench.timing.plan import Candidate, LocalTimingBackend, Plan, Runner, make_plan
from weft.workbench.timing.stats import ratio_of_medians
from weft.workbench.tuning.audit_points import AuditPoint, Call, Workload, expected_us, memory_bytes, workload

OURS, TORCH = "weft", "torch"
LEAST_RATIO, GOOD_RATIO = 0.95, 1.05
QUANTILES = (0, 5, 25, 50, 75, 95, 100)  # percent
WORST = 10
# Seconds of a point beside its calls: inputs, first calls, captures; more on a GPU, which compiles kernels.
SETUP_SECONDS = {"cuda": 0.4, "cpu": 0.3}
SAMPLING_SECONDS = {"cuda": 0.15, "cpu": 0.2}
COMPILE_SECONDS = 12.0  # of both sides of a compiled point
COMPILE_OPTIONS: dict[str, Any] = {"fullgraph": True, "dynamic": False}  # a graph break raises
LONGER = 4.0  # factor of the sampling time of a second measurement
CALLS = 42  # calls of both sides at a point where each sample has the least number of calls, two
MIN_ROUNDS, MAX_ROUNDS = 5, 200
NARROW = 0.02  # width of the ratio's interval at which sampling ends
RESAMPLES = 200
MIN_EAGER_US = 1000.0  # of back-to-back calls: the wait at their end must not count
MEMORY_SHARE = 0.5  # of the free memory, for the rotating inputs and the results of both sides
# Largest RMS of the difference to torch's results, as a share of their RMS: a coarse guard, not the check.
COMPARED_ELEMENTS = 1 << 25
MAX_DIFFERENCE = {"bfloat16": 0.05, "float32": 0.005}

_now = time.perf_counter_ns


@dataclass(kw_only=True)
class AuditResult:
    """Result at a point: times in us a call, their ratio with its interval, and the implementation.

    ``problem`` says why a point was left out (``ratio`` is then None) or that results differ.
    """

    point: AuditPoint
    implementation: str = ""
    reason: str = ""
    ours_us: float | None = None
    torch_us: float | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    problem: str = ""
    differs: bool = False
    flags: list[str] = field(default_factory=list)
    seconds: float = 0.0  # that the point took, with its inputs, first calls and checks

    @property
    def is_against(self) -> bool:
        """True if this point makes an audit fail: other results, or slower by more than noise explains."""
        return self.differs or (self.is_slow and not self.is_noisy)

    @property
    def is_slow(self) -> bool:
        """True if the ratio is below ``LEAST_RATIO``."""
        return self.ratio is not None and self.ratio < LEAST_RATIO

    @property
    def is_noisy(self) -> bool:
        """True if the ratio's 95 % interval contains 1: its samples do not say which side is faster."""
        return self.interval is not None and self.interval[0] <= 1.0 <= self.interval[1]

    def to_json(self) -> dict[str, Any]:
        """Return plain data; sizes by name."""
        p = self.point
        return {
            "operator": p.operator,
            "model": p.model,
            "sizes": dict(p.sizes),
            "dtype": p.dtype,
            "use": p.use,
            "mode": p.mode,
            "implementation": self.implementation,
            "reason": self.reason,
            "weft_us": self.ours_us,
            "torch_us": self.torch_us,
            "ratio": self.ratio,
            "interval": list(self.interval) if self.interval else None,
            "flags": self.flags,
            "problem": self.problem,
            "differs": self.differs,
            "seconds": round(self.seconds, 3),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> AuditResult:
        """Return the result that :meth:`to_json` described; raise KeyError or TypeError for other data."""
        point = AuditPoint(
            operator=data["operator"],
            model=data["model"],
            sizes=tuple(data["sizes"].items()),
            dtype=data["dtype"],
            training=data["use"] == "training",
            captured=data["mode"] == "captured",
            compiled=data["mode"] == "compiled",
        )
        return AuditResult(
            point=point,
            implementation=data["implementation"],
            reason=data["reason"],
            ours_us=data["weft_us"],
            torch_us=data["torch_us"],
            ratio=data["ratio"],
            interval=tuple(data["interval"]) if data["interval"] else None,
            problem=data["problem"],
            differs=data["differs"],
            flags=list(data["flags"]),
            seconds=data["seconds"],
        )


def expected_seconds(points: Sequence[AuditPoint], device: str) -> list[float]:
    """Return the expected seconds of each point."""
    sampling, setup = SAMPLING_SECONDS[device], SETUP_SECONDS[device]
    return [
        setup + max(sampling, CALLS * expected_us(p, device) / 1e6) + COMPILE_SECONDS * p.compiled
        for p in points
    ]


def run(
    points: Iterable[AuditPoint],
    device: str,
    *,
    seed: int = 0,
    limit: float | None = None,
    on_event: Log = no_log,
) -> Iterator[AuditResult]:
    """Measure each point; yield its result. ``seed`` decides the inputs and the order of the samples.

    No point is begun after ``limit`` seconds.
    """
    backend = timing_backend(device)
    rng = random.Random(seed)
    begin = time.monotonic()
    with backend.context():
        for point in points:
            start = time.monotonic()
            if limit is not None and start - begin > limit:
                return
            on_event(point.title)
            try:
                result = _measure(point, backend, device, rng)
            except (torch.OutOfMemoryError, MemoryError):
                result = AuditResult(point=point, problem="left out: out of memory")
            gc.collect()
            free_memory(device)
            result.seconds = time.monotonic() - start
            yield result


# ---- One point


def _measure(point: AuditPoint, backend: LocalTimingBackend, device: str, rng: random.Random) -> AuditResult:
    result = AuditResult(point=point)
    needed, free = memory_bytes(point), backend.available_memory()
    if needed > MEMORY_SHARE * free:
        result.problem = f"left out: needs about {needed / 2**30:.1f} GiB of {free / 2**30:.1f} GiB free"
        return result
    work = workload(point)
    make = partial(_inputs, point, work, device)
    sides = {OURS: work.ours, TORCH: work.torchs}
    if point.compiled:
        torch.compiler.reset()  # else the code of an earlier point's sizes would be generalised
        sides = {name: torch.compile(call, **COMPILE_OPTIONS) for name, call in sides.items()}
    seconds = SAMPLING_SECONDS[device]
    decisions: list[choice.Decision] = []
    plan_cache.clear()  # a choice that was made before would not be observed
    with choice.observed(decisions.append):
        try:
            difference = _first_difference(point, sides, make(rng.getrandbits(31)))
            timers = _timers(point, sides, backend, make, rng)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a call that raises is a result, whatever it raises
            result.problem, result.differs = f"raised: {type(error).__name__}: {error}"[:300], True
            return result
    result.implementation, result.reason = _explanation(point, decisions)
    if not difference <= MAX_DIFFERENCE[point.dtype]:  # also true for nan
        result.problem, result.differs = f"differs from torch by {difference:.1%} RMS", True
    _sample(result, timers, seconds, rng)
    if result.is_slow:
        _sample(result, timers, LONGER * seconds, rng)
    return result


def _explanation(point: AuditPoint, decisions: Sequence[choice.Decision]) -> tuple[str, str]:
    """Return the implementation that ran, and why: the last decision for the point's mode.

    A loss of a product without gradients is two calls, a product by PyTorch and the operator cross_entropy.
    """
    decided = [d for d in decisions if point.captured or not d.in_graph]
    own = [d for d in decided if d.operator == point.operator]
    if own:
        return own[-1].impl, own[-1].reason
    if decided:
        return decided[-1].impl, f"its {decided[-1].operator}: {decided[-1].reason}"
    return "", "chosen while tracing" if point.compiled else "the operator chooses itself"


def _inputs(point: AuditPoint, work: Workload, device: str, seed: int) -> InputBuffers:
    generator = torch.Generator(device).manual_seed(seed)
    tensors = []
    for argument in work.arguments:
        options = {"device": device, "generator": generator}
        if argument.below is not None:
            tensors.append(torch.randint(argument.below, argument.shape, **options))  # type: ignore[call-overload]
        elif argument.is_table:
            tensors.append(torch.randn(argument.shape, **options))  # type: ignore[call-overload]
        else:
            x = torch.randn(argument.shape, dtype=getattr(torch, point.dtype), **options)  # type: ignore[call-overload]
            tensors.append(x.mul_(argument.scale).requires_grad_(point.training))
    return InputBuffers(tensors, seed=seed)


def _bind(call: Call, training: bool, buffers: InputBuffers) -> Callable[[], Any]:
    """Return the closure of one call: the forward, or forward and backward with gradients of all inputs."""
    inputs = buffers.inputs
    if not training:
        return lambda: call(*inputs)
    leaves = [x for x in inputs if x.requires_grad]
    # Made once: the incoming gradient is no part of what is compared. It is the same on both sides.
    grads = [_incoming(y) for y in _differentiable(call(*inputs))]
    return lambda: torch.autograd.grad(_differentiable(call(*inputs)), leaves, grads)


def _incoming(output: torch.Tensor) -> torch.Tensor:
    if output.dim() == 0:
        return torch.ones_like(output)
    # Random: of many operators a constant has the gradient 0, in which only rounding errors would differ.
    generator = torch.Generator(output.device).manual_seed(0)
    return torch.randn(output.shape, dtype=output.dtype, device=output.device, generator=generator)


def _differentiable(outputs: Any) -> list[torch.Tensor]:
    return [y for y in tensors_of(outputs) if y.requires_grad]


def _first_difference(point: AuditPoint, sides: dict[str, Call], buffers: InputBuffers) -> float:
    """Call both sides once; return the largest difference of their results."""
    ours, torchs = (tensors_of(_bind(sides[name], point.training, buffers)()) for name in (OURS, TORCH))
    both = [(_first_elements(a), _first_elements(b)) for a, b in zip(ours, torchs, strict=True) if a.numel()]
    pairs = [(_rms(a - b), _rms(b)) for a, b in both]
    # A gradient that is 0 but for rounding, as of the scores of a single key, has the scale of the others.
    least = max([1e-30, *(1e-3 * size for _, size in pairs)])
    return max((difference / max(size, least) for difference, size in pairs), default=0.0)


def _first_elements(x: torch.Tensor) -> torch.Tensor:
    # All of a large result in float32 would not fit beside it.
    return x.flatten()[:COMPARED_ELEMENTS].float()


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


# ---- The clock


class _EagerTimer:
    """Wall time of back-to-back calls over rotating inputs, from an idle device until it is idle again."""

    def __init__(self, candidate: Candidate, buffer_sets: Sequence[InputBuffers], call_us: float, wait: Call):
        closures = [candidate.bind(buffers) for buffers in buffer_sets]
        for closure in closures:
            call_once(closure)
        self.flags: set[str] = set()
        self._scheduled = schedule(closures, range(len(closures)))
        self._outputs: list[Any] = [None] * (len(closures) + 1)
        self._repeats = max(1, math.ceil(MIN_EAGER_US / max(0.1, call_us * len(closures))))
        self._wait = wait

    def sample(self) -> float | None:
        """Return the us of one call."""
        self._wait()
        start = _now()
        for _ in range(self._repeats):
            make_calls(self._scheduled, self._outputs)
        self._wait()
        return (_now() - start) / 1000 / (self._repeats * len(self._scheduled))


class _GraphTimer:
    """Time of calls in a CUDA graph, by the timing backend's own runner."""

    def __init__(self, runner: Runner, calls: int):
        self._runner, self._indexes = runner, range(calls)
        self.flags = runner.flags

    def sample(self) -> float | None:
        """Return the us of one call; None for a sample that the host spoilt."""
        return self._runner.run(self._indexes).us


Timer = _EagerTimer | _GraphTimer


def _timers(
    point: AuditPoint,
    sides: dict[str, Call],
    backend: LocalTimingBackend,
    make: Callable[[int], InputBuffers],
    rng: random.Random,
) -> dict[str, Timer]:
    """Return the timers of both sides, on the same inputs and by one plan."""
    candidates = [Candidate(name=n, bind=partial(_bind, call, point.training)) for n, call in sides.items()]
    first = make(rng.getrandbits(31))
    estimates = [backend.estimate(candidate, first) for candidate in candidates]
    slowest = max(e.us for e in estimates)
    output_bytes = sum(e.output_bytes for e in estimates)
    per_call = max(first.nbytes + output_bytes, memory_bytes(point))
    fits = max(1, int(MEMORY_SHARE * backend.available_memory() / max(1, per_call)))
    footprint = first.nbytes + output_bytes // 2
    plan = make_plan(footprint, backend.cache_bytes, slowest, slow_us=backend.slow_us, fits=fits)
    if not point.captured:  # no flush: the wall time would count it
        plan = Plan(calls=plan.calls, flush=False)
    buffer_sets = [first, *(make(rng.getrandbits(31)) for _ in range(plan.calls - 1))]
    timers: dict[str, Timer] = {}
    for candidate in candidates:
        if point.captured:
            timers[candidate.name] = _GraphTimer(
                backend.make_runner(candidate, buffer_sets, plan), plan.calls
            )
        else:
            wait = torch.cuda.synchronize if first.inputs[0].is_cuda else _no_wait
            timers[candidate.name] = _EagerTimer(candidate, buffer_sets, slowest, wait)
    return timers


def _no_wait() -> None:
    """Do nothing: a CPU has finished when the call returns."""


def _sample(result: AuditResult, timers: dict[str, Timer], seconds: float, rng: random.Random) -> None:
    """Sample both sides in rounds of random order for ``seconds``; store times, ratio and interval."""
    samples: dict[str, list[float]] = {name: [] for name in timers}
    names = list(timers)
    deadline = _now() + int(seconds * 1e9)
    for name in names:  # warms up, and finds how long the GPU must spin ahead of the host
        timers[name].sample()
    for number in range(1, MAX_ROUNDS + 1):
        rng.shuffle(names)
        for name in names:
            us = timers[name].sample()
            if us is not None:
                samples[name].append(us)
        enough = min(map(len, samples.values())) >= MIN_ROUNDS
        if enough and (_now() > deadline or (number % MIN_ROUNDS == 0 and _is_narrow(samples))):
            break
    if not all(samples.values()):
        result.problem = "left out: the device was always ahead of the host"
        return
    ratio = ratio_of_medians(samples[TORCH], samples[OURS], resamples=RESAMPLES)
    result.ours_us, result.torch_us = (float(np.median(samples[name])) for name in (OURS, TORCH))
    result.ratio, result.interval = ratio.value, ratio.interval
    result.flags = sorted({f"{name}: {flag}" for name, timer in timers.items() for flag in timer.flags})


def _is_narrow(samples: dict[str, list[float]]) -> bool:
    low, high = ratio_of_medians(samples[TORCH], samples[OURS], resamples=RESAMPLES).interval
    return high - low < NARROW


# ---- Summary


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Distribution of the ratios of an audit. Shares are of the measured points."""

    points: int
    left_out: int
    differing: int
    geometric_mean: float | None
    quantiles: dict[str, float]
    above: float
    below: float
    slow: int  # points below `LEAST_RATIO` whose interval does not contain 1
    slow_by_host: int  # of these, eager points that run torch's own: only Weft's host time differs
    noisy: int  # points below `LEAST_RATIO` whose interval contains 1

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "points": self.points,
            "left_out": self.left_out,
            "differing": self.differing,
            "geometric_mean": self.geometric_mean,
            "quantiles": self.quantiles,
            f"above_{GOOD_RATIO}": self.above,
            f"below_{LEAST_RATIO}": self.below,
            "slow": self.slow,
            "slow_by_host": self.slow_by_host,
            "noisy": self.noisy,
        }


def summarise(results: Sequence[AuditResult]) -> Summary:
    """Return the distribution of the measured ratios."""
    timed = [r for r in results if r.ratio is not None]
    ratios = np.array([r.ratio for r in timed], dtype=np.float64)
    below = [r for r in timed if r.is_slow]
    slow = [r for r in below if not r.is_noisy]
    values: list[float] = np.percentile(ratios, QUANTILES).tolist() if timed else []
    return Summary(
        points=len(timed),
        left_out=sum(r.ratio is None and not r.differs for r in results),
        differing=sum(r.differs for r in results),
        geometric_mean=float(np.exp(np.log(ratios).mean())) if timed else None,
        quantiles={f"{q}%": v for q, v in zip(QUANTILES, values, strict=False)},
        above=float((ratios > GOOD_RATIO).mean()) if timed else 0.0,
        below=len(below) / len(timed) if timed else 0.0,
        slow=len(slow),
        slow_by_host=sum(r.implementation in choice.BASELINES and not r.point.captured for r in slow),
        noisy=len(below) - len(slow),
    )


def worst(results: Sequence[AuditResult], count: int = WORST) -> list[AuditResult]:
    """Return the points with the lowest ratios, the lowest first; those whose results differ come before."""
    judged = [r for r in results if r.ratio is not None or r.differs]
    return sorted(judged, key=lambda r: (not r.differs, r.ratio or 0.0))[:count]
