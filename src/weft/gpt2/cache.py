"""``Cache``: the keys and values of tokens already seen, in buffers made once."""

from __future__ import annotations

import torch

from weft.core import WeftError
from weft.gpt2.config import ModelConfig


class Cache:
    """Room for ``block_size`` tokens of ``batch`` sequences; empty at first.

    A prompt goes in at once, then a token at a time: attention's causal mask is aligned at the
    first token, so that several new tokens after old ones would see each other wrongly.

    Two buffers of (layers, batch, heads, block_size, width / heads), in ``dtype``.
    """

    def __init__(
        self, config: ModelConfig, batch: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        size = config.width // config.heads
        shape = (config.layers, batch, config.heads, config.block_size, size)
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.room = config.block_size
        self.length = 0

    def admit(self, count: int) -> None:
        """Refuse ``count`` new tokens for which there is no room, or that come in the wrong way."""
        if self.length and count != 1:
            hint = "the prompt goes in first and at once"
            raise WeftError("Cache: new tokens", expected="1 at a time", got=count, hint=hint)
        if self.length + count > self.room:
            expected = f"at most {self.room} tokens in all"
            raise WeftError("Cache: new tokens", expected=expected, got=self.length + count)

    def extend(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep a layer's new keys and values, (B, H, T, D); all that are kept, as views."""
        end = self.length + k.shape[2]
        for buffer, new in ((self.keys, k), (self.values, v)):
            buffer[layer, :, :, self.length : end] = new
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, count: int) -> None:
        """Count tokens that every layer has kept."""
        self.length += count

    def clear(self) -> None:
        """Forget all tokens; the buffers stay."""
        self.length = 0
