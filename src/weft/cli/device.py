"""``weft device``: show this machine, the rates it reaches, and the backends that work on it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import ending, output, progress
from weft.cli.options import Csv, Device, Json

if TYPE_CHECKING:
    from weft.core import Ceilings, Support
    from weft.core.table import Table
    from weft.machine import Device as DeviceFacts
    from weft.machine.datasheet import Peaks
    from weft.machine.gpus import Gpu

BANDWIDTHS = {
    "copy": "copy (bytes read + written)",
    "read": "read (sum of an array)",
    "fill": "fill (bytes written)",
}
EPILOG = """Examples:
  weft device
  weft device --measure --json
  weft device --hierarchy --quick --save hierarchy.json

Meaning of each line, and how the peak rates are measured: weft help machine"""
UNKNOWN = "unknown"
FOLD = 20  # characters to which text is folded at least
SHARE = "of datasheet"  # column of measured rate / datasheet rate
Facts = list[tuple[str, str]]


def device(
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the peak rates now (some seconds), and save them")
    ] = False,
    kind: Device = None,
    hierarchy: Annotated[
        bool,
        typer.Option("--hierarchy", help="Measure latency and bandwidth from L1 to DRAM, by size"),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --hierarchy: use fewer sizes, in a few seconds")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --hierarchy: save the result as JSON")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --hierarchy: draw the latency as an SVG file")
    ] = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Show this machine: units, clocks, memories, limits, measured rates, and backends that work."""
    output.only_one_format(json=as_json, csv=as_csv)
    _validate(hierarchy, quick, save, picture)
    from weft import machine
    from weft.backends import backend_support
    from weft.core.implementation import BACKENDS
    from weft.machine.datasheet import look_up
    from weft.machine.gpus import list_gpus
    from weft.workbench.timing.ceilings import ceilings

    watch, facts, gpus = ending.Stopwatch(), machine.query(kind), list_gpus()
    measured = ceilings(facts.kind, measure=measure, refresh=measure, progress=output.log)
    peaks = look_up(facts.name) if facts.kind == "cuda" else None
    support = {name: backend_support(name, facts.kind) for name in BACKENDS}
    fingerprint = machine.fingerprint(facts.kind)
    levels = None
    with progress.stoppable() as stop:
        if hierarchy:
            levels = _measure_hierarchy(facts, measured, quick)
    if stop:
        levels = stop.partial and stop.partial | stop.to_json()
    if levels is not None:
        _write_hierarchy(levels, save, None if stop else picture)
    if as_json:
        report = {
            "device": facts.to_json(),
            "gpu": machine.gpu_reason() or None,
            "gpus": [gpu.to_json() for gpu in gpus],
            "datasheet": peaks.to_json() if peaks else None,
            "ceilings": asdict(measured) if measured else None,
            "share": _shares(measured, peaks),
            "backends": [
                {"name": n, "supported": s.ok, "timed": s.timed, "reason": s.reason}
                for n, s in support.items()
            ],
            "machine": fingerprint,
            **({"hierarchy": levels} if levels else {}),
            **stop.to_json(),
        }
        print(json.dumps(report, indent=1))
    elif as_csv:
        output.print_csv(rates_table(measured, peaks))
    else:
        show(facts, measured, peaks, support, fingerprint, machine.gpu_reason())
        if len(gpus) > 1:
            print()
            output.show_table(gpus_table(gpus))
        if levels:
            from weft.lab.hierarchy import report as text

            print("\n".join(text.text_lines(levels)))
    if hierarchy or not (as_json or as_csv):
        line = _verdict_line(facts, measured, support, levels, watch, stop)
        ending.print_verdict(line, to_stderr=as_json or as_csv)
    if stop:
        raise typer.Exit(stop.exit_code)


def _verdict_line(
    facts: DeviceFacts,
    measured: Ceilings | None,
    support: Mapping[str, Support],
    levels: Mapping[str, Any] | None,
    watch: ending.Stopwatch,
    stop: progress.StopRequest,
) -> str:
    """Return the last line: the device, the backends that work, and what was measured."""
    if stop:
        from weft.lab.hierarchy import NUM_CURVES

        curves = len(levels["series"]) if levels else 0
        return f"stopped after {curves} of {NUM_CURVES[facts.kind]} curves ({watch})"
    working = sum(s.ok for s in support.values())
    rates = "peak rates measured" if measured else "peak rates not measured"
    hierarchy = f", {len(levels['series'])} curves of the hierarchy" if levels else ""
    text = f"{facts.name}: {working} of {len(support)} backends work, {rates}{hierarchy} ({watch})"
    return text + ending.not_run_text((name, s.reason) for name, s in support.items() if not s.ok)


