"""Sizes that decide the time of a call, and a small model of how the time follows them.

Every operator belongs to a family, which names its sizes: rows are looked up by their length and number,
products by N, K and M, attention by head size, heads times batch and both lengths, elementwise operators by
elements. Flags are what a measured point must share with a call. Under ``torch.compile`` a size may be
symbolic: the functions up to :func:`band_value` only multiply, compare, and test divisibility by 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch

from weft.core import Case, Input, registry
from weft.core.cases import ITEMSIZE

Sizes = tuple[int, ...]
Flags = tuple[tuple[str, object], ...]
Grid = tuple[tuple[tuple[float, int], ...], ...]  # for each size: (upper border, representative), ascending

Value = TypeVar("Value")

MAX_SIZE = 1 << 40
LAUNCH_US = 3.0  # time of a kernel that does nothing, which no smaller size avoids
# FLOPs (multiply-add 2) for each element that is moved, above which tensor cores and not memory limit a
# product: 800 TFLOP/s and 4.3 TB/s of 2-byte elements on the device with the first table.
FLOPS_PER_ELEMENT = 370.0
TILE = 128  # rows and columns of a block's tile in a product, and queries in attention
# Factor of the weight of octaves from a smaller point to a larger call. A small point's time is partly its
# launch: of two points at the same distance the larger one tells more.
UPWARD = 1.25
BLOCK_ELEMENTS = 4096  # of an elementwise kernel
SPLIT_KEYS = 512  # of a block in attention for decoding
# Factor for rows that do not start at multiples of 16 bytes, by our CUDA kernels
# (results/nvidia-h200/row-lengths.json): at most 1.6 but for the norms' backward at 262143 columns, 2.5.
MISALIGNED = 1.6
# Rows shorter than this leave threads of ours idle: at 320 columns the norms reach 40 to 48 % of the copy
# bandwidth, at 1024 columns 90 %, which is this power of the length.
FULL_COLUMNS, NARROW_POWER = 1024, 0.6
# topk takes lists in registers below this k and mostly radix select above (suits_lists in ops/topk): a point
# of one tells nothing of the other.
SHORT_LIST = 16
# Channels of an image below which a convolution's tiles are not full; no case with fewer was measured.
FEW_CHANNELS = 64
# Most bins that histogram counts in shared memory.
SHARED_BINS = 4096


@dataclass(frozen=True)
class Dimension:
    """One size of a family.

    ``weight``: octaves of distance for each octave between a call and a point. ``step``: factor between
    neighbouring representatives. With ``is_open`` a point tells much of larger calls: more rows only fill the
    device better. With ``is_exact`` a point speaks for calls of its own size alone.
    """

    name: str
    weight: float = 1.0
    step: float = 2.0
    is_open: bool = False
    is_exact: bool = False


COLUMNS = Dimension("columns", weight=2.0)
ROWS = Dimension("rows", is_open=True)
# The size that changes from call to call comes last: while tracing, only borders are compared there at
# which the choice changes.
FAMILIES: dict[str, tuple[Dimension, ...]] = {
    "rows": (COLUMNS, ROWS),
    "elements": (Dimension("elements", is_open=True),),
    "product": (Dimension("N"), Dimension("K"), Dimension("M", is_open=True)),
    "embedding": (COLUMNS, Dimension("vocabulary", step=4.0), ROWS),
    "attention": (
        Dimension("head_dim", is_exact=True),
        Dimension("heads", step=4.0, is_open=True),  # times the batch
        Dimension("queries", step=4.0),
        Dimension("keys", step=4.0),
    ),
    "decode": (
        Dimension("head_dim", is_exact=True),
        Dimension("keys", step=4.0, is_open=True),  # that a sequence has room for
        Dimension("heads", step=4.0, is_open=True),  # of keys, times the batch
    ),
}
FAMILY_OF: dict[str, str] = {
    **dict.fromkeys(("softmax", "cross_entropy", "bias_gelu", "rope", "cumsum", "topk"), "rows"),
    **dict.fromkeys(("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"), "rows"),
    **dict.fromkeys(("dropout_add_layer_norm", "sort", "sort_keys", "reduce", "argreduce"), "rows"),
    **dict.fromkeys(("matmul", "linear", "linear_gelu", "linear_residual", "scaled_matmul"), "product"),
    **dict.fromkeys(("linear_cross_entropy", "mlp_gelu"), "product"),  # of mlp_gelu, the first one's sizes
    **dict.fromkeys(("sparse_linear", "block_sparse_linear", "conv2d"), "product"),
    "embedding": "embedding",
    "attention": "attention",
    "attention_decode": "decode",
}
MEMORY_BOUND = ("rows", "elements", "embedding", "decode")
# Parameters that a case or a call may leave out.
DEFAULTS: dict[str, dict[str, object]] = {
    "attention": {"causal": False, "padded": False},
    "attention_decode": {"paged": False},
    "linear_gelu": {"keep": True},
    "matmul": {"precision": "ieee"},
    "rope": {"interleaved": False},
    "scaled_matmul": {"out_dtype": "bfloat16"},
}
ALIGNED = "aligned"
CHUNKED = ("linear_cross_entropy",)  # operators that compute chunks of rows (ops/losses/chunks.py)
# The model of a head's loss: FLOPs that our products compute in the time in which an element is moved, and
# elements that are moved for each logit beside the products' operands. At 2048 x 128256 x 4096 on an H200 the
# audit saw 240 FLOPs with logits of +-64, where ours computes four products instead of three: 320 with logits
# of a model. Ours writes exponentials and reads them twice. The `torch` implementation, which is measured,
# converts logits and gradient from and to float32; dispatch takes PyTorch's products with our cross entropy
# instead.
HEAD_FLOPS_PER_ELEMENT = 320.0
HEAD_PASSES, CONVERTED_PASSES, COMPOSED_PASSES = 3, 23, 6
# Logits from which their memory counts, and by how much the time of PyTorch's products is raised for it: they
# store logits and gradient, 1 GiB at 2^28 in half types, where ours stores a chunk of rows.
HEAD_MEMORY_PRICES = ((2 << 30, 2.0), (1 << 28, 1.35))
# Operators whose implementation by PyTorch has a block for each row too, in each of its passes: few rows
# leave SMs idle on both sides. An audit saw ours take 0.5 to 0.9 of PyTorch's time at 1 to 64 rows of 49152
# to 256000 columns.
BLOCK_A_ROW = ("cross_entropy",)
# Parameters that change the order of the elements and are taken to change no time.
ORDERS: dict[str, tuple[str, ...]] = {
    "cumsum": ("exclusive", "reverse"),
    "segmented_cumsum": ("exclusive", "reverse"),
    "sort": ("descending",),
    "sort_keys": ("descending",),
    "topk": ("largest",),
}
# The operation of a reduction that has the same kernel, and whose time stands for it.
SAME_TIME = {"mean": "sum", "amin": "amax", "argmin": "argmax"}


def family(name: str) -> str:
    """Return the family of an operator; elementwise for one that is not listed."""
    return FAMILY_OF.get(name, "elements")


def dimensions(name: str) -> tuple[Dimension, ...]:
    """Return the sizes of an operator's family."""
    return FAMILIES[family(name)]


