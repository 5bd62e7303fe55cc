"""Cost of a case (FLOPs and compulsory bytes), and the shortest time that a device's ceilings allow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Compulsory work of a case.

    ``read`` and ``written`` are bytes: each input is read once, each output written once. ``flops`` are
    floating-point operations (a multiply-add counts 2). ``rate`` names the matrix rate that bounds them
    (``bf16``, ``fp16``, ``tf32``, ``fp32``, ``fp64``). It is None if the arithmetic is not matrix work and
    bytes alone bound the case.
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
    """Highest rates that were measured on a device.

    ``copy`` (read + written), ``read`` and ``fill`` (written) are in bytes per second. ``matrix`` maps a
    rate's name to FLOP/s. ``device`` and ``measured`` say where and when they were measured. ``doubt`` says
    why they may be too low, for instance because the machine was busy; it is empty for good ones.
    """

    device: str
    copy: float
    read: float
    fill: float
    matrix: dict[str, float]
    measured: str
    doubt: str = ""

    def bandwidth(self, cost: Cost) -> float:
        """Return bytes per second for a case's mix of reads and writes.

        It is the read ceiling for reads only, the copy ceiling for equal parts, and the fill ceiling for
        writes only. Between two of them the times are interpolated.
        """
        # A DRAM bus loses time when it turns from reads to writes: the mix decides which ceiling applies.
        written_share = cost.written / cost.nbytes if cost.nbytes else 0.5
        if written_share < 0.5:
            other, weight = self.read, 1 - 2 * written_share
        else:
            other, weight = self.fill, 2 * written_share - 1
        # Times are added, not rates: the weighted harmonic mean of the two bandwidths.
        return 1 / (weight / other + (1 - weight) / self.copy)

    def floor(self, cost: Cost) -> float | None:
        """Return the shortest possible time in seconds: the larger of bytes / bandwidth and FLOPs / rate.

        None means that the case's rate was not measured on this device.
        """
        by_bytes = cost.nbytes / self.bandwidth(cost)
        if cost.rate is None:
            return by_bytes
        if cost.rate not in self.matrix:
            return None
        return max(by_bytes, cost.flops / self.matrix[cost.rate])
