"""Rules of :func:`weft.patch`: the replacement for a module of a class, and the reasons to leave one.

A rule holds for exactly one class: a subclass may compute something else. A rule's ``reason_against``
returns why one module of the class is not replaced, or "".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weft.nn.patching import forwards

Module = Any
TANH_GELUS = ("NewGELUActivation", "GELUTanh", "PytorchGELUTanh", "FastGELUActivation")


def _modeling(name: str) -> str:
    return f"transformers.models.{name.lower()}.modeling_{name.lower()}"


GPT2, LLAMA = _modeling("GPT2"), _modeling("Llama")
HOOKS = (
    # torch calls hooks in __call__, which a fused parent skips for its children.
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
)
MAX_HEAD_DIM = 256  # of weft.ops.attention
PLAIN_MATMUL = "plain matmul, left to cuBLAS"
OTHER_RANDOM_NUMBERS = "uses other random numbers than torch; patch(dropout=True) replaces it"
SKIPPED = "skipped by skip="
LOGITS_RETURNED = "kept because logits are returned; keep_logits=False fuses head and loss"
OTHER_VERSION = "unsupported version of transformers: its forward has other parameters"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Replacement of one class: its kind, the operators that replace it, and the new forward.

    ``covers`` names children that the new forward computes itself, without calling them.
    """

    kind: str
    by: str
    forward: Callable[..., Any]
    reason_against: Callable[[Module], str] = lambda module: ""
    covers: tuple[str, ...] = ()


# torch's modules with a rule: a subclass has another class and may compute something else.
REPLACEABLE = (
    *(torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.Embedding, torch.nn.GELU, torch.nn.Dropout),
    torch.nn.Linear,
)
CONTAINERS = (
    *(torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential),
    *(torch.nn.ParameterList, torch.nn.ParameterDict),
)


def reason_without_rule(module: Module) -> str:
    """Return why a module that no rule replaces is left as it is."""
    if type(module).__module__.startswith("weft."):
        return "it is Weft's already"
    for base in REPLACEABLE:
        if isinstance(module, base) and type(module) is not base:
            own = (
                "with a forward of its own"
                if type(module).forward is not base.forward
                else "of the same forward"
            )
            return f"subclass of torch.nn.{base.__name__} {own}; only torch's own class has a rule"
    if isinstance(module, torch.nn.Identity):
        return "it computes nothing"
    if reason := not_plain(module):
        return reason
    if isinstance(module, torch.nn.Linear):
        return PLAIN_MATMUL
    if list(module.children()):
        return "no rule for this class; the modules inside it have rows of their own"
    return "Weft has no module or operator for this class"


