"""Contracts of the five norms: references, argument checks, cases, costs and properties.

Layer norm: y = (s - mean s) / sqrt(variance s + eps) weight + bias. RMS norm: y = s / sqrt(mean s^2 + eps)
weight. Both are over the last dimension, with s = x, s = x + residual or s = dropout(x) + residual.

Sources: Ba, Kiros and Hinton, "Layer Normalization" (arXiv:1607.06450); Zhang and Sennrich, "Root Mean Square
Layer Normalization" (arXiv:1910.07467); Srivastava et al., "Dropout" (JMLR 2014).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Input, Operator, Property, WeftError, case
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate
from weft.ops._common.philox import check_dropout_arguments
from weft.ops._common.philox_dropout import keep_mask, keep_scale

DTYPES = ("float32", "float16", "bfloat16")
# A seed with bits in both words: a kernel that drops the high word fails.
SEED = 0x1234_5678_9ABC_DEF  # of the cases with dropout
DROPOUT_P = 0.1  # of the cases that name no other


@dataclass(frozen=True, kw_only=True)
class NormVariant:
    """Descriptor of one norm, from which every backend builds its implementation.

    ``centred``: layer norm, with a mean and a bias; otherwise RMS norm. ``residual``: a second tensor is
    added to x, and the sum s is an output too. ``dropout``: elements of x are dropped before the sum, by the
    parameters ``p`` and ``seed``. ``eps`` is the default.
    """

    name: str
    centred: bool
    residual: bool
    dropout: bool = False

    @property
    def eps(self) -> float:
        # torch's default for layer norm; Llama's for RMS norm, where torch's depends on the dtype.
        return 1e-5 if self.centred else 1e-6

    def unpack_inputs(self, inputs: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
        """Return (x, residual, weight, bias) of a call, with None for an input that the norm lacks."""
        residual = inputs[1] if self.residual else None
        weight = 2 if self.residual else 1
        return inputs[0], residual, inputs[weight], inputs[weight + 1] if self.centred else None

    def unpack_backward(self, tensors: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
        """Return (gradient of y, gradient of s, s, weight) of a backward call; without residual s is x."""
        if self.residual:
            grad, grad_s, s, weight = tensors
            return grad, grad_s, s, weight
        grad, x, weight = tensors
        return grad, None, x, weight

    def add_shared(self, backward: Any) -> Any:
        """Return ``backward`` with the function ``shared`` that returns the gradient of x and residual once.

        ``backward`` takes ``shares``: dresidual may be dx. Nothing is added to a norm without a residual, or
        with dropout, whose dx is another.
        """
        if self.shares_gradient:

            def shared(*tensors: Any, eps: float) -> tuple[Any, ...]:
                dx, _, *others = backward(*tensors, eps=eps, shares=True)
                return (dx, *others)

            backward.shared = shared
        return backward

    @property
    def shares_gradient(self) -> bool:
        """True if x and residual have the same gradient, that of their sum."""
        return self.residual and not self.dropout

    def select_gradients(self, dx: Any, dresidual: Any, dweight: Any, dbias: Any) -> tuple[Any, ...]:
        """Return the gradients of the inputs that the norm has, in the order of the inputs."""
        rows = (dx, dresidual) if self.residual else (dx,)
        return (*rows, dweight, dbias) if self.centred else (*rows, dweight)


LAYER_NORM_VARIANT = NormVariant(name="layer_norm", centred=True, residual=False)
RMS_NORM_VARIANT = NormVariant(name="rms_norm", centred=False, residual=False)
ADD_LAYER_NORM_VARIANT = NormVariant(name="add_layer_norm", centred=True, residual=True)
ADD_RMS_NORM_VARIANT = NormVariant(name="add_rms_norm", centred=False, residual=True)
DROPOUT_VARIANT = NormVariant(name="dropout_add_layer_norm", centred=True, residual=True, dropout=True)


def layer_norm64(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    diff = x - x.mean(-1, keepdim=True)
    return diff * torch.rsqrt(diff.square().mean(-1, keepdim=True) + eps) * weight + bias


def rms_norm64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _reference(norm: NormVariant) -> Callable[..., Any]:
    def reference(*inputs: torch.Tensor, eps: float, p: float = 0.0, seed: int = 0) -> Any:
        x, residual, weight, bias = norm.unpack_inputs(inputs)
        # torch.where, not a product with the mask: 0 * inf would be NaN at a dropped element.
        s = torch.where(keep_mask(x, p, seed), x * keep_scale(p), 0.0) if norm.dropout else x
        if residual is not None:
            s = s + residual
        y = rms_norm64(s, weight, eps) if bias is None else layer_norm64(s, weight, bias, eps)
        return (y, s) if norm.residual else y

    return reference


def check_arguments(norm: NormVariant, inputs: Sequence[Any], params: dict[str, Any]) -> None:
    """Raise :class:`WeftError` unless ``norm`` takes these inputs and parameters.

    Weight and bias have the size of the last dimension and one dtype, which is that of ``x`` or float32. A
    residual has the shape, dtype and device of ``x``.
    """
    where = norm.name
    x, residual, weight, bias = norm.unpack_inputs(inputs)
    vectors = {"weight": weight, "bias": bias} if norm.centred else {"weight": weight}
    validate.tensor(where, "x", x, DTYPES, dims=range(1, 65))
    if norm.residual:
        validate.tensor(where, "residual", residual, DTYPES, dims=range(1, 65))
        validate.same(where, "x and residual", x, residual)
        if x.shape != residual.shape:
            raise WeftError(f"{where}: residual's shape", expected=tuple(x.shape), got=tuple(residual.shape))
    for name, v in vectors.items():
        _check_vector(where, name, v, x)
    if len({v.dtype for v in vectors.values()}) > 1:
        got = " and ".join(str(v.dtype) for v in vectors.values())
        raise WeftError(f"{where}: weight and bias of one dtype", expected="one", got=got)
    eps = params.get("eps", norm.eps)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < 2**63:
        raise WeftError(f"{where}: eps", expected="a number of 0 or more, below 2^63", got=repr(eps))
    if norm.dropout:
        check_dropout_arguments(where, params["p"], params["seed"])


def _check_vector(where: str, name: str, v: Any, x: torch.Tensor) -> None:
    validate.tensor(where, name, v, DTYPES, dims=range(1, 2))
    if v.shape[0] != x.shape[-1]:
        expected = f"{x.shape[-1]}, the last dimension of x"
        raise WeftError(f"{where}: {name}'s size", expected=expected, got=v.shape[0])
    # float32 weights with 16-bit rows are what mixed-precision training has.
    if v.dtype not in (x.dtype, torch.float32):
        expected = f"{x.dtype}, as x has, or torch.float32"
        raise WeftError(f"{where}: {name}.dtype", expected=expected, got=v.dtype)
    validate.same_device(where, f"x and {name}", x, v)


def _case(
    norm: NormVariant,
    *shape: int,
    dtype: str = "float32",
    weights: str | None = None,
    layout: str = "contiguous",
    values: str = "normal",
    eps: float | None = None,
    p: float = DROPOUT_P,
    **options: Any,
) -> Case:
    """Build a case; its name says how it differs from a contiguous normal float32 one."""
    rows = ("x", "residual") if norm.residual else ("x",)
    inputs = [Input(name=n, shape=shape, dtype=dtype, layout=layout, values=values) for n in rows]
    for name in ("weight", "bias") if norm.centred else ("weight",):
        inputs.append(Input(name=name, shape=shape[-1:], dtype=weights or dtype))
    words = [SHORT[dtype], "x".join(map(str, shape))]
    words += [w for w in (layout, values) if w not in ("contiguous", "normal")]
    words += [f"{SHORT[weights]}-weights"] if weights else []
    words += [f"p{p}"] if p != DROPOUT_P else []
    params: dict[str, Any] = {"p": p, "seed": SEED} if norm.dropout else {}
    params["eps"] = norm.eps if eps is None else eps
    return case(*inputs, name="-".join(words), **params, **options)


CUDA: dict[str, Any] = {"devices": ("cuda",)}
EDGE: dict[str, Any] = {"tags": "edge"}
BENCH: dict[str, Any] = {"tags": "bench", **CUDA}
CPU_BENCH: dict[str, Any] = {"tags": "bench", "devices": ("cpu",)}


def _cases(norm: NormVariant) -> tuple[Case, ...]:
    """Build the cases of a norm without dropout. Each kernel and each path through it has a row length."""

    def new(*shape: int, **options: Any) -> Case:
        return _case(norm, *shape, **options)

    small = [
        *(new(7, 129, dtype=d) for d in DTYPES),
        new(5, 136, dtype="float16", weights="float32"),
        new(24, 64, values="rising"),
        *([new(24, 200, values="offset")] if norm.centred else []),
        new(24, 64, values="outliers"),
        new(24, 64, values="tiny", eps=1e-3),
        new(15, 67, values="special", **EDGE),
        new(2, 5, 65, layout="transposed", **EDGE),
        new(5, 136, layout="expanded", **EDGE),
        new(1031, **EDGE),
        new(0, 5, **EDGE),
        new(1, 7, **EDGE),
    ]
    large = [
        new(2, 9000, **EDGE),
        new(2, 33000, **EDGE),
        new(1030, 264, dtype="float16", **EDGE, **CUDA),
        new(301, 5000, **EDGE, **CUDA),
        new(300, 1024, dtype="bfloat16", weights="float32", **EDGE, **CUDA),
        new(270, 16384, dtype="bfloat16", **EDGE, **CUDA),
        new(135, 65536, dtype="bfloat16", **EDGE, **CUDA),
        new(33, 40000, dtype="bfloat16", layout="shifted", **EDGE, **CUDA),
    ]
    shapes = ((32768, 1024), (32768, 4096), (8192, 16384), (4096, 65536))
    timed = [
        *(new(*s, dtype="bfloat16", **BENCH) for s in shapes[: 3 if norm.residual else 4]),
        new(32768, 4096, **BENCH),
        new(512, 1024, dtype="bfloat16", **BENCH),
        new(1024, 1024, **CPU_BENCH),
    ]
    return (*small, *large, *timed)


def _dropout_cases(norm: NormVariant) -> tuple[Case, ...]:
    def new(*shape: int, **options: Any) -> Case:
        return _case(norm, *shape, **options)

    return (
        *(new(7, 132, dtype=d) for d in DTYPES),
        new(5, 129),
        new(5, 136, dtype="float16", weights="float32", p=0.5),
        new(24, 64, values="offset"),
        new(6, 64, p=0.0),
        new(6, 64, p=1.0),
        new(2, 17, 20, layout="transposed", **EDGE),
        new(0, 5, **EDGE),
        new(3, 1, **EDGE),
        new(31, 67, values="nan", **EDGE),
        new(2, 9000, **EDGE),
        new(301, 1000, dtype="bfloat16", **EDGE, **CUDA),
        new(1030, 4096, dtype="bfloat16", **EDGE, **CUDA),
        new(33, 40001, dtype="bfloat16", **EDGE, **CUDA),
        *(new(*s, dtype="bfloat16", **BENCH) for s in ((65536, 768), (32768, 1024), (32768, 4096))),
        new(32768, 1024, **BENCH),
        new(256, 1024, **CPU_BENCH),
    )


def _cost(c: Case, direction: str) -> Cost:
    """Return the compulsory bytes.

    The forward reads x and the vectors and writes y. The backward reads the gradient, x and the weight, and
    writes a gradient for each input. A residual adds one tensor read and one written to both.
    """
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


def _mean_share(y: torch.Tensor, *inputs: torch.Tensor, eps: float) -> float:
    """Return the largest |sum((y - bias) / weight)| of a row as a share of what rounding allows.

    Allowed are the rounding of each y and the rounding of the mean, which shifts the whole row.
    """
    *terms, weight, bias = inputs
    columns = y.shape[-1]
    if y.numel() == 0:
        return 0.0
    single, worst = torch.finfo(torch.float32).eps, 0.0
    split = max(1, (1 << 25) // columns)  # rows at a time, so that float64 copies fit in memory
    chunks = zip(*(v.reshape(-1, columns).split(split) for v in (y, *terms)), strict=True)
    for y_chunk, *rows in chunks:
        x = sum((r.double() for r in rows), torch.zeros((), dtype=torch.float64, device=y.device))
        deviation = (x.var(-1, correction=0) + eps).sqrt()
        row_sum = _normalised(y_chunk, weight, bias).sum(-1).abs()
        unit = torch.finfo(y.dtype).eps * y_chunk.double().abs() + 4 * single * (1 + bias.double().abs())
        # A mean rounded to float32, or a sum rounded to the dtype, shifts the whole row.
        shift = 4 * single * x.abs().amax(-1) / deviation
        if len(rows) > 1:
            shift = shift + torch.finfo(y.dtype).eps * x.abs().amax(-1) / deviation
        share = row_sum / ((unit / weight.double().abs()).sum(-1) + columns * shift)
        share = share[share.isfinite()]
        worst = max(worst, float(share.amax()) if share.numel() else 0.0)
    return worst


def _mean_square_share(y: torch.Tensor, *inputs: torch.Tensor, eps: float) -> float:
    """Return the largest excess over 1 of the mean square of y / weight, as a share of what rounding allows.

    The mean square is 1 at most: eps only makes it smaller.
    """
    if y.numel() == 0:
        return 0.0
    worst, info = 0.0, torch.finfo(y.dtype)
    for chunk in y.reshape(-1, y.shape[-1]).split(max(1, (1 << 26) // y.shape[-1])):
        xhat = _normalised(chunk, inputs[-1], None)
        # Rounding to a subnormal may add this much to an element, where the weight is small.
        subnormal = info.smallest_normal * info.eps / inputs[-1].double().abs()
        excess = xhat.square().mean(-1) - 1
        allowed = 4 * info.eps + 1e-6 + (2 * xhat.abs() * subnormal + subnormal.square()).mean(-1)
        share = (excess / allowed)[excess.isfinite()]
        worst = max(worst, float(share.amax()) if share.numel() else 0.0)
    return worst


ZERO_MEAN = Property(name="normalised rows have no mean", holds=_mean_share)
UNIT_MEAN_SQUARE = Property(name="a normalised row's mean square is 1 at most", holds=_mean_square_share)


def _save(norm: NormVariant) -> Callable[..., tuple[Any, ...]]:
    """Return the function that selects what the backward needs: s (x, or an output) and the weight.

    The statistics are recomputed: the backward must read s anyway.
    """

    def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
        return (output[1], inputs[2]) if norm.residual else inputs[:2]

    return save


def _operator(norm: NormVariant, **texts: str) -> Operator:
    def validate_call(*inputs: Any, **params: Any) -> None:
        check_arguments(norm, inputs, params)

    properties = (ZERO_MEAN,) if norm.centred else (UNIT_MEAN_SQUARE,)
    return Operator(
        name=norm.name,
        reference=_reference(norm),
        cases=_dropout_cases(norm) if norm.dropout else _cases(norm),
        cost=_cost,
        validate=validate_call,
        dtypes=DTYPES,
        differentiable=norm.select_gradients("x", "residual", "weight", "bias"),
        differentiable_outputs=2 if norm.residual else 1,
        # A dropped element depends on its place in the whole batch.
        rows=() if norm.dropout else ("x", "residual") if norm.residual else ("x",),
        save=_save(norm),
        properties=() if norm.dropout else properties,
        **texts,  # type: ignore[arg-type]
    )


LAYER_NORM = _operator(
    LAYER_NORM_VARIANT,
    summary="layer norm over the last dimension",
    formula="y = (x - mean) / sqrt(variance + eps) weight + bias",
    signature="layer_norm(x, weight, bias, eps=1e-5)",
    backward_note="from x and the weight; mean and deviation recomputed",
)
RMS_NORM = _operator(
    RMS_NORM_VARIANT,
    summary="RMS norm over the last dimension",
    formula="y = x / sqrt(mean x^2 + eps) weight",
    signature="rms_norm(x, weight, eps=1e-6)",
    backward_note="from x and the weight; the deviation recomputed",
)
ADD_LAYER_NORM = _operator(
    ADD_LAYER_NORM_VARIANT,
    summary="residual added, then layer norm",
    formula="s = x + residual; y = (s - mean s) / sqrt(variance s + eps) weight + bias",
    signature="add_layer_norm(x, residual, weight, bias, eps=1e-5)",
    backward_note="from the sum s, with the gradients of y and of s; mean and deviation recomputed",
)
ADD_RMS_NORM = _operator(
    ADD_RMS_NORM_VARIANT,
    summary="residual added, then RMS norm",
    formula="s = x + residual; y = s / sqrt(mean s^2 + eps) weight",
    signature="add_rms_norm(x, residual, weight, eps=1e-6)",
    backward_note="from the sum s, with the gradients of y and of s; the deviation recomputed",
)
DROPOUT_ADD_LAYER_NORM = _operator(
    DROPOUT_VARIANT,
    summary="dropout, residual added, then layer norm",
    formula="s = dropout(x) + residual; y = (s - mean s) / sqrt(variance s + eps) weight + bias",
    signature="dropout_add_layer_norm(x, residual, weight, bias, p=0.1, seed=0, eps=1e-5)",
    backward_note="from the sum s and the seed, with the gradients of y and of s",
)
