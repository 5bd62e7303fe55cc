"""Report of the pruning experiment from its record alone: tables, sentences, the picture, and its docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.core.json_files import read_json
from weft.core.text import slug
from weft.lab.prune.experiment import CONDITIONS, interval
from weft.workbench.report.markdown import RESULTS, table
from weft.workbench.report.scales import NONE
from weft.workbench.report.svg_curves import Curve, Mark, render_curves

# Names in --out, under results/<device>/ and docs/pictures/<device>/. The names of a device's further
# experiments begin likewise.
RECORD, PICTURE, RECORDS = "prune.json", "prune.svg", "prune*.json"
PICTURES = "../pictures"  # as seen from docs/learn/
Record = Mapping[str, Any]
Table = tuple[tuple[str, ...], list[list[str]]]


def accuracy_table(record: Record) -> Table:
    """Return a row for each density: the weights left, and each condition's mean accuracy and interval."""
    rows = []
    for row in record["rows"]:
        cells = [_density(row["density"]), f"{sum(row['weights']):,}"]
        rows.append(cells + [_accuracy(row["accuracy"].get(name)) for name in CONDITIONS])
    return ("density", "weights", *CONDITIONS), rows


def storage_table(record: Record) -> Table:
    """Return a row for each density: the bytes of the values, of either index, and the smallest sum."""
    rows = []
    for row in record["rows"]:
        nbytes = row["bytes"]
        smallest = stored(nbytes)
        cells = [f"{nbytes[key]:,}" for key in ("values", "bitmask", "indices")]
        share = f"{100 * smallest / nbytes['dense']:.1f} %"
        rows.append([_density(row["density"]), *cells, f"{smallest:,}", share])
    return ("density", "values", "bitmask", "indices", "stored bytes", "of dense"), rows


def stored(nbytes: Mapping[str, int]) -> int:
    """Return the fewest bytes that store a network: dense, or its values with the smaller index."""
    return min(nbytes["dense"], nbytes["values"] + min(nbytes["bitmask"], nbytes["indices"]))


def _density(density: float) -> str:
    return f"{100 * density:.3g} %"


def _accuracy(values: Sequence[float] | None) -> str:
    if values is None:  # the dense network has no control
        return NONE
    mean, half = interval(values)
    return f"{100 * mean:.1f} ± {100 * half:.1f} %"


def verdict_text(record: Record) -> str:
    """Return the verdict in a sentence without its full stop; raises TypeError for a record without one."""
    verdict = record["verdict"]
    margins = [
        f"{100 * m['mean']:.1f} points over {name} ({100 * m['low']:.1f} to {100 * m['high']:.1f})"
        for name, m in verdict["margins"].items()
    ]
    result = "beat both controls" if verdict["beats_both"] else "do not beat both controls"
    seeds = record["plan"]["networks"]
    return (
        f"winning tickets {result} at {_density(verdict['density'])} density, {seeds} seeds: "
        f"{', '.join(margins)}"
    )


def notes(record: Record) -> list[str]:
    """Explain the tables: the intervals, the bytes, and the time that pruning does not save."""
    images, plan, first = record["images"], record["plan"], record["rows"][0]
    return [
        f"Accuracy on {images['test']} test images: mean of {plan['networks']} seeds ± half of its 95 % "
        "interval (Student's t). Margins are paired by seed.",
        f"Bytes of one network: float32 values and biases, and the smaller of a bitmask and compressed rows' "
        f"indices; dense: {first['bytes']['dense']:,}.",
        f"Time is not saved: a masked product multiplies all {sum(first['weights']):,} weights at every "
        "density.",
    ]


def plot(record: Record, path: Path) -> None:
    """Draw accuracy over density; raises :class:`WeftError` without matplotlib."""
    curves = []
    for name in CONDITIONS:
        rows = [r for r in record["rows"] if name in r["accuracy"]]
        if not rows:
            continue
        xs = [100 * r["density"] for r in rows]
        spans = [interval(r["accuracy"][name]) for r in rows]
        curves.append(Curve(name, xs, [100 * mean for mean, _ in spans]))
        # Both ends of each interval as points of one series.
        ends = [100 * (mean + sign * half) for mean, half in spans for sign in (-1, 1)]
        curves.append(Curve(f"{name}, 95 % interval", [x for x in xs for _ in range(2)], ends, "points"))
    verdict = record["verdict"]
    marks = [Mark(100 * verdict["density"], "density of the verdict")] if verdict else []
    plan, images = record["plan"], record["images"]
    render_curves(
        path,
        curves,
        title=f"Accuracy over density: {images['name']}",
        x="weights that are left (%)",
        y="test accuracy (%)",
        caption=f"{plan['networks']} seeds, {plan['steps']} steps, rewound to step {plan['rewind']}. A "
        "winning ticket has the mask of iterative magnitude pruning and the original values; each control "
        "replaces one of the two by a random one.",
        log_x=True,
        marks=marks,
    )


def markdown(results: Path = RESULTS) -> str:
    """Return every committed experiment as Markdown with its picture."""
    blocks = []
    for file in sorted(results.glob(f"*/{RECORDS}"), key=lambda f: (f.parent, f.stem)):
        record = read_json(file)
        made_on, plan, images = record["machine"], record["plan"], record["images"]
        changed = " with uncommitted changes" if made_on.get("dirty") else ""
        commit, share = f"{str(made_on['commit'])[:10]}{changed}", f"{100 * plan['share']:.3g} %"
        layers = "-".join(map(str, (images["features"], *plan["hidden"], images["classes"])))
        blocks.append(
            f"**{made_on['device']}**, {made_on['date'][:10]}, commit {commit}, "
            f"torch {made_on['versions']['torch']}. Images: {images['name']}, {images['train']} to train, "
            f"{images['test']} to test. Network: {layers}. Training: {plan['steps']} steps of "
            f"{plan['batch']} images, Adam with learning rate {plan['learning_rate']:g}; each round prunes "
            f"{share} of the weights that are left and rewinds to step {plan['rewind']}.\n"
        )
        blocks.append(f"Result: {verdict_text(record)}.\n")
        head, rows = accuracy_table(record)
        blocks.append(table(head, rows, "r" * len(head)))
        if file.name != RECORD:  # the bytes are those of the first experiment
            continue
        blocks.append(f"![accuracy over density]({PICTURES}/{slug(made_on['device'])}/{PICTURE})\n")
        head, rows = storage_table(record)
        blocks.append(table(head, rows, "r" * len(head)))
        blocks.append(" ".join(notes(record)) + "\n")
    return "\n".join(blocks) or "Not measured yet: `weft prune --out prune`.\n"
