"""How softmax's rows are laid on threads: the CUDA kernels' configurations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

WORDS = 32  # 4-byte registers that a thread of a full block has for its part of a row
PART = 72 << 10  # bytes of a row that a block of ``shared`` holds at most: three blocks fit


@dataclass(frozen=True, kw_only=True)
class Config:
    """One launch configuration.

    ``strategy`` is ``warp`` (``lanes`` lanes hold a row) or ``block`` (a block does), in registers,
    ``vectors`` accesses a thread; ``shared`` (the shared memory of ``cluster`` blocks does, and
    ``blocks`` of them must fit on a multiprocessor); or ``long`` (two passes).
    """

    strategy: str
    threads: int
    vectors: int = 1
    lanes: int = 32
    cluster: int = 1
    blocks: int = 1

    def __post_init__(self) -> None:
        if self.threads % 32 or not 32 <= self.threads <= 1024:
            raise ValueError(f"threads is a multiple of 32 up to 1024, not {self.threads}")

    @property
    def label(self) -> str:
        """Unlike for unlike programs: what is compiled in."""
        return f"{self.threads}x{self.vectors}-{self.lanes}-{self.cluster}-{self.blocks}"


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@cache
def configure(
    columns: int, dtype: torch.dtype, access: int, clusters: bool, backward: bool
) -> Config:
    """The configuration for rows of ``columns``, moved ``access`` elements at a time.

    ``clusters``: the device has thread-block clusters and the bulk copy engine. The backward holds
    two rows where the forward holds one. Chosen on an H200, bf16: see docs/log.md, 2026-11-20, and
    for rows past 32 KiB results' sweep-long-rows-2026-11-22.ndjson.
    """
    accesses = columns // access
    copies = 2 if backward else 1
    words = max(1, access * dtype.itemsize // 4) * copies
    most = max(1, WORDS // words)
    if accesses <= 32 * min(4, most):
        lanes = min(32, _power(accesses))
        vectors = _power(-(-accesses // lanes))
        return Config(strategy="warp", threads=64, vectors=vectors, lanes=lanes)
    if accesses <= 64 * most and not backward:
        return Config(strategy="block", threads=64, vectors=most)  # 1 % under 128 threads and half
    usual = max(1, most // 2)
    threads = -(-accesses // (32 * usual)) * 32
    bulk = clusters and access * dtype.itemsize == 16
    if 512 < threads <= 1024 and bulk and not backward:
        return Config(strategy="shared", threads=512, cluster=2, blocks=4)
    if threads <= 1024:
        return Config(strategy="block", threads=threads, vectors=usual)
    if bulk:
        for cluster in (1, 2, 4, 8):
            part = accesses * copies * 16 // cluster
            if part <= PART:
                threads = 128 if backward else 256
                return Config(strategy="shared", threads=threads, cluster=cluster, blocks=3)
    threads = -(-accesses // (32 * most)) * 32
    if threads <= 1024:
        return Config(strategy="block", threads=threads, vectors=most)
    return Config(strategy="long", threads=512)


def candidates(columns: int, dtype: torch.dtype, backward: bool = False) -> list[Config]:
    """The configurations worth timing for rows of ``columns`` on a device with clusters.

    All take 16-byte accesses: ``columns`` is a multiple of one.
    """
    accesses = columns * dtype.itemsize // 16
    copies = 2 if backward else 1
    most = 8 // copies
    found = [Config(strategy="long", threads=t) for t in (512, 1024)]
    for vectors in (1, 2, 4, 8):
        if accesses <= 32 * vectors <= 2 * accesses and vectors <= most:
            for threads in (32, 64, 128, 256):
                found.append(Config(strategy="warp", threads=threads, vectors=vectors))
        threads = -(-accesses // (32 * vectors)) * 32
        if threads <= 1024 and threads * vectors * copies <= 8192 and vectors <= 2 * most:
            found.append(Config(strategy="block", threads=threads, vectors=vectors))
    return found + _shared(accesses * copies)


def _shared(accesses: int) -> list[Config]:
    """Blocks that hold 8 to 64 KiB of a row, as many as shared memory allows or fewer."""
    found = []
    for cluster in (1, 2, 4, 8):
        part = 16 * accesses // cluster
        if not 8 << 10 <= part <= PART:
            continue
        # Each block also has some static shared memory and 1 KiB that the system keeps.
        most = (227 << 10) // (part + 2560)
        for threads in (64, 128, 256, 512):
            blocks = min(most, 2048 // threads, 32)
            for resident in sorted({blocks, max(1, 3 * blocks // 4)}):
                found.append(
                    Config(strategy="shared", threads=threads, cluster=cluster, blocks=resident)
                )
    return found
