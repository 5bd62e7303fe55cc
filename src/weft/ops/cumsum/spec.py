"""The cumulative sum along the last dimension: y_i = x_0 + ... + x_i, a scan or prefix sum.

Definitions and the work-efficient scan: G. Blelloch, "Prefix sums and their applications", CMU-CS-90-190
(1990). The error of a scan is that of the longest path of additions: Higham, "The accuracy of floating point
summation", SIAM J. Sci. Comput. 14 (1993).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.core import Case, Cost, Input, Operator, Property, Tolerance, WeftError, case
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate

DTYPES = ("float32", "float16", "bfloat16")
SERIAL = 128  # equal elements that may be added one after another in float32
UNITS_OF_ROOT = 5 * 0.12 / 8  # of the accumulator, for the root of a sum's terms (Tolerance.chain_at)


def reference(x: torch.Tensor, *, exclusive: bool = False, reverse: bool = False) -> torch.Tensor:
    y = x.flip(-1) if reverse else x
    if exclusive:
        y = torch.cat((torch.zeros_like(y[..., :1]), y[..., :-1]), -1)
    y = y.cumsum(-1)
    return y.flip(-1) if reverse else y


def path_scale(
    grad: torch.Tensor | None, x: torch.Tensor, *, exclusive: bool = False, reverse: bool = False
) -> torch.Tensor:
    """Return for each sum the RMS of the sums before it and of itself, in the order of the scan.

    Each addition along the row rounds at the size of its own result, and all later sums inherit that. So a
    sum of positive and negative terms that passes zero has the error of its neighbours, not one of its size.
    """
    if grad is not None:
        x, reverse = grad, not reverse
    sums = reference(x, exclusive=exclusive, reverse=reverse)
    if sums.dim() == 0:
        return sums.abs()
    squares = torch.where(sums.isfinite(), sums, 0.0).square()
    squares = (squares.flip(-1) if reverse else squares).cumsum(-1)
    means = squares / torch.arange(1, x.shape[-1] + 1, dtype=squares.dtype, device=x.device)
    return (means.flip(-1) if reverse else means).sqrt()


def free_order_terms(c: Case) -> int:
    """Return the number of terms of random signs in a sum whose order costs as much as that of a row may.

    Equal terms are the worst case: while the running sum stays between two powers of two, each addition has
    the same rounding error. In the last such range of m additions there are m / 2, each off by up to a half
    unit, which is eps / 4 of the result. With the ranges before it (a quarter of the units each, over half of
    the additions) that is m eps / 6 of the last sum, whose row has an RMS of 1 / sqrt(3) of it. Where an
    implementation adds more than SERIAL elements one after another, it must carry them in a wider type.
    """
    n = c.inputs[0].shape[-1] if c.inputs[0].shape else 1
    if c.inputs[0].values != "equal":
        return n
    units = min(n, SERIAL) / 6 * math.sqrt(3.0)
    return max(n, math.ceil((units / UNITS_OF_ROOT) ** 2))


def check_arguments(x: Any, *, exclusive: Any = False, reverse: Any = False) -> None:
    validate.tensor("cumsum", "x", x, DTYPES, dims=range(1, 65))
    for name, value in (("exclusive", exclusive), ("reverse", reverse)):
        if not isinstance(value, bool):
            raise WeftError(f"cumsum: {name}", expected="True or False", got=f"{value!r:.80}")


def cost(c: Case, direction: str) -> Cost:
    """Both directions read one tensor and write one; n additions cost nothing beside them."""
    (x,) = c.inputs
    out = x.numel * ITEMSIZE[x.dtype]
    return Cost(read=x.nbytes if direction == "forward" else out, written=out)


def _starts_with_its_first(
    y: torch.Tensor, x: torch.Tensor, *, exclusive: bool = False, reverse: bool = False
) -> float:
    """Return infinity unless the first output of each row is its first element, or 0 if exclusive."""
    if y.numel() == 0:
        return 0.0
    first = -1 if reverse else 0
    expected = torch.zeros_like(x[..., first]) if exclusive else x[..., first]
    return 0.0 if torch.equal(y[..., first].nan_to_num(7.0), expected.nan_to_num(7.0)) else math.inf


def _ends_with_the_sum(
    y: torch.Tensor, x: torch.Tensor, *, exclusive: bool = False, reverse: bool = False
) -> float:
    """Return how far the last inclusive outputs are from the rows' sums, in units of the allowed error."""
    if exclusive or y.numel() == 0:
        return 0.0
    last = y[..., 0 if reverse else -1].double()
    sums, sizes = x.double().sum(-1), x.double().abs().sum(-1)
    finite = sums.isfinite() & last.isfinite()
    # One rounding to the dtype, and roundings of float32 sums along the row, which are below its size.
    eps = torch.finfo(y.dtype).eps
    allowed = eps * sums.abs() + 0.25 * (eps + 64 * torch.finfo(torch.float32).eps) * sizes
    excess = (last - sums).abs()[finite] / allowed[finite].clamp(min=1e-30)
    return float(excess.max()) if excess.numel() else 0.0


