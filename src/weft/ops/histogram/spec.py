"""Histogram: how many elements fall into each bin. Integers are their own bin; floats have bins of one width.

The bin of a float32 x with low <= x <= high is min(trunc((x - low) * scale), bins - 1), with the difference
and the product rounded to float32, and scale = bins / (high - low) rounded to float32 once, on the host. No
multiplication precedes an addition, so that no compiler can fuse the two, and every backend computes the same
bits. An element within a rounding of an edge may thus be in the bin beside the one that real numbers give:
the formula is the definition. float16 and bfloat16 are widened to float32, which is exact.

The reference computes in float64 and rounds each result to float32. That is the rounding of the exact result:
a float64 has more than twice the digits, and two more (Figueroa, "When is double rounding innocuous?", 1995).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from weft.core import Case, Cost, Input, Operator, Property, WeftError, case
from weft.core.cases import SHORT
from weft.dispatch.choice import constant_while_tracing
from weft.ops._common import validate

FLOATS, INTEGERS = ("float32", "float16", "bfloat16"), ("uint8", "int32")
DTYPES = (*FLOATS, *INTEGERS)
# Bins are numbered in float32, which is exact up to here.
MAX_BINS = 1 << 24
# Subnormal differences, which some hardware takes for 0, are then all in the first bin; no scale overflows.
MIN_RANGE, MAX_RANGE = 2.0**-100, 2.0**100
PIECE = 1 << 26  # elements whose bins are in memory at once, as 8 bytes each


class Range(NamedTuple):
    """Limits of the counted floats, and the bins in a unit of x: all of them float32 numbers."""

    low: float
    high: float
    scale: float


@constant_while_tracing
def to_float32(value: float) -> float:
    """Return the nearest float32; infinity past the largest."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


@constant_while_tracing
def float_range(bins: int, low: float, high: float) -> Range:
    """Return the range of a call on floats."""
    low, high = to_float32(low), to_float32(high)
    return Range(low, high, to_float32(bins / (high - low)))


