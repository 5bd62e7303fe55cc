"""The fp8 product's repeated calls: each launches what the first one did, with its own addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dispatch.test_repeated_calls import (  # noqa: F401
    CALLS,
    Driver,
    Recorded,
    driver,
    named,
    nothing_is_freed,
    recordings,
)
from ops.test_scaled_matmul import E4M3, E5M2, factors
from weft import WeftError, ops
from weft.ops._common.products.repeated import RepeatedProduct
from weft.ops.scaled_matmul import with_cuda
from weft.ops.scaled_matmul.spec import BLOCKS, ROWS, TENSOR

# m, n, k, kind of scales, dtypes of a and b; with 132 SMs K is whole, or divided.
WHOLE = [
    (256, 256, 256, TENSOR, E4M3, E4M3),
    (512, 1024, 256, ROWS, E4M3, E5M2),
    (512, 1024, 256, BLOCKS, E5M2, E4M3),
]
DIVIDED = [(16, 1024, 4096, ROWS, E4M3, E4M3), (16, 1024, 4096, BLOCKS, E4M3, E4M3)]
POINTS = [*WHOLE, *DIVIDED]
Inputs = tuple[torch.Tensor, ...]
Call = Callable[..., torch.Tensor]


def public(*inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    return ops.scaled_matmul(*inputs, impl="cuda", **options)


@pytest.fixture(params=[public, with_cuda.forward], ids=["public", "forward"])
def call(request: pytest.FixtureRequest) -> Call:
    """The public function, whose calls are recorded, and the implementation, which keeps launches."""
    return request.param  # type: ignore[no-any-return]


def launches_of(played: Driver, call: Call, inputs: Inputs, **options: Any) -> list[Any]:
    """Call; return its launches with the names of the tensors in place of their addresses."""
    played.launches.clear()
    recorded = Recorded.count
    c = call(*inputs, **options)
    if Recorded.count != recorded:  # this call launched everything twice
        played.launches[:] = played.launches[len(played.launches) // 2 :]
    tensors = dict(zip(("a", "b", "scale_a", "scale_b"), inputs, strict=True))
    return [*named(played.launches, {**tensors, "c": c}), (c.shape, c.stride(), c.dtype)]


def decided_anew(played: Driver, inputs: Inputs, **options: Any) -> list[Any]:
    """Return the launches of a call that repeats nothing."""
    with_cuda._REPEATED._launches.clear()
    return launches_of(played, with_cuda.forward, inputs, **options)


@pytest.fixture
def rewritten(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Addresses of each repeated launch of the implementation's."""
    seen: list[tuple[int, ...]] = []
    repeat = RepeatedProduct.__call__

    def repeat_and_note(self: RepeatedProduct, *pointers: int) -> None:
        seen.append(pointers)
        repeat(self, *pointers)

    monkeypatch.setattr(RepeatedProduct, "__call__", repeat_and_note)
    return seen


@pytest.mark.usefixtures("nothing_is_freed")
@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p[0]}x{p[1]}x{p[2]}-{p[3]}")
def test_a_repeated_call_launches_what_the_first_one_did(
    driver: Driver,  # noqa: F811
    call: Call,
    rewritten: list[tuple[int, ...]],
    point: Any,
) -> None:
    alive = [factors(*point, seed) for seed in range(CALLS)]  # so that calls have other addresses
    expected = decided_anew(driver, factors(*point, CALLS))
    assert len(expected) == 1 + 1 + (point in DIVIDED)
    with_cuda._REPEATED._launches.clear()
    recorded = Recorded.count
    for inputs in alive:
        assert launches_of(driver, call, inputs) == expected
    if call is public:
        assert Recorded.count == recorded + 1
        count = len(rewritten)
        launches_of(driver, call, alive[0])
        assert len(rewritten) == count, "the generated function launches"
    else:
        assert len(rewritten) == (CALLS - 1) * (1 + (point in DIVIDED))


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


def spaced(x: torch.Tensor) -> torch.Tensor:
    """Return a view with the same elements whose rows are 64 elements further apart."""
    wider = torch.zeros(x.shape[0], x.shape[1] + 64, dtype=x.dtype)
    return wider[:, : x.shape[1]].copy_(x)


def shifted(x: torch.Tensor, elements: int) -> torch.Tensor:
    """Return a copy that begins so many elements behind a multiple of 64 bytes."""
    memory = torch.zeros(x.numel() + elements, dtype=x.dtype)
    return memory[elements:].view(x.shape).copy_(x)


