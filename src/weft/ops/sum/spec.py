"""The full reduction y = sum of all x_i, to a 0-d tensor of the same dtype.

The error of a sum is bounded by its condition, sum |x_i| / |sum x_i|, and by how the partial sums
are arranged: Higham, "The accuracy of floating point summation", SIAM J. Sci. Comput. 14 (1993).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Input, Operator, Property, Tolerance, case
from weft.core.cases import ITEMSIZE
from weft.ops._common import validate

DTYPES = ("float32", "bfloat16", "float64", "float16")


PIECE = 1 << 24  # elements whose rounding errors the reference computes in one pass: 128 MiB of float64


def reference(x: torch.Tensor) -> torch.Tensor:
    """Return the float64 sum plus its own rounding errors, since float64 outputs are checked too."""
    total = x.sum()
    if not torch.isfinite(total):
        return total
    return total + (_nearest(x.detach()) - total.detach())


def _nearest(x: torch.Tensor) -> float:
    """Return the sum of finite float64 elements to about one rounding: pairwise, with error terms."""
    parts = []
    for piece in x.reshape(-1).split(PIECE):
        narrow = torch.equal(piece, piece.float().double())  # a float64 sum of float32 values is exact enough
        while piece.numel() > 1 and not narrow:
            half = piece.numel() // 2
            a, b = piece[:half], piece[half : 2 * half]
            total = a + b
            b_part = total - a
            parts.append(float(((a - (total - b_part)) + (b - b_part)).sum()))  # Knuth's two-sum
            piece = torch.cat((total, piece[2 * half :]))
        parts.append(float(piece.sum()))
    return math.fsum(parts)


def check_arguments(x: Any) -> None:
    validate.tensor("sum", "x", x, DTYPES)


def spread(grad: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor]:
    """Return the output's gradient expanded to ``shape``: a view with strides 0.

    A gradient of one element is copied, since the view would alias the caller's own gradient.
    """
    view = grad.expand(shape)
    return (view.clone() if view.numel() == 1 else view,)


def cost(c: Case, direction: str) -> Cost:
    """Forward reads x and writes one element; backward reads one element and writes none."""
    (x,) = c.inputs
    one = ITEMSIZE[x.dtype]
    if direction == FORWARD:
        return Cost(read=x.nbytes, written=one)
    return Cost(read=one, written=0)


def scale(x: torch.Tensor) -> torch.Tensor:
    """Return max(|sum x|, sqrt(sum x^2), sqrt(sum of the columns' sums squared)) of a float64 tensor.

    The last one is the largest if rows repeat, as those of an expanded tensor do.
    """
    columns = x.flatten(0, -2).sum(0) if x.dim() > 1 else x
    norms = (torch.linalg.vector_norm(v) for v in (x, columns))
    return torch.stack([x.sum().abs(), *norms]).amax()


def _between(y: torch.Tensor, x: torch.Tensor) -> float:
    """Return how far n min(x) <= sum(x) <= n max(x) is violated, in units of the allowed rounding error."""
    if not x.numel():
        return float(y.double().abs())
    low, high = (float(v) * x.numel() for v in x.aminmax())
    if not all(map(torch.isfinite, (torch.tensor(low), torch.tensor(high), y))):
        return 0.0
    # 1e-300 avoids a division by zero for a tensor of zeros.
    slack = 16 * torch.finfo(y.dtype).eps * max(abs(low), abs(high)) + 1e-300
    return max(float(y) - high, low - float(y), 0.0) / slack


def _x(*shape: int, dtype: str = "float32", layout: str = "contiguous", values: str = "normal") -> Input:
    return Input(name="x", shape=shape, dtype=dtype, layout=layout, values=values)


ANYWHERE, CPU, CUDA = ("cpu", "cuda"), ("cpu",), ("cuda",)
CHECKS = [
    *(case(_x(7, 129, dtype=d)) for d in DTYPES),
    *(case(_x(4093, dtype=d)) for d in DTYPES),
    *(case(_x(30011, dtype=d)) for d in DTYPES),
    *(case(_x(3, 5, 211, dtype=d, values="outliers")) for d in ("float32", "bfloat16")),
    # Equal terms: their rounding errors have one sign and do not cancel.
    *(case(_x(4093, dtype=d, values="equal")) for d in DTYPES),
    *(case(_x(3001, values=v)) for v in ("large", "tiny", "outliers")),
    # A sum far from zero: errors are relative to a large value.
    *(case(_x(3001, dtype=d, values="offset")) for d in ("float32", "float64")),
    case(_x(1 << 20)),
    case(_x(1000003, dtype="bfloat16")),
]
EDGES = [
    *(case(_x(*s), tags="edge") for s in ((), (0,), (1,), (2,), (5, 0, 3), (1031,), (1, 1, 1))),
    *(case(_x(0, dtype=d), tags="edge") for d in ("bfloat16", "float64", "float16")),
    *(case(_x(33, 65, layout=k), tags="edge") for k in ("transposed", "sliced", "expanded", "shifted")),
    *(case(_x(1001, dtype=d, layout="shifted"), tags="edge") for d in DTYPES if d != "float32"),
    *(case(_x(259, dtype=d, values="special"), tags="edge") for d in DTYPES),
    *(case(_x(n, values="special"), tags="edge") for n in (1, 2, 3)),
    # Infinities of both signs give NaN too, so that only NaN alone shows what becomes of it.
    *(case(_x(259, dtype=d, values="nan"), tags="edge") for d in ("float32", "float16")),
    # -Inf must survive: an implementation that pads with it or masks by 0 * x gives NaN.
    case(_x(1021, values="neginf"), tags="edge"),
    # A running sum of ones stops at 2^24 in float32 and at 2^8 in bfloat16: one running sum fails these
    # cases.
    case(_x(2**24 + 3, values="ones"), tags="edge", name="fp32-past-2^24-ones"),
    case(_x(1000, dtype="bfloat16", values="ones"), tags="edge"),
    case(_x(10**8, values="equal"), tags="edge", devices=CUDA, name="fp32-1e8-equal"),
    # Past the range of a 32-bit index.
    case(_x(2**31 + 8, dtype="bfloat16"), tags="edge", devices=CUDA),
]
BENCHES = [
    case(_x(2**28), tags="bench", devices=CUDA, name="fp32-2^28"),
    case(_x(2**28, dtype="bfloat16"), tags="bench", devices=CUDA, name="bf16-2^28"),
    case(_x(2**27, dtype="float64"), tags="bench", devices=CUDA, name="fp64-2^27"),
    case(_x(2**20), tags="bench", devices=CUDA, name="fp32-2^20"),
    case(_x(2**24), tags="bench", devices=CPU, name="fp32-2^24"),
    case(_x(2**23, dtype="float64"), tags="bench", devices=CPU, name="fp64-2^23"),
    case(_x(2**24, dtype="bfloat16"), tags="bench", devices=CPU, name="bf16-2^24"),
]

OPERATOR = Operator(
    name="sum",
    summary="sum of all elements",
    formula="y = sum over all i of x_i",
    signature="sum(x)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x",),
    save=lambda inputs, output: (inputs[0].shape,),
    properties=(Property(name="between n min(x) and n max(x)", holds=_between),),
    tolerance=Tolerance(
        chain=8.0,
        reason="a sum may be added in any order: for 1e8 equal float32 values, whose rounding errors do not "
        "cancel, eager's pairwise tree loses one unit and the library's chains lose seven",
    ),
    scale=scale,
    scale_reason=("a sum may rightly be near zero; sqrt(sum x^2) is its RMS over random signs of the terms"),
    backward_note="the gradient is grad.expand(x.shape): a view, no kernel and no bytes",
)
