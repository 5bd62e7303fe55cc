"""``KVCache``: keys and values of the tokens that a model has already processed."""

from __future__ import annotations

import torch

from weft.core import WeftError
from weft.gpt2.model.config import ModelConfig


class KVCache:
    """Two preallocated buffers of (layers, batch, heads, block_size, width / heads).

    Each call adds one or more tokens: a prompt can be processed whole or in pieces. Attention aligns the
    causal mask of new tokens after cached ones at the bottom right.

    Attributes:
        length: number of cached tokens; 0 at first.
        capacity: largest number of tokens, the model's ``block_size``.
    """

    def __init__(self, config: ModelConfig, batch: int, *, device: torch.device, dtype: torch.dtype) -> None:
        head_dim = config.width // config.heads
        shape = (config.layers, batch, config.heads, config.block_size, head_dim)
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.capacity = config.block_size
        self.length = 0
        # Of each sequence with the token that is being processed, on the device: attention reads it there.
        self.lengths = torch.zeros(batch, device=device, dtype=torch.int32)

    def check_new_tokens(self, batch: int, count: int) -> None:
        """Raise :class:`WeftError` if ``count`` more tokens of ``batch`` sequences do not fit."""
        if batch != len(self.lengths):
            raise WeftError("KVCache: new tokens", expected=f"{len(self.lengths)} sequences", got=batch)
        if self.length + count > self.capacity:
            expected = f"at most {self.capacity} tokens in all"
            raise WeftError("KVCache: new tokens", expected=expected, got=self.length + count)

    def append(
        self, layer: int, k_BHTD: torch.Tensor, v_BHTD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one layer's new keys and values; return all of that layer's, as views."""
        end = self.length + k_BHTD.shape[2]
        for buffer, new in ((self.keys, k_BHTD), (self.values, v_BHTD)):
            # Written in place; attention reads a view of the filled part, so nothing is concatenated.
            buffer[layer, :, :, self.length : end] = new
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def begin(self, count: int) -> None:
        """Set ``lengths`` to those with ``count`` more tokens, before the first layer appends them."""
        self.lengths.fill_(self.length + count)

    def advance(self, count: int) -> None:
        """Count ``count`` tokens as cached, once every layer has appended them."""
        self.length += count

    def clear(self) -> None:
        """Drop all tokens; the buffers are reused."""
        self.length = 0
