"""Which module of which class is replaced by what, and when it cannot be.

A class is meant exactly: what derives from it may compute something else. A rule's ``unless`` says
why one module of the class stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weft.nn.patching import attention, forwards

Module = Any
TANH = ("NewGELUActivation", "GELUTanh", "PytorchGELUTanh", "FastGELUActivation")
GPT2 = "transformers.models.gpt2.modeling_gpt2"
LLAMA = "transformers.models.llama.modeling_llama"
HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
)


def _never(module: Module) -> str:
    return ""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """``inside`` names children that the new forward computes itself, without calling them."""

    kind: str
    by: str
    forward: Callable[..., Any]
    unless: Callable[[Module], str] = _never
    inside: tuple[str, ...] = ()


def class_of(module: Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def not_plain(module: Module) -> str:
    """Why a module may not be bypassed: somebody else watches or has changed it."""
    if "forward" in vars(module):
        return "its forward has been replaced already"
    if any(getattr(module, name, None) for name in HOOKS):
        return "it has hooks, which would no longer be called"
    return ""


def _layer_norm(module: Module) -> str:
    return "" if module.elementwise_affine else "it has no weight"


def _rms_norm(module: Module) -> str:
    if len(module.normalized_shape) > 1:
        return "it norms over several dimensions"
    return _layer_norm(module)


def _embedding(module: Module) -> str:
    for name, default in (("padding_idx", None), ("max_norm", None)):
        if getattr(module, name) != default:
            return f"{name} is set"
    return "its gradient is scaled or sparse" if module.scale_grad_by_freq or module.sparse else ""


def _torch_gelu(module: Module) -> str:
    return "" if module.approximate == "tanh" else "GELU's exact form; weft.ops.gelu is tanh's"


def is_tanh_gelu(act: Module) -> bool:
    return type(act).__name__ in TANH or getattr(act, "approximate", "") == "tanh"


def _gpt2_mlp(module: Module) -> str:
    if not is_tanh_gelu(module.act):
        return f"its activation is {type(module.act).__name__}, not GELU's tanh form"
    for name in ("c_fc", "c_proj", "act"):
        child = getattr(module, name)
        if why := not_plain(child):
            return f"{name}: {why}"
        if name != "act" and type(child).__name__ != "Conv1D":
            return f"{name} is a {type(child).__name__}"
    return ""


def _llama_mlp(module: Module) -> str:
    name = type(module.act_fn).__name__
    if name not in ("SiLU", "SiLUActivation"):
        return f"its activation is {name}, not SiLU"
    return not_plain(module.act_fn)


def _gpt2_block(module: Module) -> str:
    if hasattr(module, "crossattention"):
        return "it has cross attention"
    if not _is_ours(module.mlp, forwards.gpt2_mlp):
        return "its mlp is not replaced"
    return _block(module, forwards.gpt2_block, "ln_2")


def _llama_block(module: Module) -> str:
    return _block(module, forwards.llama_block, "post_attention_layernorm")


def _block(module: Module, forward: Callable[..., Any], norm: str) -> str:
    named = list(inspect.signature(type(module).forward).parameters)
    if named != list(inspect.signature(forward).parameters):
        return "another version of transformers: its forward takes other arguments"
    return "" if "forward" in vars(getattr(module, norm)) else f"its {norm} is not replaced"


def _is_ours(module: Module, function: Callable[..., Any]) -> bool:
    return getattr(vars(module).get("forward"), "__func__", None) is function


def _llama_attention(module: Module) -> str:
    named = ["self", "hidden_states", "position_embeddings", "attention_mask", "past_key_values"]
    if list(inspect.signature(type(module).forward).parameters)[:5] != named:
        return "another version of transformers: its forward takes other arguments"
    return ""


# In the order in which they are tried: a block looks at what became of its children.
RULES: dict[str, Rule] = {
    "torch.nn.modules.normalization.LayerNorm": Rule(
        kind="norm",
        by="layer_norm",
        forward=forwards.torch_layer_norm,
        unless=_layer_norm,
    ),
    "torch.nn.modules.normalization.RMSNorm": Rule(
        kind="norm", by="rms_norm", forward=forwards.torch_rms_norm, unless=_rms_norm
    ),
    f"{LLAMA}.LlamaRMSNorm": Rule(kind="norm", by="rms_norm", forward=forwards.llama_rms_norm),
    "torch.nn.modules.sparse.Embedding": Rule(
        kind="embedding", by="embedding", forward=forwards.embedding, unless=_embedding
    ),
    f"{GPT2}.GPT2MLP": Rule(
        kind="mlp",
        by="linear_gelu, linear",
        forward=forwards.gpt2_mlp,
        unless=_gpt2_mlp,
        inside=("c_fc", "c_proj", "act"),
    ),
    f"{LLAMA}.LlamaMLP": Rule(
        kind="mlp",
        by="swiglu",
        forward=forwards.llama_mlp,
        unless=_llama_mlp,
        inside=("act_fn",),
    ),
    "torch.nn.modules.activation.GELU": Rule(
        kind="activation", by="gelu", forward=forwards.gelu, unless=_torch_gelu
    ),
    **{
        f"transformers.activations.{name}": Rule(
            kind="activation", by="gelu", forward=forwards.gelu
        )
        for name in TANH
    },
    "torch.nn.modules.dropout.Dropout": Rule(
        kind="dropout", by="dropout", forward=forwards.dropout
    ),
    f"{LLAMA}.LlamaAttention": Rule(
        kind="rope", by="rope", forward=attention.llama_attention, unless=_llama_attention
    ),
    f"{GPT2}.GPT2Block": Rule(
        kind="block",
        by="add_layer_norm, linear_residual",
        forward=forwards.gpt2_block,
        unless=_gpt2_block,
        inside=("ln_2",),
    ),
    f"{LLAMA}.LlamaDecoderLayer": Rule(
        kind="block",
        by="add_rms_norm",
        forward=forwards.llama_block,
        unless=_llama_block,
        inside=("post_attention_layernorm",),
    ),
}
ATTENTION = (f"{GPT2}.GPT2Attention", f"{LLAMA}.LlamaAttention")
CAUSAL = (f"{GPT2}.GPT2LMHeadModel", f"{LLAMA}.LlamaForCausalLM")
MOST_COLUMNS = 256  # of a head, as weft.ops.attention takes them
PRODUCT = "a product with nothing to fuse: the vendor's library has it"
DROPOUT = "draws other random numbers than torch's: patch(dropout=True) replaces it"


def attention_unless(module: Module) -> str:
    """Why an attention module is not sent through the interface."""
    config = module.config
    if getattr(module, "is_cross_attention", False):
        return "it is cross attention"
    if getattr(module, "reorder_and_upcast_attn", False):
        return "reorder_and_upcast_attn asks for another order of arithmetic"
    if config.output_attentions:
        return "output_attentions asks for weights, which are never in memory here"
    if module.head_dim % 8 or module.head_dim > MOST_COLUMNS:
        return f"heads of {module.head_dim}: a multiple of 8 up to {MOST_COLUMNS} is needed"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"the config asks for {config._attn_implementation}"
    return ""


def loss_unless(model: Module) -> str:
    """Why a causal model's loss stays."""
    if "_loss_function" in vars(model):
        return "it has a loss function of its own"
    if getattr(model, "loss_type", None) not in (None, "ForCausalLM", "ForCausalLMLoss"):
        return f"its loss is {model.loss_type}"
    return ""


def head_unless(model: Module) -> str:
    """Why head and loss are not one operator."""
    head = model.lm_head
    if type(head) is not torch.nn.Linear or head.bias is not None:
        return "lm_head is no plain product"
    return not_plain(model) or not_plain(head)
