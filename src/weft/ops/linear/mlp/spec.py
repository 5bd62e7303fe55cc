"""The contract of ``mlp_gelu``: two linear layers with GELU between them, as in a transformer's block.

    pre = x W1^T + b1        hidden = gelu(pre), tanh form        y = hidden W2^T + b2

``fc_weight`` W1 is (F, K), ``proj_weight`` W2 (N, F), as ``torch.nn.Linear`` stores them; ``x`` is (..., K),
and its leading dimensions count as M rows. ``hidden`` and ``pre`` are outputs too: the backward reads them.
Source of GELU: arXiv:1606.08415.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Input, Operator, Tolerance, WeftError
from weft.core.cases import ITEMSIZE, SHORT
from weft.dispatch.choice import constant_while_tracing
from weft.ops._common import validate
from weft.ops.linear.spec import few_bits

DTYPES = ("float32", "float16", "bfloat16")
NAME = "mlp_gelu"
SPECIALS = (math.nan, math.inf, -math.inf)
WEIGHTS = ("fc_weight", "proj_weight")


def reference(
    x: torch.Tensor,
    fc_weight: torch.Tensor,
    fc_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    pre = x @ fc_weight.t() + fc_bias
    # The textbook form: in float64 it needs no protection against overflow at the sizes of the cases.
    u = math.sqrt(2 / math.pi) * (pre + 0.044715 * pre**3)
    hidden = 0.5 * pre * (1 + torch.tanh(u))
    return hidden @ proj_weight.t() + proj_bias, hidden, pre


def check_mlp_gelu(x: Any, fc_weight: Any, fc_bias: Any, proj_weight: Any, proj_bias: Any) -> None:
    """Raise :class:`WeftError` unless ``mlp_gelu`` accepts these arguments."""
    validate.tensor(NAME, "x", x, DTYPES, dims=range(1, 65))
    for name, t, dims in (
        ("fc_weight", fc_weight, 2),
        ("fc_bias", fc_bias, 1),
        ("proj_weight", proj_weight, 2),
        ("proj_bias", proj_bias, 1),
    ):
        validate.tensor(NAME, name, t, DTYPES, dims=range(dims, dims + 1))
        validate.same(NAME, f"x and {name}", x, t)
    if x.shape[-1] != fc_weight.shape[1] or fc_weight.shape[0] != proj_weight.shape[1]:
        raise WeftError(
            f"{NAME}: the inner sizes",
            expected="x (..., K), fc_weight (F, K) and proj_weight (N, F)",
            got=f"{tuple(x.shape)}, {tuple(fc_weight.shape)} and {tuple(proj_weight.shape)}",
            hint="a weight is (outputs, inputs), as torch.nn.Linear stores it",
        )
    for name, bias, weight in (("fc_bias", fc_bias, fc_weight), ("proj_bias", proj_bias, proj_weight)):
        if bias.shape[0] != weight.shape[0]:
            raise WeftError(f"{NAME}: {name}.shape", expected=f"({weight.shape[0]},)", got=tuple(bias.shape))


@constant_while_tracing
def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """Save x, both weights, the hidden activation and the pre-activation; no gradient needs a bias."""
    x, fc_weight, _, proj_weight, _ = inputs
    _, hidden, pre = output
    return x, fc_weight, proj_weight, hidden, pre


def cost(c: Case, direction: str) -> Cost:
    """Forward: two products. Backward: four, two of which read and write the gradient of ``pre``."""
    x, fc_weight, _, proj_weight, _ = c.inputs
    m, (f, k), n = math.prod(x.shape[:-1]), fc_weight.shape, proj_weight.shape[0]
    itemsize, rate = ITEMSIZE[x.dtype], SHORT[x.dtype]
    weights, biases = f * (k + n), f + n
    if direction == FORWARD:
        read, written, products = m * k + weights + biases, m * (n + 2 * f), 1
    else:
        read, written, products = m * (n + k + 2 * f) + weights, m * k + weights + biases, 2
    flops = 2.0 * m * f * (k + n) * products
    return Cost(read=read * itemsize, written=written * itemsize, flops=flops, rate=rate)


def draw(c: Case, seed: int, device: str) -> list[torch.Tensor]:
    """Generate normal inputs; the weights are smaller, so that the sums over K and F are near 1.

    GELU's slope would else be 0 or 1 nearly everywhere. The end of a case's name changes x: ``large`` is 2^13
    times as large and ``pre`` exact in float32, and ``special`` has NaN and infinities.
    """
    generator = torch.Generator(device)
    generator.manual_seed(seed)
    values = []
    for i in c.inputs:
        value = torch.randn(i.shape, generator=generator, device=device)
        if len(i.shape) == 2 and i.name in WEIGHTS:
            value *= max(1, i.shape[1]) ** -0.5
        values.append(value)
    kind = c.name.rpartition("-")[2]
    if kind == "large":
        steps = (1 / 8, 1 / 16, 1 / 8)
        values[:3] = [few_bits(v, step) for v, step in zip(values, steps, strict=False)]
        values[0] *= 2.0**13
    elif kind == "special":
        hit = torch.rand(values[0].shape, generator=generator, device=device) < 0.02
        chosen = torch.randint(len(SPECIALS), values[0].shape, generator=generator, device=device)
        values[0] = torch.where(hit, torch.tensor(SPECIALS, device=device)[chosen], values[0])
    return [v.to(getattr(torch, i.dtype)) for v, i in zip(values, c.inputs, strict=True)]


def _case(
    rows: int | tuple[int, ...],
    sizes: tuple[int, int, int],
    dtype: str = "float32",
    *,
    layouts: tuple[str, str] = ("contiguous", "contiguous"),
    kind: str = "normal",
    tags: str = "check",
    devices: tuple[str, ...] = ("cpu", "cuda"),
) -> Case:
    """Return a case named by dtype and M x K x F x N; ``layouts`` are those of x and of the weights."""
    lead, (k, f, n) = rows if isinstance(rows, tuple) else (rows,), sizes
    parts = [SHORT[dtype], "x".join(map(str, (*lead, k, f, n)))]
    parts += ["-".join(layouts)] * (layouts != ("contiguous", "contiguous")) + [kind] * (kind != "normal")
    return Case(
        name="-".join(parts),
        inputs=(
            Input(name="x", shape=(*lead, k), dtype=dtype, layout=layouts[0]),
            Input(name="fc_weight", shape=(f, k), dtype=dtype, layout=layouts[1]),
            Input(name="fc_bias", shape=(f,), dtype=dtype),
            Input(name="proj_weight", shape=(n, f), dtype=dtype, layout=layouts[1]),
            Input(name="proj_bias", shape=(n,), dtype=dtype),
        ),
        tags=frozenset({tags}),
        devices=devices,
    )


CHECKS = [
    *(_case(5, (24, 16, 8), d) for d in DTYPES),
    # Sizes of which no rows begin at multiples of 16 bytes.
    *(_case(35, (41, 67, 29), d) for d in DTYPES),
    _case((2, 17), (72, 40, 24)),
    _case(40, (40, 136, 40)),
    _case(19, (24, 40, 16), kind="large"),
    _case(1000, (1032, 1016, 520), "float16", devices=("cuda",)),
    _case(2100, (200, 1160, 136), "bfloat16", devices=("cuda",)),
]
EDGES = [
    *(_case(*s, tags="edge") for s in ((0, (3, 5, 4)), (5, (0, 3, 4)), (5, (3, 4, 0)), (1, (1, 1, 1)))),
    _case(40, (16, 24, 8), layouts=("transposed", "sliced"), tags="edge"),
    _case(40, (24, 72, 16), "bfloat16", layouts=("sliced", "transposed"), tags="edge"),
    _case(21, (16, 24, 8), "float16", layouts=("shifted", "shifted"), tags="edge"),
    _case(19, (33, 40, 16), kind="special", tags="edge"),
]
BENCHES = [
    _case(16384, (768, 3072, 768), "bfloat16", tags="bench", devices=("cuda",)),
    _case(65536, (768, 3072, 768), "bfloat16", tags="bench", devices=("cuda",)),
    _case(8192, (4096, 16384, 4096), "bfloat16", tags="bench", devices=("cuda",)),
    _case(256, (256, 1024, 256), tags="bench", devices=("cpu",)),
]

OPERATOR = Operator(
    name=NAME,
    summary="two linear layers with GELU between them, whose slope runs in the backward's product",
    formula="pre = x W1^T + b1, hidden = gelu(pre), y = hidden W2^T + b2",
    signature="mlp_gelu(x, fc_weight, fc_bias, proj_weight, proj_bias)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_mlp_gelu,
    dtypes=DTYPES,
    differentiable=("x", "fc_weight", "fc_bias", "proj_weight", "proj_bias"),
    output_names=("y", "hidden", "pre"),
    rows=("x",),
    save=save,
    draw=draw,
    tolerance=Tolerance(
        c=6.0,
        baseline="torch",
        reason="the baseline is torch, because eager rounds once more; in fp32 the library splits K, and a "
        "single sum over K has a larger error, as in the linear family",
    ),
    backward_note="dpre = (g W2) gelu'(pre), dx = dpre W1, dW1 = dpre^T x, db1 = sum of dpre over the rows, "
    "dW2 = g^T hidden, db2 = sum of g over the rows",
)
