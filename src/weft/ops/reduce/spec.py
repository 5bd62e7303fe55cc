"""Reductions along neighbouring dimensions: ``reduce`` gives a value, ``argreduce`` the index of one.

A tensor is outer x n x inner: the n elements along the reduced dimensions, between the dimensions before them
and those after. The error of a sum follows from its condition: Higham, "The accuracy of floating point
summation", SIAM J. Sci. Comput. 14 (1993). A log-sum-exp is taken from the largest element, so that no
exponential overflows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Input, Operator, Property, Tolerance, WeftError, case
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate

OPS = ("sum", "mean", "amax", "amin", "logsumexp")
ARGUMENT_OPS = ("argmax", "argmin")
DTYPES = ("float32", "float16", "bfloat16")
INDEXED_DTYPES = (*DTYPES, "int32")
NEEDS_ELEMENTS = ("amax", "amin", *ARGUMENT_OPS)  # have no answer for n = 0


def extents(shape: Sequence[int], first: int, last: int) -> tuple[int, int, int]:
    """Return outer, n and inner of a shape that is reduced along the dimensions ``first`` to ``last``."""
    return math.prod(shape[:first]), math.prod(shape[first : last + 1]), math.prod(shape[last + 1 :])


def kept_shape(shape: Sequence[int], first: int, last: int) -> tuple[int, ...]:
    """Return the shape of the result."""
    return (*shape[:first], *shape[last + 1 :])


def dims(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first, last + 1))


def reference(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    """Compute torch's own reduction, whose float64 sums are far more accurate than every tolerance."""
    function = torch.logsumexp if op == "logsumexp" else getattr(torch, op)
    return function(x, dims(first, last))  # type: ignore[no-any-return]


def first_best(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    """Return the index of the first NaN, or else of the first of the largest or smallest elements."""
    n = extents(x.shape, first, last)[1]
    flat = x.flatten(first, last)
    best = flat.amax(first, keepdim=True) if op == "argmax" else flat.amin(first, keepdim=True)
    is_best = (flat == best) | (flat.isnan() & best.isnan())
    index = torch.arange(n, device=x.device).view(n, *[1] * (x.dim() - last - 1))
    return torch.where(is_best, index, n).amin(first)


def normalized_dims(where: str, dim: Any, rank: int) -> tuple[int, int]:
    """Return the first and the last dimension; raise :class:`WeftError` for dimensions with no answer."""
    asked = dim if isinstance(dim, tuple | list) else (dim,)
    expected = f"an int from {-rank} to {rank - 1}, or neighbouring ones"
    if not asked or not all(isinstance(d, int) and not isinstance(d, bool) for d in asked):
        raise WeftError(f"{where}: dim", expected=expected, got=f"{dim!r:.80}")
    if not all(-rank <= d < rank for d in asked):
        raise WeftError(f"{where}: dim", expected=expected, got=f"{dim!r:.80}")
    order = sorted(d % rank for d in asked)
    if order != list(range(order[0], order[-1] + 1)):
        hint = "x.movedim(...) brings dimensions together"
        raise WeftError(f"{where}: dim", expected="each dimension once, without gaps", got=dim, hint=hint)
    return order[0], order[-1]


def _check(where: str, ops: tuple[str, ...], x: Any, op: Any, first: Any, last: Any) -> None:
    known = DTYPES if where == "reduce" else INDEXED_DTYPES
    validate.tensor(where, "x", x, known, dims=range(1, 65))
    validate.one_of(f"{where}: op", op, ops)
    if not all(isinstance(d, int) for d in (first, last)) or not 0 <= first <= last < x.dim():
        raise WeftError(f"{where}: dim", expected=f"dimensions of {tuple(x.shape)}", got=(first, last))
    if op in NEEDS_ELEMENTS and extents(x.shape, first, last)[1] == 0:
        expected = f"at least one element along the reduced dimensions of {tuple(x.shape)}"
        raise WeftError(f"{where}: {op}", expected=expected, got="none")


def check_arguments(x: Any, *, op: Any, first: Any, last: Any) -> None:
    _check("reduce", OPS, x, op, first, last)


def check_indexed_arguments(x: Any, *, op: Any, first: Any, last: Any) -> None:
    _check("argreduce", ARGUMENT_OPS, x, op, first, last)
    if torch.is_grad_enabled() and x.requires_grad:
        raise WeftError(
            "argreduce has no gradient",
            expected="an input without requires_grad, or torch.no_grad()",
            got="an input that requires a gradient",
            hint="x.detach()",
        )


def save(
    inputs: tuple[Any, ...], output: torch.Tensor, *, op: str, first: int, last: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Size]:
    """Save the input only where the gradient depends on it; the output stands in its place elsewhere."""
    (x,) = inputs
    return (output if op in ("sum", "mean") else x), output, x.shape


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    shape: Sequence[int],
    *,
    op: str,
    first: int,
    last: int,
) -> tuple[torch.Tensor]:
    """Return the gradient by torch, in float32, rounded once.

    sum and mean: a view of stride 0 along the reduced dimensions. amax and amin: equal shares for all
    elements that equal the result, as torch. logsumexp: softmax(x), from x alone.
    """
    outer, n, inner = extents(shape, first, last)
    wide = grad.reshape(outer, 1, inner)
    if op in ("sum", "mean"):
        if op == "mean":
            wide = (wide.float() / n).to(grad.dtype)
        view = wide.expand(outer, n, inner).reshape(shape) if inner and outer else grad.new_empty(shape)
        # Along one element the view would be the caller's own gradient.
        return (view.clone() if n == 1 and op == "sum" else view,)
    x3 = x.reshape(outer, n, inner)
    if op == "logsumexp":
        scores = x3.float()
        # As a softmax: exp(x - y) has the rounding of y, of which a large y makes a large relative error.
        largest = scores.amax(1, keepdim=True) if n else scores.new_zeros(outer, 1, inner)
        weights = (scores - largest.masked_fill(largest.abs() == torch.inf, 0.0)).exp_()
        share = weights / weights.sum(1, keepdim=True)
        return ((share * wide.float()).to(grad.dtype).reshape(shape),)
    is_result = x3 == y.reshape(outer, 1, inner)
    share = (wide * is_result).float() / is_result.sum(1, keepdim=True)
    return (share.to(grad.dtype).reshape(shape),)


