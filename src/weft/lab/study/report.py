"""Report of a study, generated from its record alone: tables, sentences, plots, and its part of the docs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.core.json_files import read_json
from weft.core.text import slug
from weft.lab.study.workload import KINDS
from weft.workbench.report.markdown import RESULTS, table
from weft.workbench.report.scales import NONE, percent, share, time, unit
from weft.workbench.report.svg_curves import Curve, Mark, render_curves

PLOTS = ("steps", "layers", "width", "batch", "roofline")
PHASES = {"forward": "forward pass", "step": "training step"}
RECORD = "study-mlp.json"  # its name under results/<device>/
PICTURES = "../pictures"  # as seen from docs/speed/, with one folder for each device
Study = Mapping[str, Any]
Rows = list[dict[str, Any]]
Table = tuple[tuple[str, ...], list[list[str]]]


def scaling_table(study: Study) -> Table:
    """Return one row for each fit: its axis, the fit, its interval, the roofline's fit, and the points."""
    rows = []
    for sweep, phases in study["fits"].items():
        for phase, fitted in phases.items():
            points = f"{fitted['points']}" + ("" if fitted["cold"] else ", some in the cache")
            rows.append([sweep, PHASES[phase], *_fit_cells(sweep, fitted), points])
    return ("over", "phase", "fit", "95 % interval", "roofline", "points"), rows


def _fit_cells(sweep: str, fitted: Mapping[str, Any]) -> list[str]:
    model = fitted["model"]
    if sweep in ("steps", "layers"):
        low, high = fitted["each_interval"]
        text = f"{_signed(fitted['fixed'])} + {time(fitted['each'])} each"
        return [text, f"{_signed(low)} to {_signed(high)} each", f"{time(model['each'])} each"]
    low, high = fitted["interval"]
    if sweep == "width":
        return [
            f"width^{fitted['slope']:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"width^{model['slope']:.2f}",
        ]
    measured = f"batch^{fitted['below']:.2f}, then ^{fitted['above']:.2f}"
    predicted = f"batch^{model['below']:.2f}, then ^{model['above']:.2f}"
    return [measured, f"break at {low:.0f} to {high:.0f}", predicted]


def _signed(us: float) -> str:
    return time(us) if us >= 0 else f"-{time(-us)}"


def transition_table(study: Study) -> Table:
    """Return one row for each phase: the batch of its memory-to-compute transition."""
    rows = []
    for phase, transition in study["turn"].items():
        low, high = transition["interval"]
        measured, predicted = transition["measured"], transition["predicted"]
        measured_cell = f"{measured:.0f} ({low:.0f} to {high:.0f})" if measured else NONE
        predicted_cell = "never" if predicted is None else f"{predicted:.0f}"
        rows.append([PHASES[phase], predicted_cell, measured_cell])
    return ("phase", "compute-bound from batch, predicted", "measured (95 %)"), rows


def ceilings_table(study: Study) -> Table:
    """Return one row for each phase and batch: its time and its shares of each ceiling and of the limit."""
    rows = []
    for row in study["points"]["batch"]:
        us = row["us"]
        rows.append(
            [
                PHASES[row["phase"]],
                f"{row['batch']}",
                time(us),
                unit(row["flops"] / us * 1e6, "FLOP/s"),
                share(row["memory_us"] / us),
                share(row["compute_us"] / us),
                share(row["floor_us"] / us),
                ", ".join(row["flags"]),
            ]
        )
    head = ("phase", "batch", "time", "rate", "of bandwidth", "of the rate", "of the limit", "")
    return head, rows


def kinds_table(study: Study) -> Table:
    """Return one row for each batch: the shares of a training step's time by kind of operator."""
    rows = []
    for profile in study["profile"]:
        shares = [percent(profile["shares"][kind]) for kind in KINDS]
        rows.append([f"{profile['batch']}", *shares, time(profile["us"])])
    return ("batch", *KINDS, "operators' time"), rows


