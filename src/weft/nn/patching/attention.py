"""Attention of patched models: ``weft.ops.attention`` behind transformers' interface, and its masks.

A model of transformers hands queries, keys and values to the function that its config names. A patched
model's config names Weft's, which takes the calls without a mask of all pairs of positions. The function
that makes the masks therefore makes none where causal order and a sliding window describe it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from weft import ops
from weft.nn._common import cast, new_seed

Module = Any  # a module of another library, whose attributes have no types
ATTENTION_NAME = "weft"  # in transformers' attention interface
ONLY_CAUSAL = "weft_only_causal"  # a keyword that a model hands on to its attention


def causal_model(self: Module, *args: Any, **kwargs: Any) -> Any:
    """Forward of a model of blocks. While tracing it tells attention where the mask is only causal.

    transformers looks at the values of masks and positions to find that sequences are neither padded nor
    packed. A trace has no values, so that transformers computes a mask of all pairs of positions, with which
    no fused causal kernel runs. A call without masks, positions and cache has no such sequences.
    """
    arguments = ("attention_mask", "position_ids", "past_key_values", "encoder_hidden_states")
    is_plain = len(args) <= 1 and all(kwargs.get(name) is None for name in arguments)
    if is_plain and torch.compiler.is_compiling():
        kwargs[ONLY_CAUSAL] = True
    return type(self).forward(self, *args, **kwargs)


def register_attention() -> None:
    """Register ``"weft"`` as an attention implementation of transformers, with its masks."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, mask)


def attention(
    module: Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Map (B, H, T, D) queries, keys and values to (B, T, H, D), as transformers' interface asks.

    transformers' own implementation runs if the call has a mask (padding, packed sequences, a cache's chunk),
    or if the module is not patched and only shares a patched module's config.
    """
    length = query.shape[2]
    causal = bool(module.is_causal if is_causal is None else is_causal)
    if kwargs.pop(ONLY_CAUSAL, False) and module.is_causal and is_causal is None:
        attention_mask = None  # nothing reads it then, so that the compiler drops it
    if attention_mask is not None or "_weft_impl" not in vars(module):
        if attention_mask is None and causal and length > 1 and (sliding_window or softcap):
            attention_mask = _causal_mask(length, key.shape[2], sliding_window, query.device)
        options = {"dropout": dropout, "scaling": scaling, **kwargs}
        if softcap is not None:
            return _eager(module, query, key, value, attention_mask, softcap=softcap, **options)
        options["is_causal"] = is_causal
        return _sdpa(module, query, key, value, attention_mask, **options)
    if causal and key.shape[2] > length > 1:  # the first call with a static cache, mostly empty
        key, value = key[:, :, :length], value[:, :, :length]
    causal = causal and length > 1  # a single query is the latest token, which sees every cached key
    y = ops.attention(
        *cast(query, key, value),
        causal=causal,
        window=sliding_window if causal else None,
        softcap=softcap,
        scale=scaling,
        dropout_p=dropout,
        seed=new_seed() if dropout else 0,
        impl=module._weft_impl,
    )
    # The interface expects contiguous (B, T, H, D); None stands for the weights, which are not stored.
    return y.transpose(1, 2).contiguous(), None


def _sdpa(module: Module, *call: Any, **options: Any) -> tuple[torch.Tensor, None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *call, **options)  # type: ignore[no-any-return]


def _eager(
    module: Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The module's own eager attention, which adds its mask; transformers' sdpa has no cap."""
    if mask is not None and mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, torch.finfo(query.dtype).min)
    return eager_of(module)(module, query, key, value, mask, **options)  # type: ignore[no-any-return]


def eager_of(module: Module) -> Any:
    """Return the eager attention beside the module's class, as transformers' models call it."""
    return sys.modules[type(module).__module__].eager_attention_forward


def _causal_mask(length: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return the (1, 1, length, keys) mask of a causal call from position 0: True for the visible keys."""
    behind = torch.arange(length, device=device)[:, None] - torch.arange(keys, device=device)
    return ((behind >= 0) & (behind < (window or keys)))[None, None]


def mask(**arguments: Any) -> torch.Tensor | None:
    """Make a call's mask as transformers does for SDPA, but none where order and window describe it.

    Args:
        arguments: those of transformers' mask functions, by keyword: lengths and offsets of queries and keys,
            ``mask_function(batch, head, query, key)``, ``attention_mask`` of padding, ``local_size`` of a
            window or chunk, ``allow_is_causal_skip`` False if other patterns were added.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return None if _is_window(arguments) else ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**arguments)


def _is_window(arguments: Any) -> bool:
    """Return True if a mask is a sliding window's, without padding, and starts at the first position.

    Also for a single query that sees all keys: a cache of a window has no older ones.
    """
    window, padding = arguments.get("local_size"), arguments.get("attention_mask")
    offsets = arguments.get("q_offset", 0), arguments.get("kv_offset", 0)
    if not window or not arguments.get("allow_is_causal_skip", True) or torch.compiler.is_compiling():
        return False
    if not all(isinstance(offset, int) for offset in offsets):  # a static cache's are tensors
        return False
    n_queries, n_keys, first = arguments["q_length"], arguments["kv_length"], offsets[0] - offsets[1]
    is_prefill = n_queries == n_keys and first == 0
    is_last = n_queries == 1 and first == n_keys - 1 and n_keys <= window
    if not (is_prefill or is_last) or not _slides(arguments["mask_function"], window):
        return False
    return padding is None or bool(padding.all())


def _slides(function: Any, window: int) -> bool:
    """Return True if a mask function is that of a causal sliding window, and not of chunks, say.

    It is called at the edges of the window: for queries inside of the first window, behind it and far away.
    """
    try:
        for query in (window - 1, window, 3 * window + 1):
            seen = {query: True, query + 1: False, query - window: False, max(query - window + 1, 0): True}
            for key, expected in seen.items():
                if key >= 0 and bool(function(0, 0, torch.tensor(query), torch.tensor(key))) != expected:
                    return False
    except (IndexError, RuntimeError, TypeError):  # it reads a tensor that has no such position
        return False
    return True


def rotary_attention(
    self: Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of Llama and its relatives with rotary embeddings by ``weft.ops.rope``.

    ``_weft_options`` of the module holds what it passes to its attention besides: window and cap.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert position_embeddings is not None
    projected = (p(hidden_states) for p in (self.q_proj, self.k_proj, self.v_proj))
    q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)
    if hasattr(self, "q_norm"):
        q, k = self.q_norm(q), self.k_norm(k)
    q, k = (_rotate(x.transpose(1, 2), *position_embeddings, self._weft_impl) for x in (q, k))
    v = v.transpose(1, 2)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    name = self.config._attn_implementation
    attend = eager_of(self) if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
    options = {"dropout": self.attention_dropout if self.training else 0.0, "scaling": self.scaling}
    y, weights = attend(self, q, k, v, attention_mask, **options, **self._weft_options, **kwargs)
    return self.o_proj(y.flatten(2)), weights


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, impl: str | None) -> torch.Tensor:
    """``weft.ops.rope`` on (B, H, T, D) with transformers' angles, (B or 1, T, D), whose two halves are
    equal. With angles per sequence (padding on the left), each sequence is a call."""
    half = x.shape[-1] // 2
    cos, sin = (angles[..., :half].float() for angles in (cos, sin))
    if len(cos) == 1:
        return ops.rope(x, cos[0], sin[0], impl=impl)
    rotated = [ops.rope(row, c, s, impl=impl) for row, c, s in zip(x.split(1), cos, sin, strict=True)]
    return torch.cat(rotated)
