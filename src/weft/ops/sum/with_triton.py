"""Sum in Triton: programs stride over tiles with float64 sums; a second kernel adds the programs' sums.

A tile has DEPTH rows of WIDTH elements and is loaded at once, so that each thread has DEPTH 16-byte loads in
flight. Its rows are added in float32 by a tree, and only that sum of DEPTH elements is added in float64. One
float64 addition for every DEPTH elements costs nothing beside the loads, and the error does not grow with the
number of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.backends.triton_jit import TritonAotKernel, tl, triton
from weft.core import Implementation
from weft.machine.device_limits import num_sms
from weft.ops._common.layout import dense
from weft.ops.sum.spec import spread


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch configuration of the first kernel: ``depth`` loads of 16 bytes in flight for each thread.

    ``programs`` is the number of programs on each SM, which stride over the tensor. With None each program
    has ``tiles`` tiles, and the hardware distributes the programs.
    """

    warps: int = 8
    depth: int = 8
    programs: int | None = 4
    tiles: int = 4
    evict_first: bool = False

    def width(self, itemsize: int) -> int:
        """Return the number of elements that the threads of a program load with 16 bytes each."""
        return self.warps * 32 * (16 // itemsize)


CONFIG = Config()
CANDIDATES = tuple(
    Config(warps=w, depth=d, programs=p, tiles=t, evict_first=e)
    for w in (4, 8, 16)
    for d in (4, 8)
    for p, t in ((1, 1), (2, 1), (4, 1), (8, 1), (None, 1), (None, 4), (None, 16))
    for e in (False, True)
    if w * (p or 1) <= 64
)
FINAL = 1024  # partial sums that the second kernel loads at a time


@triton.jit
def tree_of_rows(x):
    """Return a tile's column sums in float64; rows are added in float32 (in float64 for float64)."""
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    return tl.sum(x, axis=0).to(tl.float64)


@triton.jit
def sum_tiles(x_ptr, partials_ptr, n, DEPTH: tl.constexpr, WIDTH: tl.constexpr, EVICT: tl.constexpr):
    # x: (n,) in storage order; partials: (programs,) float64. Bytes: n read, 8 for each program written.
    TILE: tl.constexpr = DEPTH * WIDTH
    within = tl.arange(0, DEPTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    total = tl.zeros((WIDTH,), tl.float64)
    first, programs = tl.program_id(0), tl.num_programs(0)
    full = n // TILE
    # int64: a tensor may have more than 2^31 elements.
    base = x_ptr + first.to(tl.int64) * TILE
    for _ in range(first, full, programs):
        x = tl.load(base + within, eviction_policy="evict_first" if EVICT else "")
        total += tree_of_rows(x)
        base += programs.to(tl.int64) * TILE
    # Only the last tile is masked: with a bound that is no multiple of 16, Triton splits every masked load.
    if first == programs - 1:
        at = full * TILE + within.to(tl.int64)
        total += tree_of_rows(tl.load(x_ptr + at, mask=at < n, other=0.0))
    tl.store(partials_ptr + first, tl.sum(total, axis=0))


@triton.jit
def sum_partials(partials_ptr, y_ptr, count, BLOCK: tl.constexpr):
    # partials: (count,) float64; y: one element. One program, in a fixed order.
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(partials_ptr + at, mask=at < count, other=0.0)
    tl.store(y_ptr, tl.sum(total, axis=0).to(y_ptr.dtype.element_ty))


def _programs(config: Config, tiles: int, device: torch.device) -> int:
    # Without a stride: as many programs as tiles need, in the hardware's order.
    if config.programs is None:
        return max(1, triton.cdiv(tiles, config.tiles))
    return max(1, min(tiles, config.programs * num_sms(device, interpreted=2)))


def forward_with(config: Config, x: torch.Tensor) -> torch.Tensor:
    """Compute the sum with one launch configuration."""
    x = dense(x)
    n, width = x.numel(), config.width(x.element_size())
    tiles = triton.cdiv(n, config.depth * width)
    programs = _programs(config, tiles, x.device)
    partials = torch.empty(programs, dtype=torch.float64, device=x.device)
    y = torch.empty((), dtype=x.dtype, device=x.device)
    sum_tiles[(programs,)](
        x,
        partials,
        n,
        DEPTH=config.depth,
        WIDTH=width,
        EVICT=config.evict_first,
        num_warps=config.warps,
    )
    sum_partials[(1,)](partials, y, programs, BLOCK=FINAL)
    return y


def forward(x: torch.Tensor) -> torch.Tensor:
    return forward_with(CONFIG, x)


def _aot_kernels() -> tuple[TritonAotKernel, ...]:
    tiles = tuple(
        TritonAotKernel(
            label=f"sum_tiles-{dtype}",
            kernel=sum_tiles,
            signature={
                "x_ptr": f"*{dtype}",
                "partials_ptr": "*fp64",
                "n": "i64:16",
                "DEPTH": CONFIG.depth,
                "WIDTH": CONFIG.width(itemsize),
                "EVICT": CONFIG.evict_first,
            },
            num_warps=CONFIG.warps,
        )
        for dtype, itemsize in (("fp32", 4), ("bf16", 2), ("fp16", 2), ("fp64", 8))
    )
    ends = tuple(
        TritonAotKernel(
            label=f"sum_partials-{dtype}",
            kernel=sum_partials,
            signature={
                "partials_ptr": "*fp64",
                "y_ptr": f"*{dtype}",
                "count": "i32",
                "BLOCK": FINAL,
            },
        )
        for dtype in ("fp32", "bf16", "fp16", "fp64")
    )
    return tiles + ends


IMPLEMENTATION = Implementation(
    operator="sum",
    backend="triton",
    forward=forward,
    backward=spread,
    aot_kernels=_aot_kernels(),
    idea="tiles in flight, float64 partial sums, a second kernel",
)
