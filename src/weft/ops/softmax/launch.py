"""How softmax's rows are laid on threads: the CUDA kernels' configurations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

WORDS = 32  # 4-byte registers that a thread of a full block has for its part of a row


@dataclass(frozen=True, kw_only=True)
class Config:
    """One launch configuration.

    ``strategy`` is ``warp`` (``lanes`` lanes hold a row), ``block``, ``cluster`` (``cluster``
    blocks hold a row), ``stream`` (blocks that stay, fed through ``slots`` chunks of shared memory)
    or ``long`` (two passes). A thread holds ``vectors`` accesses of a row. ``blocks`` a
    multiprocessor stay and take row after row; None is as many as the rows need. ``prefetch``
    loads the next row into registers during this one.
    """

    strategy: str
    threads: int
    vectors: int = 1
    lanes: int = 32
    cluster: int = 1
    slots: int = 0
    blocks: int | None = None
    prefetch: bool = False

    def __post_init__(self) -> None:
        if self.threads % 32 or not 32 <= self.threads <= 1024:
            raise ValueError(f"threads is a multiple of 32 up to 1024, not {self.threads}")
        if self.strategy == "stream" and (self.slots < self.vectors or self.blocks is None):
            raise ValueError("a stream stays, and its slots hold a row at least")

    @property
    def label(self) -> str:
        """Unlike for unlike programs: what is compiled in."""
        return f"{self.threads}x{self.vectors}-{self.lanes}-{self.cluster}-{self.slots}"


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@cache
def configure(
    columns: int, dtype: torch.dtype, access: int, clusters: bool, backward: bool
) -> Config:
    """The configuration for rows of ``columns``, moved ``access`` elements at a time.

    ``clusters``: the device has thread-block clusters and the bulk copy engine. The backward holds
    two rows where the forward holds one.
    """
    accesses = columns // access
    words = max(1, access * dtype.itemsize // 4) * (2 if backward else 1)
    most = max(1, WORDS // words)
    if accesses <= 32 * min(4, most):
        lanes = min(32, _power(accesses))
        return Config(
            strategy="warp", threads=128, vectors=_power(-(-accesses // lanes)), lanes=lanes
        )
    usual = max(1, most // 2)
    threads = -(-accesses // (32 * usual)) * 32
    if threads <= 1024:
        return Config(strategy="block", threads=threads, vectors=usual)
    if clusters:
        for cluster in (2, 4, 8):
            threads = -(-accesses // (32 * usual * cluster)) * 32
            if threads <= 512:
                return Config(strategy="cluster", threads=threads, vectors=usual, cluster=cluster)
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
                for blocks in (1024 // threads, 2048 // threads):
                    found += [
                        Config(
                            strategy="warp",
                            threads=threads,
                            vectors=vectors,
                            blocks=blocks,
                            prefetch=prefetch,
                        )
                        for prefetch in ((False,) if backward else (False, True))
                    ]
        threads = -(-accesses // (32 * vectors)) * 32
        if threads <= 1024 and threads * vectors * copies <= 8192 and vectors <= 2 * most:
            found.append(Config(strategy="block", threads=threads, vectors=vectors))
            found += _streams(threads, -(-accesses // threads), copies)
        for cluster in (2, 4, 8):
            each = -(-accesses // (32 * vectors * cluster)) * 32
            if 64 <= each <= 512 and vectors <= most:
                found.append(
                    Config(strategy="cluster", threads=each, vectors=vectors, cluster=cluster)
                )
    return list(dict.fromkeys(found))


def _streams(threads: int, vectors: int, copies: int) -> list[Config]:
    """Rings that take about all the shared memory there is, by 1 to 8 blocks a multiprocessor."""
    found = []
    for blocks in (1, 2, 3, 4, 6, 8, 12, 16):
        # Each block also has static shared memory (under 1 KiB) and 1 KiB that the system keeps.
        room = (227 * 1024 // blocks - 2048) // (threads * 16 * copies)
        for slots in {min(room, 32), min(room, 2 * vectors), min(room, 3 * vectors)}:
            if slots >= vectors and blocks * threads <= 2048:
                found.append(
                    Config(
                        strategy="stream",
                        threads=threads,
                        vectors=vectors,
                        slots=slots,
                        blocks=blocks,
                    )
                )
    return found