def sizes_of(name: str, shapes: Sequence[Sequence[int]]) -> Sizes:
    """Return an operator's sizes from the shapes of its inputs, in the order of :func:`dimensions`."""
    kind = family(name)
    first = shapes[0]
    if name == "conv2d":  # the product of the window's columns (batch and pixels, channels and window)
        return (shapes[1][0], _product(shapes[1][1:]), first[0] * _product(first[2:]))
    if kind == "product":
        # A weight is (N, K); the second factor of matmul and scaled_matmul is (K, N).
        n = shapes[1][1] if name in ("matmul", "scaled_matmul") else shapes[1][0]
        if name == "block_sparse_linear":  # the rows of a dense weight with as many elements
            n = n * shapes[1][1] * shapes[1][2] // max(1, first[-1])
        return (n, first[-1], _product(first[:-1]))
    if kind == "embedding":
        return (first[1], first[0], _product(shapes[1]))
    if kind == "attention":
        return (first[3], first[0] * first[1], first[2], shapes[1][2])
    if kind == "decode":
        # Keys of a page times the pages of a sequence; a contiguous cache has a block table of one column.
        return (first[3], shapes[1][2] * shapes[4][1], first[0] * shapes[1][1])
    if kind == "rows":
        return (first[-1] if len(first) else 1, _product(first[:-1]))
    return (_product(first),)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the dtype of the first floating-point input."""
    for x in tensors:
        if x.dtype.is_floating_point:
            return x.dtype
    return tensors[0].dtype


def _product(shape: Sequence[int]) -> int:
    result = 1
    for size in shape:
        result = result * size
    return result


def flags_of(name: str, shapes: Sequence[Sequence[int]], itemsize: int, params: Mapping[str, Any]) -> Flags:
    """Return an operator's flags as sorted pairs: strings and booleans among ``params``, and the alignment.

    ``aligned``: rows start at multiples of 16 bytes if the first does. ``grouped``: fewer heads of keys than
    of queries. ``blocks``: the scales of an fp8 product are those of blocks. ``adjacent``: the last dimension
    is reduced. ``window`` and ``few_channels``: of a convolution. ``short``: topk of few elements.
    ``positions``: an embedding adds a table of positions. ``shared``: the bins of a histogram fit into shared
    memory. ``side``: of the blocks of a weight.
    """
    flags = dict(DEFAULTS.get(name, {}))
    orders = ORDERS.get(name, ())
    flags.update((k, v) for k, v in params.items() if isinstance(v, str | bool) and k not in orders)
    if name == "scaled_matmul":
        flags["blocks"] = False
        if len(shapes[2]) and shapes[2][-1] != 1:
            flags["blocks"] = True
    if name == "block_sparse_linear":
        flags["side"] = shapes[1][1]
    if name in ("reduce", "argreduce"):
        flags["op"] = SAME_TIME.get(params["op"], params["op"])
        flags["adjacent"] = params["last"] == len(shapes[0]) - 1
    if name == "conv2d":
        flags["window"] = "other"  # no point has it: the library computes it
        if shapes[1][2] == 1 and shapes[1][3] == 1:
            flags["window"] = "1x1"
        if shapes[1][2] == 3 and shapes[1][3] == 3:
            flags["window"] = "3x3"
        flags["few_channels"] = False
        if shapes[0][1] < FEW_CHANNELS:
            flags["few_channels"] = True
    if name == "embedding":
        flags["positions"] = False
        if shapes[2][0] != 0:
            flags["positions"] = True
    if name == "topk":
        flags["short"] = params["k"] < SHORT_LIST
    if name == "histogram":
        flags["shared"] = params["bins"] <= SHARED_BINS
    kind = family(name)
    # Branches, not the comparisons' values: a symbolic truth would be no constant of a trace.
    if kind == "attention":
        flags["grouped"] = True
        if shapes[0][1] == shapes[1][1]:
            flags["grouped"] = False
    elif kind != "elements":
        flags[ALIGNED] = True
        for shape in shapes[: 2 if kind == "product" and name != "conv2d" else 1]:
            if len(shape) and shape[-1] * itemsize % 16 != 0:
                flags[ALIGNED] = False
    return tuple(sorted(flags.items()))


def band_value(size: int, borders: Sequence[tuple[float, Value]]) -> Value:
    """Return the value of the first border above a size. It only compares: a traced size stays symbolic."""
    for upper, value in borders:
        if size < upper:
            return value
    raise AssertionError("the last border is open")


def grid(name: str, measured: Iterable[Sizes]) -> Grid:
    """Return, for each size, its representatives with their upper borders.

    Each measured size represents the sizes around it. Between and beyond the measured ones representatives
    are at most the dimension's ``step`` apart. A border is halfway on a logarithmic scale.
    """
    points = list(measured)
    result = []
    for i, dimension in enumerate(dimensions(name)):
        values = sorted({max(1, p[i]) for p in points}) or [1]
        values = _filled(values, dimension.step)
        uppers = [math.sqrt(a * b) for a, b in pairwise(values)] + [math.inf]
        result.append(tuple(zip(uppers, values, strict=True)))
    return tuple(result)


def _filled(values: list[int], step: float) -> list[int]:
    """Return ``values`` and more of them from 1 to ``MAX_SIZE``, neighbours at most ``step`` apart."""
    ends = ([1] if values[0] > 1 else []) + values + ([MAX_SIZE] if values[-1] < MAX_SIZE else [])
    result = ends[:1]
    for low, high in pairwise(ends):
        count = max(1, math.ceil(math.log(high / low) / math.log(step) - 1e-9))
        result += [round(low * (high / low) ** (j / count)) for j in range(1, count + 1)]
    return sorted(set(result))


def distance(name: str, call: Sizes, point: Sizes, upward: float = UPWARD) -> float:
    """Return how far a call is from a point, in weighted octaves; infinite if an exact size differs.

    ``upward`` is a factor of the weight of an open size by which the call is larger than the point.
    """
    total = 0.0
    for dimension, size, measured in zip(dimensions(name), call, point, strict=True):
        if dimension.is_exact and size != measured:
            return math.inf
        octaves = math.log2(max(size, 1) / max(measured, 1))
        total += dimension.weight * abs(octaves) * (upward if dimension.is_open and octaves > 0 else 1.0)
    return total


@dataclass(frozen=True, kw_only=True)
class LookupKey:
    """The fields of a table's point by which calls with its case's inputs are looked up."""

    dtype: str
    elements: int
    last: int
    sizes: Sizes
    flags: Flags


def lookup_key(name: str, inputs: Iterable[Input], params: Mapping[str, Any]) -> LookupKey:
    """Return the key of a case."""
    specs = list(inputs)
    main = max(specs, key=lambda i: i.numel)
    dtype = ([i.dtype for i in specs if "float" in i.dtype] or [main.dtype])[0]
    shapes = [i.shape for i in specs]
    return LookupKey(
        dtype=dtype,
        elements=sum(i.numel for i in specs),
        last=main.shape[-1] if main.shape else 1,
        sizes=sizes_of(name, shapes),
        flags=flags_of(name, shapes, ITEMSIZE[dtype], params),
    )


def call_case(name: str, tensors: Sequence[torch.Tensor], params: Mapping[str, Any]) -> Case:
    """Return a case made from a call, so that ``supports`` answers as it does in a check."""
    names = [i.name for i in registry.operator(name).cases[0].inputs]
    names += [f"input{i}" for i in range(len(names), len(tensors))]
    inputs = tuple(
        Input(name=n, shape=tuple(x.shape), dtype=str(x.dtype).removeprefix("torch."))
        for n, x in zip(names, tensors, strict=False)
    )
    return Case(name="call", inputs=inputs, params=params)


# ---- Cost model


def work(name: str, sizes: Sizes) -> float:
    """Return what a call's time is proportional to, in elements moved or their equivalent in FLOPs."""
    kind = family(name)
    if kind == "product":
        n, k, m = sizes
        return max(2.0 * m * n * k / FLOPS_PER_ELEMENT, float(m * k + n * k + m * n))
    if kind == "attention":
        d, heads, queries, keys = sizes
        return max(4.0 * heads * queries * keys * d / FLOPS_PER_ELEMENT, 2.0 * heads * d * (queries + keys))
    if kind == "embedding":
        return float(sizes[0] * sizes[2])
    return float(math.prod(sizes))


