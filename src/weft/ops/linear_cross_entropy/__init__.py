"""The LM head and its loss; see README.md beside this for the ways and their figures."""

from __future__ import annotations

import torch

from weft.ops._shared.autocast import lowered
from weft.ops._shared.cross_entropy import check_range, check_reduction
from weft.ops._shared.public import Schema, call, register
from weft.ops.linear_cross_entropy.chunks import plan
from weft.ops.linear_cross_entropy.spec import check_arguments

SCALARS = "int ignore_index, float label_smoothing, float z_loss"
register(
    "linear_cross_entropy",
    Schema(
        inputs=f"Tensor x, Tensor weight, Tensor targets, {SCALARS}",
        saved=f"Tensor dx, Tensor dweight, {SCALARS}",
        outputs=3,
        graded=1,
        gradients=2,
        fake=lambda x, weight, targets: (
            x.new_empty((), dtype=torch.float32),
            x.new_empty(x.shape),
            weight.new_empty(weight.shape, dtype=torch.float32),
        ),
        fake_backward=lambda grad, dx, dweight: (
            torch.empty_like(dx),
            torch.empty_like(dweight, dtype=dx.dtype),
        ),
        params=("ignore_index", "label_smoothing", "z_loss"),
    ),
)


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    impl: str | None = None,
) -> torch.Tensor:
    """Cross entropy of ``x @ weight.T``, whose logits are not kept.

    ``triton`` and ``cuda`` take some rows at a time (at most 320 MiB of logits, or as many as the
    weight's gradient takes) and compute both gradients with the loss, so that no product is made
    twice; between forward and backward they hold dx and, in float32, dweight. Where nothing takes a
    gradient they compute the loss alone. ``torch``, ``eager`` and ``compile`` keep all logits.

    Args:
        x: (N, C), float32, float16 or bfloat16; CPU or CUDA; any strides.
        weight: (V, C), of the same dtype and device (under autocast both take its dtype).
        targets: (N,), int64: a row of ``weight``, or ``ignore_index``. Out of range as in
            :func:`weft.ops.cross_entropy`: refused on a CPU, NaN on a GPU, never read out of
            bounds.
        ignore_index: rows with this target have a loss of 0 and no gradient.
        label_smoothing: the share in [0, 1] of a target that all columns have in equal parts.
        z_loss: z >= 0; z lse^2 is added to each loss.
        reduction: ``mean`` over the rows that are not ignored (NaN where all are) or ``sum``.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        A float32 scalar.

    Raises:
        WeftError: a dtype, shape, device, ``reduction`` or scalar that has no answer; on a CPU a
            target out of range; ``impl`` is unknown or does not run here.

    Source: chunks and the gradient in the forward, arXiv:2410.10989.
    """
    params = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
    }
    x, weight = lowered(x, weight)
    check_reduction("linear_cross_entropy", reduction, ("mean", "sum"))
    check_arguments(x, weight, targets, **params)  # type: ignore[arg-type]
    if not torch.compiler.is_compiling() and targets.device.type == "cpu":
        check_range("linear_cross_entropy", targets, weight.shape[0], ignore_index)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        loss = call("linear_cross_entropy", (x, weight, targets), params, impl)[0]
    else:
        loss = _loss_alone(x, weight, targets, params, impl)
    if reduction == "mean":
        loss = loss / (targets != ignore_index).sum()
    return loss  # type: ignore[no-any-return]


def _loss_alone(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    params: dict[str, float],
    impl: str | None,
) -> torch.Tensor:
    """Chunks of logits through the operator cross_entropy: what an evaluation needs."""
    rows = plan(x.shape[0], x.shape[1], weight.shape[0], x.element_size()).rows
    total = x.new_zeros((), dtype=torch.float32)
    for part, aims in zip(x.split(rows), targets.split(rows), strict=True):
        total = total + call("cross_entropy", (part @ weight.T, aims), params, impl)[0].sum()
    return total
