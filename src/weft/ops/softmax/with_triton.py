"""Softmax in Triton: a program has whole rows in registers, so that each element is read and written once.

Longer rows take two passes: one for the statistics, online (arXiv:1805.02867), and one for the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from weft.backends.triton_jit import TritonAotKernel, launch_and_prepare, tl, triton
from weft.core import Implementation
from weft.core.implementation import with_invariant
from weft.machine.device_limits import num_sms
from weft.ops._common.invariant_rows import aligned_rows
from weft.ops._common.layout import contiguous_like, view_2d
from weft.ops._common.prepared import Launch, LaunchCache, are_repeatable

LOG2E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-3.4028234663852886e38)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Mapping of rows to programs.

    ``block`` is the number of columns (a power of two) that a program has at once; a longer row takes two
    passes. A tile has ``rows`` rows. ``programs`` None launches one program for each tile; a number launches
    that many persistent programs on each SM, with the loads of ``stages`` tiles in flight.
    """

    block: int
    rows: int = 1
    warps: int = 4
    programs: int | None = None
    stages: int = 1


@triton.jit
def normalised(x):
    """Return the softmax along the last axis of a float32 tile; masked elements are -inf."""
    # A row of -inf alone gives -inf - -inf = NaN, as torch does. The subtraction comes before the product
    # with log2(e), which could overflow.
    e = tl.exp2((x - tl.max(x, 1)[:, None]) * LOG2E)
    return e * (1.0 / tl.sum(e, 1))[:, None]


# `rows` is only compared with the row's number: no program is compiled apart for some numbers of rows.
@triton.jit(do_not_specialize=["rows"])
def softmax_tile(x_ptr, y_ptr, rows, columns, x_stride, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    # x: (rows, columns), rows x_stride apart; y: (rows, columns) contiguous. One tile of ROWS rows for each
    # program. Bytes moved: every element read once, written once.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=float("-inf"))
    y = normalised(x.to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * columns + column, y, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def softmax_persistent(
    x_ptr,
    y_ptr,
    rows,
    columns,
    x_stride,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # As softmax_tile, by persistent programs: the loads of the next tiles overlap this tile's arithmetic.
    column = tl.arange(0, BLOCK)[None, :]
    step = tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), step, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        inside = (row < rows) & (column < columns)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=float("-inf"))
        y = normalised(x.to(tl.float32)).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row * columns + column, y, mask=inside)


