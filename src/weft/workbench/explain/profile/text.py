"""Text of a profile for a terminal: tables and sentences from the plain data of ``profile.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.workbench.report.table import duration

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
MAX_ROWS = 20  # rows that are shown; profile.json has all of them
DASH = "-"
LEFT_ALIGNED = ("instrument", "measures", "kernel", "origin", "operator", "decoded")  # columns of text
# Columns that a narrow terminal leaves out, the highest number first.
PRIORITIES = {
    "against the clock": 1,
    "overhead": 2,
    "median": 3,
    "on the wall": 4,
    "measures": 5,
    "grid": 1,
    "block": 1,
    "registers": 2,
    "shared": 3,
    "origin": 4,
    "decoded": 5,
}


def title(profile: Mapping[str, Any]) -> str:
    names = " ".join(profile[k] for k in ("operator", "implementation", "case", "direction"))
    exceed = "exceed" if profile["cold"] else "do not exceed"
    return (
        f"{names} on a {profile['device']} device: {profile['calls_a_step']} calls a step over "
        f"{profile['distinct_inputs']} distinct inputs, which {exceed} twice the last-level cache"
    )


def instruments(profile: Mapping[str, Any]) -> Table:
    """Return each instrument's time of a call, its ratio to the clock's, and its overhead."""
    rows: list[tuple[str, ...]] = []
    reference = profile["instruments"][0]
    for reading in profile["instruments"]:
        is_profiler = reading is not reference
        rows.append(
            (
                reading["instrument"],
                reading["measures"],
                duration(reading["us"]),
                f"{reading['against_clock']:+.1%}" if is_profiler else "",
                duration(reading["median_us"]),
                duration(reading["wall_us"]),
                _signed(reading["overhead_us"]) if is_profiler else "",
            )
        )
    head: tuple[str, ...] = ("instrument", "measures", "a call", "against the clock", "median")
    head += ("on the wall", "overhead")
    return head, rows


def _signed(us: float) -> str:
    return f"{'-' if us < 0 else '+'}{duration(abs(us))}"


def kernels(profile: Mapping[str, Any]) -> Table:
    """Return the kernels that ran, or the operators of a CPU."""
    shown = profile["rows"][:MAX_ROWS]
    if profile["device"] != "cuda":
        head: tuple[str, ...] = ("operator", "share of wall", "self time", "calls", "a call")
        return head, [_operator(row) for row in shown]
    head = ("kernel", "origin", "share", "launches", "a launch")
    head += ("grid", "block", "registers", "shared", "decoded")
    return head, [_kernel(row) for row in shown]


def _operator(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["short"],
        f"{row['share']:.1%}",
        duration(row["us"]),
        DASH if row["launches"] is None else str(row["launches"]),
        DASH if row["us_a_launch"] is None else duration(row["us_a_launch"]),
    )


def _kernel(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["short"],
        row["library"],
        f"{row['share']:.1%}",
        str(row["launches"]),
        duration(row["us_a_launch"]),
        _shape(row["grid"]),
        _shape(row["block"]),
        DASH if row["registers"] is None else str(row["registers"]),
        DASH if row["shared"] is None else f"{row['shared']} B",
        row["says"],
    )


def _shape(sizes: Any) -> str:
    """Format a launch's dimensions without trailing ones: ``132x1x1`` as ``132``."""
    if not sizes:
        return DASH
    sizes = list(sizes)
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return "x".join(map(str, sizes))


def sentences(profile: Mapping[str, Any]) -> list[str]:
    """Return the agreement of the instruments, that of the root with the wall time, and every fault."""
    agreement, root = profile["agreement"], profile["root"]
    lines = []
    hidden = len(profile["rows"]) - MAX_ROWS
    if hidden > 0:
        lines.append(f"{hidden} more rows are in profile.json")
    limit, required_from = agreement["limit"], duration(agreement["demanded_from_us"])
    if agreement["spread"] is not None and agreement["good"] and agreement["demanded"]:
        lines.append(
            f"the instruments agree: on {agreement['compared']} they differ by {agreement['spread']:.1%}, "
            f"{limit:.0%} is allowed"
        )
    elif not agreement["demanded"] and agreement["good"]:
        overhead = max(reading["overhead_us"] for reading in profile["instruments"][1:])
        lines.append(
            f"a call takes under {required_from}, where the profilers' own time shows "
            f"({_signed(overhead)} a call on the wall): the instruments need not agree"
        )
    if root["good"]:
        lines.append(
            f"the flame graph's root is the wall time: {duration(root['root_us'])} against "
            f"{duration(root['wall_us'])} by our own clock ({root['gap']:+.2%})"
        )
    return lines + [f"wrong: {flag}" for flag in profile["flags"]]
