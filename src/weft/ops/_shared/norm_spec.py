"""What the norms' contracts share: references, cases, costs, and what is refused."""

from __future__ import annotations

from typing import Any

import torch

from weft.core import FORWARD, YES, Case, Cost, Input, Property, Support, WeftError, case, no
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._shared import validate

DTYPES = ("float32", "float16", "bfloat16")


def layer_norm64(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    left = x - x.mean(-1, keepdim=True)
    return left * torch.rsqrt(left.square().mean(-1, keepdim=True) + eps) * weight + bias


def rms_norm64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def check(
    where: str,
    x: Any,
    vectors: dict[str, Any],
    eps: Any,
    residual: Any = None,
    added: bool = False,
) -> None:
    """Raise :class:`WeftError` unless ``x`` can be normalised with these vectors.

    ``vectors`` are the weight and, where there is one, the bias: of the last dimension's size, one
    dtype, which is ``x``'s or float32. A ``residual``, where one is ``added``, is as ``x`` is.
    """
    validate.tensor(where, "x", x, DTYPES, dims=range(1, 65))
    if added:
        validate.tensor(where, "residual", residual, DTYPES, dims=range(1, 65))
        validate.same(where, "x and residual", x, residual)
        if x.shape != residual.shape:
            raise WeftError(
                f"{where}: residual's shape", expected=tuple(x.shape), got=tuple(residual.shape)
            )
    for name, v in vectors.items():
        validate.tensor(where, name, v, DTYPES, dims=range(1, 2))
        if v.shape[0] != x.shape[-1]:
            raise WeftError(
                f"{where}: {name}'s size",
                expected=f"{x.shape[-1]}, the last dimension of x",
                got=v.shape[0],
            )
        if v.dtype not in (x.dtype, torch.float32):
            raise WeftError(
                f"{where}: {name}.dtype",
                expected=f"{x.dtype}, as x has, or torch.float32",
                got=v.dtype,
            )
        if v.device != x.device:
            raise WeftError(f"{where}: x and {name} on one device", expected=x.device, got=v.device)
    if len({v.dtype for v in vectors.values()}) > 1:
        got = " and ".join(str(v.dtype) for v in vectors.values())
        raise WeftError(f"{where}: weight and bias of one dtype", expected="one", got=got)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < float("inf"):
        raise WeftError(f"{where}: eps", expected="a finite number of 0 or more", got=repr(eps))


def supports_library(case: Case, device: str) -> Support:
    """What F.rms_norm and F.layer_norm take."""
    if any(i.values == "offset" for i in case.inputs):
        return no("F.layer_norm's backward is 1.2 times past the tolerance far from zero")
    if device == "cuda" and any(i.values == "special" for i in case.inputs):
        return no("F.rms_norm on a GPU answers NaN all over a row that holds an Inf")
    return YES


def cases(bias: bool, added: bool, eps: float) -> tuple[Case, ...]:
    """Few and strong: see each one's name."""

    def of(
        *shape: int,
        dtype: str = "float32",
        weights: str | None = None,
        layout: str = "contiguous",
        values: str = "normal",
        eps: float = eps,
        **more: Any,
    ) -> Case:
        rows = ("x", "residual") if added else ("x",)
        made = [Input(name=n, shape=shape, dtype=dtype, layout=layout, values=values) for n in rows]
        for name in ("weight", "bias") if bias else ("weight",):
            made.append(Input(name=name, shape=shape[-1:], dtype=weights or dtype))
        words = [SHORT[dtype], "x".join(map(str, shape))]
        words += [w for w in (layout, values) if w not in ("contiguous", "normal")]
        words += [f"{SHORT[weights]}-weights"] if weights else []
        return case(*made, name="-".join(words), eps=eps, **more)

    cuda: dict[str, Any] = {"devices": ("cuda",)}
    bench: dict[str, Any] = {"tags": "bench", **cuda}
    edge: dict[str, Any] = {"tags": "edge"}
    long = [
        of(2, 9000, **edge),
        of(2, 33000, **edge),
        of(1030, 264, dtype="float16", **edge, **cuda),
        of(301, 5000, **edge, **cuda),
        of(300, 1024, dtype="bfloat16", weights="float32", **edge, **cuda),
        of(270, 16384, dtype="bfloat16", **edge, **cuda),
        of(135, 65536, dtype="bfloat16", **edge, **cuda),
        of(33, 40000, dtype="bfloat16", layout="shifted", **edge, **cuda),
    ]
    small = [
        *(of(7, 129, dtype=d) for d in DTYPES),
        of(5, 136, dtype="float16", weights="float32"),
        of(24, 64, values="rising"),
        *([of(24, 200, values="offset")] if bias else []),
        of(24, 64, values="outliers"),
        of(24, 64, values="tiny", eps=1e-3),
        of(15, 67, values="special", **edge),
        of(2, 5, 65, layout="transposed", **edge),
        of(5, 136, layout="expanded", **edge),
        of(1031, **edge),
        of(0, 5, **edge),
        of(1, 7, **edge),
    ]
    shapes = ((32768, 1024), (32768, 4096), (8192, 16384), (4096, 65536))
    timed = [
        *(of(*s, dtype="bfloat16", **bench) for s in shapes[: 3 if added else 4]),
        of(32768, 4096, **bench),
        of(512, 1024, dtype="bfloat16", **bench),
        of(1024, 1024, tags="bench", devices=("cpu",)),
    ]
    return (*small, *long, *timed)


def cost(c: Case, direction: str) -> Cost:
    """Forward reads x and the weights and writes y; backward reads the gradient, x and the weight,
    and writes a gradient for each input. A residual adds a tensor read and one written to both."""
    rows = [i for i in c.inputs if len(i.shape) > 1 or i.name in ("x", "residual")]
    x, vectors = rows[0], [i for i in c.inputs if i not in rows]
    size = x.numel * ITEMSIZE[x.dtype]
    if direction == FORWARD:
        return Cost(read=sum(i.nbytes for i in c.inputs), written=len(rows) * size)
    read = (len(rows) + 1) * size + vectors[0].nbytes
    return Cost(read=read, written=len(rows) * size + sum(i.nbytes for i in vectors))


def _normalised(y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    wide = y.double().reshape(-1, y.shape[-1])
    return (wide if bias is None else wide - bias.double()) / weight.double()


def _no_mean(y: torch.Tensor, *inputs: torch.Tensor, eps: float) -> float:
    """(y - bias) / weight adds up to 0, but for what each y and the mean were rounded by."""
    *added, weight, bias = inputs
    columns = y.shape[-1]
    if y.numel() == 0:
        return 0.0
    single, worst = torch.finfo(torch.float32).eps, 0.0
    split = max(1, (1 << 25) // columns)
    parts = zip(*(v.reshape(-1, columns).split(split) for v in (y, *added)), strict=True)
    for part, *rows in parts:
        x = sum((r.double() for r in rows), torch.zeros((), dtype=torch.float64, device=y.device))
        deviation = (x.var(-1, correction=0) + eps).sqrt()
        off = _normalised(part, weight, bias).sum(-1).abs()
        unit = torch.finfo(y.dtype).eps * part.double().abs() + 4 * single * (
            1 + bias.double().abs()
        )
        # A mean that float32 rounded, or a sum that the dtype did, shifts the whole row.
        shift = 4 * single * x.abs().amax(-1) / deviation
        if len(rows) > 1:
            shift = shift + torch.finfo(y.dtype).eps * x.abs().amax(-1) / deviation
        share = off / ((unit / weight.double().abs()).sum(-1) + columns * shift)
        share = share[share.isfinite()]
        worst = max(worst, float(share.amax()) if share.numel() else 0.0)
    return worst


def _at_most_one(y: torch.Tensor, *inputs: torch.Tensor, eps: float) -> float:
    """y / weight has a mean square of 1 at most: eps only makes it smaller."""
    if y.numel() == 0:
        return 0.0
    worst, info = 0.0, torch.finfo(y.dtype)
    for part in y.reshape(-1, y.shape[-1]).split(max(1, (1 << 26) // y.shape[-1])):
        hat = _normalised(part, inputs[-1], None)
        # What rounding to a subnormal may add to an element, where the weight is small.
        lost = info.smallest_normal * info.eps / inputs[-1].double().abs()
        over = hat.square().mean(-1) - 1
        allowed = 4 * info.eps + 1e-6 + (2 * hat.abs() * lost + lost.square()).mean(-1)
        share = (over / allowed)[over.isfinite()]
        worst = max(worst, float(share.amax()) if share.numel() else 0.0)
    return worst


NO_MEAN = Property(name="normalised rows have no mean", holds=_no_mean)
AT_MOST_ONE = Property(name="a normalised row's mean square is 1 at most", holds=_at_most_one)
