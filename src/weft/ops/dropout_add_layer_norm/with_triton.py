"""Dropout, residual and layer norm in Triton: whole rows in one program, read once; see _shared.

Rows that no program holds (above 32768 columns; in the backward above 4096) take two steps, dropout
and the norm's own kernels.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from weft.backends.triton_jit import TritonSpecimen, triton
from weft.core import Implementation
from weft.ops._shared import norm_triton
from weft.ops._shared.elementwise import contiguous_like
from weft.ops._shared.elementwise_triton import KINDS, SHIPPED
from weft.ops._shared.norm_kernels import norm_sum_parts
from weft.ops._shared.norm_triton import Config, configure
from weft.ops._shared.philox import halves
from weft.ops._shared.philox_dropout import drops_all, limit, scale
from weft.ops._shared.philox_dropout_triton import dropout
from weft.ops._shared.philox_norm_kernels import dropout_norm_backward, dropout_norm_tile
from weft.ops._shared.rows import as_rows


@cache
def configure_backward(columns: int) -> Config:
    """Half the elements a thread that the norm alone has, since the words take registers as well:
    at 128 of them 16 warps fit, and all programs must be resident at once, since they stay."""
    block = max(16, triton.next_power_of_2(columns))
    warps = max(1, block // 256)
    if warps > 16:
        return Config(block=block)
    rows = max(1, 256 * warps // block)
    return Config(block=block, rows=rows, warps=warps, programs=16 // warps, stages=3)


def forward(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    p: float,
    seed: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    columns = x.shape[-1]
    config = configure(columns)
    if config.block < columns or drops_all(p):
        dropped = dropout(SHIPPED[x.element_size()], x, p, seed)
        return norm_triton.forward(dropped, residual, weight, bias, eps)
    y, s = contiguous_like(x), contiguous_like(x)
    if not x.numel():
        return y, s
    lines, others = as_rows(x), as_rows(residual)
    rows = lines.shape[0]
    dropout_norm_tile[(triton.cdiv(rows, config.rows),)](
        lines, others, weight.contiguous(), bias.contiguous(), y, s, rows, columns,
        lines.stride(0), others.stride(0), eps, *halves(seed), limit(p), scale(p),
        BLOCK=config.block, ROWS=config.rows, EIGHT=columns % 8 == 0, num_warps=config.warps,
    )  # fmt: skip
    return y, s


def backward(
    grad: torch.Tensor,
    more: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor,
    *,
    p: float,
    seed: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    columns = s.shape[-1]
    config = configure_backward(columns)
    if not s.numel() or not config.programs or drops_all(p):
        _, dr, dw, db = norm_triton.backward(grad, more, s, weight, eps, centred=True)
        return dropout(SHIPPED[s.element_size()], dr, p, seed), dr, dw, db
    return backward_with(config, grad, more, s, weight, p, seed, eps)


def backward_with(
    config: Config,
    grad: torch.Tensor,
    more: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor,
    p: float,
    seed: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """The backward by one configuration of programs that stay; ``s`` has elements."""
    s, weight = s.contiguous(), weight.contiguous()
    dx, dr = torch.empty_like(s), torch.empty_like(s)
    dw, db = torch.empty_like(weight), torch.empty_like(weight)
    grads, mores = as_rows(grad), as_rows(more)
    rows, columns = grads.shape
    units = norm_triton._multiprocessors(s.device)
    parts = min(triton.cdiv(rows, config.rows), config.programs * units)
    part = torch.empty((2, parts, columns), dtype=torch.float32, device=s.device)
    dropout_norm_backward[(parts,)](
        grads, mores, s, weight, dx, dr, part, rows, columns, grads.stride(0), mores.stride(0),
        eps, *halves(seed), limit(p), scale(p), BLOCK=config.block, ROWS=config.rows,
        STAGES=config.stages, EIGHT=columns % 8 == 0, num_warps=config.warps,
    )  # fmt: skip
    wide = 16 if columns <= 2048 else 32
    norm_sum_parts[(triton.cdiv(columns, wide), 2)](
        part, dw, db, parts, columns, BLOCK=wide, TALL=64, num_warps=8
    )
    return dx, dr, dw, db


def _specimen(kernel: Any, config: Config, kind: str, columns: int) -> TritonSpecimen:
    types: dict[str, Any] = {"eps": "fp32", "part_ptr": "*fp32", "keep": "fp32"}
    types |= {"BLOCK": config.block, "ROWS": config.rows, "STAGES": config.stages, "EIGHT": True}
    types |= dict.fromkeys(("low", "high", "limit"), "i32")
    integers = ("rows", "columns", "x_stride", "r_stride", "g_stride", "more_stride")
    types |= dict.fromkeys(integers, "i32:16")
    return TritonSpecimen(
        label=f"{kernel.__name__}-{kind}-{columns}",
        kernel=kernel,
        signature={name: types.get(name, f"*{kind}") for name in kernel.arg_names},
        num_warps=config.warps,
    )


SPECIMENS = tuple(
    _specimen(kernel, choose(columns), kind, columns)
    for kernel, choose in (
        (dropout_norm_tile, configure),
        (dropout_norm_backward, configure_backward),
    )
    for kind, columns in (("bf16", 1024), ("bf16", 4096), ("fp32", 1024))
    if kind in KINDS
)
IMPLEMENTATION = Implementation(
    operator="dropout_add_layer_norm",
    name="triton",
    backend="triton",
    forward=forward,
    backward=backward,
    specimens=SPECIMENS,
    idea="whole rows in one program, read once; the weights' gradients by programs that stay",
)