def waste(name: str, sizes: Sizes, units: int) -> float:
    """Return the factor by which whole tiles, whole waves over ``units`` SMs, and idle threads of narrow rows
    exceed the work itself."""
    kind = family(name)
    if kind == "product":
        n, _, m = sizes
        blocks, exact = math.ceil(m / TILE) * math.ceil(n / TILE), m * n / TILE**2
    elif kind == "attention":
        _, heads, queries, _ = sizes
        blocks, exact = heads * math.ceil(queries / TILE), heads * queries / TILE
    elif kind == "decode":
        _, keys, heads = sizes
        blocks, exact = heads * math.ceil(keys / SPLIT_KEYS), heads * keys / SPLIT_KEYS
    elif kind == "elements":
        exact = sizes[0] / BLOCK_ELEMENTS
        blocks = math.ceil(exact)
    else:
        exact = float(sizes[-1])
        blocks = sizes[-1]
    narrow = (max(1.0, FULL_COLUMNS / max(1, sizes[0])) ** NARROW_POWER) if kind == "rows" else 1.0
    return narrow * math.ceil(max(1, blocks) / units) * units / max(exact, 1e-9)


def waves_ratio(name: str, sizes: Sizes, point: Sizes, units: int) -> float:
    """Return a product's time in whole waves of whole tiles as a share of that at a point.

    :func:`work` times :func:`waste` counts a skinny product twice: its work is the weight's bytes, which no
    partly filled tile reads again. This one is near the time, not above it.
    """

    def time_of(n: int, k: int, m: int) -> float:
        waves = math.ceil(math.ceil(m / TILE) * math.ceil(n / TILE) / units)
        return max(2.0 * waves * units * TILE**2 * k / FLOPS_PER_ELEMENT, work(name, (n, k, m)))

    return time_of(*sizes) / time_of(*point)


