"""``LinearCrossEntropy``: a model's head and its loss, with the logits never in memory at once."""

from __future__ import annotations

import torch

from weft import ops
from weft.core import WeftError
from weft.nn._common import cast

REDUCTIONS = ("mean", "sum")


class LinearCrossEntropy(torch.nn.Linear):
    """``cross_entropy(x @ weight.T, target)`` in one operator, a chunk of the logits at a time.

    Parameters and state dict are those of ``torch.nn.Linear(in_features, out_features,
    bias=False)``, so that a tied head shares its tensor; the loss's arguments are
    ``torch.nn.CrossEntropyLoss``'s.

    Args:
        in_features: the width of the hidden states.
        out_features: the number of classes, any number.
        ignore_index: a target that counts for nothing.
        reduction: ``mean`` over the targets that count, or ``sum``.
        label_smoothing: the share of the target that is spread over all classes.
        z_loss: the weight of the squared log-sum-exp, added to each loss (arXiv:2204.02311).
        impl: the implementation that ``weft.ops.linear_cross_entropy`` is to use. None is
            ``triton`` on a GPU, since torch's own keeps all logits; else the operator's choice.

    Raises:
        WeftError: another ``reduction``.
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
        super().__init__(in_features, out_features, False, device, dtype)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.z_loss, self.impl = label_smoothing, z_loss, impl

    def forward(  # type: ignore[override]  # a loss takes its targets too
        self, input: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states (..., in_features) and classes (...), int64, to the loss, a float32."""
        x, weight = cast(input, self.weight)
        return ops.linear_cross_entropy(
            x.flatten(0, -2),
            weight,
            target.flatten(),
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            reduction=self.reduction,
            impl=sparing(self.impl, x),
        )


def sparing(impl: str | None, x: torch.Tensor) -> str | None:
    """The implementation that keeps no logits, where nobody names one: the reason for the call."""
    return "triton" if impl is None and x.is_cuda else impl
