"""Activations: references, cases and costs of GELU, ReLU, and GELU after a bias.

GELU is the tanh form that GPT-2 trains with: y = x/2 (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3).
Sources: Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv:1606.08415); Nair and Hinton, "Rectified
linear units improve restricted Boltzmann machines" (ICML 2010).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Input, Operator, Property, WeftError, case
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate
from weft.ops._common.gradient_scale import gelu_slope_terms, zero_nonfinite

# Elements of a float64 temporary: at the 2^31 elements of the largest case a whole one would be 17 GB.
CHUNK = 1 << 25
DTYPES = ("float32", "float16", "bfloat16")
CONTIGUOUS = ("contiguous", "contiguous")
SLOPE_CANCELS = "the terms of GELU's slope cancel near x = -0.75, and those of 1 - t^2 in the tail"


def gelu_reference(x: torch.Tensor) -> torch.Tensor:
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + torch.tanh(u))


def gelu_gradient_scale(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return |grad| times the terms of GELU's slope, computed in chunks."""
    sizes = torch.empty(x.numel(), dtype=x.dtype, device=x.device)
    chunks = zip(*(t.reshape(-1).split(CHUNK) for t in (grad, x, sizes)), strict=True)
    for grad_chunk, x_chunk, out in chunks:
        out.copy_(zero_nonfinite(grad_chunk.abs() * gelu_slope_terms(x_chunk)))
    return sizes.view(x.shape)


def check_gelu(x: Any) -> None:
    validate.tensor("gelu", "x", x, DTYPES)


def gelu_cost(c: Case, direction: str) -> Cost:
    """Forward reads x and writes y; backward reads the gradient and x and writes one gradient."""
    (x,) = c.inputs
    out = x.numel * ITEMSIZE[x.dtype]
    return Cost(read=x.nbytes + (0 if direction == FORWARD else out), written=out)


def _bounded(y: torch.Tensor, x: torch.Tensor) -> float:
    """Deviation from min(x, 0) - 0.17 <= gelu(x) <= max(x, 0), which holds for finite x."""
    worst, eps = 0.0, torch.finfo(y.dtype).eps
    for y_chunk, x_chunk in zip(y.reshape(-1).split(CHUNK), x.reshape(-1).split(CHUNK), strict=True):
        y64, x64 = y_chunk.double(), x_chunk.double()
        slack = eps * x64.abs() + 1e-6
        over = y64 - x64.clamp(min=0)
        under = x64.clamp(max=0).clamp(min=-0.1701) - y64
        deviation = torch.where(x64.isfinite(), torch.maximum(over, under) / slack, 0.0)
        worst = max(worst, float(deviation.amax()) if deviation.numel() else 0.0)
    return worst


