"""``Linear`` with a fused epilogue, and ``MLP``."""

from __future__ import annotations

import torch

from weft import ops
from weft.core import WeftError
from weft.nn._common import cast, check_dropout, new_seed

ACTIVATIONS = (None, "gelu")


class Linear(torch.nn.Linear):
    """``act(x @ weight.T + bias) + residual``; without its options a plain ``torch.nn.Linear``.

    Arguments, parameters and state dict are those of ``torch.nn.Linear``.

    Args:
        activation: None, or ``"gelu"``: the tanh form of GELU (``torch.nn.GELU("tanh")``), computed in
            the product's epilogue.
        impl: implementation of the ``weft.ops`` operators; None leaves the choice to dispatch.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        impl: str | None = None,
    ) -> None:
        if activation not in ACTIVATIONS:
            expected = "None or 'gelu'"
            raise WeftError("Linear: activation", expected=expected, got=repr(activation))
        # torch's initialisation, in torch's order: a seed gives the same weights as torch.nn.Linear.
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation
        self.impl = impl

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Map (*, in_features) to (*, out_features); ``residual`` of the output's shape is added last."""
        return linear(input, self.weight, self.bias, self.activation, residual, self.impl)

    def extra_repr(self) -> str:
        activation = f", activation={self.activation!r}" if self.activation else ""
        return super().extra_repr() + activation


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
    impl: str | None,
) -> torch.Tensor:
    """Compute a linear layer with its epilogue, by the operator that fuses most of it."""
    # The operators always add a bias; zeros cost nothing beside the product.
    x, weight, bias = cast(x, weight, weight.new_zeros(len(weight)) if bias is None else bias)
    if activation == "gelu":
        # No operator fuses GELU and a sum after it, so the residual is added by torch.
        y = ops.linear_gelu(x, weight, bias, impl=impl)
        return y if residual is None else residual + y
    if residual is None:
        return ops.linear(x, weight, bias, impl=impl)
    if residual.dtype != x.dtype:  # under autocast the residual stream is float32
        # torch promotes the sum to float32; the fused operator takes one dtype only.
        return residual + ops.linear(x, weight, bias, impl=impl)
    return ops.linear_residual(x, weight, bias, residual, impl=impl)


class MLP(torch.nn.Module):
    """GPT-2's MLP, ``proj(gelu(fc(x)))``.

    The state dict is that of a ``torch.nn.Sequential`` whose ``fc`` and ``proj`` are
    ``torch.nn.Linear``: ``fc.weight``, ``fc.bias``, ``proj.weight``, ``proj.bias``.

    Args:
        in_features: width of input and output.
        hidden_features: width between the products; None is four times ``in_features``.
        bias: whether both products add a bias.
        dropout: probability of dropout of the output in training.
        impl: implementation of the ``weft.ops`` operators; None leaves the choice to dispatch.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        impl: str | None = None,
    ) -> None:
        super().__init__()
        self.dropout = check_dropout("MLP", dropout)
        self.impl = impl
        hidden = 4 * in_features if hidden_features is None else hidden_features
        # fc before proj: the order of the state dict, and of the random numbers of the initialisation.
        self.fc = Linear(in_features, hidden, bias, device, dtype, activation="gelu", impl=impl)
        self.proj = Linear(hidden, in_features, bias, device, dtype, impl=impl)

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Map (*, in_features) to (*, in_features); ``residual`` of that shape is added last."""
        hidden = self.fc(input)
        if not (self.training and self.dropout):
            return self.proj(hidden, residual)
        # Dropout comes between the product and the sum, so the sum cannot be in the epilogue.
        y = ops.dropout(self.proj(hidden), p=self.dropout, seed=new_seed(), impl=self.impl)
        return y if residual is None else residual + y
