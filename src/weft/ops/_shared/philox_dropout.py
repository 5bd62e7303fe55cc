"""Which elements dropout keeps: 16 bits of Philox 4x32-10 an element, one block of words for eight.

Element ``i`` of a tensor, counted in row-major order, has a half of word ``i % 8 // 2`` of the
block whose counter is ``i // 8`` and whose key is the seed (see philox.py): the low half where
``i`` is even, the high half where it is odd. It is kept where that number is at least the
threshold, ``p`` in 65536ths to the nearest. The kernels (philox_dropout.cuh,
philox_dropout_triton.py) keep the very same elements.
"""

from __future__ import annotations

import struct
from functools import cache

import torch

from weft.ops._shared.philox import philox, signed

STEPS = 1 << 16  # of a chance from 0 to 1


def numbers(seed: int, n: int, device: torch.device) -> torch.Tensor:
    """The first ``n`` elements' 16-bit numbers: int64, shape ``(n,)``."""
    words = torch.stack(philox(seed, torch.arange((n + 7) // 8, device=device)), -1)
    return torch.stack((words & 0xFFFF, words >> 16), -1).view(-1)[:n]


def threshold(p: float) -> int:
    """An element is kept where its number is at least this; 65536 drops all, and 0 none."""
    return round(p * STEPS)


def taken(p: float) -> float:
    """The chance with which elements are dropped: the 65536th nearest to ``p``."""
    return threshold(p) / STEPS


def drops_all(p: float) -> bool:
    return threshold(p) == STEPS


def scale(p: float) -> float:
    """What the kept are multiplied by, by the chance that is taken, so that the mean stays; 0 where
    none is kept."""
    return 0.0 if drops_all(p) else STEPS / (STEPS - threshold(p))


@cache
def rule(p: float) -> int:
    """What CUDA's kernels take, for ``p`` that drops not all: the threshold in both halves of the
    low 32 bits, and in the high 32 those of the scale as a float32."""
    (bits,) = struct.unpack("<I", struct.pack("<f", scale(p)))
    return bits << 32 | threshold(p) * 0x10001


@cache
def limit(p: float) -> int:
    """The threshold in the high half of a signed 32-bit number, as Triton's kernels take it."""
    return signed(threshold(p) << 16)


def kept(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    """Which elements of ``x`` dropout keeps: booleans, contiguous, by row-major place."""
    return (numbers(seed, x.numel(), x.device) >= threshold(p)).view(x.shape)
