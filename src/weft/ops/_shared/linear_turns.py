"""x W^T and its epilogue by two groups of warps that take turns: Gluon, compute capability 9.0.

One warp asks the copy engine for all that is multiplied, tile after tile, through one ring. Two
groups of four warps take a program's tiles by turns: while one finishes a tile, the other has the
tensor cores and the whole ring to itself (CUTLASS calls it ping-pong). The turn is handed over
through a barrier of each group's own. What is right hangs on it, not speed alone: a wait for a
slot tells odd uses of it from even ones, so a group may come to a slot only when the use before
has arrived there. What a group stores goes through two buffers of its own, so that it waits for the
store before the last one, not for the last.

Gluon is an experimental part of Triton: this module is imported when it is launched.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.backends.triton_jit import TritonSpecimen, triton
from weft.ops._shared.linear_columns import multiprocessors
from weft.ops._shared.linear_kernels import GELU, GELU_KEEP, gelu
from weft.ops._shared.linear_spec import Operands, pitch_of

if TYPE_CHECKING:
    import torch

    from weft.ops._shared.linear_configs import Config

BUFFERS = gl.constexpr(2)
REGISTERS = 168  # a thread, of 12 warps; in the kernel 240 for those that multiply, 24 for the one


@gluon.jit
def place(tile, row_tiles, column_tiles, GROUP: gl.constexpr):
    """As linear_kernels.tile_place: down bands of GROUP rows, each band column by column."""
    in_band = GROUP * column_tiles
    first = tile // in_band * GROUP
    height = gl.minimum(row_tiles - first, GROUP)
    within = tile % in_band
    return first + within % height, within // height


@gluon.jit
def bring(x_desc, weight_desc, ring, sizes, GROUP: gl.constexpr):
    # The warp that asks: step i of the program's j-th tile into slot (j steps + i) % STAGES, once
    # the group that read what was there says so.
    xs, weights, full, empty, _ = ring
    BM: gl.constexpr = x_desc.block_type.shape[0]
    BK: gl.constexpr = x_desc.block_type.shape[1]
    BN: gl.constexpr = weight_desc.block_type.shape[0]
    STAGES: gl.constexpr = xs.type.shape[0]
    m, n, k = sizes
    row_tiles = gl.cdiv(m, BM)
    column_tiles = gl.cdiv(n, BN)
    steps = gl.cdiv(k, BK)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = place(tile, row_tiles, column_tiles, GROUP)
        for i in range(steps):
            slot = step % STAGES
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            mbarrier.expect(ready, x_desc.block_type.nbytes + weight_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(x_desc, [row * BM, i * BK], ready, xs.index(slot))
            tma.async_copy_global_to_shared(
                weight_desc, [column * BN, i * BK], ready, weights.index(slot)
            )
            step += 1


@gluon.jit
def put(desc, row, column, v, buffer):
    # v rounded into a buffer whose last store, the one before the last, has been read out of it.
    tma.store_wait(BUFFERS - 1)
    buffer.store(v.to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, column], buffer)


@gluon.jit
def finish(v, y_desc, pre_desc, out, row, column, EPILOGUE: gl.constexpr, MATH: gl.constexpr):
    # One part of a tile, float32 with its bias.
    if EPILOGUE == GELU_KEEP:
        put(pre_desc, row, column, v, out.index(0))
        put(y_desc, row, column, gelu(v, MATH), out.index(1))
    elif EPILOGUE == GELU:
        put(y_desc, row, column, gelu(v, MATH), out.index(column // v.shape[1] % BUFFERS))
    else:
        put(y_desc, row, column, v, out.index(column // v.shape[1] % BUFFERS))


@gluon.jit
def halves(v):
    """The left and the right half of a tile: registers renamed, nothing moved."""
    return v.reshape([v.shape[0], 2, v.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def multiply(
    given,
    ring,
    out,
    sizes,
    who: gl.constexpr,
    GROUP: gl.constexpr,
    PARTS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    MATH: gl.constexpr,
):
    # A group of four warps: the program's tiles who, who + 2, ...
    y_desc, pre_desc, bias_ptr = given
    xs, weights, full, empty, turn = ring
    STAGES: gl.constexpr = xs.type.shape[0]
    BM: gl.constexpr = xs.type.shape[1]
    BK: gl.constexpr = xs.type.shape[2]
    BN: gl.constexpr = weights.type.shape[1]
    W: gl.constexpr = BN // PARTS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    m, n, k = sizes
    row_tiles = gl.cdiv(m, BM)
    column_tiles = gl.cdiv(n, BN)
    steps = gl.cdiv(k, BK)
    programs = gl.num_programs(0)
    step = who * steps
    taken = 0
    for tile in range(gl.program_id(0) + who * programs, row_tiles * column_tiles, 2 * programs):
        row, column = place(tile, row_tiles, column_tiles, GROUP)
        columns = column * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
        bias = gl.load(bias_ptr + columns, mask=columns < n, other=0.0)
        acc = gl.zeros((BM, BN), dtype=gl.float32, layout=layout)
        # The first turn is group 0's; the j-th after it comes as the other group ends its own.
        mbarrier.wait(turn.index(who), (taken & 1) ^ (1 - who))
        for i in range(steps):
            slot = step % STAGES
            mbarrier.wait(full.index(slot), step // STAGES & 1)
            acc = warpgroup_mma(
                xs.index(slot), weights.index(slot).permute((1, 0)), acc, is_async=True
            )
            # All but this product are done: the slot before is free.
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=i > 0)
            step += 1
        mbarrier.arrive(turn.index(1 - who))  # all is here, and the last product under way
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        step += steps
        taken += 1  # noqa: SIM113 (Gluon has no enumerate)
        v = acc + bias.to(gl.float32)[None, :]
        down = row * BM
        at = column * BN
        left, right = halves(v)
        if PARTS == 2:
            finish(left, y_desc, pre_desc, out, down, at, EPILOGUE, MATH)
            finish(right, y_desc, pre_desc, out, down, at + W, EPILOGUE, MATH)
        else:
            a, b = halves(left)
            c, d = halves(right)
            finish(a, y_desc, pre_desc, out, down, at, EPILOGUE, MATH)
            finish(b, y_desc, pre_desc, out, down, at + W, EPILOGUE, MATH)
            finish(c, y_desc, pre_desc, out, down, at + 2 * W, EPILOGUE, MATH)
            finish(d, y_desc, pre_desc, out, down, at + 3 * W, EPILOGUE, MATH)
    tma.store_wait(0)


@gluon.jit
def linear_turns(
    x_desc,
    weight_desc,
    bias_ptr,
    y_desc,
    pre_desc,
    m,
    n,
    k,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    PARTS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    MATH: gl.constexpr,
):
    # x: (M, K); weight: (N, K); bias: (N,); y, pre: (M, N) in blocks of BN / PARTS columns.
    # Launched with 4 warps, runs 12.
    BM: gl.constexpr = x_desc.block_type.shape[0]
    BK: gl.constexpr = x_desc.block_type.shape[1]
    BN: gl.constexpr = weight_desc.block_type.shape[0]
    W: gl.constexpr = BN // PARTS
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, BK], x_desc.layout)
    weights = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BN, BK], weight_desc.layout)
    one = gl.allocate_shared_memory(y_desc.dtype, [BUFFERS, BM, W], y_desc.layout)
    other = gl.allocate_shared_memory(y_desc.dtype, [BUFFERS, BM, W], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turn.index(0), count=1)
    mbarrier.init(turn.index(1), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    sizes = (m, n, k)
    ring = (xs, weights, full, empty, turn)
    given = (y_desc, pre_desc, bias_ptr)
    gl.warp_specialize(
        [
            (multiply, (given, ring, one, sizes, 0, GROUP, PARTS, EPILOGUE, MATH)),
            (multiply, (given, ring, other, sizes, 1, GROUP, PARTS, EPILOGUE, MATH)),
            (bring, (x_desc, weight_desc, ring, sizes, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )


def launch(config: Config, epilogue: int, math: int, operands: Operands) -> None:
    """As linear_triton's other launches; there is no residual."""
    x, weight, bias, residual, y, pre = operands
    assert residual is None
    (m, k), n = x.shape, weight.shape[0]
    tiles = triton.cdiv(m, config.bm) * triton.cdiv(n, config.bn)
    part = config.bn // config.parts
    linear_turns[(min(tiles, multiprocessors(x.device)),)](
        _descriptor(x, m, config.bm, config.bk),
        _descriptor(weight, n, config.bn, config.bk),
        bias,
        _descriptor(y, m, config.bm, part),
        None if pre is None else _descriptor(pre, m, config.bm, part),
        m,
        n,
        k,
        STAGES=config.stages,
        GROUP=config.group,
        PARTS=config.parts,
        EPILOGUE=epilogue,
        MATH=math,
        num_warps=4,
        maxnreg=REGISTERS,
    )


