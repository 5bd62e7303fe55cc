"""Report of a measured hierarchy, generated from its record: text for a terminal, a plot, and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.core import WeftError
from weft.core.json_files import read_json
from weft.lab.hierarchy.curves import BANDWIDTH, LATENCY
from weft.workbench.report.markdown import RESULTS, table

RecordData = Mapping[str, Any]
EDGE = {LATENCY: "latency rises at", BANDWIDTH: "bandwidth falls at"}
# Text for the record's list of readings that are within 10 % of the specification.
AGREEMENT = {
    (): "neither",
    ("leaves",): "plateau's end",
    ("holds",): "largest set",
    ("leaves", "holds"): "both",
}
SHARED = "shared"  # has no mark in the plot: its chase is flat up to its end
PLOT = "hierarchy.svg"
COMMAND = (
    "weft device --measure --hierarchy --save results/<device>/hierarchy.json "
    f"--picture results/<device>/{PLOT}"
)


def size(nbytes: float) -> str:
    """Format bytes in binary units with three significant digits.

    >>> size(4096), size(233472), size(62914560), size(1.5 * 2**30), size(1023 * 2**20)
    ('4 KiB', '228 KiB', '60 MiB', '1.5 GiB', '1023 MiB')
    """
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= 0.9995 * scale:
            count = nbytes / scale
            return f"{count:.3g} {unit}" if count < 999.5 else f"{count:.0f} {unit}"
    return f"{nbytes:.0f} B"


def quantity(value: float, unit: str) -> str:
    """Format a value in its unit with three digits; bytes in binary units, bytes a second in GB/s.

    >>> quantity(4.274e12, "B/s"), quantity(37.04, "cycles"), quantity(0.5, "us")
    ('4,274 GB/s', '37 cycles', '0.5 us')
    """
    if unit == "B":
        return size(value)
    if unit == "B/s":
        return f"{value / 1e9:,.4g} GB/s" if value < 1e12 else f"{value / 1e9:,.0f} GB/s"
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def difference(share: float) -> str:
    """Format a relative difference: ``-3.1 %``, ``+4.0 %``."""
    return f"{100 * share:+.1f} %"


def text_lines(record: RecordData) -> Iterator[str]:
    """Return the record for a terminal: one paragraph for each curve, and one for the single figures."""
    known = ", ".join(f"{level} {size(n)}" for level, n in record["known"].items())
    yield f"memory hierarchy, measured in {record['seconds']:.0f} s; specified sizes: {known or 'unknown'}"
    for curve in record["series"]:
        yield ""
        yield f"{curve['kind']}, {curve['label']}"
        yield from (f"  {line}" for line in _plateau_lines(curve))
        yield from (f"  {line}" for line in _level_lines(curve))
    yield ""
    for figure in record["figures"]:
        comparison = ""
        if "off" in figure:
            expected = quantity(figure["expected"], figure["unit"])
            comparison = f" ({difference(figure['off'])} against {expected}, {figure['by']})"
        yield f"{figure['label']}: {quantity(figure['value'], figure['unit'])}{comparison}"


def _plateau_lines(curve: RecordData) -> Iterator[str]:
    if not curve["plateaus"]:
        yield "no plateau: no range of sizes has a constant cost"
    for plateau in curve["plateaus"]:
        value = _plateau_value(curve, plateau)
        yield f"{value} from {size(plateau['first'])} to {size(plateau['last'])}"


def _plateau_value(curve: RecordData, plateau: RecordData) -> str:
    ns = f" ({plateau['ns']:.3g} ns)" if "ns" in plateau else ""
    return quantity(plateau["value"], curve["unit"]) + ns


def _level_lines(curve: RecordData) -> Iterator[str]:
    """Return a line for each level: where the plateau ends, the largest set that fits, the specification."""
    for level in curve["held"]:
        if "leaves" not in level:
            yield f"{level['level']}: no break near the specified {size(level['known'])}"
            continue
        yield (
            f"{level['level']}: {EDGE[curve['kind']]} {size(level['leaves'])} "
            f"({difference(level['leaves_off'])}), at most {size(level['holds'])} fit "
            f"({difference(level['holds_off'])}), specification {size(level['known'])}; "
            f"within 10 %: {AGREEMENT[tuple(level['within'])]}"
        )


def plot_latency(record: RecordData, path: Path) -> None:
    """Plot every latency of a record, in ns, as the SVG ``path``, with its plateaus as points.

    Raises :class:`WeftError` if the record has no latency, or matplotlib is missing.
    """
    from weft.workbench.report.svg_curves import Curve, Mark, render_curves

    measured = [s for s in record["series"] if s["kind"] == LATENCY]
    if not measured:
        raise WeftError("a picture of a hierarchy", expected="a latency", got="none")
    curves = [Curve(s["label"], s["sizes"], s.get("ns") or s["values"]) for s in measured]
    plateaus = [plateau for s in measured for plateau in s["plateaus"]]
    if plateaus:
        middles = [(p["first"] * p["last"]) ** 0.5 for p in plateaus]
        values = [p.get("ns", p["value"]) for p in plateaus]
        curves.append(Curve("plateau", middles, values, "points"))
    largest = max(max(curve.xs) for curve in curves)
    marks = [
        Mark(nbytes, f"{level}, specified {size(nbytes)}")
        for level, nbytes in record["known"].items()
        if level != SHARED and nbytes < 2 * largest
    ]
    render_curves(
        path,
        curves,
        title=f"Latency by working set: {record['device']['name']}",
        x="working set (bytes)",
        y="latency of a load (ns)",
        caption=plot_caption(record),
        log_x=True,
        log_y=True,
        marks=marks,
    )


def plot_caption(record: RecordData) -> str:
    """Return the plot's caption, with the ends of the levels that agree with the specification."""
    start = "Each curve is flat while the set fits in a level, and rises at the end of the level"
    ends = dict.fromkeys(
        f"{level['level']} at {size(level['leaves'])} of {size(level['known'])}"
        for curve in record["series"]
        if curve["kind"] == LATENCY
        for level in curve["held"]
        if level["within"]
    )
    return f"{start}: {'; '.join(ends)}." if ends else f"{start}, near the vertical lines."


