"""AdamW, one step: m and v average the gradient and its square; the parameter decays and moves.

    g = clip grad,  clip = min(1, max_norm / (norm(grad) + 1e-6))
    m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2
    p = (1 - lr wd) p - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv:1711.05101), as
``torch.optim.AdamW`` has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from weft.core import Case, Cost, Input, Operator, WeftError, case
from weft.core.cases import ITEMSIZE
from weft.ops._common import validate

DTYPES = ("float32", "float16", "bfloat16")
WRITTEN = ("param", "exp_avg", "exp_avg_sq", "master")
NEAREST, STOCHASTIC = "nearest", "stochastic"
NO_CLIP = math.inf
CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds to the norm


def reference(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    master: torch.Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    max_norm: float = NO_CLIP,
    rounding: str = NEAREST,
    seed: int = 0,
) -> tuple[torch.Tensor, ...]:
    g = grad
    if max_norm != NO_CLIP:
        # min(1.0, nan) is 1.0 in Python, where torch's clamp gives NaN: no case has a NaN norm and a clip.
        g = grad * min(1.0, max_norm / (float(grad.square().sum().sqrt()) + CLIP_EPS))
    m = beta1 * exp_avg + (1 - beta1) * g
    v = beta2 * exp_avg_sq + (1 - beta2) * g * g
    value = param if master is None else master
    # eps is outside of the square root, as in torch.
    denominator = (v / (1 - beta2**step)).sqrt() + eps
    p = value * (1 - lr * weight_decay) - lr / (1 - beta1**step) * m / denominator
    return (p, m, v) if master is None else (p, m, v, p.clone())


def check_numbers(
    lr: Any, beta1: Any, beta2: Any, eps: Any, weight_decay: Any, step: Any, max_norm: Any
) -> None:
    """Raise :class:`WeftError` if a number is out of range, or is no number."""
    try:
        _check_ranges(lr, beta1, beta2, eps, weight_decay, step, max_norm)
    except WeftError:
        raise
    # A tensor of several numbers raises RuntimeError, such an array ValueError.
    except (TypeError, RuntimeError, ValueError) as error:
        numbers = {"lr": lr, "betas[0]": beta1, "betas[1]": beta2, "eps": eps}
        numbers |= {"weight_decay": weight_decay, "max_norm": max_norm, "step": step}
        wrong = [(name, got) for name, got in numbers.items() if not isinstance(got, int | float)]
        name, got = wrong[0] if wrong else ("its numbers", error)
        raise WeftError(f"adamw: {name}", expected="a number", got=f"{got!r:.80}") from error


def _check_ranges(
    lr: Any, beta1: Any, beta2: Any, eps: Any, weight_decay: Any, step: Any, max_norm: Any
) -> None:
    ranges = (
        ("lr", lr, lr >= 0, "0 or more"),
        ("betas[0]", beta1, 0 <= beta1 < 1, "from 0 to below 1"),
        ("betas[1]", beta2, 0 <= beta2 < 1, "from 0 to below 1"),
        ("eps", eps, eps >= 0, "0 or more"),
        ("weight_decay", weight_decay, weight_decay >= 0, "0 or more"),
        ("max_norm", max_norm, max_norm > 0, "above 0, or None"),
    )
    for name, got, holds, expected in ranges:
        if not holds:
            raise WeftError(f"adamw: {name}", expected=expected, got=got)
    if not isinstance(step, torch.Tensor) and not step >= 1:
        hint = "the step counts from 1: bias correction divides by 1 - beta^step"
        raise WeftError("adamw: step", expected="1 or more", got=step, hint=hint)
    for name, got in (*((name, got) for name, got, *_ in ranges), ("step", step)):
        if isinstance(got, int) and got >= 1 << 63:  # torch takes ints of 64 bits only
            raise WeftError(f"adamw: {name}", expected="an int below 2^63, or a float", got=got)


def check_group(*tensors: Any, where: str = "") -> None:
    """Raise :class:`WeftError` unless these tensors can belong to one parameter: param, grad, exp_avg,
    exp_avg_sq and optionally master."""
    names = ("param", "grad", "exp_avg", "exp_avg_sq", "master")
    by_name = dict(zip(names, tensors, strict=False))
    param, exp_avg, exp_avg_sq = by_name["param"], by_name["exp_avg"], by_name["exp_avg_sq"]
    for name, x in by_name.items():
        validate.tensor("adamw", name + where, x, DTYPES if name != "master" else ("float32",))
        validate.same_device("adamw", f"param{where} and {name}{where}", param, x)
        if x.shape != param.shape:
            raise WeftError(f"adamw: {name}{where}.shape", expected=tuple(param.shape), got=tuple(x.shape))
    validate.same("adamw", f"exp_avg{where} and exp_avg_sq{where}", exp_avg, exp_avg_sq)
    # Averages in float32 beside half parameters are usual: in bfloat16 v stops changing at beta2 = 0.999.
    for name in ("grad", "exp_avg"):
        if by_name[name].dtype not in (param.dtype, torch.float32):
            raise WeftError(
                f"adamw: {name}{where}.dtype",
                expected=f"float32 or the parameter's {param.dtype}",
                got=by_name[name].dtype,
            )


def validate_call(*inputs: Any, **params: Any) -> None:
    params = {"max_norm": NO_CLIP, **params}
    rounding = params.pop("rounding", NEAREST)
    params.pop("seed", None)
    check_numbers(**params)
    check_group(*inputs)
    validate.one_of("adamw: rounding", rounding, (NEAREST, STOCHASTIC))
    if rounding == STOCHASTIC and (inputs[0].dtype != torch.bfloat16 or len(inputs) > 4):
        raise WeftError(
            "adamw: stochastic rounding",
            expected="bfloat16 parameters without a float32 master",
            got=f"{inputs[0].dtype}{' and a master' if len(inputs) > 4 else ''}",
        )


def cost(c: Case, direction: str) -> Cost:
    """Count each input read once, all but the gradient written once, and the workbench's copies.

    A step overwrites its inputs, so the workbench copies them for every call inside the timed region: each
    written tensor is read and written once more. For fp32 that is 28 bytes of an element for the step and 24
    for the copies. ``tools/adamw_step.py`` times the bare step.
    """
    read = sum(i.nbytes for i in c.inputs if not (i.name == "param" and len(c.inputs) > 4))
    written = sum(i.numel * ITEMSIZE[i.dtype] for i in c.inputs if i.name in WRITTEN)
    if c.params.get("max_norm", NO_CLIP) != NO_CLIP:
        # Two passes over the gradient are compulsory.
        read += c.inputs[1].nbytes  # the norm of all must be known before the first is scaled
    return Cost(read=read + written, written=2 * written)


def draw(c: Case, seed: int, device: str) -> Sequence[torch.Tensor]:
    """Generate values as in training: v is a square, and the parameter is the rounded master."""
    generator = torch.Generator(device)
    generator.manual_seed(seed * 1_000_003 + 29)
    tensors: dict[str, torch.Tensor] = {}
    for spec in c.inputs:
        x = torch.empty(spec.shape, dtype=torch.float32, device=device)
        tensors[spec.name] = x.normal_(generator=generator)
        if spec.values == "special" and x.numel() > 8:
            x.view(-1)[:: x.numel() // 6][:3] = torch.tensor([math.nan, math.inf, -math.inf]).to(x)
        if spec.values == "large":
            x.mul_(1e4)
    tensors["exp_avg"].mul_(0.1)
    # v is an average of squares: a negative value would make every implementation NaN.
    tensors["exp_avg_sq"].square_().mul_(0.1)
    if "master" in tensors:
        # Only the master has the low bits: a step that reads the rounded parameter instead loses them.
        tensors["param"].copy_(tensors["master"])
    return [tensors[i.name] for i in c.inputs]


GPT2 = 124_439_808  # the parameters of GPT-2's smallest
USUAL: dict[str, object] = {
    "lr": 3e-4,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
}


def _inputs(
    *shape: int,
    dtype: str = "float32",
    state: str = "",
    master: bool = False,
    layout: str = "contiguous",
    grad: str = "normal",
) -> tuple[Input, ...]:
    kinds = {"param": dtype, "grad": dtype, "exp_avg": state or dtype, "exp_avg_sq": state or dtype}
    if master:
        kinds["master"] = "float32"
    return tuple(
        Input(
            name=n,
            shape=shape,
            dtype=d,
            layout=layout,
            values=grad if n == "grad" else "normal",
        )
        for n, d in kinds.items()
    )


def _case(name: str, *shape: int, tags: str = "check", step: int = 10, **more: Any) -> Case:
    inputs = {k: more.pop(k) for k in ("dtype", "state", "master", "layout", "grad") if k in more}
    devices = more.pop("devices", ("cpu", "cuda"))
    # lr is large, so that a wrong update is larger than the rounding of the parameter.
    params = {**USUAL, "lr": 3e-2 if tags != "bench" else 3e-4, "step": step, **more}
    return case(*_inputs(*shape, **inputs), name=name, tags=tags, devices=devices, **params)


HALF: dict[str, Any] = {"dtype": "float16", "state": "float32"}
BF16: dict[str, Any] = {"dtype": "bfloat16", "state": "float32"}
GPU: dict[str, Any] = {"devices": ("cuda",)}
CHECKS = [
    # Step 1: the bias corrections 1 - beta^t are smallest, and their digits cancel most.
    _case("fp32-4099-first-step", 4099, step=1),
    _case("fp32-7x129-clipped", 7, 129, max_norm=1.0, step=1000),
    _case("fp16-1031-fp32-state", 1031, **HALF),
    _case("fp16-1031-master-clipped", 1031, master=True, max_norm=2.0, **HALF),
    _case("bf16-1031", 1031, dtype="bfloat16"),
    _case("bf16-1031-master", 1031, master=True, **BF16),
    _case("bf16-4099-stochastic", 4099, rounding=STOCHASTIC, seed=7, **BF16),
    _case("fp32-1048583-clipped", 1048583, max_norm=1.0, grad="large", **GPU),
]
EDGES = [
    *(_case(f"fp32-{'x'.join(map(str, s)) or 'scalar'}", *s, tags="edge") for s in ((), (0,))),
    # No 16-byte alignment: the scalar path.
    _case("fp32-1031-shifted", 1031, layout="shifted", tags="edge"),
    _case("fp32-33x17-transposed", 33, 17, layout="transposed", tags="edge", **GPU),
    _case("fp32-33x17-sliced", 33, 17, layout="sliced", tags="edge"),
    _case("fp32-259-special", 259, grad="special", tags="edge"),
]
BENCHES = [
    _case("fp32-124m", GPT2, tags="bench", **GPU),
    _case("fp32-124m-clipped", GPT2, tags="bench", max_norm=1.0, **GPU),
    _case("bf16-124m-master", GPT2, tags="bench", master=True, **BF16, **GPU),
    _case("bf16-124m-stochastic", GPT2, tags="bench", rounding=STOCHASTIC, **BF16, **GPU),
    _case("fp32-1m", 1 << 20, tags="bench"),
]

OPERATOR = Operator(
    name="adamw",
    summary="One AdamW step, in place, with gradient clipping",
    formula="p = (1 - lr wd) p - lr m^ / (sqrt(v^) + eps)",
    signature="adamw(params, grads, exp_avgs, exp_avg_sqs)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=validate_call,
    dtypes=DTYPES,
    in_place=WRITTEN,
    draw=draw,
)
