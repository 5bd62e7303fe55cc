"""ReLU activation; see README.md beside this for the ways and their figures."""

from __future__ import annotations

import torch

from weft.ops._shared.public import Schema, call, register
from weft.ops.relu.spec import check_arguments

register(
    "relu",
    Schema(
        inputs="Tensor x",
        saved="Tensor y",
        gradients=1,
        fake=torch.empty_like,
        fake_backward=lambda grad, y: (torch.empty_like(y),),
    ),
)


def relu(x: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """ReLU, elementwise: ``x`` where it is above 0, else 0; NaN stays NaN.

    Args:
        x: tensor of any shape; float32, float16 or bfloat16; CPU or CUDA.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        A tensor with the shape, dtype, device and strides of ``x``. The gradient at 0 is 0; the
        backward keeps the answer, and not ``x``.

    Raises:
        WeftError: ``x`` is no tensor or of another dtype or device; ``impl`` is unknown or does
            not run here.

    Source: Nair and Hinton, ICML 2010.
    """
    return call("relu", (x,), {}, impl, lambda: check_arguments(x))  # type: ignore[no-any-return]
