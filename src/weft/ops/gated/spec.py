"""Gated activations y = f(gate) up: SwiGLU with f = silu, GEGLU with f = GELU in its tanh form.

Source: Shazeer, "GLU variants improve transformer" (arXiv:2002.05202).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Input, Operator, WeftError, case
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate
from weft.ops._common.gradient_scale import gelu_slope_terms, zero_nonfinite

DTYPES = ("float32", "float16", "bfloat16")
CONTIGUOUS = ("contiguous", "contiguous")


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate * torch.sigmoid(gate) * up


def geglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    u = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(u)) * up


def geglu_gradient_scale(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """Return |grad up| times the terms of GELU's slope for the gate; no terms of up's gradient cancel."""
    return zero_nonfinite((grad * up).abs() * gelu_slope_terms(gate)), None


def check_arguments(operator_name: str, gate: Any, up: Any) -> None:
    """Raise :class:`WeftError` unless both are tensors of one shape, supported dtype and device."""
    for name, x in (("gate", gate), ("up", up)):
        validate.tensor(operator_name, name, x, DTYPES)
    validate.same(operator_name, "gate and up", gate, up)
    if gate.shape != up.shape:
        raise WeftError(
            f"{operator_name}: gate and up have different shapes",
            expected=tuple(gate.shape),
            got=tuple(up.shape),
            hint="gate, up = x.chunk(2, -1) halves a joint projection",
        )


def cost(c: Case, direction: str) -> Cost:
    """Forward reads gate and up and writes y; backward also reads the gradient and writes two."""
    out = c.inputs[0].numel * ITEMSIZE[c.dtype]
    read = sum(x.nbytes for x in c.inputs)
    if direction == FORWARD:
        return Cost(read=read, written=out)
    return Cost(read=read + out, written=2 * out)


def _case(
    *shape: int,
    dtype: str = "float32",
    layouts: tuple[str, str] = CONTIGUOUS,
    values: str = "normal",
    **options: Any,
) -> Case:
    gate = Input(name="gate", shape=shape, dtype=dtype, layout=layouts[0], values=values)
    up = Input(name="up", shape=shape, dtype=dtype, layout=layouts[1])
    name = f"{SHORT[dtype]}-{'x'.join(map(str, shape)) or 'scalar'}"
    if layouts != CONTIGUOUS:
        name += "-" + "-".join(layouts)
    return case(gate, up, name=name if values == "normal" else f"{name}-{values}", **options)


CASES = (
    *(_case(7, 129, dtype=d) for d in DTYPES),
    *(_case(2051, values="sweep", dtype=d) for d in DTYPES),
    _case(3, 1000, values="large"),
    _case(1025, 4099, dtype="bfloat16", devices=("cuda",)),
    *(_case(*s, tags="edge") for s in ((), (5, 0, 3))),
    _case(33, 65, layouts=("transposed", "sliced"), tags="edge"),
    _case(9, 64, layouts=("expanded", "shifted"), tags="edge"),
    _case(9, 136, dtype="bfloat16", layouts=("shifted", "contiguous"), tags="edge"),
    _case(259, dtype="float16", values="special", tags="edge"),
    _case(16384, 11008, dtype="bfloat16", tags="bench", devices=("cuda",)),
    _case(16384, 11008, tags="bench", devices=("cuda",)),
    _case(1024, 3072, dtype="bfloat16", tags="bench", devices=("cuda",)),
    _case(1024, 1024, tags="bench", devices=("cpu",)),
)

SWIGLU = Operator(
    name="swiglu",
    summary="SwiGLU, a gated activation",
    formula="y = gate / (1 + exp(-gate)) up",
    signature="swiglu(gate, up)",
    reference=swiglu_reference,
    cases=CASES,
    cost=cost,
    validate=partial(check_arguments, "swiglu"),
    dtypes=DTYPES,
    differentiable=("gate", "up"),
    rows=("gate", "up"),
)
GEGLU = Operator(
    name="geglu",
    summary="GEGLU, a gated activation",
    formula="y = gate/2 (1 + tanh(sqrt(2/pi) (gate + 0.044715 gate^3))) up",
    signature="geglu(gate, up)",
    reference=geglu_reference,
    cases=CASES,
    cost=cost,
    validate=partial(check_arguments, "geglu"),
    dtypes=DTYPES,
    differentiable=("gate", "up"),
    rows=("gate", "up"),
    gradient_scale=geglu_gradient_scale,
    scale_reason="the terms of GELU's slope cancel near x = -0.75, and those of 1 - t^2 in the tail",
)
