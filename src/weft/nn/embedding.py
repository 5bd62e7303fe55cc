"""``Embedding``: rows of a table by token id, plus learned position embeddings."""

from __future__ import annotations

import torch

from weft import ops
from weft.core import WeftError
from weft.nn._common import refuse_unsupported

SUPPORTED = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": False}


class Embedding(torch.nn.Embedding):
    """``weight[id] + positions[t]`` for the token at position t; ``weight[id]`` without positions.

    Arguments and state dict are those of ``torch.nn.Embedding``; ``max_positions`` adds a second
    parameter, ``positions``. The backward sums each row's gradients in a fixed order.

    Args:
        max_positions: longest sequence; None: no position embeddings.
        impl: implementation of ``weft.ops.embedding``; None leaves the choice to dispatch.

    Raises:
        WeftError: an option of torch's that is not supported: ``padding_idx``, ``max_norm``,
            ``scale_grad_by_freq``, ``sparse``.
    """

    positions: torch.nn.Parameter | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        max_positions: int | None = None,
        impl: str | None = None,
    ) -> None:
        refuse_unsupported("Embedding", locals(), SUPPORTED, "use torch.nn.Embedding for it")
        super().__init__(num_embeddings, embedding_dim, device=device, dtype=dtype)
        self.impl = impl
        positions = None
        if max_positions is not None:
            table = torch.empty(max_positions, embedding_dim, device=device, dtype=dtype)
            # Normal, as torch.nn.Embedding initialises its own table.
            positions = torch.nn.Parameter(torch.nn.init.normal_(table))
        # Registered also as None: the attribute exists, and the state dict then has no such key.
        self.register_parameter("positions", positions)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map integers (..., length) to (..., length, embedding_dim)."""
        if self.positions is None:
            return ops.embedding(input.long(), self.weight, impl=self.impl)
        length = input.shape[-1] if input.dim() else 1
        if length > len(self.positions):
            expected = f"at most {len(self.positions)} tokens"
            raise WeftError("Embedding: the sequence", expected=expected, got=length)
        return ops.embedding(input.long(), self.weight, self.positions[:length], impl=self.impl)
