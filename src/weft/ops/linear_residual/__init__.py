"""Linear layer and residual in one; see README.md beside this for the ways and their figures."""

from __future__ import annotations

import torch

from weft.ops._shared.autocast import lowered
from weft.ops._shared.public import Schema, call, register
from weft.ops.linear_residual.spec import check_arguments

register(
    "linear_residual",
    Schema(
        inputs="Tensor x, Tensor weight, Tensor bias, Tensor residual",
        saved="Tensor x, Tensor weight",
        gradients=4,
        fake=lambda x, weight, bias, residual: x.new_empty(*x.shape[:-1], weight.shape[0]),
        fake_backward=lambda grad, x, weight: (
            x.new_empty(x.shape),
            weight.new_empty(weight.shape),
            weight.new_empty(weight.shape[0]),
            grad.new_empty(grad.shape),
        ),
    ),
)


def linear_residual(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """x W^T + b + residual, summed in float32, with one rounding at the end.

    Args:
        x: (..., K); float32, float16 or bfloat16; CPU or CUDA; any strides.
        weight: (N, K), as ``torch.nn.Linear`` stores it; the same dtype and device; any strides.
        bias: (N,); the same dtype and device.
        residual: (..., N), with x's leading sizes; the same dtype and device; any strides.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        (..., N), contiguous, of the inputs' dtype and device.

    Raises:
        WeftError: no tensors of these shapes, of one dtype and device; ``impl`` is unknown or does
            not run here.
    """
    x, weight, bias, residual = lowered(x, weight, bias, residual)
    inputs = (x, weight, bias, residual)
    return call("linear_residual", inputs, {}, impl, lambda: check_arguments(*inputs))  # type: ignore[no-any-return]
