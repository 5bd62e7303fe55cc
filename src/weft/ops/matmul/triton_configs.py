"""Launch configurations of matmul's Triton kernels: candidates for tuning, and those shipped."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch configuration: a ``bm x bn`` tile of c by ``warps`` warps, ``bk`` of K per pipeline stage.

    ``stages`` is the depth of the pipeline; tiles are taken in bands of ``group`` rows of tiles.
    ``descriptors`` selects the kernel that loads by tensor descriptors. The other fields are for that
    kernel: ``persistent`` programs, one per SM, that take tile after tile; ``halves`` to store a tile in
    two parts; ``flatten`` to merge the tile loop with the K loop.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    group: int = 8
    descriptors: bool = True
    persistent: bool = True
    halves: bool = False
    flatten: bool = True


def _pointers(bm: int, bn: int, bk: int, warps: int, stages: int) -> Config:
    return Config(bm=bm, bn=bn, bk=bk, warps=warps, stages=stages, descriptors=False)


def _wide(stages: int, *, group: int = 8, **flags: bool) -> Config:
    return Config(bm=128, bn=256, bk=64, warps=8, stages=stages, group=group, **flags)


def _square(stages: int, **flags: bool) -> Config:
    return Config(bm=128, bn=128, bk=64, warps=8, stages=stages, **flags)


HALF_CANDIDATES = (
    _wide(4, halves=True),
    _wide(3, halves=True),
    _wide(3),
    _wide(4, halves=True, group=16),
    _wide(4, halves=True, flatten=False),
    _wide(3, flatten=False, persistent=False),
    _wide(4, halves=True, flatten=False, persistent=False),
    Config(bm=256, bn=128, bk=64, warps=8, stages=4, halves=True),
    Config(bm=256, bn=128, bk=64, warps=8, stages=3, flatten=False, persistent=False),
    _square(4),
    _square(3, flatten=False, persistent=False),
    Config(bm=128, bn=128, bk=128, warps=8, stages=3, halves=True),
    Config(bm=128, bn=128, bk=64, warps=4, stages=3, flatten=False, persistent=False),
    _pointers(128, 256, 64, 8, 3),
    _pointers(128, 256, 64, 8, 4),
    _pointers(128, 128, 64, 8, 3),
    _pointers(64, 64, 64, 4, 4),
    _pointers(64, 32, 64, 4, 4),
)
FLOAT32_CANDIDATES = {
    "tf32": (
        Config(bm=128, bn=128, bk=32, warps=8, stages=4),
        Config(bm=128, bn=256, bk=32, warps=8, stages=3, halves=True),
        Config(bm=128, bn=128, bk=32, warps=8, stages=3, flatten=False, persistent=False),
        _pointers(128, 128, 32, 8, 3),
        _pointers(128, 128, 32, 4, 3),
        _pointers(64, 64, 32, 4, 3),
    ),
    "ieee": (
        _pointers(64, 64, 16, 4, 3),
        _pointers(64, 128, 16, 8, 3),
        _pointers(128, 64, 16, 8, 3),
        _pointers(128, 128, 16, 8, 3),
        _pointers(32, 32, 32, 4, 3),
    ),
}
# By dtype or precision: (least number of 128 x 128 tiles, configuration), the first that fits wins. 132 tiles
# give each SM of an H200 one. WITHOUT_DESCRIPTORS applies where strides or device allow no descriptor. Chosen
# by tools/sweep.py among the candidates above.
SHIPPED = {
    "half": (
        (132, _wide(4, halves=True)),
        (32, _square(4)),
        (0, _pointers(64, 64, 64, 4, 4)),
    ),
    "tf32": (
        (32, Config(bm=128, bn=128, bk=32, warps=8, stages=4)),
        (0, _pointers(64, 64, 32, 4, 3)),
    ),
    "ieee": ((0, _pointers(64, 64, 16, 4, 3)),),
}
WITHOUT_DESCRIPTORS = {
    "half": ((64, _pointers(128, 128, 64, 8, 3)), (0, _pointers(64, 64, 64, 4, 3))),
    "tf32": ((64, _pointers(128, 128, 32, 8, 3)), (0, _pointers(64, 64, 32, 4, 3))),
    "ieee": SHIPPED["ieee"],
}


def CANDIDATES(dtype: torch.dtype, precision: str = "ieee") -> tuple[Config, ...]:
    """Return the configurations worth timing for a dtype and precision."""
    return FLOAT32_CANDIDATES[precision] if dtype == torch.float32 else HALF_CANDIDATES