def layers_table(study: Study) -> Table:
    """Return one row for each layer at the base's batch; no rows if the profile has no layers."""
    base = next(p for p in study["profile"] if p["batch"] == study["base"]["batch"])
    operators = list(base["layers"][0]) if base["layers"] else []
    rows = [
        [f"{i}", *(time(layer[operator]) for operator in operators)] for i, layer in enumerate(base["layers"])
    ]
    return ("layer", *operators), rows


def sentences(study: Study) -> list[str]:
    """Sum up the study in a few sentences, followed by one for each warning."""
    base, step = study["base"], study["fits"]["layers"]["step"]
    sizes = f"batch {base['batch']}, {base['depth']} layers of {base['width']}"
    whole = study["fits"]["steps"]["step"]
    return [
        f"A training step at {sizes}, {base['dtype']} takes {time(whole['each'])}; each layer adds "
        f"{time(step['each'])} to it (the roofline: {time(step['model']['each'])}).",
        *(_transition_sentence(study, phase) for phase in study["turn"]),
        *_profile_sentence(study["profile"]),
        *warnings(study),
    ]


def _profile_sentence(profiles: Sequence[Mapping[str, Any]]) -> list[str]:
    """Compare the smallest and the largest batch; empty for a study that was stopped before its profile."""
    if not profiles:
        return []
    first, last = profiles[0], profiles[-1]
    return [
        f"At batch {first['batch']} the optimizer takes {percent(first['shares']['optimizer'])} of "
        f"a step's operator time and matrix products {percent(first['shares']['matmul'])}; at batch "
        f"{last['batch']} {percent(last['shares']['optimizer'])} and "
        f"{percent(last['shares']['matmul'])}."
    ]


def _transition_sentence(study: Study, phase: str) -> str:
    transition, name = study["turn"][phase], PHASES[phase].capitalize()
    predicted = "none" if transition["predicted"] is None else f"{transition['predicted']}"
    if transition["measured"] is None:
        largest = study["sizes"]["batches"][-1]
        return f"{name}: no memory-to-compute transition seen up to batch {largest} (predicted: {predicted})."
    return f"{name}: compute-bound from batch {transition['measured']:.0f} (predicted: {predicted})."


def warnings(study: Study) -> list[str]:
    """Return why the numbers may be off: doubtful ceilings, noise, or sizes that all fit in the cache."""
    lines = [f"Warning: {study['doubt']}."] if study["doubt"] else []
    # A point that is in several sweeps counts once.
    rows = {json.dumps(r, sort_keys=True): r for sweep in study["points"].values() for r in sweep}
    faster = sum("faster than the matrix ceiling" in r["flags"] for r in rows.values())
    if faster and study["doubt"]:
        lines.append(f"Warning: {faster} of {len(rows)} points are faster than these doubtful ceilings.")
    noisy = sum("noisy" in r["flags"] for r in rows.values())
    if noisy:
        lines.append(f"Warning: {noisy} of {len(rows)} points are noisy; other work may share the machine.")
    if not any(r["cold"] for r in study["points"]["batch"]):
        lines.append("Warning: all weights fit in the cache here, so memory bandwidth bounds nothing.")
    return lines


def markdown(results: Path = RESULTS) -> str:
    """Return every committed study as Markdown with its plots, and the command for a missing one."""
    studies = [read_json(f) for f in sorted(results.glob(f"*/{RECORD}"))]
    kinds = {study["device"] for study in studies}
    blocks = [block for study in studies for block in _study_blocks(study)]
    for kind, name in (("cuda", "An NVIDIA GPU"), ("cpu", "A CPU")):
        if kind not in kinds:
            blocks.append(f"{name}: not measured yet: `weft study mlp --device {kind}`\n")
    return "\n".join(blocks)


