"""The k largest or smallest elements of each row; README.md has the implementations."""

from __future__ import annotations

import torch

from weft.dispatch.operator import Schema, call, register
from weft.ops.topk.spec import check_arguments


def _fake(x: torch.Tensor, k: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


register(
    "topk",
    Schema(
        inputs="Tensor x, int k, bool largest",
        saved="Tensor indices, SymInt columns, int k, bool largest",
        gradients=1,
        params=("k", "largest"),
        fake=_fake,
        fake_gets_params=True,
        fake_backward=lambda grad, indices, columns: (grad.new_empty((*grad.shape[:-1], columns)),),
        outputs=2,
        differentiable_outputs=1,
    ),
)


def topk(
    x: torch.Tensor,
    k: int,
    *,
    largest: bool = True,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest elements of each row and their indices, sorted.

    Args:
        x: (..., N) tensor of one dimension or more; float32, float16 or bfloat16; CPU or CUDA.
        k: 0 to N.
        largest: False: the k smallest, the smallest first.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True is refused: no implementation declares it yet.

    Returns:
        Values (..., k) in the dtype of ``x`` and indices (..., k) int64. Of equal elements the one with the
        lower index comes first. NaN is above +Inf, and 0 equals -0, as in ``torch.topk``. The gradient of the
        values goes to the elements that the indices name.

    Raises:
        WeftError: ``x`` is no tensor, has no dimension, or is of another dtype or device; ``k`` is no int
            from 0 to N; ``largest`` is no bool; ``impl`` is unknown or does not run here.
    """
    if type(largest) is not bool:  # 1 is like an earlier True
        check_arguments(x, k=k, largest=largest)
    params = {"k": k, "largest": largest}
    return call("topk", (x,), params, impl, lambda: check_arguments(x, **params), batch_invariant)  # type: ignore[no-any-return]
