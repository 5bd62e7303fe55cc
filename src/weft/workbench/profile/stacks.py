"""A trace folded into stacks: of the wall time of the active steps, who held how much of it.

Each lane is one thing that works by itself: a thread of the host, or a GPU. Every lane's root is
the same wall time, and what ran in a lane is never wider than it:

    self(stack) = the time for which that stack, and nothing above it, was at work
    sum of self over a lane = wall time, to the nanosecond

Lanes are not added up, since they ran at the same time. On a host thread operators nest. On a GPU a
kernel stands beneath the operator that launched it, which the launch's correlation number tells;
where several streams ran at once, the time is shared evenly between what ran.
"""

from __future__ import annotations

import heapq
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from weft.core.errors import WeftError
from weft.workbench.kernel_names import plain

Stack = tuple[str, ...]
HOST, DEVICE = "host", "device"
ROOT, NO_OPERATOR, IDLE = "wall time", "(no operator)", "(GPU idle)"
NO_LAUNCH = "(launch not seen)"

_STEP = "ProfilerStep#"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
# A profiler's own marks: the span of the whole trace, its overhead, and what is seen once more from
# the GPU, as users' ranges and waiting are.
_NOT_WORK = ("Trace", "overhead", "gpu_user_annotation", "cuda_sync", "cuda_event")
# Times of 1e12 us in float64 are 1 ns apart, so a child may seem to end so much past its parent.
_SLACK = 3


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One thread or one GPU. ``stacks``: ns by stack beneath the root, which is left out of it.

    ``outside`` is device time (ns) that no active step holds, such as what was still running as the
    last one ended. ``shared`` is how long (ns) more than one stream was at work.
    """

    name: str
    kind: str
    stacks: Mapping[Stack, int]
    outside: int = 0
    shared: int = 0

    @property
    def root(self) -> int:
        """The wall time, ns: the sum of all stacks."""
        return sum(self.stacks.values())

    def lines(self) -> list[str]:
        """Folded stacks, ``wall time;aten::mm 1234`` in whole ns, as speedscope and flamegraph.pl
        read them; in order of their names."""
        told = Counter[str]()
        for stack, ns in self.stacks.items():
            told[";".join(_line(frame) for frame in (ROOT, *stack))] += ns
        return [f"{stack} {ns}" for stack, ns in sorted(told.items()) if ns]


@dataclass(frozen=True, kw_only=True)
class Folded:
    """The lanes of a trace, the thread that ran the steps first; all as wide as ``root_ns``."""

    root_ns: int
    steps: int
    lanes: tuple[Lane, ...]

    @property
    def root_us(self) -> float:
        """The wall time of the active steps in microseconds."""
        return self.root_ns / 1e3

    def lane(self, name: str | None = None) -> Lane:
        """The lane of that name; by default the thread that ran the steps."""
        found = next((x for x in self.lanes if name in (None, x.name)), None)
        if found is None:
            names = ", ".join(x.name for x in self.lanes)
            raise WeftError("no such lane", expected=names, got=name)
        return found

    def lines(self, name: str | None = None) -> list[str]:
        """One lane's folded stacks, in ns. A file holds one lane: added up, lanes would be several
        times the wall time."""
        return self.lane(name).lines()


class _Event(NamedTuple):
    """Times in ns. ``order`` keeps those that start at once in the trace's order."""

    start: int
    longest: int  # minus the end, so that of two that start at once the longer one comes first
    order: int
    name: str
    launch: Any = None

    @property
    def end(self) -> int:
        return -self.longest


@dataclass(frozen=True)
class _Steps:
    """The active steps, none overlapping: what of a span lies within them."""

    spans: list[tuple[int, int]]
    before: list[int] = field(init=False)  # ns of steps before each

    def __post_init__(self) -> None:
        sums = [0]
        for start, end in self.spans:
            sums.append(sums[-1] + end - start)
        object.__setattr__(self, "before", sums)

    def until(self, at: int) -> int:
        """How much of the steps has passed at ``at``, ns."""
        index = bisect_right(self.spans, (at, at)) - 1
        if index < 0:
            index = 0
        start, end = self.spans[index]
        return self.before[index] + min(max(at - start, 0), end - start)

    def within(self, start: int, end: int) -> int:
        return self.until(end) - self.until(start)


def load(file: Path) -> dict[str, Any]:
    """A Chrome trace from its file. Raises :class:`WeftError` where it is none."""
    try:
        loaded = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise WeftError("not a trace", expected="a Chrome trace in JSON", got=error) from error
    return loaded if isinstance(loaded, dict) else {"traceEvents": loaded}


