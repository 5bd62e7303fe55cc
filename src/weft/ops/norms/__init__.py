"""Layer norm and RMS norm, with residual and dropout: five operators by one set of kernels; see README.md."""

from __future__ import annotations

from typing import Any

import torch

from weft.dispatch.operator import Schema, call, register
from weft.dispatch.public_calls import of_operator, repeated
from weft.ops._common.layout import contiguous_like
from weft.ops._common.philox_dropout import default_implementation
from weft.ops.norms import spec


def _register(norm: spec.NormVariant) -> None:
    """Register ``weft::NAME`` and ``weft::NAME_backward``, whose outputs are contiguous."""
    inputs = norm.select_gradients("Tensor x", "Tensor residual", "Tensor weight", "Tensor bias")
    params = ("float p", "int seed", "float eps") if norm.dropout else ("float eps",)

    def fake(x: torch.Tensor, *_: torch.Tensor) -> Any:
        return (contiguous_like(x), contiguous_like(x)) if norm.residual else contiguous_like(x)

    def fake_backward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, _, s, weight = norm.unpack_backward(tensors)
        gradients = (contiguous_like(v) for v in (s, s, weight, weight))
        return norm.select_gradients(*gradients)[norm.shares_gradient :]

    register(
        norm.name,
        Schema(
            repeats=True,
            inputs=", ".join((*inputs, *params)),
            saved=", ".join(("Tensor s" if norm.residual else "Tensor x", "Tensor weight", *params)),
            gradients=len(inputs) - norm.shares_gradient,
            # Autograd gives both terms of the sum one tensor, as it does for torch's own sum.
            shares_gradient=norm.shares_gradient,
            fake=fake,
            fake_backward=fake_backward,
            outputs=2 if norm.residual else 1,
            differentiable_outputs=2 if norm.residual else 1,
            params=tuple(param.split()[1] for param in params),
        ),
    )


for _norm in (
    spec.LAYER_NORM_VARIANT,
    spec.RMS_NORM_VARIANT,
    spec.ADD_LAYER_NORM_VARIANT,
    spec.ADD_RMS_NORM_VARIANT,
    spec.DROPOUT_VARIANT,
):
    _register(_norm)


@repeated(of_operator("layer_norm", eps=1e-5))
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float = 1e-5,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Layer norm over the last dimension: y = (x - mean) / sqrt(variance + eps) weight + bias.

    Args:
        x: tensor of one dimension or more; float32, float16 or bfloat16; CPU or CUDA; any strides.
        weight, bias: ``x.shape[-1]`` elements each, in the dtype of ``x`` or float32.
        eps: is added to the variance; 0 or more.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        A tensor with the shape, dtype and device of ``x``, contiguous.
        Arithmetic is in float32. A row that holds NaN or Inf gives NaN throughout.

    Raises:
        WeftError: an argument is no tensor, or has another dtype, device or size than described above;
            ``impl`` is unknown or does not run here.

    Source: Ba, Kiros and Hinton, "Layer Normalization" (arXiv:1607.06450).
    """
    inputs, params = (x, weight, bias), {"eps": eps}

    def check() -> None:
        spec.check_arguments(spec.LAYER_NORM_VARIANT, inputs, params)

    return call("layer_norm", inputs, params, impl, check, batch_invariant)  # type: ignore[no-any-return]


@repeated(of_operator("rms_norm", eps=1e-6))
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """RMS norm over the last dimension: y = x / sqrt(mean x^2 + eps) weight.

    Args:
        x: tensor of one dimension or more; float32, float16 or bfloat16; CPU or CUDA; any strides.
        weight: ``x.shape[-1]`` elements, in the dtype of ``x`` or float32.
        eps: is added to the mean square; 0 or more.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        A tensor with the shape, dtype and device of ``x``, contiguous.
        Arithmetic is in float32. A row that holds NaN gives NaN throughout.

    Raises:
        WeftError: an argument is no tensor, or has another dtype, device or size than described above;
            ``impl`` is unknown or does not run here.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467).
    """
    inputs, params = (x, weight), {"eps": eps}

    def check() -> None:
        spec.check_arguments(spec.RMS_NORM_VARIANT, inputs, params)

    return call("rms_norm", inputs, params, impl, check, batch_invariant)  # type: ignore[no-any-return]


@repeated(of_operator("add_layer_norm", eps=1e-5))
def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float = 1e-5,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a residual, then layer norm: s = x + residual, y = layer_norm(s).

    Args:
        x: tensor of one dimension or more; float32, float16 or bfloat16; CPU or CUDA; any strides.
        residual: as ``x``.
        weight, bias: ``x.shape[-1]`` elements each, in the dtype of ``x`` or float32.
        eps: is added to the variance; 0 or more.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        (y, s): the normalised sum and the sum, each with the shape, dtype and device of ``x``,
        contiguous. ``s = x + residual`` is rounded to the dtype first, and normalised as rounded.
        Arithmetic is in float32. A row of the sum that holds NaN or Inf gives NaN throughout.

    Raises:
        WeftError: an argument is no tensor, or has another dtype, device or size than described above;
            ``impl`` is unknown or does not run here.

    Source: Ba, Kiros and Hinton, "Layer Normalization" (arXiv:1607.06450).
    """
    inputs, params = (x, residual, weight, bias), {"eps": eps}

    def check() -> None:
        spec.check_arguments(spec.ADD_LAYER_NORM_VARIANT, inputs, params)

    return call("add_layer_norm", inputs, params, impl, check, batch_invariant)  # type: ignore[no-any-return]


