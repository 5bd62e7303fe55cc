"""The sum of all elements; README.md has its implementations, ladder and times."""

from __future__ import annotations

import torch

from weft.dispatch.operator import Schema, call, register
from weft.ops.sum.spec import check_arguments, spread

register(
    "sum",
    Schema(
        inputs="Tensor x",
        fake=lambda x: x.new_empty(()),
        view_backward=spread,
    ),
)


def sum(x: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """Return the sum of all elements of a tensor.

    Args:
        x: tensor of any shape, empty and 0-d included; float32, float64, float16 or bfloat16; CPU
            or CUDA.
        impl: name of an implementation (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        A new 0-d tensor with the dtype and device of ``x``; 0 for an empty ``x``. Partial sums are
        blocked, in float32 or wider (float64 for float64), and rounded to the dtype once, at the
        end. NaN, and +Inf with -Inf, give NaN.

    Raises:
        WeftError: ``x`` is not a tensor, or has an unsupported dtype or device; ``impl`` is unknown or
            cannot run here.

    Source: blocked and pairwise summation as in Higham, "The accuracy of floating point summation",
    SIAM J. Sci. Comput. 14 (1993).
    """
    return call("sum", (x,), {}, impl, lambda: check_arguments(x))  # type: ignore[no-any-return]
