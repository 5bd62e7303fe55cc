"""Stable sorting along the last dimension: ``sort`` with the indices, ``sort_keys`` of the values alone.

Equal elements keep their order, so that the result is unique and is checked exactly. NaN is above +Inf, NaNs
are equal to each other, and -0 equals 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from weft.core import Case, Cost, Input, Operator, Property, WeftError, case
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate

FLOATS, INTEGERS = ("float32", "float16", "bfloat16"), ("int32", "int64")
DTYPES = (*FLOATS, *INTEGERS)
INDEX_BYTES = 8
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element, and the integer of that size


def reference(x: torch.Tensor, *, descending: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = torch.sort(x, dim=-1, descending=descending, stable=True)
    return values, indices


def reference_keys(x: torch.Tensor, *, descending: bool = False) -> torch.Tensor:
    return reference(x, descending=descending)[0]


def check_arguments(name: str, x: Any, *, descending: Any = False) -> None:
    validate.tensor(name, "x", x, DTYPES, dims=range(1, 65))
    validate.flag(f"{name}: descending", descending)


def check_keys(x: Any, *, descending: Any = False) -> None:
    check_arguments("sort_keys", x, descending=descending)
    if torch.is_grad_enabled() and x.requires_grad:
        raise WeftError(
            "sort_keys has no gradient",
            expected="an input without requires_grad, or torch.no_grad()",
            got="an input that requires a gradient",
            hint="weft.ops.sort(x) has one; or x.detach()",
        )


def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """Save the indices."""
    return (output[1],)


def backward(grad: torch.Tensor, indices: torch.Tensor, *, descending: bool = False) -> tuple[torch.Tensor]:
    """Return the gradient by torch. Indices are a permutation of each row: every element is written."""
    return (grad.new_zeros(grad.shape).scatter_(-1, indices, grad),)


def cost(c: Case, direction: str, with_indices: bool = True) -> Cost:
    """Each element is read once and written once, and its index beside it.

    No sort of long rows reaches that: a radix sort moves 8-bit digits, one pass over memory for each.
    """
    (x,) = c.inputs
    size = ITEMSIZE[x.dtype]
    pairs = x.numel * (size + INDEX_BYTES * with_indices)
    if direction == "forward":
        return Cost(read=x.nbytes, written=pairs)
    return Cost(read=pairs, written=x.numel * size)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Return a number for each element that depends on all of its bits; one for all NaNs."""
    bits = x.view(BITS[x.element_size()]).to(torch.int64)
    if x.is_floating_point():
        bits = bits.masked_fill(x.isnan(), 1 << 40)
    # An odd factor and a shift, so that a sum of the numbers is not the sum of the elements.
    bits = (bits + 0x1234567) * -0x61C8864680B583EB
    return (bits ^ (bits >> 29)) * -0x4B47D0C5A7F2E6A3


def _has_the_elements(values: torch.Tensor, x: torch.Tensor, *, descending: bool = False) -> float:
    """Return infinity unless each row has the elements of x, bit for bit, by two checksums of each."""
    ours, theirs = _mixed(values.contiguous()), _mixed(x.contiguous())
    same = torch.equal(ours.sum(-1), theirs.sum(-1)) and torch.equal(
        (ours ^ (ours >> 32)).sum(-1), (theirs ^ (theirs >> 32)).sum(-1)
    )
    return 0.0 if same else math.inf


def _is_sorted(values: torch.Tensor, x: torch.Tensor, *, descending: bool = False) -> float:
    """Return infinity unless no element is below the one before it; NaN is above all."""
    left, right = values[..., :-1], values[..., 1:]
    if descending:
        left, right = right, left
    in_order = left <= right
    if values.is_floating_point():
        in_order |= right.isnan()
    return 0.0 if bool(in_order.all()) else math.inf


# ---- Cases


