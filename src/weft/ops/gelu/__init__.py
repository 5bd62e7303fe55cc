"""GELU activation, tanh form; see README.md beside this for the six ways and their figures."""

from __future__ import annotations

import torch

from weft.ops._shared.public import Schema, call, register
from weft.ops.gelu.spec import check_arguments

register(
    "gelu",
    Schema(
        inputs="Tensor x",
        saved="Tensor x",
        gradients=1,
        fake=torch.empty_like,
        fake_backward=lambda grad, x: (torch.empty_like(x),),
    ),
)


def gelu(x: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """GELU in its tanh form, elementwise.

    Args:
        x: tensor of any shape; float32, float16 or bfloat16; CPU or CUDA.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        A tensor with the shape, dtype, device and strides of ``x``. Arithmetic is in float32.

    Raises:
        WeftError: ``x`` is no tensor or of another dtype or device; ``impl`` is unknown or does
            not run here.

    Source: arXiv:1606.08415.
    """
    return call("gelu", (x,), {}, impl, lambda: check_arguments(x))  # type: ignore[no-any-return]
