"""Datasheet peaks of common NVIDIA cards, by the driver's name for them; unknown, never guessed.

Every row names the public document its figures are from. Rates are dense (the datasheets' figures
with sparsity halved), with fp32 accumulation, and at the boost clock, which no long product holds.
``fp64`` is the matrix units' where the card has them for fp64. A figure that NVIDIA's own
documents disagree on, or that we are not sure of, is left out. A name must match a pattern whole:
a laptop's part, a MIG slice or an export variant is another device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


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


def _row(pattern: str, source: str, gbs: float | None, **tflops: float) -> Row:
    peaks = Peaks(
        bandwidth=None if gbs is None else gbs * 1e9,
        matrix=MappingProxyType({rate: value * 1e12 for rate, value in tflops.items()}),
        source=source,
    )
    return re.compile(rf"(?:NVIDIA )?(?:{pattern})"), peaks


V100 = "NVIDIA V100 Tensor Core GPU datasheet"
A100 = "NVIDIA A100 Tensor Core GPU datasheet"
H100 = "NVIDIA H100 Tensor Core GPU datasheet"
H200 = "NVIDIA H200 Tensor Core GPU datasheet"
GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper"
ADA = "NVIDIA Ada GPU architecture whitepaper"
GB202 = "NVIDIA RTX Blackwell GPU architecture whitepaper"

# Pattern, document, GB/s, then TFLOP/s by rate; one row a card, so that a row is a line or two.
# fmt: off
TABLE: tuple[Row, ...] = (
    _row("Tesla V100-SXM2-(?:16|32)GB", V100, 900, fp16=125, fp32=15.7, fp64=7.8),
    _row("Tesla V100-PCIE-(?:16|32)GB", V100, 900, fp16=112, fp32=14, fp64=7),
    _row("Tesla V100S-PCIE-32GB", V100, 1134, fp16=130, fp32=16.4, fp64=8.2),
    # 300 GB/s in the datasheet, 320 in the whitepaper: left out.
    _row("(?:Tesla )?T4", "NVIDIA T4 datasheet", None, fp16=65, fp32=8.1),
    _row("A100-SXM4-40GB|A100-PCIE-40GB", A100, 1555,
         bf16=312, fp16=312, tf32=156, fp32=19.5, fp64=19.5),
    _row("A100-SXM4-80GB", A100, 2039, bf16=312, fp16=312, tf32=156, fp32=19.5, fp64=19.5),
    _row("A100 80GB PCIe", A100, 1935, bf16=312, fp16=312, tf32=156, fp32=19.5, fp64=19.5),
    _row("A30", "NVIDIA A30 datasheet", 933, bf16=165, fp16=165, tf32=82, fp32=10.3, fp64=10.3),
    _row("A10", "NVIDIA A10 datasheet", 600, bf16=125, fp16=125, tf32=62.5, fp32=31.2),
    _row("H100 80GB HBM3", H100, 3350,
         fp8=1979, bf16=989.5, fp16=989.5, tf32=494.5, fp32=67, fp64=67),
    _row("H100 PCIe", H100, 2000, fp8=1513, bf16=756.5, fp16=756.5, tf32=378, fp32=51, fp64=51),
    _row("H100 NVL", H100, 3900,
         fp8=1670.5, bf16=835.5, fp16=835.5, tf32=417.5, fp32=60, fp64=60),
    _row("H200", H200, 4800, fp8=1979, bf16=989.5, fp16=989.5, tf32=494.5, fp32=67, fp64=67),
    _row("H200 NVL", H200, 4800,
         fp8=1670.5, bf16=835.5, fp16=835.5, tf32=417.5, fp32=60, fp64=60),
    # Its documents disagree on the bandwidth (7.7 or 8 TB/s) and on tf32, fp32 and fp64.
    _row("B200", "NVIDIA DGX B200 datasheet, one of its eight GPUs", None,
         fp8=4500, bf16=2250, fp16=2250),
    _row("L4", "NVIDIA L4 datasheet", 300, fp8=242.5, bf16=121, fp16=121, tf32=60, fp32=30.3),
    _row("L40S", "NVIDIA L40S datasheet", 864,
         fp8=733, bf16=362.05, fp16=362.05, tf32=183, fp32=91.6),
    _row("GeForce RTX 3090", GA102, 936, bf16=71, fp16=71, tf32=35.6, fp32=35.6),
    _row("GeForce RTX 4090", ADA, 1008,
         fp8=330.3, bf16=165.2, fp16=165.2, tf32=82.6, fp32=82.6),
    _row("GeForce RTX 5090", GB202, 1792,
         fp8=419, bf16=209.5, fp16=209.5, tf32=104.8, fp32=104.8),
)
# fmt: on


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
