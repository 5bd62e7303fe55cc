"""Report of the loop study, generated from its record alone: tables, sentences, picture, docs page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.core.json_files import read_json
from weft.core.text import slug
from weft.lab.loops.addresses import stream
from weft.lab.loops.cache import CacheLevel, simulate
from weft.lab.loops.run import VECTORISED
from weft.lab.loops.variants import PROGRAMS, VARIANTS, units_of_work
from weft.workbench.report.markdown import RESULTS, table
from weft.workbench.report.scales import NONE, digits, percent, time, times
from weft.workbench.report.svg_curves import Curve, render_curves

RECORDS = "loops-*.json"  # their names under results/<device>/
PICTURE = "loops.svg"
# As seen from docs/speed/: the root of the repository, and the pictures with one folder for each device.
REPOSITORY, PICTURES = "../..", "../pictures"
Study = Mapping[str, Any]
Row = Mapping[str, Any]
Table = tuple[tuple[str, ...], list[list[str]]]
LANGUAGE_NAMES = {"c": "C", "numba": "numba"}
GPU = "on a GPU"
# Caches of a fixed size, so that the page does not depend on the machine that writes it.
EXAMPLE_CACHES = (
    CacheLevel(name="L1", size=48 << 10, associativity=12, line=64),
    CacheLevel(name="L2", size=2 << 20, associativity=16, line=64),
)


def title(program: Row) -> str:
    """Return the name of a program, its shape, and what its misses are counted for."""
    shape = " x ".join(f"{n:,}" for n in program["shape"])
    return f"{program['name']} {shape}; misses for 1000 {program['work']}"


def program_table(study: Study, program: Row, *, intervals: bool = False) -> Table:
    """Return one row for each variant: its base, its misses, and in each language its time and its gain.

    ``intervals``: both ends of the 95 % interval of a time, instead of half its width in percent.
    """
    languages = study["languages"]
    by_variant = _by_variant(study, program)
    counted = any(r["counted_l1"] is not None for rows in by_variant.values() for r in rows.values())
    head = ["variant", "from", "L1 sim.", "L2 sim.", *(["L1 perf"] if counted else [])]
    for language in languages:
        head += [LANGUAGE_NAMES[language], f"gain in {LANGUAGE_NAMES[language]}" if intervals else "gain"]
    lines = []
    for name, rows in by_variant.items():
        base = next(iter(rows.values()))["base"]
        line = [name, base or "", *simulated(program, name)]
        if counted:
            line.append(_counted(program, rows.get("c")))
        for language in languages:
            line += _time_cells(rows[language], intervals)
        lines.append(line)
    return tuple(head), lines


def _by_variant(study: Study, program: Row) -> dict[str, dict[str, Row]]:
    """Return the rows of a program by variant and language, in the order of the record."""
    by_variant: dict[str, dict[str, Row]] = {}
    for row in study["rows"]:
        if row["program"] == program["name"]:
            by_variant.setdefault(row["name"], {})[row["language"]] = row
    return by_variant


def simulated(program: Row, variant: str) -> list[str]:
    """Return the L1 and the L2 misses for 1000 units of work; a dash where nothing was simulated."""
    misses = program["misses"].get(variant)
    if misses is None:
        return [NONE, NONE]
    return [digits(1000 * misses[level] / max(1, program["simulated_units"])) for level in ("l1", "l2")]


def _counted(program: Row, row: Row | None) -> str:
    if row is None or row["counted_l1"] is None:
        return NONE
    return digits(1000 * row["counted_l1"] / max(1, program["units"]))


def _time_cells(row: Row, intervals: bool) -> list[str]:
    """Return the time with its interval, and the gain over the base."""
    if row["us"] is None:
        return ["wrong" if row["refused"] else NONE, ""]
    low, high = row["interval"]
    width = f"{time(low)} to {time(high)}" if intervals else percent((high - low) / 2 / row["us"])
    text = f"{time(row['us'])} ({width})" if intervals else f"{time(row['us'])} ±{width}"
    return [text, times(row["gain"]) if row["gain"] else ""]


def change_table(study: Study, program: Row) -> Table:
    """Return one row for each variant: what it changes, and what that becomes on a GPU."""
    rows = (next(iter(r.values())) for r in _by_variant(study, program).values())
    return ("variant", "changes", GPU), [[r["name"], r["change"], r["gpu"]] for r in rows]


def sentences(study: Study) -> list[str]:
    """Say what is simulated and what is measured, with which compiler and caches, and what may be off."""
    levels = ", ".join(
        f"{c['name']} {c['size'] // 1024} KiB, {c['associativity']}-way" for c in study["caches"]
    )
    source = "the sizes of this machine"
    if study["caches"][0]["source"] == "default":
        source = "default sizes, since the system does not describe its caches"
    lines = [
        f"Misses (sim.) are simulated: LRU, no prefetch, {source}: {levels}, lines of "
        f"{study['caches'][0]['line']} bytes. A product is simulated for fewer rows of A.",
        f"Times are measured: median and half the 95 % interval, {study['threads']} threads where parallel. "
        "gain: the time of the variant that it changes (from) over its own.",
    ]
    if study["not_simulated"]:
        lines[0] = f"Misses are not simulated: {study['not_simulated']}."
    if study["compiler"]:
        compiler = study["compiler"]
        lines.append(f"C by {compiler['version']}: {' '.join(compiler['flags'])}")
    if study["not_counted"]:
        lines.append(f"Hardware counters: {study['not_counted']}.")
    return [*lines, *_skipped(study), *warnings(study)]


def _skipped(study: Study) -> Iterator[str]:
    """Yield each reason why variants have no time, with its number."""
    reasons: dict[str, list[str]] = {}
    for row in study["rows"]:
        if row["skipped"]:
            reasons.setdefault(row["skipped"], []).append(f"{row['program']} {row['name']}")
    for reason, names in reasons.items():
        which = ", ".join(names) if len(names) <= 3 else f"{len(names)} variants"
        yield f"Not timed: {which}: {reason}."


def not_run(study: Study) -> int:
    """Return the number of variants that could not run here; those not written in a language do not count."""
    return sum(bool(r["skipped"]) and r["skipped"] != VECTORISED for r in study["rows"])


def warnings(study: Study) -> list[str]:
    """Return why the times may be off: other programs, or wide intervals."""
    loads = [load["busy"] for load in study["load"].values() if load["busy"]]
    lines = [f"Warning: the machine was shared: {loads[0]}."] if loads else []
    timed = [r for r in study["rows"] if r["us"] is not None]
    noisy = sum("noisy" in r["flags"] for r in timed)
    if noisy:
        lines.append(f"Warning: {noisy} of {len(timed)} times are noisy: their interval is wider than 5 %.")
    return lines


def plot_all(study: Study, folder: Path) -> list[Path]:
    """Plot each variant's time over its simulated L1 misses; return the path, or none without both.

    Raises :class:`WeftError` without matplotlib.
    """
    curves = []
    for program in study["programs"]:
        for language in study["languages"]:
            points = [_point(program, r) for r in study["rows"] if r["language"] == language]
            known = [p for p in points if p is not None]
            if known:
                xs, ys = zip(*known, strict=True)
                label = f"{program['name']} in {LANGUAGE_NAMES[language]}"
                curves.append(Curve(label, list(xs), list(ys), "points"))
    if not curves:
        return []
    path = folder / PICTURE
    render_curves(
        path,
        curves,
        title=f"Loop transformations: {study['machine']['device']}",
        x="simulated L1 misses (for 1000 units of work)",
        y="measured time (ns for one unit of work)",
        caption="Each point is a variant of a program. Interchange and tiling move a point to the left: "
        "fewer misses. Unrolling, vectorisation and parallelisation move it straight down: the same misses, "
        "and more work at a time. A unit of work is a multiply-add, an update of a point or an addition.",
        log_x=True,
        log_y=True,
    )
    return [path]


def _point(program: Row, row: Row) -> tuple[float, float] | None:
    misses = program["misses"].get(row["name"])
    if row["program"] != program["name"] or not row["us"] or not misses or not program["simulated_units"]:
        return None
    return 1000 * misses["l1"] / program["simulated_units"], 1000 * row["us"] / program["units"]


def markdown(results: Path = RESULTS) -> str:
    """Return the newest committed study of each device as Markdown; its command where there is none."""
    newest = {path.parent: path for path in sorted(results.glob(f"*/{RECORDS}"))}
    if not newest:
        return "Not measured yet: `weft study loops`\n"
    return "\n".join(block for path in newest.values() for block in _study_blocks(read_json(path)))


def _study_blocks(study: Study) -> Iterator[str]:
    fingerprint = study["machine"]
    changed = " with uncommitted changes" if fingerprint.get("dirty") else ""
    versions = fingerprint["versions"]
    yield (
        f"**{fingerprint['device']}**, {fingerprint['date'][:10]}, commit {str(fingerprint['commit'])[:10]}"
        f"{changed}, weft {versions['weft']}, numba {versions['numba']}.\n"
    )
    yield "".join(f"- {line}\n" for line in sentences(study))
    for program in study["programs"]:
        yield f"{title(program).capitalize()}:\n"
        head, rows = program_table(study, program, intervals=True)
        yield table(head, rows, "  " + "r" * (len(head) - 2))
    yield f"![time over simulated misses]({PICTURES}/{slug(fingerprint['device'])}/{PICTURE})\n"


def conflict_markdown(sizes: tuple[int, ...] = (500, 512), rows: int = 8) -> str:
    """Return the simulated L1 misses of products of these sizes, with ``rows`` rows of A, as Markdown."""
    lines = []
    for variant in VARIANTS:
        if variant.program == "product" and variant.name in ("naive", "interchange", "tiling"):
            line = [variant.name]
            for size in sizes:
                shape = PROGRAMS["product"].simulated_shape(size, rows)
                misses = simulate(stream(variant, shape), EXAMPLE_CACHES)
                line.append(digits(1000 * misses.l1 / units_of_work("product", shape)))
            lines.append(line)
    return table(("variant", *(f"{size} x {size}" for size in sizes)), lines, " " + "r" * len(sizes))


def gpu_markdown(program: str) -> str:
    """Return what each variant of a program becomes on a GPU, with a link to a kernel that does it."""
    rows = []
    for variant in VARIANTS:
        if variant.program == program:
            link = f"[{Path(variant.kernel).name}]({REPOSITORY}/{variant.kernel})"
            rows.append([variant.name, variant.change, variant.gpu, link])
    return table(("variant", "changes", GPU, "kernel"), rows)
