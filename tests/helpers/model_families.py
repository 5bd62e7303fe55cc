"""Small models with the modules of Mistral, Qwen2, Qwen3 and Gemma: no library is needed to patch them.

Shapes: (B, T) token ids to (B, T, VOCABULARY) logits. The modules compute what the published ones compute;
norms and rotations work in float32, or in float64 in a float64 model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HIDDEN, HEADS, HEAD, VOCABULARY, LAYERS = 32, 48, 4, 8, 97, 2
FAMILIES = ("Mistral", "Qwen2", "Qwen3", "Gemma")


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """Norm of Llama and its relatives: rounded to the input's dtype, then times the weight."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(1.0 + 0.3 * torch.randn(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = wide(hidden_states)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class OnePlusRMSNorm(nn.Module):
    """Norm of Gemma: times 1 + weight, then rounded."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = wide(x)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + wide(self.weight))).type_as(x)


class MLP(nn.Module):
    def __init__(self, act_fn: nn.Module) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.act_fn = act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class RotaryEmbedding(nn.Module):
    inv_freq: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        frequencies = 10000.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
        self.register_buffer("inv_freq", frequencies.float(), persistent=False)

    def forward(self, x: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.outer(torch.arange(length, dtype=self.inv_freq.dtype), self.inv_freq)
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Attention(nn.Module):
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, bias: bool, norm: type[nn.Module] | None) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(WIDTH, HEADS * HEAD, bias=bias))
        self.o_proj = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        if norm is not None:
            self.q_norm, self.k_norm = norm(HEAD), norm(HEAD)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        projected = (p(x) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (t.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for t in projected)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (t * cos + torch.cat((-t[..., HEAD // 2 :], t[..., : HEAD // 2]), -1) * sin for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module, norm: type[nn.Module]) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm, self.post_attention_layernorm = norm(WIDTH), norm(WIDTH)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * WIDTH**0.5


class Model(nn.Module):
    def __init__(
        self, embedding: nn.Module, layers: list[nn.Module], norm: nn.Module, rope: nn.Module
    ) -> None:
        super().__init__()
        self.embed_tokens, self.layers, self.norm = embedding, nn.ModuleList(layers), norm
        self.rotary_emb = rope

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        cos, sin = self.rotary_emb(x, ids.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)  # type: ignore[no-any-return]


class CausalLM(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.lm_head = model, nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(ids))  # type: ignore[no-any-return]


def family(name: str) -> Any:
    """Return a small model of a family with random weights; its classes have the published names."""
    torch.manual_seed(0)

    def named(base: type[nn.Module], suffix: str) -> type[nn.Module]:
        return type(f"{name}{suffix}", (base,), {})

    gemma = name == "Gemma"
    norm = named(OnePlusRMSNorm if gemma else RMSNorm, "RMSNorm")
    attention = named(Attention, "Attention")
    layers = [
        named(DecoderLayer, "DecoderLayer")(
            attention(name == "Qwen2", norm if name == "Qwen3" else None),
            named(MLP, "MLP")(nn.GELU(approximate="tanh") if gemma else nn.SiLU()),
            norm,
        )
        for _ in range(LAYERS)
    ]
    embedding = (named(ScaledEmbedding, "TextScaledWordEmbedding") if gemma else nn.Embedding)(
        VOCABULARY, WIDTH
    )
    model = named(Model, "Model")(embedding, layers, norm(WIDTH), named(RotaryEmbedding, "RotaryEmbedding")())
    return named(CausalLM, "ForCausalLM")(model)
