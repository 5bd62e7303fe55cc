"""A residual added, then layer norm; see README.md beside this for the ways and their figures."""

from __future__ import annotations

import torch

from weft.ops._shared.public import Schema, call, register
from weft.ops.add_layer_norm.spec import check_arguments


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


register(
    "add_layer_norm",
    Schema(
        inputs="Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps",
        saved="Tensor s, Tensor weight, float eps",
        gradients=4,
        fake=lambda x, *_: (_like(x), _like(x)),
        fake_backward=lambda grad, more, x, weight: (
            _like(x),
            _like(x),
            _like(weight),
            _like(weight),
        ),
        outputs=2,
        graded=2,
        params=("eps",),
    ),
)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float = 1e-5,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A residual added, then layer norm: s = x + residual, y = layer_norm(s).

    Args:
        x: tensor of one dimension or more; float32, float16 or bfloat16; CPU or CUDA; any strides.
        residual: as ``x``.
        weight, bias: ``x.shape[-1]`` elements each, in the dtype of ``x`` or float32.
        eps: is added to the variance; 0 or more.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        (y, s): the normalised sum and the sum, each with the shape, dtype and device of ``x``,
        contiguous. ``s = x + residual`` is rounded to the dtype first, and normalised as rounded.
        Arithmetic is in float32. A sum's row that holds NaN or Inf answers NaN throughout.

    Raises:
        WeftError: an argument is no tensor, of another dtype, device or size than said above;
            ``impl`` is unknown or does not run here.

    Source: Ba, Kiros and Hinton, "Layer Normalization" (arXiv:1607.06450).
    """

    def check() -> None:
        check_arguments(x, residual, weight, bias, eps=eps)

    return call("add_layer_norm", (x, residual, weight, bias), {"eps": eps}, impl, check)  # type: ignore[no-any-return]
