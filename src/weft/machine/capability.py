"""Limits of one SM (streaming multiprocessor) for each compute capability.

They give the theoretical occupancy of a compiled kernel without a GPU. Figures: CUDA
C++ Programming Guide, "Compute Capabilities", table "Technical Specifications"; the allocation
steps are those of CUDA's occupancy calculator (``cuda_occupancy.h``).
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.core import WeftError


@dataclass(frozen=True, kw_only=True)
class SmLimits:
    """Limits of one SM. Sizes are in bytes; registers have 32 bits.

    ``shared_reserved`` is the shared memory that the system reserves for each block. ``usual_num_sms`` is the
    number of SMs of the data-centre part of this capability; dry runs compute grids for that many.
    """

    capability: int
    threads: int
    blocks: int
    shared: int
    shared_per_block: int
    usual_num_sms: int
    registers: int = 65536
    registers_per_thread: int = 255
    threads_per_block: int = 1024
    warp: int = 32
    partitions: int = 4
    register_step: int = 256
    shared_step: int = 128
    shared_reserved: int = 1024


def _row(capability: int, threads: int, blocks: int, kib: int, num_sms: int) -> SmLimits:
    return SmLimits(
        capability=capability,
        threads=threads,
        blocks=blocks,
        shared=kib << 10,
        shared_per_block=(kib - 1) << 10,
        usual_num_sms=num_sms,
    )


TABLE = {
    row.capability: row
    for row in (
        _row(80, 2048, 32, 164, 108),
        _row(86, 1536, 16, 100, 84),
        _row(89, 1536, 24, 100, 142),
        _row(90, 2048, 32, 228, 132),
        _row(100, 2048, 32, 228, 148),
    )
}


def sm_limits(capability: int) -> SmLimits:
    """Return the limits of a capability (90 for 9.0). Raise :class:`WeftError` if it is unknown."""
    if capability not in TABLE:
        raise WeftError(
            "compute capability",
            expected="one whose limits are known: " + ", ".join(f"sm_{c}" for c in TABLE),
            got=f"sm_{capability}",
        )
    return TABLE[capability]
