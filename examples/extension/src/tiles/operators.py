"""The operators' Python side: shapes without data (fake tensors), and gradients.

With these the operators work under torch.compile, in fake tensors, in autograd and in
torch.library.opcheck.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0); NaN stays NaN. x: any shape, float32, contiguous, on a CUDA device."""
    return torch.ops.tiles.relu(x)


def add(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b. Both (rows, columns), float32, any strides, on one CUDA device."""
    return torch.ops.tiles.add(a, b)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b. (rows, inner) and (inner, columns), float32, contiguous, on one CUDA device."""
    return torch.ops.tiles.matmul(a, b)


@torch.library.register_fake("tiles::relu")
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("tiles::add")
def _(a: Tensor, b: Tensor) -> Tensor:
    torch._check(a.dim() == 2 and b.dim() == 2, lambda: "a and b must have 2 dimensions")
    torch._check(a.shape == b.shape, lambda: "a and b must have one shape")
    return a.new_empty(a.shape)


@torch.library.register_fake("tiles::matmul")
def _(a: Tensor, b: Tensor) -> Tensor:
    torch._check(a.dim() == 2 and b.dim() == 2, lambda: "a and b must have 2 dimensions")
    torch._check(a.shape[1] == b.shape[0], lambda: "a's columns must be as many as b's rows")
    return a.new_empty((a.shape[0], b.shape[1]))


def _relu_setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _relu_backward(ctx: Any, grad: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    return torch.where(y <= 0, 0.0, grad)  # the gradient passes where y is NaN, as in torch.relu


def _add_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return grad, grad


def _matmul_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _matmul_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    # Use this project's own matmul, so that the gradient can be differentiated again. The kernel needs
    # contiguous inputs, hence the copies.
    a, b = ctx.saved_tensors
    grad = grad.contiguous()
    grad_a = matmul(grad, b.t().contiguous()) if ctx.needs_input_grad[0] else None
    grad_b = matmul(a.t().contiguous(), grad) if ctx.needs_input_grad[1] else None
    return grad_a, grad_b


torch.library.register_autograd("tiles::relu", _relu_backward, setup_context=_relu_setup)
torch.library.register_autograd("tiles::add", _add_backward)
torch.library.register_autograd("tiles::matmul", _matmul_backward, setup_context=_matmul_setup)
