"""A profile in tables and sentences, from the plain data of its ``profile.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.workbench.table import duration

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
MOST = 20  # rows that are shown; profile.json has them all
DASH = "-"
LEFT = ("instrument", "measures", "kernel", "of whom", "operator", "decoded")  # columns of words


def title(found: Mapping[str, Any]) -> str:
    names = " ".join(found[k] for k in ("operator", "implementation", "case", "direction"))
    cold = "outgrow" if found["cold"] else "do not outgrow"
    return (
        f"{names} on a {found['device']} device: {found['calls_a_step']} calls a step over "
        f"{found['distinct_inputs']} distinct inputs, which {cold} the last-level cache twice"
    )


def instruments(found: Mapping[str, Any]) -> Table:
    """Each instrument's time of a call against the clock's, and what it costs to look."""
    rows: list[tuple[str, ...]] = []
    first = found["instruments"][0]
    for one in found["instruments"]:
        beside = one is not first
        rows.append(
            (
                one["instrument"],
                one["measures"],
                duration(one["us"]),
                f"{one['against_clock']:+.1%}" if beside else "",
                duration(one["median_us"]),
                duration(one["wall_us"]),
                _signed(one["overhead_us"]) if beside else "",
            )
        )
    head: tuple[str, ...] = ("instrument", "measures", "a call", "against the clock", "median")
    head += ("on the wall", "overhead")
    return head, rows


def _signed(us: float) -> str:
    return f"{'-' if us < 0 else '+'}{duration(abs(us))}"


def ran(found: Mapping[str, Any]) -> Table:
    """The kernels that ran, or the operators of a CPU."""
    gpu = found["device"] == "cuda"
    shown = found["rows"][:MOST]
    if not gpu:
        head: tuple[str, ...] = ("operator", "share of wall", "self time", "calls", "a call")
        return head, [_operator(row) for row in shown]
    head = ("kernel", "of whom", "share", "launches", "a launch")
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


def _shape(found: Any) -> str:
    """Without ones at the end, which are no dimension: ``132x1x1`` as ``132``."""
    if not found:
        return DASH
    sizes = list(found)
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return "x".join(map(str, sizes))


def sentences(found: Mapping[str, Any]) -> list[str]:
    """Whether the instruments agree, whether the root is the wall time, and what went wrong."""
    agreed, root = found["agreement"], found["root"]
    told = []
    left = len(found["rows"]) - MOST
    if left > 0:
        told.append(f"{left} more rows are in profile.json")
    limit, enough = agreed["limit"], duration(agreed["demanded_from_us"])
    if agreed["spread"] is not None and agreed["good"] and agreed["demanded"]:
        spread = agreed["spread"]
        told.append(
            f"the instruments agree: of {agreed['compared']} they differ by {spread:.1%}, "
            f"{limit:.0%} is allowed"
        )
    elif not agreed["demanded"] and agreed["good"]:
        costs = max(one["overhead_us"] for one in found["instruments"][1:])
        told.append(
            f"a call takes under {enough}, where the profilers' own time shows "
            f"({_signed(costs)} a call on the wall): the instruments need not agree"
        )
    if root["good"]:
        told.append(
            f"the flame graph's root is the wall time: {duration(root['root_us'])} against "
            f"{duration(root['wall_us'])} by our own clock ({root['gap']:+.2%})"
        )
    return told + [f"wrong: {flag}" for flag in found["flags"]]