def _validate(hierarchy: bool, quick: bool, save: Path | None, picture: Path | None) -> None:
    from weft.core import WeftError

    options = {"--quick": quick, "--save": save, "--picture": picture}
    if not hierarchy and (unused := [name for name, value in options.items() if value]):
        raise WeftError(" and ".join(unused), expected="--hierarchy as well", got="none")
    if picture is not None and picture.suffix != ".svg":
        raise WeftError("--picture", expected="a name that ends in .svg", got=picture.name)


def _measure_hierarchy(facts: DeviceFacts, measured: Ceilings | None, quick: bool) -> dict[str, Any]:
    from weft.lab.hierarchy import EXPECTED_SECONDS, NUM_CURVES, QUICK_SHARE, measure

    with progress.Progress(every_line=True) as status:
        seconds = EXPECTED_SECONDS[facts.kind] * (QUICK_SHARE if quick else 1)
        status.announce(seconds, f"{NUM_CURVES[facts.kind]} curves of the memory hierarchy")
        return measure(facts, measured, quick=quick, log=status)


def _write_hierarchy(levels: Mapping[str, Any], save: Path | None, picture: Path | None) -> None:
    from weft.machine.keep import write_json

    if save is not None:
        write_json(save, dict(levels), what="the hierarchy", hint="choose a file that can be written")
    if picture is not None:
        from weft.lab.hierarchy.report import plot_latency

        plot_latency(levels, picture)


def _shares(measured: Ceilings | None, peaks: Peaks | None) -> dict[str, float]:
    """Return measured rate / datasheet rate by name, where both are known."""
    if not measured or not peaks:
        return {}
    pairs = {name: (getattr(measured, name), peaks.bandwidth) for name in BANDWIDTHS}
    pairs |= {name: (rate, peaks.matrix.get(name)) for name, rate in measured.matrix.items()}
    return {name: rate / peak for name, (rate, peak) in pairs.items() if peak}


def show(
    facts: DeviceFacts,
    measured: Ceilings | None,
    peaks: Peaks | None,
    support: Mapping[str, Support],
    fingerprint: Mapping[str, Any],
    why_no_gpu: str,
) -> None:
    """Print the tables of facts, peak rates and backends."""
    from weft.core.table import Column, Table

    rows = _gpu_facts(facts) if facts.kind == "cuda" else _cpu_facts(facts)
    if facts.kind == "cpu":
        rows.append(("GPU", why_no_gpu or "present; show it with weft device --device cuda"))
    versions = [f"{name} {value}" for name, value in fingerprint["versions"].items() if value]
    rows.append(("versions", ", ".join(versions)))
    rows.append(("Weft's commit", _commit(fingerprint)))
    output.show_table(Table((Column(""), Column("", fold=FOLD)), rows, title=facts.name))
    print()
    rates = rates_table(measured, peaks)
    rates = replace(rates, title="peak rates", notes=_notes(measured, peaks, facts))
    output.show_table(rates, options=("csv", "json"))
    print()
    backends = [(name, _status(s), s.reason) for name, s in support.items()]
    columns = (Column("backend"), Column("works here"), Column("reason and remedy", fold=FOLD))
    output.show_table(Table(columns, backends, title="backends"))


def gpus_table(gpus: Sequence[Gpu]) -> Table:
    """Return a row for each GPU, with its link to every other."""
    from weft.core.table import Column, Table

    names = ("GPU", "name", "architecture", "memory", "PCI address")
    columns = (
        *(Column(n, fold=FOLD if n == "name" else None) for n in names),
        *(Column(f"to {g.index}") for g in gpus),
    )
    rows = []
    for gpu in gpus:
        links = {link.to: link.text for link in gpu.links}
        facts = (gpu.name or UNKNOWN, gpu.arch or UNKNOWN, _size(gpu.memory_bytes), gpu.pci or UNKNOWN)
        rows.append((str(gpu.index), *facts, *(links.get(other.index, "-") for other in gpus)))
    notes = [
        "NV18: peer access through 18 NVLinks; PCIe: peer access without NVLink",
        "peer: peer access, and whether by NVLink is unknown",
        "host: no peer access, copies go through the host's memory; ?: the driver gives no answer",
        "weft COMMAND --device cuda:N runs a command on GPU N",
    ]
    return Table(columns, rows, title="GPUs", notes=notes)


