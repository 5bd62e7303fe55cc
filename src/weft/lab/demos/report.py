"""Report of demonstrations as text and Markdown, from the plain data of a run or of a saved file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.core.errors import WeftError
from weft.core.json_files import read_json
from weft.lab.demos import all_demos, demo
from weft.lab.demos.demo import SIDES, Sweep
from weft.lab.demos.run import NOT_TIMED, SHOWN
from weft.lab.demos.traffic import SIDE_OF
from weft.workbench.report.markdown import RESULTS, table
from weft.workbench.report.scales import NONE, digits, time, times, unit

FILE, PLOT = "demos.json", "wave-quantization.svg"
MISSING = "Not measured yet: `weft demo all --save results/<device>/demos.json`, on a GPU, measures it."


def load(path: Path) -> dict[str, Any]:
    """Read a file that ``weft demo --save`` wrote; raises :class:`WeftError` for any other file."""
    try:
        saved = read_json(path)
        if {"machine", "demos"} <= set(saved) and all("ways" in d for d in saved["demos"]):
            return dict(saved)
        got = "other JSON"
    except (OSError, ValueError, TypeError) as error:
        got = f"{type(error).__name__}: {error}"
    raise WeftError(str(path), expected="a file that weft demo --save wrote", got=got)


def number(value: float) -> str:
    """Format a piece of evidence: whole numbers as they are, others with three digits."""
    return f"{value:,.0f}" if value == round(value) else digits(value)


def verdict(result: Mapping[str, Any]) -> str:
    """Return one sentence on the measured ratio and the predicted one."""
    if "ratio" not in result:
        return f"{result['status']}: {result['reason']}"
    low, high = result["ratio_interval"]
    sentence = (
        f"the bad variant takes {times(result['ratio'])} as long ({digits(low)} to {digits(high)}); "
        f"predicted: about {result['expected']:g}"
    )
    if result["status"] == SHOWN:
        return sentence
    return f"{sentence}; {result['status']}: {result['reason']}"


def sweep(result: Mapping[str, Any]) -> Sweep | None:
    """Return the curve that was measured beside the pair, or None."""
    data = result.get("sweep")
    if not data:
        return None
    lists = {key: tuple(data[key]) for key in ("xs", "ys", "predicted", "us")}
    return Sweep(**{**data, **lists, "marks": tuple((at, label) for at, label in data["marks"])})


def plot(curve: Sweep, path: Path) -> None:
    """Plot the curve; raises :class:`WeftError` without matplotlib."""
    from weft.workbench.report.svg_curves import Curve, Mark, render_curves

    render_curves(
        path,
        [
            Curve("predicted", curve.xs, curve.predicted),
            Curve("measured", curve.xs, curve.ys, "points"),
        ],
        title=curve.title,
        x=curve.x,
        y=curve.y,
        caption=curve.says,
        marks=[Mark(at, label) for at, label in curve.marks],
    )


BAR = 32  # characters of the longest bar


def traffic(result: Mapping[str, Any]) -> str:
    """Return a picture in characters of the bytes that each implementation of a chain moves; "" without one.

    A bar is as long as the predicted bytes. Below it are the kernels with the tensors that each reads and
    writes, and the bytes that the DRAM's counters saw, if they were counted.
    """
    entries = result.get("traffic") or []
    longest = max((e["bytes"] for e in entries), default=0)
    lines = []
    for entry in entries:
        bar = "█" * round(BAR * entry["bytes"] / longest)
        us = result.get("times", {}).get(SIDE_OF.get(entry["name"], ""), {}).get("us")
        accesses = f"{round(entry['accesses'], 2):g} accesses, {unit(float(entry['bytes']), 'B')}"
        lines.append(f"{entry['name']:13} {bar:{BAR}} {accesses}{'' if us is None else f', {time(us)}'}")
        lines += [f"{'':13} {step}" for step in entry["steps"]]
        if "counted" in entry:
            share = 100 * entry["counted"] / entry["bytes"]
            counted = f"counted {unit(float(entry['counted']), 'B')}: {share:.1f} % of the prediction"
            lines.append(f"{'':13} {counted}, {entry['launches']} kernels")
    return "\n".join(lines)


def catalogue() -> str:
    """Return a table of every demonstration with its sentence and its predicted ratio."""
    rows = [
        [f"[`{d.name}`](#{d.name})", d.sentence, f"{d.expected:g}×", f"{d.at_least:g}×"] for d in all_demos()
    ]
    return table(["demo", "what it shows", "predicted", "counts as shown from"], rows, "  rr")


def section(name: str, results: Path = RESULTS) -> str:
    """Return one demonstration's part of the docs: both kernels, the prediction, and the measurements."""
    demonstration = demo(name)
    variants = {side: demonstration.variant(side) for side in SIDES}
    language = "python" if demonstration.source is None else "cuda"
    blocks = [f"```{language}\n{demonstration.code}\n```\n"]
    blocks.append("".join(f"- {side}: `{v.kernel}`, {v.how}\n" for side, v in variants.items()))
    blocks.append(f"Predicted, about {demonstration.expected:g}×: {demonstration.because}\n")
    blocks.append(f"{demonstration.see}\n")
    if demonstration.chain is not None:
        blocks.append(f"```text\n{traffic({'traffic': demonstration.chain.prediction()})}\n```\n")
    measured = [_measured_block(file, name) for file in sorted(results.glob(f"*/{FILE}"))]
    blocks += [block for block in measured if block] or [f"{MISSING}\n"]
    return "\n".join(blocks)


def _measured_block(file: Path, name: str) -> str:
    saved = load(file)
    result = next((d for d in saved["demos"] if d["name"] == name), None)
    if result is None:
        return ""
    machine = saved["machine"]
    head = f"**{machine['device']}**, {str(machine['date'])[:10]}: {verdict(result)}."
    if result["status"] == NOT_TIMED:
        return f"{head}\n"
    cells = [result.get("times", {}).get(side) for side in SIDES]
    rows = [["time", *(time(c["us"]) if c else NONE for c in cells), result["clock"].partition(":")[0]]]
    rows += [[e["label"], number(e["bad"]), number(e["good"]), e["source"]] for e in result["evidence"]]
    blocks = [head, "", table(["", "bad", "good", "source"], rows, " rr")]
    if any("counted" in entry for entry in result.get("traffic", ())):
        blocks.append(f"```text\n{traffic(result)}\n```\n")
    if "not_counted" in result:
        blocks.append(f"Not counted on that machine: {result['not_counted']}\n")
    svg = file.with_name(PLOT)
    curve = sweep(result)
    if curve is not None and svg.exists():
        # The path is seen from docs/speed/.
        blocks.append(f"![{curve.says}](../../{svg.as_posix()})\n")
    return "\n".join(blocks)
