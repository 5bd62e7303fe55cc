"""Dropout: y = x / (1 - p) where the element's random number is at least p 2^16, else 0.

The numbers are 16 bits of Philox 4x32-10, keyed by the seed and counted by the element's place in
row-major order (see _common/philox_dropout.py): nothing is stored, and the backward makes them
again. p is the 65536th nearest to what is asked for, for the scale as well. Sources:
Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting" (JMLR 2014);
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.core import Case, Cost, Input, Operator, Property, case
from weft.core.cases import ITEMSIZE
from weft.ops._common import validate
from weft.ops._common.philox import check_dropout_arguments
from weft.ops._common.philox_dropout import keep_mask, keep_scale, rounded_probability

DTYPES = ("float32", "float16", "bfloat16")
# Both 32-bit halves are in use, and the low one is negative as an int32: a kernel that drops one of
# them, or extends its sign, fails.
SEED = 0x1234_5678_9ABC_DEF


def reference(x: torch.Tensor, *, p: float, seed: int) -> torch.Tensor:
    # Not a product with the mask: Inf times 0 is NaN.
    return torch.where(keep_mask(x, p, seed), x * keep_scale(p), 0.0)


def check_arguments(x: Any, *, p: float, seed: int) -> None:
    validate.tensor("dropout", "x", x, DTYPES)
    check_dropout_arguments("dropout", p, seed)


def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """Save nothing: the seed determines the mask."""
    return ()


def cost(c: Case, direction: str) -> Cost:
    """Forward reads x and writes y; backward reads a gradient and writes one: the same walk."""
    (x,) = c.inputs
    out = x.numel * ITEMSIZE[x.dtype]
    return Cost(read=x.nbytes if direction == "forward" else out, written=out)


def _same_bits(y: torch.Tensor, x: torch.Tensor, *, p: float, seed: int) -> float:
    """Return 0 if every element is the float32 product rounded once, or 0, bit for bit; else 2."""
    expected = torch.where(keep_mask(x, p, seed), x.float() * keep_scale(p), 0.0).to(x.dtype)
    return 0.0 if bool(((y == expected) | (y.isnan() & expected.isnan())).all()) else 2.0


def _share(y: torch.Tensor, x: torch.Tensor, *, p: float, seed: int) -> float:
    """Deviation of the share of zeros from the rounded p, in units of six standard errors."""
    if y.numel() == 0:
        return 0.0
    p = rounded_probability(p)
    off = abs(float((y == 0).double().mean()) - p)
    # Plus one element, since the standard error is 0 where p is 0 or 1.
    return off / (6 * math.sqrt(p * (1 - p) / y.numel()) + 1 / y.numel())


def _case(
    *shape: int,
    dtype: str = "float32",
    layout: str = "contiguous",
    values: str = "normal",
    p: float = 0.1,
    seed: int = SEED,
    **options: Any,
) -> Case:
    x = Input(name="x", shape=shape, dtype=dtype, layout=layout, values=values)
    plain = case(x, p=p, seed=seed, **options)
    return case(x, p=p, seed=seed, name=plain.name.replace(f"-{seed}", f"-seed{seed % 97}"), **options)


CHECKS = [
    *(_case(7, 129, dtype=d) for d in DTYPES),
    # The largest seed; a size that is no multiple of the eight numbers of one Philox block.
    _case(1031, p=0.5, seed=(1 << 63) - 1),
    _case(500, p=0.0),
    _case(500, p=1.0, dtype="float16"),
    _case(2049, 4099, dtype="bfloat16", devices=("cuda",)),
]
EDGES = [
    *(_case(*s, tags="edge", seed=0) for s in ((), (0, 5))),
    *(_case(13, 65, layout=k, tags="edge") for k in ("transposed", "expanded")),
    _case(1001, dtype="bfloat16", layout="shifted", tags="edge"),
    _case(259, dtype="float16", values="special", tags="edge"),
]
BENCHES = [
    _case(16384, 16384, dtype="bfloat16", tags="bench", devices=("cuda",)),
    _case(65536, 768, dtype="bfloat16", tags="bench", devices=("cuda",)),
    _case(16384, 4096, tags="bench", devices=("cuda",)),
    _case(1024, 1024, tags="bench", devices=("cpu",)),
]

OPERATOR = Operator(
    name="dropout",
    summary="seeded dropout, no mask stored",
    formula="y = x / (1 - p) where number(seed, place) >= p 2^16, else 0",
    signature="dropout(x, p=0.1, seed=0)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x",),
    save=save,
    properties=(
        Property(name="the very same bits", holds=_same_bits),
        Property(
            name="p of it is zero",
            holds=_share,
            applies=lambda c: all(i.values == "normal" for i in c.inputs),
        ),
    ),
    backward_note="from the seed alone: dx = g / (1 - p) where x was kept",
)
