"""Softmax in Triton: a program holds whole rows, so each element is read and written once.

Rows longer than a program can hold are walked twice: statistics online (arXiv:1805.02867), then
answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from weft.backends.triton_jit import TritonSpecimen, tl, triton
from weft.core import Implementation
from weft.ops.softmax.rows import as_rows

LOG2E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-3.4028234663852886e38)


@dataclass(frozen=True, kw_only=True)
class Config:
    """How rows are laid on programs.

    ``block`` is the power of two of columns a program holds at once: where it is below the row's
    length the row is walked twice. ``rows`` go to a program at a time. ``programs`` a
    multiprocessor stay and take tile after tile with ``stages`` loads in flight; None is one
    program a tile.
    """

    block: int
    rows: int = 1
    warps: int = 4
    programs: int | None = None
    stages: int = 1


@triton.jit
def normalised(x):
    """Softmax along the last axis of a float32 tile; what is masked comes as -inf."""
    e = tl.exp2((x - tl.max(x, 1)[:, None]) * LOG2E)
    return e * (1.0 / tl.sum(e, 1))[:, None]


@triton.jit
def softmax_tile(x_ptr, y_ptr, rows, columns, x_stride, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    # x: (rows, columns), rows x_stride apart; y: (rows, columns) contiguous. A tile of ROWS rows a
    # program. Bytes moved: every element read once, written once.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=float("-inf"))
    y = normalised(x.to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * columns + column, y, mask=inside)


@triton.jit
def softmax_stay(
    x_ptr,
    y_ptr,
    rows,
    columns,
    x_stride,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # As softmax_tile, by programs that stay: the next tiles' loads overlap this tile's arithmetic.
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
    # One program a row, longer than BLOCK; read twice (the second time from L2 where it fits),
    # written once. Each of BLOCK lanes keeps its own running maximum and sum, merged at the end.
    # The maximum starts at the least finite number, not at -inf: -inf - -inf would be NaN.
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * columns
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), LEAST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + lane < columns
        x = tl.load(
            x_ptr + start + lane, mask=inside, other=float("-inf"), eviction_policy="evict_last"
        ).to(tl.float32)
        higher = tl.maximum(top, x)
        total = total * tl.exp2((top - higher) * LOG2E) + tl.exp2((x - higher) * LOG2E)
        top = higher
    highest = tl.max(top, 0)
    scale = 1.0 / tl.sum(total * tl.exp2((top - highest) * LOG2E), 0)
    for start in range(0, columns, BLOCK):
        inside = start + lane < columns
        x = tl.load(x_ptr + start + lane, mask=inside, eviction_policy="evict_first").to(tl.float32)
        y = tl.exp2((x - highest) * LOG2E) * scale
        tl.store(y_ptr + start + lane, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
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
    # One program a row, longer than BLOCK: the sum first, then the answers.
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
    whole = tl.sum(dot, 0)
    for start in range(0, columns, BLOCK):
        inside = start + lane < columns
        y = tl.load(y_ptr + start + lane, mask=inside, eviction_policy="evict_first").to(tl.float32)
        g = tl.load(grad_ptr + start + lane, mask=inside, eviction_policy="evict_first")
        dx = y * (g.to(tl.float32) - whole)
        tl.store(dx_ptr + start + lane, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@cache
def configure(columns: int, dtype: torch.dtype) -> Config:
    """The forward's launch configuration for rows of ``columns``."""
    block = triton.next_power_of_2(columns)
    if block <= 2048:
        return Config(block=block, rows=max(1, 1024 // block), warps=max(1, block // 1024))
    if block <= 32768:
        return Config(block=block, warps=min(32, block // 1024))
    return Config(block=8192, warps=16)


@cache
def configure_backward(columns: int, dtype: torch.dtype) -> Config:
    """The backward's: a row takes twice the registers, so twice the warps."""
    block = triton.next_power_of_2(columns)
    if block <= 1024:
        return Config(block=block, rows=max(1, 512 // block), warps=max(1, block // 512))
    if block <= 16384:
        return Config(block=block, warps=min(32, block // 512))
    return Config(block=8192, warps=16)


def candidates(columns: int, dtype: torch.dtype) -> list[Config]:
    """The forward configurations worth timing for rows of ``columns``."""
    block = triton.next_power_of_2(columns)
    found = []
    for warps in (1, 2, 4, 8, 16, 32):
        each = block // (32 * warps)  # elements a thread
        for rows in (1, 2, 4):
            if not 4 <= each * rows <= 64 or (rows > 1 and block > 2048):
                continue
            found.append(Config(block=block, rows=rows, warps=warps))
            held = block * rows * dtype.itemsize
            for stages in (1, 2, 3):
                room = (200 * 1024) // (held * stages) if stages > 1 else 64 // warps
                programs = min(64 // warps, room, 8 if warps > 1 else 16)
                if programs:
                    found.append(
                        Config(
                            block=block, rows=rows, warps=warps, programs=programs, stages=stages
                        )
                    )
    found += [
        Config(block=b, warps=w) for b, w in ((4096, 8), (8192, 16), (16384, 32)) if b < columns
    ]
    return found


def forward(x: torch.Tensor) -> torch.Tensor:
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return forward_with(configure(x.shape[-1], x.dtype), x)


def forward_with(config: Config, x: torch.Tensor) -> torch.Tensor:
    """The forward by one configuration; ``x`` has elements."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    lines = as_rows(x)
    rows, columns = lines.shape
    stride, warps = lines.stride(0), config.warps
    if config.block < columns:
        softmax_long[(rows,)](lines, y, columns, stride, BLOCK=config.block, num_warps=warps)
        return y
    tiles = triton.cdiv(rows, config.rows)
    shape = {"BLOCK": config.block, "ROWS": config.rows, "num_warps": warps}
    if config.programs is None:
        softmax_tile[(tiles,)](lines, y, rows, columns, stride, **shape)
    else:
        grid = (min(tiles, config.programs * _multiprocessors(x.device)),)
        softmax_stay[grid](lines, y, rows, columns, stride, STAGES=config.stages, **shape)
    return y


def backward(grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    if y.numel() == 0:
        return (torch.empty_like(y, memory_format=torch.contiguous_format),)
    return backward_with(configure_backward(y.shape[-1], y.dtype), grad, y)


def backward_with(config: Config, grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    """The backward by one configuration, from the forward's output ``y``, which has elements."""
    y = y.contiguous()
    dx = torch.empty_like(y)
    lines = as_rows(grad)
    rows, columns = lines.shape
    stride, warps = lines.stride(0), config.warps
    if config.block < columns:
        softmax_backward_long[(rows,)](
            lines, y, dx, columns, stride, BLOCK=config.block, num_warps=warps
        )
    else:
        softmax_backward_tile[(triton.cdiv(rows, config.rows),)](
            lines,
            y,
            dx,
            rows,
            columns,
            stride,
            BLOCK=config.block,
            ROWS=config.rows,
            num_warps=warps,
        )
    return (dx,)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":  # the interpreter: a few programs, each with several tiles
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def _specimens() -> tuple[TritonSpecimen, ...]:
    found = []
    for dtype, kind in ((torch.float32, "fp32"), (torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        for columns in (1024, 4096, 16384, 65536):
            found.append(_specimen(configure(columns, dtype), kind, columns))
            found.append(_specimen(configure_backward(columns, dtype), kind, columns, back=True))
    stay = Config(block=4096, warps=8, programs=2, stages=3)
    found.append(_specimen(stay, "bf16", 4096))
    return tuple(found)


def _specimen(config: Config, kind: str, columns: int, back: bool = False) -> TritonSpecimen:
    pointers = ("grad_ptr", "y_ptr", "dx_ptr") if back else ("x_ptr", "y_ptr")
    stride = "grad_stride" if back else "x_stride"
    signature: dict[str, object] = dict.fromkeys(pointers, f"*{kind}")
    if config.block >= columns:
        signature["rows"] = "i32:16"
    signature |= {"columns": "i32:16", stride: "i32:16", "BLOCK": config.block}
    if config.block < columns:
        kernel = softmax_backward_long if back else softmax_long
    else:
        signature["ROWS"] = config.rows
        kernel = softmax_backward_tile if back else softmax_tile
        if config.programs is not None:
            kernel = softmax_stay
            signature["STAGES"] = config.stages
    name = getattr(kernel, "__name__", str(kernel))
    return TritonSpecimen(
        label=f"{name}-{kind}-{columns}", kernel=kernel, signature=signature, num_warps=config.warps
    )


IMPLEMENTATION = Implementation(
    operator="softmax",
    name="triton",
    backend="triton",
    forward=forward,
    backward=backward,
    specimens=_specimens(),
    idea="whole rows in one program, read once",
)
