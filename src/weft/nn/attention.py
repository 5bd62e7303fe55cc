"""``SelfAttention``: GPT-2's (causal, one product for q, k and v), Llama's by options."""

from __future__ import annotations

from typing import Any

import torch

from weft import ops
from weft.core import WeftError
from weft.nn._common import cast, draw_seed, probability
from weft.nn.linear import Linear, product
from weft.ops.attention import attention_packed

Rotary = tuple[torch.Tensor, torch.Tensor]


class SelfAttention(torch.nn.Module):
    """``out_proj(attention(q, k, v))`` with q, k and v of one product; causal unless told.

    With as many key heads as query heads, arguments and state dict are those of
    ``torch.nn.MultiheadAttention(..., batch_first=True)``: ``in_proj_weight``, ``in_proj_bias``,
    ``out_proj.weight``, ``out_proj.bias``. No memory grows with the square of the length.

    Args:
        embed_dim: the width of input and output.
        num_heads: query heads; ``embed_dim`` is divided among them.
        dropout: the share of the attention weights that training leaves out.
        bias: whether both products add one.
        is_causal: a position sees itself and those before it.
        num_kv_heads: key and value heads, each of which serves ``num_heads / num_kv_heads`` query
            heads (arXiv:2305.13245); None is ``num_heads``. ``in_proj_weight`` then holds
            ``num_heads + 2 num_kv_heads`` heads' rows.
        rotary_base: positions are turned into angles of this base (arXiv:2104.09864; Llama's is
            1e4); None: no positions.
        impl: the implementation that ``weft.ops`` is to use; None is its choice.

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
        _divides("num_heads", embed_dim, num_heads)
        _divides("num_kv_heads", num_heads, self.num_kv_heads)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        if rotary_base is not None and self.head_dim % 2:
            raise WeftError("SelfAttention: rotary_base", expected="even heads", got=self.head_dim)
        self.dropout = probability("SelfAttention", dropout)
        self.is_causal, self.rotary_base, self.impl = is_causal, rotary_base, impl
        wide = (num_heads + 2 * self.num_kv_heads) * self.head_dim
        empty = torch.empty(wide, embed_dim, device=device, dtype=dtype)
        self.in_proj_weight = torch.nn.Parameter(empty)
        offsets = (
            torch.nn.Parameter(torch.empty(wide, device=device, dtype=dtype)) if bias else None
        )
        self.register_parameter("in_proj_bias", offsets)
        self.out_proj = Linear(embed_dim, embed_dim, bias, device, dtype, impl=impl)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start anew as ``torch.nn.MultiheadAttention`` does: Xavier's weights, biases of zero."""
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
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        """Attend within each sequence.

        Args:
            input: (batch, length, embed_dim).
            residual: of the input's shape, added last.
            key_lengths: (batch,) integers: keys from there on are padding, and seen by nobody.
            rotary: cosines and sines of :func:`rotary_angles`, where layers share them.
        """
        qkv = product(input, self.in_proj_weight, self.in_proj_bias, None, None, self.impl)
        if key_lengths is not None:
            key_lengths = key_lengths.to(torch.int32)
        p = self.dropout if self.training else 0.0
        given: dict[str, Any] = {"causal": self.is_causal, "key_lengths": key_lengths}
        given |= {"dropout_p": p, "seed": draw_seed() if p else 0, "impl": self.impl}
        counts = (self.num_heads, self.num_kv_heads)
        if self.rotary_base is None:
            y = attention_packed(cast(qkv), counts[0], kv_heads=counts[1], **given)
            return self.out_proj(y, residual)
        heads = qkv.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split([*counts, self.num_kv_heads], dim=1)
        cos, sin = rotary or rotary_angles(
            input.shape[1], self.head_dim, self.rotary_base, device=q.device
        )
        q, k = (ops.rope(x, cos, sin, impl=self.impl) for x in (q, k))
        y = ops.attention(*cast(q, k, v), **given)
        return self.out_proj(y.transpose(1, 2).flatten(2), residual)

    def extra_repr(self) -> str:
        shared = f", num_kv_heads={self.num_kv_heads}" * (self.num_kv_heads != self.num_heads)
        turned = f", rotary_base={self.rotary_base}" if self.rotary_base else ""
        return f"{self.embed_dim}, num_heads={self.num_heads}, is_causal={self.is_causal}" + (
            shared + turned
        )


def rotary_angles(
    length: int,
    head_dim: int,
    base: float = 1e4,
    *,
    device: torch.device | str | None = None,
) -> Rotary:
    """Cosines and sines of position times ``base ** (-2 i / head_dim)``: two float32 tensors,
    (length, head_dim / 2), for :class:`SelfAttention` and ``weft.ops.rope``."""
    pair = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angle = positions[:, None] * (1.0 / base ** (pair / head_dim))
    return angle.cos(), angle.sin()


def _divides(name: str, whole: int, parts: int) -> None:
    if parts < 1 or whole % parts:
        raise WeftError(f"SelfAttention: {name}", expected=f"a divisor of {whole}", got=parts)