def _case(
    *shape: int,
    dtype: str = "float32",
    layout: str = "contiguous",
    values: str = "normal",
    exclusive: bool = False,
    reverse: bool = False,
    name: str = "",
    **more: Any,
) -> Case:
    """Return a case named like ``fp32-5x257-exclusive-reverse``."""
    x = Input(name="x", shape=shape, dtype=dtype, layout=layout, values=values)
    words = [SHORT[dtype], "x".join(map(str, shape)), *(w for w in (layout, values) if w not in PLAIN)]
    words += [w for w, is_on in (("exclusive", exclusive), ("reverse", reverse)) if is_on]
    return case(x, name=name or "-".join(words), exclusive=exclusive, reverse=reverse, **more)


PLAIN, CPU, CUDA = ("contiguous", "normal"), ("cpu",), ("cuda",)
CHECKS = [
    *(_case(3, 129, dtype=d) for d in DTYPES),
    _case(5, 257, exclusive=True),
    _case(5, 257, reverse=True),
    _case(4, 300, dtype="bfloat16", exclusive=True, reverse=True),
    _case(2, 3, 4, 64, reverse=True),
    # A running sum of ones in bfloat16 stops at 256; equal terms have rounding errors of one sign.
    _case(3, 1000, dtype="bfloat16", values="ones"),
    _case(24, 100, values="equal"),
    _case(24, 200, values="outliers"),
]
EDGES = [
    *(_case(*s, tags="edge") for s in ((1,), (0, 5), (5, 0))),
    *(_case(33, 65, layout=k, tags="edge") for k in ("transposed", "sliced", "expanded", "shifted")),
    # Inf stays Inf until -Inf or NaN comes: a scan that subtracts, or multiplies by a mask of 0, gives NaN.
    _case(9, 259, values="special", tags="edge"),
    _case(9, 260, dtype="bfloat16", values="special", exclusive=True, reverse=True, tags="edge"),
    # Tiles of one row, groups of 32 tiles, and super-groups of 32 groups, in each kind of access.
    _case(3, 70001, tags="edge", devices=CUDA),
    _case(2, 300000, dtype="bfloat16", exclusive=True, reverse=True, tags="edge", devices=CUDA),
    _case(4300001, tags="edge", devices=CUDA),
    # Errors of one sign grow with the row. Not in an interpreter, whose cumulative sum is a running one.
    _case(24, 3333, values="equal", tags="edge", devices=CUDA),
]
BENCHES = [
    _case(2**28, tags="bench", devices=CUDA, name="fp32-2^28"),
    _case(2**28, dtype="bfloat16", tags="bench", devices=CUDA, name="bf16-2^28"),
    _case(2**28, reverse=True, tags="bench", devices=CUDA, name="fp32-2^28-reverse"),
    _case(32768, 4096, dtype="bfloat16", tags="bench", devices=CUDA),
    _case(262144, 128, tags="bench", devices=CUDA),
    _case(512, 65536, tags="bench", devices=CUDA),
    _case(1024, 1024, tags="bench", devices=CPU),
]

OPERATOR = Operator(
    name="cumsum",
    summary="cumulative sum over the last dimension",
    formula="y_i = x_0 + ... + x_i",
    signature="cumsum(x)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x",),
    rows=("x",),
    save=lambda inputs, output: (),
    tolerance=Tolerance(
        chain=8.0,
        sum_length=free_order_terms,
        reason="the order of a row's sums is free: the library carries a float32 running sum from one piece "
        "of a row to the next, where eager's tree has log2(n) roundings; equal terms err to one side",
    ),
    path_scale=path_scale,
    properties=(
        Property(name="starts with the first element", holds=_starts_with_its_first),
        Property(name="ends with the row's sum", holds=_ends_with_the_sum),
    ),
    backward_note="the same scan of the gradient in the other direction; nothing is saved",
)
