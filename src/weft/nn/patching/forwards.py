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
    """Block of Llama and its relatives, with the sum after attention and the second norm in one operator."""
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
        eps=eps_of(norm),
        impl=self._weft_impl,
    )
    return total + self.mlp(normed)  # type: ignore[no-any-return]
