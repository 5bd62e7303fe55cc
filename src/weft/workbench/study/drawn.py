"""A study's pictures, drawn from its record alone: the scaling, and the roofline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.workbench.pictures import Curve, Mark, draw

NAMES = ("steps", "layers", "width", "batch", "roofline")
PHASES = {"forward": "forward alone", "step": "training step"}
Study = Mapping[str, Any]
Rows = list[dict[str, Any]]


def file_name(name: str) -> str:
    """A picture's file: ``study-mlp-batch.svg``."""
    return f"study-mlp-{name}.svg"


def pictures(study: Study, folder: Path) -> list[Path]:
    """Draw all five into ``folder``; their paths. Raises :class:`WeftError` without matplotlib."""
    found = []
    for name in NAMES:
        path = folder / file_name(name)
        made = {"batch": _batch, "width": _width, "roofline": _roofline}.get(name)
        if made is not None:
            made(study, path)
        else:
            _straight(study, name, path)
        found.append(path)
    return found


def _title(study: Study, what: str) -> str:
    return f"{what}: {study['machine']['device']}, {study['sizes']['dtype']}"


def _base(study: Study, *without: str) -> str:
    base = study["base"]
    said = {
        "batch": f"batch {base['batch']}",
        "depth": f"{base['depth']} layers",
        "width": f"width {base['width']}",
    }
    return "At " + ", ".join(text for word, text in said.items() if word not in without) + "."


def _rows(study: Study, sweep: str, phase: str) -> Rows:
    return [r for r in study["points"][sweep] if r["phase"] == phase]


def _ms(rows: Rows, key: str = "us") -> list[float]:
    return [r[key] / 1000 for r in rows]


def _phases(study: Study, sweep: str) -> list[str]:
    return list(dict.fromkeys(r["phase"] for r in study["points"][sweep]))


def _straight(study: Study, sweep: str, path: Path) -> None:
    """Time over steps or layers with the line through it."""
    key = {"steps": "steps", "layers": "depth"}[sweep]
    curves, each = [], []
    for phase in _phases(study, sweep):
        rows, fitted = _rows(study, sweep, phase), study["fits"][sweep][phase]
        xs = [0.0] + [float(r[key]) for r in rows]
        fit = [(fitted["fixed"] + fitted["each"] * x) / 1000 for x in xs]
        curves += [
            Curve(f"{PHASES[phase]}, measured", xs[1:], _ms(rows), "points"),
            Curve(f"{PHASES[phase]}, the line fitted", xs, fit),
        ]
        each.append(f"a {PHASES[phase]} by {fitted['each'] / 1000:.3g} ms")
    unit = {"steps": "training steps in a row (count)", "layers": "layers (count)"}[sweep]
    draw(
        path,
        curves,
        title=_title(study, f"An MLP's time over {sweep}"),
        x=unit,
        y="time (ms)",
        says=f"Time grows in a straight line with {sweep}, each more lengthening "
        f"{' and '.join(each)}; what the line has at 0 is fixed. "
        f"{_base(study, 'depth' if sweep == 'layers' else '')}",
    )


def _width(study: Study, path: Path) -> None:
    curves, slopes = [], []
    for phase in _phases(study, "width"):
        rows, fitted = _rows(study, "width", phase), study["fits"]["width"][phase]
        for cold, what in ((True, ""), (False, ", fits in the cache")):
            some = [r for r in rows if r["cold"] == cold]
            if some:
                xs = [r["width"] for r in some]
                curves.append(Curve(f"{PHASES[phase]}{what}", xs, _ms(some), "points"))
        every = [r["width"] for r in rows]
        curves.append(Curve(f"{PHASES[phase]}, the roofline's", every, _ms(rows, "floor_us")))
        slopes.append(f"{fitted['slope']:.2f} ({PHASES[phase]})")
    draw(
        path,
        curves,
        title=_title(study, "An MLP's time over width"),
        x="width of a layer (elements)",
        y="time (ms)",
        says=f"Weights and products grow with the width squared: on these axes the slope is "
        f"{' and '.join(slopes)}. Points stand over the line by what the roofline does not allow "
        f"for. {_base(study, 'width')}",
        log_x=True,
        log_y=True,
    )


def _batch(study: Study, path: Path) -> None:
    curves, marks = [], []
    for phase in _phases(study, "batch"):
        rows, turned = _rows(study, "batch", phase), study["turn"][phase]
        xs = [r["batch"] for r in rows]
        curves += [
            Curve(f"{PHASES[phase]}, measured", xs, _ms(rows), "points"),
            Curve(f"{PHASES[phase]}, the roofline's", xs, _ms(rows, "floor_us")),
        ]
        for word in ("predicted", "measured"):
            if turned[word] and xs[0] <= turned[word] <= xs[-1]:
                said = f"{PHASES[phase]} turns at {turned[word]:.0f}, {word}"
                marks.append(Mark(turned[word], said))
    draw(
        path,
        curves,
        title=_title(study, "An MLP's time over the batch"),
        x="batch (rows)",
        y="time (ms)",
        says="Left of a turn, time hardly grows with the batch: the weights' bytes take it. Right "
        f"of it, time grows with the batch: the products take it. {_base(study, 'batch')}",
        log_x=True,
        log_y=True,
        marks=marks,
    )


def _roofline(study: Study, path: Path) -> None:
    """Rate over arithmetic intensity; each phase under the roof for its mix of reads and writes."""
    curves = []
    rate = study["ceilings"]["matrix"][study["sizes"]["dtype"]]
    for phase in _phases(study, "batch"):
        rows = _rows(study, "batch", phase)
        xs = [r["flops"] / r["bytes"] for r in rows]
        bandwidth = rows[0]["bytes"] / rows[0]["memory_us"] * 1e6
        ridge = rate / bandwidth
        ends = sorted({xs[0], min(max(ridge, xs[0]), xs[-1]), xs[-1]})
        if len(ends) > 1:
            roof = [min(rate, bandwidth * at) for at in ends]
            curves.append(Curve(f"{PHASES[phase]}, the measured ceilings", ends, roof))
        seen = [r["flops"] / r["us"] * 1e6 for r in rows]
        curves.append(
            Curve(f"{PHASES[phase]}, batch {rows[0]['batch']} and up", xs, seen, "points")
        )
    draw(
        path,
        curves,
        title=_title(study, "An MLP under the roofline"),
        x="arithmetic intensity (FLOP/byte)",
        y="rate (FLOP/s)",
        says="Each point is a batch, larger to the right. On the slope, memory's bandwidth bounds "
        "it; under the flat part, the rate of products does; the gap to the line is what is left "
        f"to win. {_base(study, 'batch')}",
        log_x=True,
        log_y=True,
    )