def pieces(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the elements of ``x`` in parts of at most ``PIECE``, so that temporaries stay small."""
    flat = x.reshape(-1)
    return flat.split(PIECE) if flat.numel() > PIECE else (flat,)


def reference(
    x: torch.Tensor, *, bins: int, low: float | None = None, high: float | None = None
) -> torch.Tensor:
    counts = torch.zeros(bins, dtype=torch.int64, device=x.device)
    for piece in pieces(x):
        if not x.is_floating_point():
            # Widened first: a comparison of uint8 with 256 would compare with 0.
            numbers = piece.long()
            counts += torch.bincount(numbers[(numbers >= 0) & (numbers < bins)], minlength=bins)
            continue
        assert low is not None and high is not None, "floats have a range"
        limits = float_range(bins, low, high)
        inside = piece[(piece >= limits.low) & (piece <= limits.high)]
        difference = (inside - limits.low).float().double()
        product = (difference * limits.scale).float()
        counts += torch.bincount(product.long().clamp(max=bins - 1), minlength=bins)
    return counts


def bins_of(x: torch.Tensor, bins: int, low: float | None, high: float | None) -> torch.Tensor:
    """Return the bin of each element as int64; ``bins`` for an element that is not counted."""
    if not x.is_floating_point():
        return torch.where((x >= 0) & (x.long() < bins), x.long(), bins)
    assert low is not None and high is not None, "floats have a range"
    limits = float_range(bins, low, high)
    wide = x.float()
    numbers = ((wide - limits.low) * limits.scale).long().clamp(max=bins - 1)
    return torch.where((wide >= limits.low) & (wide <= limits.high), numbers, bins)


def refuse_bools(**scalars: Any) -> None:
    """Raise :class:`WeftError` for a bool, in each call: True equals 1, and would get the plan for 1."""
    for name, value in scalars.items():
        if isinstance(value, bool):
            raise WeftError(f"histogram: {name}", expected="a number", got=repr(value))


def as_float(name: str, value: Any) -> Any:
    """Return an integer as a float, and anything else as it is; raise :class:`WeftError` for a huge one."""
    try:
        return float(value) if isinstance(value, int) else value
    except OverflowError as error:
        got = "an integer above every float"
        raise WeftError(f"histogram: {name}", expected="a finite float32 number", got=got) from error


def check_arguments(x: Any, *, bins: Any, low: Any = None, high: Any = None) -> None:
    validate.tensor("histogram", "x", x, DTYPES)
    refuse_bools(bins=bins, low=low, high=high)
    if not isinstance(bins, int) or not 1 <= bins <= MAX_BINS:
        raise WeftError("histogram: bins", expected=f"an integer from 1 to {MAX_BINS}", got=f"{bins!r:.80}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise WeftError(
            "histogram has no gradient",
            expected="an input without requires_grad, or torch.no_grad()",
            got="an input that requires a gradient",
            hint="x.detach()",
        )
    if not x.is_floating_point():
        if low is not None or high is not None:
            raise WeftError(
                "histogram: low and high",
                expected="None for integers, each of which is its own bin",
                got=f"{low!r:.40} and {high!r:.40}",
                hint="x.float()",
            )
        return
    for name, value in (("low", low), ("high", high)):
        if not isinstance(value, float) or not math.isfinite(to_float32(value)):
            expected = "a finite float32 number"
            hint = "low=float(x.min()), high=float(x.max()) covers all elements"
            raise WeftError(f"histogram: {name}", expected=expected, got=f"{value!r:.80}", hint=hint)
    width = to_float32(high) - to_float32(low)
    if not MIN_RANGE <= width <= MAX_RANGE:
        raise WeftError(
            "histogram: high - low", expected="between 2^-100 and 2^100, in float32", got=f"{width!r}"
        )


def cost(c: Case, direction: str) -> Cost:
    """The input is read once; the counts are next to nothing where elements are many."""
    return Cost(read=c.inputs[0].nbytes, written=8 * int(str(c.params["bins"])))


def _counts_each_once(
    counts: torch.Tensor, x: torch.Tensor, *, bins: int, low: float | None = None, high: float | None = None
) -> float:
    """Return infinity unless the counts sum to the number of elements in range, and none is negative."""
    least, most = (0, bins - 1) if low is None or high is None else float_range(bins, low, high)[:2]
    wide = (p.double() for p in pieces(x))
    inside = sum(int(((p >= least) & (p <= most)).sum()) for p in wide)
    return 0.0 if int(counts.sum()) == inside and bool((counts >= 0).all()) else math.inf


# ---- Cases


def _integers(spec: Input, top: int, order: str, seed: int, device: str) -> list[torch.Tensor]:
    """Generate integers below ``top`` (int32: from -top / 8) in some order, or equal ones."""
    generator = torch.Generator(device).manual_seed(seed)
    least = -(top // 8) if spec.dtype == "int32" else 0
    dtype = getattr(torch, spec.dtype)
    if order == "equal":
        value = torch.randint(0, top, (), generator=generator, device=device, dtype=dtype)
        return [value.expand(spec.shape).contiguous()]
    x = torch.randint(least, top, spec.shape, generator=generator, device=device, dtype=dtype)
    if order == "uniform":
        return [x]
    return [x.flatten().sort(descending=order == "reversed").values.view(spec.shape)]


def _edge_values(
    spec: Input, bins: int, low: float, high: float, seed: int, device: str
) -> list[torch.Tensor]:
    """Generate elements at the edges of bins, and the nearest numbers on either side of them."""
    generator = torch.Generator(device).manual_seed(seed)
    edge = torch.randint(0, bins + 1, spec.shape, generator=generator, device=device)
    x = (low + edge.double() * ((high - low) / bins)).to(getattr(torch, spec.dtype))
    side = torch.randint(-1, 2, spec.shape, generator=generator, device=device)
    beside = torch.nextafter(x, torch.where(side < 0, -math.inf, math.inf).to(x.dtype))
    return [torch.where(side == 0, x, beside)]


def _of_integers(
    *shape: int, bins: int = 256, top: int = 256, order: str = "uniform", **options: Any
) -> Case:
    """Return a case of integers, named like ``uint8-4099-256-equal``."""
    dtype = options.pop("dtype", "uint8")
    x = Input(name="x", shape=shape, dtype=dtype, layout=options.pop("layout", "contiguous"))
    words = [dtype, options.pop("size", "x".join(map(str, shape))), str(bins), *_words(x.layout, order)]
    name = "-".join(words)
    c = case(x, name=name, bins=bins, low=None, high=None, **options)
    return replace(c, draw=partial(_integers, x, top, order))


def _of_floats(
    *shape: int, bins: int = 64, low: float = -2.5, high: float = 2.5, values: str = "normal", **options: Any
) -> Case:
    """Return a case of floats, named like ``fp32-1021-64-sweep``; ``edges`` are values at the bins' edges."""
    dtype, layout = options.pop("dtype", "float32"), options.pop("layout", "contiguous")
    known = "normal" if values == "edges" else values
    x = Input(name="x", shape=shape, dtype=dtype, layout=layout, values=known)
    words = [SHORT[dtype], options.pop("size", "x".join(map(str, shape))), str(bins), *_words(layout, values)]
    c = case(x, name="-".join(words), bins=bins, low=low, high=high, **options)
    return replace(c, draw=partial(_edge_values, x, bins, low, high)) if values == "edges" else c


def _words(layout: str, values: str) -> list[str]:
    return [w for w in (layout, values) if w not in ("contiguous", "normal", "uniform")]


CPU, CUDA = ("cpu",), ("cuda",)
CHECKS = [
    _of_floats(7, 143),
    _of_floats(1003, dtype="float16"),
    _of_floats(1003, dtype="bfloat16", bins=100),
    _of_integers(1031),
    _of_integers(1031, dtype="int32", bins=100, top=128),
    *(_of_integers(2051, order=o) for o in ("equal", "sorted", "reversed")),
    _of_floats(3000, values="edges", bins=10, low=0.1, high=0.7),
    _of_floats(3000, values="edges", bins=1000, low=-1e-3, high=1e4),
    _of_floats(3000, dtype="float16", values="edges", bins=37, low=-0.3, high=0.3),
]
EDGES = [
    *(_of_floats(*s, tags="edge") for s in ((0,), (3, 0), (), (1,))),
    _of_integers(0, tags="edge"),
    *(_of_floats(33, 65, layout=k, tags="edge") for k in ("transposed", "sliced", "expanded", "shifted")),
    _of_integers(2050, layout="shifted", tags="edge"),
    *(_of_floats(40, 77, values=v, tags="edge") for v in ("special", "equal", "ones", "rising", "falling")),
    _of_floats(3011, values="sweep", bins=128, low=-60.0, high=60.0, tags="edge"),
    # One bin; more values than bins; more bins than values; more than shared memory has counters for.
    _of_floats(2500, bins=1, tags="edge"),
    _of_integers(2500, bins=3, tags="edge"),
    _of_integers(2500, bins=300, tags="edge"),
    _of_integers(2500, dtype="int32", bins=5000, top=6000, tags="edge"),
    _of_floats(2500, bins=9000, tags="edge"),
    _of_floats(3000001, bins=256, tags="edge", devices=CUDA),
    _of_floats(3000001, bins=100000, values="equal", tags="edge", devices=CUDA),
    *(_of_integers(9000007, order=o, tags="edge", devices=CUDA) for o in ("uniform", "equal", "sorted")),
]
BENCHES = [
    *(_of_integers(2**28, order=o, tags="bench", devices=CUDA, size="2^28") for o in ("uniform", "equal")),
    *(
        _of_floats(2**26, bins=256, values=v, tags="bench", devices=CUDA, size="2^26")
        for v in ("normal", "equal")
    ),
    _of_floats(2**26, dtype="bfloat16", bins=256, tags="bench", devices=CUDA, size="2^26"),
    _of_integers(2**26, dtype="int32", bins=4096, top=4096, tags="bench", devices=CUDA, size="2^26"),
    _of_floats(2**26, bins=100000, tags="bench", devices=CUDA, size="2^26"),
    # Offsets and a count that int32 does not hold.
    _of_integers(2**31 + 8, order="equal", tags="bench", devices=CUDA, size="2^31+8"),
    _of_integers(2**20, tags="bench", devices=CPU, size="2^20"),
]

OPERATOR = Operator(
    name="histogram",
    summary="how many elements fall into each bin",
    formula="counts_k = number of i with bin(x_i) = k",
    signature="histogram(x, bins, low, high)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    properties=(Property(name="counts each element in range once", holds=_counts_each_once),),
)
