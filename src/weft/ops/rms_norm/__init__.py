"""RMS norm over the last dimension; see README.md beside this for the ways and their figures."""

from __future__ import annotations

import torch

from weft.ops._shared.public import Schema, call, register
from weft.ops.rms_norm.spec import check_arguments


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


register(
    "rms_norm",
    Schema(
        inputs="Tensor x, Tensor weight, float eps",
        saved="Tensor x, Tensor weight, float eps",
        gradients=2,
        fake=lambda x, *_: _like(x),
        fake_backward=lambda grad, x, weight: (_like(x), _like(weight)),
        params=("eps",),
    ),
)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, impl: str | None = None
) -> torch.Tensor:
    """RMS norm over the last dimension: y = x / sqrt(mean x^2 + eps) weight.

    Args:
        x: tensor of one dimension or more; float32, float16 or bfloat16; CPU or CUDA; any strides.
        weight: ``x.shape[-1]`` elements, in the dtype of ``x`` or float32.
        eps: is added to the mean square; 0 or more.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        A tensor with the shape, dtype and device of ``x``, contiguous.
        Arithmetic is in float32. A row that holds NaN answers NaN throughout.

    Raises:
        WeftError: an argument is no tensor, of another dtype, device or size than said above;
            ``impl`` is unknown or does not run here.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467).
    """

    def check() -> None:
        check_arguments(x, weight, eps=eps)

    return call("rms_norm", (x, weight), {"eps": eps}, impl, check)  # type: ignore[no-any-return]
