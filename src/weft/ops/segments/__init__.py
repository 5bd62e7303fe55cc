"""Sums and cumulative sums of segments; README.md has the implementations, their design and times."""

from __future__ import annotations

from typing import Any

import torch

from weft.dispatch.operator import Schema, call, register
from weft.ops._common.layout import contiguous_like
from weft.ops._common.offsets import can_read
from weft.ops.segments.spec import check_arguments, check_offsets

register(
    "segmented_sum",
    Schema(
        inputs="Tensor values, Tensor offsets",
        saved="Tensor offsets, SymInt columns",
        fake=lambda values, offsets: values.new_empty((*values.shape[:-1], offsets.shape[0] - 1)),
        fake_backward=lambda grad, offsets, columns: (grad.new_empty((*grad.shape[:-1], columns)),),
    ),
)
register(
    "segmented_cumsum",
    Schema(
        inputs="Tensor x, Tensor offsets, bool exclusive, bool reverse",
        saved="Tensor offsets, bool exclusive, bool reverse",
        params=("exclusive", "reverse"),
        fake=lambda x, offsets: contiguous_like(x),
        fake_backward=lambda grad, offsets: (contiguous_like(grad),),
    ),
)


def _call(
    where: str,
    name: str,
    inputs: tuple[Any, Any],
    params: dict[str, Any],
    impl: str | None,
    batch_invariant: bool,
) -> torch.Tensor:
    x, offsets = inputs

    def check() -> None:
        check_arguments(where, name, x, offsets, **params)

    if can_read(offsets):
        check()
        check_offsets(where, offsets, x.shape[-1])
    return call(where, inputs, params, impl, check, batch_invariant)  # type: ignore[no-any-return]


def segmented_sum(
    values: torch.Tensor,
    offsets: torch.Tensor,
    *,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return the sum of each segment of the last dimension.

    Args:
        values: (..., n) tensor of one dimension or more; float32, float16 or bfloat16; CPU or CUDA.
        offsets: (segments + 1,) int64, the same for each row: segment i has the elements ``offsets[i]`` to
            ``offsets[i + 1] - 1``. They run from 0 to n and do not fall.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True is refused: how a row is cut depends on the number of rows.

    Returns:
        (..., segments), contiguous, in values' dtype and on its device. An empty segment is 0. Sums are in
        float32 and rounded once, in an order that follows from the shapes and the offsets alone. A NaN or Inf
        reaches the sum of its own segment alone. Differentiable in ``values``.

    Raises:
        WeftError: shapes, dtypes or devices do not fit; on a CPU, offsets do not run from 0 to n or fall;
            ``impl`` is unknown or does not run here.

    On a GPU no call reads the offsets on the host, which would wait for the device. An offset out of range is
    never used as an address there, and sums of segments with wrong offsets are unspecified.
    ``weft.ops.segments.spec.check_offsets`` reads them and raises. ``torch`` hands them to the library as
    they are.
    """
    return _call("segmented_sum", "values", (values, offsets), {}, impl, batch_invariant)


def segmented_cumsum(
    x: torch.Tensor,
    offsets: torch.Tensor,
    *,
    exclusive: bool = False,
    reverse: bool = False,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return the cumulative sum along the last dimension, begun anew in each segment.

    Args:
        x: (..., n) tensor of one dimension or more; float32, float16 or bfloat16; CPU or CUDA.
        offsets: (segments + 1,) int64, as :func:`segmented_sum` takes it.
        exclusive: False: an output is the sum of its segment's elements up to its own. True: of those before
            it, and the first output of each segment is 0.
        reverse: True: sums run from the last element of a segment to its first.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True is refused: how a row is cut depends on the number of rows.

    Returns:
        A tensor with the shape, dtype and device of ``x``, contiguous. Sums are in float32 and rounded once,
        in an order that follows from the shapes and the offsets alone; none is subtracted, so that a NaN or
        Inf reaches later outputs of its own segment alone. The gradient is the same scan in the other
        direction.

    Raises:
        WeftError: as :func:`segmented_sum`; ``exclusive`` or ``reverse`` is no bool.

    Source: S. Sengupta, M. Harris, Y. Zhang and J. D. Owens, "Scan primitives for GPU computing", Graphics
    Hardware 2007; D. Merrill and M. Garland, "Single-pass parallel prefix scan with decoupled look-back",
    NVIDIA technical report NVR-2016-002.
    """
    params = {"exclusive": exclusive, "reverse": reverse}
    if type(exclusive) is not bool or type(reverse) is not bool:  # 1 is like an earlier True
        check_arguments("segmented_cumsum", "x", x, offsets, **params)
    return _call("segmented_cumsum", "x", (x, offsets), params, impl, batch_invariant)
