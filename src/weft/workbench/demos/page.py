"""What was shown, in words and Markdown, from the plain data that a run gives or that was kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.core.errors import WeftError
from weft.workbench.demos import all_demos, demo
from weft.workbench.demos.demo import SIDES, Sweep
from weft.workbench.demos.running import NOT_TIMED, SHOWN
from weft.workbench.figures import RESULTS, table
from weft.workbench.report.scales import NONE, digits, time, times

FILE, PICTURE = "demos.json", "wave-quantization.svg"
MISSING = (
    "Not measured yet: `weft demo all --save results/<device>/demos.json`, on a GPU, measures it."
)


def load(path: Path) -> dict[str, Any]:
    """What ``weft demo --save`` wrote; raises :class:`WeftError` for anything else."""
    try:
        said = json.loads(path.read_text())
        if {"machine", "demos"} <= set(said) and all("ways" in d for d in said["demos"]):
            return dict(said)
        got = "other JSON"
    except (OSError, ValueError, TypeError) as error:
        got = f"{type(error).__name__}: {error}"
    raise WeftError(str(path), expected="a file that weft demo --save wrote", got=got)


def figure(value: float) -> str:
    """A piece of evidence as a reader takes it: whole where it is whole, else three digits."""
    return f"{value:,.0f}" if value == round(value) else digits(value)


def verdict(shown: Mapping[str, Any]) -> str:
    """One sentence on the ratio, against what was predicted."""
    if "ratio" not in shown:
        return f"{shown['status']}: {shown['reason']}"
    low, high = shown["ratio_interval"]
    told = (
        f"the bad way takes {times(shown['ratio'])} as long ({digits(low)} to {digits(high)}); "
        f"predicted: about {shown['expected']:g}"
    )
    return told if shown["status"] == SHOWN else f"{told}; {shown['status']}: {shown['reason']}"


def sweep(shown: Mapping[str, Any]) -> Sweep | None:
    """The curve that was measured beside the pair, where there is one."""
    data = shown.get("sweep")
    if not data:
        return None
    lists = {word: tuple(data[word]) for word in ("xs", "ys", "predicted", "us")}
    return Sweep(**{**data, **lists, "marks": tuple((at, label) for at, label in data["marks"])})


def picture(found: Sweep, path: Path) -> None:
    """Draw the curve; raises :class:`WeftError` as :func:`pictures.draw` does."""
    from weft.workbench.pictures import Curve, Mark, draw

    draw(
        path,
        [
            Curve("predicted", found.xs, found.predicted),
            Curve("measured", found.xs, found.ys, "points"),
        ],
        title=found.title,
        x=found.x,
        y=found.y,
        says=found.says,
        marks=[Mark(at, label) for at, label in found.marks],
    )


def catalogue() -> str:
    """Every demonstration with its sentence and what is predicted, as a table."""
    rows = [
        [f"[`{d.name}`](#{d.name})", d.sentence, f"{d.expected:g}×", f"{d.at_least:g}×"]
        for d in all_demos()
    ]
    return table(["demo", "what it shows", "predicted", "counts as shown from"], rows, "  rr")


def section(name: str, results: Path = RESULTS) -> str:
    """One demonstration for the page: both kernels, the prediction, and what was measured."""
    one = demo(name)
    parts = [f"```cuda\n{one.code}\n```\n"]
    parts.append("".join(f"- {s}: `{one.way(s).kernel}`, {one.way(s).how}\n" for s in SIDES))
    parts.append(f"Predicted, about {one.expected:g}×: {one.because}\n")
    parts.append(f"{one.see}\n")
    measured = [_measured(file, name) for file in sorted(results.glob(f"*/{FILE}"))]
    parts += [m for m in measured if m] or [f"{MISSING}\n"]
    return "\n".join(parts)


def _measured(file: Path, name: str) -> str:
    said = load(file)
    shown = next((d for d in said["demos"] if d["name"] == name), None)
    if shown is None:
        return ""
    here = said["machine"]
    head = f"**{here['device']}**, {str(here['date'])[:10]}: {verdict(shown)}."
    if shown["status"] == NOT_TIMED:
        return f"{head}\n"
    cells = [shown.get("times", {}).get(side) for side in SIDES]
    rows = [
        ["time", *(time(c["us"]) if c else NONE for c in cells), shown["clock"].partition(":")[0]]
    ]
    rows += [
        [e["label"], figure(e["bad"]), figure(e["good"]), e["source"]] for e in shown["evidence"]
    ]
    parts = [head, "", table(["", "bad", "good", "by"], rows, " rr")]
    if "not_counted" in shown:
        parts.append(f"Not counted there: {shown['not_counted']}\n")
    svg = file.with_name(PICTURE)
    found = sweep(shown)
    if found is not None and svg.exists():
        parts.append(f"![{found.says}](../{svg.as_posix()})\n")
    return "\n".join(parts)
