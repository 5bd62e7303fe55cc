"""``Embedding``: rows of a table by their ids, plus each position's row of another."""

from __future__ import annotations

import torch

from weft import ops
from weft.core import WeftError
from weft.nn._common import refuse

ONLY = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": False}


class Embedding(torch.nn.Embedding):
    """``weight[id] + positions[t]`` for the token at place t; without positions, ``weight[id]``.

    Arguments and state dict are ``torch.nn.Embedding``'s; with ``max_positions`` a second
    parameter ``positions`` is added. The backward sums each row's gradients in a fixed order.

    Args:
        max_positions: the longest sequence; None: tokens alone.
        impl: the implementation that ``weft.ops.embedding`` is to use; None is its choice.

    Raises:
        WeftError: an option of torch's other than its default: ``padding_idx``, ``max_norm``,
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
        refuse("Embedding", locals(), ONLY, "torch.nn.Embedding has it")
        super().__init__(num_embeddings, embedding_dim, device=device, dtype=dtype)
        self.impl = impl
        places = None
        if max_positions is not None:
            empty = torch.empty(max_positions, embedding_dim, device=device, dtype=dtype)
            places = torch.nn.Parameter(torch.nn.init.normal_(empty))
        self.register_parameter("positions", places)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Integers (..., length) to (..., length, embedding_dim)."""
        if self.positions is None:
            return ops.embedding(input.long(), self.weight, impl=self.impl)
        length = input.shape[-1] if input.dim() else 1
        if length > len(self.positions):
            most = f"at most {len(self.positions)} tokens"
            raise WeftError("Embedding: the sequence", expected=most, got=length)
        return ops.embedding(input.long(), self.weight, self.positions[:length], impl=self.impl)
