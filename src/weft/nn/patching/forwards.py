"""Forwards that replace a module's own. Each is bound to the module and reads its tensors.

A patched module has ``_weft_impl``, the implementation that ``weft.ops`` uses.
"""

from __future__ import annotations

from typing import Any

import torch

from weft import ops
from weft.nn._common import cast, cast_norm, new_seed
from weft.nn.linear import linear
from weft.nn.norms import RMS_NORM_EPS, layer_norm

Module = Any  # a module of another library, whose attributes have no types
ATTENTION_NAME = "weft"  # in transformers' attention interface
EPS_NAMES = ("variance_epsilon", "eps", "epsilon")  # of RMS norms in other libraries


def torch_layer_norm(self: Module, input: torch.Tensor) -> torch.Tensor:
    return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, self._weft_impl)


def torch_rms_norm(self: Module, x: torch.Tensor) -> torch.Tensor:
    x, weight = cast_norm(x, self.weight)
    eps = RMS_NORM_EPS if self.eps is None else self.eps
    return ops.rms_norm(x, weight, eps=eps, impl=self._weft_impl)


def llama_rms_norm(self: Module, hidden_states: torch.Tensor) -> torch.Tensor:
    # Llama multiplies in float32 and rounds before the weight; the operator rounds once, at the end.
    x, weight = _promote(hidden_states, self.weight)
    return ops.rms_norm(x, weight, eps=eps_of(self), impl=self._weft_impl)


def rms_norm_of_input_dtype(self: Module, x: torch.Tensor) -> torch.Tensor:
    """RMS norm whose result has the input's dtype, whatever the weight's."""
    return llama_rms_norm(self, x).to(x.dtype)


def one_plus_rms_norm(self: Module, x: torch.Tensor) -> torch.Tensor:
    """Gemma's RMS norm: times 1 + weight in float32, rounded once to the input's dtype."""
    # In a 16-bit type the sum would lose the digits of a small weight.
    y = ops.rms_norm(x.float(), 1.0 + self.weight.float(), eps=eps_of(self), impl=self._weft_impl)
    return y.to(x.dtype)


def eps_of(module: Module) -> float:
    """Return the epsilon of an RMS norm, by the first of its usual names."""
    return next(float(vars(module)[name]) for name in EPS_NAMES if name in vars(module))


