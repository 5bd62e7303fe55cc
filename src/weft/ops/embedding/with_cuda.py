"""Embedding in CUDA C++: a counting sort of the ids, then both gradients in one launch; see
order.cu and embedding.cu.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.ops._shared.rows import as_rows, width
from weft.ops.embedding.plan import PIECE

HERE = Path(__file__).parent
TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
WARPS, ROWS, SEQUENCES = 4, 4, 4  # as embedding.cu has them
ORDER = CudaSource(
    file=HERE / "order.cu",
    kernels=("embedding_count", "embedding_segments", "embedding_scatter", "embedding_order"),
    defines=(("PIECE", str(PIECE)),),
    label="order",
)


@cache
def source(dtype: torch.dtype, access: int) -> CudaSource:
    """embedding.cu for one element type, ``access`` elements moving at a time."""
    return CudaSource(
        file=HERE / "embedding.cu",
        kernels=("embedding_forward", "embedding_backward", "embedding_merge"),
        defines=(("WEFT_T", TYPES[dtype]), ("ACCESS", str(access)), ("PIECE", str(PIECE))),
        label=f"{str(dtype).removeprefix('torch.')}-{access}",
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
    (batch, length), columns = ids.shape, grad.shape[2]
    dweight, dpositions = grad.new_empty((vocabulary, columns)), grad.new_empty((places, columns))
    if not grad.numel():
        return dweight.zero_(), dpositions.zero_()
    tokens, ids, lines = batch * length, ids.contiguous(), as_rows(grad)
    counts = torch.zeros(vocabulary + 2, dtype=torch.int32, device=grad.device)
    # segment (two words a row), then slot, loose, order and the rows of many tokens.
    held = torch.empty(2 * vocabulary + 4 * tokens, dtype=torch.int32, device=grad.device)
    asked, segment = counts.data_ptr() + 4 * vocabulary, held.data_ptr()
    slot, loose, order, many = (segment + 8 * vocabulary + 4 * tokens * k for k in range(4))
    blocks = -(-tokens // 256)
    crowded = min(1024, -(-tokens // (PIECE + 1)))
    ORDER["embedding_count"](blocks, 256, ids, counts, slot, tokens, vocabulary)
    ORDER["embedding_segments"](
        max(1, -(-vocabulary // 1024)), 1024, counts, segment, asked, many, vocabulary
    )
    ORDER["embedding_scatter"](blocks, 256, ids, slot, segment, loose, tokens, vocabulary)
    ORDER["embedding_order"](
        crowded + blocks, 256, ids, loose, segment, asked, many, order, tokens, vocabulary, crowded
    )
    access = width(columns, lines)
    program, slices = source(grad.dtype, access), -(-columns // (32 * access))
    pieces = -(-tokens // PIECE)
    partial = torch.empty((2 * pieces, columns), dtype=torch.float32, device=grad.device)
    shares = (-(-places // WARPS), -(-pieces // WARPS), -(-vocabulary // (WARPS * ROWS)))
    program["embedding_backward"](
        sum(shares) * slices,
        32 * WARPS,
        lines,
        ids,
        order,
        segment,
        asked,
        dweight,
        dpositions,
        partial,
        vocabulary,
        places,
        batch,
        length,
        columns,
        lines.stride(0),
        *shares,
    )
    program["embedding_merge"](
        pieces * slices, 256, ids, order, segment, asked, partial, dweight, columns, pieces
    )
    return dweight, dpositions


IMPLEMENTATION = Implementation(
    operator="embedding",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    specimens=(
        ORDER,
        source(torch.bfloat16, 8),
        source(torch.float16, 8),
        source(torch.float32, 4),
        source(torch.bfloat16, 1),
    ),
    idea="a counting sort of the ids; both gradients in one launch, slice by slice of columns",
)
