"""Sums and scans of segments: consecutive pieces of the last dimension, of any lengths.

``offsets`` (segments + 1,) says where each segment begins; the last one is the number of elements. A segment
may be empty. A scan with heads is a scan of pairs (a head was met, the sum since it), whose operator is
associative: G. Blelloch, "Prefix sums and their applications", CMU-CS-90-190 (1990).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.core import FORWARD, Case, Cost, Input, Operator, Property, Tolerance, WeftError
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate
from weft.ops._common.offsets import check_range, piece_numbers

DTYPES = ("float32", "float16", "bfloat16")
SPECIAL = (math.nan, math.inf, -math.inf, 0.0)


def sum_reference(values: Tensor, offsets: Tensor) -> Tensor:
    """Add up the segments in float64, whose error is far below every tolerance."""
    zeros = values.new_zeros((*values.shape[:-1], offsets.shape[0] - 1))
    return zeros.index_add(-1, piece_numbers(offsets, values.shape[-1]), values)


def scan_reference(x: Tensor, offsets: Tensor, *, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """Compute a scan of each segment by log2(n) shifted additions (Hillis and Steele).

    Step k adds the element 2^k before, where that is in the same segment: no sum is subtracted, so that a NaN
    stays in its segment.
    """
    n = x.shape[-1]
    numbers = piece_numbers(offsets, n)
    y = x
    if reverse:
        y, numbers = y.flip(-1), numbers.flip(-1)
    step = 1
    if exclusive and n:
        is_inside = numbers[1:] == numbers[:-1]
        shifted = torch.where(is_inside, y[..., :-1], 0.0)
        y = torch.cat((torch.zeros_like(y[..., :1]), shifted), -1)
    while step < n:
        is_inside = numbers[step:] == numbers[:-step]
        y = torch.cat((y[..., :step], y[..., step:] + torch.where(is_inside, y[..., :-step], 0.0)), -1)
        step *= 2
    return y.flip(-1) if reverse else y


def check_arguments(where: str, name: str, x: Any, offsets: Any, **flags: Any) -> None:
    """Raise :class:`WeftError` if the arguments do not fit; :func:`check_offsets` reads the offsets."""
    validate.tensor(where, name, x, DTYPES, dims=range(1, 65))
    validate.tensor(where, "offsets", offsets, ("int64",), dims=range(1, 2))
    validate.same_device(where, f"{name} and offsets", x, offsets)
    if offsets.shape[0] == 0:
        hint = "offsets has one entry more than there are segments: 0 first, the number of elements last"
        raise WeftError(f"{where}: offsets", expected="at least one entry", got=0, hint=hint)
    if offsets.shape[0] == 1 and x.shape[-1]:
        raise WeftError(f"{where}: offsets", expected=f"segments for {x.shape[-1]} elements", got="none")
    for flag, value in flags.items():
        validate.flag(f"{where}: {flag}", value)


def check_offsets(where: str, offsets: Tensor, n: int) -> None:
    """Raise :class:`WeftError` unless offsets run from 0 to n and none is below the one before it.

    It reads all offsets: on a GPU it waits for the device.
    """
    check_range(f"{where}: offsets", offsets, n, "segment")


def sum_backward(grad: Tensor, offsets: Tensor, columns: int) -> tuple[Tensor]:
    """Return the gradient by torch: of each element, that of its segment's sum."""
    if columns == 0:
        return (grad.new_empty((*grad.shape[:-1], 0)),)
    # An offset out of range, which a GPU does not check, must be no address.
    numbers = piece_numbers(offsets, columns).clamp(0, grad.shape[-1] - 1)
    return (grad.index_select(-1, numbers),)


def cost(c: Case, direction: str) -> Cost:
    """Count the elements and the offsets once, and the results once."""
    x, offsets = c.inputs
    size = ITEMSIZE[x.dtype]
    results = x.numel // max(x.shape[-1], 1) * (offsets.shape[0] - 1) * size
    if c.params:  # a scan, whose gradient is a scan
        return Cost(read=x.numel * size + offsets.nbytes, written=x.numel * size)
    if direction == FORWARD:
        return Cost(read=x.nbytes + offsets.nbytes, written=results)
    return Cost(read=results + offsets.nbytes, written=x.numel * size)


