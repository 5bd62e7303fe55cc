"""A pass as a CUDA graph: the bits of its kernels launched one by one; weights as they are."""

from __future__ import annotations

import copy

import pytest
import torch

from weft.gpt2.config import ModelConfig
from weft.gpt2.model import GPT
from weft.gpt2.passes import WARM, Pass

CONFIG = ModelConfig(vocab_size=97, block_size=64, layers=2, heads=2, width=64)


def batch(seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(97, (4, 65), generator=generator).to(device)
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def test_a_pass_gives_its_part_of_the_loss_and_replaces_gradients() -> None:
    model = GPT(CONFIG)
    one = Pass(model, list(model.parameters()), 2, graph=False)
    x, y = batch(0, "cpu")
    loss = one(x, y, {})
    assert model.wte.grad is not None
    found = model.wte.grad.clone()
    model.zero_grad()
    whole = model(x, y)
    whole.backward()
    torch.testing.assert_close(loss, whole.detach() / 2)
    torch.testing.assert_close(found, model.wte.grad / 2)


@pytest.mark.gpu
@pytest.mark.parametrize("ops", ["weft", "torch"])
def test_a_graph_has_the_bits_of_its_kernels_launched_one_by_one(ops: str) -> None:
    config = ModelConfig(**{**vars(CONFIG), "ops": ops})
    plain = GPT(config, device="cuda", dtype=torch.bfloat16)
    models = plain, copy.deepcopy(plain)
    ways = [
        Pass(m, list(m.parameters()), 1, graph=graph)
        for m, graph in zip(models, (False, True), strict=True)
    ]
    for step in range(WARM + 4):
        x, y = batch(step, "cuda")
        losses = [way(x, y, {}).clone() for way in ways]
        assert torch.equal(*losses), step
        for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            # The library's attention adds to dq in any order.
            same = torch.equal if ops == "weft" else torch.allclose
            assert same(p.grad, q.grad), (step, name)
            for one in (p, q):  # what an optimizer does: the graph must see it
                one.data.add_(one.grad, alpha=-0.1)
                one.grad = None
    assert ways[1]._graph is not None and ways[0]._graph is None
