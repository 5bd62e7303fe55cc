"""Layers with a 2:4 sparse weight: compared with dense layers that have the same zeros."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from weft import WeftError, ops
from weft.nn import SparseLinear, SparseTrainingLinear

IN, OUT = 64, 40


def _close(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    assert a is not None and b is not None
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def _mask(weight: torch.Tensor) -> torch.Tensor:
    values, metadata, _, _ = ops.prune_2_4_transposable(weight.detach(), impl="eager")
    return ops.expand_2_4(values, metadata, impl="eager") != 0


@pytest.mark.parametrize("bias", [True, False])
def test_a_pruned_layer_is_the_dense_layer_with_zeros(bias: bool) -> None:
    dense = torch.nn.Linear(IN, OUT, bias)
    sparse = SparseLinear.from_dense(dense)
    again = sparse.to_dense()
    x = torch.randn(3, 5, IN)
    pruned = again.weight.detach()
    assert (
        bool(((pruned == 0) | (pruned == dense.weight)).all()) and int((pruned != 0).sum()) == IN * OUT // 2
    )
    assert _close(sparse(x), again(x)) and sparse(x).shape == (3, 5, OUT)
    # Twice pruned is once pruned; a copy by the state dict computes the same.
    copied = SparseLinear(IN, OUT, bias)
    copied.load_state_dict(SparseLinear.from_dense(again).state_dict())
    assert torch.equal(copied(x), sparse(x))
    assert not dense.eval().training and not SparseLinear.from_dense(dense).training


def test_values_train_at_fixed_places() -> None:
    sparse = SparseLinear(IN, OUT)
    dense, x = sparse.to_dense(), torch.randn(7, IN)
    sparse(x).square().sum().backward()
    dense(x).square().sum().backward()
    assert dense.weight.grad is not None
    expected = dense.weight.grad * (dense.weight != 0)
    assert _close(ops.expand_2_4(sparse.values.grad, sparse.metadata), expected)  # type: ignore[arg-type]
    assert _close(sparse.bias.grad, dense.bias.grad)


@pytest.mark.parametrize("dense_gradient", [True, False])
def test_training_is_that_of_the_masked_weight(dense_gradient: bool) -> None:
    layer = SparseTrainingLinear(IN, OUT, dense_gradient=dense_gradient)
    mask, weight = _mask(layer.weight), layer.weight.detach()
    x = torch.randn(2, 9, IN, requires_grad=True)
    expected_x = x.detach().clone().requires_grad_()
    masked = (weight * mask).requires_grad_()
    grad = torch.randn(2, 9, OUT)
    y, expected = layer(x), F.linear(expected_x, masked, layer.bias.detach())
    y.backward(grad)
    expected.backward(grad)
    assert _close(y, expected) and _close(x.grad, expected_x.grad)
    assert masked.grad is not None and layer.weight.grad is not None
    assert _close(layer.bias.grad, grad.sum((0, 1)))
    if dense_gradient:
        assert _close(layer.weight.grad, masked.grad)
    else:
        assert _close(layer.weight.grad * mask, masked.grad * mask)
        assert int((layer.weight.grad != 0).sum()) == IN * OUT // 2


def test_the_mask_follows_the_weight_in_training() -> None:
    """A few steps of a regression: the loss falls, and elements that were pruned come back."""
    torch.manual_seed(1)
    layer, target = SparseTrainingLinear(16, 16), torch.randn(16, 16)
    optimizer, first = torch.optim.SGD(layer.parameters(), lr=0.1), _mask(layer.weight)
    x, losses = torch.randn(256, 16), []
    for _ in range(60):
        loss = (layer(x) - x @ target.t()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0] and not torch.equal(_mask(layer.weight), first)


def test_layers_work_under_autocast_and_in_a_trace() -> None:
    sparse, trained, x = SparseLinear(IN, OUT), SparseTrainingLinear(IN, OUT), torch.randn(4, IN)
    with torch.autocast("cpu", torch.bfloat16):
        assert sparse(x).dtype == trained(x).dtype == torch.bfloat16
        trained(x).float().sum().backward()
    assert trained.weight.grad is not None and trained.weight.grad.dtype == torch.float32
    traced = torch.compile(copy.deepcopy(sparse), fullgraph=True, backend="eager")
    assert _close(traced(x), sparse(x))


def test_sizes_that_are_not_in_fours_get_an_error() -> None:
    for make in (lambda: SparseLinear(10, 8), lambda: SparseTrainingLinear(8, 10)):
        with pytest.raises(WeftError, match="a multiple of 4"):
            make()
    with pytest.raises(WeftError, match="a multiple of 4"):
        SparseLinear.from_dense(torch.nn.Linear(6, 4))
