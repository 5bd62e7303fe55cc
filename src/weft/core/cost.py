"""Cost: a case's FLOPs and compulsory bytes, and the floor a device's ceilings put under it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a case cannot do without.

    ``read`` and ``written`` are bytes, each input read once and each output written once; ``flops``
    are floating-point operations (a multiply-add counts 2); ``rate`` names the matrix rate that
    bounds them (``bf16``, ``fp16``, ``tf32``, ``fp32``, ``fp64``) or is None where the arithmetic
    is not matrix work and bytes alone bound the case.
    """

    read: int
    written: int
    flops: float = 0.0
    rate: str | None = None

    @property
    def nbytes(self) -> int:
        return self.read + self.written


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What a device reaches at best, measured on it.

    ``copy`` (bytes read + written) and ``read`` are in bytes a second; ``matrix`` maps a rate's
    name to FLOP/s. ``device`` is where and ``measured`` when.
    """

    device: str
    copy: float
    read: float
    fill: float
    matrix: dict[str, float]
    measured: str

    def bandwidth(self, cost: Cost) -> float:
        """The read ceiling for what hardly writes, else the copy ceiling."""
        return self.read if cost.written * 20 < cost.nbytes else self.copy

    def floor(self, cost: Cost) -> float | None:
        """The least time in seconds: the larger of bytes / bandwidth and FLOPs / rate.

        None where the case's rate has not been measured here: nothing is assumed.
        """
        by_bytes = cost.nbytes / self.bandwidth(cost)
        if cost.rate is None:
            return by_bytes
        if cost.rate not in self.matrix:
            return None
        return max(by_bytes, cost.flops / self.matrix[cost.rate])
