"""The cumulative sum along the last dimension; README.md has its implementations, ladder and times."""

from __future__ import annotations

import torch

from weft.dispatch.operator import Schema, call, register
from weft.ops._common.layout import contiguous_like
from weft.ops.cumsum.spec import check_arguments

register(
    "cumsum",
    Schema(
        inputs="Tensor x, bool exclusive, bool reverse",
        saved="bool exclusive, bool reverse",
        gradients=1,
        params=("exclusive", "reverse"),
        fake=contiguous_like,
        fake_backward=lambda grad: (contiguous_like(grad),),
    ),
)


def cumsum(
    x: torch.Tensor,
    *,
    exclusive: bool = False,
    reverse: bool = False,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return the cumulative sum along the last dimension (a scan, or prefix sum).

    Args:
        x: (..., N) tensor of one dimension or more; float32, float16 or bfloat16; CPU or CUDA.
        exclusive: False: output i is the sum of elements 0 to i. True: of elements 0 to i - 1, and output
            0 is 0.
        reverse: True: the sum runs from the last element to the first.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True is refused: how a row is cut depends on the number of rows.

    Returns:
        A tensor with the shape, dtype and device of ``x``, contiguous. Sums are in float32 or wider and are
        rounded to the dtype once. A NaN or Inf reaches its own
        output and those after it alone. The gradient is the same scan in the other direction.

    Raises:
        WeftError: ``x`` is no tensor, has no dimension, or is of another dtype or device; ``exclusive`` or
            ``reverse`` is no bool; ``impl`` is unknown or does not run here.

    Source: D. Merrill and M. Garland, "Single-pass parallel prefix scan with decoupled look-back", NVIDIA
    technical report NVR-2016-002.
    """
    params = {"exclusive": exclusive, "reverse": reverse}
    if type(exclusive) is not bool or type(reverse) is not bool:  # 1 is like an earlier True
        check_arguments(x, **params)
    return call("cumsum", (x,), params, impl, lambda: check_arguments(x, **params), batch_invariant)  # type: ignore[no-any-return]