def class_of(module: Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def not_plain(module: Module) -> str:
    """Return why a module may not be bypassed: other code observes it or has changed it."""
    if "forward" in vars(module):
        return "its forward has been replaced already"
    if any(getattr(module, name, None) for name in HOOKS):
        return "it has hooks, which would no longer be called"
    return ""


def _layer_norm(module: Module) -> str:
    return "" if module.elementwise_affine else "it has no weight"


def _rms_norm(module: Module) -> str:
    if len(module.normalized_shape) > 1:
        return "it normalises several dimensions"
    return _layer_norm(module)


def _embedding(module: Module) -> str:
    for name in ("padding_idx", "max_norm"):
        if getattr(module, name) is not None:
            return f"{name} is set"
    return "its gradient is scaled or sparse" if module.scale_grad_by_freq or module.sparse else ""


def _torch_gelu(module: Module) -> str:
    return "" if module.approximate == "tanh" else "exact form of GELU; weft.ops.gelu is the tanh form"


def _gpt2_mlp(module: Module) -> str:
    act = module.act
    if type(act).__name__ not in TANH_GELUS and getattr(act, "approximate", "") != "tanh":
        return f"its activation is {type(act).__name__}, not GELU's tanh form"
    for name in ("c_fc", "c_proj", "act"):
        child = getattr(module, name)
        if reason := not_plain(child):
            return f"{name}: {reason}"
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
    # The new block passes the residual to the MLP, which only the new MLP accepts.
    # The patch sets a bound method on the instance; an unpatched module has none there.
    mlp_forward = getattr(vars(module.mlp).get("forward"), "__func__", None)
    if mlp_forward is not forwards.gpt2_mlp:
        return "its mlp is not replaced"
    return _block(module, forwards.gpt2_block, "ln_2")


def _block(module: Module, forward: Callable[..., Any], norm: str) -> str:
    # transformers calls blocks by keyword, so a forward with other names would fail or ignore arguments.
    if _parameters(type(module).forward) != _parameters(forward):
        return OTHER_VERSION
    return "" if "forward" in vars(getattr(module, norm)) else f"its {norm} is not replaced"


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


# In the order of application: a block's rule depends on whether its children were replaced.
RULES: dict[str, Rule] = {
    "torch.nn.modules.normalization.LayerNorm": Rule(
        kind="norm",
        by="layer_norm",
        forward=forwards.torch_layer_norm,
        reason_against=_layer_norm,
    ),
    "torch.nn.modules.normalization.RMSNorm": Rule(
        kind="norm", by="rms_norm", forward=forwards.torch_rms_norm, reason_against=_rms_norm
    ),
    f"{LLAMA}.LlamaRMSNorm": Rule(kind="norm", by="rms_norm", forward=forwards.llama_rms_norm),
    "torch.nn.modules.sparse.Embedding": Rule(
        kind="embedding", by="embedding", forward=forwards.embedding, reason_against=_embedding
    ),
    f"{GPT2}.GPT2MLP": Rule(
        kind="mlp",
        by="linear_gelu, linear",
        forward=forwards.gpt2_mlp,
        reason_against=_gpt2_mlp,
        covers=("c_fc", "c_proj", "act"),
    ),
    f"{LLAMA}.LlamaMLP": Rule(
        kind="mlp",
        by="swiglu",
        forward=forwards.llama_mlp,
        reason_against=_llama_mlp,
        covers=("act_fn",),
    ),
    "torch.nn.modules.activation.GELU": Rule(
        kind="activation", by="gelu", forward=forwards.gelu, reason_against=_torch_gelu
    ),
    **{
        f"transformers.activations.{name}": Rule(kind="activation", by="gelu", forward=forwards.gelu)
        for name in TANH_GELUS
    },
    "torch.nn.modules.dropout.Dropout": Rule(kind="dropout", by="dropout", forward=forwards.dropout),
    f"{GPT2}.GPT2Block": Rule(
        kind="block",
        by="add_layer_norm, linear_residual",
        forward=forwards.gpt2_block,
        reason_against=_gpt2_block,
        covers=("ln_2",),
    ),
}
# Models whose loss is replaced, and those that hand a keyword on to their attention. Attentions and blocks of
# other classes than GPT-2's are recognised by :mod:`weft.nn.patching.attention_structure`.
FAMILIES = ("GPT2", "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2")
ATTENTION = (f"{GPT2}.GPT2Attention",)
BASE_MODELS = tuple(f"{_modeling(name)}.{name}Model" for name in FAMILIES)
CAUSAL_MODELS = tuple(
    f"{_modeling(name)}.{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}" for name in FAMILIES
)


def attention_reason_against(module: Module) -> str:
    """Return why an attention module does not use Weft's attention."""
    config = module.config
    if getattr(module, "is_cross_attention", False):
        return "it is cross attention"
    if getattr(module, "reorder_and_upcast_attn", False):
        return "reorder_and_upcast_attn asks for another order of arithmetic"
    if config.output_attentions:
        return "output_attentions asks for the attention weights, which are never stored"
    if module.head_dim % 8 or module.head_dim > MAX_HEAD_DIM:
        return f"heads of {module.head_dim}: only multiples of 8 up to {MAX_HEAD_DIM} are supported"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"the config asks for {config._attn_implementation}"
    return ""


def loss_reason_against(model: Module) -> str:
    """Return why a causal model's loss is not replaced."""
    if "_loss_function" in vars(model):
        return "it has a loss function of its own"
    if getattr(model, "loss_type", None) not in (None, "ForCausalLM", "ForCausalLMLoss"):
        return f"its loss is {model.loss_type}"
    return ""


def head_reason_against(model: Module) -> str:
    """Return why head and loss are not fused."""
    head = model.lm_head
    if type(head) is not torch.nn.Linear or head.bias is not None:
        return "lm_head is not a plain torch.nn.Linear without bias"
    if getattr(model.config, "final_logit_softcapping", None) is not None:
        return "its logits have a cap, which linear_cross_entropy does not have"
    return not_plain(model) or not_plain(head)
