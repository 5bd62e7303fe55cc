"""Heads of a GPT-2 block: no copies between the products and attention, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.core import registry
from weft.gpt2.model.config import ModelConfig
from weft.gpt2.model.model import GPT
from weft.ops.attention import packed
from weft.ops.attention.layout import like, rowwise

BATCH, LENGTH = 6, 32
CONFIG = ModelConfig(vocab_size=131, block_size=LENGTH, layers=1, heads=4, width=64)


class RecordedOps(TorchDispatchMode):
    """Records the names of the operators called below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_splitting_and_joining_heads_copies_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention reads the product in place, its output is joined by a view, and it writes the gradient
    into the tensor that the product's backward receives."""
    model = GPT(replace(CONFIG, ops={"attention": "triton"}))
    triton = registry.implementation("attention", "triton")
    answers: list[torch.Tensor] = []
    written: list[list[int]] = []
    output_gradients: list[torch.Tensor] = []

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
        assert len({x.untyped_storage().data_ptr() for x in (q, k, v)}) == 1
        assert all(rowwise(x) is x for x in (q, k, v))
        answers.append(like(q).zero_())
        return answers[-1], q.new_zeros(q.shape[:3])

    def backward(*_: Any, into: tuple[torch.Tensor, ...], **__: Any) -> Any:
        written.append([x.fill_(i).data_ptr() for i, x in enumerate(into)])
        return into

    standing = replace(triton, forward=forward, backward=backward)
    known = registry.implementation
    monkeypatch.setattr(
        registry, "implementation", lambda of, n: standing if of == "attention" else known(of, n)
    )
    packed._accepts_gradient_buffer.cache_clear()
    block: Any = model.h[0]
    product = block.c_attn.linear

    def watched(*arguments: Any) -> torch.Tensor:
        output: torch.Tensor = product(*arguments)
        output.register_hook(output_gradients.append)
        return output

    monkeypatch.setattr(block.c_attn, "linear", watched)
    implementations = {**CONFIG.implementations()[False], "linear": "torch", "attention": "triton"}
    joined = block.attention(torch.randn(BATCH, LENGTH, 64), implementations, None, None)
    packed._accepts_gradient_buffer.cache_clear()
    assert joined.shape == (BATCH, LENGTH, 64)
    assert joined.data_ptr() == answers[0].data_ptr()
    with RecordedOps() as seen:
        joined.sum().backward()
    at = output_gradients[0].data_ptr()
    assert written == [[at, at + 64 * 4, at + 128 * 4]]
    assert not {"cat", "copy_", "clone", "split_with_sizes"} & seen.names, seen.names
    assert torch.equal(
        output_gradients[0], torch.arange(3.0).repeat_interleave(64).expand_as(output_gradients[0])
    )
