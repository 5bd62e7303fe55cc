"""Embedding in Triton.

The forward reads positions once for several sequences. The backward sorts the ids and sums each row's tokens
in a fixed order; one launch computes both gradients (see plan.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from weft.backends.triton_jit import TritonAotKernel, triton
from weft.core import Implementation
from weft.core.implementation import with_invariant
from weft.ops._common.layout import view_2d
from weft.ops.embedding.plan import PIECE, slice_width
from weft.ops.embedding.triton_kernels import (
    embedding_backward,
    embedding_bounds,
    embedding_forward,
    embedding_keys,
    embedding_merge,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Work of a program of ``warps`` warps: ``places`` positions or ``rows`` of the table, and ``columns``;
    in the forward, ``sequences`` sequences."""

    columns: int
    places: int = 4
    rows: int = 4
    sequences: int = 4
    warps: int = 4


@cache
def configure_forward(columns: int, itemsize: int) -> Config:
    """Return the forward's configuration: 64 bytes for each thread, of at most four positions of four
    sequences."""
    width = min(slice_width(0, columns, itemsize, 0), triton.next_power_of_2(columns))
    return Config(columns=width, places=max(1, min(4, 2048 // (itemsize * width))))


@cache
def configure(tokens: int, columns: int, itemsize: int, places: int) -> Config:
    """Return the backward's configuration: a tile has 16 bytes or more for each thread."""
    width = min(slice_width(tokens, columns, itemsize, places), triton.next_power_of_2(columns))
    tall = max(1, min(8, 2048 // (itemsize * width) * 2))
    return Config(columns=width, places=tall, rows=tall)


def candidates(columns: int, itemsize: int) -> list[Config]:
    """Return the configurations worth timing."""
    return [
        Config(columns=bytes_ // itemsize, places=p, rows=r, sequences=s, warps=w)
        for bytes_ in (256, 512, 1024)
        for p, r, s, w in ((4, 4, 4, 4), (2, 2, 4, 2), (4, 8, 8, 4), (2, 4, 2, 4), (8, 8, 4, 8))
        if bytes_ <= columns * itemsize
    ]


def forward(weight: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    # Triton launches no grid of 0 programs.
    if not ids.numel() * weight.shape[1]:
        return weight.new_empty((*ids.shape, weight.shape[1]))
    config = configure_forward(weight.shape[1], weight.element_size())
    return forward_with(config, weight, ids, positions)


def forward_with(
    config: Config, weight: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Compute the forward with one configuration; the output is not empty."""
    (batch, length), columns = ids.shape, weight.shape[1]
    y = weight.new_empty((batch, length, columns))
    rows, places = _rows(weight), _rows(positions)
    grid = (
        triton.cdiv(length, config.places)
        * triton.cdiv(batch, config.sequences)
        * triton.cdiv(columns, config.columns),
    )
    embedding_forward[grid](
        rows,
        ids.contiguous(),
        places,
        y,
        rows.shape[0],
        batch,
        length,
        columns,
        rows.stride(0),
        places.stride(0),
        POSITIONS=positions.shape[0] > 0,
        SEQUENCES=config.sequences,
        PLACES=config.places,
        COLUMNS=config.columns,
        num_warps=config.warps,
    )
    return y


def _rows(table: torch.Tensor) -> torch.Tensor:
    return view_2d(table) if table.numel() else table


def backward(
    grad: torch.Tensor, ids: torch.Tensor, vocabulary: int, places: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if not grad.numel():
        columns = grad.shape[2]
        return grad.new_zeros((vocabulary, columns)), grad.new_zeros((places, columns))
    config = configure(ids.numel(), grad.shape[2], grad.element_size(), places)
    return backward_with(config, grad, ids, vocabulary, places)


def backward_with(
    config: Config, grad: torch.Tensor, ids: torch.Tensor, vocabulary: int, places: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the backward with one configuration; the gradient is not empty."""
    (batch, length), columns = ids.shape, grad.shape[2]
    dweight, dpositions = grad.new_empty((vocabulary, columns)), grad.new_empty((places, columns))
    tokens = batch * length
    grad_2d = view_2d(grad)
    key, order, begins, bias = _sorted(ids.contiguous().view(-1), vocabulary)
    # A piece of sorted tokens can touch two long rows, its head and its tail: hence two partial rows for
    # each.
    pieces, slices = triton.cdiv(tokens, PIECE), triton.cdiv(columns, config.columns)
    partial = torch.empty((2 * pieces, columns), dtype=torch.float32, device=grad.device)
    programs = (triton.cdiv(places, config.places), pieces, triton.cdiv(vocabulary, config.rows))
    embedding_backward[(sum(programs) * slices,)](
        grad_2d,
        order,
        key,
        begins,
        dweight,
        dpositions,
        partial,
        tokens,
        vocabulary,
        places,
        batch,
        length,
        columns,
        grad_2d.stride(0),
        *programs,
        BIAS=bias,
        PIECE=PIECE,
        PLACES=config.places,
        ROWS=config.rows,
        COLUMNS=config.columns,
        num_warps=config.warps,
    )
    # After embedding_backward on the same stream: it reads the partial sums, and overwrites the long rows.
    embedding_merge[(pieces, slices)](
        key,
        begins,
        partial,
        dweight,
        tokens,
        vocabulary,
        columns,
        BIAS=bias,
        PIECE=PIECE,
        COLUMNS=config.columns,
        num_warps=config.warps,
    )
    return dweight, dpositions


def _sorted(ids: torch.Tensor, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Sort the tokens by id.

    Returns the sorted ids, in as few bits as hold them (a radix sort takes one pass for each eight), the
    tokens in that order, the offset of each row's first token, and the bias that was subtracted from each id.
    """
    tokens = ids.numel()
    # `vocabulary` itself must fit as well: it is the key of ids that name no row.
    bias, kind = (32768, torch.int16) if vocabulary < 65536 else (0, torch.int32)
    key = torch.empty(tokens, dtype=kind, device=ids.device)
    block = 512
    embedding_keys[(triton.cdiv(tokens, block),)](
        ids, key, tokens, vocabulary, BIAS=bias, BLOCK=block, num_warps=4
    )
    # Stable: a row's tokens stay in their order, so that its sum has the same bits in each call.
    key, order = torch.sort(key, stable=True)
    begins = torch.empty(vocabulary + 1, dtype=torch.int32, device=ids.device)
    block = 128
    embedding_bounds[(triton.cdiv(vocabulary + 1, block),)](
        key,
        begins,
        tokens,
        vocabulary,
        BIAS=bias,
        STEPS=tokens.bit_length(),
        BLOCK=block,
        num_warps=4,
    )
    return key, order, begins, bias


def _aot_kernel(kernel: object, kind: str, config: Config, **more: object) -> TritonAotKernel:
    import inspect

    names = list(inspect.signature(kernel.fn).parameters)  # type: ignore[attr-defined]
    table = {
        "ids_ptr": "*i64",
        "order_ptr": "*i64",
        "key_ptr": "*i16",
        "from_ptr": "*i32",
        "partial_ptr": "*fp32",
        "POSITIONS": True,
        "SEQUENCES": config.sequences,
        "PLACES": config.places,
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "BIAS": 32768,
        "PIECE": PIECE,
        **more,
    }
    signature = {n: table.get(n, f"*{kind}" if n.endswith("_ptr") else "i32:16") for n in names}
    return TritonAotKernel(
        label=f"{kernel.__name__}-{kind}",  # type: ignore[attr-defined]
        kernel=kernel,
        signature=signature,
        num_warps=config.warps,
    )


def _aot_kernels() -> tuple[TritonAotKernel, ...]:
    half, full = configure(65536, 768, 2, 1024), configure(65536, 768, 4, 1024)
    return (
        _aot_kernel(embedding_forward, "bf16", configure_forward(768, 2)),
        _aot_kernel(embedding_backward, "bf16", half),
        _aot_kernel(embedding_backward, "fp32", full),
        _aot_kernel(embedding_merge, "bf16", half),
        _aot_kernel(embedding_bounds, "i16", half, STEPS="i32", BLOCK=128),
    )


IMPLEMENTATION = with_invariant(
    Implementation(
        operator="embedding",
        backend="triton",
        forward=forward,
        backward=backward,
        aot_kernels=_aot_kernels(),
        idea="ids sorted; both gradients in one launch, slice by slice of columns",
    )
)
