"""The picture of a run: its losses over its steps, drawn from ``metrics.jsonl`` alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from weft.gpt2 import metrics
from weft.workbench.pictures import Curve, draw

FILE = "loss.svg"
NO_PICTURE = "matplotlib is not installed, so loss.svg is not drawn: pip install 'weft[plots]'"
POINTS = 400  # of a curve: each is the mean of the steps around it


def missing() -> str:
    """What to install for a picture to be drawn; empty where it can be."""
    return "" if find_spec("matplotlib") else NO_PICTURE


def picture(folder: Path, title: str) -> Path | None:
    """Draw ``folder/loss.svg`` from its metrics; None where matplotlib or a loss is missing."""
    trained, validated = losses(folder)
    if missing() or not trained:
        return None
    xs, ys = averaged(trained)
    each = -(-len(trained) // POINTS)
    mean = "" if each == 1 else f", the mean of {each} steps"
    curves = [Curve(f"training{mean}", xs, ys)]
    says = f"Training ends at {ys[-1]:.3f} nats a token."
    if validated:
        at, held = ([p[k] for p in validated] for k in (0, 1))
        curves.append(Curve("validation", at, held, style="points"))
        says = f"{says[:-1]}, validation at {validated[-1][1]:.3f}."
    path = folder / FILE
    draw(path, curves, title=title, x="step", y="loss (nats a token)", says=says)
    return path


def losses(folder: Path) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(step, loss) of a run's training and of its validation; steps without a number left out."""
    found: dict[str, list[tuple[float, float]]] = {"loss": [], "validation": []}
    for line in metrics.read(folder / metrics.FILE):
        for name, points in found.items():
            if isinstance(line.get(name), float):
                points.append((float(line["step"]), line[name]))
    return found["loss"], found["validation"]


def averaged(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """At most ``POINTS`` means of neighbours, as xs and ys."""
    each = -(-len(points) // POINTS)
    parts = [points[i : i + each] for i in range(0, len(points), each)]
    xs, ys = ([sum(p[k] for p in part) / len(part) for part in parts] for k in (0, 1))
    return xs, ys
