"""Cross entropy in Triton: a program a row; one pass forward, one pass back.

The kernels are in _shared/cross_entropy_triton.py, for linear_cross_entropy uses the same.
"""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared.cross_entropy import gradient_like, supports
from weft.ops._shared.cross_entropy_triton import (
    Config,
    configure,
    configure_fused,
    cross_entropy_backward,
    cross_entropy_forward,
    specimens,
)
from weft.ops._shared.rows import as_rows


def forward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    config = configure(logits.shape[1], logits.element_size())
    return forward_with(config, logits, targets, ignore_index, label_smoothing, z_loss)


def forward_with(
    config: Config,
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward by one configuration."""
    rows, columns = logits.shape
    losses, lse = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    if rows:
        lines, size = as_rows(logits), logits.element_size()
        cross_entropy_forward[(rows,)](
            lines,
            targets.contiguous(),
            losses,
            lse,
            columns,
            lines.stride(0),
            ignore_index,
            float(label_smoothing),
            float(z_loss),
            WIDE=16 // size,
            LANES=config.lanes(columns, size),
            SMOOTH=label_smoothing != 0,
            num_warps=config.warps,
        )
    return losses, lse


def backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor]:
    config, out = configure_fused(logits.shape[1], logits.element_size()), gradient_like(logits)
    rest = (ignore_index, label_smoothing, z_loss)
    return (backward_with(config, out, grad, logits, targets, lse, *rest),)


def backward_into(
    out: torch.Tensor,
    grad: torch.Tensor,
    logits: torch.Tensor,
    *rest: torch.Tensor,
    **params: float,
) -> torch.Tensor:
    """The backward into memory that is there: ``out`` may be ``logits`` itself."""
    config = configure_fused(logits.shape[1], logits.element_size())
    return backward_with(config, out, grad, logits, *rest, **params)  # type: ignore[arg-type]


def backward_with(
    config: Config,
    out: torch.Tensor,
    grad: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """The backward by one configuration into ``out``, whose columns lie side by side."""
    rows, columns = logits.shape
    if rows:
        lines, size = as_rows(logits), logits.element_size()
        stride, out_stride = lines.stride(0), out.stride(0)
        cross_entropy_backward[(rows,)](
            grad,
            lines,
            targets.contiguous(),
            lse,
            out,
            columns,
            grad.stride(0),
            stride,
            out_stride,
            ignore_index,
            float(label_smoothing),
            float(z_loss),
            WIDE=16 // size,
            LANES=config.lanes(columns, size),
            SAME=stride == out_stride,
            num_warps=config.warps,
        )
    return out


SHIPPED = (("bf16", 50304), ("bf16", 50257), ("fp32", 4096))

IMPLEMENTATION = Implementation(
    operator="cross_entropy",
    name="triton",
    backend="triton",
    forward=forward,
    backward=backward,
    supports=supports,
    specimens=(
        *specimens(cross_entropy_forward, SHIPPED),
        *specimens(cross_entropy_backward, SHIPPED),
    ),
    idea="a program a row, maxima and sums online",
)
