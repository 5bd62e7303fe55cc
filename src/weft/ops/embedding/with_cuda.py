"""Embedding in CUDA C++. Its backward is four launches: the tokens by owner, their order and the
first positions, the sums, and those of rows that many tokens ask for; see buckets.cu, order.cu and
embedding.cu.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.ops._shared.rows import as_rows, width
from weft.ops.embedding.plan import TWO, WIDE, Sums, shipped

HERE = Path(__file__).parent
TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
WARPS, SEQUENCES, SUM_WARPS, MERGE_WARPS = 4, 4, 8, 16  # as embedding.cu has them
SHIPPED = Sums()
RUNS, SHARE = 1024, 1024  # runs at most, of so many tokens or a multiple
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
            ("LANES", str(plan.lanes)),
            ("PIECE", str(plan.piece)),
            ("ROWS", str(plan.rows)),
            ("LAST", str(int(plan.last))),
            ("FLIGHT_TOKENS", str(plan.flight)),
            ("RESIDENT", str(plan.resident)),
        ),
        label=f"{str(dtype).removeprefix('torch.')}-{access}x{plan.lanes}",
    )


@cache
def ordering(dtype: torch.dtype, access: int, plan: Sums = SHIPPED) -> CudaSource:
    """order.cu, whose positions are of that type and access."""
    sizes = {"LANES": plan.lanes, "PIECE": plan.piece, "OWNERS": plan.owners, "RUNS": RUNS}
    defines = (("ACCESS", access), *sizes.items())
    return CudaSource(
        file=HERE / "order.cu",
        kernels=("embedding_order",),
        defines=(("WEFT_T", TYPES[dtype]), *((name, str(value)) for name, value in defines)),
        label=f"order-{str(dtype).removeprefix('torch.')}-{access}x{plan.lanes}",
    )


@cache
def sorting(owners: int) -> CudaSource:
    """buckets.cu for owners of as many warps; it moves no element."""
    return CudaSource(
        file=HERE / "buckets.cu",
        kernels=("embedding_buckets",),
        defines=(("WEFT_T", "float"), ("OWNERS", str(owners))),
        label=f"buckets-{owners}",
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
    return backward_with(shipped(places), grad, ids, vocabulary, places)


def backward_with(
    plan: Sums, grad: torch.Tensor, ids: torch.Tensor, vocabulary: int, places: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The backward by one plan; the gradient has elements."""
    (batch, length), columns = ids.shape, grad.shape[2]
    dweight, dpositions = grad.new_empty((vocabulary, columns)), grad.new_empty((places, columns))
    tokens, lines = batch * length, as_rows(grad)
    if lines.stride(0) >= 2**31:  # the kernels' strides have 32 bits
        lines = lines.contiguous()
    access = min(width(columns, lines), max(1, plan.access // grad.element_size()))
    slices, owners = -(-columns // (plan.lanes * access)), max(1, -(-vocabulary // _own(plan)))
    lead, most = min(plan.lead, slices), 2 * tokens // plan.piece + 1
    held, (order, begins, tops, pieces, many) = _order(
        plan, lines, ids.contiguous(), dpositions, vocabulary, access, lead
    )
    partial = torch.empty((most, columns), dtype=torch.float32, device=grad.device)
    program, summers = source(grad.dtype, access, plan), SUM_WARPS * 32 // plan.lanes
    per_slice = (
        -(-places // summers),
        min(plan.piece_blocks, -(-most // summers)),
        -(-vocabulary // (summers * plan.rows)),
    )
    program["embedding_backward"](
        sum(per_slice) * slices - per_slice[0] * lead,
        SUM_WARPS * 32,
        *(lines, begins, order, tops, pieces, dweight, dpositions, partial),
        *(vocabulary, owners, places, batch, length, columns, lines.stride(0), slices, lead),
        *per_slice,
    )
    blocks = min(max(1, MERGE_BLOCKS // slices), tokens // plan.piece + 1)
    program["embedding_merge"](
        blocks * slices, MERGE_WARPS * 32, tops, many, partial, dweight, owners, columns, blocks
    )
    del held  # whose addresses the kernels had
    return dweight, dpositions


def _own(plan: Sums) -> int:
    """Rows of the table that an owner has, as order.cuh has them."""
    return 32 * plan.owners


def _order(
    plan: Sums,
    lines: torch.Tensor,
    ids: torch.Tensor,
    dpositions: torch.Tensor,
    vocabulary: int,
    access: int,
    lead: int,
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Memory, and where order.cu's answers lie in it: order, from, tops, pieces, many. The first
    ``lead`` slices of dpositions are made too."""
    (batch, length), places = ids.shape, dpositions.shape[0]
    tokens, own = batch * length, _own(plan)
    owners, most = max(1, -(-vocabulary // own)), 2 * tokens // plan.piece + 1
    share = -(-tokens // (SHARE * RUNS)) * SHARE
    runs = -(-tokens // share)
    # In words: tops and many (4 each), pieces and heads (2), order, found, from; the wide first.
    longest = tokens // plan.piece + 1
    words = (4 * owners, 4 * longest, 2 * most, 2 * owners * runs, tokens, tokens, vocabulary + 1)
    held = torch.empty(sum(words), dtype=torch.int32, device=ids.device)
    starts = (held.data_ptr() + 4 * sum(words[:k]) for k in range(7))
    tops, many, pieces, heads, order, found, begins = starts
    sorting(plan.owners)["embedding_buckets"](
        runs, 1024, ids, found, heads, tokens, vocabulary, owners, share, runs
    )
    ordering(lines.dtype, access, plan)["embedding_order"](
        owners + -(-places * lead // (own // plan.lanes)),
        own,
        *(heads, found, lines, begins, order, tops, pieces, many, dpositions),
        *(runs, share, vocabulary, owners, places, lead, batch, length),
        *(lines.shape[1], lines.stride(0)),
        shared=4 * (plan.owners * (own + 1) + 2 * (own + 1) + 2 * RUNS + 1),  # as order.cu has it
    )
    return held, (order, begins, tops, pieces, many)


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
        source(torch.float32, 4, TWO),
        source(torch.float16, 8, TWO),
        source(torch.bfloat16, 1),
        source(torch.bfloat16, 8, TWO),
        sorting(16),
        ordering(torch.bfloat16, 8),
        ordering(torch.bfloat16, 8, TWO),
        ordering(torch.float32, 4, TWO),
        ordering(torch.bfloat16, 1),
    ),
    idea="tokens ordered by blocks that own rows, beside positions; sums slice by slice of columns",
)
