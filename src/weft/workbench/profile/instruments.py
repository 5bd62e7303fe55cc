"""Three instruments on the same calls, each with its own way of knowing how long a call took.

On a GPU all of them say how long the device was at work for a call: two CUDA events around the
calls of a step, queued behind a spin so that no launch of the host lies between them; and each
profiler's kernels, copies and fills, the union of their spans within a step. On a CPU all of them
say how long a step lasted on the wall: ``perf_counter_ns``, and the span that each profiler
recorded for the step.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler import record_function

from weft.workbench.plan import Stand
from weft.workbench.profile.schedule import Schedule
from weft.workbench.profile.work import Work

_now = time.perf_counter_ns
EVENTS, CLOCK = "CUDA events", "perf_counter_ns"
AUTOGRAD, TORCH = "torch.autograd.profiler", "torch.profiler"
STEP = "weft step"
_PROFILER_STEP = "ProfilerStep#"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
Span = tuple[float, float]  # us


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one instrument said: us a call, one for each step; ``walls`` is the time on the wall of
    those steps, us a call, by our own clock while that instrument looked on. ``beside`` is what our
    own instrument for ``samples`` said of the very same steps: CUDA events, or that clock."""

    instrument: str
    samples: tuple[float, ...]
    walls: tuple[float, ...]
    beside: tuple[float, ...]

    @property
    def least(self) -> float:
        """The fastest step: what nothing else on the machine disturbed."""
        return min(self.samples)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def wall(self) -> float:
        return min(self.walls)

    def with_more(self, more: Reading) -> Reading:
        return Reading(
            instrument=self.instrument,
            samples=self.samples + more.samples,
            walls=self.walls + more.walls,
            beside=self.beside + more.beside,
        )


@dataclass(frozen=True, kw_only=True)
class Traced:
    """The Chrome trace of the last cycle, and our own clock's us of each of its active steps."""

    trace: dict[str, Any]
    walls_us: tuple[float, ...]


def by_clock(work: Work, stand: Stand, schedule: Schedule) -> Reading:
    """CUDA events on a GPU, ``perf_counter_ns`` on a CPU; no profiler runs."""
    for _ in range(schedule.before):
        work.step()
    walls = tuple(_timed(work)[0] / work.calls for _ in range(schedule.kept))
    if work.device == "cpu":
        return Reading(instrument=CLOCK, samples=walls, walls=walls, beside=walls)
    samples = _by_events(work, stand, schedule.kept)
    return Reading(instrument=EVENTS, samples=samples, walls=walls, beside=samples)


def _timed(work: Work) -> tuple[float, float]:
    """One step on the wall, us; and between two CUDA events around its calls, on a CPU the same.

    Nothing holds the GPU back here until all calls are queued, as a spin would: a profiler would
    see it. So the first launch's way to the GPU, some 10 us a step, is between these events.
    """
    if work.device == "cpu":
        start = _now()
        work.step()
        spent = (_now() - start) / 1000
        return spent, spent
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start = _now()
    before.record()
    work.enqueue()
    after.record()
    after.synchronize()
    return (_now() - start) / 1000, before.elapsed_time(after) * 1000


def _by_events(work: Work, stand: Any, steps: int) -> tuple[float, ...]:
    """Device time a call, the GPU kept busy by a spin until all of a step's calls are queued."""
    from weft.workbench.clock_cuda import LONGEST_SPIN, SPIN

    spin, found = SPIN, []
    for _ in range(steps):
        us = stand.timed(lambda: None, work.enqueue, spin)
        while us < 0 and 2 * spin <= LONGEST_SPIN:
            spin *= 2
            us = stand.timed(lambda: None, work.enqueue, spin)
        found.append(max(0.0, abs(us) - stand.plain_overhead) / work.calls)
    return tuple(found)


def by_autograd_profiler(work: Work, schedule: Schedule) -> Reading:
    """``torch.autograd.profiler.profile``, from its list of events in memory."""
    quiet()
    device = "cuda" if work.device == "cuda" else None
    spent = []
    with torch.autograd.profiler.profile(use_device=device, use_kineto=True) as profile:
        for _ in range(schedule.before + schedule.kept):
            with record_function(STEP):
                spent.append(_timed(work))
    steps, on_device = parts(profile.function_events or [])
    samples = _a_call(work, steps, on_device)[schedule.before :]
    return _reading(AUTOGRAD, work, samples, spent[schedule.before :])


