"""Embedding in CUDA C++.

The backward has three launches: embedding_partition.cu and embedding_sort.cu sort the tokens by id, and
embedding_backward.cu sums both gradients. Without positions two kernels of embedding.cu sum instead.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource, launch_and_prepare
from weft.core import Implementation
from weft.core.implementation import with_invariant
from weft.ops._common.layout import CUDA_TYPES, max_vec_width, view_2d
from weft.ops._common.prepared import LaunchCache, LaunchSequence, MemoryPart, are_repeatable
from weft.ops.embedding.plan import FUSED, TWO, WIDE, BackwardPlan, shipped

HERE = Path(__file__).parent
WARPS, SEQUENCES, SUM_WARPS, MERGE_WARPS = 4, 4, 8, 16  # the constants of embedding.cu
SHIPPED = BackwardPlan()
MAX_RUNS, RUN_TOKENS = 1024, 512  # sorted runs, each of RUN_TOKENS tokens (one for each thread) or a multiple
MIN_OWNERS_LESS_1 = 127  # frequent ids should be spread over many owners
MERGE_BLOCKS = 240  # upper bound for all slices: the resident blocks of 132 SMs


@cache
def source(dtype: torch.dtype, access: int, plan: BackwardPlan = SHIPPED) -> CudaSource:
    """Return embedding.cu for one element type and ``access`` elements in one access."""
    return CudaSource(
        file=HERE / "embedding.cu",
        kernels=("embedding_forward", "embedding_backward", "embedding_merge"),
        defines=(
            ("WEFT_T", CUDA_TYPES[dtype]),
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
def backward_source(dtype: torch.dtype, access: int, plan: BackwardPlan) -> CudaSource:
    """Return embedding_backward.cu for one element type and ``access`` elements in one access."""
    return CudaSource(
        file=HERE / "embedding_backward.cu",
        kernels=("embedding_together",),
        defines=(
            ("WEFT_T", CUDA_TYPES[dtype]),
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
def sort_source(dtype: torch.dtype, access: int, plan: BackwardPlan = SHIPPED) -> CudaSource:
    """Return embedding_sort.cu; it sums positions with this type and access."""
    sizes = {"LANES": plan.lanes, "PIECE": plan.piece, "OWNERS": plan.owners, "RUNS": MAX_RUNS}
    sizes["OVERLAP"] = int(plan.overlap)
    if plan.fused:
        sizes["CHUNK"] = 32 * plan.warps
    defines = (("ACCESS", access), *sizes.items())
    return CudaSource(
        file=HERE / "embedding_sort.cu",
        kernels=("embedding_order",),
        defines=(("WEFT_T", CUDA_TYPES[dtype]), *((name, str(value)) for name, value in defines)),
        label=f"order-{str(dtype).removeprefix('torch.')}-{access}x{plan.lanes}",
    )


@cache
def partition_source(plan: BackwardPlan) -> CudaSource:
    """Return embedding_partition.cu for a plan's owners; it reads no element, so the type does not matter."""
    sizes = {"OWNERS": plan.owners, "OVERLAP": int(plan.overlap)}
    return CudaSource(
        file=HERE / "embedding_partition.cu",
        kernels=("embedding_buckets",),
        defines=(("WEFT_T", "float"), *((name, str(value)) for name, value in sizes.items())),
        label=f"buckets-{plan.owners}",
    )