def _descriptor(x: torch.Tensor, rows: int, block_rows: int, block_columns: int) -> Any:
    block = [block_rows, block_columns]
    return TensorDescriptor(x, [rows, x.shape[-1]], [pitch_of(x), 1], block, _layout(*block))


@cache
def _layout(rows: int, columns: int) -> Any:
    """A block of a half type in shared memory as the tensor cores and the copy engine read it."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


def specimen(config: Config, epilogue: int, math: int) -> TritonSpecimen:
    """What a bfloat16 product of sizes divisible by 16 compiles."""

    def blocks(rows: int, columns: int) -> str:
        return f"tensordesc<bf16[{rows}, {columns}],{_layout(rows, columns)!r}>"

    part = blocks(config.bm, config.bn // config.parts)
    signature = {
        "x_desc": blocks(config.bm, config.bk),
        "weight_desc": blocks(config.bn, config.bk),
        "bias_ptr": "*bf16",
        "y_desc": part,
        "pre_desc": part if epilogue == GELU_KEEP.value else None,
        **dict.fromkeys("mnk", "i32:16"),
        "STAGES": config.stages,
        "GROUP": config.group,
        "PARTS": config.parts,
        "EPILOGUE": epilogue,
        "MATH": math,
    }
    return TritonSpecimen(
        label=f"bf16-{config.bm}x{config.bn}x{config.stages}-turns-{epilogue}",
        kernel=linear_turns,
        signature=signature,
        extra={"maxnreg": REGISTERS},
        min_arch=90,
        max_arch=90,
    )
