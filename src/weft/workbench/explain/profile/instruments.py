"""Three instruments that measure the same calls, and the schedule of the steps that they measure.

On a GPU each reports the device time of a call: two CUDA events around the calls of a step, queued behind
a spin so that no launch by the host lies between them; and the kernels, copies and fills of each profiler,
as the union of their spans within a step. On a CPU each reports the wall time of a step: by
``perf_counter_ns``, and by the span that each profiler recorded for the step.
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

from weft.core import WeftError
from weft.workbench.explain.profile.workload import Workload
from weft.workbench.timing.plan import TimingBackend

_now = time.perf_counter_ns
EVENTS, CLOCK = "CUDA events", "perf_counter_ns"
AUTOGRAD, TORCH = "torch.autograd.profiler", "torch.profiler"
STEP = "weft step"
_PROFILER_STEP = "ProfilerStep#"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
Span = tuple[float, float]  # start and end, us


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps of a profile: ``repeat`` cycles of ``wait``, ``warmup`` and ``active`` steps.

    A step is a rotation of calls over distinct inputs. No profiler runs in the ``wait`` steps. The
    profiler runs in the ``warmup`` steps, whose results are discarded, since it allocates its buffers in
    its first steps and slows them. The ``active`` steps are measured. Raises :class:`WeftError` if there
    is no active step.
    """

    wait: int = 1
    warmup: int = 2
    active: int = 5
    repeat: int = 2

    def __post_init__(self) -> None:
        # Without a warm-up step the profiler's start would slow the first active step.
        for name, minimum in (("wait", 0), ("warmup", 1), ("active", 1), ("repeat", 1)):
            if (value := getattr(self, name)) < minimum:
                raise WeftError(f"--{name}", expected=f"at least {minimum}", got=value)

    @property
    def cycle(self) -> int:
        return self.wait + self.warmup + self.active

    @property
    def skipped(self) -> int:
        """Steps at the start of a cycle that are not measured."""
        return self.wait + self.warmup

    @property
    def measured(self) -> int:
        """Measured steps of all cycles together."""
        return self.active * self.repeat

    def is_measured(self, step: int) -> bool:
        """Return True if the step, counted from 0 through all cycles, is measured.

        >>> [Schedule(wait=1, warmup=1, active=2).is_measured(i) for i in range(6)]
        [False, False, True, True, False, False]
        """
        return step % self.cycle >= self.skipped


