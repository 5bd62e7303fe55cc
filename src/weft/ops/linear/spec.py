"""The contracts of the linear family: ``linear``, ``linear_gelu`` and ``linear_residual``.

    p = x W^T + b        summed in float32, with one rounding at the end of the epilogue
    linear: p            linear_gelu: gelu(p), tanh form        linear_residual: p + residual

A weight is (N, K), as ``torch.nn.Linear`` stores it; ``x`` is (..., K), and its leading dimensions
count as M rows. Source of GELU: arXiv:1606.08415.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Input, Operator, Tolerance, WeftError
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate

DTYPES = ("float32", "float16", "bfloat16")

TOLERANCE = Tolerance(
    c=6.0,
    baseline="torch",
    reason="the baseline is torch, because eager rounds once more; in fp32 the library splits K, and a "
    "single sum over K has a larger error (4.1 times, measured on a GPU)",
)


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x @ weight.t() + bias


def linear_gelu_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, keep: bool = True
) -> Any:
    pre = x @ weight.t() + bias
    # The textbook form: in float64 it needs no protection against overflow at the sizes of the cases.
    u = math.sqrt(2 / math.pi) * (pre + 0.044715 * pre**3)
    y = 0.5 * pre * (1 + torch.tanh(u))
    return (y, pre) if keep else y


def linear_residual_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    return x @ weight.t() + bias + residual


def check_linear(x: Any, weight: Any, bias: Any) -> None:
    """Raise :class:`WeftError` unless ``linear`` accepts these arguments."""
    _check_product("linear", x, weight, bias)


def check_linear_gelu(x: Any, weight: Any, bias: Any, *, keep: Any = True) -> None:
    """Raise :class:`WeftError` unless ``linear_gelu`` accepts these arguments."""
    _check_product("linear_gelu", x, weight, bias)
    check_flag("linear_gelu", "keep", keep)


def check_linear_residual(x: Any, weight: Any, bias: Any, residual: Any) -> None:
    """Raise :class:`WeftError` unless ``linear_residual`` accepts these arguments."""
    _check_product("linear_residual", x, weight, bias)
    validate.tensor("linear_residual", "residual", residual, DTYPES)
    validate.same("linear_residual", "x and residual", x, residual)
    shape = (*x.shape[:-1], weight.shape[0])
    if tuple(residual.shape) != shape:
        raise WeftError("linear_residual: residual.shape", expected=shape, got=tuple(residual.shape))


def check_flag(operator: str, name: str, value: Any) -> None:
    """Raise :class:`WeftError` unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise WeftError(f"{operator}: {name}", expected="True or False", got=repr(value))


def _check_product(operator: str, x: Any, weight: Any, bias: Any) -> None:
    for name, t, dims in (
        ("x", x, range(1, 65)),
        ("weight", weight, range(2, 3)),
        ("bias", bias, range(1, 2)),
    ):
        validate.tensor(operator, name, t, DTYPES, dims=dims)
    validate.same(operator, "x and weight", x, weight)
    validate.same(operator, "x and bias", x, bias)
    if x.shape[-1] != weight.shape[1]:
        raise WeftError(
            f"{operator}: the inner sizes",
            expected="x (..., K) and weight (N, K)",
            got=f"{tuple(x.shape)} and {tuple(weight.shape)}",
            hint="weight.t() transposes a (K, N) weight without a copy",
        )
    if bias.shape[0] != weight.shape[0]:
        raise WeftError(f"{operator}: bias.shape", expected=f"({weight.shape[0]},)", got=tuple(bias.shape))


