"""Metrics of a run: one line of JSON per step, and TensorBoard's log if TensorBoard is installed.

``metrics.jsonl`` has ``{"step": 7, "loss": 3.21, ...}`` for each step, with ``skipped`` and its reason
if the weights were not updated, and ``{"step": 7, "validation": 3.3}`` for each validation. Losses are
in nats per token and are written so that reading them gives the same float.
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

from weft.core import WeftError
from weft.core.json_files import loads, read_text
from weft.gpt2.train.durable_io import replace_text, write_errors

FILE, TENSORBOARD = "metrics.jsonl", "tensorboard"
NO_TENSORBOARD = (
    "TensorBoard is not installed, so its log is not written (metrics.jsonl is): "
    "pip install 'weft[tensorboard]'"
)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics file in order; a line that a crash truncated is skipped.

    Raises :class:`WeftError` for what is no regular file, or cannot be read.
    """
    if not path.exists():
        return
    try:
        content = read_text(path, errors="replace")
    except (OSError, ValueError) as error:
        raise WeftError(f"{path} cannot be read", expected="lines of JSON", got=error) from error
    for text in content.splitlines():
        try:
            line = loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            yield line


class Metrics:
    """Appends to a run's metrics.

    Args:
        folder: the run's directory.
        after: step of the checkpoint that the run resumes from. Lines of later steps are removed in one
            atomic write, because those steps are repeated.
        tensorboard: whether to write TensorBoard's log too.
    """

    def __init__(self, folder: Path, *, after: int = 0, tensorboard: bool = False) -> None:
        self.path = folder / FILE
        with write_errors("metrics", self.path):
            lines = [line for line in read_lines(self.path) if line["step"] <= after]
            replace_text(self.path, "".join(json.dumps(line) + "\n" for line in lines))
            # Line buffering: each line reaches the system at once, so a killed process loses none.
            self._file = self.path.open("a", buffering=1, encoding="utf-8")
        self._writer = _tensorboard_writer(folder / TENSORBOARD, after) if tensorboard else None

    def log(self, step: int, **values: float | str | None) -> None:
        """Append a line. A number that is not finite becomes null, since JSON has no NaN.

        Raises :class:`WeftError` if the disk is full.
        """
        line: dict[str, Any] = {"step": step}
        for name, value in values.items():
            finite = not isinstance(value, float) or math.isfinite(value)
            line[name] = value if finite else None
            if self._writer and finite and isinstance(value, float | int):
                self._writer.add_scalar(name, value, step)
        with write_errors("metrics", self.path):
            self._file.write(json.dumps(line) + "\n")

    def sync(self) -> None:
        """Put all lines onto the disk, before a checkpoint records their steps as done."""
        with write_errors("metrics", self.path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._writer:
            self._writer.close()


def tensorboard_hint() -> str:
    """Return how to install TensorBoard; empty if it is installed."""
    return "" if find_spec("tensorboard") else NO_TENSORBOARD


def _tensorboard_writer(folder: Path, after: int) -> Any:
    if tensorboard_hint():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.utils.tensorboard import SummaryWriter
    # purge_step hides the points of the steps that a resumed run repeats.
    return SummaryWriter(str(folder), purge_step=after + 1)
