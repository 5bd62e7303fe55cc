"""Faults that any operator can have: unwritten, stale or malformed outputs, overwritten inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch.utils.weak import WeakIdKeyDictionary

from weft.core import registry
from weft.workbench.calls.guarded_memory import bits, dense_strides
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import (
    NEEDS_GPU,
    OPERATORS,
    Forward,
    after,
    blank,
    honest,
    nudged,
    owned,
    past_the_end,
    plant,
)

STREAMS = "without a GPU there are no streams"


def _nothing(operator: str) -> Callable[[], Forward]:
    return lambda: lambda *x, **params: blank(operator, *x)


def _first_output_always(operator: str) -> Callable[[], Forward]:
    """Return the output of the first call with this tensor object."""

    def make() -> Forward:
        first_outputs = WeakIdKeyDictionary()

        def forward(*x: torch.Tensor, **params: object) -> torch.Tensor:
            if x[0] not in first_outputs:
                first_outputs[x[0]] = honest(operator)(*x, **params)
            return first_outputs[x[0]].clone()  # type: ignore[no-any-return]

        return forward

    return make


def _bench_only(operator: str) -> Callable[[], Forward]:
    def make() -> Forward:
        cases = registry.operator(operator).select("bench", "cuda")
        cases += registry.operator(operator).select("bench", "cpu")
        known = {tuple(i.shape for i in c.inputs) for c in cases}

        def forward(*x: torch.Tensor, **params: object) -> torch.Tensor:
            if tuple(tuple(t.shape) for t in x) in known:
                return honest(operator)(*x, **params)  # type: ignore[no-any-return]
            return blank(operator, *x).zero_()

        return forward

    return make


def _any_strides(operator: str) -> Callable[[], Forward]:
    def forward(*x: torch.Tensor, **params: object) -> torch.Tensor:
        taken = [t.as_strided(t.shape, dense_strides(t.shape)) for t in x]
        return honest(operator)(*taken, **params)  # type: ignore[no-any-return]

    return lambda: forward


def _one_buffer(operator: str) -> Callable[[], Forward]:
    def make() -> Forward:
        buffers: dict[object, torch.Tensor] = {}

        def forward(*x: torch.Tensor, **params: object) -> torch.Tensor:
            y = honest(operator)(*x, **params)
            return buffers.setdefault((y.shape, y.stride(), y.dtype), y.clone()).copy_(y)

        return forward

    return make


def _skips(operator: str, last_call: int) -> Callable[[], Forward]:
    def make() -> Forward:
        calls = itertools.count(1)

        def forward(*x: torch.Tensor, **params: object) -> torch.Tensor:
            late = next(calls) > last_call
            return blank(operator, *x) if late else honest(operator)(*x, **params)

        return forward

    return make


def _zeroes_its_input(operator: str) -> Callable[[], Forward]:
    def forward(*x: torch.Tensor, **params: object) -> torch.Tensor:
        y = honest(operator)(*x, **params)
        for t in x:
            # The memory of an expanded input is one row.
            t.as_strided(t.shape[-1:], t.stride()[-1:]).zero_()
        return y  # type: ignore[no-any-return]

    return lambda: forward


def _gives_up_when_empty(operator: str) -> Callable[[], Forward]:
    def forward(*x: torch.Tensor, **params: object) -> torch.Tensor:
        if any(t.numel() == 0 for t in x):
            raise ValueError("grid size must be positive")
        return honest(operator)(*x, **params)  # type: ignore[no-any-return]

    return lambda: forward


def _warmth() -> Callable[[torch.Tensor], bool]:
    """Return a function that is true from the sixth call in a row on one input."""
    address, last_bits, calls = 0, torch.empty(0), 0

    def warm(x: torch.Tensor) -> bool:
        nonlocal address, last_bits, calls
        now = bits(x).clone()
        same = x.data_ptr() == address and torch.equal(now, last_bits)
        address, last_bits, calls = x.data_ptr(), now, calls + 1 if same else 1
        return calls > 5

    return warm


def _when_warm(operator: str) -> Callable[[], Forward]:
    """Change the last bit from the sixth call in a row on one input, as a faster variant might."""

    def make() -> Forward:
        warm = _warmth()

        def forward(*x: torch.Tensor, **params: object) -> torch.Tensor:
            y = honest(operator)(*x, **params)
            return nudged(y, 0.75, every=7) if warm(x[0]) else y

        return forward

    return make


def _nan_unwritten(operator: str) -> Callable[[], Forward]:
    """Leave NaN elements unwritten from the sixth call in a row."""

    def make() -> Forward:
        warm = _warmth()

        def forward(*x: torch.Tensor, **params: object) -> torch.Tensor:
            y, output = honest(operator)(*x, **params), blank(operator, *x)
            return torch.where(y.isnan(), output, y) if warm(x[0]) else output.copy_(y)

        return forward

    return make


def _by_address(operator: str) -> Callable[[], Forward]:
    """Change the last bit for an input at a new address, as another order of additions would."""

    def make() -> Forward:
        seen: set[int] = set()

        def forward(*x: torch.Tensor, **params: object) -> torch.Tensor:
            new = bool(seen) and x[0].data_ptr() not in seen
            seen.add(x[0].data_ptr())
            y = honest(operator)(*x, **params)
            return nudged(y, 0.75, every=7) if new else y

        return forward

    return make


def _default_stream(operator: str) -> Callable[[], Forward]:
    def forward(*x: torch.Tensor, **params: object) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.default_stream()):
            return honest(operator)(*x, **params)  # type: ignore[no-any-return]

    return lambda: forward


def _nan_over_a_part(y: torch.Tensor) -> torch.Tensor:
    output = owned(y)
    if output.numel() > 1:
        flat = output.view(-1)
        flat[flat.numel() // 3 :][:5] = math.nan
    return output


def _nan_at_a_size(operator: str) -> Callable[[], Forward]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return honest(operator)(x) * (math.nan if x.numel() == 1031 else 1)  # type: ignore[no-any-return]

    return lambda: forward


def _stores_past_the_end(y: torch.Tensor) -> torch.Tensor:
    output = owned(y)
    past_the_end(output).zero_()
    return output


def _one_off(y: torch.Tensor) -> torch.Tensor:
    """Change one of 1000 elements by 12 units in the last place."""
    if y.numel() < 1000:
        return y
    output = owned(y)
    size = output.double().abs().nan_to_num(0, 0, 0)
    at = int((size - size.square().mean().sqrt()).abs().argmin())  # one as large as most
    output.view(-1)[at : at + 1].mul_(1 + 12 * torch.finfo(y.dtype).eps)
    return output


def _transposed(y: torch.Tensor) -> torch.Tensor:
    return y.mT.contiguous().mT if y.dim() > 1 else y


def _double(operator: str) -> Callable[[], Forward]:
    return lambda: lambda *x, **params: honest(operator)(*(t.double() for t in x), **params)


def _wrong_type_or_layout(operator: str) -> Iterator[Mutant]:
    """W19: correct values with a wrong type or layout, each detected by one rule only."""

    def one(rule: str, what: str, title: str, forward: Callable[[], Forward]) -> Mutant:
        # Numbers elsewhere cannot be compared at all, nor three dimensions as a matrix product.
        more_than_one = rule == "device" or (rule, operator) == ("shape", "matmul")
        only = "" if more_than_one else rule
        return plant(f"W19/{operator}/eager/{what}", title, rule, forward, only=only)

    more = after(operator, lambda y: y.contiguous()[None])
    yield one("dtype", "double", "answers in float64", _double(operator))
    yield one("shape", "one-dimension-more", "a shape that only broadcasts", more)
    yield one("type", "parameter", "a subclass of a tensor", after(operator, torch.nn.Parameter))
    yield one("device", "elsewhere", "another device", after(operator, lambda y: y.to("meta")))
    if operator != "sum":
        yield one("layout", "turned", "stored column by column", after(operator, _transposed))


def _for(operator: str) -> Iterator[Mutant]:
    def one(row: str, what: str, *rest: object, **more: object) -> Mutant:
        return plant(f"{row}/{operator}/eager/{what}", *rest, **more)  # type: ignore[arg-type]

    wide = "error special written returns"
    yield one("W01", "nothing", "returns memory that it never wrote", "written", _nothing(operator))
    zeros = after(operator, torch.zeros_like)
    yield one("W02", "zeros", "returns zeros", "error", zeros)
    first = _first_output_always(operator)
    yield one("W02", "first-answer", "returns its first output in every call", "error", first, only="seeds")
    yield one("W06", "any-strides", "assumes contiguous rows", wide, _any_strides(operator),
              only="strides")  # fmt: skip
    bench = _bench_only(operator)
    yield one("W07", "bench-only", "right at the timed shapes only", "error", bench)
    yield one("W15", "one-buffer", "one buffer for every answer", "kept", _one_buffer(operator),
              only="kept")  # fmt: skip
    yield one("W16", "ten-calls", "right for ten calls, then skips", "written recheck repeats",
              _skips(operator, 10))  # fmt: skip
    yield one("W16", "nan-unwritten", "from the sixth call on, leaves NaNs unwritten", "written",
              _nan_unwritten(operator), only="written")  # fmt: skip
    yield one("W18", "size-0", "raises at size 0", "returns", _gives_up_when_empty(operator),
              only="empties")  # fmt: skip
    yield one("W20", "zeroes-input", "zeroes its input", "inputs", _zeroes_its_input(operator))
    part = _nan_at_a_size(operator) if operator == "sum" else after(operator, _nan_over_a_part)
    yield one("W24", "nan-part", "NaN over a part", "special", part,
              only="" if operator == "matmul" else "special")  # fmt: skip
    yield one("W14", "when-warm", "other bits at the sixth call", "repeats",
              _when_warm(operator), only="repeats")  # fmt: skip
    yield one("W14", "by-address", "other bits at a new address", "again", _by_address(operator),
              only="again")  # fmt: skip
    yield one("W05", "store-behind", "writes one element past the end", "guards",
              after(operator, _stores_past_the_end), only="guards")  # fmt: skip
    yield one("W23", "default-stream", "works on the default stream", "stream",
              _default_stream(operator), only="stream", not_here=STREAMS, **NEEDS_GPU)  # fmt: skip


MUTANTS = tuple(m for op in OPERATORS for family in (_for, _wrong_type_or_layout) for m in family(op))
