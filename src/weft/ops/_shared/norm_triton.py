"""Host side of the norms in Triton: configurations, launches, and what compiles with no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from weft.backends.triton_jit import TritonSpecimen, triton
from weft.ops._shared import norm_kernels as kernels
from weft.ops._shared.rows import as_rows

Pair = tuple[torch.Tensor, torch.Tensor]
STAY = 8192  # columns up to which a program of the backward keeps the weights' gradients


@dataclass(frozen=True, kw_only=True)
class Config:
    """How rows are laid on programs.

    ``block`` is the power of two of columns a program holds at once: where it is below the row's
    length the row is walked more than once. ``rows`` go to a program at a time. In the backward
    ``programs`` a multiprocessor stay, with ``stages`` loads in flight; 0 is a program a row.
    """

    block: int
    rows: int = 1
    warps: int = 4
    programs: int = 0
    stages: int = 1


@cache
def configure(columns: int) -> Config:
    """The forward's configuration: 32 elements a thread, as softmax's were best on an H200."""
    block = max(16, triton.next_power_of_2(columns))
    if block <= 2048:
        return Config(block=block, rows=max(1, 1024 // block), warps=max(1, block // 1024))
    if block <= 32768:
        return Config(block=block, warps=min(32, block // 1024))
    return Config(block=16384, warps=32)


@cache
def configure_backward(columns: int) -> Config:
    """The backward's: 16 elements a thread or 32, of one row, and their columns' two sums: of the
    configurations timed on an H200 the fastest for rows of 1024 and of 4096."""
    block = max(16, triton.next_power_of_2(columns))
    if block <= STAY:
        warps = max(1, block // 512 if block <= 1024 else max(2, block // 1024))
        rows = max(1, 512 * warps // block)
        return Config(block=block, rows=rows, warps=warps, programs=16 // warps, stages=3)
    if block <= 16384:
        return Config(block=block, warps=16)
    return Config(block=8192, warps=16)


def candidates(columns: int) -> list[Config]:
    """The forward configurations worth timing for rows of ``columns``."""
    block = triton.next_power_of_2(columns)
    found = [
        Config(block=block, rows=rows, warps=warps)
        for warps in (1, 2, 4, 8, 16, 32)
        for rows in (1, 2, 4)
        if 4 <= block * rows // (32 * warps) <= 64 and (rows == 1 or block <= 4096)
    ]
    return found + [Config(block=b, warps=b // 512) for b in (4096, 8192, 16384) if b < columns]


def candidates_backward(columns: int) -> list[Config]:
    """The backward configurations worth timing for rows of ``columns``."""
    block = triton.next_power_of_2(columns)
    if block > STAY:
        tile = [Config(block=block, warps=w) for w in (16, 32)] if block <= 16384 else []
        return tile + [Config(block=8192, warps=w) for w in (8, 16)]
    return [
        Config(block=block, rows=rows, warps=warps, programs=programs, stages=stages)
        for warps in (1, 2, 4, 8, 16)
        for rows in (1, 2, 4, 8)
        for programs in (1, 2, 3, 4, 6, 8, 12)
        for stages in (1, 2, 3)
        if 8 <= block // (32 * warps) <= 32
        and 1024 <= block * rows <= 8192
        and 12 <= programs * warps <= 48
        and programs * stages * block * rows * 4 <= 200 * 1024
    ]


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    config: Config | None = None,
) -> Pair:
    """(y, s): without a ``residual`` s is x; without a ``bias`` nothing is centred."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    s = torch.empty_like(y) if residual is not None else x
    if x.numel() == 0:
        return y, s
    lines = as_rows(x)
    rows, columns = lines.shape
    others = lines if residual is None else as_rows(residual)
    weight = weight.contiguous()
    config = config or configure(columns)
    shape: dict[str, Any] = {"BLOCK": config.block, "num_warps": config.warps}
    shape |= {"CENTRED": bias is not None, "ADD": residual is not None}
    tensors = (lines, others, weight, weight if bias is None else bias.contiguous(), y, s)
    strides = (lines.stride(0), others.stride(0))
    if config.block < columns:
        kernels.norm_long[(rows,)](*tensors, columns, *strides, eps, **shape)
    else:
        grid = (triton.cdiv(rows, config.rows),)
        kernels.norm_tile[grid](*tensors, rows, columns, *strides, eps, ROWS=config.rows, **shape)
    return y, s


