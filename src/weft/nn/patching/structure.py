"""Recognition of norms and MLPs of classes that no rule names: by structure, then by a trial call.

Many models have an RMS norm and a gated MLP of their own class. The structure says what such a module might
compute; a call of its own forward on a few random numbers, with weights that tell the formulas apart, says
whether it does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.func import functional_call

from weft.nn.patching import forwards
from weft.nn.patching.rules import TANH_GELUS, Module, Rule, not_plain

MLP_CHILDREN = {"gate_proj", "up_proj", "down_proj", "act_fn"}
SILUS = ("SiLU", "SiLUActivation")
NORM_TOLERANCE = 1e-4  # of the largest value: modules compute in float32; formulas differ by tenths
MLP_TOLERANCE = 1e-6  # in float64; some tanh GELUs have constants of ten digits

RMS_NORM = Rule(kind="norm", by="rms_norm", forward=forwards.llama_rms_norm)
RMS_NORM_OF_INPUT_DTYPE = Rule(kind="norm", by="rms_norm", forward=forwards.rms_norm_of_input_dtype)
ONE_PLUS_RMS_NORM = Rule(kind="norm", by="rms_norm", forward=forwards.one_plus_rms_norm)
SWIGLU_MLP = Rule(kind="mlp", by="swiglu", forward=forwards.llama_mlp, covers=("act_fn",))
GEGLU_MLP = Rule(kind="mlp", by="geglu", forward=forwards.geglu_mlp, covers=("act_fn",))


def recognise(module: Module) -> Rule | str:
    """Return the rule for a module of an unknown class; else why there is none, or "" if it is neither.

    The module's own forward is called on a few random numbers, without a gradient. It must be plain: without
    hooks and with its class's forward.
    """
    if type(module).__module__.startswith("torch.nn.") or not_plain(module):
        return ""
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            if _has_form_of_rms_norm(module):
                return _rms_norm_rule(module)
            if set(dict(module.named_children())) == MLP_CHILDREN:
                return _mlp_rule(module)
    except Exception as error:  # noqa: BLE001 - any code may be in another library's forward
        return f"a trial call raised {type(error).__name__}; {error}".partition("\n")[0]
    return ""


def _has_form_of_rms_norm(module: Module) -> bool:
    names = [name for name, _ in module.named_parameters()]
    no_other_state = not list(module.children()) and not list(module.buffers())
    return names == ["weight"] and no_other_state and module.weight.dim() == 1 and _has_eps(module)


def _has_eps(module: Module) -> bool:
    return any(isinstance(vars(module).get(name), float) for name in forwards.EPS_NAMES)


def _rms_norm_rule(module: Module) -> Rule | str:
    eps, width = forwards.eps_of(module), module.weight.numel()
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(width, generator=generator)
    offsets = {0.0, 1.0}
    # At the scale of sqrt(eps) the result depends on eps and on whether it is added under the root.
    for scale in (1.0, eps**0.5):
        x = scale * torch.randn(2, 3, width, generator=generator)
        y = _call_with(module, weight, x)
        normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
        offsets = {o for o in offsets if _is_near(y, (o + weight.double()) * normed, NORM_TOLERANCE)}
    if not offsets:
        return "its trial call is not RMS norm's x / sqrt(mean(x^2) + eps), times weight or 1 + weight"
    # The weight is float32: the result's dtype shows whether the class rounds to its input's.
    out_dtype = _call_with(module, weight, x.bfloat16()).dtype
    if offsets == {1.0}:
        return (
            ONE_PLUS_RMS_NORM
            if out_dtype == torch.bfloat16
            else "its result has another dtype than its input"
        )
    return RMS_NORM_OF_INPUT_DTYPE if out_dtype == torch.bfloat16 else RMS_NORM


def _call_with(module: Module, weight: torch.Tensor, x: torch.Tensor) -> Any:
    return functional_call(module, {"weight": weight}, (x,))


def _mlp_rule(module: Module) -> Rule | str:
    children = dict(module.named_children())
    projections = [child for name, child in children.items() if name != "act_fn"]
    if any(type(child) is not torch.nn.Linear for child in projections):
        return "its projections are no plain torch.nn.Linear"
    if reason := not_plain(children["act_fn"]):
        return f"act_fn: {reason}"
    activation, rule = _activation_of(children["act_fn"])
    if rule is None:
        return f"its activation is {type(children['act_fn']).__name__}, not SiLU or GELU's tanh form"
    # A stand-in with small projections: the forward is the class's own, the matrices are not.
    generator = torch.Generator().manual_seed(0)
    stand_in = copy.copy(module)
    small = {"gate_proj": (8, 12), "up_proj": (8, 12), "down_proj": (12, 8)}
    linears = {
        name: torch.nn.Linear(*shape, dtype=torch.float64, device="cpu") for name, shape in small.items()
    }
    for linear in linears.values():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    # A new dictionary: the shallow copy shares the module's own, which must keep its projections.
    vars(stand_in)["_modules"] = {**linears, "act_fn": children["act_fn"]}
    x = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    expected = linears["down_proj"](activation(linears["gate_proj"](x)) * linears["up_proj"](x))
    if not _is_near(stand_in(x), expected, MLP_TOLERANCE):
        return "its trial call is not down_proj(act_fn(gate_proj(x)) * up_proj(x))"
    return rule


def _activation_of(act: Module) -> tuple[Callable[..., torch.Tensor], Rule | None]:
    if type(act).__name__ in SILUS:
        return torch.nn.functional.silu, SWIGLU_MLP
    if type(act).__name__ in TANH_GELUS or getattr(act, "approximate", "") == "tanh":
        return lambda x: torch.nn.functional.gelu(x, approximate="tanh"), GEGLU_MLP
    return torch.nn.functional.silu, None


def _is_near(y: Any, expected: torch.Tensor, tolerance: float) -> bool:
    if not isinstance(y, torch.Tensor) or y.shape != expected.shape:
        return False
    return bool((y.double() - expected).abs().max() <= tolerance * expected.abs().max())
