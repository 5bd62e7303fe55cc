"""Datasheet peaks of common NVIDIA cards, by the driver's name for them; unknown, never guessed.

The figures are those of :mod:`weft.machine.specs`, which says what they mean. A bandwidth on which the
vendor's documents disagree is left out here: no share of it is shown. A name must match a pattern whole: a
laptop's part, a MIG slice or an export variant is another device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from weft.machine.specs import GpuSpec, all_specs


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """``bandwidth`` in bytes/s; ``matrix`` in FLOP/s by rate; ``source`` names the document."""

    bandwidth: float | None
    matrix: MappingProxyType[str, float]
    source: str

    def to_json(self) -> dict[str, Any]:
        """Return plain data in bytes/s and FLOP/s."""
        return {
            "bandwidth": self.bandwidth,
            "matrix": dict(self.matrix),
            "source": self.source,
        }


Row = tuple[re.Pattern[str], Peaks]
# Rates of Weft's operators; the specifications have integer and 4-bit rates, too.
RATES = ("fp8", "bf16", "fp16", "tf32", "fp32", "fp64")


def _row(spec: GpuSpec) -> Row:
    peaks = Peaks(
        bandwidth=None if spec.bandwidth_is_disputed else spec.bandwidth,
        matrix=MappingProxyType({name: rate for name in RATES if (rate := spec.rate(name)) is not None}),
        source=spec.document.title,
    )
    return re.compile(rf"(?:NVIDIA )?(?:{spec.driver})"), peaks


TABLE: tuple[Row, ...] = tuple(_row(spec) for spec in all_specs())


def look_up(name: str) -> Peaks | None:
    """Return the peaks of the card with this name, or None if it is unknown.

    >>> look_up("NVIDIA H100 PCIe").bandwidth
    2000000000000.0
    >>> look_up("NVIDIA H100") is None
    True
    """
    for pattern, peaks in TABLE:
        if pattern.fullmatch(name.strip()):
            return peaks
    return None