def integers(spec: Input, order: str, seed: int, device: str) -> list[torch.Tensor]:
    """Generate integers: ``uniform`` over the whole range with both ends in it, ``few`` values, ``digit``:
    all alike but for one digit of 8 bits, ``equal``, ``sorted`` or ``reversed``."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, spec.dtype)
    info = torch.iinfo(dtype)

    def random(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, spec.shape, generator=generator, device=device, dtype=dtype)

    if order in ("few", "digit", "equal"):
        return [random(-2, 3) if order == "few" else (random(0, 256 if order == "digit" else 1) << 16) - 7]
    x = random(info.min, info.max)
    if x.numel() > 4:
        x.view(-1)[: x.numel() // 4].clamp_(-1, 1)
        x.view(-1)[-3:] = torch.tensor([info.max, info.min, info.max], dtype=dtype)
    return [x if order == "uniform" else x.sort(-1, descending=order == "reversed").values]


def _case(
    *shape: int,
    dtype: str = "float32",
    layout: str = "contiguous",
    values: str = "normal",
    descending: bool = False,
    size: str = "",
    **more: Any,
) -> Case:
    """Return a case named like ``fp32-5x257-descending``; of integers, ``values`` is the order of
    :func:`integers`."""
    of_integers = dtype in INTEGERS
    x = Input(name="x", shape=shape, dtype=dtype, layout=layout, values="normal" if of_integers else values)
    words = [SHORT.get(dtype, dtype), size or "x".join(map(str, shape))]
    words += [w for w in (layout, values) if w not in ("contiguous", "normal", "uniform")]
    words += ["descending"] if descending else []
    c = case(x, name="-".join(words), descending=descending, **more)
    return replace(c, draw=partial(integers, x, values)) if of_integers else c


CUDA: dict[str, Any] = {"tags": "edge", "devices": ("cuda",)}
GPU_BENCH: dict[str, Any] = {"tags": "bench", "devices": ("cuda",)}
LAYOUTS = ("transposed", "sliced", "expanded", "shifted")


def _cases_of_floats() -> Iterable[Case]:
    yield from (_case(3, 129, dtype=d) for d in FLOATS)
    yield _case(5, 257, descending=True)
    yield _case(2, 3, 64, dtype="bfloat16", descending=True)
    # Every element ties; a long row of a half type has many ties.
    yield _case(4, 300, values="equal", descending=True)
    yield _case(2, 1000, dtype="bfloat16")
    yield from (_case(3, 200, values=v) for v in ("rising", "falling"))
    yield from (_case(*s, tags="edge") for s in ((1,), (7, 1), (0, 5), (5, 0), (1021,)))
    yield from (_case(9, 65, layout=v, tags="edge") for v in LAYOUTS)
    yield _case(9, 259, values="special", tags="edge")
    yield _case(9, 259, values="special", dtype="bfloat16", descending=True, tags="edge")
    yield _case(9, 259, values="special", dtype="float16", tags="edge")
    # The longest row of a block, the first longer one, and rows of several tiles, the last of one element.
    yield from (_case(3, n, **CUDA) for n in (4096, 4097, 3 * 7680 + 1))
    yield from (
        _case(3, 70001, dtype=d, values="special", descending=down, **CUDA)
        for d in ("float32", "bfloat16")
        for down in (False, True)
    )
    yield _case(2, 300007, values="equal", **CUDA)


def _cases_of_integers() -> Iterable[Case]:
    yield from (_case(3, 130, dtype=d, values="uniform") for d in INTEGERS)
    yield _case(5, 300, dtype="int64", values="uniform", descending=True)
    yield from (_case(2, 777, dtype="int32", values=v) for v in ("few", "digit", "sorted", "reversed"))
    yield _case(9, 66, dtype="int32", values="uniform", layout="shifted", tags="edge")
    yield from (_case(2, n, dtype="int64", values="uniform", **CUDA) for n in (2048, 2049, 60001))
    yield from (_case(2, 300007, dtype="int32", values=v, **CUDA) for v in ("uniform", "digit", "equal"))
    yield _case(3000001, dtype="int32", values="few", descending=True, **CUDA)


BENCHES = (
    _case(2**27, size="2^27", **GPU_BENCH),
    _case(2**27, size="2^27", dtype="bfloat16", **GPU_BENCH),
    _case(65536, 1024, **GPU_BENCH),
    _case(4096, 32768, **GPU_BENCH),
    _case(256, 1024, tags="bench", devices=("cpu",)),
)
# Of integers, without indices: the keys by which radix sorts are compared.
INTEGER_BENCHES = (
    *(
        _case(2**27, size="2^27", dtype="int32", values=v, **GPU_BENCH)
        for v in ("uniform", "equal", "sorted")
    ),
    _case(2**26, size="2^26", dtype="int64", values="uniform", **GPU_BENCH),
)
PROPERTIES = (
    Property(name="rows are in order", holds=_is_sorted),
    Property(name="rows have the elements of x", holds=_has_the_elements),
)

SORT = Operator(
    name="sort",
    summary="the elements of each row in order, with their indices; equal ones keep their order",
    formula="values_i = x_{indices_i}, in order",
    signature="sort(x)",
    reference=reference,
    cases=(*_cases_of_floats(), *BENCHES),
    cost=cost,
    validate=partial(check_arguments, "sort"),
    dtypes=DTYPES,
    differentiable=("x",),
    save=save,
    output_names=("values", "indices"),
    properties=PROPERTIES,
    backward_note="the gradient of each value goes to its element",
)

SORT_KEYS = Operator(
    name="sort_keys",
    summary="the elements of each row in order, without indices",
    formula="y = x in order",
    signature="sort_keys(x)",
    reference=reference_keys,
    cases=(*_cases_of_floats(), *_cases_of_integers(), *BENCHES, *INTEGER_BENCHES),
    cost=partial(cost, with_indices=False),
    validate=check_keys,
    dtypes=DTYPES,
    properties=PROPERTIES,
)
