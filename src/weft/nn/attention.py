"""``SelfAttention``: GPT-2's (causal, one product for q, k and v), and Llama's by options."""

from __future__ import annotations

from typing import Any

import torch

from weft import ops
from weft.core import WeftError
from weft.nn._common import cast, check_dropout, new_seed
from weft.nn.linear import Linear, linear
from weft.ops.attention import attention_packed

RotaryAngles = tuple[torch.Tensor, torch.Tensor]


class SelfAttention(torch.nn.Module):
    """``out_proj(attention(q, k, v))``, with q, k and v from one product; causal by default.

    With as many key heads as query heads, the parameters and the state dict are those of
    ``torch.nn.MultiheadAttention(..., batch_first=True)``: ``in_proj_weight``, ``in_proj_bias``,
    ``out_proj.weight``, ``out_proj.bias``. Memory is linear in the sequence length.

    Args:
        embed_dim: width of input and output.
        num_heads: query heads; each has ``embed_dim / num_heads`` columns.
        dropout: probability of dropout of the attention weights in training.
        bias: whether both products add a bias.
        is_causal: whether a position attends only to itself and earlier ones.
        num_kv_heads: key and value heads, each for ``num_heads / num_kv_heads`` query heads
            (arXiv:2305.13245); None is ``num_heads``. ``in_proj_weight`` then has the rows of
            ``num_heads + 2 num_kv_heads`` heads.
        rotary_base: base of rotary position embeddings (arXiv:2104.09864; Llama's is 1e4); None: no
            position embeddings.
        impl: implementation of the ``weft.ops`` operators; None leaves the choice to dispatch.

    Raises:
        WeftError: heads that do not divide; an odd head size with ``rotary_base``.
    """

    in_proj_bias: torch.nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        is_causal: bool = True,
        num_kv_heads: int | None = None,
        rotary_base: float | None = None,
        impl: str | None = None,
    ) -> None:
        super().__init__()
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, total, divisor in (
            ("num_heads", embed_dim, num_heads),
            ("num_kv_heads", num_heads, self.num_kv_heads),
        ):
            if divisor < 1 or total % divisor:
                raise WeftError(f"SelfAttention: {name}", expected=f"a divisor of {total}", got=divisor)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        if rotary_base is not None and self.head_dim % 2:
            raise WeftError("SelfAttention: rotary_base", expected="even heads", got=self.head_dim)
        self.dropout = check_dropout("SelfAttention", dropout)
        self.is_causal, self.rotary_base, self.impl = is_causal, rotary_base, impl
        rows = (num_heads + 2 * self.num_kv_heads) * self.head_dim
        # One parameter for the three products, as torch stores it: one launch, and x is read once.
        weight = torch.empty(rows, embed_dim, device=device, dtype=dtype)
        # Rows of q, k and v in this order, as in torch.nn.MultiheadAttention.
        self.in_proj_weight = torch.nn.Parameter(weight)
        in_proj_bias = torch.nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        self.register_parameter("in_proj_bias", in_proj_bias)
        self.out_proj = Linear(embed_dim, embed_dim, bias, device, dtype, impl=impl)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as ``torch.nn.MultiheadAttention`` does: Xavier uniform weights, biases of zero."""
        torch.nn.init.xavier_uniform_(self.in_proj_weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                torch.nn.init.zeros_(bias)

    def forward(
        self,
        input: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        key_lengths: torch.Tensor | None = None,
        rotary: RotaryAngles | None = None,
    ) -> torch.Tensor:
        """Attend within each sequence.

        Args:
            input: (batch, length, embed_dim).
            residual: of the input's shape, added last.
            key_lengths: (batch,) integers: later keys are padding and are ignored.
            rotary: cosines and sines of :func:`rotary_angles`, to compute them once for several layers.
        """
        qkv = linear(input, self.in_proj_weight, self.in_proj_bias, None, None, self.impl)
        if key_lengths is not None:
            key_lengths = key_lengths.to(torch.int32)
        # A seed is taken only if it is used: torch's generator advances as with torch's own module.
        p = self.dropout if self.training else 0.0
        options: dict[str, Any] = {"causal": self.is_causal, "key_lengths": key_lengths}
        options |= {"dropout_p": p, "seed": new_seed() if p else 0, "impl": self.impl}
        if self.rotary_base is None:
            y = attention_packed(cast(qkv), self.num_heads, kv_heads=self.num_kv_heads, **options)
            return self.out_proj(y, residual)
        # Rotation needs q and k apart, so the packed kernel cannot take them from the product.
        # (batch, heads, length, head_dim), a view: nothing is copied.
        heads = qkv.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        cos, sin = rotary or rotary_angles(input.shape[1], self.head_dim, self.rotary_base, device=q.device)
        # Angles are float32; under autocast q, k and v are cast after the rotation.
        q, k = (ops.rope(x, cos, sin, impl=self.impl) for x in (q, k))
        # q, k and v are views of one product: the kernels read them by their strides.
        y = ops.attention(*cast(q, k, v), **options)
        return self.out_proj(y.transpose(1, 2).flatten(2), residual)

    def extra_repr(self) -> str:
        text = f"{self.embed_dim}, num_heads={self.num_heads}, is_causal={self.is_causal}"
        if self.num_kv_heads != self.num_heads:
            text += f", num_kv_heads={self.num_kv_heads}"
        if self.rotary_base:
            text += f", rotary_base={self.rotary_base}"
        return text


def rotary_angles(
    length: int,
    head_dim: int,
    base: float = 1e4,
    *,
    device: torch.device | str | None = None,
) -> RotaryAngles:
    """Return cosines and sines of position times ``base ** (-2 i / head_dim)``: two float32 tensors,
    (length, head_dim / 2), for :class:`SelfAttention` and ``weft.ops.rope``."""
    # float32 also for half models: position times frequency needs more than 11 bits past position 2048.
    even = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = positions[:, None] * (1.0 / base ** (even / head_dim))
    return angles.cos(), angles.sin()
