"""Products of float32 in CUDA C++ with a tile width that is chosen at run time; see dynamic_tile.cu.

The implementations differ in one argument of the launch and share one program. ``cuda/03-shared-tile`` is the
same algorithm with a width of 32 that the compiler knows: the two are timed against each other.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import FORWARD, YES, Case, Implementation, Support, WeftError, no
from weft.ops.matmul.ladder import aligned

SOURCE = CudaSource(
    file=Path(__file__).parent / "dynamic_tile.cu",
    kernels=("matmul_dynamic_tile",),
    defines=(),
    label="fma-dynamic-tile",
)
MAX_TILE = 32  # a block has at most 1024 threads
FLOAT_BYTES = 4


def product(a: torch.Tensor, b: torch.Tensor, tile: int) -> torch.Tensor:
    """Return the product of a (h, k) and b (k, w), float32 on one GPU, by tiles of ``tile`` x ``tile``.

    Raises:
        WeftError: ``tile`` is not in 1 to 32.
    """
    if not 1 <= tile <= MAX_TILE:
        hint = "a block has one thread for each element of a tile, at most 1024"
        raise WeftError("matmul: tile", expected=f"1 to {MAX_TILE}", got=str(tile), hint=hint)
    (h, k), w = a.shape, b.shape[1]
    if 0 in (h, w, k):
        return a.new_zeros(h, w)
    c = a.new_empty(h, w)
    n_tiles = -(-h // tile) * -(-w // tile)
    kernel = SOURCE[SOURCE.kernels[0]]
    shared = 2 * tile * tile * FLOAT_BYTES
    kernel(n_tiles, tile * tile, aligned(a), aligned(b), c, h, w, k, tile, shared=shared)
    return c


def _forward(a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee", tile: int) -> torch.Tensor:
    return product(a, b, tile)


def _supports(case: Case, device: str) -> Support:
    if case.dtype != "float32" or case.params.get("precision") == "tf32":
        return no("a product of float32 with a tile width of run time; use impl='cuda'")
    return YES


def _implementation(tile: int) -> Implementation:
    return Implementation(
        operator="matmul",
        name=f"cuda/dynamic-tile-{tile}",
        backend="cuda",
        forward=partial(_forward, tile=tile),
        directions=(FORWARD,),
        supports=_supports,
        aot_kernels=(SOURCE,),
        idea=f"tiles of {tile} x {tile}, a width that the kernel is told at run time",
    )


TILE_16, TILE_32 = _implementation(16), _implementation(32)