def sum_scale(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the larger of each sum and the norm of its terms, below which a sum may be by cancellation."""
    return torch.maximum(sum_reference(values, offsets).abs(), sum_reference(values.square(), offsets).sqrt())


def _empty_segments_are_0(y: Tensor, values: Tensor, offsets: Tensor) -> float:
    empty = offsets[1:] == offsets[:-1]
    return 0.0 if bool((y[..., empty] == 0).all()) else math.inf


def _adds_up(y: Tensor, values: Tensor, offsets: Tensor) -> float:
    """Return how far the sum of all results is from that of all elements, as a share of what is allowed."""
    if y.numel() == 0 or not bool(values.isfinite().all()):
        return 0.0
    size = values.double().abs().sum(-1)
    eps = torch.finfo(y.dtype).eps
    allowed = eps * y.double().abs().sum(-1) + 64 * torch.finfo(torch.float32).eps * size
    off = (y.double().sum(-1) - values.double().sum(-1)).abs() / allowed.clamp(min=1e-300)
    return float(torch.where(size > 0, off, 0.0).max())


def _begins_anew(
    y: Tensor, x: Tensor, offsets: Tensor, *, exclusive: bool = False, reverse: bool = False
) -> float:
    """Return infinity unless each segment's first output is its first element, or 0 if exclusive."""
    if y.numel() == 0:
        return 0.0
    begins, ends = offsets[:-1], offsets[1:]
    first = (ends - 1 if reverse else begins)[begins < ends]
    expected = torch.zeros_like(x[..., first]) if exclusive else x[..., first]
    return 0.0 if torch.equal(y[..., first].nan_to_num(7.0), expected.nan_to_num(7.0)) else math.inf


# ---- Cases

FAMILIES = {
    "even": "each segment has `mean` elements",
    "uneven": "lengths from 0 to about 2 `mean`, in a fixed pseudo-random order",
    "ones": "each segment has one element",
    "empty": "one segment of three has 3 `mean` elements; the first and the last segments are empty",
    "huge": "one segment has half of all elements, the others `mean` each",
    "all-empty": "no segment has an element",
}


@dataclass(frozen=True)
class Family:
    """Lengths of the segments of a case."""

    kind: str
    segments: int
    mean: int

    def lengths(self, device: str = "cpu") -> Tensor:
        """Return the length of each segment, (segments,) int64; the same on every device."""
        i = torch.arange(self.segments, device=device)
        if self.kind == "ones":
            return torch.ones_like(i)
        if self.kind == "empty":
            return 3 * self.mean * ((i % 3 == 1) & (i < self.segments - 1))
        if self.kind == "all-empty":
            return torch.zeros_like(i)
        if self.kind == "uneven":
            return (i * 2654435761 >> 7) % (2 * self.mean + 1)
        lengths = torch.full_like(i, self.mean)
        if self.kind == "huge":
            lengths[self.segments // 3] = (self.segments - 1) * self.mean
        return lengths

    @property
    def n(self) -> int:
        # Without torch, since a spec is made when it is imported: a parallel sum would start torch's threads,
        # without which the processes that a fork server makes wait for ever.
        if self.kind in ("even", "ones"):
            return self.segments * (1 if self.kind == "ones" else self.mean)
        if self.kind == "huge":
            return 2 * (self.segments - 1) * self.mean
        if self.kind == "empty":
            return 3 * self.mean * len(range(1, self.segments - 1, 3))
        if self.kind == "all-empty":
            return 0
        return sum((i * 2654435761 >> 7) % (2 * self.mean + 1) for i in range(self.segments))

    @property
    def longest(self) -> int:
        return {"huge": self.segments * self.mean, "ones": 1, "all-empty": 1}.get(self.kind, 3 * self.mean)


def _draw(family: Family, c: Case, seed: int, device: str) -> Sequence[Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    x, _ = c.inputs
    dtype = getattr(torch, x.dtype)
    shape = x.shape[-1:] if x.layout == "expanded" else x.shape  # the memory of an expanded one is one row
    if x.values == "equal":
        values = (0.5 + torch.rand((), generator=generator, device=device)).to(dtype).expand(shape)
    else:
        values = torch.randn(shape, generator=generator, device=device).to(dtype)
    if x.values == "special" and values.numel():
        for value in SPECIAL:
            count = max(1, values.numel() // 60)
            places = torch.randint(values.numel(), (count,), generator=generator, device=device)
            values.view(-1)[places] = value
    offsets = torch.zeros(family.segments + 1, dtype=torch.int64, device=device)
    torch.cumsum(family.lengths(device), 0, out=offsets[1:])
    return values.contiguous(), offsets


_LONGEST: dict[str, int] = {}  # by the name of a case


def _case(
    kind: str,
    segments: int,
    mean: int = 1,
    *,
    batch: tuple[int, ...] = (),
    dtype: str = "float32",
    layout: str = "contiguous",
    values: str = "normal",
    tags: str = "check",
    devices: tuple[str, ...] = ("cpu", "cuda"),
    scan: bool = False,
    **flags: bool,
) -> Case:
    """Return a case named like ``fp32-2x7-even-64-exclusive``: batch, segments, family and mean length."""
    family = Family(kind, segments, mean)
    words = [SHORT[dtype], "x".join(map(str, (*batch, segments))), kind]
    words += [str(mean)] * (kind not in ("ones", "all-empty"))
    words += [w for w in (layout, values) if w not in ("contiguous", "normal")]
    words += [flag for flag, is_on in flags.items() if is_on]
    name = "-".join(words)
    _LONGEST[name] = family.longest
    x = Input(
        name="x" if scan else "values",
        shape=(*batch, family.n),
        dtype=dtype,
        layout=layout,
        values=values,
    )
    plain = Case(
        name=name,
        inputs=(x, Input(name="offsets", shape=(segments + 1,), dtype="int64")),
        params={"exclusive": False, "reverse": False, **flags} if scan else {},
        tags=frozenset({tags}),
        devices=devices,
    )
    object.__setattr__(plain, "draw", partial(_draw, family, plain))
    return plain


CPU, CUDA = ("cpu",), ("cuda",)


def _cases(scan: bool) -> list[Case]:
    """Return the cases that both operators have."""
    one = partial(_case, scan=scan)
    edge: dict[str, Any] = {"tags": "edge"}
    on_gpu: dict[str, Any] = {"tags": "edge", "devices": CUDA}
    bench: dict[str, Any] = {"tags": "bench", "devices": CUDA}
    return [
        *(one("uneven", 23, 9, dtype=d) for d in DTYPES),
        one("even", 7, 64),
        one("even", 7, 40, batch=(3,)),
        # A running sum in bfloat16 loses a digit for each doubling of its terms.
        one("even", 3, 200, dtype="bfloat16", values="equal"),
        one("ones", 257),
        one("empty", 31, 5, batch=(2, 2)),
        one("huge", 12, 30),
        one("uneven", 40, 20, values="equal"),
        one("all-empty", 5, **edge),
        one("all-empty", 0, **edge),
        one("even", 1, 1, **edge),
        one("even", 1, 300, **edge),
        one("even", 3, 7, batch=(0,), **edge),
        *(one("uneven", 9, 8, batch=(6,), layout=k, **edge)
          for k in ("transposed", "sliced", "expanded", "shifted")),
        # A NaN or an Inf may not leave its segment.
        one("uneven", 60, 6, values="special", **edge),
        one("ones", 99, values="special", **edge),
        one("empty", 40, 4, values="special", dtype="bfloat16", **edge),
        one("huge", 1000, 70, **on_gpu),
        one("huge", 1000, 70, values="special", **on_gpu),
        one("uneven", 30001, 50, dtype="bfloat16", batch=(3,), **on_gpu),
        one("even", 40, 20001, **on_gpu),
        one("ones", 1 << 20, **on_gpu),
        one("empty", 100000, 7, **on_gpu),
        one("even", 2**22, 64, **bench),
        one("even", 2**22, 64, dtype="bfloat16", **bench),
        one("even", 2**14, 2**14, **bench),
        one("ones", 2**26, **bench),
        one("huge", 2**20, 128, **bench),
        one("even", 1024, 64, tags="bench", devices=CPU),
    ]  # fmt: skip


SCAN_CASES = [
    *_cases(True),
    _case("uneven", 23, 9, scan=True, exclusive=True),
    _case("uneven", 23, 9, scan=True, reverse=True),
    _case("uneven", 23, 9, scan=True, exclusive=True, reverse=True),
    _case("empty", 31, 6, scan=True, dtype="bfloat16", exclusive=True, reverse=True),
    _case("uneven", 60, 6, scan=True, values="special", exclusive=True, reverse=True, tags="edge"),
]  # fmt: skip


def _operator(name: str, **fields: Any) -> Operator:
    return Operator(
        name=name,
        cost=cost,
        dtypes=DTYPES,
        tolerance=Tolerance(
            chain=8.0,
            sum_length=lambda c: _LONGEST[c.name],
            reason="a segment may be added in any order, and a library adds a long one in a few lanes",
        ),
        **fields,
    )


SEGMENTED_SUM = _operator(
    "segmented_sum",
    summary="sum of each segment of the last dimension, by offsets",
    formula="y_i = sum of values_k over offsets_i <= k < offsets_i+1",
    signature="segmented_sum(values, offsets)",
    reference=sum_reference,
    cases=tuple(_cases(False)),
    validate=partial(check_arguments, "segmented_sum", "values"),
    differentiable=("values",),
    save=lambda inputs, output: (inputs[1], inputs[0].shape[-1]),
    properties=(
        Property(name="empty segments are 0", holds=_empty_segments_are_0),
        Property(name="all segments add up to all elements", holds=_adds_up),
    ),
    scale=sum_scale,
    scale_reason="a sum may rightly be near zero; the norm of its terms is its RMS over random signs",
    backward_note="of each element, the gradient of its segment's sum",
)
SEGMENTED_CUMSUM = _operator(
    "segmented_cumsum",
    summary="cumulative sum that begins anew in each segment of the last dimension",
    formula="y_k = x_b + ... + x_k from the begin b of the segment of k",
    signature="segmented_cumsum(x, offsets)",
    reference=scan_reference,
    cases=tuple(SCAN_CASES),
    validate=partial(check_arguments, "segmented_cumsum", "x"),
    differentiable=("x",),
    save=lambda inputs, output: (inputs[1],),
    properties=(Property(name="begins anew in each segment", holds=_begins_anew),),
    backward_note="the same scan of the gradient in the other direction",
)
