"""Configurations of attention's Triton kernels: the shipped ones and the candidates for tuning."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from weft.backends.triton_jit import INTERPRETED


@dataclass(frozen=True, kw_only=True)
class Config:
    """Tiles of ``bm`` queries and ``bn`` keys, ``warps`` warps, ``stages`` pipeline stages.

    A program of the forward and of the queries' backward computes ``bm`` rows and streams ``bn`` at a
    time; one of the keys' backward computes ``bn`` and streams ``bm``.
    """

    bm: int
    bn: int
    warps: int
    stages: int


def _c(bm: int, bn: int, warps: int, stages: int) -> Config:
    return Config(bm=bm, bn=bn, warps=warps, stages=stages)


KINDS = ("forward", "queries", "keys")
# By kernel, then by padded head size. WIDE: float16 and bfloat16 on a device with the tensor memory
# accelerator and 227 KiB of shared memory for one block.
WIDE = {
    "forward": {64: _c(64, 64, 4, 2), 128: _c(64, 64, 4, 3), 256: _c(128, 64, 8, 2)},
    "queries": {64: _c(64, 64, 4, 3), 128: _c(64, 32, 4, 4), 256: _c(64, 32, 4, 2)},
    "keys": {64: _c(64, 64, 4, 3), 128: _c(64, 64, 4, 2), 256: _c(32, 64, 8, 2)},
}
# Instead of WIDE's in calls with a bias, whose tile is in registers too: with WIDE's warps these spill.
BIASED = {
    "queries": {256: _c(64, 32, 8, 2)},
    "keys": {64: _c(64, 64, 8, 3), 128: _c(64, 64, 8, 2), 256: _c(16, 64, 8, 2)},
}
# float16 and bfloat16 on other devices: less than 99 KiB of shared memory.
NARROW = {
    "forward": {64: _c(128, 64, 4, 3), 128: _c(128, 32, 8, 3), 256: _c(64, 32, 8, 2)},
    "queries": {64: _c(64, 64, 4, 2), 128: _c(64, 32, 8, 2), 256: _c(32, 32, 8, 1)},
    "keys": {64: _c(64, 64, 4, 2), 128: _c(32, 64, 8, 1), 256: _c(32, 32, 8, 1)},
}
# float32, which is multiplied without tensor cores.
SINGLE = {
    "forward": {64: _c(64, 32, 8, 1), 128: _c(32, 32, 8, 1), 256: _c(16, 16, 8, 1)},
    "queries": {64: _c(32, 32, 8, 1), 128: _c(32, 32, 8, 1), 256: _c(16, 16, 8, 1)},
    "keys": {64: _c(32, 32, 8, 1), 128: _c(32, 32, 8, 1), 256: _c(16, 16, 8, 1)},
}


def wide_config(kind: str, size: int, bias: bool) -> Config:
    """Return the configuration of ``WIDE``, or with a bias that of ``BIASED`` where it has one."""
    config = WIDE[kind][size]
    return BIASED.get(kind, {}).get(size, config) if bias else config


@cache
def configure(kind: str, padded_d: int, itemsize: int, wide: bool, bias: bool = False) -> Config:
    """Return the shipped configuration of a kernel of ``KINDS`` for a head size padded to a power of two.

    ``wide`` selects the table for devices with the tensor memory accelerator, ``bias`` that of calls with a
    bias.
    """
    if INTERPRETED:  # small tiles, so that small test cases have masked and unmasked ones
        return _c(32, 16, 4, 1) if kind != "keys" else _c(16, 32, 4, 1)
    size = max(64, padded_d)
    if itemsize == 4:
        return SINGLE[kind][size]
    return wide_config(kind, size, bias) if wide else NARROW[kind][size]


def candidates(kind: str, padded_d: int) -> list[Config]:
    """Return the configurations worth timing for float16 and bfloat16 on a device with the TMA.

    The program's own tiles and those in flight fit 227 KiB, and accumulators and scores fit the registers.
    """
    configs = []
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
        own, streamed = (bn, bm) if kind == "keys" else (bm, bn)
        for warps in (4, 8):
            sums = own * padded_d * (2 if kind == "keys" else 1)
            scores = own * streamed * (1 if kind == "forward" else 2)
            too_small = padded_d < 256 and own * streamed < 1024 * warps // 2
            if (sums + scores) // (32 * warps) > 224 or too_small:  # floats of a thread; 255 registers
                continue
            for stages in (2, 3, 4):
                own_bytes = own * padded_d * 2 * (1 if kind == "forward" else 2)
                if own_bytes + 2 * stages * streamed * padded_d * 2 <= 224 << 10:
                    configs.append(_c(bm, bn, warps, stages))
    return configs