QUICK = Schedule(wait=0, warmup=1, active=3, repeat=1)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Times of one instrument in us a call, one for each step.

    ``walls`` are the wall times of the same steps by our own clock, while the instrument observed them.
    ``reference`` are the times of the same steps by our own instrument: CUDA events, or that clock.
    """

    instrument: str
    samples: tuple[float, ...]
    walls: tuple[float, ...]
    reference: tuple[float, ...]

    @property
    def fastest(self) -> float:
        """Fastest step, which other work on the machine disturbed least."""
        return min(self.samples)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def wall(self) -> float:
        return min(self.walls)

    def __add__(self, later: Reading) -> Reading:
        """Return the reading of both attempts together."""
        return Reading(
            instrument=self.instrument,
            samples=self.samples + later.samples,
            walls=self.walls + later.walls,
            reference=self.reference + later.reference,
        )


@dataclass(frozen=True, kw_only=True)
class TracedCycle:
    """Chrome trace of the last cycle, and the us of each of its active steps by our own clock."""

    trace: dict[str, Any]
    walls_us: tuple[float, ...]


def measure_by_clock(workload: Workload, backend: TimingBackend, schedule: Schedule) -> Reading:
    """Measure by CUDA events on a GPU, by ``perf_counter_ns`` on a CPU; no profiler runs."""
    for _ in range(schedule.skipped):
        workload.step()
    # Wall times come from steps of their own: in those of `_event_times` the host also waits for the spin.
    walls = tuple(_time_step(workload)[0] / workload.calls for _ in range(schedule.measured))
    if workload.device == "cpu":
        return Reading(instrument=CLOCK, samples=walls, walls=walls, reference=walls)
    samples = _event_times(workload, backend, schedule.measured)
    return Reading(instrument=EVENTS, samples=samples, walls=walls, reference=samples)


def _time_step(workload: Workload) -> tuple[float, float]:
    """Run one step and return its wall time and the time between two CUDA events, us.

    On a CPU both are the wall time. No spin holds the GPU back here until all calls are queued, since a
    profiler would record it: the latency of the first launch, some 10 us a step, lies between the events.
    """
    if workload.device == "cpu":
        start = _now()
        workload.step()
        elapsed = (_now() - start) / 1000
        return elapsed, elapsed
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start = _now()
    before.record()
    workload.enqueue()
    after.record()
    # The wall time includes this wait: it ends when the device is done, as in `Workload.step`.
    after.synchronize()
    return (_now() - start) / 1000, before.elapsed_time(after) * 1000


def _event_times(workload: Workload, backend: Any, steps: int) -> tuple[float, ...]:
    """Return device times a call; a spin occupies the GPU until all calls of a step are queued."""
    from weft.workbench.timing.cuda import MAX_SPIN_CYCLES, SPIN_CYCLES

    spin, times = SPIN_CYCLES, []
    for _ in range(steps):
        us = backend.timed(lambda: None, workload.enqueue, spin)
        # A negative time means that the spin ended before the host had queued every call.
        while us < 0 and 2 * spin <= MAX_SPIN_CYCLES:
            spin *= 2
            us = backend.timed(lambda: None, workload.enqueue, spin)
        # A time that is negative at the longest spin too is used: it includes the host's launches.
        times.append(max(0.0, abs(us) - backend.plain_overhead) / workload.calls)
    return tuple(times)


def measure_by_autograd_profiler(workload: Workload, schedule: Schedule) -> Reading:
    """Measure by ``torch.autograd.profiler.profile``, from its list of events in memory."""
    silence_kineto()
    device = "cuda" if workload.device == "cuda" else None
    times = []
    with torch.autograd.profiler.profile(use_device=device, use_kineto=True) as profile:
        for _ in range(schedule.skipped + schedule.measured):
            with record_function(STEP):
                times.append(_time_step(workload))
    steps, on_device = profiler_spans(profile.function_events or [])
    # This profiler has no schedule, so the steps before the measured ones are cut off here.
    samples = _times_a_call(workload, steps, on_device)[schedule.skipped :]
    return _reading(AUTOGRAD, workload, samples, times[schedule.skipped :])


def _reading(
    name: str, workload: Workload, samples: tuple[float, ...], times: Sequence[tuple[float, float]]
) -> Reading:
    walls, reference = (tuple(us / workload.calls for us in each) for each in zip(*times, strict=True))
    return Reading(instrument=name, samples=samples, walls=walls, reference=reference)


def profiler_spans(events: Iterable[Any]) -> tuple[list[Span], list[Span]]:
    """Return the spans (us) of the steps, in order, and of the device's work from a profiler's events."""
    steps, on_device = [], []
    for event in events:
        if event.device_type == DeviceType.CPU:
            if event.name == STEP:
                steps.append(_span_of(event))
        # A user's range is listed a second time as the device saw it; that is no work.
        elif event.name != STEP and not getattr(event, "is_user_annotation", False):
            on_device.append(_span_of(event))
    return sorted(steps), on_device


def _span_of(event: Any) -> Span:
    return float(event.time_range.start), float(event.time_range.end)


def measure_by_torch_profiler(
    workload: Workload, schedule: Schedule, file: Path, *, python_frames: bool = False
) -> tuple[Reading, TracedCycle]:
    """Measure by ``torch.profiler.profile`` from the Chrome trace of each cycle.

    Each cycle's trace is written to ``file`` in turn; the last one stays there. With ``python_frames`` the
    trace has the Python functions of the calls too, and each call takes longer.
    """
    silence_kineto()
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU, *([activity.CUDA] if workload.device == "cuda" else [])]
    cycles: list[list[tuple[float, float]]] = [[] for _ in range(schedule.repeat)]
    samples: list[float] = []
    trace: dict[str, Any] = {}

    def read_trace(profile: Any) -> None:
        nonlocal trace
        profile.export_chrome_trace(str(file))
        # The next cycle overwrites the file, so each cycle is read at once.
        trace = json.loads(file.read_text())
        samples.extend(_times_a_call(workload, step_spans(trace), device_spans(trace)))

    plan = torch.profiler.schedule(
        wait=schedule.wait, warmup=schedule.warmup, active=schedule.active, repeat=schedule.repeat
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end")
        with torch.profiler.profile(
            activities=activities, schedule=plan, on_trace_ready=read_trace, with_stack=python_frames
        ) as profile:
            for step in range(schedule.cycle * schedule.repeat):
                times = _time_step(workload)
                if schedule.is_measured(step):
                    cycles[step // schedule.cycle].append(times)
                # After the clock: this call exports the trace of a cycle, which is no part of a step.
                profile.step()
    reading = _reading(TORCH, workload, tuple(samples), [step for cycle in cycles for step in cycle])
    return reading, TracedCycle(trace=trace, walls_us=tuple(wall for wall, _ in cycles[-1]))


def silence_kineto() -> None:
    """Stop the profiler's library from writing to stderr."""
    # The library reads the variable when it starts, so it must be set before the first profile.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def _complete_events(trace: dict[str, Any]) -> Iterable[dict[str, Any]]:
    return (e for e in trace.get("traceEvents", ()) if e.get("ph") == "X")


def step_spans(trace: dict[str, Any]) -> list[Span]:
    """Return the spans (us) of a trace's active steps, in order."""
    steps = (
        e
        for e in _complete_events(trace)
        if str(e["name"]).startswith(_PROFILER_STEP) and e.get("cat") == "user_annotation"
    )
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in steps)


def device_spans(trace: dict[str, Any]) -> list[Span]:
    """Return the spans (us) of a trace's kernels, copies and fills."""
    on_device = (e for e in _complete_events(trace) if e.get("cat") in ON_DEVICE)
    return [(e["ts"], e["ts"] + e["dur"]) for e in on_device]


def _times_a_call(workload: Workload, steps: Sequence[Span], on_device: Iterable[Span]) -> tuple[float, ...]:
    if workload.device == "cpu":
        return tuple((end - start) / workload.calls for start, end in steps)
    return tuple(us / workload.calls for us in busy_times(steps, on_device))


def busy_times(steps: Sequence[Span], on_device: Iterable[Span]) -> list[float]:
    """Return the time (us) that the device worked in each step.

    A kernel belongs to the last step that began before it, since a step ends when the device is done.
    Time in which several kernels run at once counts once.

    >>> busy_times([(0, 10), (20, 30)], [(1, 4), (3, 6), (21, 22), (25, 33)])
    [5.0, 9.0]
    """
    busy = [0.0] * len(steps)
    starts = [start for start, _ in steps]
    covered_until = float("-inf")
    for start, end in sorted(on_device):
        index = bisect_right(starts, start) - 1
        if index >= 0:
            # Spans are sorted by start: what lies before `covered_until` is counted already.
            busy[index] += max(0.0, end - max(start, covered_until))
        # Also for work before the first step: a kernel that overlaps it counts only from its end.
        covered_until = max(covered_until, end)
    return busy
