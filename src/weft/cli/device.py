"""``weft device``: what this machine is, what it can reach, and which backends work on it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from weft.core import Ceilings, Support
    from weft.machine import Device
    from weft.machine.datasheet import Peaks

BANDWIDTHS = {
    "copy": "copy (bytes read + written)",
    "read": "read (a sum)",
    "fill": "fill (bytes written)",
}
EPILOG = "What each line means, and how the ceilings are measured: docs/device.md"
UNKNOWN = "unknown"
Facts = list[tuple[str, str]]


def device(
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the ceilings now, in seconds, and keep them.")
    ] = False,
    on: Annotated[
        str | None, typer.Option("--device", help="cuda or cpu; by default a GPU if there is one.")
    ] = None,
    hierarchy: Annotated[
        bool,
        typer.Option("--hierarchy", help="Measure latency and bandwidth of L1 to DRAM, by size."),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --hierarchy: smaller sizes, a few seconds.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option("--save", help="With --hierarchy: keep it as JSON in this file.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="With --hierarchy: draw it as this SVG.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show this machine: units, clocks, memories, limits, what it reaches, and which backends work.

    Example: weft device --measure --hierarchy
    """
    _validate(hierarchy, quick, save, picture)
    from weft import machine
    from weft.backends import backend_support
    from weft.core.implementation import BACKENDS
    from weft.machine.datasheet import look_up
    from weft.workbench.limits import ceilings

    here = machine.query(on)
    found = ceilings(here.kind, measure=measure, refresh=measure, progress=_say)
    peaks = look_up(here.name) if here.kind == "cuda" else None
    support = {name: backend_support(name, here.kind) for name in BACKENDS}
    fingerprint = machine.fingerprint(here.kind)
    levels = _hierarchy(here, found, quick, save, picture) if hierarchy else None
    if as_json:
        answer = {
            "device": here.to_json(),
            "gpu": machine.gpu_reason() or None,
            "datasheet": peaks.to_json() if peaks else None,
            "ceilings": asdict(found) if found else None,
            "share": _shares(found, peaks),
            "backends": [
                {"name": n, "supported": s.ok, "timed": s.timed, "reason": s.reason}
                for n, s in support.items()
            ],
            "machine": fingerprint,
            **({"hierarchy": levels} if levels else {}),
        }
        print(json.dumps(answer, indent=1))
        return
    _show(here, found, peaks, support, fingerprint, machine.gpu_reason())
    if levels:
        from weft.workbench.hierarchy import show

        print("\n".join(show.lines(levels)))


def _validate(hierarchy: bool, quick: bool, save: Path | None, picture: Path | None) -> None:
    from weft.core import WeftError

    options = {"--quick": quick, "--save": save, "--picture": picture}
    if not hierarchy and (lonely := [name for name, given in options.items() if given]):
        raise WeftError(" and ".join(lonely), expected="--hierarchy beside it", got="none")
    if picture is not None and picture.suffix != ".svg":
        raise WeftError("--picture", expected="a name that ends in .svg", got=picture.name)


def _hierarchy(
    here: Device, found: Ceilings | None, quick: bool, save: Path | None, picture: Path | None
) -> dict[str, Any]:
    from weft.machine.keep import write_json
    from weft.workbench.hierarchy import measure

    said = measure(here, found, quick=quick, say=_say)
    if save is not None:
        write_json(save, said, what="the hierarchy", hint="name a file that can be written")
    if picture is not None:
        from weft.workbench.hierarchy.picture import latency

        latency(said, picture)
    return said


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _shares(found: Ceilings | None, peaks: Peaks | None) -> dict[str, float]:
    """Measured over datasheet, where both are known."""
    if not found or not peaks:
        return {}
    pairs = {word: (getattr(found, word), peaks.bandwidth) for word in BANDWIDTHS}
    pairs |= {rate: (reached, peaks.matrix.get(rate)) for rate, reached in found.matrix.items()}
    return {word: reached / peak for word, (reached, peak) in pairs.items() if peak}


def _show(
    here: Device,
    found: Ceilings | None,
    peaks: Peaks | None,
    support: Mapping[str, Support],
    fingerprint: Mapping[str, Any],
    why_no_gpu: str,
) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    facts = _gpu_facts(here) if here.kind == "cuda" else _cpu_facts(here)
    if here.kind == "cpu":
        facts.append(("GPU", why_no_gpu or "there is one: weft device --device cuda"))
    versions = [f"{name} {value}" for name, value in fingerprint["versions"].items() if value]
    facts.append(("versions", ", ".join(versions)))
    facts.append(("Weft's commit", _commit(fingerprint)))
    console.print(_table(here.name, ("", ""), facts, head=False))
    columns = ("reaches", "datasheet", "measured here", "share")
    console.print(_table("ceilings", columns, _reach(found, peaks)))
    for line in _notes(found, peaks, here):
        console.print(line, style="dim", soft_wrap=True)
    rows = [(name, _works(s), s.reason) for name, s in support.items()]
    console.print(_table("backends", ("backend", "here", "why, and what to do"), rows))


