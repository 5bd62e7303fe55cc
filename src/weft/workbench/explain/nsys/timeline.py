"""Chrome trace of an export, in the form that ``profile.stacks`` folds and Perfetto opens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.workbench.explain.nsys.export import COPY, FILL, KERNEL, ApiCall, Export, Range, Work

_CATEGORIES = {KERNEL: "kernel", COPY: "gpu_memcpy", FILL: "gpu_memset"}


def chrome_trace(export: Export) -> dict[str, Any]:
    """Return the trace: API calls and ranges by thread, kernels, copies and fills by device and stream.

    Times are in us from the first event on, since float64 would round ns of a clock that started long ago.
    """
    rows: list[Work | ApiCall | Range] = [*export.work, *export.calls, *export.ranges]
    first = min((row.start for row in rows), default=0)
    return {"traceEvents": [*_names(export), *_events(export, first)]}


def _events(export: Export, first: int) -> Iterator[dict[str, Any]]:
    def event(row: Any, category: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
        times = {"ts": (row.start - first) / 1e3, "dur": (row.end - row.start) / 1e3}
        return {"ph": "X", "name": row.name, "cat": category, "pid": pid, "tid": tid, "args": args, **times}

    for one in export.ranges:
        # The range that belongs to no thread gets a lane of its own.
        yield event(one, "user_annotation", one.process, one.thread or 0)
    for call in export.calls:
        yield event(call, "cuda_runtime", call.process, call.thread, correlation=_launch(call))
    for work in export.work:
        args = {"device": work.device, "stream": work.stream, "correlation": _launch(work)}
        if work.kind == KERNEL:
            args |= {"grid": work.grid, "block": work.block}
            args |= {"registers per thread": work.registers, "shared memory": work.shared}
        else:
            args |= {"bytes": work.nbytes}
        yield event(work, _CATEGORIES[work.kind], work.device, work.stream, **args)


def _launch(row: Any) -> str:
    # Correlation numbers are unique in one process only.
    return f"{row.process}:{row.correlation}"


def _names(export: Export) -> Iterator[dict[str, Any]]:
    """Yield the names that Perfetto shows for devices and processes."""
    devices: dict[int, Work] = {w.device: w for w in export.work}
    for device in sorted(devices):
        yield {"ph": "M", "name": "process_name", "pid": device, "args": {"name": f"GPU {device}"}}
    for process in sorted({c.process for c in export.calls} | {r.process for r in export.ranges}):
        label = f"process {process & 0xFFFFFF}"  # the system's id; the bits above it number the machine
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": label}}
