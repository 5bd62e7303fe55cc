"""Counter-based random bits: Philox 4x32-10 in torch's integers, the reference for all kernels.

A block of four 32-bit words is a function of a counter (64 bits, low word first, then two zero words) and
a key, the seed (64 bits, low word first). Nothing is stored: the seed and the position determine the bits.
Attention's dropout takes one word per element and uses the 32-bit thresholds of this file. The dropout
operators take 16 bits per element (philox_dropout.py). The kernels (philox.cuh, philox_triton.py) compute the
same words, bit for bit.

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
    """Return the four words, each an int64 tensor below 2^32, of the blocks at ``counter`` (int64).

    A product below 2^64 wraps around in int64 with the same bits, so that masks recover both halves.
    """
    # The upper two words of the counter are always 0: 2^64 blocks suffice.
    zero = torch.zeros_like(counter)
    a, b, c, d = counter & MASK, (counter >> 32) & MASK, zero, zero
    for i in range(ROUNDS):
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        # The key of round i in one step: the Weyl sequence adds a constant in each round.
        low, high = (seed + i * WEYL[0]) & MASK, ((seed >> 32) + i * WEYL[1]) & MASK
        a, b, c, d = (
            ((second >> 32) & MASK) ^ b ^ low,
            second & MASK,
            ((first >> 32) & MASK) ^ d ^ high,
            first & MASK,
        )
    return a, b, c, d


def threshold(p: float) -> int:
    """Return the threshold of 32-bit words: an element stays if its word is at least this."""
    # 2^32 for p = 1: no 32-bit word reaches it, so that every element is dropped.
    return min(round(p * 2.0**32), 1 << 32)


def keep_scale(p: float) -> float:
    """Return the factor 1 / (1 - p) that preserves the mean; 0 if every element is dropped."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def seed_words(seed: int) -> tuple[int, int]:
    """Return the seed's low and high word as int32 values, as kernels take them."""
    return as_int32(seed & MASK), as_int32((seed >> 32) & MASK)


@cache
def threshold_int32(p: float) -> int:
    """Return the threshold as an int32 value, for ``p`` that does not drop every element."""
    return as_int32(threshold(p))


def as_int32(word: int) -> int:
    """Reinterpret an unsigned 32-bit word as a signed one."""
    return word - (1 << 32) if word >> 31 else word


def check_dropout_arguments(where: str, p: Any, seed: Any) -> None:
    """Raise :class:`WeftError` unless ``p`` is in [0, 1] and ``seed`` is an integer of 63 bits."""
    # A bool is an int in Python: dropout(x, True) would drop everything.
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0.0 <= p <= 1.0:
        hint = "p is the chance that an element is dropped"
        raise WeftError(f"{where}: p", expected="a number from 0 to 1", got=repr(p), hint=hint)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        hint = "use a new seed for each step: int(torch.randint(1 << 62, ()))"
        raise WeftError(f"{where}: seed", expected="an integer from 0 to 2^63 - 1", got=repr(seed), hint=hint)
