"""Stable sorting of rows, with and without indices; README.md has the implementations."""

from __future__ import annotations

import torch

from weft.dispatch.operator import Schema, call, register
from weft.ops._common.layout import contiguous_like
from weft.ops.sort.spec import check_arguments, check_keys


def _fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return contiguous_like(x), x.new_empty(x.shape, dtype=torch.int64)


register(
    "sort",
    Schema(
        inputs="Tensor x, bool descending",
        saved="Tensor indices, bool descending",
        gradients=1,
        params=("descending",),
        fake=_fake,
        fake_backward=lambda grad, indices: (contiguous_like(grad),),
        outputs=2,
        differentiable_outputs=1,
    ),
)
register(
    "sort_keys",
    Schema(
        inputs="Tensor x, bool descending",
        gradients=0,
        params=("descending",),
        fake=contiguous_like,
    ),
)


def sort(
    x: torch.Tensor,
    *,
    descending: bool = False,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements of each row in order, and where they were; equal ones keep their order.

    Args:
        x: (..., N) tensor of one dimension or more; float32, float16, bfloat16, int32 or int64; CPU or CUDA.
        descending: True: the largest first. Equal elements keep their order here too.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True is refused: no implementation declares it yet.

    Returns:
        Values (..., N) in the dtype of ``x`` and indices (..., N) int64, both contiguous. NaN is above +Inf,
        all NaNs are equal, and -0 equals 0, as in ``torch.sort(stable=True)``. Elements are moved and not
        changed, so that a zero keeps its sign. The gradient of the values goes to the elements that the
        indices name.

    Raises:
        WeftError: ``x`` is no tensor, has no dimension, or is of another dtype or device; ``descending`` is
            no bool; ``impl`` is unknown or does not run here.

    Source: A. Adinets and D. Merrill, "Onesweep: a faster least significant digit radix sort for GPUs"
    (arXiv:2206.01784).
    """
    if type(descending) is not bool:  # 1 is like an earlier True
        check_arguments("sort", x, descending=descending)
    params = {"descending": descending}
    return call("sort", (x,), params, impl, lambda: check_arguments("sort", x, **params), batch_invariant)  # type: ignore[no-any-return]


def sort_keys(x: torch.Tensor, *, descending: bool = False, impl: str | None = None) -> torch.Tensor:
    """Return the elements of each row in order: the values of :func:`sort`, without the indices.

    Args:
        x: (..., N) tensor of one dimension or more; float32, float16, bfloat16, int32 or int64; CPU or CUDA.
        descending: True: the largest first.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        (..., N) in the dtype of ``x``, contiguous: the values of :func:`sort`. It has no
        gradient.

    Raises:
        WeftError: as :func:`sort`; also if ``x`` requires a gradient.
    """
    if type(descending) is not bool:
        check_keys(x, descending=descending)
    params = {"descending": descending}
    return call("sort_keys", (x,), params, impl, lambda: check_keys(x, **params))  # type: ignore[no-any-return]
