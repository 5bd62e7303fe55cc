"""Where the time of a step goes: some steps under ``torch.profiler``, read as launches.

A launch is one kernel with the operators that it was launched from, inner to outer; on a CPU, whose
operators are their own kernels, what an operator took without those inside it. Names and floors
are put to launches in ``weft.gpt2.shares``.
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

WARM, TIMED = 20, 10  # steps before the profile; the last of them tell what a step takes
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
# The profiler's own work, which it numbers as if it were an operator: kernels of another.
OVERHEADS = ("Activity Buffer Request", "Buffer Flush", "Instrumentation", "Resource")
Shapes = tuple[tuple[int, ...], ...]
Key = tuple[tuple[str, ...], str, Shapes]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """``count`` launches alike, ``us`` microseconds together. ``names`` are the operators, inner to
    outer, () where none is known; ``kernel`` is "" on a CPU; ``shapes`` those of the product's
    operands that it is part of, if it is of one."""

    names: tuple[str, ...]
    kernel: str
    shapes: Shapes
    count: int
    us: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """``steps`` steps. ``step_us`` is what one takes without the profiler, the median; ``gaps_us``
    the time a step between a device's kernels, 0.0 on a CPU."""

    steps: int
    step_us: float
    gaps_us: float
    launches: list[Launch]


@dataclass(kw_only=True)
class Profiler:
    """Profiles ``steps`` steps of a run, once so many are behind that it goes at its pace.

    Raises:
        WeftError: fewer steps than one.
    """

    steps: int | None
    device: torch.device
    found: Profile | None = None
    turns: int = 0
    step_us: float = 0.0
    _last: int = 0
    _open: Any = field(default=None, repr=False)

    @contextmanager
    def turn(self, seconds: list[float], clear: bool) -> Iterator[None]:
        """Around each step. ``seconds`` are those of the steps before; ``clear`` says that in the
        next ``steps`` ones there is nothing but steps."""
        wanted = self.steps is not None and self.found is None and self._open is None
        if wanted and clear and self.turns >= WARM:
            self._begin(seconds)
        try:
            yield
            self.turns += 1
            if self._open is not None and self.turns == self._last:
                self._end()
        finally:
            if self._open is not None and self.turns >= self._last:
                self._open = None

    def _begin(self, seconds: list[float]) -> None:
        assert self.steps is not None
        self.step_us = 1e6 * statistics.median(seconds[-TIMED:])
        kinds = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            kinds.append(ProfilerActivity.CUDA)
        self._last = self.turns + self.steps
        self._open = profile(activities=kinds, record_shapes=True, acc_events=True)
        self._open.__enter__()

    def _end(self) -> None:
        assert self.steps is not None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._open.__exit__(None, None, None)
        events = list(self._open.events())
        gpu = self.device.type == "cuda"
        self.found = Profile(
            steps=self.steps,
            step_us=self.step_us,
            gaps_us=gaps(events) / self.steps if gpu else 0.0,
            launches=on_a_gpu(events) if gpu else on_a_cpu(events),
        )

    def close(self) -> None:
        """End a profile that a run left open."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


def check(steps: int | None, left: int) -> None:
    """Raise :class:`WeftError` where a run with so many steps left cannot profile ``steps``."""
    if steps is not None and not 1 <= steps <= left - WARM:
        expected = f"1 or more, and {WARM} steps before them: at most {max(0, left - WARM)} here"
        raise WeftError("--profile", expected=expected, got=steps, hint="more --steps")


def on_a_gpu(events: Iterable[Any]) -> list[Launch]:
    """Every kernel of a profile. One whose operator is not known (our optimizer launches without
    one) has no names."""
    counts: Counter[Key] = Counter()
    times: defaultdict[Key, float] = defaultdict(float)
    whole: dict[str, list[float]] = {}
    for event in events:
        if _is_kernel(event):
            one = whole.setdefault(event.name, [0, 0.0])
            one[0] += 1
            one[1] += event.time_range.elapsed_us()
        for kernel in () if event.name in OVERHEADS else event.kernels:
            names, shapes = _place(event)
            counts[names, kernel.name, shapes] += 1
            times[names, kernel.name, shapes] += kernel.duration
    for (_, name, _), count in list(counts.items()):
        if name in whole:
            whole[name][0] -= count
    for key, us in times.items():
        if key[1] in whole:
            whole[key[1]][1] -= us
    for name, (more, us) in whole.items():
        if more > 0:
            counts[(), name, ()] = int(more)
            times[(), name, ()] = us
    return _launches(counts, times)


def on_a_cpu(events: Iterable[Any]) -> list[Launch]:
    """Every operator of a profile, by the time that it took itself."""
    counts: Counter[Key] = Counter()
    times: defaultdict[Key, float] = defaultdict(float)
    for event in events:
        names, shapes = _place(event)
        counts[names, "", shapes] += 1
        times[names, "", shapes] += event.self_cpu_time_total
    return _launches(counts, times)


def _launches(counts: Counter[Key], times: dict[tuple[Any, ...], float]) -> list[Launch]:
    return [
        Launch(names=n, kernel=k, shapes=s, count=count, us=times[n, k, s])
        for (n, k, s), count in counts.items()
    ]


def _place(event: Any) -> tuple[tuple[str, ...], Shapes]:
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
    return on_device and not event.is_user_annotation  # a range of a name, which holds kernels


def gaps(events: Iterable[Any]) -> float:
    """Microseconds between the first kernel and the last in which none ran."""
    spans = sorted((e.time_range.start, e.time_range.end) for e in events if _is_kernel(e))
    found, until = 0.0, spans[0][1] if spans else 0.0
    for begin, end in spans:
        found += max(0.0, begin - until)
        until = max(until, end)
    return found
