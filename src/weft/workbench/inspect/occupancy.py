"""Theoretical occupancy: the blocks of a kernel that one multiprocessor can hold, and the limit.

Blocks by each resource, as CUDA's occupancy calculator counts them (``cuda_occupancy.h``):
registers are given to warps in steps, on each of the multiprocessor's partitions; shared memory to
blocks in steps, with what the system keeps added; threads and blocks are limits of their own. The
least of these is what fits. Occupancy is resident warps over the most that can be.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from weft.machine.capability import Multiprocessor


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """``blocks`` that fit on a multiprocessor, and the ``share`` of its warps that they make.

    ``by`` is how many blocks each resource would allow; ``limits`` names those that allow least.
    """

    threads: int
    shared: int
    blocks: int
    share: float
    by: dict[str, int]
    limits: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"limits": list(self.limits)}


def occupancy(sm: Multiprocessor, *, threads: int, registers: int, shared: int) -> Occupancy:
    """For blocks of ``threads`` with ``registers`` each and ``shared`` bytes, static and dynamic.

    A block that none can hold has 0 blocks, and the resource that it exceeds for limit.
    """
    warps = -(-threads // sm.warp)
    a_warp = _up(max(registers, 1) * sm.warp, sm.register_step)
    held = sm.registers // sm.partitions // a_warp * sm.partitions
    taken = _up(shared + sm.shared_reserved, sm.shared_step)
    by = {
        "threads": sm.threads // (warps * sm.warp) if threads <= sm.threads_per_block else 0,
        "blocks": sm.blocks,
        "registers": held // warps if registers <= sm.registers_per_thread else 0,
        "shared memory": sm.shared // taken if shared <= sm.shared_per_block else 0,
    }
    blocks = min(by.values())
    return Occupancy(
        threads=threads,
        shared=shared,
        blocks=blocks,
        share=blocks * warps * sm.warp / sm.threads,
        by=by,
        limits=tuple(name for name, most in by.items() if most == blocks),
    )


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