def _table(
    title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], head: bool = True
) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=head)
    for number, column in enumerate(columns):
        numeric = column in ("datasheet", "measured here", "share")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=number == 0)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _number(value: float | None, unit: str = "") -> str:
    return UNKNOWN if value is None else f"{value:,.10g} {unit}".strip()


def _size(nbytes: float | None) -> str:
    """Bytes in the largest binary unit that leaves at least one."""
    if nbytes is None:
        return UNKNOWN
    units = ["B", "KiB", "MiB", "GiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        units.pop(0)
    return f"{nbytes:.4g} {units[0]}"


def _clock(now: float | None, highest: float | None) -> str:
    if now is None and highest is None:
        return UNKNOWN
    return f"{_number(now and round(now))} MHz now, {_number(highest and round(highest))} at most"


def _gpu_facts(d: Device) -> Facts:
    ecc = UNKNOWN if d.ecc is None else "on" if d.ecc else "off"
    return [
        ("device", f"NVIDIA GPU, {d.arch}" + (f" (the first of {d.count})" if d.count > 1 else "")),
        ("SMs", _number(d.units)),
        ("SM clock", _clock(d.clock_mhz, d.clock_max_mhz)),
        ("memory", f"{_size(d.memory_bytes)}, bus {_number(d.bus_width_bits, 'bits')}, ECC {ecc}"),
        ("memory clock", _clock(d.memory_clock_mhz, d.memory_clock_max_mhz)),
        ("L2", _size(d.l2_bytes)),
        (
            "shared memory",
            f"{_size(d.shared_per_sm)} per SM; {_size(d.shared_per_block)} per block, "
            f"{_size(d.shared_per_block_optin)} opted in",
        ),
        (
            "registers",
            f"{_number(d.registers_per_sm)} per SM, {_number(d.registers_per_block)} per block",
        ),
        (
            "threads",
            f"{_number(d.warp)} per warp, {_number(d.threads_per_block)} per block, "
            f"{_number(d.threads_per_sm)} per SM; {_number(d.blocks_per_sm)} blocks per SM",
        ),
        ("power limit", _number(d.power_limit_w, "W")),
        ("driver", f"{d.driver or UNKNOWN}, for CUDA up to {d.driver_cuda or UNKNOWN}"),
    ]


def _cpu_facts(d: Device) -> Facts:
    caches = ", ".join(f"{name} {_size(size)}" for name, size in d.caches.items())
    return [
        ("device", f"CPU, {d.arch}"),
        ("cores", f"{_number(d.units)} physical; {_number(d.threads)} threads usable here"),
        ("clock", _clock(d.clock_mhz, d.clock_max_mhz)),
        ("memory", _size(d.memory_bytes)),
        ("caches", caches or UNKNOWN),
        ("vectors", ", ".join(d.vectors) or UNKNOWN),
    ]


def _commit(fingerprint: Mapping[str, Any]) -> str:
    if not fingerprint["commit"]:
        return UNKNOWN
    return str(fingerprint["commit"])[:12] + (", changed since" if fingerprint["dirty"] else "")


def _reach(found: Ceilings | None, peaks: Peaks | None) -> list[tuple[str, ...]]:
    """One row for each bandwidth and matrix rate that is either known or measured."""
    shares = _shares(found, peaks)
    bandwidth = peaks.bandwidth if peaks else None
    rows = [
        (word, label, bandwidth, getattr(found, word, None), "B/s")
        for word, label in BANDWIDTHS.items()
    ]
    listed = peaks.matrix if peaks else {}
    measured = found.matrix if found else {}
    rows += [
        (rate, f"matrix product, {rate}", listed.get(rate), measured.get(rate), "FLOP/s")
        for rate in dict.fromkeys([*listed, *measured])
    ]
    return [
        (
            label,
            UNKNOWN if peak is None else _rate(peak, unit),
            "not measured" if reached is None else _rate(reached, unit),
            f"{shares[word]:.1%}" if word in shares else "",
        )
        for word, label, peak, reached, unit in rows
    ]


def _rate(value: float, unit: str) -> str:
    """Four digits: GB/s for a bandwidth; for FLOP/s, tera above a tenth of one, else giga."""
    if unit == "B/s" or value < 1e11:
        return f"{value / 1e9:,.4g} G{unit}"
    return f"{value / 1e12:,.4g} T{unit}"


def _notes(found: Ceilings | None, peaks: Peaks | None, here: Device) -> list[str]:
    """Where the figures come from, and what to do where there are none."""
    lines = []
    if peaks:
        lines.append(f"  datasheet: {peaks.source}; dense, at the boost clock")
    elif here.kind == "cuda":
        lines.append("  datasheet: unknown for a card of this name, and not guessed")
    if found:
        lines.append(f"  measured: {found.measured}; weft device --measure keeps what is better")
    else:
        lines.append("  measured: not yet; do it with weft device --measure")
    return lines


def _works(support: Support) -> str:
    if not support.ok:
        return "no"
    return "yes" if support.timed else "check only"
