"""Configurations of the CUDA norm kernels for short rows: some lanes of a warp have a row."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ops._common.layout import SHIFTED
from weft.ops.norms.kernel_variant import KernelVariant

# Vectors of the longest rows of the backward. Longer rows fill the lanes of a warp, and a pipeline brings
# them (backward.cu): 768 columns in bf16 reached 84 % of copying on an H200
# (results/nvidia-h200/row-lengths.json).
MOST_VECTORS = 64
MOST_LANE_VECTORS, MOST_LANE_EDGES = 4, 4
# (threads, blocks an SM, registers a thread) of the backward.
BLOCKS = ((384, 2, 80), (512, 1, 128), (384, 1, 168), (256, 1, 255))
NO_TAIL_REGISTERS = 12  # more of a thread without branches, which works on several vectors at once
# Model of the backward on an H200. Instructions of a warp's pass, counted in the machine code for sm_90: for
# its rows, and for each vector and edge that a lane has.
PASS_COST, VECTOR_COST, SHIFT_COST, EDGE_COST = 110, 160, 60, 56
# Instructions that an SM's four schedulers can issue while copying moves three bfloat16 elements: 132 SMs at
# 1.755 GHz, and 4.27 TB/s.
COPY_COST = 1.3
STALL = 1.3  # warps of a scheduler that wait, on average, while one issues
IN_FLIGHT = 26 << 10  # bytes in flight with which an SM does not wait: 32 bytes a ns, 800 ns


@dataclass(frozen=True, kw_only=True)
class WarpConfig:
    """Forward of short rows (``norm_warp``): ``lanes`` lanes of a warp hold a row in registers."""

    lanes: int
    vecs_per_thread: int
    threads: int = 64

    @property
    def macros(self) -> dict[str, object]:
        return {"THREADS": self.threads, "LANES": self.lanes, "VECS_PER_THREAD": self.vecs_per_thread}

    @property
    def label(self) -> str:
        """A text that differs for different programs."""
        return f"{self.threads}x{self.vecs_per_thread}-{self.lanes}"


@dataclass(frozen=True, kw_only=True)
class WarpBackwardConfig:
    """Backward of short rows (``norm_backward_warp``): ``lanes`` lanes of a warp take one row after another.

    Each lane has ``vecs_per_thread`` vectors. ``no_tail``: every lane has all its vectors. ``blocks_per_sm``
    blocks of ``threads`` threads fit on an SM, which limits the registers.
    """

    lanes: int
    vecs_per_thread: int
    threads: int
    blocks_per_sm: int
    no_tail: bool = False

    kernel = "norm_backward_warp"
    cluster = 1

    @property
    def block_threads(self) -> int:
        return self.threads

    @property
    def teams(self) -> int:
        return self.threads // self.lanes

    @property
    def rows_per_block(self) -> int:
        """Adjacent rows that a block takes at once where rows have edges."""
        return self.teams

    @property
    def macros(self) -> dict[str, object]:
        return {
            "THREADS": self.threads,
            "LANES": self.lanes,
            "VECS_PER_THREAD": self.vecs_per_thread,
            "BLOCKS_PER_SM": self.blocks_per_sm,
            "NO_TAIL": int(self.no_tail),
        }

    @property
    def label(self) -> str:
        """A text that differs for different programs."""
        return f"{self.threads}-{self.lanes}x{self.vecs_per_thread}-{self.blocks_per_sm}-{int(self.no_tail)}"

    def dynamic_smem(self, columns: int, variant: KernelVariant) -> int:
        """Dynamic shared memory of a block in bytes: a row of the table of sums for each team."""
        return 4 * self.teams * (columns + columns // 32 + 1)


def warp_config(columns: int, variant: KernelVariant) -> WarpConfig | None:
    """Return the lanes that hold a short row with the fewest empty places; None for other rows.

    Aligned rows of 128 vectors are left to blocks of two warps, which reach 90 to 93 % of copying on an H200
    at 1024 columns in bf16; 320 columns reached 40 % in blocks of one warp.
    """
    vectors = columns // variant.vec_width
    bytes_each = variant.vec_width * variant.x_dtype.itemsize
    if variant.dropout or bytes_each != 16 or vectors > 128 or (vectors == 128 and not variant.peel):
        return None
    most = 4 if variant.residual or variant.peel else 5  # vectors a lane, by their registers
    shapes = [(lanes, max(1, -(-vectors // lanes))) for lanes in (8, 16, 32)]
    # Of equal capacity, the fewest lanes: more rows in a warp, and fewer shuffles for each.
    lanes, vecs_per_thread = min(((n, v) for n, v in shapes if v <= most), key=lambda s: (s[0] * s[1], s[0]))
    # An SM starts 12 blocks a us, which limits blocks that move less than 2.7 KB (softmax/with_cuda.py).
    threads = 128 if vecs_per_thread == 1 else 64
    return WarpConfig(lanes=lanes, vecs_per_thread=vecs_per_thread, threads=threads)


def warp_backward_config(columns: int, variant: KernelVariant) -> WarpBackwardConfig | None:
    """Return the lanes that take a short row with the fewest instructions; None for other rows."""
    vec_width = variant.vec_width
    if variant.dropout or vec_width * variant.x_dtype.itemsize != 16:
        return None
    vectors = max(1, columns // vec_width)
    if vectors > MOST_VECTORS:
        return None
    estimates = []
    for lanes in (4, 8, 16, 32):
        vecs_per_thread, edges = -(-vectors // lanes), -(-_most_edges(variant) // lanes)
        registers = _backward_registers(variant, vecs_per_thread, edges)
        block = next((block for block in BLOCKS if registers <= block[2]), None)
        if block and vecs_per_thread <= MOST_LANE_VECTORS and edges <= MOST_LANE_EDGES:
            config = WarpBackwardConfig(
                lanes=lanes,
                vecs_per_thread=vecs_per_thread,
                threads=block[0],
                blocks_per_sm=block[1],
                no_tail=(
                    columns == lanes * vecs_per_thread * vec_width
                    and not variant.peel
                    and registers + NO_TAIL_REGISTERS <= block[2]
                ),
            )
            estimates.append((_row_cost(columns, variant, config, edges), registers, config))
    return min(estimates, key=lambda estimate: estimate[:2])[2] if estimates else None


def _row_cost(columns: int, variant: KernelVariant, config: WarpBackwardConfig, edges: int) -> float:
    """Estimate what a row of the backward costs, in issued instructions: the larger of work and traffic."""
    vector_cost = VECTOR_COST + SHIFT_COST * (variant.peel == SHIFTED)
    instructions = PASS_COST + vector_cost * config.vecs_per_thread + EDGE_COST * edges
    resident = config.threads * config.blocks_per_sm
    warps = resident / 128  # of a scheduler
    work = instructions * config.lanes / 32 * (warps + STALL) / warps
    tensors = 2 + variant.residual
    in_flight = resident * config.vecs_per_thread * 16 * tensors
    traffic = COPY_COST * columns * variant.x_dtype.itemsize / 2 * (2 * tensors - 1) / 3
    return max(work, traffic * max(1.0, IN_FLIGHT / in_flight))


def _most_edges(variant: KernelVariant) -> int:
    """Return the most edges of a row, as ``MOST_EDGES`` of row_view.cuh."""
    return 2 * (variant.vec_width - 1) if variant.peel else 0


def _backward_registers(variant: KernelVariant, vecs_per_thread: int, edges: int) -> int:
    """Estimate the registers of a thread of the backward: sums, weights, this row and the next."""
    columns = vecs_per_thread * variant.vec_width
    tensors = 2 + variant.residual
    body = columns * (1 + variant.centred) + columns * variant.weight_dtype.itemsize // 4
    shifted = variant.peel == SHIFTED  # the next row is loaded in twice as many blocks
    body += ((2 + shifted) * 4 * tensors + 4) * vecs_per_thread
    return body + edges * (2 + variant.centred + 2 * tensors) + 40 + 12 * bool(variant.peel)
