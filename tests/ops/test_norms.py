"""Norms beyond the cases of the conformance test: rows far from zero, rows of one element, bad calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft import WeftError, ops
from weft.core import registry
from weft.ops.norms import with_triton
from weft.ops.norms.spec import layer_norm64

ROWS, WEIGHT = torch.ones(3, 4), torch.ones(4)


def test_row_far_from_zero_keeps_its_digits() -> None:
    torch.manual_seed(0)
    x, weight, bias = 1e4 + torch.randn(4, 64), torch.randn(64), torch.randn(64)
    expected = layer_norm64(x.double(), weight.double(), bias.double(), 1e-5)
    y = ops.layer_norm(x, weight, bias, impl="triton")
    assert float((y - expected).abs().max()) < 1e-5  # the mean alone has a rounding error of 5e-4


def test_row_of_one_element_equals_the_bias() -> None:
    x, bias = torch.randn(3, 1), torch.randn(1)
    y = ops.layer_norm(x, torch.randn(1), bias, impl="triton")
    assert torch.equal(y, bias.expand(3, 1))


BAD_CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("layer_norm", (ROWS, WEIGHT[:3], WEIGHT), {}),
    ("layer_norm", (ROWS, WEIGHT, WEIGHT.half()), {}),
    ("layer_norm", (ROWS, WEIGHT, WEIGHT), {"eps": -1.0}),
    ("rms_norm", (ROWS, ROWS), {}),
    ("rms_norm", (ROWS, WEIGHT.half()), {}),
    ("add_layer_norm", (ROWS, ROWS[:2], WEIGHT, WEIGHT), {}),
    ("add_rms_norm", (ROWS, ROWS.half(), WEIGHT), {}),
]


@pytest.mark.parametrize(("name", "arguments", "params"), BAD_CALLS)
def test_arguments_that_do_not_match_raise_an_error_with_expected_and_got(
    name: str, arguments: tuple[Any, ...], params: dict[str, Any]
) -> None:
    with pytest.raises(WeftError) as caught:
        getattr(ops, name)(*arguments, **params)
    assert caught.value.expected and caught.value.got


@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
def test_both_terms_of_a_sum_get_one_gradient(name: str) -> None:
    """It is stored once. The gradients of leaves have memory of their own, as after torch's own sum."""
    generator = torch.Generator().manual_seed(0)
    vectors = 2 if name == "add_layer_norm" else 1
    leaves = [torch.randn(6, 32, generator=generator).requires_grad_() for _ in range(2)]
    leaves += [torch.randn(32, generator=generator).requires_grad_() for _ in range(vectors)]
    grads = [torch.randn(6, 32, generator=generator) for _ in range(2)]
    of_triton, of_torch = (
        torch.autograd.grad(getattr(ops, name)(*leaves, impl=impl), leaves, grads)
        for impl in ("triton", "torch")
    )
    for got, expected in zip(of_triton, of_torch, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert of_triton[0].data_ptr() == of_triton[1].data_ptr()
    torch.autograd.backward(getattr(ops, name)(*leaves, impl="triton"), grads)
    assert leaves[0].grad is not None and leaves[1].grad is not None
    assert leaves[0].grad.data_ptr() != leaves[1].grad.data_ptr()
    leaves[0].grad.zero_()
    assert torch.equal(leaves[1].grad, of_triton[1])


def test_a_shared_gradient_is_not_changed_by_what_is_added_to_one_of_them() -> None:
    """The sum's first term has a second use, whose gradient autograd adds; the second term has none."""
    leaves = [torch.randn(5, 16).requires_grad_() for _ in range(2)]
    weight, bias = torch.ones(16), torch.zeros(16)
    results = []
    for impl in ("triton", "torch"):
        x, residual = (t * 1.0 for t in leaves)  # no leaves, so that autograd may add in place
        y, s = ops.add_layer_norm(x, residual, weight, bias, impl=impl)
        results.append(torch.autograd.grad((y.square() + s + 3 * x).sum(), leaves))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_the_registered_backward_of_a_sum_returns_its_gradient_once() -> None:
    grad, s, weight = torch.randn(4, 16), torch.randn(4, 16), torch.ones(16)
    backward = torch.ops.weft.add_layer_norm_backward
    ds, dweight, dbias = backward(grad, grad, s, weight, 1e-5, "triton")
    assert ds.shape == s.shape and dweight.shape == dbias.shape == weight.shape
    four = registry.implementation("add_layer_norm", "triton").backward
    assert four is not None
    dx, dresidual, *others = four(grad, grad, s, weight, eps=1e-5)
    assert torch.equal(ds, dx) and torch.equal(ds, dresidual) and dx.data_ptr() != dresidual.data_ptr()
    assert torch.equal(others[0], dweight) and torch.equal(others[1], dbias)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
@pytest.mark.parametrize(
    ("block", "programs"),
    [(64, 2), (64, 0), (16, 0)],
    ids=["persistent", "a row in one pass", "in several passes"],
)
def test_every_kernel_stores_a_shared_gradient_once(block: int, programs: int) -> None:
    config = with_triton.Config(block=block, warps=4, programs=programs)
    grad, grad_s, s = torch.randn(3, 5, 40)
    arguments: Any = (grad, grad_s, s, torch.randn(40), 1e-5, True, config)
    dx, dr, *others = with_triton.launch_backward(*arguments)
    one, again, *shared = with_triton.launch_backward(*arguments, shares=True)
    assert dx.data_ptr() != dr.data_ptr() and one.data_ptr() == again.data_ptr()
    assert torch.equal(one, dx) and torch.equal(dx, dr)
    assert all(torch.equal(a, b) for a, b in zip(shared, others, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "cuda"])
@pytest.mark.parametrize("columns", [768, 1000, 9000, 40000])
def test_a_shared_gradient_has_the_bits_of_two_on_a_gpu(impl: str, columns: int) -> None:
    """Through autograd, twice: the second call may repeat the launches of the first."""
    leaves = [torch.randn(300, columns, device="cuda").bfloat16().requires_grad_() for _ in range(2)]
    leaves += [torch.randn(columns, device="cuda").bfloat16().requires_grad_() for _ in range(2)]
    grads = [torch.randn(300, columns, device="cuda").bfloat16() for _ in range(2)]
    y, s = ops.add_layer_norm(*leaves, impl=impl)
    backward = registry.implementation("add_layer_norm", impl).backward
    assert backward is not None
    expected = backward(*grads, s.detach(), leaves[2].detach(), eps=1e-5)
    for _ in range(2):
        gradients = torch.autograd.grad((y, s), leaves, grads, retain_graph=True)
        assert gradients[0].data_ptr() == gradients[1].data_ptr()
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