def _save_factors(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """Save x and the weight; the backward needs neither the bias nor the residual."""
    return inputs[:2]


def _save_linear_gelu(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """Save x, the weight and the pre-activation; without ``keep`` the bias, to compute it again."""
    return (*inputs[:2], output[1] if isinstance(output, tuple) else inputs[2])


def sizes(c: Case) -> tuple[int, int, int]:
    """Return (M, N, K) of a case."""
    x, weight = c.inputs[:2]
    return math.prod(x.shape[:-1]), weight.shape[0], weight.shape[1]


def _product_cost(c: Case, products: int, read: int, written: int) -> Cost:
    """Return the cost of ``products`` products of 2 M N K FLOPs; ``read`` and ``written`` count elements."""
    m, n, k = sizes(c)
    item = ITEMSIZE[c.dtype]
    flops = 2.0 * products * m * n * k
    return Cost(read=read * item, written=written * item, flops=flops, rate=SHORT[c.dtype])


def _linear_cost(c: Case, direction: str) -> Cost:
    """Forward: one product. Backward: two, of the gradient with each factor, and dbias."""
    m, n, k = sizes(c)
    if direction == FORWARD:
        return _product_cost(c, 1, m * k + n * k + n, m * n)
    return _product_cost(c, 2, m * n + m * k + n * k, m * k + n * k + n)


def _linear_gelu_cost(c: Case, direction: str) -> Cost:
    """Cost: one product forward and two backward; without ``keep`` a third, for the pre-activation."""
    m, n, k = sizes(c)
    keep = bool(c.params.get("keep", True))
    factors = m * k + n * k
    if direction == FORWARD:
        return _product_cost(c, 1, factors + n, (1 + keep) * m * n)
    read = factors + m * n + (m * n if keep else n)
    return _product_cost(c, 2 if keep else 3, read, factors + n)


def _linear_residual_cost(c: Case, direction: str) -> Cost:
    """Forward: one product. Backward: two, dbias, and dresidual, a copy of the gradient."""
    m, n, k = sizes(c)
    if direction == FORWARD:
        return _product_cost(c, 1, m * k + n * k + n + m * n, m * n)
    return _product_cost(c, 2, m * n + m * k + n * k, m * k + n * k + n + m * n)


def make_case(
    rows: int | tuple[int, ...],
    n: int,
    k: int,
    dtype: str = "float32",
    *,
    residual: bool = False,
    layouts: tuple[str, str] = ("contiguous", "contiguous"),
    values: str = "normal",
    large: bool = False,
    tags: str = "check",
    devices: tuple[str, ...] = ("cpu", "cuda"),
    **params: object,
) -> Case:
    """Return a case named by dtype and M x N x K; ``layouts`` are those of x and of the weight.

    With ``large`` x is near 1e4, and the pre-activation is exact in float32.
    """
    lead = rows if isinstance(rows, tuple) else (rows,)
    parts = [SHORT[dtype], "x".join(map(str, (*lead, n, k)))]
    if layouts != ("contiguous", "contiguous"):
        parts.append("-".join(layouts))
    if values != "normal":
        parts.append(values)
    parts += ["large"] * large
    parts += [name if value else f"no-{name}" for name, value in params.items()]
    inputs = [
        Input(name="x", shape=(*lead, k), dtype=dtype, layout=layouts[0], values=values),
        Input(name="weight", shape=(n, k), dtype=dtype, layout=layouts[1]),
        Input(name="bias", shape=(n,), dtype=dtype),
    ]
    if residual:
        inputs.append(Input(name="residual", shape=(*lead, n), dtype=dtype, layout=layouts[0]))
    case = Case(
        name="-".join(parts),
        inputs=tuple(inputs),
        params=params,
        tags=frozenset({tags}),
        devices=devices,
    )
    return replace(case, draw=partial(_draw_large, case)) if large else case


def few_bits(values: torch.Tensor, step: float) -> torch.Tensor:
    """Round values to multiples of ``step``, a power of two.

    Float32 adds the products of two such tensors exactly, in any order, while a sum is below 2^24 products of
    their steps. GELU's slope at a small sum of large inexact products would be a matter of rounding.
    """
    return (values / step).round() * step


def _draw_large(case: Case, seed: int, device: str) -> list[torch.Tensor]:
    """Generate normal inputs of few bits, x 2^13 times as large."""
    generator = torch.Generator(device)
    generator.manual_seed(seed)
    x, weight, bias = (torch.randn(i.shape, generator=generator, device=device) for i in case.inputs)
    return [few_bits(x, 1 / 8) * 2.0**13, few_bits(weight, 1 / 8), few_bits(bias, 1 / 8)]


LINEAR = Operator(
    name="linear",
    summary="linear layer: product with a weight, plus bias",
    formula="y = x W^T + b",
    signature="linear(x, weight, bias=None)",
    reference=linear_reference,
    cases=(
        *(make_case(5, 16, 24, d) for d in DTYPES),
        *(make_case(35, 67, 41, d) for d in DTYPES),
        make_case((2, 17), 40, 72),
        make_case(40, 136, 40),
        make_case(1000, 1016, 1032, "float16", devices=("cuda",)),
        make_case(2100, 1160, 200, "bfloat16", devices=("cuda",)),
        *(make_case(*s, tags="edge") for s in ((0, 5, 3), (5, 3, 0))),
        make_case(40, 24, 16, layouts=("transposed", "sliced"), tags="edge"),
        make_case(19, 40, 33, values="special", tags="edge"),
        make_case(40, 72, 24, "bfloat16", layouts=("sliced", "transposed"), tags="edge"),
        make_case(65536, 2304, 768, "bfloat16", tags="bench", devices=("cuda",)),
        make_case(16384, 768, 3072, "bfloat16", tags="bench", devices=("cuda",)),
        make_case(16, 4096, 14336, "bfloat16", tags="bench", devices=("cuda",)),
        make_case(512, 512, 512, tags="bench", devices=("cpu",)),
    ),
    cost=_linear_cost,
    validate=check_linear,
    dtypes=DTYPES,
    differentiable=("x", "weight", "bias"),
    rows=("x",),
    save=_save_factors,
    tolerance=TOLERANCE,
    backward_note="dx = g W, dW = g^T x, db = sum of g over the rows",
)

# The parameter ``keep`` is part of the records' case names: the second output is the pre-activation,
# or with ``keep=False`` there is none and the backward computes it again by a product.
LINEAR_GELU = Operator(
    name="linear_gelu",
    summary="linear layer and GELU in one kernel",
    formula="pre = x W^T + b, y = gelu(pre)",
    signature="linear_gelu(x, weight, bias=None, return_pre_activation=False)",
    reference=linear_gelu_reference,
    cases=(
        *(make_case(5, 16, 24, d) for d in DTYPES),
        *(make_case(35, 67, 41, d) for d in DTYPES),
        make_case((2, 17), 40, 72),
        make_case(40, 136, 40),
        make_case(33, 72, 40, keep=False),
        make_case(19, 40, 24, large=True),
        make_case(1000, 1016, 1032, "float16", devices=("cuda",)),
        make_case(2100, 1160, 200, "bfloat16", devices=("cuda",)),
        make_case(2100, 1160, 200, "bfloat16", devices=("cuda",), keep=False),
        make_case(0, 5, 3, tags="edge"),
        make_case(19, 40, 33, values="special", tags="edge"),
        make_case(40, 24, 16, "float16", layouts=("transposed", "sliced"), tags="edge", keep=False),
        make_case(16384, 3072, 768, "bfloat16", tags="bench", devices=("cuda",)),
        make_case(65536, 3072, 768, "bfloat16", tags="bench", devices=("cuda",)),
        make_case(16384, 3072, 768, "bfloat16", tags="bench", devices=("cuda",), keep=False),
        make_case(512, 512, 512, tags="bench", devices=("cpu",)),
    ),
    cost=_linear_gelu_cost,
    validate=check_linear_gelu,
    dtypes=DTYPES,
    differentiable=("x", "weight", "bias"),
    rows=("x",),
    save=_save_linear_gelu,
    tolerance=TOLERANCE,
    backward_note="dpre = g gelu'(pre), dx = dpre W, dW = dpre^T x, db = sum of dpre over the rows",
)

LINEAR_RESIDUAL = Operator(
    name="linear_residual",
    summary="linear layer added to a residual",
    formula="y = x W^T + b + residual",
    signature="linear_residual(x, weight, bias, residual)",
    reference=linear_residual_reference,
    cases=(
        *(make_case(5, 16, 24, d, residual=True) for d in DTYPES),
        *(make_case(35, 67, 41, d, residual=True) for d in DTYPES),
        make_case((2, 17), 40, 72, residual=True),
        make_case(40, 136, 40, residual=True),
        make_case(1000, 1016, 1032, "float16", residual=True, devices=("cuda",)),
        make_case(2100, 1160, 200, "bfloat16", residual=True, devices=("cuda",)),
        *(make_case(*s, residual=True, tags="edge") for s in ((0, 5, 3), (5, 3, 0))),
        make_case(40, 24, 16, layouts=("transposed", "sliced"), residual=True, tags="edge"),
        make_case(19, 40, 33, values="special", residual=True, tags="edge"),
        make_case(16384, 768, 3072, "bfloat16", residual=True, tags="bench", devices=("cuda",)),
        make_case(512, 512, 512, residual=True, tags="bench", devices=("cpu",)),
    ),
    cost=_linear_residual_cost,
    validate=check_linear_residual,
    dtypes=DTYPES,
    differentiable=("x", "weight", "bias", "residual"),
    rows=("x", "residual"),
    save=_save_factors,
    tolerance=TOLERANCE,
    backward_note="dx = g W, dW = g^T x, db = sum of g over the rows, dresidual = g",
)
