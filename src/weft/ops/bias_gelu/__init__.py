"""Bias and GELU in one pass; see README.md beside this for the ways and their figures."""

from __future__ import annotations

import torch

from weft.ops._shared.elementwise import contiguous_like
from weft.ops._shared.public import Schema, call, register
from weft.ops.bias_gelu.spec import check_arguments

register(
    "bias_gelu",
    Schema(
        inputs="Tensor x, Tensor bias",
        saved="Tensor x, Tensor bias",
        gradients=2,
        fake=lambda x, bias: contiguous_like(x),
        fake_backward=lambda grad, x, bias: (contiguous_like(x), contiguous_like(bias)),
    ),
)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """GELU, tanh form, of ``x + bias``, in one pass.

    Args:
        x: (..., C), one dimension or more; float32, float16 or bfloat16; CPU or CUDA.
        bias: (C,), of the same dtype and device. Its gradient is summed in float32 in one order, so
            that a second run gives the same bits.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        A contiguous tensor with the shape, dtype and device of ``x``. Arithmetic is in float32,
        rounded once (torch's own calls round x + bias as well).

    Raises:
        WeftError: no two tensors of one dtype and device, or another dtype; the bias has another
            size than a row; ``impl`` is unknown or does not run here.

    Source: arXiv:1606.08415.
    """
    return call("bias_gelu", (x, bias), {}, impl, lambda: check_arguments(x, bias))  # type: ignore[no-any-return]
