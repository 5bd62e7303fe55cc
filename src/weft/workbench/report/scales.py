"""Numbers with units, and axes: ticks and positions in percent of a plot's side."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

SI = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
NONE = "–"


def digits(value: float, significant: int = 3) -> str:
    """Return ``value`` with at least this many significant digits, never in exponent form."""
    if value == 0:
        return "0"
    if not math.isfinite(value):  # a rate over a time that rounds to 0
        return f"{value:g}"
    decimals = max(0, significant - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"  # six decimals at most, for values close to zero


def time(us: float | None) -> str:
    """Return microseconds as ``412 µs``, ``1.23 ms`` and so on."""
    if us is None:
        return NONE
    for size, name in ((1e6, "s"), (1e3, "ms"), (1.0, "µs")):
        if us >= size:
            return f"{digits(us / size)} {name}"
    return f"{digits(us * 1e3)} ns"


def unit(value: float | None, name: str) -> str:
    """Return ``4.17e12, 'B/s'`` as ``4.17 TB/s``."""
    if value is None:
        return NONE
    for size, prefix in SI:
        if abs(value) >= size:
            return f"{digits(value / size)} {prefix}{name}"
    return f"{digits(value)} {name}"


def share(value: float | None) -> str:
    """Return a share of 1 as percent with one decimal."""
    return NONE if value is None else f"{value * 100:.1f} %"


def percent(value: float | None) -> str:
    """Return a share of 1 as whole percent."""
    return NONE if value is None else f"{value * 100:,.0f} %"


def times(value: float | None) -> str:
    """Return a factor as ``1.84×``, with fewer digits below 1 and fewer again below 0.1."""
    if value is None:
        return NONE
    return f"{digits(value, 3 if value >= 1 else 2 if value >= 0.1 else 1)}×"


def unbroken(text: str) -> str:
    """Return ``text`` with a no-break space between each number and its unit."""
    return re.sub(r"(\d) (%|µs|ms|ns|s\b)", "\\1\u00a0\\2", text)


def tick_label(value: float) -> str:
    """Return a power of ten or a round number in short form: ``10 G``, ``0.5``."""
    if value < 1:
        return f"{value:g}"
    for size, prefix in SI:
        if value >= size:
            return f"{value / size:g}{' ' if prefix else ''}{prefix}"
    return f"{value:g}"


@dataclass(frozen=True)
class LogAxis:
    """Logarithmic axis from ``low`` to ``high``, both above zero."""

    low: float
    high: float

    def at(self, value: float) -> float:
        """Return the position in percent of the axis, clamped to 0 and 100."""
        span = math.log(self.high / self.low)
        return min(100.0, max(0.0, 100 * math.log(value / self.low) / span))

    def ticks(self, fits: Callable[[list[float]], bool]) -> list[float]:
        """Return the densest round ticks for which ``fits`` returns True; an empty list if there are none.

        Four or more powers of ten are dense enough. An axis with fewer has steps of 1, 2 and 5, or 1 and 3.
        """
        # The tolerance keeps an axis that ends on a power of ten from losing that tick to rounding.
        first = math.ceil(math.log10(self.low) - 1e-9)
        last = math.floor(math.log10(self.high) + 1e-9)
        decades = [10.0**e for e in range(first, last + 1)]
        finer = [] if len(decades) >= 4 else [self._steps(first, last, m) for m in ((1, 2, 5), (1, 3))]
        candidates = [*finer, *(decades[::stride] for stride in range(1, len(decades) + 1))]
        fitting = [c for c in candidates if c and fits(c)]
        # One tick does not show a scale: of the candidates that fit, one with two or more is better.
        return next((c for c in fitting if len(c) > 1), fitting[0] if fitting else [])

    def _steps(self, first: int, last: int, mantissas: tuple[int, ...]) -> list[float]:
        values = [m * 10.0**e for e in range(first - 1, last + 1) for m in mantissas]
        return [v for v in values if self.low <= v <= self.high]


def log_axis(values: list[float], margin: float = 1.6) -> LogAxis:
    """Return an axis that holds ``values``, extended by the factor ``margin`` on both sides."""
    low, high = min(values), max(values)
    return LogAxis(low / margin, high * margin)


@dataclass(frozen=True)
class LinearAxis:
    """Linear axis from 0 to ``high``."""

    high: float

    def at(self, value: float) -> float:
        """Return the position in percent of the axis, clamped to 0 and 100."""
        return min(100.0, max(0.0, 100 * value / self.high))

    def ticks(self, most: int = 7) -> list[float]:
        return linear_ticks(self.high, most)


def linear_ticks(high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers from 0 to at most ``high``."""
    if high <= 0:
        return [0.0]
    raw = high / count
    base = 10.0 ** math.floor(math.log10(raw))
    # The smallest round step that gives at most `count` intervals; 0.999 absorbs rounding.
    step = next(m * base for m in (1, 2, 2.5, 5, 10) if m * base >= raw * 0.999)
    return [i * step for i in range(int(high / step + 1e-9) + 1)]
