"""``Device``: the description of a GPU or a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU or a CPU. Sizes are in bytes, clocks in MHz, power in watts; None means unknown.

    ``units`` counts the SMs of a GPU or the physical cores of a CPU. ``threads`` is how many threads a
    process may run at once on a CPU. ``l2_bytes`` is the size of the last-level cache, all parts together.
    The fields from ``warp`` to ``shared_per_block_optin`` are limits of a GPU.
    """

    kind: str
    name: str
    arch: str
    units: int | None = None
    threads: int | None = None
    clock_mhz: float | None = None
    clock_max_mhz: float | None = None
    memory_bytes: int | None = None
    memory_clock_mhz: float | None = None
    memory_clock_max_mhz: float | None = None
    bus_width_bits: int | None = None
    l2_bytes: int | None = None
    caches: Mapping[str, int] = field(default_factory=dict)
    vectors: tuple[str, ...] = ()
    warp: int | None = None
    threads_per_sm: int | None = None
    threads_per_block: int | None = None
    blocks_per_sm: int | None = None
    registers_per_sm: int | None = None
    registers_per_block: int | None = None
    shared_per_sm: int | None = None
    shared_per_block: int | None = None
    shared_per_block_optin: int | None = None
    ecc: bool | None = None
    power_limit_w: float | None = None
    driver: str | None = None
    driver_cuda: str | None = None
    count: int = 1

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with every field under its name."""
        data = asdict(self)
        data["vectors"] = list(self.vectors)
        return data
