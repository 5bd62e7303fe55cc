"""``Linear`` with an epilogue, and ``MLP``: what follows a product is computed as it is stored."""

from __future__ import annotations

import torch

from weft import ops
from weft.core import WeftError
from weft.nn._common import cast, draw_seed, probability

ACTIVATIONS = (None, "gelu")


class Linear(torch.nn.Linear):
    """``act(x @ weight.T + bias) + residual``; a plain ``torch.nn.Linear`` without its options.

    Arguments, parameters and state dict are ``torch.nn.Linear``'s.

    Args:
        activation: None, or ``"gelu"``: GELU's tanh form (``torch.nn.GELU("tanh")``), computed in
            the product's epilogue.
        impl: the implementation that ``weft.ops`` is to use; None is its choice.
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
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation
        self.impl = impl

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The product of ``input`` (*, in_features) and ``weight``, with what follows it.

        ``residual`` (*, out_features) is added last.
        """
        return product(input, self.weight, self.bias, self.activation, residual, self.impl)

    def extra_repr(self) -> str:
        more = f", activation={self.activation!r}" if self.activation else ""
        return super().extra_repr() + more


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
    impl: str | None,
) -> torch.Tensor:
    """A linear layer with its epilogue by the operator that fuses most of it."""
    x, weight, bias = cast(x, weight, weight.new_zeros(len(weight)) if bias is None else bias)
    if activation == "gelu":
        y = _with_gelu(x, weight, bias, impl)
        return y if residual is None else residual + y
    if residual is None:
        return ops.linear(x, weight, bias, impl=impl)
    if residual.dtype != x.dtype:  # under autocast the residual stream stays in float32
        return residual + ops.linear(x, weight, bias, impl=impl)
    return ops.linear_residual(x, weight, bias, residual, impl=impl)


def _with_gelu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, impl: str | None
) -> torch.Tensor:
    """GELU's argument is kept where a backward will ask for it, and only there."""
    keep = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    found = ops.linear_gelu(x, weight, bias, keep=keep, impl=impl)
    return found[0] if keep else found  # type: ignore[no-any-return]


def drop(x: torch.Tensor, p: float, impl: str | None) -> torch.Tensor:
    """Dropout of a module in training: seeded from torch's generator, no mask stored."""
    return ops.dropout(x, p=p, seed=draw_seed(), impl=impl) if p else x


class MLP(torch.nn.Module):
    """GPT-2's: ``proj(gelu(fc(x)))``, four times as wide inside.

    The state dict is that of a ``torch.nn.Sequential`` whose ``fc`` and ``proj`` are
    ``torch.nn.Linear``: ``fc.weight``, ``fc.bias``, ``proj.weight``, ``proj.bias``.

    Args:
        in_features: the width of input and output.
        hidden_features: the width inside; None is four times ``in_features``.
        bias: whether both products add one.
        dropout: the share of the output that training leaves out.
        impl: the implementation that ``weft.ops`` is to use; None is its choice.
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
        self.dropout = probability("MLP", dropout)
        self.impl = impl
        wide = 4 * in_features if hidden_features is None else hidden_features
        self.fc = Linear(in_features, wide, bias, device, dtype, activation="gelu", impl=impl)
        self.proj = Linear(wide, in_features, bias, device, dtype, impl=impl)

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """(*, in_features) to (*, in_features); ``residual`` of that shape is added last."""
        hidden = self.fc(input)
        if not (self.training and self.dropout):
            return self.proj(hidden, residual)
        dropped = drop(self.proj(hidden), self.dropout, self.impl)
        return dropped if residual is None else residual + dropped
