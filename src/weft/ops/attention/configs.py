"""Tiles of attention's Triton kernels: those worth timing, and those shipped."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from weft.backends.triton_jit import INTERPRETED


@dataclass(frozen=True, kw_only=True)
class Config:
    """``bm`` queries and ``bn`` keys a tile, by ``warps`` warps, ``stages`` tiles in flight.

    The forward and the queries' backward hold ``bm`` and walk ``bn`` at a time; the keys' backward
    holds ``bn`` and walks ``bm``.
    """

    bm: int
    bn: int
    warps: int
    stages: int


def _c(bm: int, bn: int, warps: int, stages: int) -> Config:
    return Config(bm=bm, bn=bn, warps=warps, stages=stages)


KINDS = ("forward", "queries", "keys")
# By kind, then by the padded head size: half types on a chip with the copy engine and 227 KiB of
# shared memory a block.
WIDE = {
    "forward": {64: _c(64, 64, 4, 2), 128: _c(64, 64, 4, 3), 256: _c(128, 64, 8, 2)},
    "queries": {64: _c(64, 64, 4, 3), 128: _c(64, 32, 4, 4), 256: _c(64, 32, 4, 2)},
    "keys": {64: _c(64, 64, 4, 3), 128: _c(64, 64, 4, 2), 256: _c(32, 64, 8, 2)},
}
# Half types elsewhere: under 99 KiB.
NARROW = {
    "forward": {64: _c(128, 64, 4, 3), 128: _c(128, 32, 8, 3), 256: _c(64, 32, 8, 2)},
    "queries": {64: _c(64, 64, 4, 2), 128: _c(64, 32, 8, 2), 256: _c(32, 32, 8, 1)},
    "keys": {64: _c(64, 64, 4, 2), 128: _c(32, 64, 8, 1), 256: _c(32, 32, 8, 1)},
}
# float32, multiplied without tensor cores.
SINGLE = {
    "forward": {64: _c(64, 32, 8, 1), 128: _c(32, 32, 8, 1), 256: _c(16, 16, 8, 1)},
    "queries": {64: _c(32, 32, 8, 1), 128: _c(32, 32, 8, 1), 256: _c(16, 16, 8, 1)},
    "keys": {64: _c(32, 32, 8, 1), 128: _c(32, 32, 8, 1), 256: _c(16, 16, 8, 1)},
}


@cache
def configure(kind: str, padded_d: int, itemsize: int, wide: bool) -> Config:
    """The shipped configuration of a kernel of ``KINDS`` for a head size padded to a power of two.

    ``wide``: the device has the copy engine and 227 KiB of shared memory a block.
    """
    if INTERPRETED:  # small, so that small cases have several tiles of each sort
        return _c(32, 16, 4, 1) if kind != "keys" else _c(16, 32, 4, 1)
    table = SINGLE if itemsize == 4 else WIDE if wide else NARROW
    return table[kind][max(64, padded_d)]


def candidates(kind: str, padded_d: int) -> list[Config]:
    """The configurations worth timing on a chip with the copy engine, for half types.

    The tiles that stay and those in flight fit in 227 KiB, and sums and scores in the registers.
    """
    found = []
    for bm, bn in (
        (128, 128),
        (128, 64),
        (64, 128),
        (64, 64),
        (128, 32),
        (32, 128),
        (64, 32),
        (32, 64),
    ):
        held, walked = (bn, bm) if kind == "keys" else (bm, bn)
        for warps in (4, 8):
            sums = held * padded_d * (2 if kind == "keys" else 1)
            scores = held * walked * (1 if kind == "forward" else 2)
            small = padded_d < 256 and held * walked < 1024 * warps // 2
            if (sums + scores) // (32 * warps) > 224 or small:
                continue
            for stages in (2, 3, 4):
                stays = held * padded_d * 2 * (1 if kind == "forward" else 2)
                if stays + 2 * stages * walked * padded_d * 2 <= 224 << 10:
                    found.append(_c(bm, bn, warps, stages))
    return found
