"""Record of a training run, which ``weft train --json`` prints, and the plot of its losses.

    weft train --json --out RUN > results/<device>/train-NAME.json

A record has the machine, the plan, the outcome, the sample and the points of the loss curve.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft import machine
from weft.gpt2.train import metrics
from weft.gpt2.train.run_directory import read_plan
from weft.gpt2.train.training import TrainResult
from weft.workbench.report.svg_curves import Curve, render_curves

PLOT = "loss.svg"
NO_MATPLOTLIB = "matplotlib is not installed, so loss.svg is not drawn: pip install 'weft[plots]'"
MAX_POINTS = 400  # of a curve: each is the mean of neighbouring steps
Points = list[tuple[float, float]]


def to_json(result: TrainResult) -> dict[str, Any]:
    """Return a run as plain data."""
    plan = read_plan(result.directory)
    training, validation = losses(result.directory)
    xs, ys = averaged(training)
    return {
        "machine": machine.fingerprint(),
        "model": plan["model"],
        "train": plan["train"],
        "tokeniser": plan["tokeniser"],
        **result.outcome.to_json(),
        "first_loss": training[0][1] if training else None,
        # Four digits: the record is committed, and the plot needs no more.
        "curve": [[x, round(y, 4)] for x, y in zip(xs, ys, strict=True)],
        "validations": [list(point) for point in validation],
        "out": str(result.directory),
        "sample": result.sample,
        **({} if result.profile is None else {"profile": result.profile}),
    }


def matplotlib_hint() -> str:
    """Return how to install matplotlib; empty if it is installed."""
    return "" if find_spec("matplotlib") else NO_MATPLOTLIB


def plot_losses(directory: Path, title: str) -> Path | None:
    """Plot ``loss.svg`` from a run's metrics; None without matplotlib or without a loss."""
    training, validation = losses(directory)
    if matplotlib_hint() or not training:
        return None
    xs, ys = averaged(training)
    steps_per_point = -(-len(training) // MAX_POINTS)
    mean = "" if steps_per_point == 1 else f", the mean of {steps_per_point} steps"
    curves = [Curve(f"training{mean}", xs, ys)]
    caption = f"Training ends at {ys[-1]:.3f} nats a token."
    if validation:
        steps, values = ([p[k] for p in validation] for k in (0, 1))
        curves.append(Curve("validation", steps, values, style="points"))
        caption = f"{caption[:-1]}, validation at {validation[-1][1]:.3f}."
    path = directory / PLOT
    render_curves(path, curves, title=title, x="step", y="loss (nats a token)", caption=caption)
    return path


def losses(directory: Path) -> tuple[Points, Points]:
    """Return (step, loss) points of a run's training and of its validation, without missing numbers."""
    points: dict[str, Points] = {"loss": [], "validation": []}
    for line in metrics.read_lines(directory / metrics.FILE):
        for name, series in points.items():
            if isinstance(line.get(name), float):
                series.append((float(line["step"]), line[name]))
    return points["loss"], points["validation"]


def averaged(points: Points) -> tuple[list[float], list[float]]:
    """Return at most ``MAX_POINTS`` means of neighbouring points, as xs and ys."""
    size = -(-len(points) // MAX_POINTS)
    chunks = [points[i : i + size] for i in range(0, len(points), size)] if points else []
    xs, ys = ([sum(p[k] for p in chunk) / len(chunk) for chunk in chunks] for k in (0, 1))
    return xs, ys
