"""CUDA ladder of the cumulative sum, naive to best: one idea for each step, each step an implementation.

The last step is the implementation ``cuda`` (with_cuda.py). The steps compute the inclusive scan from the
left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import FORWARD, YES, Case, Implementation, Support, no
from weft.ops._common.layout import CUDA_TYPES, FLOAT_DTYPES, contiguous_like, dtype_name, view_2d

THREADS = 256
ITEMS = 4  # elements of a thread in steps 3 to 5, as in block_scan.cuh
KERNELS = {
    "01_hillis_steele": ("hillis_steele",),
    "02_blelloch": ("blelloch",),
    "03_scan_then_propagate": ("scan_tiles", "propagate"),
    "04_reduce_then_scan": ("sum_tiles", "scan_from_prefix"),
    "05_decoupled_look_back": ("look_back_scan",),
}


@cache
def source(step: str, dtype: torch.dtype, threads: int = THREADS) -> CudaSource:
    """Return a step's program for one dtype."""
    return CudaSource(
        file=Path(__file__).with_name(f"{step}.cu"),
        kernels=KERNELS[step],
        defines=(("WEFT_T", CUDA_TYPES[dtype]), ("THREADS", str(threads))),
        label=f"{step}-{dtype_name(dtype)}",
    )


@dataclass(frozen=True)
class Rows:
    """A call of a step: x (rows, columns) with rows at ``stride`` elements, y contiguous."""

    step: str
    x: torch.Tensor
    y: torch.Tensor
    threads: int

    @property
    def stride(self) -> int:
        rows, columns = self.x.shape
        return self.x.stride(0) if rows > 1 else columns

    @property
    def tiles(self) -> int:
        return -(-self.x.shape[1] // (ITEMS * self.threads))

    def launch(self, kernel: str, blocks: int, *arguments: object) -> None:
        """Launch one kernel of the step's program for the dtype of x."""
        source(self.step, self.x.dtype, self.threads)[kernel](blocks, self.threads, *arguments)


def _one_block_a_row(call: Rows) -> None:
    rows, columns = call.x.shape
    call.launch(KERNELS[call.step][0], rows, call.x, call.y, columns, call.stride)


def _scanned_sums(call: Rows, sums: torch.Tensor) -> torch.Tensor:
    """Return the inclusive scan of the tiles' sums by the same step, a level up."""
    prefixes = torch.empty_like(sums)
    RUN[call.step](Rows(call.step, sums, prefixes, call.threads))
    return prefixes


def _scan_then_propagate(call: Rows) -> None:
    (rows, columns), tiles = call.x.shape, call.tiles
    sums = torch.empty((rows, tiles), dtype=torch.float32, device=call.x.device)
    call.launch("scan_tiles", rows * tiles, call.x, call.y, sums, columns, call.stride, tiles)
    if tiles > 1:
        call.launch("propagate", rows * tiles, call.y, _scanned_sums(call, sums), columns, tiles)


def _reduce_then_scan(call: Rows) -> None:
    (rows, columns), tiles = call.x.shape, call.tiles
    sums = torch.empty((rows, tiles), dtype=torch.float32, device=call.x.device)
    prefixes = sums  # of one tile, which reads none
    if tiles > 1:
        call.launch("sum_tiles", rows * tiles, call.x, sums, columns, call.stride, tiles)
        prefixes = _scanned_sums(call, sums)
    call.launch("scan_from_prefix", rows * tiles, call.x, prefixes, call.y, columns, call.stride, tiles)


def _look_back(call: Rows) -> None:
    (rows, columns), tiles = call.x.shape, call.tiles
    words = torch.zeros(1 + rows * tiles, dtype=torch.int64, device=call.x.device)
    call.launch("look_back_scan", rows * tiles, call.x, call.y, words, columns, call.stride, tiles)


RUN: dict[str, Callable[[Rows], None]] = {
    "01_hillis_steele": _one_block_a_row,
    "02_blelloch": _one_block_a_row,
    "03_scan_then_propagate": _scan_then_propagate,
    "04_reduce_then_scan": _reduce_then_scan,
    "05_decoupled_look_back": _look_back,
}


def scan(step: str, x: torch.Tensor, threads: int = THREADS) -> torch.Tensor:
    """Compute the inclusive scan of the last dimension by a step."""
    y = contiguous_like(x)
    if x.numel():
        x2d = view_2d(x)
        RUN[step](Rows(step, x2d, y.view(x2d.shape), threads))
    return y


def _supports(case: Case, device: str) -> Support:
    if case.params["exclusive"] or case.params["reverse"]:
        return no("the ladder's steps compute the inclusive scan from the left; use impl='cuda'")
    return YES


def _implementation(step: str, idea: str, *, deterministic: bool = True) -> Implementation:
    def forward(x: torch.Tensor, *, exclusive: bool = False, reverse: bool = False) -> torch.Tensor:
        return scan(step, x)

    return Implementation(
        operator="cumsum",
        name=f"cuda/{step.replace('_', '-')}",
        backend="cuda",
        forward=forward,
        directions=(FORWARD,),
        supports=_supports,
        deterministic=deterministic,
        aot_kernels=tuple(source(step, dtype) for dtype in FLOAT_DTYPES),
        idea=idea,
    )


HILLIS_STEELE = _implementation("01_hillis_steele", "one block a row, n log n additions, a barrier a round")
BLELLOCH = _implementation("02_blelloch", "one block a row, 2n additions in an up-sweep and a down-sweep")
SCAN_THEN_PROPAGATE = _implementation(
    "03_scan_then_propagate", "a block a tile; prefixes are added to scanned tiles: n read and written twice"
)
REDUCE_THEN_SCAN = _implementation(
    "04_reduce_then_scan", "the tiles' sums first, then one scan from the prefix: n read twice, written once"
)
LOOK_BACK = _implementation(
    "05_decoupled_look_back",
    "one launch: a tile looks back at published sums; its order of additions varies",
    deterministic=False,
)
