"""x W^T and its epilogue by a ping-pong kernel in Gluon, for compute capability 9.0.

One producer warp loads the operands of all tiles through one pipeline in shared memory, by TMA. Two consumer
warp groups take a program's tiles alternately: while one runs a tile's epilogue, the other has the tensor
cores and the whole pipeline (CUTLASS calls this the ping-pong schedule). The groups hand over by one order
barrier each. Correctness depends on that order, not only speed: a wait on a stage's barrier only tells odd
uses of the stage from even ones, so a group may wait on a stage only after the stage's previous use has
arrived. Each group stores through two staging buffers of its own, so that a store waits for the store before
the last one, not for the last.

Gluon is an experimental part of Triton: this module is imported only when its kernel is launched.
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

from weft.backends.triton_jit import TritonAotKernel, triton
from weft.machine.device_limits import num_sms
from weft.ops.linear.products import Operands, row_pitch
from weft.ops.linear.triton_kernels import GELU, GELU_KEEP, gelu

if TYPE_CHECKING:
    import torch

    from weft.ops.linear.configs import Config

BUFFERS = gl.constexpr(2)  # staging buffers of one consumer group
# Registers per thread at launch: 65536 / (12 warps * 32) rounded down to a multiple of 8. In the kernel they
# are redistributed: 240 for a consumer thread, 24 for a producer thread.
REGISTERS = 168


@gluon.jit
def tile_position(tile, row_tiles, column_tiles, GROUP: gl.constexpr):
    """As _common/tiles_triton.py: bands of GROUP rows of tiles, each column by column."""
    in_band = GROUP * column_tiles
    first = tile // in_band * GROUP
    height = gl.minimum(row_tiles - first, GROUP)
    within = tile % in_band
    return first + within % height, within // height


@gluon.jit
def produce(x_desc, weight_desc, pipeline, sizes, GROUP: gl.constexpr):
    # The producer warp: step i of the program's j-th tile goes into stage (j * steps + i) % STAGES, once the
    # consumer group that read the stage before has released it.
    x_stages, weight_stages, full, empty, _ = pipeline
    BM: gl.constexpr = x_desc.block_type.shape[0]
    BK: gl.constexpr = x_desc.block_type.shape[1]
    BN: gl.constexpr = weight_desc.block_type.shape[0]
    STAGES: gl.constexpr = x_stages.type.shape[0]
    m, n, k = sizes
    row_tiles = gl.cdiv(m, BM)
    column_tiles = gl.cdiv(n, BN)
    steps = gl.cdiv(k, BK)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = tile_position(tile, row_tiles, column_tiles, GROUP)
        for i in range(steps):
            stage = step % STAGES
            ready = full.index(stage)
            # The inverted parity lets the first use of each stage pass: nothing has to be released.
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(ready, x_desc.block_type.nbytes + weight_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(x_desc, [row * BM, i * BK], ready, x_stages.index(stage))
            tma.async_copy_global_to_shared(
                weight_desc, [column * BN, i * BK], ready, weight_stages.index(stage)
            )
            step += 1


@gluon.jit
def store_part(desc, row, column, v, buffer):
    # At most BUFFERS - 1 stores may still be reading shared memory: the buffer's previous store is complete.
    # The other buffer's store may still run; this buffer's previous one must have read its data.
    tma.store_wait(BUFFERS - 1)
    buffer.store(v.to(desc.dtype))
    fence_async_shared()  # makes the writes visible to TMA, which is another memory proxy
    tma.async_copy_shared_to_global(desc, [row, column], buffer)


@gluon.jit
def epilogue_part(v, y_desc, pre_desc, buffers, row, column, EPILOGUE: gl.constexpr, MATH: gl.constexpr):
    # v: one part of a tile, float32, bias included. The buffers alternate from store to store.
    if EPILOGUE == GELU_KEEP:
        store_part(pre_desc, row, column, v, buffers.index(0))
        store_part(y_desc, row, column, gelu(v, MATH), buffers.index(1))
    elif EPILOGUE == GELU:
        store_part(y_desc, row, column, gelu(v, MATH), buffers.index(column // v.shape[1] % BUFFERS))
    else:
        store_part(y_desc, row, column, v, buffers.index(column // v.shape[1] % BUFFERS))


@gluon.jit
def split_columns(v):
    """Return the left and the right half of a tile; this renames registers and moves no data."""
    return v.reshape([v.shape[0], 2, v.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def consume(
    outputs,
    pipeline,
    buffers,
    sizes,
    group: gl.constexpr,
    GROUP: gl.constexpr,
    PARTS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    MATH: gl.constexpr,
):
    # A consumer warp group: the program's tiles number group, group + 2, ...
    y_desc, pre_desc, bias_ptr = outputs
    x_stages, weight_stages, full, empty, order = pipeline
    STAGES: gl.constexpr = x_stages.type.shape[0]
    BM: gl.constexpr = x_stages.type.shape[1]
    BK: gl.constexpr = x_stages.type.shape[2]
    BN: gl.constexpr = weight_stages.type.shape[1]
    W: gl.constexpr = BN // PARTS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    m, n, k = sizes
    row_tiles = gl.cdiv(m, BM)
    column_tiles = gl.cdiv(n, BN)
    steps = gl.cdiv(k, BK)
    programs = gl.num_programs(0)
    # Steps are counted over all tiles of the program, also those of the other group: stage and parity follow
    # from the count.
    step = group * steps
    tiles_done = 0
    for tile in range(gl.program_id(0) + group * programs, row_tiles * column_tiles, 2 * programs):
        row, column = tile_position(tile, row_tiles, column_tiles, GROUP)
        columns = column * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
        bias = gl.load(bias_ptr + columns, mask=columns < n, other=0.0)
        # The bias was loaded before the product, so that its latency is hidden behind it.
        acc = gl.zeros((BM, BN), dtype=gl.float32, layout=layout)
        # Group 0 starts without an arrival (inverted parity); group 1 waits for group 0's first tile.
        mbarrier.wait(order.index(group), (tiles_done & 1) ^ (1 - group))
        for i in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            acc = warpgroup_mma(
                x_stages.index(stage), weight_stages.index(stage).permute((1, 0)), acc, is_async=True
            )
            # One product stays in flight. All earlier ones are complete: release the stage before.
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=i > 0)
            step += 1
        # All stages of this tile have arrived, and the last product is issued: the other group may start.
        mbarrier.arrive(order.index(1 - group))
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        step += steps  # the other group's tile
        tiles_done += 1  # noqa: SIM113 (Gluon has no enumerate)
        v = acc + bias.to(gl.float32)[None, :]
        row_start = row * BM
        column_start = column * BN
        left, right = split_columns(v)
        if PARTS == 2:
            epilogue_part(left, y_desc, pre_desc, buffers, row_start, column_start, EPILOGUE, MATH)
            epilogue_part(right, y_desc, pre_desc, buffers, row_start, column_start + W, EPILOGUE, MATH)
        else:
            a, b = split_columns(left)
            c, d = split_columns(right)
            epilogue_part(a, y_desc, pre_desc, buffers, row_start, column_start, EPILOGUE, MATH)
            epilogue_part(b, y_desc, pre_desc, buffers, row_start, column_start + W, EPILOGUE, MATH)
            epilogue_part(c, y_desc, pre_desc, buffers, row_start, column_start + 2 * W, EPILOGUE, MATH)
            epilogue_part(d, y_desc, pre_desc, buffers, row_start, column_start + 3 * W, EPILOGUE, MATH)
    tma.store_wait(0)  # shared memory must outlive the stores that read it


@gluon.jit
def linear_pingpong(
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
    # Launched with 4 warps, the first consumer group; warp specialisation adds 4 + 1, rounded up to 12.
    BM: gl.constexpr = x_desc.block_type.shape[0]
    BK: gl.constexpr = x_desc.block_type.shape[1]
    BN: gl.constexpr = weight_desc.block_type.shape[0]
    W: gl.constexpr = BN // PARTS
    x_stages = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, BK], x_desc.layout)
    weight_stages = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BN, BK], weight_desc.layout)
    buffers_0 = gl.allocate_shared_memory(y_desc.dtype, [BUFFERS, BM, W], y_desc.layout)
    buffers_1 = gl.allocate_shared_memory(y_desc.dtype, [BUFFERS, BM, W], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(order.index(0), count=1)
    mbarrier.init(order.index(1), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()  # TMA must see the barriers before it completes the first of them
    sizes = (m, n, k)
    pipeline = (x_stages, weight_stages, full, empty, order)
    outputs = (y_desc, pre_desc, bias_ptr)
    gl.warp_specialize(
        [
            (consume, (outputs, pipeline, buffers_0, sizes, 0, GROUP, PARTS, EPILOGUE, MATH)),
            (consume, (outputs, pipeline, buffers_1, sizes, 1, GROUP, PARTS, EPILOGUE, MATH)),
            (produce, (x_desc, weight_desc, pipeline, sizes, GROUP)),
        ],
        [4, 1],  # warps of the second consumer group and of the producer
        [240, 24],  # their registers per thread
    )


def launch(config: Config, epilogue: int, math: int, operands: Operands) -> None:
    """Launch one product; the kernel has no residual epilogue."""
    x2d, weight, bias, residual2d, y, pre = operands
    assert residual2d is None
    (m, k), n = x2d.shape, weight.shape[0]
    tiles = triton.cdiv(m, config.bm) * triton.cdiv(n, config.bn)
    # An epilogue part is what one staging buffer holds.
    part_columns = config.bn // config.parts
    linear_pingpong[(min(tiles, num_sms(x2d.device)),)](
        _descriptor(x2d, m, config.bm, config.bk),
        _descriptor(weight, n, config.bn, config.bk),
        bias,
        _descriptor(y, m, config.bm, part_columns),
        None if pre is None else _descriptor(pre, m, config.bm, part_columns),
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
    return TensorDescriptor(x, [rows, x.shape[-1]], [row_pitch(x), 1], block, _smem_layout(*block))


@cache
def _smem_layout(rows: int, columns: int) -> Any:
    """Return the swizzled shared-memory layout of a block of a half type, as TMA and WGMMA read it."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


def aot_kernel(config: Config, epilogue: int, math: int) -> TritonAotKernel:
    """Return the kernel that a bfloat16 product with sizes divisible by 16 compiles."""

    def block_type(rows: int, columns: int) -> str:
        return f"tensordesc<bf16[{rows}, {columns}],{_smem_layout(rows, columns)!r}>"

    part_type = block_type(config.bm, config.bn // config.parts)
    signature = {
        "x_desc": block_type(config.bm, config.bk),
        "weight_desc": block_type(config.bn, config.bk),
        "bias_ptr": "*bf16",
        "y_desc": part_type,
        "pre_desc": part_type if epilogue == GELU_KEEP.value else None,
        **dict.fromkeys("mnk", "i32:16"),
        "STAGES": config.stages,
        "GROUP": config.group,
        "PARTS": config.parts,
        "EPILOGUE": epilogue,
        "MATH": math,
    }
    return TritonAotKernel(
        label=f"bf16-{config.bm}x{config.bn}x{config.stages}-pingpong-{epilogue}",
        kernel=linear_pingpong,
        signature=signature,
        extra={"maxnreg": REGISTERS},
        min_arch=90,
        max_arch=90,
    )
