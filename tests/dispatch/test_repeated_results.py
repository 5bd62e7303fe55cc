"""Operators whose calls are repeated, and their results on a GPU: the bits of the implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.operator_calls import differentiable_operators, example
from weft import ops
from weft.core import WeftError, registry
from weft.dispatch import operator, plan_cache

from .test_repeated_calls import CALLS, is_repeated


def test_an_operator_that_does_not_promise_it_is_not_recorded() -> None:
    """The ticket of ``sum`` depends on the stream."""
    assert "sum" not in operator._repeats and {"gelu", "linear", "attention"} <= operator._repeats


def arguments_of(name: str, seed: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of a public call by name, with floating-point tensors in a dtype."""
    call = example(name, seed=seed)
    arguments: dict[str, Any] = dict(call.params)
    for label, x in call.inputs.items():
        tensor = x.detach().to(device)
        tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
        arguments[label] = tensor.requires_grad_(x.requires_grad)
    return arguments


def forward_and_gradients(name: str, arguments: dict[str, Any], impl: str) -> list[torch.Tensor]:
    outputs = getattr(ops, name)(**arguments, impl=impl)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    differentiable = [y for y in outputs if y.requires_grad]
    leaves = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    grads = [
        torch.linspace(-1, 1, y.numel(), device=y.device).to(y.dtype).view(y.shape) for y in differentiable
    ]
    return [*outputs, *torch.autograd.grad(differentiable, leaves, grads)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", ["cuda", "triton"])
@pytest.mark.parametrize("name", sorted(set(differentiable_operators()) & operator._repeats))
def test_a_repeated_call_gives_the_bits_of_the_implementation(
    name: str, impl: str, dtype: torch.dtype, device: str = "cuda"
) -> None:
    """The first call of a kind runs the implementation as it is; later ones are compared with it."""
    if impl not in registry.implementation_names(name):
        pytest.skip(f"{name} is not implemented by {impl}")
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()] if device == "cuda" else [None]
    expected = []
    try:
        for seed in range(2):
            plan_cache.clear()
            expected.append(forward_and_gradients(name, arguments_of(name, seed, device, dtype), impl))
    except WeftError as error:
        pytest.skip(str(error))
    plan_cache.clear()
    for call in range(2 * CALLS):
        arguments = arguments_of(name, call % 2, device, dtype)
        if device == "cuda":
            torch.cuda.synchronize()
        with torch.cuda.stream(streams[call // 2 % len(streams)]):
            results = forward_and_gradients(name, arguments, impl)
        if device == "cuda":
            torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results, expected[call % 2], strict=True)), call


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["cuda", "triton"])
def test_one_tensor_in_two_places_gives_the_bits_of_two_copies(impl: str, device: str = "cuda") -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, grad = (torch.randn(1, 8, 128, 64, device=device, dtype=dtype) for _ in range(3))
    q, k, copy = (x.requires_grad_() for x in (q, k, k.clone()))
    for _ in range(CALLS):
        expected = ops.attention(q, k, copy, causal=True, impl=impl)
        dq, dk, dv = torch.autograd.grad(expected, [q, k, copy], grad)
        y = ops.attention(q, k, k, causal=True, impl=impl)
        gradients = torch.autograd.grad(y, [q, k], grad)
        for seen, right in zip((y, *gradients), (expected, dq, dk + dv), strict=True):
            assert torch.equal(seen, right)
    assert device == "cpu" or (is_repeated(y) and is_repeated(expected))
