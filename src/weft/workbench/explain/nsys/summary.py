"""Summary of an export: kernels, idle time of each device, copies, and NVTX ranges with their kernels.

A *gap* is time between the first and the last work of a device in which it runs no kernel, copy or fill. The
*launch latency* of a kernel is the time from the start of the API call that launched it to its own start; it
includes the time that earlier work of the stream takes, unless the device was idle at the call.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.workbench.explain.nsys.export import COPY, KERNEL, ApiCall, Export, Range, Work
from weft.workbench.kernels.names import decode

FORMAT = "weft nsys 1"
Launch = tuple[int, int]  # process and correlation number


def _median(values: Sequence[int]) -> float | None:
    """Return the median of ns in us; None of no values."""
    return statistics.median(values) / 1e3 if values else None


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """All launches of one kernel. Times are in us.

    ``gap_us`` is the median time for which the device was idle before it, ``latency_us`` its median launch
    latency; None if no call is known.
    """

    name: str
    short: str
    count: int
    total_us: float
    median_us: float
    share: float
    gap_us: float | None
    latency_us: float | None


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """Use of one device between the start of its first and the end of its last work, in us.

    ``after`` and ``before`` name the work on both sides of the longest gap.
    """

    device: int
    span_us: float
    busy_us: float
    gaps: int
    median_gap_us: float | None
    longest_gap_us: float | None
    after: str
    before: str

    @property
    def busy(self) -> float:
        return self.busy_us / self.span_us if self.span_us else 1.0


@dataclass(frozen=True, kw_only=True)
class CopyRow:
    """All copies of one direction between the same kinds of memory; ``rate`` is bytes a second."""

    direction: str
    source: str
    target: str
    count: int
    nbytes: int
    total_us: float
    median_us: float
    rate: float | None


@dataclass(frozen=True, kw_only=True)
class InnerKernel:
    """Launches of one kernel from inside the ranges of one name."""

    short: str
    count: int
    us: float


@dataclass(frozen=True, kw_only=True)
class RangeRow:
    """All ranges of one name: their time on the host, and the kernels that were launched inside, in us.

    ``inner`` are these kernels, the longest first; ranges inside count for the outer ones too.
    """

    name: str
    count: int
    total_us: float
    median_us: float
    kernels: int
    kernel_us: float
    inner: tuple[InnerKernel, ...]


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Launch latency: its median over all launches of kernels, and over those that found the device idle."""

    launches: int
    median_us: float | None
    idle_launches: int
    idle_median_us: float | None
    unmatched: int  # kernels whose API call is not in the export


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Content of an export in numbers; every table is sorted by time, the longest first."""

    kernels: tuple[KernelRow, ...]
    devices: tuple[DeviceRow, ...]
    copies: tuple[CopyRow, ...]
    ranges: tuple[RangeRow, ...]
    latency: Latency
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"format": FORMAT, **asdict(self)}


def summarise(export: Export) -> Summary:
    """Summarise an export."""
    gaps = idle_before(export.work)
    calls = launching_calls(export.calls)
    latencies, idle_latencies = _latencies(export.work, calls)
    return Summary(
        kernels=tuple(_kernel_rows(export.kernels, gaps, latencies)),
        devices=tuple(_device_rows(export.work)),
        copies=tuple(_copy_rows(export.work)),
        ranges=tuple(_range_rows(export, calls)),
        latency=Latency(
            launches=len(latencies),
            median_us=_median(list(latencies.values())),
            idle_launches=len(idle_latencies),
            idle_median_us=_median(idle_latencies),
            unmatched=sum((w.process, w.correlation) not in calls for w in export.kernels),
        ),
        notes=tuple(_notes(export)),
    )


def launching_calls(calls: Iterable[ApiCall]) -> dict[Launch, ApiCall]:
    """Return each call by its process and correlation number; the earliest of several."""
    by_launch: dict[Launch, ApiCall] = {}
    for call in sorted(calls):
        by_launch.setdefault((call.process, call.correlation), call)
    return by_launch


def idle_before(work: Sequence[Work]) -> dict[Work, int]:
    """Return the ns for which its device was idle before each work; not for a device's first."""
    idle: dict[Work, int] = {}
    busy_until: dict[int, int] = {}
    for item in sorted(work):
        if item.device in busy_until:
            idle[item] = max(0, item.start - busy_until[item.device])
        busy_until[item.device] = max(item.end, busy_until.get(item.device, item.end))
    return idle


def _latencies(work: Sequence[Work], calls: Mapping[Launch, ApiCall]) -> tuple[dict[Work, int], list[int]]:
    """Return the latency (ns) of each launch of a kernel, and the latencies of those onto an idle device.

    A CUDA graph's kernels share one call: only the first of them waits for it.
    """
    latencies: dict[Work, int] = {}
    on_idle: list[int] = []
    launched: set[Launch] = set()
    busy_until: dict[int, int] = {}
    for item in sorted(work):
        key = (item.process, item.correlation)
        call = calls.get(key)
        if item.kind == KERNEL and call is not None and key not in launched:
            latencies[item] = item.start - call.start
            if busy_until.get(item.device, call.start) <= call.start:
                on_idle.append(item.start - call.start)
        launched.add(key)
        busy_until[item.device] = max(item.end, busy_until.get(item.device, item.end))
    return latencies, on_idle


