"""Matrix product; see README.md beside this for the six ways and their figures."""

from __future__ import annotations

import torch

from weft.ops._shared.autocast import lowered
from weft.ops._shared.public import Schema, call, register
from weft.ops.matmul.spec import check_arguments

register(
    "matmul",
    Schema(
        inputs="Tensor a, Tensor b, str precision",
        saved="Tensor a, Tensor b, str precision",
        gradients=2,
        fake=lambda a, b: a.new_empty(a.shape[0], b.shape[1]),
        fake_backward=lambda grad, a, b: (a.new_empty(a.shape), b.new_empty(b.shape)),
        params=("precision",),
    ),
)


def matmul(
    a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee", impl: str | None = None
) -> torch.Tensor:
    """The matrix product of two 2-D tensors, summed in float32, with one rounding at the end.

    Args:
        a: (M, K); float32, float16 or bfloat16; CPU or CUDA; any strides.
        b: (K, N); the same dtype and device; any strides.
        precision: ``ieee`` or, for float32 on a GPU, ``tf32`` (factors of 10 mantissa bits).
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        (M, N), contiguous, of the inputs' dtype and device; zeros where K is 0. Under
        ``torch.autocast`` of its lower dtype, and ``precision`` is of no account.

    Raises:
        WeftError: not two 2-D tensors of one dtype and device whose inner sizes agree; another
            ``precision``, or ``tf32`` for half types or on a CPU; ``impl`` is unknown or does not
            run here.
    """
    lower = lowered(a, b)
    if lower[0] is not a or lower[1] is not b:
        a, b, precision = *lower, "ieee"
    inputs, params = (a, b), {"precision": precision}
    return call("matmul", inputs, params, impl, lambda: check_arguments(*inputs, **params))  # type: ignore[no-any-return]
