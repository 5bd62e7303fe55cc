"""Activations: GELU, ReLU, and GELU after a bias; README.md has their implementations and times."""

from __future__ import annotations

import torch

from weft.dispatch.operator import Schema, call, register
from weft.dispatch.public_calls import of_operator, repeated
from weft.ops._common.layout import contiguous_like
from weft.ops.activations.spec import check_bias_gelu, check_gelu, check_relu

register(
    "gelu",
    Schema(
        repeats=True,
        inputs="Tensor x",
        saved="Tensor x",
        gradients=1,
        fake=torch.empty_like,
        fake_backward=lambda grad, x: (torch.empty_like(x),),
    ),
)
register(
    "relu",
    Schema(
        repeats=True,
        inputs="Tensor x",
        saved="Tensor y",
        gradients=1,
        fake=torch.empty_like,
        fake_backward=lambda grad, y: (torch.empty_like(y),),
    ),
)
register(
    "bias_gelu",
    Schema(
        repeats=True,
        inputs="Tensor x, Tensor bias",
        saved="Tensor x, Tensor bias",
        gradients=2,
        fake=lambda x, bias: contiguous_like(x),
        fake_backward=lambda grad, x, bias: (contiguous_like(x), contiguous_like(bias)),
    ),
)


@repeated(of_operator("gelu"))
def gelu(x: torch.Tensor, *, impl: str | None = None, batch_invariant: bool = False) -> torch.Tensor:
    """GELU in its tanh form, elementwise.

    Args:
        x: tensor of any shape; float32, float16 or bfloat16; CPU or CUDA.
        impl: name of an implementation (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        A tensor with the shape, dtype, device and strides of ``x``. Arithmetic is in float32.

    Raises:
        WeftError: ``x`` is not a tensor, or has an unsupported dtype or device; ``impl`` is unknown or
            cannot run here.

    Source: arXiv:1606.08415.
    """
    return call("gelu", (x,), {}, impl, lambda: check_gelu(x), batch_invariant)  # type: ignore[no-any-return]


@repeated(of_operator("relu"))
def relu(x: torch.Tensor, *, impl: str | None = None, batch_invariant: bool = False) -> torch.Tensor:
    """ReLU, elementwise: ``x`` where it is above 0, else 0; NaN stays NaN.

    Args:
        x: tensor of any shape; float32, float16 or bfloat16; CPU or CUDA.
        impl: name of an implementation (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        A tensor with the shape, dtype, device and strides of ``x``. The gradient at 0 is 0. The backward
        saves the output instead of ``x``.

    Raises:
        WeftError: ``x`` is not a tensor, or has an unsupported dtype or device; ``impl`` is unknown or
            cannot run here.

    Source: Nair and Hinton, ICML 2010.
    """
    return call("relu", (x,), {}, impl, lambda: check_relu(x), batch_invariant)  # type: ignore[no-any-return]


@repeated(of_operator("bias_gelu"))
def bias_gelu(
    x: torch.Tensor, bias: torch.Tensor, *, impl: str | None = None, batch_invariant: bool = False
) -> torch.Tensor:
    """GELU in its tanh form of ``x + bias``, in one pass.

    Args:
        x: (..., C), at least one dimension; float32, float16 or bfloat16; CPU or CUDA.
        bias: (C,), of the same dtype and device. Its gradient is summed in float32 in a fixed order, so that
            a second run gives the same bits.
        impl: name of an implementation (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        A contiguous tensor with the shape, dtype and device of ``x``. Arithmetic is in float32, rounded
        once (torch's own calls also round x + bias).

    Raises:
        WeftError: the arguments are not two tensors of one supported dtype and one device; the bias does not
            have one element for each column; ``impl`` is unknown or cannot run here.

    Source: arXiv:1606.08415.
    """
    return call("bias_gelu", (x, bias), {}, impl, lambda: check_bias_gelu(x, bias), batch_invariant)  # type: ignore[no-any-return]