def head_ratios(sizes: Sizes, point: Sizes) -> tuple[float, float]:
    """Return the time of a head's loss by ours and by PyTorch's products as shares of those at a point.

    PyTorch's products with our cross entropy stand for the `torch` implementation, which was measured.
    """

    def time_of(sizes: Sizes, flops: float, traffic: int) -> float:
        n, k, m = sizes
        return 6.0 * m * n * k / flops + float(traffic * m * n + 4 * (m * k + n * k))

    def ours(sizes: Sizes) -> float:
        return time_of(sizes, HEAD_FLOPS_PER_ELEMENT, HEAD_PASSES)

    library = time_of(sizes, FLOPS_PER_ELEMENT, COMPOSED_PASSES)
    library *= next((price for least, price in HEAD_MEMORY_PRICES if sizes[0] * sizes[2] >= least), 1.0)
    return ours(sizes) / ours(point), library / time_of(point, FLOPS_PER_ELEMENT, CONVERTED_PASSES)


def host_ratio(name: str, sizes: Sizes, point: Sizes) -> float:
    """Return the host's time of a call as a share of that at a point.

    It is the same at all sizes, except where rows are computed in chunks, one after another: then fewer rows
    than at the point need fewer launches. A quarter stays for the parts beside the chunks.
    """
    if name not in CHUNKED or sizes[-1] >= point[-1]:
        return 1.0
    return max(0.25, sizes[-1] / point[-1])


def scaled_us(us: float, ratio: float) -> float:
    """Return the time of ``ratio`` times the work of a call that takes ``us``: a launch stays a launch."""
    launch = min(LAUNCH_US, 0.8 * us)
    return launch + (us - launch) * ratio
