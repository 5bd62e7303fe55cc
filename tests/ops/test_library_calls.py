"""Products and losses that PyTorch computes make the calls of PyTorch's own expression, and no others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from weft import ops
from weft.dispatch import plan_cache, repeated_calls
from weft.ops._common import cublas
from weft.ops.linear import with_torch as linear_with_torch
from weft.ops.matmul import with_torch

Call = Callable[..., Any]
M, N, K = 4, 24, 16
X, WEIGHT, BIAS, RESIDUAL = (M, K), (N, K), (N,), (M, N)
COMPOSITES = ("aten::matmul", "aten::cross_entropy_loss")  # names of calls that are nothing but other calls


def gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def head_loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(functional.linear(x, weight), targets)


# Weft's call, PyTorch's own, and the shapes of the arguments; None is the targets of rows.
CALLS: dict[str, tuple[Call, Call, tuple[tuple[int, ...] | None, ...]]] = {
    "matmul": (ops.matmul, torch.matmul, (X, (K, N))),
    "linear": (ops.linear, functional.linear, (X, WEIGHT, BIAS)),
    "linear of three dimensions": (ops.linear, functional.linear, ((2, M, K), WEIGHT, BIAS)),
    "linear without a bias": (ops.linear, functional.linear, (X, WEIGHT)),
    "linear_gelu": (ops.linear_gelu, lambda *a: gelu(functional.linear(*a)), (X, WEIGHT, BIAS)),
    "linear_gelu without a bias": (ops.linear_gelu, lambda *a: gelu(functional.linear(*a)), (X, WEIGHT)),
    "linear_residual": (
        ops.linear_residual,
        lambda x, w, b, r: functional.linear(x, w, b) + r,
        (X, WEIGHT, BIAS, RESIDUAL),
    ),
    "cross_entropy": (ops.cross_entropy, functional.cross_entropy, ((M, N), None)),
    "linear_cross_entropy": (ops.linear_cross_entropy, head_loss, (X, WEIGHT, None)),
}


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Targets are read in each call on a CPU, which repeats no loss but here."""
    monkeypatch.setattr(repeated_calls, "records_on_cpu", True)
    plan_cache.clear()
    yield
    plan_cache.clear()


def aten_calls(function: Callable[[], Any]) -> Counter[str]:
    with torch.autograd.profiler.profile() as profile:
        function()
    names = [e.name for e in profile.function_events]
    return Counter(n for n in names if n.startswith("aten::") and n not in COMPOSITES)


@pytest.mark.parametrize("leaves", [(), (0, 1), (0,), (1,)], ids=["forward", "both", "first", "second"])
@pytest.mark.parametrize("kind", CALLS)
def test_a_repeated_call_makes_the_calls_of_pytorchs_own(kind: str, leaves: tuple[int, ...]) -> None:
    ours, torchs, shapes = CALLS[kind]
    inputs = [torch.randint(N, (M,)) if s is None else torch.randn(s) for s in shapes]
    differentiated = [
        x.requires_grad_() for i, x in enumerate(inputs) if i in leaves and x.is_floating_point()
    ]

    def run(call: Call) -> None:
        y = call(*inputs)
        if differentiated:
            torch.autograd.grad(y, differentiated, torch.ones_like(y))

    run(torchs)
    expected = aten_calls(lambda: run(torchs))
    for _ in range(6):
        run(ours)
    assert aten_calls(lambda: run(ours)) == expected


def test_a_missing_bias_is_no_tensor_of_zeros_for_the_library() -> None:
    x, weight, residual = torch.randn(X), torch.randn(WEIGHT), torch.randn(RESIDUAL)
    calls = (
        lambda: ops.linear(x, weight),
        lambda: ops.linear_gelu(x, weight),
        lambda: ops.linear_gelu(x.clone().requires_grad_(), weight),
        lambda: ops.linear_residual(x, weight, None, residual),
    )
    for call in calls:
        call()
        assert aten_calls(call)["aten::addmm"] == 0
    assert torch.equal(
        ops.linear_residual(x, weight, None, residual), functional.linear(x, weight) + residual
    )


@pytest.mark.parametrize("differentiated", [(True, True), (True, False), (False, True)])
def test_a_precise_product_computes_the_gradients_that_are_wanted(
    differentiated: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (torch.randn(s).requires_grad_(w) for s, w in zip((X, (K, N)), differentiated, strict=True))
    precisions: list[str] = []

    def call(function: Call, x: torch.Tensor, precision: str, *arguments: Any) -> Any:
        precisions.append(precision)
        return function(*arguments)

    monkeypatch.setattr(with_torch, "call_at_precision", call)
    with_torch._PreciseProduct.apply(a, b, "tf32").sum().backward()  # type: ignore[no-untyped-call]
    assert precisions == ["tf32"] * (1 + sum(differentiated))
    for x, y in ((a, torch.ones(M, N) @ b.t()), (b, a.t() @ torch.ones(M, N))):
        assert x.grad is None if not x.requires_grad else torch.equal(x.grad, y)  # type: ignore[arg-type]


def test_only_a_float32_product_on_a_gpu_has_a_gradient_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cuda, requires_grad = True, True

        def __init__(self, dtype: torch.dtype) -> None:
            self.dtype = dtype

    def needs(dtype: torch.dtype) -> bool:
        x: Any = OnGpu(dtype)
        return with_torch._needs_precise_gradient(x, x)

    assert needs(torch.float32)
    assert not needs(torch.bfloat16) and not needs(torch.float16)
    with torch.no_grad():
        assert not needs(torch.float32)
    x: Any = OnGpu(torch.bfloat16)
    seen: list[bool] = []
    monkeypatch.setattr(torch, "mm", lambda a, b: seen.append(cublas.is_always_at(x, "ieee")))
    with_torch.like((x, x), {"precision": "ieee"})(x, x)
    assert len(seen) == 1


@pytest.mark.parametrize("shape", [(3, K), (2, 3, K), (K,)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_fused_gelu_takes_any_shape_with_and_without_a_bias(
    shape: tuple[int, ...], has_bias: bool
) -> None:
    inputs = (torch.randn(shape), torch.randn(WEIGHT), *([torch.randn(BIAS)] if has_bias else []))
    expected = functional.gelu(functional.linear(*inputs))  # on a CPU PyTorch's has the erf form
    assert torch.allclose(linear_with_torch._fused_linear_gelu(*inputs), expected, atol=1e-6)
