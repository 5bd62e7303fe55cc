"""``MicroBatch``: division of the loss, and the same bits with and without a CUDA graph."""

from __future__ import annotations

import copy

import pytest
import torch

from weft.gpt2.model.config import ModelConfig
from weft.gpt2.model.model import GPT
from weft.gpt2.train.micro_batch import WARMUP_CALLS, MicroBatch

CONFIG = ModelConfig(vocab_size=97, block_size=64, layers=2, heads=2, width=64)


def batch(seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(97, (4, 65), generator=generator).to(device)
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def test_micro_batch_divides_the_loss_and_replaces_gradients() -> None:
    model = GPT(CONFIG)
    one = MicroBatch(model, list(model.parameters()), 2, use_graph=False)
    x, y = batch(0, "cpu")
    loss = one(x, y, {})
    assert model.wte.grad is not None
    wte_grad = model.wte.grad.clone()
    model.zero_grad()
    whole = model(x, y)
    whole.backward()
    torch.testing.assert_close(loss, whole.detach() / 2)
    torch.testing.assert_close(wte_grad, model.wte.grad / 2)


@pytest.mark.gpu
@pytest.mark.parametrize("ops", ["weft", "torch"])
def test_graph_gives_the_same_bits_as_separate_launches(ops: str) -> None:
    config = ModelConfig(**{**vars(CONFIG), "ops": ops})
    plain = GPT(config, device="cuda", dtype=torch.bfloat16)
    models = plain, copy.deepcopy(plain)
    micro_batches = [
        MicroBatch(m, list(m.parameters()), 1, use_graph=graph)
        for m, graph in zip(models, (False, True), strict=True)
    ]
    for step in range(WARMUP_CALLS + 4):
        x, y = batch(step, "cuda")
        losses = [micro_batch(x, y, {}).clone() for micro_batch in micro_batches]
        assert torch.equal(*losses), step
        for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            # The library's attention adds to dq in any order.
            same = torch.equal if ops == "weft" else torch.allclose
            assert same(p.grad, q.grad), (step, name)
            for one in (p, q):  # what an optimizer does: the graph must see it
                one.data.add_(one.grad, alpha=-0.1)
                one.grad = None
    assert micro_batches[1]._graph is not None and micro_batches[0]._graph is None
