"""The files of a profile: trace, folded stacks, flame graph, TensorBoard's log, and the record."""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft.core import WeftError
from weft.workbench.profile import flame
from weft.workbench.profile.instruments import Reading
from weft.workbench.profile.rows import Row
from weft.workbench.profile.stacks import Folded

TRACE, STACKS, FLAME, RECORD = "trace.json", "stacks.folded", "flame.svg", "profile.json"
TENSORBOARD = "tensorboard"
NO_TENSORBOARD = (
    "TensorBoard is not installed, so its scalars are not written (the trace is): "
    "pip install 'weft[tensorboard]'"
)
MOST_ROWS = 20  # kernels whose share becomes a scalar


def folder(path: Path) -> Path:
    """The folder, made if it is not there; raises :class:`WeftError` where it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / TRACE).unlink(missing_ok=True)
    except OSError as error:
        raise WeftError("--out", expected="a folder that can be written", got=error) from error
    return path


def trace(out: Path, found: Mapping[str, Any]) -> None:
    """The Chrome trace, less the name of the host that it was taken on: traces are passed on."""
    told = {key: value for key, value in found.items() if key != "host_name"}
    (out / TRACE).write_text(json.dumps(told))


def stacks(out: Path, folded: Folded) -> list[str]:
    """Folded stacks, one file a lane, since lanes ran at the same time; the names of the files."""
    names = []
    for i, lane in enumerate(folded.lanes):
        name = STACKS if i == 0 else f"stacks-{_plain(lane.name)}.folded"
        (out / name).write_text("\n".join(lane.lines()) + "\n")
        names.append(name)
    return names


def _plain(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def picture(out: Path, folded: Folded, title: str, says: str) -> None:
    (out / FLAME).write_text(flame.svg(folded, title=title, says=says), encoding="utf-8")


def tensorboard(out: Path, name: str, readings: Sequence[Reading], rows: Sequence[Row]) -> str:
    """The trace where TensorBoard's profiler plugin looks for it, and scalars of all readings.

    Returns '', or where TensorBoard is missing the line that says so.
    """
    log = out / TENSORBOARD
    shutil.rmtree(log, ignore_errors=True)  # else an old run's curve is drawn over this one's
    log.mkdir()
    shutil.copyfile(out / TRACE, log / f"{_plain(name)}.{time.time_ns()}.pt.trace.json")
    if find_spec("tensorboard") is None:
        return NO_TENSORBOARD
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.utils.tensorboard import SummaryWriter
    with SummaryWriter(str(log)) as writer:
        for reading in readings:
            tag = reading.instrument.replace(" ", "-")
            for what, taken in (("", reading.samples), ("wall ", reading.walls)):
                for step, us in enumerate(taken):
                    writer.add_scalar(f"{what}time a call (us)/{tag}", us, step)
        for row in rows[:MOST_ROWS]:
            writer.add_scalar(f"share of the time/{row.short}", row.share, 0)
    return ""


def record(out: Path, found: Mapping[str, Any]) -> None:
    (out / RECORD).write_text(json.dumps(found, indent=1) + "\n")
