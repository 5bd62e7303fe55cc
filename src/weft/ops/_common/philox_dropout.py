"""Dropout masks: 16 bits of Philox 4x32-10 per element, one block of four words for eight elements.

Element ``i`` of a tensor, counted in row-major order, takes half of word ``i % 8 // 2`` of the block with
counter ``i // 8`` and key ``seed`` (philox.py): the low half for even ``i``, the high half for odd ``i``.
The element is kept if that number is at least the threshold, ``p`` rounded to a multiple of 1/65536. The
kernels (philox_dropout.cuh, philox_dropout_triton.py) keep exactly the same elements.
"""

from __future__ import annotations

import struct
from functools import cache

import torch

from weft.backends.support import backend_support
from weft.dispatch.choice import constant_while_tracing
from weft.ops._common.philox import as_int32, philox

STEPS = 1 << 16  # resolution of a probability from 0 to 1


def default_implementation(x: torch.Tensor) -> str:
    """Return the implementation of dropout that runs if the caller names none.

    It is ``cuda`` on a GPU, ``triton`` if CUDA's packages are missing, and ``eager`` on a CPU. The choice
    does not come from a table: torch's own dropout draws other bits, so that there is no library fallback.
    """
    return _default_on_gpu() if x.is_cuda else "eager"


@constant_while_tracing
def _default_on_gpu() -> str:
    return "cuda" if backend_support("cuda", "cuda") else "triton"


def random_uint16(seed: int, n: int, device: torch.device) -> torch.Tensor:
    """Return the 16-bit numbers of the first ``n`` elements: int64, shape ``(n,)``."""
    # A block has 128 bits, 16 for each of eight elements.
    words = torch.stack(philox(seed, torch.arange((n + 7) // 8, device=device)), -1)
    return torch.stack((words & 0xFFFF, words >> 16), -1).view(-1)[:n]


def threshold(p: float) -> int:
    """Return the threshold of 16-bit numbers; 65536 drops every element, and 0 none."""
    return round(p * STEPS)


def rounded_probability(p: float) -> float:
    """Return the drop probability in use: the multiple of 1/65536 nearest to ``p``."""
    return threshold(p) / STEPS


def drops_all(p: float) -> bool:
    return threshold(p) == STEPS


def keep_scale(p: float) -> float:
    """Return 1 / (1 - p') for the rounded probability p', which preserves the mean; 0 if all are dropped."""
    return 0.0 if drops_all(p) else STEPS / (STEPS - threshold(p))


@cache
def pack_threshold_and_scale(p: float) -> int:
    """Return the 64-bit argument of the CUDA kernels, for ``p`` that does not drop every element.

    The low 32 bits hold the threshold twice, once in each half; the high 32 bits hold the bits of the scale
    as a float32.
    """
    # One 64-bit argument for both: the launcher then converts one Python integer instead of two objects.
    (scale_bits,) = struct.unpack("<I", struct.pack("<f", keep_scale(p)))
    return scale_bits << 32 | threshold(p) * 0x10001


@cache
def threshold_int32(p: float) -> int:
    """Return the threshold in the high half of an int32 value, as Triton's kernels take it."""
    return as_int32(threshold(p) << 16)


def keep_mask(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    """Return which elements of ``x`` stay: booleans, contiguous, by row-major position."""
    return (random_uint16(seed, x.numel(), x.device) >= threshold(p)).view(x.shape)
