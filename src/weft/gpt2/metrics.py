"""What a run tells of itself: a line of JSON a step, and TensorBoard's log where that is installed.

``metrics.jsonl`` holds ``{"step": 7, "loss": 3.21, ...}`` for a step, with ``skipped`` and its
reason where the weights were left alone, and ``{"step": 7, "validation": 3.3}`` for a validation.
Losses are in nats a token, and are written so that reading them gives the same float again.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft.gpt2.files import replace, writing

FILE, TENSORBOARD = "metrics.jsonl", "tensorboard"
NO_TENSORBOARD = (
    "TensorBoard is not installed, so its log is not written (metrics.jsonl is): "
    "pip install 'weft[tensorboard]'"
)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file, in its order; one that a crash tore is passed over."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict) and isinstance(found.get("step"), int):
            yield found


class Metrics:
    """Appends to a run's metrics.

    Args:
        folder: the run's.
        after: how many steps the checkpoint holds that the run goes on from. Lines of later steps
            are dropped, all at once, since those steps are taken again.
        tensorboard: whether TensorBoard's log is written too.
    """

    def __init__(self, folder: Path, *, after: int = 0, tensorboard: bool = False) -> None:
        self.path = folder / FILE
        with writing("metrics", self.path):
            kept = [line for line in read(self.path) if line["step"] <= after]
            replace(self.path, "".join(json.dumps(line) + "\n" for line in kept))
            # Each line goes to the system as it is written: a killed process loses none.
            self._file = self.path.open("a", buffering=1, encoding="utf-8")
        self._writer = _writer(folder / TENSORBOARD, after) if tensorboard else None

    def log(self, step: int, **values: float | str | None) -> None:
        """Add a line. A number that is not finite is null, since JSON has no NaN.

        Raises :class:`WeftError` where the disk is full.
        """
        line: dict[str, Any] = {"step": step}
        for name, value in values.items():
            finite = not isinstance(value, float) or math.isfinite(value)
            line[name] = value if finite else None
            if self._writer and finite and isinstance(value, float | int):
                self._writer.add_scalar(name, value, step)
        with writing("metrics", self.path):
            self._file.write(json.dumps(line) + "\n")

    def sync(self) -> None:
        """Put all lines onto the disk: before a checkpoint says that its steps are done."""
        with writing("metrics", self.path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._writer:
            self._writer.close()


def missing() -> str:
    """What to install for TensorBoard's log to be written; empty where it can be."""
    return "" if find_spec("tensorboard") else NO_TENSORBOARD


def _writer(folder: Path, after: int) -> Any:
    if missing():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(str(folder), purge_step=after + 1)