def fold(trace: Mapping[str, Any]) -> Folded:
    """The stacks of a Chrome trace, as torch.profiler writes it.

    The wall time is the sum of the ``ProfilerStep#`` spans; where there are none, the span from the
    first event to the last one's end. Raises :class:`WeftError` where nothing has a time.
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
        host[main] += []  # a step with no operator in it is a lane too: all its time is idle
    launches: dict[Any, Stack] = {}
    lanes = []
    for thread, events in host.items():
        held = _walk(events, active, launches)
        held[(NO_OPERATOR,)] += wall - held.total()
        lanes.append((thread != main, held[(NO_OPERATOR,)], thread, held))
    lanes.sort(key=lambda lane: lane[:2])
    titles = _threads(trace)
    found = [
        Lane(name=_title(i, titles.get(thread, "")), kind=HOST, stacks=_positive(held))
        for i, (_, _, thread, held) in enumerate(lanes)
        if i == 0 or held[(NO_OPERATOR,)] < wall
    ]
    found += _devices(work, active, wall, launches)
    return Folded(root_ns=wall, steps=len(steps), lanes=tuple(found))


def _usable(event: Mapping[str, Any]) -> bool:
    timed = event.get("ph") == "X" and event.get("cat") not in _NOT_WORK
    whole = {"ts", "dur", "pid", "tid", "name"} <= event.keys()
    return timed and whole and event["dur"] >= 0


def _is_step(event: Mapping[str, Any]) -> bool:
    return str(event["name"]).startswith(_STEP)


def _span(event: Mapping[str, Any]) -> tuple[int, int]:
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


def _whole(events: list[Mapping[str, Any]]) -> tuple[int, int]:
    spans = [_span(e) for e in events]
    return min(s for s, _ in spans), max(e for _, e in spans)


def _union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _event(event: Mapping[str, Any], order: int) -> _Event:
    start, end = _span(event)
    launch = event.get("args", {}).get("correlation") if event.get("cat") in _LAUNCHES else None
    return _Event(start, -end, order, str(event["name"]), launch)


def _walk(events: list[_Event], active: _Steps, launches: dict[Any, Stack]) -> Counter[Stack]:
    """Self time (ns, within the steps) of each stack of a thread; ``launches`` learns which stack
    stood above each launch.

    An event that outlasts the one it started in is cut at that one's end, and goes on beneath what
    stands then: ranges that only overlap are no stack.
    """
    held: Counter[Stack] = Counter()
    standing: list[tuple[int, Stack]] = []
    now = 0
    heapq.heapify(queue := list(events))
    while queue or standing:
        upcoming = queue[0].start if queue else None
        if standing and (upcoming is None or standing[-1][0] <= upcoming):
            end, stack = standing.pop()
            held[stack] += active.within(now, end)
            now = end
            continue
        event = heapq.heappop(queue)
        above = standing[-1][1] if standing else ()
        if above:
            held[above] += active.within(now, event.start)
        now, end = event.start, event.end
        if standing and end > standing[-1][0]:
            end = standing[-1][0]
            if event.end - end > _SLACK:
                heapq.heappush(queue, event._replace(start=end))
        if event.launch is not None:
            launches.setdefault(event.launch, above)
        standing.append((end, (*above, event.name)))
    return held


def _devices(
    work: list[dict[str, Any]], active: _Steps, wall: int, launches: Mapping[Any, Stack]
) -> list[Lane]:
    """One lane a GPU: its kernels beneath what launched them, idle for the rest."""
    runs: dict[Any, list[tuple[int, int, Stack]]] = defaultdict(list)
    for event in work:
        if event.get("cat") in _ON_DEVICE:
            args = event.get("args", {})
            above = launches.get(args.get("correlation"), (NO_LAUNCH,))
            stack = (*above, plain(str(event["name"])))
            runs[args.get("device", event["pid"])].append((*_span(event), stack))
    lanes = []
    for device in sorted(runs, key=str):
        held, shared = _sweep(runs[device], active)
        busy = sum(end - start for start, end in _union((s, e) for s, e, _ in runs[device]))
        outside = busy - held.total()
        held[(IDLE,)] += wall - held.total()
        lane = Lane(
            name=f"GPU {device}",
            kind=DEVICE,
            stacks=_positive(held),
            outside=outside,
            shared=shared,
        )
        lanes.append(lane)
    return lanes


def _sweep(runs: list[tuple[int, int, Stack]], active: _Steps) -> tuple[Counter[Stack], int]:
    """Time (ns, within the steps) of each stack, shared evenly where several run at once; and how
    long several did."""
    edges = sorted(
        edge
        for i, (start, end, _) in enumerate(runs)
        for edge in ((start, 1, i), (end, 0, i))
        if end > start
    )
    held: Counter[Stack] = Counter()
    at_work: list[int] = []
    shared = now = 0
    for at, begins, index in edges:
        if at_work and (passed := active.within(now, at)):
            each, left = divmod(passed, len(at_work))
            for place, run in enumerate(at_work):  # the ns that do not divide go to the first ones
                held[runs[run][2]] += each + (place < left)
            shared += passed if len(at_work) > 1 else 0
        now = at
        if begins:
            at_work.append(index)
        else:
            at_work.remove(index)
    return held, shared


def _threads(trace: Mapping[str, Any]) -> dict[tuple[Any, Any], str]:
    """What the trace calls each thread."""
    named = (e for e in trace.get("traceEvents", ()) if e.get("name") == "thread_name")
    return {(e.get("pid"), e.get("tid")): str(e.get("args", {}).get("name", "")) for e in named}


def _title(index: int, said: str) -> str:
    told = said.split("(")[-1].rstrip(")") if "(" in said else ""
    return HOST if index == 0 else f"{HOST} {index + 1}" + (f" ({told})" if told else "")


def _positive(held: Mapping[Stack, int]) -> dict[Stack, int]:
    return {stack: ns for stack, ns in held.items() if ns > 0}


def _line(frame: str) -> str:
    """A frame's name in a folded line, where ``;`` parts frames and a line ends a stack."""
    return " ".join(frame.replace(";", ",").split()) or "?"
