"""Table of a kernel's counters as text, with the meaning of each row for the documentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.workbench.explain.ncu.counters import SECTOR
from weft.workbench.explain.ncu.kernel import Kernel
from weft.workbench.report.scales import NONE, time, unit

MAX_STALLS = 3


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """Row of the table: its label, the function that formats a kernel, and the row's meaning."""

    label: str
    format: Callable[[Kernel], str]
    meaning: str


def percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f} %"


def nbytes(value: float | None) -> str:
    return unit(value, "B")


def _dram(k: Kernel) -> str:
    read, written = k.get("dram_read"), k.get("dram_write")
    rate = NONE
    if read is not None and written is not None and k.us:
        rate = unit((read + written) / k.us * 1e6, "B/s")
    moved = f"read {nbytes(read)}, written {nbytes(written)}"
    return f"{percent(k.get('dram_peak'))} of peak, {rate}; {moved}"


def _l2(k: Kernel) -> str:
    moved = f"read {nbytes(k.get('l2_read'))}, written {nbytes(k.get('l2_write'))}"
    return f"{percent(k.get('l2_peak'))} of peak; {moved}; hits {percent(k.get('l2_hits'))}"


def _global(op: str) -> Callable[[Kernel], str]:
    def describe(k: Kernel) -> str:
        if k.get(f"{op}_requests") == 0:
            return "none"
        sectors, used = k.sectors(op), k.get(f"{op}_used")
        each = NONE if sectors is None else f"{sectors:.1f}"
        bytes_used = NONE if used is None else f"{used:.1f}"
        return f"{each} sectors a request; {bytes_used} of {SECTOR} bytes a sector used"

    return describe


def _conflicts(k: Kernel) -> str:
    parts = []
    for op, word in (("ld", "loads"), ("st", "stores")):
        wavefronts, added = k.get(f"shared_{op}"), k.get(f"conflicts_{op}")
        if wavefronts == 0:
            parts.append(f"no {word}")
        elif wavefronts is None or added is None:
            parts.append(f"{word} {NONE}")
        else:
            # The two can come from different passes, so the share can exceed 1 slightly.
            parts.append(f"{word} {100 * min(1.0, added / wavefronts):.1f} % of {wavefronts:,.0f} wavefronts")
    return "; ".join(parts)


def _occupancy(k: Kernel) -> str:
    limited = k.limiter and (k.get("theoretical") or 0.0) < 100
    by = f", limited by {k.limiter}" if limited else ""
    return f"{percent(k.get('occupancy'))} achieved of {percent(k.get('theoretical'))}{by}"


def _stalls(k: Kernel) -> str:
    stalls = [f"{reason} {100 * share:.0f} %" for reason, share in k.stalls[:MAX_STALLS]]
    return ", ".join(stalls) or NONE


def _waves(k: Kernel) -> str:
    waves = k.get("waves")
    return NONE if waves is None else f"{waves:.2f}"


def _registers(k: Kernel) -> str:
    count = k.get("registers")
    return NONE if count is None else f"{count:.0f} a thread"


def _shared(k: Kernel) -> str:
    static, dynamic = k.get("shared_static"), k.get("shared_dynamic")
    return f"{nbytes(static)} static, {nbytes(dynamic)} dynamic, a block"


ROWS: tuple[TableRow, ...] = (
    TableRow(
        label="duration",
        format=lambda k: time(k.get("duration")),
        meaning="time of the kernel alone, at unlocked clocks, without the profiler's passes. A little "
        "longer than bench's time, which has no gap between calls",
    ),
    TableRow(
        label="DRAM",
        format=_dram,
        meaning="share of the memory's peak, and the bytes moved. 80 % and more is the best that a "
        "memory-bound kernel reaches; much less, with all other units idle, means latency",
    ),
    TableRow(
        label="L2",
        format=_l2,
        meaning="the same for the second-level cache, with the bytes that the SMs requested. More "
        "bytes from the L2 than from the DRAM: data is used again",
    ),
    TableRow(
        label="SMs",
        format=lambda k: f"{percent(k.get('sm_peak'))} of peak",
        meaning="the busiest pipe of the SMs. 80 % and more: arithmetic is the limit",
    ),
    TableRow(
        label="tensor pipe",
        format=lambda k: f"{percent(k.get('tensor_peak'))} of cycles",
        meaning="cycles in which the tensor cores work. 70 % and more is good for a matrix product; 0 "
        "means that the product uses ordinary arithmetic",
    ),
    TableRow(
        label="global loads",
        format=_global("ld"),
        meaning="a sector is 32 bytes. A warp's loads need 4 sectors a request for 4-byte words, 8 "
        "for 8-byte and 16 for 16-byte words; good is 32 of 32 bytes used",
    ),
    TableRow(label="global stores", format=_global("st"), meaning="the same for stores"),
    TableRow(
        label="bank conflicts",
        format=_conflicts,
        meaning="share of shared memory's wavefronts that repeat an access because two threads use "
        "the same bank. Under 10 % is good; otherwise pad the rows, or swizzle",
    ),
    TableRow(
        label="occupancy",
        format=_occupancy,
        meaning="resident warps as a share of an SM's maximum; then the share that the launch allows, "
        "and its limit. Much less than allowed: uneven load, or a tail",
    ),
    TableRow(
        label="waves",
        format=_waves,
        meaning="blocks over those that fit on the GPU at once. Under 1 the GPU is not full; just "
        "over a whole number the last wave is nearly idle",
    ),
    TableRow(
        label="stalls",
        format=_stalls,
        meaning="reasons why a warp waits, as a share of the cycles between two of its instructions",
    ),
    TableRow(
        label="registers",
        format=_registers,
        meaning="at most 255; with the block size they limit the resident warps",
    ),
    TableRow(label="shared memory", format=_shared, meaning="shared memory of one block"),
    TableRow(
        label="spills",
        format=lambda k: f"{nbytes(k.spilled)} of local memory",
        meaning="spilled registers, and arrays whose index is unknown at compile time. 0 is good",
    ),
)


def shape(numbers: tuple[int, ...]) -> str:
    while len(numbers) > 1 and numbers[-1] == 1:
        numbers = numbers[:-1]
    return "x".join(map(str, numbers)) or "?"


def table(kernels: tuple[Kernel, ...]) -> list[str]:
    """Return each kernel with its rows, in launch order."""
    total = sum(k.us for k in kernels)
    width = max(len(row.label) for row in ROWS)
    lines = []
    for number, k in enumerate(kernels, 1):
        share = f", {100 * (k.us / total):.0f} % of the kernels' time" if len(kernels) > 1 and total else ""
        launch = f"grid {shape(k.grid)}, block {shape(k.block)}"
        lines.append(f"kernel {number} of {len(kernels)}: {k.short} ({launch}{share})")
        lines += [f"  {row.label:<{width}}  {row.format(k)}" for row in ROWS]
    return lines
