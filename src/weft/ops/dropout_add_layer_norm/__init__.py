"""Dropout, a residual added, layer norm; see README.md beside this."""

from __future__ import annotations

import torch

from weft.ops._shared.dropout_ways import shipped
from weft.ops._shared.elementwise import contiguous_like
from weft.ops._shared.public import Schema, call, register
from weft.ops.dropout_add_layer_norm.spec import check_arguments

register(
    "dropout_add_layer_norm",
    Schema(
        inputs="Tensor x, Tensor residual, Tensor weight, Tensor bias, float p, int seed, "
        "float eps",
        saved="Tensor s, Tensor weight, float p, int seed, float eps",
        gradients=4,
        fake=lambda x, *_: (contiguous_like(x), contiguous_like(x)),
        fake_backward=lambda grad, more, s, weight: (
            contiguous_like(s),
            contiguous_like(s),
            contiguous_like(weight),
            contiguous_like(weight),
        ),
        outputs=2,
        graded=2,
        params=("p", "seed", "eps"),
    ),
)


def dropout_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    p: float,
    seed: int,
    eps: float = 1e-5,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout, residual, layer norm: s = dropout(x) + residual, y = layer_norm(s).

    No mask is stored: see :func:`weft.ops.dropout`, whose elements these are.

    Args:
        x: tensor of one dimension or more; float32, float16 or bfloat16; CPU or CUDA; any strides.
        residual: as ``x``.
        weight, bias: ``x.shape[-1]`` elements each, in the dtype of ``x`` or float32.
        p: the chance that an element of ``x`` is dropped, from 0 to 1; the 65536th nearest to it is
            taken, for the scale as well.
        seed: from 0 to 2^63 - 1. A fresh one for each call in training.
        eps: is added to the variance; 0 or more.
        impl: an implementation's name (``weft ops`` lists them); None is ``cuda`` on a GPU, or
            ``triton`` for rows of one column or where CUDA's packages are missing, and ``eager`` on
            a CPU: the library's own dropout has other bits.

    Returns:
        (y, s): the normalised sum and the sum, each with the shape, dtype and device of ``x``,
        contiguous. ``s`` is rounded to the dtype first, and normalised as rounded. Arithmetic is in
        float32. Both take a gradient.

    Raises:
        WeftError: an argument is no tensor, of another dtype, device or size than said above;
            ``p``, ``seed`` or ``eps`` is out of range; ``impl`` is unknown or does not run here.

    Source: JMLR 2014 (dropout), arXiv:1607.06450 (layer norm), SC 2011 (Philox 4x32-10).
    """
    if impl is None and isinstance(x, torch.Tensor):
        one = x.is_cuda and x.shape[-1:] == (1,)  # which the CUDA kernels refuse
        impl = "triton" if one else shipped(x)
    inputs, params = (x, residual, weight, bias), {"p": p, "seed": seed, "eps": eps}

    def check() -> None:
        check_arguments(*inputs, **params)

    return call("dropout_add_layer_norm", inputs, params, impl, check)  # type: ignore[no-any-return]