def cost(c: Case, direction: str) -> Cost:
    """Count the input once and the results once; a gradient that is only a view writes nothing."""
    (x,) = c.inputs
    op, first, last = str(c.params["op"]), int(str(c.params["first"])), int(str(c.params["last"]))
    outer, _, inner = extents(x.shape, first, last)
    result = outer * inner * (8 if op in ARGUMENT_OPS else ITEMSIZE[x.dtype])
    if direction == FORWARD:
        return Cost(read=x.nbytes, written=result)
    if op in ("sum", "mean"):
        return Cost(read=result, written=0 if op == "sum" else result)
    return Cost(read=x.nbytes + result, written=x.numel * ITEMSIZE[x.dtype])


def scale(x: torch.Tensor, *, op: str, first: int, last: int) -> torch.Tensor:
    """Return the size of the terms of each result, below which a result may be by cancellation."""
    along = dims(first, last)
    y = reference(x, op=op, first=first, last=last)
    n = extents(x.shape, first, last)[1]
    if op in ("sum", "mean"):
        norm = torch.linalg.vector_norm(x, dim=along)
        return torch.maximum(y.abs(), norm if op == "sum" else norm / n)
    if op == "logsumexp" and n:
        # The largest element and the logarithm of a sum are added: each is rounded at its own size.
        return torch.maximum(y.abs(), x.amax(along).abs().clamp(min=math.log(n)))
    return y.abs()


def sum_length(c: Case) -> int:
    return extents(c.inputs[0].shape, int(str(c.params["first"])), int(str(c.params["last"])))[1]


def _is_between(y: torch.Tensor, x: torch.Tensor, *, op: str, first: int, last: int) -> float:
    """Return how far results are outside of what the smallest and largest elements allow.

    The unit is the rounding error that is allowed. Rows with NaN or Inf are left out, and counted by the
    check itself.
    """
    _, n, _ = extents(x.shape, first, last)
    if n == 0 or y.numel() == 0:
        return 0.0
    along = dims(first, last)
    low, high = x.double().amin(along), x.double().amax(along)
    slack = torch.maximum(low.abs(), high.abs())
    if op == "sum":
        low, high, slack = low * n, high * n, slack * n
    elif op == "logsumexp":
        low = high  # at least the largest, and at most log(n) above it
        high, slack = high + math.log(n), slack + math.log(n)
    elif op in ("amax", "amin"):
        low = high = high if op == "amax" else low
    got = y.double()
    allowed = 16 * torch.finfo(y.dtype).eps * slack + 1e-300
    if op in ("amax", "amin"):
        allowed = torch.full_like(allowed, 1e-300)  # an element of x, unrounded
    finite = got.isfinite() & low.isfinite() & high.isfinite()
    outside = torch.maximum(got - high, low - got).clamp(min=0.0) / allowed
    return float(torch.where(finite, outside, 0.0).amax())


