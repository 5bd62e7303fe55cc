"""Launch configurations of the linear family's Triton product: candidates for tuning, and those shipped.

K is short in a transformer (768), and a tile's epilogue costs time unless another tile's product runs
meanwhile. Two programs per SM (``programs_per_sm=2``, 128 x 128 tiles of 4 warps) hide it for each other, and
read 1.2 GB from L2 for 16384 x 3072 x 768. One program with 128 x 256 tiles reads a quarter less and waits
for its epilogue. GELU prefers the first, a bias alone the second; on compute capability 9.0 both lose to the
ping-pong kernel (pingpong.py). Records: results/nvidia-h200/sweep-linear.ndjson and
sweep-linear-2026-11-22.ndjson.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.ops._common import gelu_triton
from weft.ops.linear import triton_kernels as kernels

BIAS, GELU, GELU_KEEP, RESIDUAL = (
    int(e.value) for e in (kernels.BIAS, kernels.GELU, kernels.GELU_KEEP, kernels.RESIDUAL)
)
MATHS = {
    "unit": int(gelu_triton.UNIT.value),
    "paired": int(gelu_triton.PAIRED.value),
    "tanh": int(gelu_triton.TANH.value),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch configuration: a ``bm x bn`` tile by ``warps`` warps, ``bk`` of K per pipeline stage.

    ``stages`` is the depth of the pipeline; tiles are taken in bands of ``group`` rows of tiles.
    ``descriptors`` selects the kernel that loads by tensor descriptors. The other fields are for that
    kernel: ``programs_per_sm`` persistent programs, an epilogue in ``parts`` (1, 2 or 4), ``flatten`` to
    merge the tile loop with the K loop, ``prefetch_bias`` into L1 before the product, ``math`` of GELU
    (``unit``, ``paired`` or ``tanh``, see triton_kernels.py), and ``pre_by_pointers`` to store the
    pre-activation by plain pointers instead of the copy engine. ``pingpong`` selects the kernel of
    pingpong.py: 128 x 128 tiles, compute capability 9.0 only, no residual.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    group: int = 8
    descriptors: bool = True
    programs_per_sm: int = 1
    parts: int = 2
    flatten: bool = True
    prefetch_bias: bool = False
    math: str = "unit"
    pre_by_pointers: bool = False
    pingpong: bool = False

    def __post_init__(self) -> None:
        if self.math not in MATHS:
            raise ValueError(f"math: expected one of {', '.join(MATHS)}, got {self.math!r}")


def _wide(stages: int, **options: Any) -> Config:
    return Config(bm=128, bn=256, bk=64, warps=8, stages=stages, **options)


def _two_per_sm(**options: Any) -> Config:
    return Config(bm=128, bn=128, bk=64, warps=4, stages=3, programs_per_sm=2, **options)


def _three_per_sm(**options: Any) -> Config:
    return Config(bm=128, bn=128, bk=64, warps=4, stages=2, programs_per_sm=3, parts=4, **options)


def _pointers(bm: int, bn: int, bk: int, warps: int, stages: int) -> Config:
    return Config(bm=bm, bn=bn, bk=bk, warps=warps, stages=stages, descriptors=False)


def _pingpong(**options: Any) -> Config:
    return Config(bm=128, bn=128, bk=64, warps=4, pingpong=True, **{"stages": 6, "parts": 4, **options})


# bk = 64 is 128 bytes of a half type: one swizzle line of TMA.
SQUARE = Config(bm=128, bn=128, bk=64, warps=8, stages=3, parts=4)
TALL = Config(bm=256, bn=128, bk=64, warps=8, stages=4, parts=4)
DEEP_WIDE = _wide(4, parts=4)
SMALL = _pointers(64, 64, 64, 4, 3)
FLOAT32 = _pointers(64, 64, 16, 4, 3)
# For half types, by epilogue: (least number of 128 x 128 tiles, configuration), the first that fits wins.
# 132 tiles give each SM of an H200 one. Ping-pong entries are skipped on other devices and Triton versions;
# WITHOUT_DESCRIPTORS applies where strides or device allow no descriptor.
SHIPPED = {
    BIAS: (
        (132, _pingpong()),
        (264, replace(DEEP_WIDE, group=4)),
        (132, _two_per_sm(parts=4)),
        (32, SQUARE),
        (0, SMALL),
    ),
    GELU: (
        (132, _pingpong(math="tanh")),
        (132, _two_per_sm(parts=4, math="tanh")),
        (32, SQUARE),
        (0, SMALL),
    ),
    GELU_KEEP: (
        (132, _pingpong(math="tanh")),
        (132, _two_per_sm(math="tanh")),
        (32, SQUARE),
        (0, SMALL),
    ),
    RESIDUAL: ((132, replace(DEEP_WIDE, group=4)), (32, SQUARE), (0, SMALL)),
}
WITHOUT_DESCRIPTORS = ((64, _pointers(128, 128, 64, 8, 3)), (0, SMALL))
INTERPRETED_DESCRIPTORS = Config(bm=32, bn=64, bk=32, warps=4, stages=2)


def candidates(epilogue: int, dtype: torch.dtype) -> tuple[Config, ...]:
    """Return the configurations worth timing for an epilogue and dtype, most promising first."""
    if dtype == torch.float32:
        return (FLOAT32, _pointers(64, 128, 16, 8, 3), _pointers(128, 64, 16, 8, 3))
    if epilogue == RESIDUAL:  # its tile in shared memory leaves no space for parts=2
        return (
            replace(DEEP_WIDE, group=4),
            _wide(3, parts=4),
            DEEP_WIDE,
            replace(DEEP_WIDE, prefetch_bias=True),
            replace(DEEP_WIDE, group=16),
            TALL,
            _two_per_sm(parts=4, prefetch_bias=True),
            _two_per_sm(parts=4),
        )
    if epilogue == BIAS:
        return (
            _pingpong(),
            _wide(4, group=4),
            _wide(4),
            replace(DEEP_WIDE, group=4),
            DEEP_WIDE,
            _wide(3),
            _two_per_sm(parts=4, prefetch_bias=True),
            _two_per_sm(parts=4),
            _two_per_sm(),
        )
    configs = [
        *(_two_per_sm(parts=4), _two_per_sm(), _wide(4), replace(DEEP_WIDE, prefetch_bias=True)),
        *(_two_per_sm(group=4), _two_per_sm(group=16)),
        *(_two_per_sm(prefetch_bias=True), _two_per_sm(flatten=False)),
    ]
    if epilogue == GELU:
        configs.insert(2, _three_per_sm())  # with two outputs its registers allow no third program
    else:  # a store by descriptor waits until the store before it has been read from shared memory
        bases = (_two_per_sm(parts=4), DEEP_WIDE, _wide(3))
        configs[:0] = [replace(c, pre_by_pointers=True) for c in bases]
    configs[:0] = [_pingpong(), _pingpong(stages=5, parts=2), _pingpong(group=16), _pingpong(group=4)]
    return tuple(replace(c, math="tanh") for c in configs)