def markdown(folder: Path = RESULTS) -> str:
    """Return every committed ``hierarchy.json`` as Markdown, or the command that measures one."""
    blocks = [
        "\n".join(_device_blocks(read_json(file), file)) for file in sorted(folder.glob("*/hierarchy.json"))
    ]
    return "\n".join(blocks) if blocks else f"not measured yet: `{COMMAND}`\n"


def _device_blocks(record: RecordData, file: Path) -> Iterator[str]:
    machine = record["machine"]
    changed = " with uncommitted changes" if machine.get("dirty") else ""
    commit = str(machine.get("commit") or "unknown")[:10]
    yield f"### {machine['device']}\n"
    yield f"{machine['date'][:10]}, commit {commit}{changed}, in {record['seconds']:.0f} s.\n"
    head = ("level", "curve", "specification", "plateau ends at", "largest set that fits", "within 10 %")
    yield table(head, _level_rows(record), "  rrr")
    yield from _unified_store(record)
    yield table(("curve", "plateau", "from", "to"), _plateau_rows(record), " rrr")
    yield table(("quantity", "measured", "expected", "difference"), _figure_rows(record), " rrr")
    if (file.parent / PLOT).exists():
        # The path is seen from docs/speed/.
        yield f"![Latency by working set](../../{(file.parent / PLOT).as_posix()})\n"


def _level_rows(record: RecordData) -> Iterator[list[str]]:
    for curve in record["series"]:
        for level in curve["held"]:
            head = [level["level"], f"{curve['kind']}, {curve['label']}", size(level["known"])]
            if "leaves" not in level:
                yield [*head, "no break", "", "neither"]
                continue
            readings = [f"{size(level[r])} ({difference(level[f'{r}_off'])})" for r in ("leaves", "holds")]
            agreement = AGREEMENT[tuple(level["within"])]
            yield [*head, *readings, "**neither**" if agreement == "neither" else agreement]


def _unified_store(record: RecordData) -> Iterator[str]:
    """Compare the measured L1 with the shared memory of an SM, which share one memory."""
    shared = record["known"].get("shared")
    for level in record["series"][0]["held"]:
        if shared and level["level"] == "L1" and "leaves" in level:
            yield (
                f"L1 and shared memory share {size(level['known'])} of an SM. Shared memory can have at "
                f"most {size(shared)} of it. The L1's plateau ends at {size(level['leaves'])}, "
                f"{difference(level['leaves'] / shared - 1)} against shared memory's maximum.\n"
            )


def _plateau_rows(record: RecordData) -> Iterator[list[str]]:
    for curve in record["series"]:
        for plateau in curve["plateaus"]:
            value = _plateau_value(curve, plateau)
            name = f"{curve['kind']}, {curve['label']}"
            yield [name, value, size(plateau["first"]), size(plateau["last"])]


def _figure_rows(record: RecordData) -> Iterator[list[str]]:
    for figure in record["figures"]:
        value = quantity(figure["value"], figure["unit"])
        expected = quantity(figure["expected"], figure["unit"]) if "expected" in figure else ""
        yield [figure["label"], value, expected, difference(figure["off"]) if "off" in figure else ""]
