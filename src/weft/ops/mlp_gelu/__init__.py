"""Two linear layers with GELU between them; README.md has the method."""

from __future__ import annotations

from typing import Any

import torch

from weft.dispatch.autocast import lowered
from weft.dispatch.operator import Schema, call, register
from weft.ops.linear import bias_or_zeros, linear, linear_gelu, needs_gradient
from weft.ops.mlp_gelu.spec import check_arguments


def _fake_outputs(
    x: torch.Tensor,
    fc_weight: torch.Tensor,
    fc_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    y, hidden, pre = (x.new_empty(*x.shape[:-1], w.shape[0]) for w in (proj_weight, fc_weight, fc_weight))
    return y, hidden, pre


def _fake_gradients(
    grad: torch.Tensor, x: torch.Tensor, fc_weight: torch.Tensor, proj_weight: torch.Tensor, *activations: Any
) -> tuple[torch.Tensor, ...]:
    matrices = [t.new_empty(t.shape) for t in (x, fc_weight, proj_weight)]
    biases = [w.new_empty(w.shape[0]) for w in (fc_weight, proj_weight)]
    return matrices[0], matrices[1], biases[0], matrices[2], biases[1]


register(
    "mlp_gelu",
    Schema(
        inputs="Tensor x, Tensor fc_weight, Tensor fc_bias, Tensor proj_weight, Tensor proj_bias",
        saved="Tensor x, Tensor fc_weight, Tensor proj_weight, Tensor hidden, Tensor pre",
        gradients=5,
        outputs=3,
        fake=_fake_outputs,
        fake_backward=_fake_gradients,
    ),
)


def mlp_gelu(
    x: torch.Tensor,
    fc_weight: torch.Tensor,
    fc_bias: torch.Tensor | None,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor | None = None,
    *,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return gelu(x W1^T + b1) W2^T + b2, GELU in tanh form; products are summed in float32.

    It is ``linear(linear_gelu(x, W1, b1), W2, b2)`` as one operator, so that the backward of ``cuda`` can
    multiply by GELU's slope in the epilogue of a product. Where a gradient is needed, GELU's input and output
    are stored for it, rounded to x's dtype. Elsewhere the call is these two operators.

    Args:
        x: (..., K); float32, float16 or bfloat16; CPU or CUDA; any strides.
        fc_weight: W1 (F, K), as ``torch.nn.Linear`` stores it; the same dtype and device; any strides.
        fc_bias: b1 (F,); the same dtype and device. None adds zeros.
        proj_weight: W2 (N, F); the same dtype and device; any strides.
        proj_bias: b2 (N,); the same dtype and device. None adds zeros.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        (..., N), contiguous, of the inputs' dtype and device.

    Raises:
        WeftError: the arguments are no tensors of these shapes, of one dtype and device; ``impl`` is
            unknown or does not run here.

    Source of GELU: arXiv:1606.08415.
    """
    biases = bias_or_zeros(fc_weight, fc_bias), bias_or_zeros(proj_weight, proj_bias)
    inputs = lowered(x, fc_weight, biases[0], proj_weight, biases[1])
    if needs_gradient(inputs):
        return call("mlp_gelu", inputs, {}, impl, lambda: check_arguments(*inputs), batch_invariant)[0]  # type: ignore[no-any-return]
    # Without a gradient GELU's input need not be stored, which linear_gelu knows how to avoid.
    check_arguments(*inputs)
    hidden = linear_gelu(*inputs[:3], impl=impl, batch_invariant=batch_invariant)
    return linear(hidden, *inputs[3:], impl=impl, batch_invariant=batch_invariant)
