"""Guards of a run: skip steps with NaN or outliers, explain out-of-memory errors, stop on signals."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from weft.core import WeftError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
LABELS = {"loss": "the loss", "norm": "the gradients' norm"}


class TrainingError(WeftError):
    """Training cannot continue; the weights are those after the last good step."""


class RollingWindow:
    """The last ``size`` values of a number, and the z-score of another value."""

    def __init__(self, size: int, values: list[float] | None = None) -> None:
        self.values: deque[float] = deque(values or (), maxlen=size)

    def z_score(self, value: float) -> float:
        """Return the standard deviations by which ``value`` exceeds the mean; 0 until the window is
        full."""
        n = len(self.values)
        if n < (self.values.maxlen or 0):
            return 0.0
        mean = math.fsum(self.values) / n
        deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in self.values) / n)
        # Where a loss no longer changes, its deviation is rounding: a lower bound keeps rounding from
        # being an outlier.
        return (value - mean) / max(deviation, 1e-6 * abs(mean), 1e-30)


class StepGuard:
    """Decides by a step's loss and gradient norm whether its update is applied.

    A step is skipped if either number is not finite, or more than ``max_z`` standard deviations above
    the mean of the last ``window`` steps (None: no outlier test). An outlier still enters the window,
    so that a level that has risen for good becomes the usual one.
    """

    def __init__(self, max_z: float | None, window: int, patience: int) -> None:
        self.max_z, self.patience, self.in_a_row = max_z, patience, 0
        self.windows = {name: RollingWindow(window) for name in LABELS}

    def reason_to_skip(self, loss: float, norm: float) -> str | None:
        """Return the reason to skip this step, or None; the numbers enter the windows."""
        reason = None
        for (name, window), value in zip(self.windows.items(), (loss, norm), strict=True):
            if not math.isfinite(value):
                reason = reason or f"{LABELS[name]} is {value}"
                continue
            z = window.z_score(value)
            if self.max_z is not None and z > self.max_z:
                reason = reason or f"{LABELS[name]}, {value:.4g}, is {z:.1f} deviations above usual"
            window.values.append(value)
        # Outliers raise the window's mean and deviation, so a level that stays becomes usual; NaN never does,
        # and ends the run after ``patience`` steps.
        self.in_a_row = 0 if reason is None else self.in_a_row + 1
        return reason

    def check_patience(self, step: int, reason: str) -> None:
        """Raise :class:`TrainingError` if ``patience`` steps in a row were skipped."""
        if self.in_a_row >= self.patience:
            hint = "a lower --lr or a longer --warmup in a new --out; --start takes these weights"
            summary = f"step {step}: {reason}, and {self.in_a_row} steps in a row were skipped"
            raise TrainingError(summary, hint=hint)

    def state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint; :meth:`load` restores it."""
        windows = {name: list(window.values) for name, window in self.windows.items()}
        return {"in_a_row": self.in_a_row, "windows": windows}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state`."""
        self.in_a_row = state["in_a_row"]
        for name, values in state["windows"].items():
            window = self.windows[name].values
            window.clear()
            window.extend(values)


class StopSignals:
    """Context in which SIGINT and SIGTERM are recorded, so that the loop can stop after its step.

    A second SIGINT interrupts at once, as Python's handler does. Only the main thread can set handlers;
    in another thread nothing is caught.
    """

    def __init__(self) -> None:
        self.caught: int | None = None

    def __enter__(self) -> StopSignals:
        is_main_thread = threading.current_thread() is threading.main_thread()
        signals = STOP_SIGNALS if is_main_thread else ()
        self._previous = {s: signal.signal(s, self._handle) for s in signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.caught is not None and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        if self.caught is None:
            # os.write, because the signal may arrive during a print, which is not reentrant.
            os.write(2, b"\nending after this step, with a checkpoint\n")
        self.caught = number


@contextmanager
def out_of_memory_advice(step: int, batch: int, accumulate: int) -> Iterator[None]:
    """Turn an out-of-memory error into a :class:`TrainingError` that says which options to change.

    ``batch`` is the number of sequences of this process, in ``accumulate`` micro-batches.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        # The next larger split of the batch: the step's numbers stay the same except for rounding.
        divisor = next((a for a in range(accumulate + 1, batch + 1) if batch % a == 0), None)
        advice = "a smaller --length"
        if divisor:
            advice = f"--accumulate {divisor}: the same step in more micro-batches"
        raise TrainingError(
            f"step {step}: out of memory with {batch // accumulate} sequences at once",
            got=str(error).partition("\n")[0],
            hint=f"{advice}, or a smaller --batch",
        ) from error


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch's CPU allocator raises a plain RuntimeError.
    return "not enough memory" in str(error) or "can't allocate memory" in str(error)