def _promote(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Convert tensors to their common dtype, as torch's arithmetic promotes them."""
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    return tuple(t.to(dtype) for t in tensors)


def embedding(self: Module, input: torch.Tensor) -> torch.Tensor:
    return ops.embedding(input.long(), self.weight, impl=self._weft_impl)


def gelu(self: Module, input: torch.Tensor) -> torch.Tensor:
    return ops.gelu(input, impl=self._weft_impl)


def dropout(self: Module, input: torch.Tensor) -> torch.Tensor:
    if not (self.training and self.p):
        return input
    return ops.dropout(input, p=self.p, seed=new_seed(), impl=self._weft_impl)


def gpt2_mlp(self: Module, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """GPT-2's MLP. Its weights are (in, out), the transpose of torch's.

    ``residual`` comes from the patched block. It is added in the second product's epilogue, unless
    dropout comes between them.
    """
    fc, proj, impl = self.c_fc, self.c_proj, self._weft_impl
    hidden = linear(hidden_states, fc.weight.t(), fc.bias, "gelu", None, impl)
    if not (self.training and self.dropout.p > 0.0):
        return linear(hidden, proj.weight.t(), proj.bias, None, residual, impl)
    y: torch.Tensor = self.dropout(linear(hidden, proj.weight.t(), proj.bias, None, None, impl))
    return y if residual is None else residual + y


def llama_mlp(self: Module, x: torch.Tensor) -> torch.Tensor:
    gate, up = cast(self.gate_proj(x), self.up_proj(x))
    return self.down_proj(ops.swiglu(gate, up, impl=self._weft_impl))  # type: ignore[no-any-return]


def geglu_mlp(self: Module, x: torch.Tensor) -> torch.Tensor:
    """Llama's MLP with GELU's tanh form in place of SiLU, as in Gemma."""
    gate, up = cast(self.gate_proj(x), self.up_proj(x))
    return self.down_proj(ops.geglu(gate, up, impl=self._weft_impl))  # type: ignore[no-any-return]


# The blocks' parameters are those of transformers' forwards: the rules compare the names, and a version
# of transformers with other parameters is not patched.


def gpt2_block(
    self: Module,
    hidden_states: torch.Tensor,
    past_key_values: Any = None,
    attention_mask: torch.Tensor | None = None,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    use_cache: bool | None = False,
    **kwargs: Any,
) -> torch.Tensor:
    """GPT-2's block, with the sum after attention and the second norm in one operator."""
    attended, _ = self.attn(
        self.ln_1(hidden_states),
        past_key_values=past_key_values,
        attention_mask=attention_mask,
        use_cache=use_cache,
        **kwargs,
    )
    norm = self.ln_2
    normed, total = ops.add_layer_norm(
        *_promote(attended, hidden_states, *cast_norm(norm.weight, norm.bias)),
        eps=norm.eps,
        impl=self._weft_impl,
    )
    return self.mlp(normed, residual=total)  # type: ignore[no-any-return]


def llama_block(
    self: Module,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Llama's block, with the sum after attention and the second norm in one operator."""
    attended, _ = self.self_attn(
        hidden_states=self.input_layernorm(hidden_states),
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    norm = self.post_attention_layernorm
    normed, total = ops.add_rms_norm(
        *_promote(attended, hidden_states, norm.weight),
        eps=norm.variance_epsilon,
        impl=self._weft_impl,
    )
    return total + self.mlp(normed)  # type: ignore[no-any-return]


# --- attention

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
    """Register ``"weft"`` as an attention implementation of transformers, with SDPA's masks."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def attention(
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
    """Map (B, H, T, D) queries, keys and values to (B, T, H, D), as transformers' interface asks.

    transformers' own ``sdpa`` runs if the call has a mask (padding, a window, a cache's chunk), or if the
    module is not patched and only shares a patched module's config.
    """
    is_only_causal = kwargs.pop(ONLY_CAUSAL, False)
    if is_only_causal and module.is_causal and is_causal is None and not kwargs.get("sliding_window"):
        attention_mask = None  # nothing reads it then, so that the compiler drops it
    if attention_mask is not None or "_weft_impl" not in vars(module) or kwargs.get("softcap"):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        return sdpa(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    length = query.shape[2]
    causal = module.is_causal if is_causal is None else is_causal
    if causal and key.shape[2] > length > 1:  # the first call with a static cache, mostly empty
        key, value = key[:, :, :length], value[:, :, :length]
    y = ops.attention(
        *cast(query, key, value),
        # A single query is the latest token, which sees every cached key.
        causal=bool(causal and length > 1),
        scale=scaling,
        dropout_p=dropout,
        seed=new_seed() if dropout else 0,
        impl=module._weft_impl,
    )
    # The interface expects contiguous (B, T, H, D); None stands for the weights, which are not stored.
    return y.transpose(1, 2).contiguous(), None


def llama_attention(
    self: Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Llama's attention with rotary embeddings by ``weft.ops.rope``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama.modeling_llama import eager_attention_forward

    assert position_embeddings is not None
    projected = (p(hidden_states) for p in (self.q_proj, self.k_proj, self.v_proj))
    q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in projected)
    q, k = (_rotate(x, *position_embeddings, self._weft_impl) for x in (q, k))
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation, eager_attention_forward)
    p = self.attention_dropout if self.training else 0.0
    y, weights = attend(self, q, k, v, attention_mask, dropout=p, scaling=self.scaling, **kwargs)
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
