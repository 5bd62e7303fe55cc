"""Folded stacks of a trace: the share of each stack of operators in the wall time of the active steps.

A lane is a thread of the host, or a GPU. The root of every lane is the same wall time:

    self(stack) = time in which that stack, and no deeper one, was running
    sum of self over a lane = wall time, to the nanosecond

Lanes are not added up, since they ran at the same time. On a host thread operators nest. On a GPU a
kernel is placed beneath the operator that launched it, by the launch's correlation number; while several
streams run at once, the time is divided evenly between their kernels.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from weft.core.errors import WeftError
from weft.core.json_files import read_json
from weft.workbench.kernels.names import plain

Stack = tuple[str, ...]
HOST, DEVICE = "host", "device"
ROOT, NO_OPERATOR, IDLE = "wall time", "(no operator)", "(GPU idle)"
NO_LAUNCH = "(launch not seen)"

_STEP = "ProfilerStep#"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
# Marks of the profiler itself: the span of the whole trace, its overhead, and second copies of users'
# ranges and waits as the GPU saw them.
_NOT_WORK = ("Trace", "overhead", "gpu_user_annotation", "cuda_sync", "cuda_event")
_PYTHON = "python_function"  # category of the frames that torch.profiler records with with_stack
_WORKBENCH = re.compile(r"\bweft/workbench/\w[\w/]*\.py\(")
_ENQUEUE = re.compile(r"\bweft/workbench/explain/profile/workload\.py\(\d+\): enqueue$")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# ns. Times near 1e12 us in float64 are 0.1 to 1 ns apart, so a child may seem to end after its parent.
_SLACK = 3
MAX_TRACE_BYTES = 2 << 30


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Thread or GPU; ``stacks`` are the ns of each stack, without the root.

    ``outside`` is device time (ns) outside the active steps, such as kernels that still ran when the last
    step ended. ``shared`` is the time (ns) in which more than one stream worked.
    """

    name: str
    kind: str
    stacks: Mapping[Stack, int]
    outside: int = 0
    shared: int = 0

    @property
    def root(self) -> int:
        """Wall time in ns, the sum of all stacks."""
        return sum(self.stacks.values())

    def lines(self) -> list[str]:
        """Return folded stacks by name, ``wall time;aten::mm 1234`` in whole ns.

        speedscope and flamegraph.pl read this form.
        """
        merged = Counter[str]()
        for stack, ns in self.stacks.items():
            merged[";".join(_line(frame) for frame in (ROOT, *stack))] += ns
        return [f"{stack} {ns}" for stack, ns in sorted(merged.items()) if ns]


@dataclass(frozen=True, kw_only=True)
class Folded:
    """Lanes of a trace, the thread that ran the steps first; all are ``root_ns`` wide."""

    root_ns: int
    steps: int
    lanes: tuple[Lane, ...]

    @property
    def root_us(self) -> float:
        """Wall time of the active steps in microseconds."""
        return self.root_ns / 1e3

    def lane(self, name: str | None = None) -> Lane:
        """Return the lane of that name; by default the thread that ran the steps."""
        lane = next((x for x in self.lanes if name in (None, x.name)), None)
        if lane is None:
            names = ", ".join(x.name for x in self.lanes)
            raise WeftError("no such lane", expected=names, got=name)
        return lane

    def lines(self, name: str | None = None) -> list[str]:
        """Return one lane's folded stacks, in ns.

        A file has one lane only: together, lanes would be several times the wall time.
        """
        return self.lane(name).lines()


class _Event(NamedTuple):
    """Event with times in ns; ``order`` sorts events that start at once as the trace has them."""

    start: int
    negative_end: int  # of two events that start at once the longer one sorts first
    order: int
    name: str
    launch: Any = None

    @property
    def end(self) -> int:
        return -self.negative_end


@dataclass(frozen=True)
class _Steps:
    """Active steps, none overlapping; computes the part of a span that lies within them."""

    spans: list[tuple[int, int]]
    before: list[int] = field(init=False)  # ns of all earlier steps, for each step

    def __post_init__(self) -> None:
        sums = [0]
        for start, end in self.spans:
            sums.append(sums[-1] + end - start)
        object.__setattr__(self, "before", sums)

    def until(self, at: int) -> int:
        """Return the ns of the steps that have passed at the time ``at``."""
        index = bisect_right(self.spans, (at, at)) - 1
        # Before the first step: the limits below make it 0 ns.
        if index < 0:
            index = 0
        start, end = self.spans[index]
        return self.before[index] + min(max(at - start, 0), end - start)

    def within(self, start: int, end: int) -> int:
        return self.until(end) - self.until(start)


