"""Embedding in CUDA C++. Its backward is three launches: the order of the tokens and the first
positions, the sums, and those of rows that many tokens ask for; see order.cu and embedding.cu.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.ops._shared.rows import as_rows, width
from weft.ops.embedding.plan import WIDE, Sums

HERE = Path(__file__).parent
TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
WARPS, SEQUENCES, SUM_WARPS, MERGE_WARPS = 4, 4, 8, 16  # as embedding.cu has them
SHIPPED = Sums()
MERGE_BLOCKS = 240  # at most, of all slices: what 132 multiprocessors hold at once


@cache
def source(dtype: torch.dtype, access: int, plan: Sums = SHIPPED) -> CudaSource:
    """embedding.cu for one element type, ``access`` elements moving at a time."""
    return CudaSource(
        file=HERE / "embedding.cu",
        kernels=("embedding_forward", "embedding_backward", "embedding_merge"),
        defines=(
            ("WEFT_T", TYPES[dtype]),
            ("ACCESS", str(access)),
            ("PIECE", str(plan.piece)),
            ("ROWS", str(plan.rows)),
            ("LAST", str(int(plan.last))),
            ("FLIGHT_TOKENS", str(plan.flight)),
            ("RESIDENT", str(plan.resident)),
        ),
        label=f"{str(dtype).removeprefix('torch.')}-{access}",
    )


@cache
def ordering(dtype: torch.dtype, access: int, plan: Sums = SHIPPED) -> CudaSource:
    """order.cu, whose positions are of that type and access."""
    defines = (("ACCESS", access), ("PIECE", plan.piece), ("OWNERS", plan.owners))
    return CudaSource(
        file=HERE / "order.cu",
        kernels=("embedding_order",),
        defines=(("WEFT_T", TYPES[dtype]), *((name, str(value)) for name, value in defines)),
        label=f"order-{str(dtype).removeprefix('torch.')}-{access}",
    )


def forward(weight: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    (batch, length), columns = ids.shape, weight.shape[1]
    y = weight.new_empty((batch, length, columns))
    if not y.numel():
        return y
    ids = ids.contiguous()
    rows = as_rows(weight) if weight.numel() else weight
    places = as_rows(positions) if positions.shape[0] else None
    access = width(columns, rows) if places is None else width(columns, rows, places)
    tasks = -(-batch // SEQUENCES) * length * -(-columns // (32 * access))
    source(weight.dtype, access)["embedding_forward"](
        -(-tasks // WARPS),
        32 * WARPS,
        rows,
        ids,
        0 if places is None else places,
        y,
        rows.shape[0],
        batch,
        length,
        columns,
        rows.stride(0),
        0 if places is None else places.stride(0),
    )
    return y


def backward(
    grad: torch.Tensor, ids: torch.Tensor, vocabulary: int, places: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if not grad.numel():
        made = (grad.new_zeros((n, grad.shape[2])) for n in (vocabulary, places))
        return next(made), next(made)
    return backward_with(WIDE, grad, ids, vocabulary, places)


def backward_with(
    plan: Sums, grad: torch.Tensor, ids: torch.Tensor, vocabulary: int, places: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The backward by one plan; the gradient has elements."""
    (batch, length), columns = ids.shape, grad.shape[2]
    dweight, dpositions = grad.new_empty((vocabulary, columns)), grad.new_empty((places, columns))
    tokens, ids, lines = batch * length, ids.contiguous(), as_rows(grad)
    if lines.stride(0) >= 2**31:  # the kernels' strides have 32 bits
        lines = lines.contiguous()
    access = min(width(columns, lines), max(1, plan.access // grad.element_size()))
    own = 32 * plan.owners
    slices, owners = -(-columns // (32 * access)), max(1, -(-vocabulary // own))
    lead, most = min(plan.lead, slices), 2 * tokens // plan.piece + 1
    # In words: heads and many (4 each), pieces (2), order, from; wider ones first, on 16 bytes.
    words = (4 * owners, 4 * (tokens // plan.piece + 1), 2 * most, tokens, vocabulary + 1)
    held = torch.empty(sum(words), dtype=torch.int32, device=grad.device)
    starts = (held.data_ptr() + 4 * sum(words[:k]) for k in range(5))
    heads, many, pieces, order, begins = starts
    ordering(grad.dtype, access, plan)["embedding_order"](
        owners + -(-places * lead // plan.owners),
        own,
        *(ids, lines, begins, order, heads, pieces, many, dpositions),
        *(tokens, vocabulary, owners, places, lead, batch, length, columns, lines.stride(0)),
        shared=4 * (plan.owners * (own + 128) + 2 * (own + 1) + plan.owners),  # as order.cu has it
    )
    partial = torch.empty((most, columns), dtype=torch.float32, device=grad.device)
    program = source(grad.dtype, access, plan)
    per_slice = (
        -(-places // SUM_WARPS),
        min(plan.piece_blocks, -(-most // SUM_WARPS)),
        -(-vocabulary // (SUM_WARPS * plan.rows)),
    )
    program["embedding_backward"](
        sum(per_slice) * slices - per_slice[0] * lead,
        SUM_WARPS * 32,
        *(lines, begins, order, heads, pieces, dweight, dpositions, partial),
        *(vocabulary, owners, places, batch, length, columns, lines.stride(0), slices, lead),
        *per_slice,
    )
    blocks = min(max(1, MERGE_BLOCKS // slices), tokens // plan.piece + 1)
    program["embedding_merge"](
        blocks * slices, MERGE_WARPS * 32, heads, many, partial, dweight, owners, columns, blocks
    )
    return dweight, dpositions


IMPLEMENTATION = Implementation(
    operator="embedding",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    specimens=(
        source(torch.bfloat16, 4),
        source(torch.float16, 8, WIDE),
        source(torch.bfloat16, 8, WIDE),
        source(torch.float32, 4, WIDE),
        source(torch.bfloat16, 1),
        ordering(torch.bfloat16, 8),
        ordering(torch.float32, 4),
        ordering(torch.bfloat16, 1),
    ),
    idea="tokens ordered by blocks that own rows, beside positions; sums slice by slice of columns",
)
