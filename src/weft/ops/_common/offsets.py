"""Offsets into consecutive pieces: the rows of a sparse matrix, the rows of blocks, the segments of a row.

Piece i has the elements ``offsets[i]`` to ``offsets[i + 1] - 1``. Offsets (pieces + 1,) begin with 0, end
with the number of elements, and do not fall; a piece may be empty.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.core import WeftError


def can_read(index: Any) -> bool:
    """Return True for a CPU tensor whose numbers a call can check: outside of traces and transforms.

    On a GPU the read would wait for the device, and a transform such as vmap has no numbers to read.
    """
    return (
        isinstance(index, Tensor)
        and index.is_cpu
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def check_range(where: str, offsets: Tensor, n: int, piece: str) -> None:
    """Raise :class:`WeftError` unless offsets run from 0 to n and none is below the one before it.

    ``where`` names the operator and the argument, ``piece`` what an offset begins: "row". It reads all
    offsets: on a GPU it waits for the device.
    """
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != n:
        raise WeftError(where, expected=f"from 0 to {n}", got=f"from {first} to {last}")
    falls = offsets[1:] < offsets[:-1]
    if bool(falls.any()):
        i = int(falls.int().argmax())
        got = f"{int(offsets[i])}, {int(offsets[i + 1])} at {piece} {i}"
        raise WeftError(where, expected="none below the one before it", got=got)


def piece_numbers(offsets: Tensor, n: int) -> Tensor:
    """Return the piece of each of n elements, (n,) int64. Empty pieces have none."""
    at = torch.arange(n, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets.contiguous(), at, right=True) - 1