def load(file: Path) -> dict[str, Any]:
    """Load a Chrome trace from a file; raises :class:`WeftError` for any other content."""
    try:
        loaded = read_json(file, limit=MAX_TRACE_BYTES)
    except (OSError, ValueError) as error:
        raise WeftError("not a trace", expected="a Chrome trace in JSON", got=error) from error
    # Chrome's format also allows the list of events alone.
    return loaded if isinstance(loaded, dict) else {"traceEvents": loaded}


def fold(trace: Mapping[str, Any]) -> Folded:
    """Fold a Chrome trace, as torch.profiler writes it, into stacks.

    The wall time is the sum of the ``ProfilerStep#`` spans; without any, the span from the first event to
    the end of the last one. Raises :class:`WeftError` if no event has a duration.
    """
    complete = [e for e in trace.get("traceEvents", ()) if _usable(e)]
    steps = [e for e in complete if _is_step(e)]
    work = [e for e in complete if not _is_step(e)]
    if not complete:
        raise WeftError(
            "a trace with nothing in it",
            expected="events with ts and dur (ph X)",
            got=f"{len(trace.get('traceEvents', ()))} events, none with a duration",
        )
    spans = _union(map(_span, steps)) if steps else [_whole(work)]
    active = _Steps(spans)
    if not (wall := active.before[-1]):
        raise WeftError("a trace that takes no time", expected="spans longer than 0", got=spans)
    host: dict[tuple[Any, Any], list[_Event]] = defaultdict(list)
    for order, event in enumerate(work):
        if event.get("cat") not in _ON_DEVICE:
            host[event["pid"], event["tid"]].append(_event(event, order))
    main = (steps[0]["pid"], steps[0]["tid"]) if steps else None
    if main is not None:
        host[main] += []  # a thread whose steps ran no operator still has a lane, all of it idle
    launches: dict[Any, Stack] = {}
    lanes = []
    for thread, events in host.items():
        self_ns = _thread_stacks(events, active, launches)
        # The rest of the wall time, so that the stacks of every lane add up to the same root.
        self_ns[(NO_OPERATOR,)] += wall - self_ns.total()
        lanes.append((thread != main, self_ns[(NO_OPERATOR,)], thread, self_ns))
    # The thread of the steps first, then the busiest. Ids are not compared: they may be numbers or text.
    lanes.sort(key=lambda lane: lane[:2])
    titles = _thread_names(trace)
    folded = [
        Lane(name=_title(i, titles.get(thread, "")), kind=HOST, stacks=_positive(self_ns))
        for i, (_, _, thread, self_ns) in enumerate(lanes)
        # A thread that ran nothing within the steps has no lane.
        if i == 0 or self_ns[(NO_OPERATOR,)] < wall
    ]
    folded += _device_lanes(work, active, wall, launches)
    return Folded(root_ns=wall, steps=len(steps), lanes=tuple(folded))