def rates_table(measured: Ceilings | None, peaks: Peaks | None) -> Table:
    """Return a row for each bandwidth and matrix rate that the datasheet has or that is measured."""
    from weft.core.table import Column, Table

    columns = (
        Column("rate", fold=FOLD),
        Column("measured", numeric=True, unit="1/s"),
        Column(SHARE, numeric=True, unit="%"),
        Column("datasheet", 1, numeric=True, unit="1/s"),
    )
    return Table(columns, _rates(measured, peaks))


def _number(value: float | None, unit: str = "") -> str:
    return UNKNOWN if value is None else f"{value:,.10g} {unit}".strip()


def _size(nbytes: float | None) -> str:
    """Format bytes in the largest binary unit of which there is at least one."""
    if nbytes is None:
        return UNKNOWN
    units = ["B", "KiB", "MiB", "GiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        units.pop(0)
    return f"{nbytes:.4g} {units[0]}"


def _clock(now: float | None, maximum: float | None) -> str:
    if now is None and maximum is None:
        return UNKNOWN
    current = UNKNOWN if now is None else f"{round(now):,} MHz"
    return f"{current} (maximum {UNKNOWN if maximum is None else f'{round(maximum):,} MHz'})"


def _gpu_facts(d: DeviceFacts) -> Facts:
    ecc = UNKNOWN if d.ecc is None else "on" if d.ecc else "off"
    return [
        ("device", f"NVIDIA GPU, {d.arch}" + (f" (GPU 0 of {d.count})" if d.count > 1 else "")),
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


def _cpu_facts(d: DeviceFacts) -> Facts:
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
    return str(fingerprint["commit"])[:12] + (" and uncommitted changes" if fingerprint["dirty"] else "")


def _rates(measured: Ceilings | None, peaks: Peaks | None) -> list[tuple[str, ...]]:
    """Return the rows of :func:`rates_table`."""
    from weft.core.table import Number

    shares = _shares(measured, peaks)
    bandwidth = peaks.bandwidth if peaks else None
    rates = [(n, label, bandwidth, getattr(measured, n, None), "B/s") for n, label in BANDWIDTHS.items()]
    listed_matrix = peaks.matrix if peaks else {}
    measured_matrix = measured.matrix if measured else {}
    rates += [
        (n, f"matrix product, {n}", listed_matrix.get(n), measured_matrix.get(n), "FLOP/s")
        for n in dict.fromkeys([*listed_matrix, *measured_matrix])
    ]
    return [
        (
            label,
            Number("not measured" if rate is None else _rate(rate, unit), rate),
            Number(f"{100 * shares[name]:.1f} %", 100 * shares[name]) if name in shares else Number("", None),
            Number(UNKNOWN if peak is None else _rate(peak, unit), peak),
        )
        for name, label, peak, rate, unit in rates
    ]


def _rate(value: float, unit: str) -> str:
    """Format a rate with four digits: bandwidths in GB/s, others in TFLOP/s from 0.1 TFLOP/s on."""
    if unit == "B/s" or value < 1e11:
        return f"{value / 1e9:,.4g} G{unit}"
    return f"{value / 1e12:,.4g} T{unit}"


def _notes(measured: Ceilings | None, peaks: Peaks | None, facts: DeviceFacts) -> list[str]:
    """Return the source of the rates, and what to do if there are none."""
    lines = []
    if peaks:
        lines.append(f"datasheet: {peaks.source}; dense, at the boost clock")
    elif facts.kind == "cuda":
        lines.append("datasheet: unknown for a GPU of this name, and not guessed")
    if measured:
        lines.append(
            f"measured {measured.measured}; re-measure with weft device --measure (keeps the higher value)"
        )
        if measured.doubt:
            lines.append(f"  doubtful: {measured.doubt}")
    else:
        lines.append("not measured yet: run weft device --measure")
    return lines


def _status(support: Support) -> str:
    if not support.ok:
        return "no"
    return "yes" if support.timed else "check only"
