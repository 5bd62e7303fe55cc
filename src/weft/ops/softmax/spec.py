"""Softmax over the last dimension: y = exp(x - max x) / sum exp(x - max x), row by row.

The maximum is subtracted first, so that no exponential overflows (Blanchard, Higham and Higham,
"Accurately computing the log-sum-exp and softmax functions", IMA J. Numer. Anal. 2021).
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Input, Operator, Property, Tolerance, case
from weft.core.cases import ITEMSIZE
from weft.ops._common import validate

DTYPES = ("float32", "float16", "bfloat16")
HALVES = ("float16", "bfloat16")


def reference(x: torch.Tensor) -> torch.Tensor:
    if x.numel() == 0:
        return x.clone()
    # The maximum cancels out, so that no gradient passes through it.
    e = torch.exp(x - x.amax(-1, keepdim=True).detach())
    return e / e.sum(-1, keepdim=True)


def check_arguments(x: Any) -> None:
    validate.tensor("softmax", "x", x, DTYPES, dims=range(1, 65))


def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """Save the output alone, which is all that the backward reads: dx = y (g - sum(g y))."""
    return (output,)


def gradient_scale(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the size of the terms of y g - y sum(g y) before they cancel, which they do in a one-hot row."""
    y, size = reference(x), grad.abs()
    return y * (size + (size * y).sum(-1, keepdim=True))


def cost(c: Case, direction: str) -> Cost:
    """Forward reads x and writes y; backward reads the gradient and y and writes one gradient."""
    (x,) = c.inputs
    out = x.numel * ITEMSIZE[x.dtype]
    return Cost(read=x.nbytes if direction == FORWARD else 2 * out, written=out)


def _rows_sum_to_one(y: torch.Tensor, x: torch.Tensor) -> float:
    """Return the largest deviation of a row's sum from 1, in units of the allowed rounding error.

    Each element is rounded once: by half an ulp of itself, or by half the least subnormal number.
    """
    if y.numel() == 0:
        return 0.0
    info = torch.finfo(y.dtype)
    float32 = 32 * torch.finfo(torch.float32).eps
    allowed = info.eps + y.shape[-1] * info.smallest_normal * info.eps + float32
    worst = 0.0
    for rows in _blocks(y):
        sums = rows.double().sum(-1)
        # A row with a NaN has a NaN sum, as it must; such rows are left to the comparison with the reference.
        away = (sums[~sums.isnan()] - 1).abs()
        worst = max(worst, float(away.max()) / allowed if away.numel() else 0.0)
    return worst


def _in_unit_interval(y: torch.Tensor, x: torch.Tensor) -> float:
    worst = 0.0
    for rows in _blocks(y):
        finite = rows[~rows.isnan()]
        if finite.numel():
            over = max(float(finite.max()) - 1, -float(finite.min()), 0.0)
            worst = max(worst, over / torch.finfo(y.dtype).eps)
    return worst


def _blocks(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the rows of ``y`` in blocks of 2^26 elements, so that a huge case needs no huge temporary."""
    if y.numel() == 0:
        return ()
    flat = y.detach().reshape(-1, y.shape[-1])
    return flat.split(max(1, (1 << 26) // y.shape[-1]))


def _x(*shape: int, dtype: str = "float32", layout: str = "contiguous", values: str = "normal") -> Input:
    return Input(name="x", shape=shape, dtype=dtype, layout=layout, values=values)


CHECKS = [
    # Lengths around a warp and around powers of two, where tails and padding begin.
    *(case(_x(3, n, dtype=d)) for d in DTYPES for n in (1, 7, 32, 129, 1000)),
    *(case(_x(2, n, dtype=d)) for d in DTYPES for n in (1023, 1024, 1025)),
    case(_x(2, 3, 4, 65)),
    # Without the subtraction of the maximum exp overflows here.
    *(case(_x(5, 257, dtype=d, values="large")) for d in DTYPES),
    # So many rows that eager's largest error, which sets the tolerance, is not a matter of chance.
    *(case(_x(24, 200, values=v)) for v in ("offset", "rising", "falling", "equal", "outliers")),
]
EDGES = [
    *(case(_x(*s), tags="edge") for s in ((1,), (1031,), (0,), (0, 5), (5, 0), (2, 0, 3))),
    # "shifted" rows are not 16-byte aligned: they take the kernels with narrow accesses.
    *(case(_x(33, 65, layout=k), tags="edge") for k in ("transposed", "sliced", "expanded", "shifted")),
    *(case(_x(9, 136, dtype=d, layout="shifted"), tags="edge") for d in HALVES),
    *(case(_x(31, 67, dtype=d, values=v), tags="edge") for d in DTYPES for v in ("special", "neginf")),
    *(case(_x(1, 4096, dtype=d, values="rising"), tags="edge") for d in DTYPES),
    case(_x(2, 8200, values="falling"), tags="edge"),
    *(case(_x(2, 70000, dtype=d), tags="edge") for d in DTYPES),
    *(
        case(_x(*s, dtype=d), tags="edge", devices=("cuda",))
        for d in DTYPES
        for s in ((300, 2048), (1030, 264), (301, 5000), (270, 16384), (140, 40000), (135, 65536))
    ),
    case(_x(3, 1000001), tags="edge", devices=("cuda",)),
    case(_x(32769, 65536, dtype="bfloat16"), tags="edge", devices=("cuda",)),
]
BENCHES = [
    *(
        case(_x(*s, dtype="bfloat16"), tags="bench", devices=("cuda",))
        for s in ((32768, 1024), (32768, 4096), (8192, 16384), (4096, 65536))
    ),
    case(_x(32768, 4096), tags="bench", devices=("cuda",)),
    case(_x(512, 1024, dtype="bfloat16"), tags="bench", devices=("cuda",)),
    case(_x(1024, 1024), tags="bench", devices=("cpu",)),
    case(_x(1024, 1024, dtype="bfloat16"), tags="bench", devices=("cpu",)),
]

OPERATOR = Operator(
    name="softmax",
    summary="softmax over the last dimension",
    formula="y = exp(x - max x) / sum exp(x - max x)",
    signature="softmax(x)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x",),
    rows=("x",),
    save=save,
    tolerance=Tolerance(
        chain=8.0,
        sum_length=lambda c: c.inputs[0].shape[-1] if c.inputs[0].shape else 1,
        reason="the order of a row's sum is free: at 70000 columns the library's, in eight lanes, is off "
        "by four units (standard deviation of 3000 rows; 16 at most) where eager's pairwise tree loses "
        "less than one",
    ),
    gradient_scale=gradient_scale,
    scale_reason="where a row is nearly one-hot its gradient's terms cancel, each rounded before",
    properties=(
        Property(name="rows sum to 1", holds=_rows_sum_to_one),
        Property(name="all in [0, 1]", holds=_in_unit_interval),
    ),
    backward_note="from the saved output: dx = y (g - sum(g y))",
)