def _kernel_rows(
    kernels: Sequence[Work], gaps: Mapping[Work, int], latencies: Mapping[Work, int]
) -> list[KernelRow]:
    by_name: dict[str, list[Work]] = defaultdict(list)
    for kernel in kernels:
        by_name[kernel.name].append(kernel)
    total = sum(k.end - k.start for k in kernels)
    rows = []
    for name, launches in by_name.items():
        times = [k.end - k.start for k in launches]
        rows.append(
            KernelRow(
                name=name,
                short=decode(name).short,
                count=len(times),
                total_us=sum(times) / 1e3,
                median_us=statistics.median(times) / 1e3,
                share=sum(times) / total if total else 0.0,
                gap_us=_median([gaps[k] for k in launches if k in gaps]),
                latency_us=_median([latencies[k] for k in launches if k in latencies]),
            )
        )
    return sorted(rows, key=lambda row: -row.total_us)


def _device_rows(work: Sequence[Work]) -> Iterator[DeviceRow]:
    for device in sorted({w.device for w in work}):
        items = sorted(w for w in work if w.device == device)
        busy_until, busy, last = items[0].start, 0, items[0]
        gaps: list[tuple[int, str, str]] = []
        for item in items:
            if item.start > busy_until:
                gaps.append((item.start - busy_until, last.name, item.name))
            # Time in which several streams work counts once.
            busy += max(0, item.end - max(item.start, busy_until))
            if item.end >= busy_until:
                busy_until, last = item.end, item
        longest = max(gaps, default=None)
        yield DeviceRow(
            device=device,
            span_us=(busy_until - items[0].start) / 1e3,
            busy_us=busy / 1e3,
            gaps=len(gaps),
            median_gap_us=_median([ns for ns, _, _ in gaps]),
            longest_gap_us=longest[0] / 1e3 if longest else None,
            after=decode(longest[1]).short if longest else "",
            before=decode(longest[2]).short if longest else "",
        )


def _copy_rows(work: Sequence[Work]) -> list[CopyRow]:
    groups: dict[tuple[str, str, str], list[Work]] = defaultdict(list)
    for item in work:
        if item.kind == COPY:
            groups[item.name, item.source, item.target].append(item)
    rows = []
    for (direction, source, target), copies in groups.items():
        times = [c.end - c.start for c in copies]
        nbytes = sum(c.nbytes for c in copies)
        rows.append(
            CopyRow(
                direction=direction,
                source=source,
                target=target,
                count=len(copies),
                nbytes=nbytes,
                total_us=sum(times) / 1e3,
                median_us=statistics.median(times) / 1e3,
                rate=nbytes / sum(times) * 1e9 if sum(times) else None,
            )
        )
    return sorted(rows, key=lambda row: -row.total_us)


def _range_rows(export: Export, calls: Mapping[Launch, ApiCall]) -> list[RangeRow]:
    launched: dict[ApiCall, list[Work]] = defaultdict(list)
    for kernel in export.kernels:
        call = calls.get((kernel.process, kernel.correlation))
        if call is not None:
            launched[call].append(kernel)
    inside: dict[str, list[Work]] = defaultdict(list)
    for call, names in ranges_of_calls(list(launched), export.ranges):
        for name in names:
            inside[name] += launched[call]
    times: dict[str, list[int]] = defaultdict(list)
    for one in export.ranges:
        times[one.name].append(one.end - one.start)
    rows = []
    for name, host in times.items():
        inner: dict[str, list[int]] = defaultdict(list)
        for kernel in inside[name]:
            inner[decode(kernel.name).short].append(kernel.end - kernel.start)
        kernels = [InnerKernel(short=k, count=len(t), us=sum(t) / 1e3) for k, t in inner.items()]
        rows.append(
            RangeRow(
                name=name,
                count=len(host),
                total_us=sum(host) / 1e3,
                median_us=statistics.median(host) / 1e3,
                kernels=len(inside[name]),
                kernel_us=sum(k.us for k in kernels),
                inner=tuple(sorted(kernels, key=lambda k: -k.us)),
            )
        )
    return sorted(rows, key=lambda row: -row.total_us)


def ranges_of_calls(
    calls: Sequence[ApiCall], ranges: Sequence[Range]
) -> Iterator[tuple[ApiCall, frozenset[str]]]:
    """Yield each call with the names of the ranges in which it began.

    These are the ranges of its thread. A thread without any works for another one, as autograd's does for
    the thread that waits in a backward: its calls are in the ranges of all threads of its process.
    """
    by_thread: dict[tuple[int, int | None], list[Range]] = defaultdict(list)
    by_process: dict[int, list[Range]] = defaultdict(list)
    for one in ranges:
        by_thread[one.process, one.thread].append(one)
        by_process[one.process].append(one)
    calls_by_thread: dict[tuple[int, int], list[ApiCall]] = defaultdict(list)
    for call in calls:
        calls_by_thread[call.process, call.thread].append(call)
    for (process, thread), own_calls in calls_by_thread.items():
        own = by_thread.get((process, thread))
        # Ranges that belong to no thread hold for all of them.
        candidates = by_process[process] if own is None else [*own, *by_thread.get((process, None), ())]
        waiting = sorted(candidates, key=lambda r: -r.start)
        active: list[Range] = []
        for call in sorted(own_calls):
            while waiting and waiting[-1].start <= call.start:
                active.append(waiting.pop())
            active = [r for r in active if r.end > call.start]
            yield call, frozenset(r.name for r in active)


def _notes(export: Export) -> Iterator[str]:
    if not export.kernels:
        yield "no kernel is in this export: trace with --trace=cuda,nvtx"
    if export.n_graphs:
        yield (
            f"{export.n_graphs} launches of CUDA graphs are traced as a whole, without their kernels: "
            "trace with --cuda-graph-trace=node"
        )
    if not export.ranges:
        yield "no NVTX range is in this export: set WEFT_NVTX=1 (under nsys Weft makes its ranges by itself)"
