"""Scaled product of 8-bit matrices: c[i, j] = sum over k of (scale_a a[i, k]) (scale_b b[k, j]).

The factors are float8_e4m3fn or float8_e5m2, each its own; the scales are float32 and decode: an element's
value is its 8-bit number times its scale. There are two kinds of scales. Along the outer sizes: one number a
tensor (shape ()), or one for each row of a (M, 1) and column of b (1, N). In blocks of 128: one number for
each row of a and 128 of K (M, K / 128), and for each 128 of K and 128 columns of b (K / 128, N / 128), as
in DeepSeek-V3 (arXiv:2412.19437).

The result is bfloat16 or float16. There is no gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core import Case, Cost, Input, Operator, WeftError
from weft.core.cases import FLOAT8, ITEMSIZE, SHORT
from weft.ops._common import validate

OUT_DTYPES = ("bfloat16", "float16")
BLOCK = 128  # elements of K, and columns of b, that share a scale
TENSOR, ROWS, BLOCKS = "tensor", "rows", "blocks"


def blocks(size: int) -> int:
    """Return how many blocks of 128 cover ``size`` elements; the last may be shorter."""
    return -(-size // BLOCK)


def has_blocks(a: Any, b: Any, scale_a: Any, scale_b: Any) -> bool:
    """Return True if the scales are those of blocks of 128, by the shapes of four tensors or inputs."""
    (m, k), n = a.shape, b.shape[1]
    is_outer = tuple(scale_a.shape) in ((), (m, 1)) and tuple(scale_b.shape) in ((), (1, n))
    return not is_outer and (tuple(scale_a.shape), tuple(scale_b.shape)) == (
        (m, blocks(k)),
        (blocks(k), blocks(n)),
    )


def widened(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a (M, K) and b (K, N) times their scales, in the dtype of the scales."""
    k, n = b.shape
    if has_blocks(a, b, scale_a, scale_b):
        scale_a = scale_a.repeat_interleave(BLOCK, 1)[:, :k]
        scale_b = scale_b.repeat_interleave(BLOCK, 0)[:k].repeat_interleave(BLOCK, 1)[:, :n]
    return a.to(scale_a.dtype) * scale_a, b.to(scale_b.dtype) * scale_b


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    out_dtype: str = "bfloat16",
) -> torch.Tensor:
    return torch.mm(*widened(a, b, scale_a, scale_b))


def check_arguments(a: Any, b: Any, scale_a: Any, scale_b: Any, *, out_dtype: Any = "bfloat16") -> None:
    for name, x, dtypes in (("a", a, FLOAT8), ("b", b, FLOAT8)):
        validate.tensor("scaled_matmul", name, x, dtypes, dims=range(2, 3))
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        validate.tensor("scaled_matmul", name, scale, ("float32",))
        validate.same_device("scaled_matmul", f"a and {name}", a, scale)
    validate.same_device("scaled_matmul", "a and b", a, b)
    validate.one_of("scaled_matmul: out_dtype", out_dtype, OUT_DTYPES)
    (m, k), n = a.shape, b.shape[1]
    if k != b.shape[0]:
        raise WeftError(
            "scaled_matmul: the inner sizes",
            expected="a (M, K) and b (K, N)",
            got=f"{tuple(a.shape)} and {tuple(b.shape)}",
            hint="b.t() transposes a (N, K) weight without a copy",
        )
    outer = tuple(scale_a.shape) in ((), (m, 1)) and tuple(scale_b.shape) in ((), (1, n))
    if not outer and not has_blocks(a, b, scale_a, scale_b):
        block_shapes = f"{(m, blocks(k))} and {(blocks(k), blocks(n))}"
        raise WeftError(
            "scaled_matmul: the shapes of scale_a and scale_b",
            expected=f"() or {(m, 1)} and () or {(1, n)}; or, of blocks of 128, {block_shapes}",
            got=f"{tuple(scale_a.shape)} and {tuple(scale_b.shape)}",
            hint="weft.ops.quantize_fp8 returns values and their scale",
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (a, b, scale_a, scale_b)):
        raise WeftError(
            "scaled_matmul has no gradient",
            expected="inputs without requires_grad, or torch.no_grad()",
            got="an input that requires a gradient",
            hint="x.detach(); a backward quantises its own factors and calls scaled_matmul on them",
        )


def sizes(c: Case) -> tuple[int, int, int]:
    """Return (M, N, K) of a case."""
    (m, k), (_, n) = (i.shape for i in c.inputs[:2])
    return m, n, k


def cost(c: Case, direction: str) -> Cost:
    """One product of 2 M N K FLOPs at the rate of fp8. The scales count as bytes alone."""
    m, n, k = sizes(c)
    written = m * n * ITEMSIZE[str(c.params["out_dtype"])]
    return Cost(read=sum(i.nbytes for i in c.inputs), written=written, flops=2.0 * m * n * k, rate="fp8")


def _scales(mode: str, m: int, n: int, k: int, layout: str, values: str) -> tuple[Input, Input]:
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        TENSOR: ((), ()),
        ROWS: ((m, 1), (1, n)),
        BLOCKS: ((m, blocks(k)), (blocks(k), blocks(n))),
    }
    a, b = shapes[mode]
    # A single normal number may be next to 0, where the product is, too.
    of_values = "equal" if mode == TENSOR and values == "normal" else values
    return (
        Input(name="scale_a", shape=a, layout=layout, values=of_values),
        Input(name="scale_b", shape=b, values=of_values),
    )


