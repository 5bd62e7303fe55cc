"""Reductions along neighbouring dimensions; README.md has the implementations, their design and times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.core import WeftError
from weft.dispatch.operator import Schema, backward_of, call, register
from weft.ops._common import validate
from weft.ops.reduce.spec import check_arguments, check_indexed_arguments, kept_shape, normalized_dims


def _fake(x: torch.Tensor, op: str, first: int, last: int) -> torch.Tensor:
    return x.new_empty(kept_shape(x.shape, first, last))


def _fake_index(x: torch.Tensor, op: str, first: int, last: int) -> torch.Tensor:
    return x.new_empty(kept_shape(x.shape, first, last), dtype=torch.int64)


def _dense_gradient(impl: str, *saved: Any, **params: Any) -> tuple[torch.Tensor]:
    """Return the gradient in memory of its own: a registered operator may not return a view of ``grad``."""
    (gradient,) = backward_of("reduce", impl)(*saved, **params)
    return (gradient.contiguous(),)


SCALARS = ("op", "first", "last")
register(
    "reduce",
    Schema(
        inputs="Tensor x, str op, int first, int last",
        saved="Tensor x, Tensor y, SymInt[] shape, str op, int first, int last",
        params=SCALARS,
        fake=_fake,
        fake_gets_params=True,
        backward=_dense_gradient,
        fake_backward=lambda grad, x, y, shape: (grad.new_empty(shape),),
    ),
)
register(
    "argreduce",
    Schema(
        inputs="Tensor x, str op, int first, int last",
        gradients=0,
        params=SCALARS,
        fake=_fake_index,
        fake_gets_params=True,
    ),
)


def _params(where: str, x: Any, op: Any, dim: Any) -> dict[str, Any]:
    """Return the operator's scalars; what is no tensor gets its error from the operator's own check."""
    rank = x.dim() if isinstance(x, torch.Tensor) else 1
    if rank == 0:
        hint = "weft.ops.sum(x), or x itself"
        raise WeftError(f"{where}: x.dim()", expected="1 or more", got=0, hint=hint)
    first, last = normalized_dims(where, dim, rank)
    return {"op": op, "first": first, "last": last}


def reduce(
    x: torch.Tensor,
    op: str,
    dim: int | Sequence[int],
    *,
    keepdim: bool = False,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return the sum, the mean, the largest or smallest element, or the log-sum-exp along dimensions.

    Args:
        x: tensor of one dimension or more, of any strides; float32, float16 or bfloat16; CPU or CUDA.
        op: "sum", "mean", "amax", "amin" or "logsumexp".
        dim: a dimension, or several that are neighbours; negative ones count from the end.
        keepdim: True keeps each reduced dimension with size 1.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True is refused: how a row is cut depends on the number of rows.

    Returns:
        A contiguous tensor of x's shape without the reduced dimensions, in its dtype and on its device. Sums
        are in float32 and rounded once, in an order that follows from the shape and the device alone. A NaN
        among the elements gives NaN. Of no elements, the sum is 0, the mean NaN and the log-sum-exp -Inf.
        Gradients are torch's: elements that tie for ``amax`` or ``amin`` get equal shares.

    Raises:
        WeftError: ``x`` is no tensor, has no dimension, or is of another dtype or device; ``op`` is unknown;
            ``dim`` is out of range, or its dimensions are not neighbours; ``amax`` or ``amin`` of no
            elements; ``impl`` is unknown or does not run here.

    Source: M. Harris, "Optimizing parallel reduction in CUDA", NVIDIA, 2007.
    """
    if type(keepdim) is not bool:
        validate.flag("reduce: keepdim", keepdim)
    params = _params("reduce", x, op, dim)
    y = call("reduce", (x,), params, impl, lambda: check_arguments(x, **params), batch_invariant)
    return _restore(y, params) if keepdim else y  # type: ignore[no-any-return]


def argreduce(
    x: torch.Tensor,
    op: str,
    dim: int | Sequence[int],
    *,
    keepdim: bool = False,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return the index of the largest or smallest element along dimensions.

    Args:
        x: tensor of one dimension or more, of any strides; float32, float16, bfloat16 or int32; CPU or CUDA.
        op: "argmax" or "argmin".
        dim: a dimension, or several that are neighbours; the index then counts their elements in row-major
            order.
        keepdim: True keeps each reduced dimension with size 1.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True is refused, although every implementation returns the same indices.

    Returns:
        An int64 tensor of x's shape without the reduced dimensions, contiguous. Of equal elements it is the
        first; 0 equals -0. NaN is both the largest and the smallest. It has no gradient.

    Raises:
        WeftError: as :func:`reduce`, and for no elements along the dimensions, or an ``x`` that requires a
            gradient.
    """
    if type(keepdim) is not bool:
        validate.flag("argreduce: keepdim", keepdim)
    params = _params("argreduce", x, op, dim)
    y = call("argreduce", (x,), params, impl, lambda: check_indexed_arguments(x, **params), batch_invariant)
    return _restore(y, params) if keepdim else y  # type: ignore[no-any-return]


def _restore(y: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
    """Return a result with the reduced dimensions as dimensions of size 1."""
    ones = (1,) * (params["last"] - params["first"] + 1)
    return y.view(*y.shape[: params["first"]], *ones, *y.shape[params["first"] :])
