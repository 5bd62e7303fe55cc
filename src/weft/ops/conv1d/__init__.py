"""Depthwise causal convolution in one dimension; README.md has its implementations, ladder and times."""

from __future__ import annotations

from typing import Any

import torch

from weft.dispatch.autocast import lowered
from weft.dispatch.operator import Schema, call, register
from weft.ops._common.layout import contiguous_like
from weft.ops.conv1d.spec import check_arguments

register(
    "conv1d",
    Schema(
        inputs="Tensor x, Tensor weight, Tensor bias",
        saved="Tensor x, Tensor weight",
        gradients=3,
        fake=lambda x, weight, bias: contiguous_like(x),
        fake_backward=lambda grad, x, weight: (
            contiguous_like(x),
            contiguous_like(weight),
            weight.new_empty(weight.shape[0]),
        ),
    ),
)


def conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, impl: str | None = None
) -> torch.Tensor:
    """Return the depthwise causal convolution of each channel with its own K coefficients.

    y[b, c, t] = bias[c] + sum over k of weight[c, k] x[b, c, t - (K-1) + k]: the last coefficient is that of
    the present, as in ``F.conv1d`` on an input padded by K-1 zeros on the left.

    Args:
        x: (B, C, T) of any strides; float32, float16 or bfloat16; CPU or CUDA.
        weight: (C, K) with K from 2 to 8; dtype and device of ``x``.
        bias: (C,); dtype and device of ``x``. None adds zeros.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        (B, C, T), contiguous, with the dtype and device of ``x``. Sums are in float32 and rounded once. All
        arguments have gradients; those of ``weight`` and ``bias`` have the same bits in each run.

    Raises:
        WeftError: the arguments are no tensors of these shapes, of one dtype and device; ``impl`` is unknown
            or does not run here.

    Source: the convolution of A. Gu and T. Dao, "Mamba: Linear-time sequence modeling with selective state
    spaces" (arXiv:2312.00752).
    """
    inputs = lowered(x, weight, _bias_or_zeros(weight, bias))
    return call("conv1d", inputs, {}, impl, lambda: check_arguments(*inputs))  # type: ignore[no-any-return]


def _bias_or_zeros(weight: Any, bias: Any) -> Any:
    """Return ``bias``, or zeros for None; the check of arguments refuses a weight that is no matrix."""
    if bias is not None:
        return bias
    is_matrix = isinstance(weight, torch.Tensor) and not weight.is_nested and weight.dim() == 2
    return weight.new_zeros(weight.shape[0]) if is_matrix and weight.is_floating_point() else None
