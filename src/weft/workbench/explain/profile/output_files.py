"""Files of a profile: trace, folded stacks, flame graph, TensorBoard log and the record."""

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
from weft.workbench.explain.profile import flame
from weft.workbench.explain.profile.instruments import Reading
from weft.workbench.explain.profile.rows import Row
from weft.workbench.explain.profile.stacks import Folded

TRACE, STACKS, FLAME, RECORD = "trace.json", "stacks.folded", "flame.svg", "profile.json"
TENSORBOARD = "tensorboard"
NO_TENSORBOARD = (
    "TensorBoard is not installed, so its scalars are not written (the trace is): "
    "pip install 'weft[tensorboard]'"
)
MAX_SCALAR_ROWS = 20  # kernels whose share becomes a scalar


def prepare_folder(path: Path) -> None:
    """Create the folder and remove an old trace; raises :class:`WeftError` if it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        # If this run fails before its first export, the trace of an earlier run must not pass for its own.
        (path / TRACE).unlink(missing_ok=True)
    except OSError as error:
        raise WeftError("--out", expected="a folder that can be written", got=error) from error


def write_trace(out: Path, trace: Mapping[str, Any]) -> None:
    """Write the Chrome trace without the host's name, since traces are passed on."""
    anonymous = {key: value for key, value in trace.items() if key != "host_name"}
    (out / TRACE).write_text(json.dumps(anonymous))


def write_stacks(out: Path, folded: Folded) -> list[str]:
    """Write folded stacks and return the file names; one file a lane, since lanes run at the same time."""
    names = []
    for i, lane in enumerate(folded.lanes):
        name = STACKS if i == 0 else f"stacks-{_file_name(lane.name)}.folded"
        (out / name).write_text("\n".join(lane.lines()) + "\n")
        names.append(name)
    return names


def _file_name(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def write_flame_graph(out: Path, folded: Folded, title: str, description: str) -> None:
    text = flame.svg(folded, title=title, description=description)
    (out / FLAME).write_text(text, encoding="utf-8")


def write_tensorboard(out: Path, name: str, readings: Sequence[Reading], rows: Sequence[Row]) -> str:
    """Write the trace for TensorBoard's profiler plugin, and scalars of all readings.

    Returns '', or a line that says that TensorBoard is missing.
    """
    log = out / TENSORBOARD
    # Event files of an earlier run would be drawn as a second curve over this one.
    shutil.rmtree(log, ignore_errors=True)
    log.mkdir()
    # The plugin finds traces by this suffix, with a time stamp before it.
    shutil.copyfile(out / TRACE, log / f"{_file_name(name)}.{time.time_ns()}.pt.trace.json")
    if find_spec("tensorboard") is None:
        return NO_TENSORBOARD
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.utils.tensorboard import SummaryWriter
    with SummaryWriter(str(log)) as writer:
        for reading in readings:
            tag = reading.instrument.replace(" ", "-")
            for prefix, times in (("", reading.samples), ("wall ", reading.walls)):
                for step, us in enumerate(times):
                    writer.add_scalar(f"{prefix}time a call (us)/{tag}", us, step)
        for row in rows[:MAX_SCALAR_ROWS]:
            writer.add_scalar(f"share of the time/{row.short}", row.share, 0)
    return ""


def write_record(out: Path, record: Mapping[str, Any]) -> None:
    (out / RECORD).write_text(json.dumps(record, indent=1) + "\n")
