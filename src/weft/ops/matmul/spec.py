"""Matrix product: c[i, j] = sum over k of a[i, k] b[k, j].

Half types are multiplied exactly and summed in float32, with one rounding at the end. float32 is
either ``ieee`` (every product and sum in float32) or ``tf32`` (factors rounded or truncated to 10
bits of mantissa, as tensor cores read them, and summed in float32).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Input, Operator, Property, Tolerance, WeftError
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate

DTYPES = ("float32", "float16", "bfloat16")
PRECISIONS = ("ieee", "tf32")


def reference(a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee") -> torch.Tensor:
    return a @ b


def check_arguments(a: Any, b: Any, *, precision: str = "ieee") -> None:
    for name, x in (("a", a), ("b", b)):
        validate.tensor("matmul", name, x, DTYPES, dims=range(2, 3))
    validate.same("matmul", "a and b", a, b)
    if a.shape[1] != b.shape[0]:
        raise WeftError(
            "matmul: the inner sizes",
            expected="a (M, K) and b (K, N)",
            got=f"{tuple(a.shape)} and {tuple(b.shape)}",
            hint="b.t() transposes a (N, K) weight without a copy",
        )
    validate.one_of("matmul: precision", precision, PRECISIONS)
    if precision == "tf32" and a.dtype != torch.float32:
        raise WeftError(
            "matmul: precision='tf32'",
            expected="float32 inputs",
            got=str(a.dtype).removeprefix("torch."),
            hint="leave precision out: half types are summed in float32",
        )


def sizes(c: Case) -> tuple[int, int, int]:
    """Return (M, N, K) of a case."""
    (m, k), (_, n) = (i.shape for i in c.inputs)
    return m, n, k


def backward_by(product: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return the backward that calls ``product`` twice: da = grad b^T and db = a^T grad.

    The transposed operands are views: no implementation here needs a copy of them.
    """

    def backward(
        grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return product(grad, b.t(), precision=precision), product(a.t(), grad, precision=precision)

    return backward


def cost(c: Case, direction: str) -> Cost:
    """Forward: one product of 2 M N K FLOPs. Backward: two, from the gradient and both inputs."""
    m, n, k = sizes(c)
    item = ITEMSIZE[c.dtype]
    inputs = sum(i.nbytes for i in c.inputs)
    rate = "tf32" if c.params.get("precision") == "tf32" else SHORT[c.dtype]
    if direction == FORWARD:
        return Cost(read=inputs, written=m * n * item, flops=2.0 * m * n * k, rate=rate)
    written = (m * k + k * n) * item
    return Cost(read=inputs + m * n * item, written=written, flops=4.0 * m * n * k, rate=rate)


def _freivalds(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee") -> float:
    """Check c r = a (b r) for a vector r of signs (Freivalds, 1977): a wrong block shows in its rows.

    The bound is eight times the standard error of N independent roundings and of sums of K terms. A result
    above 1 fails.
    """
    if 0 in (*a.shape, *b.shape):
        return 0.0
    signs = torch.ones(c.shape[1], 1, dtype=torch.float64, device=c.device)
    signs[1::2] = -1
    c64 = c.double()
    # Three products with vectors, O(MK + KN + MN), instead of a reference product: this checks sizes that a
    # float64 product would take minutes for.
    gap = (c64 @ signs - a.double() @ (b.double() @ signs)).abs().max()
    # A tf32 factor has 10 bits of mantissa.
    eps = 2.0**-10 if precision == "tf32" else torch.finfo(c.dtype).eps
    summing = 0.2 * math.sqrt(a.shape[1]) if c.dtype == torch.float32 else 0.0
    # A single product may cancel almost completely. The scale is therefore the larger of c's RMS and of the
    # size that K terms of these factors give.
    terms = math.sqrt(a.shape[1]) * math.prod(float(x.double().square().mean()) for x in (a, b)) ** 0.5
    standard_error = eps * (1 + summing) * max(float(c64.square().mean().sqrt()), terms)
    return float(gap) / (8 * standard_error * math.sqrt(c.shape[1]) + 1e-300)


def _case(
    m: int,
    n: int,
    k: int,
    dtype: str = "float32",
    *,
    layouts: tuple[str, str] = ("contiguous", "contiguous"),
    values: str = "normal",
    tags: str = "check",
    devices: tuple[str, ...] = ("cpu", "cuda"),
    **params: str,
) -> Case:
    """Return a case named by precision and M x N x K, e.g. ``bf16-8192x8192x8192``."""
    parts = [params.get("precision") or SHORT[dtype], f"{m}x{n}x{k}"]
    if layouts != ("contiguous", "contiguous"):
        parts.append("-".join(layouts))
    if values != "normal":
        parts.append(values)
    a = Input(name="a", shape=(m, k), dtype=dtype, layout=layouts[0], values=values)
    b = Input(name="b", shape=(k, n), dtype=dtype, layout=layouts[1])
    tag_set = frozenset({tags})
    return Case(name="-".join(parts), inputs=(a, b), params=params, tags=tag_set, devices=devices)


def _tf32(m: int, n: int, k: int, **options: Any) -> Case:
    return _case(m, n, k, devices=("cuda",), precision="tf32", **options)


def _layout_pairs() -> Iterable[tuple[str, str]]:
    """Yield every order of rows and columns, and strides that are no multiple of 16 bytes."""
    yield from (("transposed", "contiguous"), ("contiguous", "transposed"))
    yield from (("transposed", "transposed"), ("sliced", "shifted"), ("shifted", "sliced"))
    yield from (("expanded", "contiguous"), ("contiguous", "expanded"))


CHECKS = [
    # A single tile; then sizes that no tile divides, several tiles, and vectors as matrices.
    *(_case(16, 24, 8, dtype=d) for d in DTYPES),
    *(_case(7, 13, 11, dtype=d) for d in DTYPES),
    *(_case(67, 129, 97, dtype=d) for d in DTYPES),
    *(_case(128, 256, 192, dtype=d) for d in DTYPES),
    *(_case(1, 24, 17, dtype=d) for d in ("float32", "float16")),
    *(_case(23, 1, 19, dtype=d) for d in ("float32", "float16")),
    *(_case(24, 23, 1, dtype=d) for d in ("float32", "float16")),
    *(_case(1, 1, 131, dtype=d) for d in ("float32", "float16")),
    _case(131, 257, 521, dtype="bfloat16", devices=("cuda",)),
    # Overflow of float16 sums, underflow, and a few large factors among small ones.
    _case(64, 48, 72, values="large"),
    _case(64, 48, 72, values="tiny"),
    _case(64, 48, 72, dtype="bfloat16", values="outliers"),
    *(_tf32(*s) for s in ((7, 13, 11), (67, 129, 97), (128, 256, 192), (300, 520, 1000))),
]
EDGES = [
    # K = 0 gives a matrix of zeros, not an empty one.
    *(_case(*s, tags="edge") for s in ((0, 5, 3), (5, 0, 3), (5, 3, 0), (0, 0, 0))),
    *(_case(5, 3, 0, dtype=d, tags="edge") for d in ("float16", "bfloat16")),
    *(_case(12, 20, 16, layouts=p, tags="edge") for p in _layout_pairs()),
    *(_case(72, 136, 88, dtype=d, layouts=p, tags="edge") for p in _layout_pairs() for d in DTYPES[1:]),
    *(_tf32(72, 136, 88, layouts=p, tags="edge") for p in _layout_pairs()),
    *(_case(33, 40, 65, dtype=d, values="special", tags="edge") for d in DTYPES),
    _case(1000, 1016, 1032, dtype="bfloat16", tags="edge", devices=("cuda",)),
    # A long K that no tile divides: the error of the sum grows with it.
    _case(513, 640, 4099, tags="edge", devices=("cuda",)),
    # More than 2^31 elements of c: 32-bit offsets overflow.
    _case(65536, 40000, 16, dtype="bfloat16", tags="edge", devices=("cuda",)),
]
WEIGHT = ("contiguous", "transposed")  # as a linear layer stores its weight
BENCHES = [
    # Large squares (bound by power), GPT-2's products (16384 tokens), the largest weight of a model of 8 B
    # parameters with 16 and with 512 tokens, and one product that is too small to fill the GPU.
    _case(8192, 8192, 8192, dtype="bfloat16", tags="bench", devices=("cuda",)),
    _case(4096, 4096, 4096, dtype="bfloat16", tags="bench", devices=("cuda",)),
    _case(16384, 3072, 768, dtype="bfloat16", tags="bench", devices=("cuda",)),
    *(
        _case(m, 14336, 4096, dtype="bfloat16", layouts=WEIGHT, tags="bench", devices=("cuda",))
        for m in (16, 512)
    ),
    _case(8192, 8192, 8192, dtype="float16", tags="bench", devices=("cuda",)),
    _tf32(8192, 8192, 8192, tags="bench"),
    _case(4096, 4096, 4096, tags="bench", devices=("cuda",)),
    _case(256, 256, 256, dtype="bfloat16", tags="bench", devices=("cuda",)),
    _case(1024, 1024, 1024, tags="bench", devices=("cpu",)),
    _case(512, 512, 512, dtype="bfloat16", tags="bench", devices=("cpu",)),
]

OPERATOR = Operator(
    name="matmul",
    summary="matrix product, summed in float32",
    formula="c[i, j] = sum_k a[i, k] b[k, j]",
    signature="matmul(a, b, precision='ieee')",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("a", "b"),
    rows=("a",),
    properties=(
        Property(
            name="c r = a (b r)",
            holds=_freivalds,
            applies=lambda c: all(i.values == "normal" for i in c.inputs),
        ),
    ),
    tolerance=Tolerance(
        c=6.0,
        baseline="torch",
        reason="the baseline is torch, because eager stores M*N*K products. The library rounds tf32 "
        "factors, which tensor cores truncate, and splits K in fp32, where a single sum over K has a "
        "larger error (measured on a GPU: 2.2 and 4.1 times)",
    ),
)
