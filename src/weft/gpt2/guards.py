"""What stands between a bad moment and the weights: NaN, outliers, no memory, a signal to stop."""

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

STOPS = (signal.SIGINT, signal.SIGTERM)
WORDS = {"loss": "the loss", "norm": "the gradients' norm"}


class Hopeless(WeftError):
    """Training cannot go on as it was asked for; the weights are as the last good step left
    them."""


class Window:
    """The last ``size`` values of a number, and how far from them another lies."""

    def __init__(self, size: int, values: list[float] | None = None) -> None:
        self.values: deque[float] = deque(values or (), maxlen=size)

    def z(self, value: float) -> float:
        """How many standard deviations ``value`` is above the mean; 0 until the window is full."""
        n = len(self.values)
        if n < (self.values.maxlen or 0):
            return 0.0
        mean = math.fsum(self.values) / n
        spread = math.sqrt(math.fsum((v - mean) ** 2 for v in self.values) / n)
        # Rounding alone is no outlier, where a loss has stopped to change.
        return (value - mean) / max(spread, 1e-6 * abs(mean), 1e-30)


class Guard:
    """Judges a step by its loss and its gradients' norm, before the weights are touched.

    A step is skipped where either is not finite, or lies more than ``z`` standard deviations above
    the last ``window`` steps' (None: that is not looked at). An outlier counts in the window
    all the same, so that a level which has risen for good becomes the usual one.
    """

    def __init__(self, z: float | None, window: int, patience: int) -> None:
        self.z, self.patience, self.in_a_row = z, patience, 0
        self.windows = {name: Window(window) for name in WORDS}

    def judge(self, loss: float, norm: float) -> str | None:
        """Why this step must be skipped, or None."""
        reason = None
        for (name, window), value in zip(self.windows.items(), (loss, norm), strict=True):
            if not math.isfinite(value):
                reason = reason or f"{WORDS[name]} is {value}"
                continue
            z = window.z(value)
            if self.z is not None and z > self.z:
                reason = reason or f"{WORDS[name]}, {value:.4g}, is {z:.1f} deviations above usual"
            window.values.append(value)
        self.in_a_row = 0 if reason is None else self.in_a_row + 1
        return reason

    def check(self, step: int, reason: str) -> None:
        """Raise :class:`Hopeless` where ``patience`` steps in a row were skipped."""
        if self.in_a_row >= self.patience:
            hint = "a lower --lr or a longer --warmup in a new --out; --start takes these weights"
            what = f"step {step}: {reason}, and {self.in_a_row} steps in a row were skipped"
            raise Hopeless(what, hint=hint)

    def state(self) -> dict[str, Any]:
        """Plain data, from which :meth:`load` goes on with the same judgements."""
        kept = {name: list(window.values) for name, window in self.windows.items()}
        return {"in_a_row": self.in_a_row, "windows": kept}

    def load(self, state: dict[str, Any]) -> None:
        """Take what :meth:`state` gave."""
        self.in_a_row = state["in_a_row"]
        for name, values in state["windows"].items():
            window = self.windows[name].values
            window.clear()
            window.extend(values)


class Signals:
    """Within it, SIGINT and SIGTERM are noted for the loop to end after its step; a second SIGINT
    ends at once, as Python's own does. Outside the main thread nothing is caught."""

    def __init__(self) -> None:
        self.caught: int | None = None

    def __enter__(self) -> Signals:
        main = threading.current_thread() is threading.main_thread()
        self._before = {s: signal.signal(s, self._note) for s in (STOPS if main else ())}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.caught is not None and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        if self.caught is None:
            # No print: the signal may have come in the midst of one.
            os.write(2, b"\nending after this step, with a checkpoint\n")
        self.caught = number


@contextmanager
def memory(step: int, batch: int, accumulate: int) -> Iterator[None]:
    """Turn 'out of memory' into what to change; ``batch`` sequences in ``accumulate`` parts."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not _no_memory(error):
            raise
        told = str(error).partition("\n")[0]
        more = next((a for a in range(accumulate + 1, batch + 1) if batch % a == 0), None)
        way = f"--accumulate {more}: the same step in more parts" if more else "a smaller --length"
        raise Hopeless(
            f"step {step}: out of memory with {batch // accumulate} sequences at once",
            got=told,
            hint=f"{way}, or a smaller --batch",
        ) from error


def _no_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "not enough memory" in str(error) or "can't allocate memory" in str(error)
