"""Embedding in Triton.

The forward reads positions once for several sequences. The backward sorts the ids and sums each row's tokens
in a fixed order; one launch computes both gradients (see plan.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache

import torch

from weft.backends.triton_jit import TritonAotKernel, launch_and_prepare, triton
from weft.core import Implementation
from weft.core.implementation import with_invariant
from weft.ops._common.layout import view_2d
from weft.ops._common.prepared import LaunchCache, LaunchSequence, are_repeatable
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
    key = None
    if are_repeatable(weight, ids, positions):
        key = ("forward", weight.shape, weight.dtype, ids.shape, positions.shape, weight.get_device())
    launch = LAUNCHES.get(key)
    if launch is not None:
        y = weight.new_empty((*ids.shape, weight.shape[1]))
        launch(weight.data_ptr(), ids.data_ptr(), positions.data_ptr(), y.data_ptr())
        return y
    config = configure_forward(weight.shape[1], weight.element_size())
    return forward_with(config, weight, ids, positions, key)


LAUNCHES = LaunchCache()


def forward_with(
    config: Config, weight: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, key: Hashable = None
) -> torch.Tensor:
    """Compute the forward with one configuration; the output is not empty.

    With a ``key`` the launch is stored for later calls.
    """
    (batch, length), columns = ids.shape, weight.shape[1]
    y = weight.new_empty((batch, length, columns))
    rows, places = _rows(weight), _rows(positions)
    grid = (
        triton.cdiv(length, config.places)
        * triton.cdiv(batch, config.sequences)
        * triton.cdiv(columns, config.columns)
    )
    launch = launch_and_prepare(
        embedding_forward,
        (grid,),
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
    LAUNCHES.store(key, launch)
    return y


def _rows(table: torch.Tensor) -> torch.Tensor:
    return view_2d(table) if table.numel() else table


def backward(
    grad: torch.Tensor, ids: torch.Tensor, vocabulary: int, places: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if not grad.numel():
        columns = grad.shape[2]
        return grad.new_zeros((vocabulary, columns)), grad.new_zeros((places, columns))
    key = None
    if are_repeatable(grad, ids):
        key = ("backward", grad.shape, grad.dtype, ids.shape, vocabulary, places, grad.get_device())
    config = configure(ids.numel(), grad.shape[2], grad.element_size(), places)
    return backward_with(config, grad, ids, vocabulary, places, key)


def backward_with(
    config: Config,
    grad: torch.Tensor,
    ids: torch.Tensor,
    vocabulary: int,
    places: int,
    key: Hashable = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the backward with one configuration; the gradient is not empty.

    With a ``key`` the launches are stored for later calls, or those of an earlier call are repeated.
    """
    (batch, length), columns = ids.shape, grad.shape[2]
    dweight, dpositions = grad.new_empty((vocabulary, columns)), grad.new_empty((places, columns))
    tokens = batch * length
    # `vocabulary` itself must fit as well: it is the key of ids that name no row.
    bias, kind = (32768, torch.int16) if vocabulary < 65536 else (0, torch.int32)
    token_keys = torch.empty(tokens, dtype=kind, device=ids.device)
    begins = torch.empty(vocabulary + 1, dtype=torch.int32, device=ids.device)
    # A piece of sorted tokens can touch two long rows, its head and its tail: hence two partial rows for
    # each.
    pieces, slices = triton.cdiv(tokens, PIECE), triton.cdiv(columns, config.columns)
    partial = torch.empty((2 * pieces, columns), dtype=torch.float32, device=grad.device)
    sequences = LAUNCHES.get(key)
    if sequences is not None:
        sequences[0].repeat(ids, token_keys)
        token_keys, order = torch.sort(token_keys, stable=True)
        sequences[1].repeat(grad, token_keys, order, begins, dweight, dpositions, partial)
        return dweight, dpositions
    grad_2d, ids = view_2d(grad), ids.contiguous()
    make_keys = LaunchSequence(ids, token_keys, records=key is not None)
    block = 512
    make_keys.launch(
        launch_and_prepare,
        embedding_keys,
        (triton.cdiv(tokens, block),),
        *(ids, token_keys, tokens, vocabulary),
        BIAS=bias,
        BLOCK=block,
        num_warps=4,
    )
    # Stable: a row's tokens stay in their order, so that its sum has the same bits in each call. As few bits
    # as hold the ids: a radix sort takes one pass for each eight.
    token_keys, order = torch.sort(token_keys, stable=True)
    buffers = (grad_2d, token_keys, order, begins, dweight, dpositions, partial)
    sums = LaunchSequence(*buffers, records=key is not None)
    block = 128
    sums.launch(
        launch_and_prepare,
        embedding_bounds,
        (triton.cdiv(vocabulary + 1, block),),
        *(token_keys, begins, tokens, vocabulary),
        BIAS=bias,
        STEPS=tokens.bit_length(),
        BLOCK=block,
        num_warps=4,
    )
    programs = (triton.cdiv(places, config.places), pieces, triton.cdiv(vocabulary, config.rows))
    shape = {"BIAS": bias, "PIECE": PIECE, "COLUMNS": config.columns, "num_warps": config.warps}
    sums.launch(
        launch_and_prepare,
        embedding_backward,
        (sum(programs) * slices,),
        *(grad_2d, order, token_keys, begins, dweight, dpositions, partial),
        *(tokens, vocabulary, places, batch, length, columns, grad_2d.stride(0), *programs),
        PLACES=config.places,
        ROWS=config.rows,
        **shape,
    )
    # After embedding_backward on the same stream: it reads the partial sums, and overwrites the long rows.
    merge = (token_keys, begins, partial, dweight, tokens, vocabulary, columns)
    sums.launch(launch_and_prepare, embedding_merge, (pieces, slices), *merge, **shape)
    if make_keys.is_complete and sums.is_complete:
        LAUNCHES.store(key, (make_keys, sums))
    return dweight, dpositions


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
