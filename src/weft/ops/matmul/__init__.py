"""Matrix product of two 2-D tensors; implementations and figures are in README.md."""

from __future__ import annotations

import torch

from weft.dispatch.autocast import lowered
from weft.dispatch.operator import Schema, call, register
from weft.dispatch.public_calls import of_operator, repeated
from weft.ops.matmul.spec import check_arguments

register(
    "matmul",
    Schema(
        repeats=True,
        inputs="Tensor a, Tensor b, str precision",
        saved="Tensor a, Tensor b, str precision",
        gradients=2,
        fake=lambda a, b: a.new_empty(a.shape[0], b.shape[1]),
        fake_backward=lambda grad, a, b: (a.new_empty(a.shape), b.new_empty(b.shape)),
        params=("precision",),
    ),
)


@repeated(of_operator("matmul", precision="ieee"))
def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    precision: str = "ieee",
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return the matrix product of two 2-D tensors, summed in float32, with one rounding at the end.

    Args:
        a: (M, K); float32, float16 or bfloat16; CPU or CUDA; any strides.
        b: (K, N); the same dtype and device; any strides.
        precision: ``ieee`` or, for float32 on a GPU, ``tf32`` (factors of 10 mantissa bits).
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        (M, N), contiguous, of the inputs' dtype and device; zeros where K is 0. Under
        ``torch.autocast`` of its lower dtype, and ``precision`` is ignored.

    Raises:
        WeftError: the arguments are not two 2-D tensors of one dtype and device whose inner sizes agree;
            ``precision`` is unknown, or ``tf32`` for half types or on a CPU; ``impl`` is unknown or does
            not run here.
    """
    cast_a, cast_b = lowered(a, b)
    if cast_a is not a or cast_b is not b:  # autocast to a half type, which has no tf32
        a, b, precision = cast_a, cast_b, "ieee"
    inputs, params = (a, b), {"precision": precision}
    return call("matmul", inputs, params, impl, lambda: check_arguments(*inputs, **params), batch_invariant)  # type: ignore[no-any-return]
