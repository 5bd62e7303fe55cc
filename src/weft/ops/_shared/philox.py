"""Random bits by counter: Philox 4x32-10, in torch's integers, the one exact definition here.

A block of four 32-bit words belongs to a counter (64 bits, low word first, then two zero words)
under a key, the seed (64 bits, low word first). Nothing is stored: whoever knows the seed and the
place knows the bits. What takes which of them: attention's dropout a word an element, for which the
thresholds below are, and dropout 16 bits (philox_dropout.py). The kernels (philox.cuh,
philox_triton.py) give the very same words.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from weft.core import WeftError

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox(seed: int, counter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The four words, each an int64 tensor below 2^32, of the blocks at ``counter`` (int64).

    A product below 2^64 wraps round in int64, whose bits are the same: masks find both its halves.
    """
    zero = torch.zeros_like(counter)
    a, b, c, d = counter & MASK, (counter >> 32) & MASK, zero, zero
    for i in range(ROUNDS):
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        low, high = (seed + i * WEYL[0]) & MASK, ((seed >> 32) + i * WEYL[1]) & MASK
        a, b, c, d = (
            ((second >> 32) & MASK) ^ b ^ low,
            second & MASK,
            ((first >> 32) & MASK) ^ d ^ high,
            first & MASK,
        )
    return a, b, c, d


def threshold(p: float) -> int:
    """An element is kept where its word is at least this: one in 2^32 is the finest share."""
    return min(round(p * 2.0**32), 1 << 32)


def scale(p: float) -> float:
    """What the kept are multiplied by, so that the mean stays; 0 where none is kept."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def halves(seed: int) -> tuple[int, int]:
    """The seed's low and high word as signed 32-bit numbers, as kernels take them."""
    return signed(seed & MASK), signed((seed >> 32) & MASK)


@cache
def limit(p: float) -> int:
    """The threshold as a signed 32-bit number, for ``p`` that drops not all."""
    return signed(threshold(p))


def signed(word: int) -> int:
    """An unsigned 32-bit number as a signed one of the same bits."""
    return word - (1 << 32) if word >> 31 else word


def check_chance(where: str, p: Any, seed: Any) -> None:
    """Raise :class:`WeftError` unless ``p`` is in [0, 1] and ``seed`` is 63 bits of an integer."""
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0.0 <= p <= 1.0:
        hint = "p is the chance that an element is dropped"
        raise WeftError(f"{where}: p", expected="a number from 0 to 1", got=repr(p), hint=hint)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        hint = "a fresh one a step: int(torch.randint(1 << 62, ()))"
        raise WeftError(
            f"{where}: seed", expected="an integer from 0 to 2^63 - 1", got=repr(seed), hint=hint
        )
