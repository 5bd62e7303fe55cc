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

    ``copy`` (read + written), ``read`` and ``fill`` (written) are in bytes a second; ``matrix``
    maps a rate's name to FLOP/s. ``device`` is where they were measured and ``measured`` when.
    """

    device: str
    copy: float
    read: float
    fill: float
    matrix: dict[str, float]
    measured: str

    def bandwidth(self, cost: Cost) -> float:
        """Bytes a second for a case's mix of reads and writes.

        Only reads: the read ceiling; as many of each: the copy ceiling; only writes: the fill
        ceiling; between two of them, time in proportion.
        """
        share = cost.written / cost.nbytes if cost.nbytes else 0.5
        other, part = (self.read, 1 - 2 * share) if share < 0.5 else (self.fill, 2 * share - 1)
        return 1 / (part / other + (1 - part) / self.copy)

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
