"""Depthwise causal convolution: each channel with K coefficients of its own, from the past alone.

    y[b, c, t] = bias[c] + sum over k of weight[c, k] x[b, c, t - (K-1) + k]

Elements before the first are 0. Source: A. Gu and T. Dao, "Mamba: Linear-time sequence modeling with
selective state spaces" (arXiv:2312.00752).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from weft.core import FORWARD, Case, Cost, Input, Operator, Property, WeftError, case
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate

DTYPES = ("float32", "float16", "bfloat16")
MIN_TAPS, MAX_TAPS = 2, 8


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    taps, length = weight.shape[1], x.shape[2]
    padded = F.pad(x, (taps - 1, 0))
    y = x * weight[:, -1:] + bias[:, None]
    # In place: the float64 output of the largest case has 19 GB.
    for k in range(taps - 1):
        y.addcmul_(padded[..., k : k + length], weight[:, k, None])
    return y


def gradient_scale(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Return, for a coefficient's and a bias's gradient, the norm of its terms: their sum may cancel."""
    taps, length = weight.shape[1], x.shape[2]
    padded = F.pad(x, (taps - 1, 0))
    terms = [(grad * padded[..., k : k + length]).square().sum((0, 2)) for k in range(taps)]
    norms = torch.stack(terms, 1).sqrt().nan_to_num(0.0, 0.0, 0.0)
    return None, norms, grad.square().sum((0, 2)).sqrt().nan_to_num(0.0, 0.0, 0.0)


def check_arguments(x: Any, weight: Any, bias: Any) -> None:
    validate.tensor("conv1d", "x", x, DTYPES, dims=range(3, 4))
    validate.tensor("conv1d", "weight", weight, DTYPES, dims=range(2, 3))
    validate.tensor("conv1d", "bias", bias, DTYPES, dims=range(1, 2))
    validate.same("conv1d", "x and weight", x, weight)
    validate.same("conv1d", "x and bias", x, bias)
    channels, taps = weight.shape
    if channels != x.shape[1] or not MIN_TAPS <= taps <= MAX_TAPS:
        raise WeftError(
            "conv1d: weight.shape",
            expected=f"(C, K) with C = {x.shape[1]}, the channels of x, and K from {MIN_TAPS} to {MAX_TAPS}",
            got=(channels, taps),
        )
    if bias.shape[0] != channels:
        raise WeftError("conv1d: bias.shape", expected=f"({channels},)", got=tuple(bias.shape))


def cost(c: Case, direction: str) -> Cost:
    """Forward reads x and writes y; backward reads the gradient and x and writes x's gradient."""
    x, weight, bias = c.inputs
    out, small = x.numel * ITEMSIZE[x.dtype], weight.nbytes + bias.nbytes
    if direction == FORWARD:
        return Cost(read=x.nbytes + small, written=out)
    return Cost(read=x.nbytes + weight.nbytes + out, written=out + small)


def _adds_up(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> float:
    """Return how far a row's sum of outputs is from what the sums of x say, in units of the allowed error.

    Coefficient k reaches all elements of a row but the last K-1-k.
    """
    if y.numel() == 0:
        return 0.0
    length, taps = x.shape[2], weight.shape[1]
    x64, w64, b64 = x.double(), weight.double(), bias.double()
    expected, size = length * b64.expand(x.shape[:2]), length * b64.abs().expand(x.shape[:2])
    for k in range(taps):
        part = x64[..., : max(length - (taps - 1 - k), 0)]
        expected = expected + w64[:, k] * part.sum(-1)
        size = size + w64[:, k].abs() * part.abs().sum(-1)
    got = y.double().sum(-1)
    finite = expected.isfinite() & got.isfinite()
    allowed = (torch.finfo(y.dtype).eps + 16 * torch.finfo(torch.float32).eps) * size
    # A half type also loses what lies below its smallest number.
    allowed = allowed + torch.finfo(y.dtype).smallest_normal * length
    excess = (got - expected).abs()[finite] / allowed[finite].clamp(min=1e-30)
    return float(excess.max()) if excess.numel() else 0.0


def _case(
    *shape: int,
    taps: int = 4,
    dtype: str = "float32",
    layout: str = "contiguous",
    values: str = "normal",
    **more: Any,
) -> Case:
    """Return a case named like ``bf16-8x4096x4096-k4-sliced``; coefficients and biases are normal."""
    channels = shape[1]
    x = Input(name="x", shape=shape, dtype=dtype, layout=layout, values=values)
    weight = Input(name="weight", shape=(channels, taps), dtype=dtype)
    bias = Input(name="bias", shape=(channels,), dtype=dtype)
    words = [SHORT[dtype], "x".join(map(str, shape)), f"k{taps}"]
    words += [w for w in (layout, values) if w not in ("contiguous", "normal")]
    return case(x, weight, bias, name="-".join(words), **more)


CPU, CUDA = ("cpu",), ("cuda",)
CHECKS = [
    _case(2, 5, 64),
    _case(2, 3, 136, taps=3, dtype="float16"),
    _case(1, 4, 520, dtype="bfloat16"),
    _case(3, 2, 37, taps=2),
    _case(2, 3, 300, taps=8),
    # Fewer elements than coefficients.
    _case(2, 3, 5, taps=8),
    # Equal products have rounding errors of one sign: the gradient of the coefficients adds them all.
    _case(2, 12, 1000, values="equal"),
    _case(2, 16, 100, taps=5, values="outliers"),
]
EDGES = [
    *(_case(*s, tags="edge") for s in ((0, 4, 9), (2, 0, 5), (2, 3, 0), (1, 1, 1))),
    *(_case(3, 7, 65, layout=k, tags="edge") for k in ("transposed", "sliced", "expanded", "shifted")),
    _case(3, 5, 68, values="special", tags="edge"),
    _case(2, 4, 41, taps=6, dtype="bfloat16", values="special", tags="edge"),
    # Several pieces of a row, and accesses of 2, 4, 8 and 16 bytes.
    *(_case(3, 5, s, dtype="bfloat16", tags="edge", devices=CUDA) for s in (9001, 9002, 9004, 9008)),
    _case(2, 3, 9000, taps=8, tags="edge", devices=CUDA),
    _case(70001, 2, 9, tags="edge", devices=CUDA),
]
BENCHES = [
    _case(8, 4096, 4096, tags="bench", devices=CUDA),
    _case(8, 4096, 4096, dtype="bfloat16", tags="bench", devices=CUDA),
    _case(8, 4096, 4096, taps=8, dtype="bfloat16", tags="bench", devices=CUDA),
    _case(1, 4096, 65536, dtype="bfloat16", tags="bench", devices=CUDA),
    _case(8, 4096, 4095, dtype="bfloat16", tags="bench", devices=CUDA),
    # Over 2^31 elements, where 32-bit offsets overflow.
    _case(9, 4096, 65536, dtype="bfloat16", tags="bench", devices=CUDA),
    _case(2, 64, 2048, tags="bench", devices=CPU),
]

OPERATOR = Operator(
    name="conv1d",
    summary="depthwise causal convolution over the last dimension",
    formula="y_bct = bias_c + sum over k of w_ck x_bc,t-(K-1)+k",
    signature="conv1d(x, weight, bias)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x", "weight", "bias"),
    save=lambda inputs, output: inputs[:2],
    gradient_scale=gradient_scale,
    scale_reason="the gradients of coefficients and biases are sums over batch and time, whose terms cancel",
    properties=(Property(name="adds up to the rows' sums", holds=_adds_up),),
    backward_note="the convolution of the gradient with reversed coefficients, and K + 1 sums a channel",
)
