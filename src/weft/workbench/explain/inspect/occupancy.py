"""Theoretical occupancy: the blocks of a kernel that fit on one SM, and the resource that limits them.

The blocks of each resource are computed as in CUDA's occupancy calculator (``cuda_occupancy.h``).
Registers are allocated to warps in steps, on each partition of the SM. Shared memory is allocated to blocks
in steps, including what the system reserves. Threads and blocks have limits of their own. The smallest
result fits. Occupancy is the resident warps over the maximum.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from weft.machine.capability import SmLimits


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Blocks that fit on an SM, and the ``share`` of its warps that they occupy.

    ``by`` is the number of blocks that each resource allows; ``limits`` names those that allow fewest.
    """

    threads: int
    shared: int
    blocks: int
    share: float
    by: dict[str, int]
    limits: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"limits": list(self.limits)}


def occupancy(sm: SmLimits, *, threads: int, registers: int, shared: int) -> Occupancy:
    """Compute the occupancy of blocks of ``threads`` with ``registers`` each and ``shared`` bytes.

    ``shared`` is static and dynamic memory together. A block that exceeds a resource gives 0 blocks with
    that resource as the limit.
    """
    # A partial warp takes the registers and the slot of a whole one.
    warps = -(-threads // sm.warp)
    warp_registers = _round_up(max(registers, 1) * sm.warp, sm.register_step)
    # A warp lives on one partition, so registers left over on two partitions cannot be combined.
    resident_warps = sm.registers // sm.partitions // warp_registers * sm.partitions
    # The system's part is allocated with the block's, so it is added before rounding.
    block_shared = _round_up(shared + sm.shared_reserved, sm.shared_step)
    by = {
        "threads": sm.threads // (warps * sm.warp) if threads <= sm.threads_per_block else 0,
        "blocks": sm.blocks,
        "registers": resident_warps // warps if registers <= sm.registers_per_thread else 0,
        "shared memory": sm.shared // block_shared if shared <= sm.shared_per_block else 0,
    }
    blocks = min(by.values())
    return Occupancy(
        threads=threads,
        shared=shared,
        blocks=blocks,
        share=blocks * warps * sm.warp / sm.threads,
        by=by,
        limits=tuple(name for name, count in by.items() if count == blocks),
    )


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
