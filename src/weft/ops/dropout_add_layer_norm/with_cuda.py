"""Dropout, residual and layer norm in CUDA C++: the norms' kernels, x dropped on the way.

Rows that those do not take so (no multiple of 16 bytes, apart in memory, above 64 KiB) go in two
steps, dropout_add.cu and the norm: in bf16 ten bytes an element forward where eight must move, and
fourteen backward where ten must.
"""

from __future__ import annotations

from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Case, Implementation, Support, no
from weft.ops._shared import norm_cuda
from weft.ops._shared.elementwise import Walk, contiguous_like
from weft.ops._shared.norm_configs import Block, Kind, configure, configure_backward
from weft.ops._shared.philox_dropout import drops_all, rule
from weft.ops._shared.rows import width

WALK = Walk(Path(__file__).with_name("dropout_add.cu"), "dropout_add", "dropout_back")


def _kind(weight: torch.Tensor, *tensors: torch.Tensor) -> Kind | None:
    """What the norms' kernels with dropout are compiled for, if they take these rows at all."""
    first = tensors[0]
    if not first.numel() or not all(t.is_contiguous() for t in tensors):
        return None
    columns = first.shape[-1]
    access = width(columns, *(t.view(-1, columns) for t in tensors))
    kind = Kind(x=first.dtype, w=weight.dtype, access=access, centred=True, add=True, drop=True)
    return kind if kind.wide else None


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
    kind = None if drops_all(p) else _kind(weight, x, residual)
    config = configure(x.shape[-1], kind, 0) if kind else None
    if isinstance(config, Block):
        return norm_cuda.forward(x, residual, weight, bias, eps, config, (seed, rule(p)))
    s = contiguous_like(x)
    if drops_all(p):
        s.copy_(residual)
    else:
        tensors = (x.contiguous(), residual.contiguous(), s)
        WALK.run("dropout_add", tensors, seed, rule(p))
    y, _ = norm_cuda.forward(s, None, weight, bias, eps)
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
    kind = None if drops_all(p) else _kind(weight, grad, more, s)
    if kind:
        columns = s.shape[-1]
        config = norm_cuda.staying(s.numel() // columns, columns, kind, s.device)
        if config:
            dropout = (seed, rule(p))
            return norm_cuda.backward(grad, more, s, weight, eps, True, config, dropout)
    dx, dr, dw, db = norm_cuda.backward(grad, more, s, weight, eps, centred=True)
    if drops_all(p):
        dx.zero_()
    else:
        WALK.run("dropout_back", (dr, dx), seed, rule(p))
    return dx, dr, dw, db


def supports(case: Case, device: str) -> Support:
    if case.inputs[0].shape[-1:] == (1,):
        return no("a row of one column: its backward drifts by 1.15 times what is allowed")
    return norm_cuda.supports(case, device)


def _fused(dtype: torch.dtype, columns: int) -> tuple[CudaSource, CudaSource]:
    """Forward and backward as they ship for rows of ``columns``."""
    kind = Kind(x=dtype, w=dtype, access=16 // dtype.itemsize, centred=True, add=True, drop=True)
    back = configure_backward(columns, kind, norm_cuda.SM90, 16)
    assert back is not None
    forth = norm_cuda.forward_source(kind, configure(columns, kind, 0))
    return forth, norm_cuda.backward_source(kind, back)


SHIPPED = (*((torch.bfloat16, columns) for columns in (768, 1024, 4096)), (torch.float32, 1024))
IMPLEMENTATION = Implementation(
    operator="dropout_add_layer_norm",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    supports=supports,
    specimens=(*(one for pair in SHIPPED for one in _fused(*pair)), *WALK.specimens),
    idea="the norm's kernels, x dropped on the way; 16 bytes a thread",
)
