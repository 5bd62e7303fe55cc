"""Cross entropy; see README.md beside this for the ways and their figures."""

from __future__ import annotations

from typing import Any

import torch

from weft.ops._shared.cross_entropy import check_range, check_reduction, gradient_like
from weft.ops._shared.public import Schema, call, plan, register
from weft.ops.cross_entropy.spec import check_arguments
from weft.ops.cross_entropy.with_torch import reduced

REDUCTIONS = ("mean", "sum", "none")
SCALARS = "int ignore_index, float label_smoothing, float z_loss"

register(
    "cross_entropy",
    Schema(
        inputs=f"Tensor logits, Tensor targets, {SCALARS}",
        saved=f"Tensor logits, Tensor targets, Tensor lse, {SCALARS}",
        outputs=2,
        graded=1,
        gradients=1,
        fake=lambda logits, targets: tuple(
            logits.new_empty(logits.shape[:1], dtype=torch.float32) for _ in range(2)
        ),
        fake_backward=lambda grad, logits, targets, lse: (gradient_like(logits),),
        params=("ignore_index", "label_smoothing", "z_loss"),
    ),
)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    overwrite: bool = False,
    impl: str | None = None,
) -> torch.Tensor:
    """Cross entropy of each row of logits and its target, in float32.

    Args:
        logits: (N, V), V of any size; float32, float16 or bfloat16; CPU or CUDA. Rows may be
            strided (some columns of a padded vocabulary are read where they lie).
        targets: (N,), int64, on the same device: a column, or ``ignore_index``. A CPU's are
            looked at and refused where out of range. A GPU's are not, which would wait for it:
            there such a row reads nothing out of bounds, and its loss and gradient are NaN
            (``impl='torch'`` ends the program by an assertion of its own).
            :func:`weft.ops._shared.cross_entropy.check_range` looks, and waits.
        ignore_index: rows with this target have a loss of 0 and no gradient.
        label_smoothing: the share e in [0, 1] of a target that all columns have in equal parts.
        z_loss: z >= 0; z lse^2 is added to each loss, which keeps the log-sum-exp near 0.
        reduction: ``mean`` over the rows that are not ignored (NaN where all are), ``sum`` or
            ``none``.
        overwrite: allow the gradient to be written over ``logits``, whose values are then lost.
            ``triton`` and ``cuda`` do so outside of ``torch.compile``, where rows are dense in
            memory; a second backward through the same logits raises torch's error.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        A float32 scalar, or (N,) for ``none``.

    Raises:
        WeftError: a dtype, shape, device, ``reduction`` or scalar that has no answer; on a CPU a
            target out of range; ``impl`` is unknown or does not run here.

    Source: label smoothing arXiv:1512.00567; z-loss arXiv:2204.02311.
    """
    params = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
    }
    check_reduction("cross_entropy", reduction, REDUCTIONS)
    if torch.compiler.is_compiling():
        check_arguments(logits, targets, **params)  # type: ignore[arg-type]
        losses = call("cross_entropy", (logits, targets), params, impl)[0]
    else:
        losses = _at_once(logits, targets, params, reduction, overwrite, impl)
    if reduction == "none" or losses.dim() == 0:
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


def _at_once(
    logits: torch.Tensor,
    targets: torch.Tensor,
    params: dict[str, Any],
    reduction: str,
    overwrite: bool,
    impl: str | None,
) -> torch.Tensor:
    """The losses, or where the library reduces them in the same launch, what is asked for."""
    inputs = (logits, targets)
    found = plan("cross_entropy", inputs, params, impl, lambda: check_arguments(*inputs, **params))
    if targets.device.type == "cpu":
        check_range("cross_entropy", targets, logits.shape[1], params["ignore_index"])
    if overwrite:
        return _overwriting(logits, targets, params, found.impl)
    plain = not (params["label_smoothing"] or params["z_loss"])
    if found.impl == "torch" and reduction != "none" and plain:
        return reduced(logits, targets, params["ignore_index"], reduction)
    return found.run(inputs, params)[0]  # type: ignore[no-any-return]


def _overwriting(
    logits: torch.Tensor, targets: torch.Tensor, params: dict[str, Any], impl: str
) -> torch.Tensor:
    from weft.ops.cross_entropy.overwriting import Overwriting, can

    if not can(logits, impl):
        return call("cross_entropy", (logits, targets), params, impl)[0]  # type: ignore[no-any-return]
    return Overwriting.apply(logits, targets, params, impl)  # type: ignore[no-any-return,no-untyped-call]
