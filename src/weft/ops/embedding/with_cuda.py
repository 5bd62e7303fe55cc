"""Embedding in CUDA C++. Its backward is three launches: the tokens by owner, their order, and the
sums; see buckets.cu, order.cu and together.cu. Without positions the sums are two: embedding.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.ops._shared.rows import as_rows, width
from weft.ops.embedding.plan import TOGETHER, TWO, WIDE, Sums, shipped

HERE = Path(__file__).parent
TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
WARPS, SEQUENCES, SUM_WARPS, MERGE_WARPS = 4, 4, 8, 16  # as embedding.cu has them
SHIPPED = Sums()
RUNS, SHARE = 1024, 512  # runs at most, of so many tokens or a multiple: a thread's each
LEAST_OWNERS = 127  # less one: rows that are often asked for should come to many
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
            ("OWNERS", str(plan.owners)),
            ("LAST", str(int(plan.last))),
            ("FLIGHT_TOKENS", str(plan.flight)),
            ("RESIDENT", str(plan.resident)),
        ),
        label=f"{str(dtype).removeprefix('torch.')}-{access}x{plan.lanes}",
    )


@cache
def walking(dtype: torch.dtype, access: int, plan: Sums) -> CudaSource:
    """together.cu for one element type, ``access`` elements moving at a time."""
    return CudaSource(
        file=HERE / "together.cu",
        kernels=("embedding_together",),
        defines=(
            ("WEFT_T", TYPES[dtype]),
            ("ACCESS", str(access)),
            ("LANES", str(plan.lanes)),
            ("PIECE", str(plan.piece)),
            ("OWNERS", str(plan.owners)),
            ("FLIGHT_TOKENS", str(plan.flight)),
            ("RESIDENT", str(plan.resident)),
            ("SUM_WARPS", str(plan.warps)),
            ("EARLY", str(plan.early)),
            ("OVERLAP", str(int(plan.overlap))),
        ),
        label=f"together-{str(dtype).removeprefix('torch.')}-{access}x{plan.lanes}",
    )


@cache
def ordering(dtype: torch.dtype, access: int, plan: Sums = SHIPPED) -> CudaSource:
    """order.cu, whose positions are of that type and access."""
    sizes = {"LANES": plan.lanes, "PIECE": plan.piece, "OWNERS": plan.owners, "RUNS": RUNS}
    sizes["OVERLAP"] = int(plan.overlap)
    if plan.together:
        sizes["CHUNK"] = 32 * plan.warps
    defines = (("ACCESS", access), *sizes.items())
    return CudaSource(
        file=HERE / "order.cu",
        kernels=("embedding_order",),
        defines=(("WEFT_T", TYPES[dtype]), *((name, str(value)) for name, value in defines)),
        label=f"order-{str(dtype).removeprefix('torch.')}-{access}x{plan.lanes}",
    )


@cache
def sorting(plan: Sums) -> CudaSource:
    """buckets.cu for a plan's owners; it moves no element."""
    sizes = {"OWNERS": plan.owners, "OVERLAP": int(plan.overlap)}
    return CudaSource(
        file=HERE / "buckets.cu",
        kernels=("embedding_buckets",),
        defines=(("WEFT_T", "float"), *((name, str(value)) for name, value in sizes.items())),
        label=f"buckets-{plan.owners}",
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
    columns = grad.shape[2]
    dweight, dpositions = grad.new_empty((vocabulary, columns)), grad.new_empty((places, columns))
    if plan.together and (not places or ids.numel() >= 2**29):
        plan = WIDE  # the walk has a token's number and two bits in an int
    lines = as_rows(grad)
    if lines.stride(0) >= 2**31:  # the kernels' strides have 32 bits
        lines = lines.contiguous()
    access = min(width(columns, lines), max(1, plan.access // grad.element_size()))
    slices = -(-columns // (plan.lanes * access))
    ids, lead = ids.contiguous(), min(plan.lead, slices)
    held, order = _order(plan, lines, ids, dpositions, vocabulary, access, lead)
    sums = _sum_together if plan.together else _sum_apart
    sums(plan, lines, ids, order, dweight, dpositions, access)
    del held  # whose addresses the kernels had
    return dweight, dpositions


@dataclass(frozen=True, kw_only=True)
class Order:
    """Where order.cu's answers lie in memory, which has room for ``most`` pieces."""

    order: int
    begins: int
    tops: int
    pieces: int
    many: int
    tickets: int
    most: int
    bits: int


def _sum_together(
    plan: Sums,
    lines: torch.Tensor,
    ids: torch.Tensor,
    order: Order,
    dweight: torch.Tensor,
    dpositions: torch.Tensor,
    access: int,
) -> None:
    (batch, length), (vocabulary, columns), places = ids.shape, dweight.shape, dpositions.shape[0]
    slices = -(-columns // (plan.lanes * access))
    partial = torch.empty((order.most, columns), dtype=torch.float32, device=lines.device)
    team = min(plan.warps, 1 << (-(-batch // 32) - 1).bit_length())
    clear_blocks = -(-(_own(plan) << order.bits) // (32 * plan.warps * slices))
    blocks = (plan.piece_blocks, -(-places * team // plan.warps), clear_blocks)
    walking(lines.dtype, access, plan)["embedding_together"](
        blocks[0] + slices * (blocks[1] + blocks[2]),
        plan.warps * 32,
        *(lines, ids, order.begins, order.order, order.tops, order.pieces, order.tickets),
        *(dweight, dpositions, partial, vocabulary, order.bits, places, batch, length),
        *(columns, lines.stride(0), slices, team, *blocks),
        overlap=plan.overlap,
    )


def _sum_apart(
    plan: Sums,
    lines: torch.Tensor,
    ids: torch.Tensor,
    order: Order,
    dweight: torch.Tensor,
    dpositions: torch.Tensor,
    access: int,
) -> None:
    (batch, length), (vocabulary, columns), places = ids.shape, dweight.shape, dpositions.shape[0]
    slices, owners = -(-columns // (plan.lanes * access)), 1 << order.bits
    lead, summers = min(plan.lead, slices), SUM_WARPS * 32 // plan.lanes
    partial = torch.empty((order.most, columns), dtype=torch.float32, device=lines.device)
    program = source(lines.dtype, access, plan)
    per_slice = (
        -(-places // summers),
        min(plan.piece_blocks, -(-order.most // summers)),
        -(-_own(plan) * owners // (summers * plan.rows)),
    )
    program["embedding_backward"](
        sum(per_slice) * slices - per_slice[0] * lead,
        SUM_WARPS * 32,
        *(lines, order.begins, order.order, order.tops, order.pieces, dweight, dpositions, partial),
        *(vocabulary, order.bits, places, batch, length, columns, lines.stride(0), slices, lead),
        *per_slice,
    )
    blocks = min(max(1, MERGE_BLOCKS // slices), ids.numel() // plan.piece + 1)
    program["embedding_merge"](
        *(blocks * slices, MERGE_WARPS * 32, order.tops, order.many, partial, dweight),
        *(owners, columns, blocks),
    )


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
) -> tuple[torch.Tensor, Order]:
    """Memory, and order.cu's answers in it; the first ``lead`` slices of dpositions are made."""
    (batch, length), places = ids.shape, dpositions.shape[0]
    tokens, own, columns = batch * length, _own(plan), lines.shape[1]
    slices, most = -(-columns // (plan.lanes * access)), 2 * tokens // plan.piece + 1
    bits = max(LEAST_OWNERS, -(-vocabulary // own) - 1).bit_length()
    owners = 1 << bits
    share = -(-tokens // (SHARE * RUNS)) * SHARE
    runs = -(-tokens // share)
    # In words: tops and many (4 each), pieces and heads (2), the rest; the wide first.
    wide = (4 * owners, 4 * (tokens // plan.piece + 1), 2 * most, 2 * owners * runs)
    words = (*wide, tokens, tokens, own * owners + 1, most * slices)
    held = torch.empty(sum(words), dtype=torch.int32, device=ids.device)
    starts = [held.data_ptr() + 4 * sum(words[:k]) for k in range(8)]
    tops, many, pieces, heads, order, found, begins, tickets = starts
    sorting(plan)["embedding_buckets"](
        runs, SHARE, ids, found, heads, tokens, vocabulary, bits, share, runs
    )
    ordering(lines.dtype, access, plan)["embedding_order"](
        owners + -(-places * lead // (own // plan.lanes)),
        own,
        *(heads, found, lines, begins, order, tops, pieces, many, tickets, dpositions),
        *(runs, share, bits, places, lead, batch, length, columns, lines.stride(0), slices),
        shared=4 * (plan.owners * (own + 1) + 2 * (own + 1) + 2 * RUNS + 1),  # as order.cu has it
        overlap=plan.overlap,
    )
    return held, Order(
        order=order,
        begins=begins,
        tops=tops,
        pieces=pieces,
        many=many,
        tickets=tickets,
        most=most,
        bits=bits,
    )


IMPLEMENTATION = Implementation(
    operator="embedding",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    specimens=(
        source(torch.bfloat16, 8, WIDE),
        source(torch.float16, 8, WIDE),
        source(torch.float32, 4, WIDE),
        source(torch.bfloat16, 1, WIDE),
        source(torch.bfloat16, 8, TWO),
        walking(torch.bfloat16, 8, TOGETHER),
        walking(torch.float16, 8, TOGETHER),
        walking(torch.float32, 4, TOGETHER),
        walking(torch.bfloat16, 1, TOGETHER),
        sorting(TOGETHER),
        ordering(torch.bfloat16, 8, TOGETHER),
        ordering(torch.bfloat16, 8, WIDE),
        ordering(torch.float32, 4, TOGETHER),
        ordering(torch.bfloat16, 1, TOGETHER),
    ),
    idea="tokens ordered by blocks that own rows; a place's rows and the table's in one walk",
)