KIND = (512, 1024, 256, BLOCKS, E4M3, E4M3)
OTHERS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Inputs]] = {
    "rows of a further apart": lambda a, b, s, t: (spaced(a), b, s, t),
    "columns of b further apart": lambda a, b, s, t: (a, spaced(b.t()).t(), s, t),
    "a with M contiguous": lambda a, b, s, t: (transposed(a), b, s, t),
    "b with N contiguous": lambda a, b, s, t: (a, b.contiguous(), s, t),
    "a between two multiples of 16 bytes": lambda a, b, s, t: (shifted(a, 8), b, s, t),
    "b between two multiples of 16 bytes": lambda a, b, s, t: (a, shifted(b.t(), 8).t(), s, t),
    "a at an odd multiple of 16 bytes": lambda a, b, s, t: (shifted(a, 16), b, s, t),
    "scales of a column by column": lambda a, b, s, t: (a, b, transposed(s), t),
    "scales of b column by column": lambda a, b, s, t: (a, b, s, transposed(t)),
    "scales at a multiple of 4 bytes": lambda a, b, s, t: (a, b, shifted(s, 1), shifted(t, 3)),
    "fewer rows": lambda a, b, s, t: (a[:384], b, s[:384], t),
    "fewer columns": lambda a, b, s, t: (a, b[:, :896], s, t[:, :7]),
    "a shorter K": lambda a, b, s, t: (a[:, :128].contiguous(), b[:128], s[:, :1].contiguous(), t[:1]),
    "scales of rows": lambda a, b, s, t: (a, b, torch.ones(512, 1), torch.ones(1, 1024)),
    "a scale of each tensor": lambda a, b, s, t: (a, b, torch.ones(()), torch.ones(())),
    "e5m2 for a": lambda a, b, s, t: (a.view(E5M2), b, s, t),
    "e5m2 for b": lambda a, b, s, t: (a, b.view(E5M2), s, t),
}


@pytest.mark.usefixtures("nothing_is_freed")
@pytest.mark.parametrize("other", OTHERS)
def test_a_call_of_another_kind_has_its_own_launch(
    driver: Driver,  # noqa: F811
    call: Call,
    other: str,
) -> None:
    inputs = OTHERS[other](*factors(*KIND, 0))
    expected = decided_anew(driver, inputs)
    first = decided_anew(driver, factors(*KIND, 1))
    for seed in range(CALLS):
        assert launches_of(driver, call, factors(*KIND, seed)) == first
    for _ in range(CALLS):
        # New tensors of the same layout: a copy of an operand is another workspace in each call.
        assert launches_of(driver, call, OTHERS[other](*factors(*KIND, 0))) == expected
    assert launches_of(driver, call, factors(*KIND, 2)) == first


@pytest.mark.usefixtures("nothing_is_freed")
@pytest.mark.parametrize("sizes", [(384, 1024, 256), (512, 896, 256), (512, 1024, 128)])
def test_other_sizes_with_one_scale_have_their_own_launch(
    driver: Driver,  # noqa: F811
    call: Call,
    sizes: tuple[int, int, int],
) -> None:
    """Strides and scales are the same: the sizes alone tell these calls apart."""
    m, n, k = sizes

    def parts(seed: int) -> Inputs:
        a, b, *scales = factors(512, 1024, 256, TENSOR, E4M3, E4M3, seed)
        return a[:m, :k], b[:k, :n], *scales

    expected = decided_anew(driver, parts(0))
    first = decided_anew(driver, factors(512, 1024, 256, TENSOR, E4M3, E4M3, 1))
    for seed in range(CALLS):
        assert launches_of(driver, call, factors(512, 1024, 256, TENSOR, E4M3, E4M3, seed)) == first
        assert launches_of(driver, call, parts(seed)) == expected
    assert first != expected


def test_a_product_of_another_dtype_has_its_own_launch(driver: Driver, call: Call) -> None:  # noqa: F811
    for inputs in [factors(*KIND, seed) for seed in range(CALLS)]:
        for name in ("bfloat16", "float16"):
            out_dtype = getattr(torch, name) if call is public else name
            c = call(*inputs, out_dtype=out_dtype)
            assert c.dtype == getattr(torch, name)
    # A kernel for each dtype of the product.
    assert len({launch[0] for launch in driver.launches}) == 1 and len(driver.kernels) == 2


def test_a_copied_operand_is_copied_in_each_call(
    driver: Driver,  # noqa: F811
    call: Call,
    rewritten: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[torch.Tensor] = []
    k_major = with_cuda.k_major

    def counted(x: torch.Tensor, k_dim: int) -> torch.Tensor:
        y = k_major(x, k_dim)
        copies.extend([y] * (y is not x))
        return y

    monkeypatch.setattr(with_cuda, "k_major", counted)
    a, *others = factors(*KIND, 0)
    recorded = Recorded.count
    for _ in range(CALLS):
        call(transposed(a), *others)
    assert len(copies) == CALLS + Recorded.count - recorded and not rewritten


def test_a_requested_gradient_is_refused_after_repeated_calls(driver: Driver) -> None:  # noqa: F811
    a, b, scale_a, scale_b = factors(*KIND, 0)
    for _ in range(CALLS):
        public(a, b, scale_a, scale_b)
    with pytest.raises(WeftError, match="has no gradient"):
        public(a, b, scale_a.clone().requires_grad_(), scale_b)


@pytest.mark.gpu
@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p[0]}x{p[1]}x{p[2]}-{p[3]}")
def test_a_repeated_call_gives_the_bits_of_the_first(call: Call, point: Any) -> None:
    """Also on another stream, and in a CUDA graph that is replayed with other factors."""
    inputs = [tuple(x.cuda() for x in factors(*point, seed)) for seed in range(2)]
    expected = []
    for one in inputs:
        with_cuda._REPEATED._launches.clear()
        expected.append(with_cuda.forward(*one))
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for i in range(2 * CALLS):
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[i // 2 % 2]):
            c = call(*inputs[i % 2])
        torch.cuda.synchronize()
        assert torch.equal(c, expected[i % 2]), i
    static = tuple(x.clone(memory_format=torch.preserve_format) for x in inputs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = call(*static)
    for one, right in zip(inputs, expected, strict=True):
        for x, y in zip(static, one, strict=True):
            x.copy_(y)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(c, right)