def _reading(
    name: str, work: Work, samples: tuple[float, ...], spent: Sequence[tuple[float, float]]
) -> Reading:
    walls, beside = (tuple(us / work.calls for us in each) for each in zip(*spent, strict=True))
    return Reading(instrument=name, samples=samples, walls=walls, beside=beside)


def parts(events: Iterable[Any]) -> tuple[list[Span], list[Span]]:
    """The spans (us) of the steps, in order, and of what the device did, out of a profiler's list.

    A range stands in it once more as the device saw it; that is no work.
    """
    steps, on_device = [], []
    for event in events:
        if event.device_type == DeviceType.CPU:
            if event.name == STEP:
                steps.append(_span_of(event))
        elif event.name != STEP and not getattr(event, "is_user_annotation", False):
            on_device.append(_span_of(event))
    return sorted(steps), on_device


def _span_of(event: Any) -> Span:
    return float(event.time_range.start), float(event.time_range.end)


def by_torch_profiler(work: Work, schedule: Schedule, file: Path) -> tuple[Reading, Traced]:
    """``torch.profiler.profile`` by the schedule, from the Chrome traces that it writes to
    ``file``, one after the other; the last cycle's stays there."""
    quiet()
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU, *([activity.CUDA] if work.device == "cuda" else [])]
    cycles: list[list[tuple[float, float]]] = [[] for _ in range(schedule.repeat)]
    samples: list[float] = []
    trace: dict[str, Any] = {}

    def ready(profile: Any) -> None:
        nonlocal trace
        profile.export_chrome_trace(str(file))
        trace = json.loads(file.read_text())
        samples.extend(_a_call(work, steps_in(trace), device_spans(trace)))

    plan = torch.profiler.schedule(
        wait=schedule.wait, warmup=schedule.warmup, active=schedule.active, repeat=schedule.repeat
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end")
        with torch.profiler.profile(
            activities=activities, schedule=plan, on_trace_ready=ready
        ) as profile:
            for step in range(schedule.cycle * schedule.repeat):
                spent = _timed(work)
                if schedule.is_kept(step):
                    cycles[step // schedule.cycle].append(spent)
                profile.step()
    reading = _reading(TORCH, work, tuple(samples), [step for cycle in cycles for step in cycle])
    return reading, Traced(trace=trace, walls_us=tuple(wall for wall, _ in cycles[-1]))


def quiet() -> None:
    """Keep the profiler's library from writing to stderr of itself."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def _complete(trace: dict[str, Any]) -> Iterable[dict[str, Any]]:
    return (e for e in trace.get("traceEvents", ()) if e.get("ph") == "X")


def steps_in(trace: dict[str, Any]) -> list[Span]:
    """The spans (us) of a trace's active steps, in order."""
    found = (
        e
        for e in _complete(trace)
        if str(e["name"]).startswith(_PROFILER_STEP) and e.get("cat") == "user_annotation"
    )
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in found)


def device_spans(trace: dict[str, Any]) -> list[Span]:
    """The spans (us) of a trace's kernels, copies and fills."""
    found = (e for e in _complete(trace) if e.get("cat") in ON_DEVICE)
    return [(e["ts"], e["ts"] + e["dur"]) for e in found]


def _a_call(work: Work, steps: Sequence[Span], on_device: Iterable[Span]) -> tuple[float, ...]:
    if work.device == "cpu":
        return tuple((end - start) / work.calls for start, end in steps)
    return tuple(us / work.calls for us in busy(steps, on_device))


def busy(steps: Sequence[Span], on_device: Iterable[Span]) -> list[float]:
    """For how long (us) the device was at work in each step.

    A kernel belongs to the last step that began before it: a step ends when the device is done.
    Where several run at once, the time counts once.

    >>> busy([(0, 10), (20, 30)], [(1, 4), (3, 6), (21, 22), (25, 33)])
    [5.0, 9.0]
    """
    found = [0.0] * len(steps)
    starts = [start for start, _ in steps]
    until = float("-inf")
    for start, end in sorted(on_device):
        index = bisect_right(starts, start) - 1
        if index >= 0:
            found[index] += max(0.0, end - max(start, until))
        until = max(until, end)
    return found
