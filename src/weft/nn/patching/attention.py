"""Attention: a function in transformers' attention interface, and Llama's rotation before it."""

from __future__ import annotations

from typing import Any

import torch

from weft import ops
from weft.nn._common import cast, draw_seed

NAME = "weft"
Module = Any


def register() -> None:
    """Make ``"weft"`` an attention implementation that transformers knows, with SDPA's masks."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def attend(
    module: Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """(B, H, T, D) queries, keys and values to (B, T, H, D), as the interface asks for it.

    A call with a mask of its own (padding, a window, a cache's chunk), and a module that is not
    patched but shares the patched one's config, get transformers' own ``sdpa``.
    """
    if attention_mask is not None or "_weft_impl" not in vars(module) or kwargs.get("softcap"):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        own = ALL_ATTENTION_FUNCTIONS["sdpa"]
        more = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        return own(module, query, key, value, attention_mask, **more)  # type: ignore[no-any-return]
    length = query.shape[2]
    causal = module.is_causal if is_causal is None else is_causal
    if causal and key.shape[2] > length > 1:  # a static cache, filled for the first time
        key, value = key[:, :, :length], value[:, :, :length]
    y = ops.attention(
        *cast(query, key, value),
        causal=bool(causal and length > 1),
        scale=scaling,
        dropout_p=dropout,
        seed=draw_seed() if dropout else 0,
        impl=module._weft_impl,
    )
    return y.transpose(1, 2).contiguous(), None


def llama_attention(
    self: Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Llama's attention with queries and keys turned by ``weft.ops.rope``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama.modeling_llama import eager_attention_forward

    assert position_embeddings is not None
    projected = (p(hidden_states) for p in (self.q_proj, self.k_proj, self.v_proj))
    q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in projected)
    q, k = (_turned(x, *position_embeddings, self._weft_impl) for x in (q, k))
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    run = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation, eager_attention_forward)
    p = self.attention_dropout if self.training else 0.0
    y, weights = run(self, q, k, v, attention_mask, dropout=p, scaling=self.scaling, **kwargs)
    return self.o_proj(y.flatten(2)), weights


def _turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, impl: str | None
) -> torch.Tensor:
    """``weft.ops.rope`` on (B, H, T, D) with transformers' angles, (B or 1, T, D), whose halves
    are the same. Angles of each sequence (padding on the left) are turned sequence by sequence."""
    half = x.shape[-1] // 2
    cos, sin = (a[..., :half].float() for a in (cos, sin))
    if len(cos) == 1:
        return ops.rope(x, cos[0], sin[0], impl=impl)
    turned = [
        ops.rope(one, c, s, impl=impl) for one, c, s in zip(x.split(1), cos, sin, strict=True)
    ]
    return torch.cat(turned)