def _study_blocks(study: Study) -> Iterator[str]:
    machine, name = study["machine"], study["machine"]["device"]
    changed = " with uncommitted changes" if machine.get("dirty") else ""
    versions = f"weft {machine['versions']['weft']}, torch {machine['versions']['torch']}"
    commit = f"commit {str(machine['commit'])[:10]}{changed}"
    ceilings = study["ceilings"]
    rate = unit(ceilings["matrix"][study["sizes"]["dtype"]], "FLOP/s")
    yield f"## {name}\n"
    yield (
        f"**{name}**, {machine['date'][:10]}, {commit}, {versions}; measured ceilings: copy "
        f"{unit(ceilings['copy'], 'B/s')}, read {unit(ceilings['read'], 'B/s')}, "
        f"{study['sizes']['dtype']} products {rate}.\n"
    )
    yield " ".join(sentences(study)) + "\n"
    for make_table, align in (
        (transition_table, " rr"),
        (scaling_table, "  rrr "),
        (ceilings_table, " rrrrrr "),
        (kinds_table, ""),
    ):
        head, rows = make_table(study)
        yield table(head, rows, align or "r" * len(head))
    for plot in PLOTS:
        yield f"![time over {plot}]({PICTURES}/{slug(name)}/{plot_file(plot)})\n"
    head, rows = layers_table(study)
    if rows:
        yield f"By layer, at batch {study['base']['batch']}:\n"
        yield table(head, rows, "r" * len(head))


def plot_file(name: str) -> str:
    """Return the name of a plot's file, such as ``study-mlp-batch.svg``."""
    return f"study-mlp-{name}.svg"


def plot_all(study: Study, folder: Path) -> list[Path]:
    """Plot all five into ``folder``; return their paths. Raises :class:`WeftError` without matplotlib."""
    paths = []
    for name in PLOTS:
        path = folder / plot_file(name)
        if name == "batch":
            _plot_batch(study, path)
        elif name == "width":
            _plot_width(study, path)
        elif name == "roofline":
            _plot_roofline(study, path)
        else:
            _plot_line(study, name, path)
        paths.append(path)
    return paths


def _title(study: Study, subject: str) -> str:
    return f"{subject}: {study['machine']['device']}, {study['sizes']['dtype']}"


def _base_text(study: Study, without: str = "") -> str:
    base = study["base"]
    texts = {
        "batch": f"batch {base['batch']}",
        "depth": f"{base['depth']} layers",
        "width": f"width {base['width']}",
    }
    return "At " + ", ".join(text for field, text in texts.items() if field != without) + "."


def _rows(study: Study, sweep: str, phase: str) -> Rows:
    return [r for r in study["points"][sweep] if r["phase"] == phase]


def _ms(rows: Rows, key: str = "us") -> list[float]:
    return [r[key] / 1000 for r in rows]


def _phases(study: Study, sweep: str) -> list[str]:
    return list(dict.fromkeys(r["phase"] for r in study["points"][sweep]))


def _plot_line(study: Study, sweep: str, path: Path) -> None:
    """Plot time over steps or layers with the fitted line."""
    key = {"steps": "steps", "layers": "depth"}[sweep]
    curves, slopes = [], []
    for phase in _phases(study, sweep):
        rows, fitted = _rows(study, sweep, phase), study["fits"][sweep][phase]
        xs = [0.0] + [float(r[key]) for r in rows]
        fit = [(fitted["fixed"] + fitted["each"] * x) / 1000 for x in xs]
        curves += [
            Curve(f"{PHASES[phase]}, measured", xs[1:], _ms(rows), "points"),
            Curve(f"{PHASES[phase]}, fitted line", xs, fit),
        ]
        slopes.append(f"{fitted['each'] / 1000:.3g} ms ({PHASES[phase]})")
    unit_text = {"steps": "training steps in a row (count)", "layers": "layers (count)"}[sweep]
    render_curves(
        path,
        curves,
        title=_title(study, f"An MLP's time over {sweep}"),
        x=unit_text,
        y="time (ms)",
        caption=f"Time grows linearly with {sweep}: each one adds {' and '.join(slopes)}. The line's "
        f"value at 0 is a fixed cost. {_base_text(study, 'depth' if sweep == 'layers' else '')}",
    )


