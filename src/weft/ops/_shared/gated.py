"""Gated activations, y = f(gate) up: what swiglu and geglu share beside f.

Triton's kernels take f as a constexpr: each operator's with_triton.py is a choice of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Input, WeftError, case
from weft.core.cases import ITEMSIZE
from weft.ops._shared import validate

DTYPES = ("float32", "float16", "bfloat16")


def check_arguments(where: str, gate: Any, up: Any) -> None:
    """Raise :class:`WeftError` unless both are tensors of one shape, dtype and device."""
    for name, x in (("gate", gate), ("up", up)):
        validate.tensor(where, name, x, DTYPES)
    validate.same(where, "gate and up", gate, up)
    if gate.shape != up.shape:
        raise WeftError(
            f"{where}: gate and up of one shape",
            expected=tuple(gate.shape),
            got=tuple(up.shape),
            hint="gate, up = x.chunk(2, -1) halves a joint projection",
        )


def cost(c: Case, direction: str) -> Cost:
    """Forward reads gate and up and writes y; backward reads the gradient too and writes two."""
    out = c.inputs[0].numel * ITEMSIZE[c.dtype]
    read = sum(x.nbytes for x in c.inputs)
    if direction == FORWARD:
        return Cost(read=read, written=out)
    return Cost(read=read + out, written=2 * out)


def eager(
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The forward composed of torch calls in float32, rounded once."""

    def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return (activation(gate.float()) * up.float()).to(gate.dtype).contiguous()

    return forward


def _case(
    *shape: int,
    dtype: str = "float32",
    layouts: tuple[str, str] = ("contiguous", "contiguous"),
    values: str = "normal",
    **more: Any,
) -> Case:
    gate = Input(name="gate", shape=shape, dtype=dtype, layout=layouts[0], values=values)
    up = Input(name="up", shape=shape, dtype=dtype, layout=layouts[1])
    parts = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[dtype]
    name = "-".join((parts, "x".join(map(str, shape)) or "scalar"))
    if layouts != ("contiguous", "contiguous"):
        name += "-" + "-".join(layouts)
    return case(gate, up, name=name if values == "normal" else f"{name}-{values}", **more)


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