def _names_a_best(index: torch.Tensor, x: torch.Tensor, *, op: str, first: int, last: int) -> float:
    """Return infinity unless each index is in range and names an element that none exceeds."""
    if index.numel() == 0:
        return 0.0
    flat = x.flatten(first, last)
    if not bool(((index >= 0) & (index < flat.shape[first])).all()):
        return math.inf
    got = flat.gather(first, index.unsqueeze(first)).squeeze(first)
    best = flat.amax(first) if op == "argmax" else flat.amin(first)
    return 0.0 if bool(((got == best) | (got.isnan() & best.isnan())).all()) else math.inf


# ---- Cases


def _draw(c: Case, seed: int, device: str) -> list[torch.Tensor]:
    """Generate integers with many ties; the extremes of int32 are among them."""
    (spec,) = c.inputs
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randint(-9, 10, spec.shape, generator=generator, device=device, dtype=torch.int32)
    extremes = torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32, device=device)
    choice = torch.randint(0, 40, spec.shape, generator=generator, device=device)
    return [torch.where(choice < 2, extremes[choice.clamp(max=1)], x)]


def _case(
    *shape: int,
    op: str = "sum",
    dim: int | tuple[int, int] = -1,
    dtype: str = "float32",
    layout: str = "contiguous",
    values: str = "normal",
    **more: Any,
) -> Case:
    """Return a case named like ``fp32-5x257-sum-dim0``, ``bf16-3x4x5-amax-dim0to1-special``."""
    first, last = (d % len(shape) for d in (dim if isinstance(dim, tuple) else (dim, dim)))
    x = Input(name="x", shape=shape, dtype=dtype, layout=layout, values=values)
    along = f"dim{first}" if first == last else f"dim{first}to{last}"
    words = [SHORT.get(dtype, dtype), more.pop("size", "x".join(map(str, shape))), op, along]
    words += [w for w in (layout, values) if w not in ("contiguous", "normal")]
    plain = case(x, name="-".join(words), op=op, first=first, last=last, **more)
    return replace(plain, draw=partial(_draw, plain)) if dtype == "int32" else plain