def without_own_frames(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trace without the Python frames of Weft's own measuring, and without objects' addresses.

    On the thread that ran the steps only frames inside :meth:`Workload.enqueue` are of the calls; the others
    belong to the profiler and to the loop around it. Another thread counts if it ran an operator or launched
    a kernel, as autograd's does. Without its address a method is one frame, not one for each object.
    """
    events = list(trace.get("traceEvents", ()))
    main = {(e.get("pid"), e.get("tid")) for e in events if _is_step(e) and e.get("ph") == "X"}
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if _ENQUEUE.search(str(e.get("name"))))
    starts = [start for start, _ in spans]
    working = {(e.get("pid"), e.get("tid")) for e in events if e.get("cat") in ("cpu_op", *_LAUNCHES)}

    def is_of_a_call(event: Mapping[str, Any]) -> bool:
        thread = (event.get("pid"), event.get("tid"))
        if thread not in main:
            return thread in working
        index = bisect_right(starts, event["ts"]) - 1
        return index >= 0 and event["ts"] + event["dur"] <= spans[index][1]

    shown = []
    for event in events:
        if event.get("cat") == _PYTHON:
            if _WORKBENCH.search(event["name"]) or not is_of_a_call(event):
                continue
            event = event | {"name": _ADDRESS.sub("", event["name"])}
        shown.append(event)
    return {**trace, "traceEvents": shown}


def _usable(event: Mapping[str, Any]) -> bool:
    timed = event.get("ph") == "X" and event.get("cat") not in _NOT_WORK
    complete = {"ts", "dur", "pid", "tid", "name"} <= event.keys()
    return timed and complete and event["dur"] >= 0


def _is_step(event: Mapping[str, Any]) -> bool:
    return str(event.get("name")).startswith(_STEP)


def _span(event: Mapping[str, Any]) -> tuple[int, int]:
    # Whole ns from here on: sums of integers are exact, so a lane adds up to its root.
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


def _whole(events: list[Mapping[str, Any]]) -> tuple[int, int]:
    spans = [_span(e) for e in events]
    return min(s for s, _ in spans), max(e for _, e in spans)


def _union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _event(event: Mapping[str, Any], order: int) -> _Event:
    start, end = _span(event)
    launch = event.get("args", {}).get("correlation") if event.get("cat") in _LAUNCHES else None
    return _Event(start, -end, order, str(event["name"]), launch)


def _thread_stacks(events: list[_Event], active: _Steps, launches: dict[Any, Stack]) -> Counter[Stack]:
    """Return the self time (ns, within the steps) of each stack of a thread.

    The stack above each launch is added to ``launches``. Ranges that only overlap are no stack: an event
    that outlasts its parent is cut at the parent's end, and its rest continues under the next one.
    """
    self_ns: Counter[Stack] = Counter()
    # Open events with their ends, the innermost last.
    open_events: list[tuple[int, Stack]] = []
    now = 0
    heapq.heapify(queue := list(events))
    while queue or open_events:
        upcoming = queue[0].start if queue else None
        # An event that ends when the next one begins is closed first, or the next would become its child.
        if open_events and (upcoming is None or open_events[-1][0] <= upcoming):
            end, stack = open_events.pop()
            self_ns[stack] += active.within(now, end)
            now = end
            continue
        event = heapq.heappop(queue)
        above = open_events[-1][1] if open_events else ()
        if above:
            self_ns[above] += active.within(now, event.start)
        now, end = event.start, event.end
        if open_events and end > open_events[-1][0]:
            end = open_events[-1][0]
            # The rest of the event goes back into the queue, unless it is a rounding error.
            if event.end - end > _SLACK:
                heapq.heappush(queue, event._replace(start=end))
        if event.launch is not None:
            # The rest of an event that was cut comes here again, beneath another stack: keep the first.
            launches.setdefault(event.launch, above)
        open_events.append((end, (*above, event.name)))
    return self_ns


def _device_lanes(
    work: list[dict[str, Any]], active: _Steps, wall: int, launches: Mapping[Any, Stack]
) -> list[Lane]:
    """Return one lane a GPU: its kernels beneath the operators that launched them, else idle."""
    runs: dict[Any, list[tuple[int, int, Stack]]] = defaultdict(list)
    for event in work:
        if event.get("cat") in _ON_DEVICE:
            args = event.get("args", {})
            above = launches.get(args.get("correlation"), (NO_LAUNCH,))
            stack = (*above, plain(str(event["name"])))
            runs[args.get("device", event["pid"])].append((*_span(event), stack))
    lanes = []
    for device in sorted(runs, key=str):
        device_ns, shared = _divide_time(runs[device], active)
        busy = sum(end - start for start, end in _union((s, e) for s, e, _ in runs[device]))
        outside = busy - device_ns.total()
        device_ns[(IDLE,)] += wall - device_ns.total()
        lane = Lane(
            name=f"GPU {device}",
            kind=DEVICE,
            stacks=_positive(device_ns),
            outside=outside,
            shared=shared,
        )
        lanes.append(lane)
    return lanes


def _divide_time(runs: list[tuple[int, int, Stack]], active: _Steps) -> tuple[Counter[Stack], int]:
    """Return the time (ns, within the steps) of each stack, and the time in which several ran at once.

    Time in which several stacks ran is divided evenly between them.
    """
    # At one time ends (0) sort before begins (1). A span of no length is left out, since its end would
    # come first and remove what is not yet in `running`.
    edges = sorted(
        edge for i, (start, end, _) in enumerate(runs) for edge in ((start, 1, i), (end, 0, i)) if end > start
    )
    divided: Counter[Stack] = Counter()
    running: list[int] = []
    shared = now = 0
    for at, begins, index in edges:
        if running and (passed := active.within(now, at)):
            each, remainder = divmod(passed, len(running))
            for i, run in enumerate(running):  # the first ones take the remainder, so that no ns is lost
                divided[runs[run][2]] += each + (i < remainder)
            shared += passed if len(running) > 1 else 0
        now = at
        if begins:
            running.append(index)
        else:
            running.remove(index)
    return divided, shared


def _thread_names(trace: Mapping[str, Any]) -> dict[tuple[Any, Any], str]:
    """Return the trace's name of each thread."""
    named = (e for e in trace.get("traceEvents", ()) if e.get("name") == "thread_name")
    return {(e.get("pid"), e.get("tid")): str(e.get("args", {}).get("name", "")) for e in named}


def _title(index: int, thread_name: str) -> str:
    label = thread_name.split("(")[-1].rstrip(")") if "(" in thread_name else ""
    return HOST if index == 0 else f"{HOST} {index + 1}" + (f" ({label})" if label else "")


def _positive(stacks: Mapping[Stack, int]) -> dict[Stack, int]:
    return {stack: ns for stack, ns in stacks.items() if ns > 0}


def _line(frame: str) -> str:
    """Return a frame's name for a folded line, where ``;`` separates frames and a newline ends a stack."""
    return " ".join(frame.replace(";", ",").split()) or "?"
