"""The linear layer with a weight in blocks: pruning, state, training, errors."""

from __future__ import annotations

import copy

import pytest
import torch

from weft.core import WeftError
from weft.nn import BlockSparseLinear


@pytest.mark.parametrize("bias", [True, False])
def test_a_pruned_layer_computes_what_its_dense_one_does(bias: bool) -> None:
    linear = torch.nn.Linear(96, 64, bias).eval()
    whole = BlockSparseLinear.from_linear(linear, 32, 1.0)
    x = torch.randn(3, 5, 96)
    assert torch.allclose(whole(x), linear(x), atol=1e-5) and not whole.training
    half = BlockSparseLinear.from_linear(linear, 32, 0.5)
    assert len(half.values) == 3 and torch.allclose(half(x), half.to_dense()(x), atol=1e-5)
    again = BlockSparseLinear(96, 64, 32, 0.5, bias)
    again.load_state_dict(half.state_dict())
    assert torch.equal(again(x), half(x))


def test_training_moves_stored_blocks_alone() -> None:
    layer = BlockSparseLinear(96, 64, 32, 0.5)
    before = copy.deepcopy(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x, target, losses = torch.randn(20, 96), torch.randn(20, 64), []
    for _ in range(20):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0] and not torch.equal(layer.values, before.values)
    stored = before.to_dense().weight != 0
    assert torch.equal(layer.to_dense().weight != 0, stored) and int(stored.sum()) == 3 * 32 * 32


def test_sizes_that_blocks_do_not_divide_are_refused() -> None:
    for make in (
        lambda: BlockSparseLinear(100, 64, 32, 0.5),
        lambda: BlockSparseLinear(96, 60, 32, 0.5),
        lambda: BlockSparseLinear(96, 64, 24, 0.5),
        lambda: BlockSparseLinear.from_linear(torch.nn.Linear(96, 64), 32, -0.5),
    ):
        with pytest.raises(WeftError, match=r"BlockSparseLinear|to_blocks"):
            make()
