"""Recognition of attention modules and blocks of transformers' models by a trial call.

The trial runs the class's own forward in float64 with small projections, and with a stand-in for the function
that transformers' config names. What the module hands to it, and what it does with the answer, says whether
Weft's attention and rotation compute the same.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.nn.patching import forwards
from weft.nn.patching.attention import rotary_attention
from weft.nn.patching.rules import OTHER_VERSION, Module, Rule, not_plain

TRIAL_NAME = "weft_trial"  # in transformers' attention interface
PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
NORMS = frozenset({"q_norm", "k_norm"})
OPTIONS = frozenset({"sliding_window", "softcap"})  # of weft.ops.attention
BLOCK_CHILDREN = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
TOKENS, WIDTH = 5, 8
TOLERANCE = 1e-5  # of the largest value: norms inside of an attention compute in float32
ROPE = Rule(kind="rope", by="rope", forward=rotary_attention)


@dataclass(frozen=True, kw_only=True)
class AttentionForm:
    """Form of an attention module by its trial call: the options that it passes to its attention.

    ``rope`` says why its rotation is not that of ``weft.ops.rope``, '' if it is.
    """

    options: dict[str, Any]
    rope: str = ""


@dataclass
class _Recorder:
    """One trial call: a stand-in for the attention function and for the cache, and what they received."""

    answer: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]] = field(default_factory=list)
    cached: list[tuple[torch.Tensor, torch.Tensor, Any]] = field(default_factory=list)

    def attend(
        self, module: Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        self.calls.append((q, k, v, options))
        self.answer = _random(q.shape[0], q.shape[2], q.shape[1], q.shape[3], seed=3)
        return self.answer, None

    def update(self, k: torch.Tensor, v: torch.Tensor, layer: Any, *rest: Any) -> Any:
        self.cached.append((k, v, layer))
        return k, v


def recognise_attention(module: Module) -> AttentionForm | str:
    """Return the form of an attention module of transformers; else why it has none, '' if it is no attention.

    An attention has a config, four projections and perhaps norms of queries and keys.
    """
    names = {name for name, _ in module.named_children()}
    if names - NORMS != PROJECTIONS:
        return ""
    if not hasattr(getattr(module, "config", None), "_attn_implementation"):
        return ""
    if reason := not_plain(module):
        return reason
    for name in ("head_dim", "scaling", "attention_dropout", "is_causal", "layer_idx"):
        if not hasattr(module, name):
            return f"it has no {name}, which transformers' attentions have"
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return _form(module)
    except Exception as error:  # noqa: BLE001 - any code may be in another library's forward
        return f"a trial call raised {type(error).__name__}; {error}".partition("\n")[0]


def _form(module: Module) -> AttentionForm | str:
    from transformers.modeling_utils import AttentionInterface

    recorder, small = _Recorder(), _small(module)
    AttentionInterface.register(TRIAL_NAME, recorder.attend)
    x = _random(2, TOKENS, WIDTH, seed=1)
    angles = _random(1, TOKENS, module.head_dim // 2, seed=2)
    cos, sin = (f(torch.cat((angles, angles), -1)) for f in (torch.cos, torch.sin))
    y = type(small).forward(
        small,
        hidden_states=x,
        position_embeddings=(cos, sin),
        attention_mask=None,
        past_key_values=recorder,
        weft_trial=True,
    )
    if len(recorder.calls) != 1:
        return "it does not call the attention that its config names"
    q, k, v, options = recorder.calls[0]
    if not options.pop("weft_trial", False):
        return "it does not hand its keywords on to its attention"
    passed = {n: o for n, o in options.items() if n not in ("dropout", "scaling") and o is not None}
    if unknown := sorted(set(passed) - OPTIONS):
        return f"it passes {', '.join(unknown)} to its attention, which weft.ops.attention does not have"
    if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return "its values have another size than its keys"
    known = {name: options[name] for name in OPTIONS if name in options}
    expected = _project(small, x, cos, sin)
    returned = y[0] if isinstance(y, tuple) else None
    is_same = (
        all(_is_near(a, b) for a, b in zip((q, k, v), expected, strict=True))
        and _is_near(returned, small.o_proj(recorder.answer.flatten(2)))
        and [layer for _, _, layer in recorder.cached] == [module.layer_idx]
        and all(_is_near(a, b) for a, b in zip(recorder.cached[0][:2], expected[1:], strict=True))
        and options["scaling"] == module.scaling
    )
    why = "" if is_same else "its trial call is not that of projections, a rotation of halves and attention"
    return AttentionForm(options=known, rope=why)


def _small(module: Module) -> Module:
    """Return a stand-in with the class's own forward, small matrices, and a config of the trial's name."""
    small = copy.copy(module)
    size, groups = module.head_dim, getattr(module, "num_key_value_groups", 1)
    shapes = {"q_proj": groups * size, "k_proj": size, "v_proj": size}
    children: dict[str, Any] = {
        name: _linear(WIDTH, width, seed) for seed, (name, width) in enumerate(shapes.items(), 10)
    }
    children["o_proj"] = _linear(groups * size, WIDTH, 14)
    for name in NORMS & set(module._modules):
        norm = copy.copy(getattr(module, name))
        weights = {n: _random(*p.shape, seed=15) for n, p in norm._parameters.items() if p is not None}
        vars(norm)["_parameters"] = {n: torch.nn.Parameter(w) for n, w in weights.items()}
        children[name] = norm
    vars(small)["_modules"] = children
    vars(small)["config"] = copy.copy(module.config)
    vars(small.config)["_attn_implementation_internal"] = TRIAL_NAME
    vars(small)["training"] = False
    return small


def _linear(n_inputs: int, n_outputs: int, seed: int) -> torch.nn.Linear:
    linear = torch.nn.Linear(n_inputs, n_outputs, bias=False, dtype=torch.float64, device="cpu")
    linear.weight.copy_(_random(n_outputs, n_inputs, seed=seed))
    return linear


def _project(small: Module, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
    """Return queries, keys and values as :func:`rotary_attention` hands them to attention, in float64."""
    q, k, v = (p(x).unflatten(-1, (-1, small.head_dim)) for p in (small.q_proj, small.k_proj, small.v_proj))
    if "q_norm" in small._modules:
        q, k = small.q_norm(q), small.k_norm(k)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))

    def rotate(t: torch.Tensor) -> torch.Tensor:
        low, high = t.chunk(2, -1)
        return t * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]

    return [rotate(q), rotate(k), v]


def recognise_block(module: Module) -> Rule | str:
    """Return the rule of a block h = x + attention(norm(x)), then h + mlp(norm(h)).

    Else why there is none, or '' if the module is no block of transformers.
    """
    is_theirs = type(module).__module__.startswith("transformers.")
    if not is_theirs or {name for name, _ in module.named_children()} != BLOCK_CHILDREN:
        return ""
    if reason := not_plain(module):
        return reason
    if _parameters(type(module).forward) != _parameters(forwards.llama_block):
        return OTHER_VERSION
    functions: dict[str, Callable[..., Any]] = {
        "self_attn": lambda hidden_states, **more: (torch.tanh(2.0 * hidden_states), None),
        "mlp": lambda x: torch.cos(3.0 * x),
        "input_layernorm": lambda x: x.sin() + 0.3,
        "post_attention_layernorm": lambda x: x.square() - 0.7,
    }
    small, x = copy.copy(module), _random(2, TOKENS, WIDTH, seed=1)
    vars(small)["_modules"] = dict(functions)
    vars(small)["training"] = False
    try:
        with torch.no_grad():
            y = type(small).forward(small, x)
    except Exception as error:  # noqa: BLE001 - any code may be in another library's forward
        return f"a trial call raised {type(error).__name__}; {error}".partition("\n")[0]
    h = x + functions["self_attn"](functions["input_layernorm"](x))[0]
    if not _is_near(y, h + functions["mlp"](functions["post_attention_layernorm"](h))):
        return "its trial call is not x + attention(norm(x)), then h + mlp(norm(h))"
    return BLOCK


def _block_reason_against(module: Module) -> str:
    norm = vars(module.post_attention_layernorm).get("forward")
    if norm is None:
        return "its post_attention_layernorm is not replaced"
    if getattr(norm, "__func__", None) is not forwards.llama_rms_norm:
        return "its norm is not Llama's, the only one that add_rms_norm computes"
    return ""


BLOCK = Rule(
    kind="block",
    by="add_rms_norm",
    forward=forwards.llama_block,
    reason_against=_block_reason_against,
    covers=("post_attention_layernorm",),
)


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _is_near(y: Any, expected: torch.Tensor) -> bool:
    if not isinstance(y, torch.Tensor) or y.shape != expected.shape:
        return False
    return bool((y.double() - expected).abs().max() <= TOLERANCE * expected.abs().max())