def _public(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``weft.ops.reduce``, which takes one ``dim``."""
    rest = {k: v for k, v in arguments.items() if k not in ("first", "last")}
    return {**rest, "dim": dims(arguments["first"], arguments["last"])}


CPU, CUDA = ("cpu",), ("cuda",)
VIEWS = ("transposed", "sliced", "expanded", "shifted")
BENCH: dict[str, Any] = {"tags": "bench", "devices": CUDA}


def _shared_cases(op: str, dtypes: tuple[str, ...]) -> list[Case]:
    """Return the cases that every operation has: along the last, the first and inner dimensions."""
    return [
        *(_case(3, 129, op=op, dtype=d) for d in dtypes),
        *(_case(130, 24, op=op, dim=0, dtype=d) for d in dtypes),
        _case(5, 37, 8, op=op, dim=1),
        _case(4, 3, 5, 6, op=op, dim=(1, 2)),
        *(_case(*s, op=op, tags="edge") for s in ((1,), (7,), (0, 5), (9, 1))),
        _case(21, 259, op=op, values="special", tags="edge"),
        _case(259, 21, op=op, dim=0, values="special", tags="edge"),
        _case(9, 260, op=op, values="equal", tags="edge"),
    ]


CHECKS = [
    *(c for op in OPS for c in _shared_cases(op, DTYPES if op in ("sum", "amax") else DTYPES[::2])),
    # A running sum of ones in bfloat16 stops at 256; equal terms have rounding errors of one sign.
    _case(3, 1000, dtype="bfloat16", values="ones"),
    _case(1000, 16, dim=0, dtype="bfloat16", values="ones"),
    _case(2, 3001, op="mean", values="offset"),
    _case(2, 3001, op="logsumexp", values="large"),
    _case(700, 9, op="logsumexp", dim=0, values="rising"),
    _case(9, 200, op="amin", values="outliers"),
    *(_case(3, 0, op=op, tags="edge") for op in ("sum", "mean", "logsumexp")),
    *(_case(0, 4, op=op, dim=0, tags="edge") for op in ("sum", "logsumexp")),
    *(_case(33, 65, op="sum", layout=k, tags="edge") for k in VIEWS),
    *(_case(33, 65, op="amax", dim=0, layout=k, tags="edge") for k in VIEWS),
    _case(33, 65, op="logsumexp", values="neginf", tags="edge"),
    # Rows in several parts; columns in several parts; each kind of row.
    *(_case(3, 700001, op=op, tags="edge", devices=CUDA) for op in OPS),
    *(_case(300001, 8, op=op, dim=0, dtype="bfloat16", tags="edge", devices=CUDA) for op in OPS),
    *(_case(4001, n, op="sum", tags="edge", devices=CUDA) for n in (3, 40, 600, 5001)),
    _case(7, 999, 33, op="amax", dim=1, tags="edge", devices=CUDA),
    # Past the range of a 32-bit index.
    _case(3, 2**30, dtype="bfloat16", op="amax", tags="edge", devices=CUDA),
    _case(2**25 + 1, 64, dtype="bfloat16", dim=0, tags="edge", devices=CUDA),
]  # fmt: skip
BENCHES = [
    *(_case(16384, 16384, op=op, dim=d, **BENCH) for op in ("sum", "amax") for d in (0, 1)),
    *(_case(16384, 16384, op=op, dim=d, dtype="bfloat16", **BENCH)
      for op in ("sum", "amax", "logsumexp") for d in (0, 1)),
    _case(64, 4096, 1024, dim=1, dtype="bfloat16", **BENCH),
    _case(2**22, 64, **BENCH),
    _case(2**22, 64, dim=0, **BENCH),
    _case(4, 2**26, **BENCH),
    *(_case(1024, 1024, op=op, dim=d, tags="bench", devices=CPU) for op in ("sum", "amax") for d in (0, 1)),
]  # fmt: skip
INDEXED = [
    *(c for op in ARGUMENT_OPS for c in _shared_cases(op, INDEXED_DTYPES)),
    *(_case(33, 65, op="argmax", dim=d, layout=k, tags="edge") for k in VIEWS for d in (0, 1)),
    _case(9, 300, op="argmin", values="neginf", tags="edge"),
    _case(40, 64, op="argmax", dim=0, values="ones", dtype="bfloat16"),
    *(_case(3, 700001, op=op, tags="edge", devices=CUDA) for op in ARGUMENT_OPS),
    _case(300001, 8, op="argmax", dim=0, dtype="bfloat16", tags="edge", devices=CUDA),
    _case(2, 2**31 + 8, op="argmax", dtype="bfloat16", tags="edge", devices=CUDA),
]  # fmt: skip
INDEXED_BENCHES = [
    *(_case(16384, 16384, op="argmax", dim=d, dtype=t, **BENCH)
      for t in ("float32", "bfloat16") for d in (0, 1)),
    _case(64, 128256, op="argmax", dtype="bfloat16", **BENCH),
    *(_case(1024, 1024, op="argmax", dim=d, tags="bench", devices=CPU) for d in (0, 1)),
]  # fmt: skip

REDUCE = Operator(
    name="reduce",
    summary="sum, mean, largest, smallest or log-sum-exp along neighbouring dimensions",
    formula="y_oi = op over k of x_oki",
    signature="reduce(x, op, dim)",
    reference=reference,
    cases=(*CHECKS, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x",),
    save=save,
    save_gets_params=True,
    tolerance=Tolerance(
        chain=8.0,
        sum_length=sum_length,
        reason="a sum may be added in any order, and a library adds a long row in a few lanes",
    ),
    properties=(Property(name="within the range of the elements", holds=_is_between),),
    scale=scale,
    scale_reason="a sum may rightly be near zero; the norm of its terms is its RMS over random signs",
    public_arguments=_public,
    backward_note="sum and mean: a view; amax and amin: equal shares among ties; logsumexp: softmax(x)",
)
ARGREDUCE = Operator(
    name="argreduce",
    summary="index of the first largest or smallest element along neighbouring dimensions",
    formula="y_oi = first k with x_oki = max over k of x_oki",
    signature="argreduce(x, op, dim)",
    reference=first_best,
    cases=(*INDEXED, *INDEXED_BENCHES),
    cost=cost,
    validate=check_indexed_arguments,
    dtypes=INDEXED_DTYPES,
    properties=(Property(name="names one of the best elements", holds=_names_a_best),),
    public_arguments=_public,
)
