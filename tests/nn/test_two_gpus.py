"""A patched model whose layers are on two GPUs, as ``device_map`` places them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import weft

NEEDS = "needs transformers and accelerate: pip install 'weft[transformers]' accelerate"
transformers = pytest.importorskip("transformers", reason=NEEDS)
WORDS = 1000


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=4,
        vocab_size=WORDS,
        max_position_embeddings=256,
    )
    return transformers.LlamaForCausalLM(config).bfloat16()


def step(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Train a step; return the loss and the parameters after it, in float32 on the CPU."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    return {"loss": loss.detach().float().cpu()} | {
        name: p.detach().float().cpu() for name, p in model.named_parameters()
    }


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_a_patched_model_split_over_two_gpus_trains_a_step_as_on_one() -> None:
    accelerate = pytest.importorskip("accelerate", reason=NEEDS)
    whole = llama()
    parts = copy.deepcopy(whole)
    reports = [weft.patch(model) for model in (whole, parts)]
    assert reports[0].kinds == reports[1].kinds
    tokens = torch.randint(WORDS, (4, 128), generator=torch.Generator().manual_seed(1)).to("cuda:0")
    one = step(whole.to("cuda:0"), tokens)
    second = ("model.layers.2", "model.layers.3", "model.norm", "lm_head")
    names = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", *second)
    split = accelerate.dispatch_model(parts, {name: int(name in second) for name in names})
    assert {p.device.index for p in split.parameters()} == {0, 1}
    two = step(split, tokens)
    assert torch.cuda.current_device() == 0
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(two[name], value), name