def _plot_width(study: Study, path: Path) -> None:
    curves, slopes = [], []
    for phase in _phases(study, "width"):
        rows, fitted = _rows(study, "width", phase), study["fits"]["width"][phase]
        for cold, note in ((True, ""), (False, ", fits in the cache")):
            matching = [r for r in rows if r["cold"] == cold]
            if matching:
                xs = [r["width"] for r in matching]
                curves.append(Curve(f"{PHASES[phase]}{note}", xs, _ms(matching), "points"))
        widths = [r["width"] for r in rows]
        curves.append(Curve(f"{PHASES[phase]}, roofline", widths, _ms(rows, "floor_us")))
        slopes.append(f"{fitted['slope']:.2f} ({PHASES[phase]})")
    render_curves(
        path,
        curves,
        title=_title(study, "An MLP's time over width"),
        x="width of a layer (elements)",
        y="time (ms)",
        caption=f"Weights and products grow with the width squared. The slope on these axes is "
        f"{' and '.join(slopes)}. The distance of a point above its line is time that the roofline "
        f"does not predict. {_base_text(study, 'width')}",
        log_x=True,
        log_y=True,
    )


def _plot_batch(study: Study, path: Path) -> None:
    curves, marks = [], []
    for phase in _phases(study, "batch"):
        rows, transition = _rows(study, "batch", phase), study["turn"][phase]
        xs = [r["batch"] for r in rows]
        curves += [
            Curve(f"{PHASES[phase]}, measured", xs, _ms(rows), "points"),
            Curve(f"{PHASES[phase]}, roofline", xs, _ms(rows, "floor_us")),
        ]
        for source in ("predicted", "measured"):
            batch = transition[source]
            if batch and xs[0] <= batch <= xs[-1]:
                marks.append(Mark(batch, f"{PHASES[phase]} transition at {batch:.0f}, {source}"))
    render_curves(
        path,
        curves,
        title=_title(study, "An MLP's time over the batch"),
        x="batch (rows)",
        y="time (ms)",
        caption="Left of a transition the phase is memory-bound: it waits for the weights' bytes, and time "
        "hardly grows with the batch. Right of it the phase is compute-bound, and time grows with the "
        f"batch. {_base_text(study, 'batch')}",
        log_x=True,
        log_y=True,
        marks=marks,
    )


def _plot_roofline(study: Study, path: Path) -> None:
    """Plot rate over arithmetic intensity; each phase has the roof for its mix of reads and writes."""
    curves = []
    rate = study["ceilings"]["matrix"][study["sizes"]["dtype"]]
    for phase in _phases(study, "batch"):
        rows = _rows(study, "batch", phase)
        xs = [r["flops"] / r["bytes"] for r in rows]
        bandwidth = rows[0]["bytes"] / rows[0]["memory_us"] * 1e6
        ridge = rate / bandwidth
        # Three points draw the roof: both ends, and the ridge if it lies between them.
        corners = sorted({xs[0], min(max(ridge, xs[0]), xs[-1]), xs[-1]})
        if len(corners) > 1:
            roof = [min(rate, bandwidth * intensity) for intensity in corners]
            curves.append(Curve(f"{PHASES[phase]}, the measured ceilings", corners, roof))
        rates = [r["flops"] / r["us"] * 1e6 for r in rows]
        curves.append(Curve(f"{PHASES[phase]}, batch {rows[0]['batch']} and up", xs, rates, "points"))
    render_curves(
        path,
        curves,
        title=_title(study, "An MLP under the roofline"),
        x="arithmetic intensity (FLOP/byte)",
        y="rate (FLOP/s)",
        caption="Each point is a batch, larger ones to the right. Memory bandwidth bounds the points under "
        "the slope, the rate of products those under the flat part. The gap between a point and its "
        f"line is what can still be gained. {_base_text(study, 'batch')}",
        log_x=True,
        log_y=True,
    )
