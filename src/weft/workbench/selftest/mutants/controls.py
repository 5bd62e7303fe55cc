"""Honest kernels that look like cheats and must pass: a judge that refuses everything is useless."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from weft.backends.triton_jit import tl, triton
from weft.core import FORWARD, Implementation, registry
from weft.ops._common.layout import dense
from weft.workbench.selftest.mutants import own_operators
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.planting import OPERATORS, blank, honest

# In the interpreter all cases of softmax or gelu take as long as fifty mutants.
ON_GPU: dict[str, Any] = {
    "devices": ("cuda",),
    "not_here": "too slow in Triton's interpreter; the kernels of sum and matmul are judged there",
}
BLOCK = 4096
PROGRAMS = 64
POOL = 8  # buffers or answers that a control keeps


@triton.jit
def sum_atomically(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # x: (n,); y: one float64, zeroed. A program strides over blocks and adds once, in any order.
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float64)
    tl.atomic_add(y_ptr, tl.sum(total, axis=0))


def atomic_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum all elements; the hardware chooses the order of the programs' sums."""
    x = dense(x)
    y = torch.zeros((), dtype=torch.float64, device=x.device)
    programs = max(1, min(PROGRAMS, triton.cdiv(x.numel(), BLOCK)))
    sum_atomically[(programs,)](x, y, x.numel(), BLOCK=BLOCK)
    return y.to(x.dtype)


def _control(identity: str, title: str, make: Callable[[], Implementation], **more: Any) -> Mutant:
    return Mutant(
        id=identity,
        operator=identity.split("/")[1],
        title=title,
        killed_by=(),
        make=make,
        honest=True,
        **more,
    )


def _same_as(identity: str, name: str) -> Callable[[], Implementation]:
    """Wrap an implementation of the registry under another name, as a user's file might."""

    def make() -> Implementation:
        base = registry.implementation(identity.split("/")[1], name)

        def forward(*x: torch.Tensor, **params: Any) -> Any:
            return base.forward(*x, **params)

        return replace(base, name=identity, forward=forward, aot_kernels=())

    return make


def _flushed(identity: str) -> Callable[[], Implementation]:
    """Flush subnormal numbers to zero, as a GPU's fast exponentials do."""

    def make() -> Implementation:
        base = registry.implementation(identity.split("/")[1], "torch")

        def forward(*x: torch.Tensor, **params: Any) -> Any:
            y = base.forward(*x, **params)
            tiny = torch.finfo(torch.float32).smallest_normal
            return torch.where(y.abs() < tiny, 0.0, y) if y.dtype == torch.float32 else y

        return replace(base, name=identity, forward=forward, aot_kernels=(), directions=(FORWARD,))

    return make


def _atomic() -> Implementation:
    return Implementation(
        operator="sum",
        name="H4/sum/triton/atomic",
        backend="triton",
        forward=atomic_sum,
        directions=(FORWARD,),
        deterministic=False,
    )


def _expands_its_gradient() -> Implementation:
    """Return a sum whose gradient is a view of the incoming one, also of one element."""
    return Implementation(
        operator="sum",
        name="H11/sum/eager/expanded",
        backend="eager",
        forward=honest("sum"),
        backward=lambda grad, shape: (grad.expand(shape),),
    )


def _by_rows_in_a_pool() -> Implementation:
    """Return a GELU whose rows are halved between two threads, which stay for the next call."""
    pool, gelu = ThreadPoolExecutor(2, thread_name_prefix="rows"), honest("gelu")

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.dim() < 2 or x.is_cuda:
            return y.copy_(gelu(x))
        pairs = zip(x.chunk(2), y.chunk(2), strict=True)
        # list() waits for both threads.
        list(pool.map(lambda pair: pair[1].copy_(gelu(pair[0])), pairs))
        return y

    return Implementation(
        operator="gelu",
        name="H9/gelu/eager/pool",
        backend="eager",
        forward=forward,
        directions=(FORWARD,),
    )


def _from_a_pool() -> Implementation:
    """Return a GELU that computes in a buffer of its own, one of eight in turn, and returns a copy."""
    pools: dict[object, Iterator[torch.Tensor]] = {}
    gelu = honest("gelu")

    def forward(x: torch.Tensor) -> torch.Tensor:
        key = (x.shape, x.dtype, x.device)
        if key not in pools:
            pools[key] = itertools.cycle([blank("gelu", x) for _ in range(POOL)])
        return next(pools[key]).copy_(gelu(x)).clone()

    return _eager("H13/gelu/eager/copied-out", forward)


def _stores_its_answers() -> Implementation:
    """Return a softmax that keeps its last answers, as one that logs them does, and returns none again."""
    answers: deque[torch.Tensor] = deque(maxlen=POOL)
    softmax = honest("softmax")

    def forward(*x: torch.Tensor, **params: Any) -> torch.Tensor:
        answers.append(softmax(*x, **params))
        return answers[-1]

    return _eager("H13/softmax/eager/stored", forward)


def _by_value() -> Implementation:
    """Return a sum that returns a copy of its last answer to inputs that are equal in each element."""
    last: list[torch.Tensor] = []
    total = honest("sum")

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not last or not _is_same(last[0], x):
            last[:] = [x.clone(), total(x)]
        return last[1].clone()

    return _eager("H13/sum/eager/by-value", forward)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bits, so that NaN equals NaN and -0.0 is not 0.0."""
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    bits, other_bits = (t.contiguous().view(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(bits, other_bits)


def _eager(identity: str, forward: Callable[..., Any]) -> Implementation:
    operator = identity.split("/")[1]
    return Implementation(
        operator=operator, name=identity, backend="eager", forward=forward, directions=(FORWARD,)
    )


def _controls() -> Iterator[Mutant]:
    for operator in OPERATORS:
        eager = f"H1/{operator}/eager/wrapped"
        yield _control(eager, "a wrapper around eager", _same_as(eager, "eager"))
        kernel = f"H2/{operator}/triton/float32"
        device_options = {} if operator in ("sum", "matmul") else ON_GPU
        make = _same_as(kernel, "triton")
        yield _control(kernel, "a Triton kernel that sums in float32", make, **device_options)
    yield _control("H3/halve/eager/in-place", "a declared in-place operator",
                   lambda: own_operators.IN_PLACE)  # fmt: skip
    yield _control("H4/sum/triton/atomic", "a declared nondeterministic atomic sum", _atomic)
    yield _control("H5/balance/eager/differences", "an answer that is truly about 0",
                   lambda: own_operators.DIFFERENCES)  # fmt: skip
    flushed = "H8/softmax/eager/flushed"
    yield _control(flushed, "subnormal numbers flushed to zero", _flushed(flushed))
    yield _control("H9/gelu/eager/pool", "a thread pool that waits between calls",
                   _by_rows_in_a_pool, phase="bench")  # fmt: skip
    yield _control("H11/sum/eager/expanded", "a gradient that is a view of the incoming one",
                   _expands_its_gradient)  # fmt: skip
    yield _control("H13/gelu/eager/copied-out", "buffers of its own in turn, and copies of them as outputs",
                   _from_a_pool, phase="bench")  # fmt: skip
    yield _control("H13/softmax/eager/stored", "its last answers are stored",
                   _stores_its_answers, phase="bench")  # fmt: skip
    yield _control("H13/sum/eager/by-value", "the last answer again for equal inputs",
                   _by_value)  # fmt: skip
    small = "H6/softmax/eager/from-cache"
    yield _control(small, "a small kernel, served from the cache when warm",
                   _same_as(small, "torch"), phase="bench")  # fmt: skip


MUTANTS = tuple(_controls())
