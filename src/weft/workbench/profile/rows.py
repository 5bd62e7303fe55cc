"""What ran in the active steps of a trace: kernels of a GPU, or on a CPU operators by self time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weft.workbench.kernel_names import decode
from weft.workbench.profile.instruments import ON_DEVICE, steps_in
from weft.workbench.profile.stacks import HOST, NO_OPERATOR, Folded

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel, or one operator, of all active steps together.

    ``share`` is of all device time on a GPU, of the wall time on a CPU. ``us`` is the time of all
    ``launches``; on a CPU its own, without what it called. ``grid`` and ``block`` are the launch's,
    ``registers`` a thread's, ``shared`` bytes a block's; None where the trace does not tell.
    """

    name: str
    short: str
    library: str
    says: str
    us: float
    share: float
    launches: int | None
    grid: Shape | None = None
    block: Shape | None = None
    registers: int | None = None
    shared: int | None = None

    @property
    def us_a_launch(self) -> float | None:
        return self.us / self.launches if self.launches else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"us_a_launch": self.us_a_launch}


def on_device(trace: Mapping[str, Any]) -> list[Row]:
    """Kernels, copies and fills, the longest first; one row for each launch configuration.

    Those that began before the first active step are left out. The share is of the time added up,
    so that shares come to 1 even where kernels ran side by side.
    """
    steps = steps_in(dict(trace))
    begin = steps[0][0] if steps else float("-inf")
    held: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for event in trace.get("traceEvents", ()):
        if event.get("ph") != "X" or event.get("cat") not in ON_DEVICE or event["ts"] < begin:
            continue
        args = event.get("args", {})
        shape = (_shape(args.get("grid")), _shape(args.get("block")))
        taken = (args.get("registers per thread"), args.get("shared memory"))
        held[(str(event["name"]), *shape, *taken)].append(float(event["dur"]))
    total = sum(map(sum, held.values()))
    rows = []
    for (name, grid, block, registers, shared), took in held.items():
        read = decode(name)
        rows.append(
            Row(
                name=name,
                short=read.short,
                library=read.library,
                says=read.says(),
                us=sum(took),
                share=sum(took) / total if total else 0.0,
                launches=len(took),
                grid=grid,
                block=block,
                registers=registers,
                shared=shared,
            )
        )
    return sorted(rows, key=lambda r: -r.us)


def _shape(found: Any) -> Shape | None:
    return tuple(int(n) for n in found) if found else None


def on_host(trace: Mapping[str, Any], folded: Folded) -> list[Row]:
    """Operators by their self time on the host's threads, the longest first, and last what no
    operator held: Python, and compiled code that no operator announces."""
    own: dict[str, float] = defaultdict(float)
    outside = 0.0
    for i, lane in enumerate(x for x in folded.lanes if x.kind == HOST):
        for stack, ns in lane.stacks.items():
            if stack != (NO_OPERATOR,):
                own[stack[-1]] += ns / 1000
            elif i == 0:  # another thread without an operator only waits
                outside = ns / 1000
    steps = steps_in(dict(trace))
    spans = [(steps[0][0], steps[-1][1])] if steps else [(float("-inf"), float("inf"))]
    calls: dict[str, int] = defaultdict(int)
    for event in trace.get("traceEvents", ()):
        if event.get("ph") == "X" and spans[0][0] <= event["ts"] < spans[0][1]:
            calls[str(event["name"])] += 1
    found = [_operator(name, us, us / folded.root_us, calls[name]) for name, us in own.items()]
    found.sort(key=lambda r: -r.us)
    return [*found, _operator(NO_OPERATOR, outside, outside / folded.root_us, None)]


def _operator(name: str, us: float, share: float, launches: int | None) -> Row:
    read = decode(name)
    known = read.library != "unknown"
    return Row(
        name=name,
        short=read.short if known else name,
        library=read.library if known else name.partition("::")[0] if "::" in name else "",
        says=read.says(),
        us=us,
        share=share,
        launches=launches,
    )
