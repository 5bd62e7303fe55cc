"""The forwards that take a module's place: each is bound to the module, whose tensors it reads.

A module that is patched carries ``_weft_impl``, the implementation that ``weft.ops`` is to use.
"""

from __future__ import annotations

from typing import Any

import torch

from weft import ops
from weft.nn._common import cast, cast_norm, draw_seed
from weft.nn.linear import product
from weft.nn.norms import EPS, layer_norm

Module = Any  # a module of another library, whose attributes no type tells


def torch_layer_norm(self: Module, input: torch.Tensor) -> torch.Tensor:
    given = (self.normalized_shape, self.weight, self.bias, self.eps)
    return layer_norm(input, *given, self._weft_impl)


def torch_rms_norm(self: Module, x: torch.Tensor) -> torch.Tensor:
    x, weight = cast_norm(x, self.weight)
    return ops.rms_norm(x, weight, eps=EPS if self.eps is None else self.eps, impl=self._weft_impl)


def llama_rms_norm(self: Module, hidden_states: torch.Tensor) -> torch.Tensor:
    x, weight = _wider(hidden_states, self.weight)
    return ops.rms_norm(x, weight, eps=self.variance_epsilon, impl=self._weft_impl)


def _wider(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors of two dtypes in the one that holds both, as torch's arithmetic promotes them."""
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
    return ops.dropout(input, p=self.p, seed=draw_seed(), impl=self._weft_impl)


def gpt2_mlp(
    self: Module, hidden_states: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """GPT-2's: its weights stand as (in, out), the transpose of torch's. ``residual`` comes from
    the patched block, and is added in the second product's epilogue where no dropout is between."""
    fc, proj, impl = self.c_fc, self.c_proj, self._weft_impl
    wide = product(hidden_states, fc.weight.t(), fc.bias, "gelu", None, impl)
    dropped = self.training and self.dropout.p > 0.0
    inside = None if dropped else residual
    y = product(wide, proj.weight.t(), proj.bias, None, inside, impl)
    if not dropped:
        return y
    y = self.dropout(y)
    return y if residual is None else residual + y


def llama_mlp(self: Module, x: torch.Tensor) -> torch.Tensor:
    gate, up = cast(self.gate_proj(x), self.up_proj(x))
    return self.down_proj(ops.swiglu(gate, up, impl=self._weft_impl))  # type: ignore[no-any-return]


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
    """A block in which the sum after attention and the second norm are one operator."""
    attended, _ = self.attn(
        self.ln_1(hidden_states),
        past_key_values=past_key_values,
        attention_mask=attention_mask,
        use_cache=use_cache,
        **kwargs,
    )
    norm = self.ln_2
    normed, total = ops.add_layer_norm(
        *_wider(attended, hidden_states, *cast_norm(norm.weight, norm.bias)),
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
    """A block in which the sum after attention and the second norm are one operator."""
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
        *_wider(attended, hidden_states, norm.weight),
        eps=norm.variance_epsilon,
        impl=self._weft_impl,
    )
    return total + self.mlp(normed)  # type: ignore[no-any-return]
