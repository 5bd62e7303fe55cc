"""``LinearCrossEntropy``: a model's head and its loss, without storing all logits at once."""

from __future__ import annotations

import torch

from weft import ops
from weft.core import WeftError
from weft.nn._common import cast

REDUCTIONS = ("mean", "sum")


class LinearCrossEntropy(torch.nn.Linear):
    """``cross_entropy(x @ weight.T, target)`` in one operator, by chunks of the logits.

    Parameters and state dict are those of ``torch.nn.Linear(in_features, out_features, bias=False)``, so
    that a tied head shares its tensor; the loss's arguments are those of ``torch.nn.CrossEntropyLoss``.

    Args:
        in_features: width of the hidden states.
        out_features: number of classes.
        ignore_index: targets of this value are ignored.
        reduction: ``mean`` over the targets that are not ignored, or ``sum``.
        label_smoothing: part of the target's probability that is spread over all classes.
        z_loss: weight of the squared log-sum-exp, which is added to each loss (arXiv:2204.02311).
        impl: implementation of ``weft.ops.linear_cross_entropy``. None is ``triton`` on a GPU, because
            torch's stores all logits; elsewhere dispatch chooses.

    Raises:
        WeftError: an unknown ``reduction``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        impl: str | None = None,
    ) -> None:
        if reduction not in REDUCTIONS:
            expected = " or ".join(REDUCTIONS)
            raise WeftError("LinearCrossEntropy: reduction", expected=expected, got=reduction)
        # Without bias, as the operator has none and tied heads have none.
        super().__init__(in_features, out_features, False, device, dtype)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.z_loss, self.impl = label_smoothing, z_loss, impl

    def forward(  # type: ignore[override]  # a loss takes its targets too
        self, input: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        """Map hidden states (..., in_features) and classes (...), int64, to the loss, a float32 scalar."""
        x, weight = cast(input, self.weight)
        return ops.linear_cross_entropy(
            x.flatten(0, -2),
            weight,
            target.flatten(),
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            reduction=self.reduction,
            impl=without_stored_logits(self.impl, x),
        )


def without_stored_logits(impl: str | None, x: torch.Tensor) -> str | None:
    """Return the implementation to use: on a GPU, by default, one that does not store the logits."""
    return "triton" if impl is None and x.is_cuda else impl
