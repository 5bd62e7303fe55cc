"""``LayerNorm`` and ``RMSNorm``: torch's modules with a forward by ``weft.ops``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from weft import ops
from weft.nn._common import cast_norm

# torch.nn.RMSNorm adds float32's epsilon if eps is None, because it computes half types in float32.
RMS_NORM_EPS = torch.finfo(torch.float32).eps


class LayerNorm(torch.nn.LayerNorm):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimensions.

    Arguments, parameters and state dict are those of ``torch.nn.LayerNorm``. Source: arXiv:1607.06450.

    Args:
        normalized_shape: sizes of the last dimensions, or the size of the last one.
        impl: implementation of ``weft.ops.layer_norm``; None leaves the choice to dispatch.

    The input is (*, *normalized_shape), float32, float16 or bfloat16, of the parameters' dtype; under
    autocast the result is float32, as torch's.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        impl: str | None = None,
    ) -> None:
        # torch's annotation accepts lists, not every sequence.
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        # torch creates the parameters: names, shapes and initial values are its own.
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        self.impl = impl

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, self.impl)


class RMSNorm(torch.nn.RMSNorm):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimensions.

    Arguments, parameters and state dict are those of ``torch.nn.RMSNorm``. Source: arXiv:1910.07467.

    Args:
        normalized_shape: sizes of the last dimensions, or the size of the last one.
        eps: None is float32's machine epsilon, as in torch.
        impl: implementation of ``weft.ops.rms_norm``; None leaves the choice to dispatch.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        impl: str | None = None,
    ) -> None:
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, device, dtype)
        self.impl = impl

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        eps = RMS_NORM_EPS if self.eps is None else self.eps
        x, weight = cast_norm(x, self.weight)
        x2d = _flatten_normalized(x, self.normalized_shape)
        weight = x2d.new_ones(x2d.shape[-1]) if weight is None else weight.reshape(-1)
        return ops.rms_norm(x2d, weight, eps=eps, impl=self.impl).view(x.shape)


def layer_norm(
    x: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    impl: str | None,
) -> torch.Tensor:
    """``torch.nn.functional.layer_norm`` by ``weft.ops``: None becomes a weight of ones, a bias of zeros."""
    x, weight, bias = cast_norm(x, weight, bias)
    x2d = _flatten_normalized(x, shape)
    columns = x2d.shape[-1]
    # The operators need both parameters; these constants get no gradient.
    weight = x2d.new_ones(columns) if weight is None else weight.reshape(-1)
    bias = x2d.new_zeros(columns) if bias is None else bias.reshape(-1)
    return ops.layer_norm(x2d, weight, bias, eps=eps, impl=impl).view(x.shape)


def _flatten_normalized(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the input with its normalised dimensions as one."""
    return x if len(shape) == 1 else x.reshape(*x.shape[: x.dim() - len(shape)], prod(shape))
