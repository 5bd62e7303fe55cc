"""The transpose of the last two dimensions; README.md has its implementations, ladder and times."""

from __future__ import annotations

import torch

from weft.dispatch.operator import Schema, call, register
from weft.ops.transpose.spec import check_arguments


def _fake(x: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised contiguous tensor with the last two sizes swapped."""
    return x.new_empty((*x.shape[:-2], x.shape[-1], x.shape[-2]))


register("transpose", Schema(inputs="Tensor x", gradients=1, fake=_fake, fake_backward=lambda g: (_fake(g),)))


def transpose(x: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """Return a contiguous copy of ``x`` with its last two dimensions swapped.

    ``x.mT`` is a view that costs nothing; this moves the elements, for a reader that needs them in a row.

    Args:
        x: (..., M, N) tensor of two dimensions or more, of any strides; float64, float32, float16, bfloat16,
            int64, int32, int16, int8, uint8 or bool; CPU or CUDA. For others of these sizes, such as fp8:
            ``transpose(x.view(torch.uint8)).view(x.dtype)``.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        A contiguous tensor of shape (..., N, M), with the dtype and device of ``x`` and the same bits, those
        of a NaN included. The gradient is the transpose of the incoming gradient; integers have none.

    Raises:
        WeftError: ``x`` is no tensor, has fewer than two dimensions, or is of another dtype or device;
            ``impl`` is unknown or does not run here.

    Source: G. Ruetsch and P. Micikevicius, "Optimizing matrix transpose in CUDA", NVIDIA, 2009.
    """
    return call("transpose", (x,), {}, impl, lambda: check_arguments(x))  # type: ignore[no-any-return]
