"""Softmax over the last dimension; README.md has its implementations, ladder and times."""

from __future__ import annotations

import torch

from weft.dispatch.operator import Schema, call, register
from weft.dispatch.public_calls import of_operator, repeated
from weft.ops._common.layout import contiguous_like
from weft.ops.softmax.spec import check_arguments

register(
    "softmax",
    Schema(
        repeats=True,
        inputs="Tensor x",
        saved="Tensor y",
        gradients=1,
        fake=contiguous_like,
        fake_backward=lambda grad, y: (contiguous_like(y),),
    ),
)


@repeated(of_operator("softmax"))
def softmax(x: torch.Tensor, *, impl: str | None = None, batch_invariant: bool = False) -> torch.Tensor:
    """Softmax over the last dimension.

    Args:
        x: tensor of one dimension or more; float32, float16 or bfloat16; CPU or CUDA. A row that
            holds NaN or +Inf, or nothing but -Inf, gives a row of NaN, as torch does.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        A tensor with the shape, dtype and device of ``x``, contiguous. Arithmetic is in float32.

    Raises:
        WeftError: ``x`` is no tensor, has no dimension, or is of another dtype or device; ``impl``
            is unknown or does not run here.
    """
    return call("softmax", (x,), {}, impl, lambda: check_arguments(x), batch_invariant)  # type: ignore[no-any-return]
