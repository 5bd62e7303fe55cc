"""Numbers on paper and on axes: units, ticks, and places in percent of a plot's side."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

SI = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
NONE = "–"


def digits(value: float, wanted: int = 3) -> str:
    """``value`` with at least ``wanted`` significant digits, never in exponent form."""
    if value == 0:
        return "0"
    places = max(0, wanted - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(places, 6)}f}"


def time(us: float | None) -> str:
    """Microseconds as ``412 µs``, ``1.23 ms`` and so on."""
    if us is None:
        return NONE
    for size, unit in ((1e6, "s"), (1e3, "ms"), (1.0, "µs")):
        if us >= size:
            return f"{digits(us / size)} {unit}"
    return f"{digits(us * 1e3)} ns"


def unit(value: float | None, name: str) -> str:
    """``4.17e12, 'B/s'`` as ``4.17 TB/s``."""
    if value is None:
        return NONE
    for size, prefix in SI:
        if abs(value) >= size:
            return f"{digits(value / size)} {prefix}{name}"
    return f"{digits(value)} {name}"


def share(value: float | None) -> str:
    """A share of 1 as percent with one decimal."""
    return NONE if value is None else f"{value * 100:.1f} %"


def percent(value: float | None) -> str:
    """A share of 1 as whole percent."""
    return NONE if value is None else f"{value * 100:,.0f} %"


def times(value: float | None) -> str:
    """A factor as ``1.84×``, with no more digits than it is good for."""
    if value is None:
        return NONE
    return f"{digits(value, 3 if value >= 1 else 2 if value >= 0.1 else 1)}×"


def unbroken(text: str) -> str:
    """``text`` with its numbers kept on one line with their units."""
    return re.sub(r"(\d) (%|µs|ms|ns|s\b)", "\\1\u00a0\\2", text)


def tick_label(value: float) -> str:
    """A power of ten or a round number, short: ``10 G``, ``0.5``."""
    if value < 1:
        return f"{value:g}"
    for size, prefix in SI:
        if value >= size:
            return f"{value / size:g}{' ' if prefix else ''}{prefix}"
    return f"{value:g}"


@dataclass(frozen=True)
class Log:
    """A logarithmic axis from ``low`` to ``high``, both above zero."""

    low: float
    high: float

    def at(self, value: float) -> float:
        """Percent of the way along, 0 to 100, clamped."""
        span = math.log(self.high / self.low)
        return min(100.0, max(0.0, 100 * math.log(value / self.low) / span))

    def ticks(self, most: int = 7) -> list[float]:
        """Powers of ten inside, thinned to at most ``most``; 1-2-5 steps where decades are few."""
        first = math.ceil(math.log10(self.low) - 1e-9)
        last = math.floor(math.log10(self.high) + 1e-9)
        stride = max(1, math.ceil((last - first + 1) / most))
        decades = [10.0**e for e in range(first, last + 1, stride)]
        if len(decades) >= 4:
            return decades
        finer = [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5)]
        return [v for v in finer if self.low <= v <= self.high]


def log_axis(values: list[float], room: float = 1.6) -> Log:
    """An axis that holds ``values`` with a factor ``room`` to spare on both sides."""
    low, high = min(values), max(values)
    return Log(low / room, high * room)


@dataclass(frozen=True)
class Linear:
    """An axis from 0 to ``high``."""

    high: float

    def at(self, value: float) -> float:
        """Percent of the way along, 0 to 100, clamped."""
        return min(100.0, max(0.0, 100 * value / self.high))

    def ticks(self, most: int = 7) -> list[float]:
        return linear_ticks(self.high, most)


def linear_ticks(high: float, wanted: int = 5) -> list[float]:
    """Round numbers from 0 up to at most ``high``, about ``wanted`` of them."""
    if high <= 0:
        return [0.0]
    raw = high / wanted
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(m * base for m in (1, 2, 2.5, 5, 10) if m * base >= raw * 0.999)
    return [i * step for i in range(int(high / step + 1e-9) + 1)]
