"""The LM head and its loss by chunks, between whose products a Triton kernel works in place."""

from __future__ import annotations

from functools import partial

import torch

from weft.backends.triton_jit import TritonSpecimen, tl, triton
from weft.core import Implementation
from weft.ops._shared.cross_entropy import supports_head
from weft.ops._shared.cross_entropy_triton import (
    Config,
    configure_fused,
    cross_entropy_fused,
    specimens,
)
from weft.ops.linear_cross_entropy import chunks

BLOCK = 2048  # elements a program of the backward multiplies


@triton.jit
def multiply(x_ptr, grad_ptr, out_ptr, n, BLOCK: tl.constexpr):
    # x, out: (n,); grad: one number. Bytes: n read, n written, each in its own type.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
    x *= tl.load(grad_ptr)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < n)


def fused(
    config: Config,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
) -> None:
    """The losses of some rows; their gradient over their logits."""
    (rows, columns), size = logits.shape, logits.element_size()
    cross_entropy_fused[(rows,)](
        logits,
        targets,
        losses,
        columns,
        logits.stride(0),
        ignore_index,
        float(label_smoothing),
        float(z_loss),
        WIDE=16 // size,
        LANES=config.lanes(columns, size),
        SMOOTH=label_smoothing != 0,
        num_warps=config.warps,
    )


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> chunks.Tensors:
    size = x.element_size()
    plan = chunks.plan(x.shape[0], x.shape[1], weight.shape[0], size)
    config = configure_fused(weight.shape[0], size)
    return forward_with(plan, config, x, weight, targets, ignore_index, label_smoothing, z_loss)


def forward_with(
    plan: chunks.Plan,
    config: Config,
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> chunks.Tensors:
    """The forward by one plan and configuration."""
    kernel = partial(fused, config, ignore_index, label_smoothing, z_loss)
    return chunks.forward(kernel, plan, x, weight, targets.contiguous())


def backward(
    grad: torch.Tensor,
    dx: torch.Tensor,
    dweight: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.empty_like(dx), torch.empty_like(dweight, dtype=dx.dtype)
    for x, out in zip((dx, dweight), found, strict=True):
        if n := x.numel():
            multiply[(triton.cdiv(n, BLOCK),)](x, grad, out, n, BLOCK=BLOCK, num_warps=8)
    return found


def _multiplying(kind: str) -> TritonSpecimen:
    signature = {"x_ptr": "*fp32", "grad_ptr": "*fp32", "out_ptr": f"*{kind}", "n": "i32:16"}
    return TritonSpecimen(
        label=f"multiply-{kind}",
        kernel=multiply,
        signature={**signature, "BLOCK": BLOCK},
        num_warps=8,
    )


IMPLEMENTATION = Implementation(
    operator="linear_cross_entropy",
    name="triton",
    backend="triton",
    forward=forward,
    backward=backward,
    supports=supports_head,
    specimens=(
        *specimens(cross_entropy_fused, (("bf16", 50304), ("bf16", 50257), ("fp32", 4096))),
        _multiplying("bf16"),
    ),
    around="cublas",
    idea="chunks of rows; the loss and its gradient in place",
)
