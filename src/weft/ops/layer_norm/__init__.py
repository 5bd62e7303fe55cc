"""Layer norm over the last dimension; see README.md beside this for the ways and their figures."""

from __future__ import annotations

import torch

from weft.ops._shared.public import Schema, call, register
from weft.ops.layer_norm.spec import check_arguments


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


register(
    "layer_norm",
    Schema(
        inputs="Tensor x, Tensor weight, Tensor bias, float eps",
        saved="Tensor x, Tensor weight, float eps",
        gradients=3,
        fake=lambda x, *_: _like(x),
        fake_backward=lambda grad, x, weight: (_like(x), _like(weight), _like(weight)),
        params=("eps",),
    ),
)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float = 1e-5,
    impl: str | None = None,
) -> torch.Tensor:
    """Layer norm over the last dimension: y = (x - mean) / sqrt(variance + eps) weight + bias.

    Args:
        x: tensor of one dimension or more; float32, float16 or bfloat16; CPU or CUDA; any strides.
        weight, bias: ``x.shape[-1]`` elements each, in the dtype of ``x`` or float32.
        eps: is added to the variance; 0 or more.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        A tensor with the shape, dtype and device of ``x``, contiguous.
        Arithmetic is in float32. A row that holds NaN or Inf answers NaN throughout.

    Raises:
        WeftError: an argument is no tensor, of another dtype, device or size than said above;
            ``impl`` is unknown or does not run here.

    Source: Ba, Kiros and Hinton, "Layer Normalization" (arXiv:1607.06450).
    """

    def check() -> None:
        check_arguments(x, weight, bias, eps=eps)

    return call("layer_norm", (x, weight, bias), {"eps": eps}, impl, check)  # type: ignore[no-any-return]