def backward(
    grad: torch.Tensor,
    more: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    centred: bool,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dresidual, dweight, dbias), from what was normalised, ``x``, and the weight.

    ``more`` is the gradient of s, and dresidual a second dx, where there was a residual; else it is
    dx itself. dbias is dweight where nothing is ``centred``.
    """
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dr = torch.empty_like(dx) if more is not None else dx
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
    db = torch.empty_like(dw) if centred else dw
    if x.numel() == 0:
        return dx, dr, dw.zero_(), db.zero_()
    lines, grads = as_rows(x), as_rows(grad)
    rows, columns = lines.shape
    mores = grads if more is None else as_rows(more)
    config = config or configure_backward(columns)
    wide = {"CENTRED": centred, "ADD": more is not None}
    tensors = (grads, mores, lines, weight.contiguous(), dx, dr)
    strides = (grads.stride(0), mores.stride(0), lines.stride(0))
    shape = {"BLOCK": config.block, "num_warps": config.warps, **wide}
    if config.programs:
        parts = min(triton.cdiv(rows, config.rows), _programs(config, x.device))
        part = _floats(1 + centred, parts, columns, x.device)
        kernels.norm_backward_stay[(parts,)](
            *tensors, part, rows, columns, *strides, eps,
            ROWS=config.rows, STAGES=config.stages, **shape,
        )  # fmt: skip
    else:
        held = _floats(1, rows, 2, x.device)
        kernel = kernels.norm_backward_tile
        if config.block < columns:
            kernel = kernels.norm_backward_long
        kernel[(rows,)](*tensors, held, columns, *strides, eps, **shape)
        blocks = triton.cdiv(columns, 512)
        parts = min(triton.cdiv(rows, 8), max(1, 8 * _multiprocessors(x.device) // blocks))
        part = _floats(1 + centred, parts, columns, x.device)
        kernels.norm_weight_parts[(blocks, parts)](
            grads, lines, held, part, rows, columns, strides[0], strides[2],
            BLOCK=512, ROWS=8, CENTRED=centred,
        )  # fmt: skip
    kernels.norm_sum_parts[(triton.cdiv(columns, 32), 1 + centred)](
        part, dw, db, parts, columns, BLOCK=32, TALL=64, num_warps=8
    )
    return dx, dr, dw, db


def _floats(count: int, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.empty((count, rows, columns), dtype=torch.float32, device=device)


def _programs(config: Config, device: torch.device) -> int:
    if device.type == "cpu":  # the interpreter: few programs, each with several tiles
        return 2
    return config.programs * _multiprocessors(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def specimens(centred: bool, add: bool) -> tuple[TritonSpecimen, ...]:
    """What ships for rows of 1024 and 4096 in bf16, of 4096 in fp32, and the last kernel."""
    found = []
    for kind, columns in (("bf16", 1024), ("bf16", 4096), ("fp32", 4096)):
        found.append(_specimen(kernels.norm_tile, configure(columns), kind, centred, add))
        config = configure_backward(columns)
        found.append(_specimen(kernels.norm_backward_stay, config, kind, centred, add))
    summing = TritonSpecimen(
        label="norm_sum_parts-bf16",
        kernel=kernels.norm_sum_parts,
        signature={
            **dict.fromkeys(("part_ptr", "dw_ptr", "db_ptr"), "*bf16"), "part_ptr": "*fp32",
            "parts": "i32:16", "columns": "i32:16", "BLOCK": 32, "TALL": 64,
        },
        num_warps=8,
    )  # fmt: skip
    return (*found, summing)


def _specimen(kernel: Any, config: Config, kind: str, centred: bool, add: bool) -> TritonSpecimen:
    types: dict[str, Any] = {"eps": "fp32", "part_ptr": "*fp32", "held_ptr": "*fp32"}
    types |= {"BLOCK": config.block, "ROWS": config.rows, "STAGES": config.stages}
    types |= {"CENTRED": centred, "ADD": add}
    integers = ("rows", "columns", "x_stride", "r_stride", "g_stride", "more_stride")
    types |= dict.fromkeys(integers, "i32:16")
    return TritonSpecimen(
        label=f"{kernel.__name__}-{kind}-{config.block}",
        kernel=kernel,
        signature={name: types.get(name, f"*{kind}") for name in kernel.arg_names},
        num_warps=config.warps,
    )