@repeated(of_operator("add_rms_norm", eps=1e-6))
def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a residual, then RMS norm: s = x + residual, y = rms_norm(s).

    Args:
        x: tensor of one dimension or more; float32, float16 or bfloat16; CPU or CUDA; any strides.
        residual: as ``x``.
        weight: ``x.shape[-1]`` elements, in the dtype of ``x`` or float32.
        eps: is added to the mean square; 0 or more.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        (y, s): the normalised sum and the sum, each with the shape, dtype and device of ``x``,
        contiguous. ``s = x + residual`` is rounded to the dtype first, and normalised as rounded.
        Arithmetic is in float32. A row of the sum that holds NaN gives NaN throughout.

    Raises:
        WeftError: an argument is no tensor, or has another dtype, device or size than described above;
            ``impl`` is unknown or does not run here.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467).
    """
    inputs, params = (x, residual, weight), {"eps": eps}

    def check() -> None:
        spec.check_arguments(spec.ADD_RMS_NORM_VARIANT, inputs, params)

    return call("add_rms_norm", inputs, params, impl, check, batch_invariant)  # type: ignore[no-any-return]


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
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout, residual, layer norm: s = dropout(x) + residual, y = layer_norm(s).

    No mask is stored; the dropped elements are those of :func:`weft.ops.dropout`.

    Args:
        x: tensor of one dimension or more; float32, float16 or bfloat16; CPU or CUDA; any strides.
        residual: as ``x``.
        weight, bias: ``x.shape[-1]`` elements each, in the dtype of ``x`` or float32.
        p: the probability that an element of ``x`` is dropped, from 0 to 1, rounded to a multiple of
            1/65536, for the scale as well.
        seed: from 0 to 2^63 - 1. In training each call takes another one.
        eps: is added to the variance; 0 or more.
        impl: an implementation's name (``weft ops`` lists them); None is ``cuda`` on a GPU, or
            ``triton`` for rows of one column or if CUDA's packages are missing, and ``eager`` on
            a CPU: torch's own dropout draws other bits.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        (y, s): the normalised sum and the sum, each with the shape, dtype and device of ``x``,
        contiguous. ``s`` is rounded to the dtype first, and normalised as rounded. Arithmetic is in
        float32. Both are differentiable.

    Raises:
        WeftError: an argument is no tensor, or has another dtype, device or size than described above;
            ``p``, ``seed`` or ``eps`` is out of range; ``impl`` is unknown or does not run here.

    Source: JMLR 2014 (dropout), arXiv:1607.06450 (layer norm), SC 2011 (Philox 4x32-10).
    """
    if impl is None and isinstance(x, torch.Tensor):
        one_column = x.is_cuda and x.shape[-1:] == (1,)  # which the CUDA kernels refuse
        impl = "triton" if one_column else default_implementation(x)
    inputs, params = (x, residual, weight, bias), {"p": p, "seed": seed, "eps": eps}

    def check() -> None:
        spec.check_arguments(spec.DROPOUT_VARIANT, inputs, params)

    return call("dropout_add_layer_norm", inputs, params, impl, check, batch_invariant)  # type: ignore[no-any-return]