def forward(weight: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    key = ("forward", weight.shape, weight.dtype, ids.shape, positions.shape, weight.get_device())
    repeated = LAUNCHES.get(key)
    if repeated is not None and are_repeatable(weight, ids, positions):
        launch, size, with_positions = repeated
        y = weight.new_empty(size)
        if with_positions:
            launch(weight.data_ptr(), ids.data_ptr(), positions.data_ptr(), y.data_ptr())
        else:
            launch(weight.data_ptr(), ids.data_ptr(), y.data_ptr())
        return y
    (batch, length), columns = ids.shape, weight.shape[1]
    y = weight.new_empty((batch, length, columns))
    # A grid of 0 blocks is an error of the driver.
    if not y.numel():
        return y
    is_repeatable = are_repeatable(weight, ids, positions)
    ids = ids.contiguous()
    rows = view_2d(weight) if weight.numel() else weight
    places = view_2d(positions) if positions.shape[0] else None
    access = max_vec_width(columns, rows) if places is None else max_vec_width(columns, rows, places)
    tasks = -(-batch // SEQUENCES) * length * -(-columns // (32 * access))
    launch = launch_and_prepare(
        source(weight.dtype, access)["embedding_forward"],
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
    if is_repeatable and launch is not None:
        LAUNCHES.store(key, (launch, y.shape, places is not None))
    return y


LAUNCHES = LaunchCache()


def backward(
    grad: torch.Tensor, ids: torch.Tensor, vocabulary: int, places: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if not grad.numel():
        columns = grad.shape[2]
        return grad.new_zeros((vocabulary, columns)), grad.new_zeros((places, columns))
    key = None
    if are_repeatable(grad, ids):
        key = ("backward", grad.shape, grad.dtype, ids.shape, vocabulary, places, grad.get_device())
    repeated = LAUNCHES.get(key)
    if repeated is None:
        return backward_with(shipped(places), grad, ids, vocabulary, places, key)
    sequence, workspace_size, partial_shape = repeated
    columns = grad.shape[2]
    dweight, dpositions = grad.new_empty((vocabulary, columns)), grad.new_empty((places, columns))
    workspace = torch.empty(workspace_size, dtype=torch.int32, device=grad.device)
    partial = torch.empty(partial_shape, dtype=torch.float32, device=grad.device)
    sequence.repeat(grad, ids, dweight, dpositions, workspace, partial)
    return dweight, dpositions


def backward_with(
    plan: BackwardPlan,
    grad: torch.Tensor,
    ids: torch.Tensor,
    vocabulary: int,
    places: int,
    key: Hashable = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the backward with one plan; the gradient is not empty.

    With a ``key`` the launches are stored for later calls.
    """
    columns = grad.shape[2]
    dweight, dpositions = grad.new_empty((vocabulary, columns)), grad.new_empty((places, columns))
    # Without positions there is no loop to fuse with.
    if plan.fused and (not places or ids.numel() >= 2**29):
        plan = WIDE  # embedding_backward.cu packs a token's number and two bits into an int
    grad_2d = view_2d(grad)
    if grad_2d.stride(0) >= 2**31:  # the kernels' strides have 32 bits
        grad_2d = grad_2d.contiguous()
    access = min(max_vec_width(columns, grad_2d), max(1, plan.access // grad.element_size()))
    slices = -(-columns // (plan.lanes * access))
    ids, lead = ids.contiguous(), min(plan.lead, slices)
    order = _sorted_tokens(plan, grad_2d, ids, places, vocabulary, access)
    partial = torch.empty((order.max_pieces, columns), dtype=torch.float32, device=grad_2d.device)
    buffers = (grad_2d, ids, dweight, dpositions, order.workspace, partial)
    sequence = LaunchSequence(*buffers, records=key is not None)
    _sort_tokens(sequence, plan, grad_2d, ids, order, dpositions, vocabulary, access, lead)
    sum_gradients = _sum_fused if plan.fused else _sum_separately
    sum_gradients(sequence, plan, grad_2d, ids, order, dweight, dpositions, partial, access)
    if sequence.is_complete:
        LAUNCHES.store(key, (sequence, order.workspace.shape, partial.shape))
    return dweight, dpositions


@dataclass(frozen=True, kw_only=True)
class SortedTokens:
    """Outputs of embedding_sort.cu, parts of a workspace; there are at most ``max_pieces`` pieces.

    The tokens come in ``runs`` runs of ``share`` tokens, and the table's rows have ``1 << bits`` owners.
    ``heads`` and ``bucket_tokens`` are outputs of embedding_partition.cu.
    """

    workspace: torch.Tensor
    order: MemoryPart
    begins: MemoryPart
    owner_pieces: MemoryPart
    pieces: MemoryPart
    split_rows: MemoryPart
    tickets: MemoryPart
    heads: MemoryPart
    bucket_tokens: MemoryPart
    max_pieces: int
    bits: int
    share: int
    runs: int


def _sum_fused(
    sequence: LaunchSequence,
    plan: BackwardPlan,
    grad_2d: torch.Tensor,
    ids: torch.Tensor,
    order: SortedTokens,
    dweight: torch.Tensor,
    dpositions: torch.Tensor,
    partial: torch.Tensor,
    access: int,
) -> None:
    (batch, length), (vocabulary, columns), places = ids.shape, dweight.shape, dpositions.shape[0]
    slices = -(-columns // (plan.lanes * access))
    warps_per_place = min(plan.warps, 1 << (-(-batch // 32) - 1).bit_length())
    clear_blocks = -(-(_own(plan) << order.bits) // (32 * plan.warps * slices))
    blocks = (plan.piece_blocks, -(-places * warps_per_place // plan.warps), clear_blocks)
    sequence.launch(
        launch_and_prepare,
        backward_source(grad_2d.dtype, access, plan)["embedding_together"],
        blocks[0] + slices * (blocks[1] + blocks[2]),
        plan.warps * 32,
        *(grad_2d, ids, order.begins, order.order, order.owner_pieces, order.pieces, order.tickets),
        *(dweight, dpositions, partial, vocabulary, order.bits, places, batch, length),
        *(columns, grad_2d.stride(0), slices, warps_per_place, *blocks),
        overlap=plan.overlap,
    )


def _sum_separately(
    sequence: LaunchSequence,
    plan: BackwardPlan,
    grad_2d: torch.Tensor,
    ids: torch.Tensor,
    order: SortedTokens,
    dweight: torch.Tensor,
    dpositions: torch.Tensor,
    partial: torch.Tensor,
    access: int,
) -> None:
    (batch, length), (vocabulary, columns), places = ids.shape, dweight.shape, dpositions.shape[0]
    slices, owners = -(-columns // (plan.lanes * access)), 1 << order.bits
    lead, summers = min(plan.lead, slices), SUM_WARPS * 32 // plan.lanes
    program = source(grad_2d.dtype, access, plan)
    per_slice = (
        -(-places // summers),
        min(plan.piece_blocks, -(-order.max_pieces // summers)),
        -(-_own(plan) * owners // (summers * plan.rows)),
    )
    sequence.launch(
        launch_and_prepare,
        program["embedding_backward"],
        sum(per_slice) * slices - per_slice[0] * lead,
        SUM_WARPS * 32,
        *(grad_2d, order.begins, order.order, order.owner_pieces, order.pieces, dweight, dpositions, partial),
        *(vocabulary, order.bits, places, batch, length, columns, grad_2d.stride(0), slices, lead),
        *per_slice,
    )
    blocks = min(max(1, MERGE_BLOCKS // slices), ids.numel() // plan.piece + 1)
    sequence.launch(
        launch_and_prepare,
        program["embedding_merge"],
        *(blocks * slices, MERGE_WARPS * 32, order.owner_pieces, order.split_rows, partial, dweight),
        *(owners, columns, blocks),
    )


def _own(plan: BackwardPlan) -> int:
    """Return the number of table rows of an owner (OWNER_ROWS in sort.cuh)."""
    return 32 * plan.owners


def _sorted_tokens(
    plan: BackwardPlan, grad_2d: torch.Tensor, ids: torch.Tensor, places: int, vocabulary: int, access: int
) -> SortedTokens:
    """Allocate the workspace of the sort, and return its parts."""
    tokens, own, columns = ids.numel(), _own(plan), grad_2d.shape[1]
    slices, max_pieces = -(-columns // (plan.lanes * access)), 2 * tokens // plan.piece + 1
    # At least 128 owners, also for a small vocabulary: one block would sort all tokens otherwise.
    bits = max(MIN_OWNERS_LESS_1, -(-vocabulary // own) - 1).bit_length()
    owners = 1 << bits
    # As few tokens for each run as MAX_RUNS allows: more runs are more parallel blocks in the first kernel.
    share = -(-tokens // (RUN_TOKENS * MAX_RUNS)) * RUN_TOKENS
    runs = -(-tokens // share)
    # Sizes in int32: owner_pieces and split_rows (int4), pieces and heads (int2), then ints. The wide ones
    # come first, so that all are aligned.
    wide = (4 * owners, 4 * (tokens // plan.piece + 1), 2 * max_pieces, 2 * owners * runs)
    sizes = (*wide, tokens, tokens, own * owners + 1, max_pieces * slices)
    workspace = torch.empty(sum(sizes), dtype=torch.int32, device=ids.device)
    parts = [MemoryPart(workspace, 4 * sum(sizes[:k])) for k in range(8)]
    owner_pieces, split_rows, pieces, heads, order, bucket_tokens, begins, tickets = parts
    return SortedTokens(
        workspace=workspace,
        order=order,
        begins=begins,
        owner_pieces=owner_pieces,
        pieces=pieces,
        split_rows=split_rows,
        tickets=tickets,
        heads=heads,
        bucket_tokens=bucket_tokens,
        max_pieces=max_pieces,
        bits=bits,
        share=share,
        runs=runs,
    )


def _sort_tokens(
    sequence: LaunchSequence,
    plan: BackwardPlan,
    grad_2d: torch.Tensor,
    ids: torch.Tensor,
    tokens: SortedTokens,
    dpositions: torch.Tensor,
    vocabulary: int,
    access: int,
    lead: int,
) -> None:
    """Sort the tokens by id, and compute the first ``lead`` slices of dpositions meanwhile."""
    (batch, length), places = ids.shape, dpositions.shape[0]
    own, columns, t = _own(plan), grad_2d.shape[1], tokens
    slices = -(-columns // (plan.lanes * access))
    sequence.launch(
        launch_and_prepare,
        partition_source(plan)["embedding_buckets"],
        *(t.runs, RUN_TOKENS, ids, t.bucket_tokens, t.heads, ids.numel(), vocabulary),
        *(t.bits, t.share, t.runs),
    )
    sequence.launch(
        launch_and_prepare,
        sort_source(grad_2d.dtype, access, plan)["embedding_order"],
        (1 << t.bits) + -(-places * lead // (own // plan.lanes)),
        own,
        *(t.heads, t.bucket_tokens, grad_2d, t.begins, t.order, t.owner_pieces, t.pieces, t.split_rows),
        *(t.tickets, dpositions),
        *(t.runs, t.share, t.bits, places, lead, batch, length, columns, grad_2d.stride(0), slices),
        shared=4
        * (plan.owners * (own + 1) + 2 * (own + 1) + 2 * MAX_RUNS + 1),  # struct Shared of embedding_sort.cu
        overlap=plan.overlap,
    )


IMPLEMENTATION = with_invariant(
    Implementation(
        operator="embedding",
        backend="cuda",
        forward=forward,
        backward=backward,
        aot_kernels=(
            source(torch.bfloat16, 8, WIDE),
            source(torch.float16, 8, WIDE),
            source(torch.float32, 4, WIDE),
            source(torch.bfloat16, 1, WIDE),
            source(torch.bfloat16, 8, TWO),
            backward_source(torch.bfloat16, 8, FUSED),
            backward_source(torch.float16, 8, FUSED),
            backward_source(torch.float32, 4, FUSED),
            backward_source(torch.bfloat16, 1, FUSED),
            partition_source(FUSED),
            sort_source(torch.bfloat16, 8, FUSED),
            sort_source(torch.bfloat16, 8, WIDE),
            sort_source(torch.float32, 4, FUSED),
            sort_source(torch.bfloat16, 1, FUSED),
        ),
        idea="tokens sorted by blocks that own rows; both gradients summed in one loop over positions",
    )
)