def _case(
    m: int,
    n: int,
    k: int,
    mode: str = TENSOR,
    dtypes: tuple[str, str] = ("float8_e4m3fn", "float8_e4m3fn"),
    *,
    layouts: tuple[str, str, str] = ("contiguous", "transposed", "contiguous"),
    values: str = "normal",
    scales: str = "normal",
    out_dtype: str = "bfloat16",
    tags: str = "check",
    devices: tuple[str, ...] = ("cpu", "cuda"),
) -> Case:
    """Return a case named by dtypes, M x N x K and scales, e.g. ``e4m3-8192x8192x8192-tensor``.

    ``layouts`` are those of a, b and scale_a; a weight (N, K) is b "transposed".
    """
    parts = ["-".join(dict.fromkeys(SHORT[d] for d in dtypes)), f"{m}x{n}x{k}", mode]
    if layouts[:2] != ("contiguous", "transposed"):
        parts.append("-".join(layouts[:2]))
    if layouts[2] != "contiguous":
        parts.append(f"scales-{layouts[2]}")
    parts += [values] * (values != "normal") + [f"scales-{scales}"] * (scales != "normal")
    parts += [SHORT[out_dtype]] * (out_dtype != "bfloat16")
    a = Input(name="a", shape=(m, k), dtype=dtypes[0], layout=layouts[0], values=values)
    b = Input(name="b", shape=(k, n), dtype=dtypes[1], layout=layouts[1])
    return Case(
        name="-".join(parts),
        inputs=(a, b, *_scales(mode, m, n, k, layouts[2], scales)),
        params={"out_dtype": out_dtype},
        tags=frozenset({tags}),
        devices=devices,
    )


MODES = (TENSOR, ROWS, BLOCKS)
E4M3, E5M2 = FLOAT8
WIDE = (E5M2, E5M2)
CHECKS = [
    # Per dtype, each kind of scales: one tile, and sizes that no tile divides.
    *(_case(16, 32, 48, mode) for mode in MODES),
    *(_case(16, 32, 48, mode, WIDE) for mode in MODES),
    *(_case(67, 136, 272, mode) for mode in MODES),
    _case(67, 136, 272, TENSOR, (E4M3, E5M2)),
    _case(67, 136, 272, BLOCKS, (E5M2, E4M3)),
    *(_case(130, 264, 400, mode, out_dtype="float16") for mode in (ROWS, BLOCKS)),
    # Several tiles; the sum of a long K, where an accumulator of few bits shows.
    *(_case(300, 520, 1040, mode, devices=("cuda",)) for mode in MODES),
    *(_case(128, 256, 16384, mode, devices=("cuda",)) for mode in MODES),
    _case(130, 264, 8192, TENSOR, out_dtype="float16", devices=("cuda",)),
    # Values that saturate, and a few large ones among small.
    _case(48, 64, 80, ROWS, values="large"),
    _case(48, 64, 144, BLOCKS, values="outliers"),
    # The largest and smallest scales that a trained weight has.
    _case(48, 64, 144, BLOCKS, scales="tiny"),
]
EDGES = [
    *(_case(*s, tags="edge") for s in ((0, 16, 32), (16, 0, 32), (16, 16, 0), (0, 0, 0))),
    _case(0, 16, 32, ROWS, tags="edge"),
    _case(16, 16, 0, BLOCKS, tags="edge"),
    # Sizes that are no multiples of 16, and a single row or column.
    *(_case(7, 13, 11, mode, tags="edge") for mode in MODES),
    _case(1, 24, 144, ROWS, tags="edge"),
    _case(23, 1, 48, BLOCKS, tags="edge"),
    # Orders that the tensor cores cannot read, and strides that the copy engine cannot.
    *(
        _case(48, 64, 144, ROWS, layouts=layouts, tags="edge")
        for layouts in (
            ("contiguous", "contiguous", "contiguous"),
            ("transposed", "transposed", "contiguous"),
            ("sliced", "shifted", "sliced"),
            ("expanded", "contiguous", "expanded"),
        )
    ),
    _case(48, 64, 272, BLOCKS, layouts=("shifted", "transposed", "transposed"), tags="edge"),
    *(_case(33, 48, 64, TENSOR, (d, d), values="special", tags="edge") for d in FLOAT8),
]
BENCHES = [
    # The largest square, a layer of a 671 B model over 4096 tokens as it is quantised, a smaller square, few
    # rows (bound by memory), and a size for a CPU.
    _case(8192, 8192, 8192, tags="bench", devices=("cuda",)),
    _case(8192, 8192, 8192, ROWS, tags="bench", devices=("cuda",)),
    _case(
        4096,
        7168,
        16384,
        BLOCKS,
        layouts=("contiguous", "transposed", "transposed"),
        tags="bench",
        devices=("cuda",),
    ),
    _case(4096, 4096, 4096, tags="bench", devices=("cuda",)),
    _case(16, 4096, 14336, ROWS, tags="bench", devices=("cuda",)),
    _case(512, 512, 512, ROWS, tags="bench", devices=("cpu",)),
]


def _public(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "out_dtype": getattr(torch, arguments["out_dtype"])}


OPERATOR = Operator(
    name="scaled_matmul",
    summary="product of two fp8 matrices with scales, per tensor, row or block of 128",
    formula="c[i, j] = sum_k (scale_a a[i, k]) (scale_b b[k, j])",
    signature="scaled_matmul(a, b, scale_a, scale_b, out_dtype=torch.bfloat16)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=FLOAT8,
    public_arguments=_public,
)
