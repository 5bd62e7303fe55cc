"""Linear layer; see README.md beside this for the ways and their figures."""

from __future__ import annotations

import torch

from weft.ops._shared.autocast import lowered
from weft.ops._shared.public import Schema, call, register
from weft.ops.linear.spec import check_arguments

register(
    "linear",
    Schema(
        inputs="Tensor x, Tensor weight, Tensor bias",
        saved="Tensor x, Tensor weight",
        gradients=3,
        fake=lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]),
        fake_backward=lambda grad, x, weight: (
            x.new_empty(x.shape),
            weight.new_empty(weight.shape),
            weight.new_empty(weight.shape[0]),
        ),
    ),
)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, impl: str | None = None
) -> torch.Tensor:
    """x W^T + b, summed in float32, with one rounding at the end.

    Args:
        x: (..., K); float32, float16 or bfloat16; CPU or CUDA; any strides.
        weight: (N, K), as ``torch.nn.Linear`` stores it; the same dtype and device; any strides.
        bias: (N,); the same dtype and device.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        (..., N), contiguous, of the inputs' dtype and device. float32 is multiplied in float32.

    Raises:
        WeftError: no tensors of these shapes, of one dtype and device; ``impl`` is unknown or does
            not run here.
    """
    x, weight, bias = lowered(x, weight, bias)
    return call("linear", (x, weight, bias), {}, impl, lambda: check_arguments(x, weight, bias))  # type: ignore[no-any-return]
