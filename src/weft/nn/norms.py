"""``LayerNorm`` and ``RMSNorm``: torch's modules, whose forward is ``weft.ops``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from weft import ops
from weft.nn._common import cast_norm

# What torch.nn.RMSNorm adds where eps is None: it computes half types in float32.
EPS = torch.finfo(torch.float32).eps


class LayerNorm(torch.nn.LayerNorm):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimensions.

    Arguments, parameters and state dict are ``torch.nn.LayerNorm``'s. Source: arXiv:1607.06450.

    Args:
        normalized_shape: the sizes of the last dimensions, or the size of the last one.
        impl: the implementation that ``weft.ops.layer_norm`` is to use; None is its choice.

    The input is (*, *normalized_shape), float32, float16 or bfloat16, of the parameters' dtype;
    under autocast it is computed and returned in float32, as by torch.
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
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        self.impl = impl

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, self.impl)


class RMSNorm(torch.nn.RMSNorm):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimensions.

    Arguments, parameters and state dict are ``torch.nn.RMSNorm``'s. Source: arXiv:1910.07467.

    Args:
        normalized_shape: the sizes of the last dimensions, or the size of the last one.
        eps: None is float32's machine epsilon, as in torch.
        impl: the implementation that ``weft.ops.rms_norm`` is to use; None is its choice.
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
        eps = EPS if self.eps is None else self.eps
        x, weight = cast_norm(x, self.weight)
        rows = _rows(x, self.normalized_shape)
        weight = rows.new_ones(rows.shape[-1]) if weight is None else weight.reshape(-1)
        return ops.rms_norm(rows, weight, eps=eps, impl=self.impl).view(x.shape)


def layer_norm(
    x: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    impl: str | None,
) -> torch.Tensor:
    """``torch.nn.functional.layer_norm`` by ``weft.ops``: ones and zeros stand for what is None."""
    x, weight, bias = cast_norm(x, weight, bias)
    rows = _rows(x, shape)
    columns = rows.shape[-1]
    weight = rows.new_ones(columns) if weight is None else weight.reshape(-1)
    bias = rows.new_zeros(columns) if bias is None else bias.reshape(-1)
    return ops.layer_norm(rows, weight, bias, eps=eps, impl=impl).view(x.shape)


def _rows(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The input with its normalised dimensions as one."""
    return x if len(shape) == 1 else x.reshape(*x.shape[: x.dim() - len(shape)], prod(shape))