def relu_reference(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def check_relu(x: Any) -> None:
    validate.tensor("relu", "x", x, DTYPES)


def _save_output(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """Save the output alone: the next layer saves it as well, so that it costs no memory."""
    return (output,)


def relu_cost(c: Case, direction: str) -> Cost:
    """Forward reads x and writes y; backward reads the gradient and y and writes one gradient."""
    (x,) = c.inputs
    out = x.numel * ITEMSIZE[x.dtype]
    return Cost(read=x.nbytes if direction == FORWARD else 2 * out, written=out)


def _exact(y: torch.Tensor, x: torch.Tensor) -> float:
    """Return 0 if each output is exactly x, or 0 where x is not positive; else 2 (ReLU rounds nothing)."""
    for y_chunk, x_chunk in zip(y.reshape(-1).split(CHUNK), x.reshape(-1).split(CHUNK), strict=True):
        expected = x_chunk.masked_fill(x_chunk <= 0, 0)
        if not bool(((y_chunk == expected) | (y_chunk.isnan() & x_chunk.isnan())).all()):
            return 2.0
    return 0.0


def bias_gelu_reference(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return gelu_reference(x + bias)


def bias_gelu_gradient_scale(
    grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return |grad| times the terms of GELU's slope for x, and for the bias the norm of these over the rows.

    The bias's gradient adds the rows of x's, and their rounding errors with them, which are independent.
    """
    terms = zero_nonfinite(grad.abs() * gelu_slope_terms(x + bias))
    return terms, torch.atleast_2d(terms).flatten(0, -2).square().sum(0).sqrt()


def check_bias_gelu(x: Any, bias: Any) -> None:
    validate.tensor("bias_gelu", "x", x, DTYPES, dims=range(1, 65))
    validate.tensor("bias_gelu", "bias", bias, DTYPES, dims=range(1, 2))
    validate.same("bias_gelu", "x and bias", x, bias)
    if bias.shape[0] != x.shape[-1]:
        raise WeftError(
            "bias_gelu: bias and x have different numbers of columns",
            expected=f"bias of shape ({x.shape[-1]},), as x has {x.shape[-1]} columns",
            got=tuple(bias.shape),
        )


def bias_gelu_cost(c: Case, direction: str) -> Cost:
    """Forward reads x and the bias and writes y; backward also reads the gradient and writes two."""
    x, bias = c.inputs
    out = x.numel * ITEMSIZE[x.dtype]
    if direction == FORWARD:
        return Cost(read=x.nbytes + bias.nbytes, written=out)
    return Cost(read=x.nbytes + bias.nbytes + out, written=out + bias.nbytes)


def _x(*shape: int, dtype: str = "float32", layout: str = "contiguous", values: str = "normal") -> Input:
    return Input(name="x", shape=shape, dtype=dtype, layout=layout, values=values)


def _bias_case(
    *shape: int,
    dtype: str = "float32",
    layouts: tuple[str, str] = CONTIGUOUS,
    values: str = "normal",
    **options: Any,
) -> Case:
    x = Input(name="x", shape=shape, dtype=dtype, layout=layouts[0], values=values)
    bias = Input(name="bias", shape=shape[-1:], dtype=dtype, layout=layouts[1])
    words = [SHORT[dtype], "x".join(map(str, shape))]
    if layouts != CONTIGUOUS:
        words.append("-".join(layouts))
    if values != "normal":
        words.append(values)
    return case(x, bias, name="-".join(words), **options)


GELU_CASES = (
    *(case(_x(7, 129, dtype=d)) for d in DTYPES),
    *(case(_x(4099, dtype=d, values="sweep")) for d in DTYPES),
    *(case(_x(64, 64, dtype=d, values=v)) for d in ("float32", "float16") for v in ("outliers", "offset")),
    *(case(_x(3, 1000, values=v)) for v in ("large", "tiny", "equal")),
    *(case(_x(*s), tags="edge") for s in ((), (0,), (1,), (5, 0, 3), (1031,))),
    *(case(_x(33, 65, layout=k), tags="edge") for k in ("transposed", "sliced", "expanded", "shifted")),
    *(case(_x(1001, dtype=d, layout="shifted"), tags="edge") for d in ("float16", "bfloat16")),
    *(case(_x(259, dtype=d, values="special"), tags="edge") for d in DTYPES),
    case(_x(2**31 + 8, dtype="bfloat16"), tags="edge", devices=("cuda",)),
    case(_x(16384, 16384, dtype="bfloat16"), tags="bench", devices=("cuda",)),
    case(_x(16384, 16384), tags="bench", devices=("cuda",)),
    case(_x(1024, 3072, dtype="bfloat16"), tags="bench", devices=("cuda",)),
    case(_x(1024, 1024), tags="bench", devices=("cpu",)),
    case(_x(1024, 3072, dtype="bfloat16"), tags="bench", devices=("cpu",), name="bf16-1024x3072-cpu"),
)
RELU_CASES = (
    *(case(_x(7, 129, dtype=d)) for d in DTYPES),
    case(_x(2049, 4099, dtype="bfloat16"), devices=("cuda",)),
    *(case(_x(*s), tags="edge") for s in ((), (0,), (1031,))),
    *(case(_x(33, 65, layout=k), tags="edge") for k in ("transposed", "sliced", "expanded")),
    case(_x(1001, dtype="bfloat16", layout="shifted"), tags="edge"),
    *(case(_x(259, dtype=d, values="special"), tags="edge") for d in DTYPES),
    case(_x(16384, 16384, dtype="bfloat16"), tags="bench", devices=("cuda",)),
    case(_x(16384, 16384), tags="bench", devices=("cuda",)),
    case(_x(1024, 3072, dtype="bfloat16"), tags="bench", devices=("cuda",)),
    case(_x(1024, 1024), tags="bench", devices=("cpu",)),
)
BIAS_GELU_CASES = (
    *(_bias_case(37, 65, dtype=d) for d in DTYPES),
    _bias_case(3, 5, 136, dtype="float16"),
    _bias_case(64, 32, values="sweep"),
    _bias_case(1, 300),
    *(_bias_case(4097, s, dtype="bfloat16", devices=("cuda",)) for s in (1000, 3072)),
    _bias_case(2049, 768, devices=("cuda",)),
    *(_bias_case(*s, tags="edge") for s in ((1,), (0, 5), (5, 0))),
    *(
        _bias_case(19, 64, layouts=k, tags="edge")
        for k in (("transposed", "contiguous"), ("sliced", "shifted"), ("expanded", "sliced"))
    ),
    _bias_case(9, 136, dtype="bfloat16", layouts=("shifted", "contiguous"), tags="edge"),
    _bias_case(7, 37, dtype="float16", values="special", tags="edge"),
    _bias_case(65536, 3072, dtype="bfloat16", tags="bench", devices=("cuda",)),
    _bias_case(16384, 16384, dtype="bfloat16", tags="bench", devices=("cuda",)),
    _bias_case(16384, 3072, tags="bench", devices=("cuda",)),
    _bias_case(1024, 3072, dtype="bfloat16", tags="bench", devices=("cuda",)),
    _bias_case(1024, 1024, tags="bench", devices=("cpu",)),
)

GELU = Operator(
    name="gelu",
    summary="GELU activation, tanh form",
    formula="y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))",
    signature="gelu(x)",
    reference=gelu_reference,
    cases=GELU_CASES,
    cost=gelu_cost,
    validate=check_gelu,
    dtypes=DTYPES,
    differentiable=("x",),
    rows=("x",),
    gradient_scale=gelu_gradient_scale,
    scale_reason=SLOPE_CANCELS,
    properties=(Property(name="stays on the ramp's side", holds=_bounded),),
)
RELU = Operator(
    name="relu",
    summary="ReLU activation",
    formula="y = max(x, 0)",
    signature="relu(x)",
    reference=relu_reference,
    cases=RELU_CASES,
    cost=relu_cost,
    validate=check_relu,
    dtypes=DTYPES,
    differentiable=("x",),
    rows=("x",),
    save=_save_output,
    properties=(Property(name="x itself or 0", holds=_exact),),
    backward_note="from the saved output: dx = g where y > 0",
)
BIAS_GELU = Operator(
    name="bias_gelu",
    summary="bias and GELU (tanh form) in one pass",
    formula="y = gelu(x + bias)",
    signature="bias_gelu(x, bias)",
    reference=bias_gelu_reference,
    cases=BIAS_GELU_CASES,
    cost=bias_gelu_cost,
    validate=check_bias_gelu,
    dtypes=DTYPES,
    differentiable=("x", "bias"),
    rows=("x",),
    gradient_scale=bias_gelu_gradient_scale,
    scale_reason=SLOPE_CANCELS,
)
