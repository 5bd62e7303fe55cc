"""``StepProfiler``: some steps of a run under ``torch.profiler``, read as kernel launches.

On a GPU a launch is a kernel with the operators that launched it, from inner to outer. A CPU's
operators are their own kernels: there a launch is an operator's time without the operators inside it.
``weft.gpt2.report.step_profile`` assigns launches to rows and adds the roofline.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from weft.core import WeftError

# Steps before the profile; the median of the last TIMED_STEPS is the time of a step.
WARMUP_STEPS, TIMED_STEPS = 20, 10
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
# The profiler's own events. Their correlation ids collide with those of operators, so kernels that are
# attached to them belong to other operators.
OVERHEADS = ("Activity Buffer Request", "Buffer Flush", "Instrumentation", "Resource")
Shapes = tuple[tuple[int, ...], ...]
Key = tuple[tuple[str, ...], str, Shapes]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """``count`` equal launches, which took ``us`` microseconds together.

    ``names`` are the operators from inner to outer, () if unknown; ``kernel`` is "" on a CPU; ``shapes``
    are the operands' of the enclosing matrix product, () if there is none.
    """

    names: tuple[str, ...]
    kernel: str
    shapes: Shapes
    count: int
    us: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Launches of ``steps`` steps. ``step_us`` is the median time of a step without the profiler;
    ``gaps_us`` the time per step in which no kernel runs, 0.0 on a CPU."""

    steps: int
    step_us: float
    gaps_us: float
    launches: list[Launch]


@dataclass(kw_only=True)
class StepProfiler:
    """Profiles ``steps`` steps of a run (None: no profile) after ``WARMUP_STEPS`` steps."""

    steps: int | None
    device: torch.device
    profile: Profile | None = None
    completed: int = 0
    step_us: float = 0.0
    _last_step: int = 0
    _session: Any = field(default=None, repr=False)

    @contextmanager
    def step(self, seconds: list[float], undisturbed: bool) -> Iterator[None]:
        """Context of each step. ``seconds`` are the times of earlier steps; ``undisturbed`` says that
        no validation, sample or checkpoint is due during the next ``steps`` steps."""
        pending = self.steps is not None and self.profile is None and self._session is None
        if pending and undisturbed and self.completed >= WARMUP_STEPS:
            self._begin(seconds)
        try:
            yield
            self.completed += 1
            if self._session is not None and self.completed == self._last_step:
                self._end()
        finally:
            if self._session is not None and self.completed >= self._last_step:
                self._session = None

    def _begin(self, seconds: list[float]) -> None:
        assert self.steps is not None
        # Measured without the profiler, which slows the host and thereby the device.
        self.step_us = 1e6 * statistics.median(seconds[-TIMED_STEPS:])
        activities = [ProfilerActivity.CPU]
        # Kernels of earlier steps must not be part of the profile.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            activities.append(ProfilerActivity.CUDA)
        self._last_step = self.completed + self.steps
        self._session = profile(activities=activities, record_shapes=True, acc_events=True)
        self._session.__enter__()

    def _end(self) -> None:
        assert self.steps is not None
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self.device)
        self._session.__exit__(None, None, None)
        events = list(self._session.events())
        self.profile = Profile(
            steps=self.steps,
            step_us=self.step_us,
            gaps_us=kernel_gaps(events) / self.steps if on_gpu else 0.0,
            launches=gpu_launches(events) if on_gpu else cpu_launches(events),
        )

    def close(self) -> None:
        """End a profile that is still running when the run ends."""
        if self._session is not None:
            self._session.__exit__(None, None, None)
            self._session = None


def check_profile_steps(steps: int | None, remaining: int) -> None:
    """Raise :class:`WeftError` if a run with ``remaining`` steps cannot profile ``steps`` of them."""
    if steps is not None and not 1 <= steps <= remaining - WARMUP_STEPS:
        longest = max(0, remaining - WARMUP_STEPS)
        expected = f"1 or more, and {WARMUP_STEPS} steps before them: at most {longest} here"
        raise WeftError("--profile", expected=expected, got=steps, hint="more --steps")


def gpu_launches(events: Iterable[Any]) -> list[Launch]:
    """Return every kernel of a profile. A kernel that no operator launched has no names: Weft's
    optimizer launches its kernels without one."""
    counts: Counter[Key] = Counter()
    times: defaultdict[Key, float] = defaultdict(float)
    unattributed: dict[str, list[float]] = {}  # count and microseconds by kernel
    for event in events:
        if _is_kernel(event):
            total = unattributed.setdefault(event.name, [0, 0.0])
            total[0] += 1
            total[1] += event.time_range.elapsed_us()
        for kernel in () if event.name in OVERHEADS else event.kernels:
            names, shapes = _enclosing_operators(event)
            counts[names, kernel.name, shapes] += 1
            times[names, kernel.name, shapes] += kernel.duration
    # Subtract what operators launched; the rest was launched by no operator.
    for key, count in counts.items():
        if key[1] in unattributed:
            unattributed[key[1]][0] -= count
            unattributed[key[1]][1] -= times[key]
    for name, (launches, us) in unattributed.items():
        if launches > 0:
            counts[(), name, ()] = int(launches)
            times[(), name, ()] = us
    return _launches(counts, times)


def cpu_launches(events: Iterable[Any]) -> list[Launch]:
    """Return every operator of a profile, with its time without the operators that it called."""
    counts: Counter[Key] = Counter()
    times: defaultdict[Key, float] = defaultdict(float)
    for event in events:
        names, shapes = _enclosing_operators(event)
        counts[names, "", shapes] += 1
        times[names, "", shapes] += event.self_cpu_time_total
    return _launches(counts, times)


def _launches(counts: Counter[Key], times: dict[Key, float]) -> list[Launch]:
    return [
        Launch(names=names, kernel=kernel, shapes=shapes, count=count, us=times[names, kernel, shapes])
        for (names, kernel, shapes), count in counts.items()
    ]


def _enclosing_operators(event: Any) -> tuple[tuple[str, ...], Shapes]:
    names: list[str] = []
    shapes: Shapes = ()
    while event is not None:
        names.append(event.name)
        if event.name in PRODUCTS and not shapes:
            shapes = tuple(tuple(s) for s in event.input_shapes or () if s)
        event = event.cpu_parent
    return tuple(names), shapes


def _is_kernel(event: Any) -> bool:
    on_device = event.device_type == torch.autograd.DeviceType.CUDA
    return on_device and not event.is_user_annotation  # an annotation is a range that has kernels


def kernel_gaps(events: Iterable[Any]) -> float:
    """Return the microseconds between the first and the last kernel in which no kernel ran."""
    spans = sorted((e.time_range.start, e.time_range.end) for e in events if _is_kernel(e))
    gaps, busy_until = 0.0, spans[0][1] if spans else 0.0
    for begin, end in spans:
        # Kernels may overlap on several streams, so only time after the latest end is a gap.
        gaps += max(0.0, begin - busy_until)
        busy_until = max(busy_until, end)
    return gaps