@triton.jit
def softmax_long(x_ptr, y_ptr, columns, x_stride, BLOCK: tl.constexpr):
    # One program for each row, which is longer than BLOCK: read twice (the second time from L2 if it fits),
    # written once. Each of BLOCK lanes has its own running maximum and sum, merged at the end. The maximum
    # starts at the least finite number, not at -inf: -inf - -inf would be NaN. The eviction policies ask the
    # L2 to keep the row for the second pass and to drop it after that.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * columns
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), LEAST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + lane < columns
        x = tl.load(x_ptr + start + lane, mask=inside, other=float("-inf"), eviction_policy="evict_last").to(
            tl.float32
        )
        # Each lane rescales its own sum: no reduction across threads inside the loop.
        new_top = tl.maximum(top, x)
        total = total * tl.exp2((top - new_top) * LOG2E) + tl.exp2((x - new_top) * LOG2E)
        top = new_top
    row_top = tl.max(top, 0)
    scale = 1.0 / tl.sum(total * tl.exp2((top - row_top) * LOG2E), 0)
    for start in range(0, columns, BLOCK):
        inside = start + lane < columns
        x = tl.load(x_ptr + start + lane, mask=inside, eviction_policy="evict_first").to(tl.float32)
        y = tl.exp2((x - row_top) * LOG2E) * scale
        tl.store(y_ptr + start + lane, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def softmax_backward_tile(
    grad_ptr, y_ptr, dx_ptr, rows, columns, grad_stride, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    # grad: (rows, columns), rows grad_stride apart; y, dx: contiguous. dx = y (g - sum(g y)).
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    y = tl.load(y_ptr + row * columns + column, mask=inside, other=0).to(tl.float32)
    g = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0).to(tl.float32)
    dx = y * (g - tl.sum(g * y, 1)[:, None])
    tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_backward_long(grad_ptr, y_ptr, dx_ptr, columns, grad_stride, BLOCK: tl.constexpr):
    # One program for each row, which is longer than BLOCK: first the dot product, then the output.
    row = tl.program_id(0).to(tl.int64)
    grad_ptr += row * grad_stride
    y_ptr += row * columns
    dx_ptr += row * columns
    lane = tl.arange(0, BLOCK)
    dot = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + lane < columns
        y = tl.load(y_ptr + start + lane, mask=inside, other=0, eviction_policy="evict_last")
        g = tl.load(grad_ptr + start + lane, mask=inside, other=0, eviction_policy="evict_last")
        dot += g.to(tl.float32) * y.to(tl.float32)
    row_dot = tl.sum(dot, 0)
    for start in range(0, columns, BLOCK):
        inside = start + lane < columns
        y = tl.load(y_ptr + start + lane, mask=inside, eviction_policy="evict_first").to(tl.float32)
        g = tl.load(grad_ptr + start + lane, mask=inside, eviction_policy="evict_first")
        dx = y * (g.to(tl.float32) - row_dot)
        tl.store(dx_ptr + start + lane, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@cache
def configure(columns: int, dtype: torch.dtype) -> Config:
    """Return the forward's launch configuration for rows of ``columns``."""
    block = triton.next_power_of_2(columns)
    # Short rows share a program: about 1024 elements for each warp, 32 for each thread.
    if block <= 2048:
        return Config(block=block, rows=max(1, 1024 // block), warps=max(1, block // 1024))
    if block <= 32768:
        return Config(block=block, warps=min(32, block // 1024))
    return Config(block=8192, warps=16)


@cache
def configure_backward(columns: int, dtype: torch.dtype) -> Config:
    """Return the backward's configuration: a row takes twice the registers, hence twice the warps."""
    block = triton.next_power_of_2(columns)
    if block <= 1024:
        return Config(block=block, rows=max(1, 512 // block), warps=max(1, block // 512))
    if block <= 16384:
        return Config(block=block, warps=min(32, block // 512))
    return Config(block=8192, warps=16)


def candidates(columns: int, dtype: torch.dtype) -> list[Config]:
    """Return the forward configurations worth timing for rows of ``columns``."""
    block = triton.next_power_of_2(columns)
    configs = []
    for warps in (1, 2, 4, 8, 16, 32):
        each = block // (32 * warps)  # elements a thread
        for rows in (1, 2, 4):
            if not 4 <= each * rows <= 64 or (rows > 1 and block > 2048):
                continue
            configs.append(Config(block=block, rows=rows, warps=warps))
            tile_bytes = block * rows * dtype.itemsize
            for stages in (1, 2, 3):
                # Pipelined tiles are in shared memory: 200 of an SM's 228 KiB, shared by its programs.
                max_programs = (200 * 1024) // (tile_bytes * stages) if stages > 1 else 64 // warps
                programs = min(64 // warps, max_programs, 8 if warps > 1 else 16)
                if programs:
                    configs.append(
                        Config(block=block, rows=rows, warps=warps, programs=programs, stages=stages)
                    )
    configs += [Config(block=b, warps=w) for b, w in ((4096, 8), (8192, 16), (16384, 32)) if b < columns]
    return configs


LAUNCHES = LaunchCache()


def forward(x: torch.Tensor) -> torch.Tensor:
    y = contiguous_like(x)
    key = ("forward", x.shape, x.dtype, x.get_device()) if are_repeatable(x, y) else None
    launch = LAUNCHES.get(key)
    if launch is not None:
        launch(x.data_ptr(), y.data_ptr())
    elif x.numel():
        LAUNCHES.store(key, _launch_forward(configure(x.shape[-1], x.dtype), x, y))
    return y


def forward_with(config: Config, x: torch.Tensor) -> torch.Tensor:
    """Compute the forward with one configuration; ``x`` is not empty."""
    y = contiguous_like(x)
    _launch_forward(config, x, y)
    return y


def _launch_forward(config: Config, x: torch.Tensor, y: torch.Tensor) -> Launch | None:
    """Launch the forward, and return the same launch with other addresses."""
    input2d = view_2d(x)
    rows, columns = input2d.shape
    stride, warps = input2d.stride(0), config.warps
    if config.block < columns:
        long = {"BLOCK": config.block, "num_warps": warps}
        return launch_and_prepare(softmax_long, (rows,), input2d, y, columns, stride, **long)
    tiles = triton.cdiv(rows, config.rows)
    shape = {"BLOCK": config.block, "ROWS": config.rows, "num_warps": warps}
    if config.programs is None:
        return launch_and_prepare(softmax_tile, (tiles,), input2d, y, rows, columns, stride, **shape)
    grid = (min(tiles, config.programs * num_sms(x.device, interpreted=2)),)
    shape["STAGES"] = config.stages
    return launch_and_prepare(softmax_persistent, grid, input2d, y, rows, columns, stride, **shape)


def backward(grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    dx = contiguous_like(y)
    key = ("backward", y.shape, y.dtype, y.get_device()) if are_repeatable(grad, y, dx) else None
    launch = LAUNCHES.get(key)
    if launch is not None:
        launch(grad.data_ptr(), y.data_ptr(), dx.data_ptr())
    elif y.numel():
        config = configure_backward(y.shape[-1], y.dtype)
        LAUNCHES.store(key, _launch_backward(config, grad, y.contiguous(), dx))
    return (dx,)


def backward_with(config: Config, grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    """Compute the backward with one configuration from the output ``y``, which is not empty."""
    dx = contiguous_like(y)
    _launch_backward(config, grad, y.contiguous(), dx)
    return (dx,)


def _launch_backward(config: Config, grad: torch.Tensor, y: torch.Tensor, dx: torch.Tensor) -> Launch | None:
    """Launch the backward, and return the same launch with other addresses."""
    input2d = view_2d(grad)
    rows, columns = input2d.shape
    stride = input2d.stride(0)
    options = {"BLOCK": config.block, "num_warps": config.warps}
    if config.block < columns:
        return launch_and_prepare(softmax_backward_long, (rows,), input2d, y, dx, columns, stride, **options)
    grid = (triton.cdiv(rows, config.rows),)
    options["ROWS"] = config.rows
    return launch_and_prepare(softmax_backward_tile, grid, input2d, y, dx, rows, columns, stride, **options)


def _aot_kernels() -> tuple[TritonAotKernel, ...]:
    kernels = []
    for dtype, kind in ((torch.float32, "fp32"), (torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        for columns in (1024, 4096, 16384, 65536):
            kernels.append(_aot_kernel(configure(columns, dtype), kind, columns))
            kernels.append(_aot_kernel(configure_backward(columns, dtype), kind, columns, is_backward=True))
    persistent = Config(block=4096, warps=8, programs=2, stages=3)
    kernels.append(_aot_kernel(persistent, "bf16", 4096))
    return tuple(kernels)


def _aot_kernel(config: Config, kind: str, columns: int, is_backward: bool = False) -> TritonAotKernel:
    pointers = ("grad_ptr", "y_ptr", "dx_ptr") if is_backward else ("x_ptr", "y_ptr")
    stride = "grad_stride" if is_backward else "x_stride"
    signature: dict[str, object] = dict.fromkeys(pointers, f"*{kind}")
    if config.block >= columns:
        signature["rows"] = "i32"
    signature |= {"columns": "i32:16", stride: "i32:16", "BLOCK": config.block}
    if config.block < columns:
        kernel = softmax_backward_long if is_backward else softmax_long
    else:
        signature["ROWS"] = config.rows
        kernel = softmax_backward_tile if is_backward else softmax_tile
        if config.programs is not None:
            kernel = softmax_persistent
            signature["STAGES"] = config.stages
    name = getattr(kernel, "__name__", str(kernel))
    return TritonAotKernel(
        label=f"{name}-{kind}-{columns}", kernel=kernel, signature=signature, num_warps=config.warps
    )


IMPLEMENTATION = with_invariant(
    Implementation(
        operator="softmax",
        backend="triton",
        forward=forward,
        backward=backward,
        aot_kernels=_aot_kernels(),
        idea="whole rows in one program, read once",
    ),
    forward=lambda x: forward(aligned_rows(x)),
    backward=lambda grad, y: backward(aligned_rows(grad), aligned_rows(y)),
)
