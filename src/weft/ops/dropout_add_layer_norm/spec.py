"""Dropout, a residual added, layer norm: s = dropout(x) + residual, y = layer_norm(s).

Sources: Srivastava et al., "Dropout" (JMLR 2014); Ba, Kiros and Hinton, "Layer Normalization"
(arXiv:1607.06450). Which elements are dropped: see _shared/philox_dropout.py.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core import Case, Input, Operator, case
from weft.core.cases import SHORT
from weft.ops._shared.norm_spec import DTYPES, check, cost, layer_norm64
from weft.ops._shared.philox import check_chance
from weft.ops._shared.philox_dropout import kept, scale

SEED = 0x1234_5678_9ABC_DEF


def reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    p: float,
    seed: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    s = torch.where(kept(x, p, seed), x * scale(p), 0.0) + residual
    return layer_norm64(s, weight, bias, eps), s


def check_arguments(
    x: Any, residual: Any, weight: Any, bias: Any, *, p: Any, seed: Any, eps: Any = 1e-5
) -> None:
    where = "dropout_add_layer_norm"
    check(where, x, {"weight": weight, "bias": bias}, eps, residual, added=True)
    check_chance(where, p, seed)


def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """The backward wants the sum, which is an output, and the weight; the seed has the mask."""
    return (output[1], inputs[2])


def _case(
    *shape: int,
    dtype: str = "float32",
    weights: str | None = None,
    layout: str = "contiguous",
    values: str = "normal",
    p: float = 0.1,
    **more: Any,
) -> Case:
    made = [
        Input(name=n, shape=shape, dtype=dtype, layout=layout, values=values)
        for n in ("x", "residual")
    ]
    made += [Input(name=n, shape=shape[-1:], dtype=weights or dtype) for n in ("weight", "bias")]
    words = [SHORT[dtype], "x".join(map(str, shape))]
    words += [w for w in (layout, values) if w not in ("contiguous", "normal")]
    words += [f"{SHORT[weights]}-weights"] if weights else []
    words += [f"p{p}"] if p != 0.1 else []
    return case(*made, name="-".join(words), p=p, seed=SEED, eps=1e-5, **more)


CHECKS = [
    *(_case(7, 132, dtype=d) for d in DTYPES),
    _case(5, 129),
    _case(5, 136, dtype="float16", weights="float32", p=0.5),
    _case(24, 64, values="offset"),
    _case(6, 64, p=0.0),
    _case(6, 64, p=1.0),
]
EDGES = [
    _case(2, 17, 20, layout="transposed", tags="edge"),
    _case(0, 5, tags="edge"),
    _case(3, 1, tags="edge"),
    _case(2, 9000, tags="edge"),
    _case(301, 1000, dtype="bfloat16", tags="edge", devices=("cuda",)),
    _case(1030, 4096, dtype="bfloat16", tags="edge", devices=("cuda",)),
    _case(33, 40001, dtype="bfloat16", tags="edge", devices=("cuda",)),
]
BENCHES = [
    *(
        _case(*s, dtype="bfloat16", tags="bench", devices=("cuda",))
        for s in ((65536, 768), (32768, 1024), (32768, 4096))
    ),
    _case(32768, 1024, tags="bench", devices=("cuda",)),
    _case(256, 1024, tags="bench", devices=("cpu",)),
]

OPERATOR = Operator(
    name="dropout_add_layer_norm",
    summary="dropout, residual added, then layer norm",
    formula="s = dropout(x) + residual; y = (s - mean s) / sqrt(variance s + eps) weight + bias",
    signature="dropout_add_layer_norm(x, residual, weight, bias, p=0.1, seed=0, eps=1e-5)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x", "residual", "weight", "bias"),
    graded=2,
    save=save,
    backward_note="from the sum s and the seed, with the gradients of y and of s",
)
