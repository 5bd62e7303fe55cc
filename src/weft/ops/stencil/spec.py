"""The five-point stencil: a weighted sum of each cell of a 2-D grid and its four neighbours.

    y[i, j] = c x[i, j] + n x[i-1, j] + s x[i+1, j] + w x[i, j-1] + e x[i, j+1]

A neighbour outside the grid adds nothing, whatever its coefficient. With c = -4 and the others 1 this is the
discrete Laplace operator: R. LeVeque, "Finite difference methods for ordinary and partial differential
equations" (SIAM, 2007).
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Input, Operator, Property, WeftError, case
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate

DTYPES = ("float32", "float16", "bfloat16")
POINTS = 5


# Where a neighbour exists: (cells that have it, the neighbours themselves), in the order of the coefficients.
EVERY = slice(None)
SIDES = (
    ((EVERY, EVERY), (EVERY, EVERY)),
    ((slice(1, None), EVERY), (slice(None, -1), EVERY)),
    ((slice(None, -1), EVERY), (slice(1, None), EVERY)),
    ((EVERY, slice(1, None)), (EVERY, slice(None, -1))),
    ((EVERY, slice(None, -1)), (EVERY, slice(1, None))),
)


def reference(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    y = (x * weights[0]).contiguous()
    # In place: the float64 grid of the largest case has 17 GB.
    for (cells, sides), weight in zip(SIDES[1:], weights[1:], strict=True):
        y[..., *cells].addcmul_(x[..., *sides], weight)
    return y


def gradient_scale(
    grad: torch.Tensor, x: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return, for a coefficient's gradient, the norm of its terms: their sum may cancel."""
    terms = [torch.linalg.vector_norm(grad[..., *cells] * x[..., *sides]) for cells, sides in SIDES]
    return None, torch.stack(terms).nan_to_num(0.0, 0.0, 0.0)


def check_arguments(x: Any, weights: Any) -> None:
    validate.tensor("stencil", "x", x, DTYPES, dims=range(2, 65))
    validate.tensor("stencil", "weights", weights, DTYPES, dims=range(1, 2))
    validate.same("stencil", "x and weights", x, weights)
    if weights.shape[0] != POINTS:
        raise WeftError(
            "stencil: weights.shape",
            expected=f"({POINTS},): centre, north, south, west, east",
            got=tuple(weights.shape),
        )


def cost(c: Case, direction: str) -> Cost:
    """Forward reads x and writes y; backward also reads the gradient. Ten operations a cell cost nothing."""
    x, weights = c.inputs
    out = x.numel * ITEMSIZE[x.dtype]
    if direction == FORWARD:
        return Cost(read=x.nbytes + weights.nbytes, written=out)
    return Cost(read=x.nbytes + weights.nbytes + out, written=out + weights.nbytes)


def _adds_up(y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> float:
    """Return how far each grid's sum of outputs is from what the sums of x's parts say, in allowed errors.

    A neighbour's term is in the sum once for each cell but those of one border: the last row is nobody's
    northern neighbour.
    """
    if y.numel() == 0:
        return 0.0
    x64, w64 = x.double(), weights.double()
    parts = (x64, x64[..., :-1, :], x64[..., 1:, :], x64[..., :-1], x64[..., 1:])
    sums = torch.stack([p.sum((-2, -1)) for p in parts], -1)
    sizes = torch.stack([p.abs().sum((-2, -1)) for p in parts], -1)
    expected, size = (sums * w64).sum(-1), (sizes * w64.abs()).sum(-1)
    got = y.double().sum((-2, -1))
    finite = expected.isfinite() & got.isfinite()
    allowed = (torch.finfo(y.dtype).eps + 8 * torch.finfo(torch.float32).eps) * size
    # A half type also loses what lies below its smallest number.
    allowed = allowed + torch.finfo(y.dtype).smallest_normal * y.shape[-1] * y.shape[-2]
    excess = (got - expected).abs()[finite] / allowed[finite].clamp(min=1e-30)
    return float(excess.max()) if excess.numel() else 0.0


def _case(
    *shape: int,
    dtype: str = "float32",
    layout: str = "contiguous",
    values: str = "normal",
    name: str = "",
    **more: Any,
) -> Case:
    """Return a case named like ``bf16-33x136-sliced``; the coefficients are normal."""
    x = Input(name="x", shape=shape, dtype=dtype, layout=layout, values=values)
    weights = Input(name="weights", shape=(POINTS,), dtype=dtype)
    words = [SHORT[dtype], "x".join(map(str, shape))]
    words += [w for w in (layout, values) if w not in ("contiguous", "normal")]
    return case(x, weights, name=name or "-".join(words), **more)


CPU, CUDA = ("cpu",), ("cuda",)
CHECKS = [
    # Rows of whole 16-byte vectors, of several strips, and of an odd length.
    _case(36, 72),
    _case(40, 64, dtype="float16"),
    _case(19, 264, dtype="bfloat16"),
    _case(7, 13),
    _case(3, 2, 9, 20),
    _case(70, 300),
    # Equal products have rounding errors of one sign: the gradient of the coefficients adds them all.
    _case(64, 96, values="equal"),
    _case(24, 50, values="outliers"),
]
EDGES = [
    *(_case(*s, tags="edge") for s in ((0, 5), (5, 0), (0, 4, 6))),
    *(_case(*s, tags="edge") for s in ((1, 1), (1, 37), (37, 1), (2, 2))),
    *(_case(33, 65, layout=k, tags="edge") for k in ("transposed", "sliced", "expanded", "shifted")),
    _case(21, 36, values="special", tags="edge"),
    _case(9, 41, dtype="bfloat16", values="special", tags="edge"),
    # Several pieces of a strip, and accesses of 2, 4, 8 and 16 bytes.
    *(_case(1000, s, dtype="bfloat16", tags="edge", devices=CUDA) for s in (1001, 1002, 1004, 1008)),
    _case(70001, 2, 3, tags="edge", devices=CUDA),
    _case(515, 4099, tags="edge", devices=CUDA),
]
BENCHES = [
    _case(16384, 16384, tags="bench", devices=CUDA),
    _case(16384, 16384, dtype="bfloat16", tags="bench", devices=CUDA),
    _case(1024, 512, 512, tags="bench", devices=CUDA),
    _case(16383, 16385, dtype="bfloat16", tags="bench", devices=CUDA),
    # Over 2^31 cells, where 32-bit offsets overflow.
    _case(65536, 32776, dtype="bfloat16", tags="bench", devices=CUDA),
    _case(1024, 1024, tags="bench", devices=CPU),
]

OPERATOR = Operator(
    name="stencil",
    summary="five-point stencil on 2-D grids, zero outside",
    formula="y_ij = c x_ij + n x_i-1,j + s x_i+1,j + w x_i,j-1 + e x_i,j+1",
    signature="stencil(x, weights)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x", "weights"),
    gradient_scale=gradient_scale,
    scale_reason="a coefficient's gradient is a sum over all cells, whose terms cancel",
    properties=(Property(name="adds up to the parts' sums", holds=_adds_up),),
    backward_note="the stencil of the gradient, opposite neighbours exchanged; five sums over all cells",
)
