"""Seeded dropout; README.md has its implementations and times."""

from __future__ import annotations

import torch

from weft.dispatch.operator import Schema, call, register
from weft.ops._common.layout import contiguous_like
from weft.ops._common.philox_dropout import default_implementation
from weft.ops.dropout.spec import check_arguments

register(
    "dropout",
    Schema(
        inputs="Tensor x, float p, int seed",
        saved="float p, int seed",
        gradients=1,
        fake=contiguous_like,
        fake_backward=lambda grad: (contiguous_like(grad),),
        params=("p", "seed"),
    ),
)


def dropout(
    x: torch.Tensor, *, p: float, seed: int, impl: str | None = None, batch_invariant: bool = False
) -> torch.Tensor:
    """Set each element to 0 with probability ``p``, and divide the others by ``1 - p``.

    The mask is a function of the seed and of the element's position in row-major order alone. It is the same
    on CPU and GPU, in every implementation and for all strides. The backward computes it again: no mask is
    stored.

    Args:
        x: tensor of any shape; float32, float16 or bfloat16; CPU or CUDA.
        p: from 0 (a copy) to 1 (zeros, whatever ``x`` holds). What is taken is the 65536th nearest
            to it, p' = round(p * 65536) / 65536, and the others are divided by ``1 - p'``, so that
            the mean stays: 0.1 is 0.100006. Up to 2^-17 nothing is dropped.
        seed: from 0 to 2^63 - 1. A fresh one for each call in training.
        impl: an implementation's name (``weft ops`` lists them); None is ``cuda`` on a GPU, or
            ``triton`` where CUDA's packages are missing, and ``eager`` on a CPU. The library's own
            dropout has other bits and is none of them.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        A contiguous tensor with the shape, dtype and device of ``x``; a dropped NaN is 0.

    Raises:
        WeftError: ``x`` is no tensor or of another dtype or device; ``p`` or ``seed`` is out of
            range; ``impl`` is unknown or does not run here.

    Source: Srivastava et al., JMLR 2014; Salmon et al., SC 2011 (Philox 4x32-10).
    """
    if impl is None and isinstance(x, torch.Tensor):
        impl = default_implementation(x)
    params = {"p": p, "seed": seed}
    return call("dropout", (x,), params, impl, lambda: check_arguments(x, p=p, seed=seed), batch_invariant)  # type: ignore[no-any-return]
