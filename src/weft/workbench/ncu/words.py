"""A profile on paper: a table for each kernel, the bytes, and the bottleneck."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.workbench.ncu.counters import SECTOR
from weft.workbench.ncu.kernel import Kernel
from weft.workbench.report.scales import NONE, time, unit

SHOWN = 3  # stall reasons


@dataclass(frozen=True, kw_only=True)
class Line:
    """A row of the table: its label, what it says of a kernel, and what it means, for the page."""

    label: str
    says: Callable[[Kernel], str]
    means: str


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
    def says(k: Kernel) -> str:
        if k.get(f"{op}_requests") == 0:
            return "none"
        sectors, used = k.sectors(op), k.get(f"{op}_used")
        each = NONE if sectors is None else f"{sectors:.1f}"
        of = NONE if used is None else f"{used:.1f}"
        return f"{each} sectors a request; {of} of {SECTOR} bytes a sector used"

    return says


def _conflicts(k: Kernel) -> str:
    told = []
    for op, word in (("ld", "loads"), ("st", "stores")):
        waves, added = k.get(f"shared_{op}"), k.get(f"conflicts_{op}")
        if waves == 0:
            told.append(f"no {word}")
        elif waves is None or added is None:
            told.append(f"{word} {NONE}")
        else:
            told.append(f"{word} {100 * min(1.0, added / waves):.1f} % of {waves:,.0f} wavefronts")
    return "; ".join(told)


def _occupancy(k: Kernel) -> str:
    limited = k.limiter and (k.get("theoretical") or 0.0) < 100
    by = f", limited by {k.limiter}" if limited else ""
    return f"{percent(k.get('occupancy'))} achieved of {percent(k.get('theoretical'))}{by}"


def _stalls(k: Kernel) -> str:
    told = [f"{reason} {100 * share:.0f} %" for reason, share in k.stalls[:SHOWN]]
    return ", ".join(told) or NONE


def _waves(k: Kernel) -> str:
    waves = k.get("waves")
    return NONE if waves is None else f"{waves:.2f}"


def _registers(k: Kernel) -> str:
    count = k.get("registers")
    return NONE if count is None else f"{count:.0f} a thread"


def _shared(k: Kernel) -> str:
    static, dynamic = k.get("shared_static"), k.get("shared_dynamic")
    return f"{nbytes(static)} static, {nbytes(dynamic)} dynamic, a block"


LINES: tuple[Line, ...] = (
    Line(
        label="duration",
        says=lambda k: time(k.get("duration")),
        means="the kernel alone, at the clocks as they are; the profiler's passes are not in it. "
        "A little longer than the clock's time, which has no gap between calls",
    ),
    Line(
        label="DRAM",
        says=_dram,
        means="how near the memory's peak, and the bytes moved. 80 % and more is as good as a "
        "memory-bound kernel gets; much less, with all else idle, is latency",
    ),
    Line(
        label="L2",
        says=_l2,
        means="the same of the second-level cache, with the bytes that the SMs asked it for. Read "
        "more from here than from the DRAM: data is used again",
    ),
    Line(
        label="SMs",
        says=lambda k: f"{percent(k.get('sm_peak'))} of peak",
        means="the busiest of the SMs' pipes. 80 % and more: computing is the limit",
    ),
    Line(
        label="tensor pipe",
        says=lambda k: f"{percent(k.get('tensor_peak'))} of cycles",
        means="cycles in which the matrix units work. For a product, 70 % and more is good; 0 "
        "where one was expected means that it fell back to ordinary arithmetic",
    ),
    Line(
        label="global loads",
        says=_global("ld"),
        means="a sector is 32 bytes. 4 sectors a request are right for 4-byte loads of a warp, 8 "
        "for 8-byte and 16 for 16-byte ones; what counts is that 32 of 32 bytes are used",
    ),
    Line(
        label="global stores", says=_global("st"), means="the same of stores; 32 of 32 bytes again"
    ),
    Line(
        label="bank conflicts",
        says=_conflicts,
        means="the share of shared memory's wavefronts that repeat an access because two threads "
        "met in one bank. Under 10 % is fine; pad the rows, or swizzle",
    ),
    Line(
        label="occupancy",
        says=_occupancy,
        means="warps that were there, of those that an SM can hold; the second figure is what the "
        "launch allows, and by what it is limited. Much under it: an uneven load, or a tail",
    ),
    Line(
        label="waves",
        says=_waves,
        means="blocks over those that fit on the machine at once. Under 1 it is not full; just "
        "over a whole number the last wave is nearly idle",
    ),
    Line(
        label="stalls",
        says=_stalls,
        means="what a warp waits for, as a share of the cycles between two of its instructions",
    ),
    Line(
        label="registers",
        says=_registers,
        means="of 255; with the block's size, they limit how many warps fit",
    ),
    Line(label="shared memory", says=_shared, means="what one block takes of an SM's"),
    Line(
        label="spills",
        says=lambda k: f"{nbytes(k.spilled)} of local memory",
        means="registers that did not fit, and arrays with an index that is not known. 0 is good",
    ),
)


def shape(numbers: tuple[int, ...]) -> str:
    while len(numbers) > 1 and numbers[-1] == 1:
        numbers = numbers[:-1]
    return "x".join(map(str, numbers)) or "?"


def table(kernels: tuple[Kernel, ...]) -> list[str]:
    """Each kernel with its rows, in the order of the launches."""
    whole = sum(k.us for k in kernels)
    width = max(len(line.label) for line in LINES)
    found = []
    for number, k in enumerate(kernels, 1):
        part = (
            f", {100 * (k.us / whole):.0f} % of the kernels' time"
            if len(kernels) > 1 and whole
            else ""
        )
        launched = f"grid {shape(k.grid)}, block {shape(k.block)}"
        found.append(f"kernel {number} of {len(kernels)}: {k.short} ({launched}{part})")
        found += [f"  {line.label:<{width}}  {line.says(k)}" for line in LINES]
    return found
