"""Configurations of the CUDA norm kernels for long rows: a cluster of blocks has a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from weft.ops._common.layout import SHIFTED
from weft.ops.norms.kernel_variant import KernelVariant

THREADS = 512  # that compute, in a block
COORDINATORS = 32  # threads of the warp that coordinates a block
CLUSTERS = (1, 2, 4, 8, 16)
TABLES = 4  # of sums and of terms, as in backward_long.cu
TERMS_BYTES = 32  # of a row
# Running sums and weights in registers; by whether rows have edges, which take registers too. A thread has
# 96: an SM's four schedulers share 65536, and one of them has 5 of the 17 warps.
MOST_FLOATS = {False: 48, True: 32}
MOST_SUMS = (32, 64)  # a thread's running sums: all in registers, or some in local memory
MOST_FORWARD_VECTORS, MOST_WEIGHT_WORDS = 4, 32  # of a thread
ENOUGH_BYTES_AHEAD = 40 << 10  # loads in flight behind two rows in use, with which an SM does not wait
MOST_STAGES = 8


@dataclass(frozen=True, kw_only=True)
class LongConfig:
    """Long rows (``norm_long``, ``norm_backward_long``): a ``cluster`` of blocks takes one row after another.

    Each of ``threads`` threads of a block has ``vecs_per_thread`` vectors of every row; one more warp
    coordinates. ``stages`` rows are in shared memory: two in use, the others in flight. Weights are in
    registers, as floats (``weights_in_registers``), or in shared memory. ``no_tail``: every thread has all
    its vectors.
    """

    threads: int
    vecs_per_thread: int
    cluster: int
    stages: int
    weights_in_registers: bool = True
    no_tail: bool = False
    backward: bool = True

    teams = 1
    blocks_per_sm = 1

    def __post_init__(self) -> None:
        if self.threads % 32 or not 32 <= self.threads <= 992:
            raise ValueError(f"a block has 1 to 31 warps that compute, not {self.threads} threads")
        if self.cluster not in CLUSTERS:
            raise ValueError(f"a cluster has {CLUSTERS} blocks, not {self.cluster}")
        if self.stages < 3:
            raise ValueError(f"two rows are in use and one is in flight, not {self.stages} in all")

    @property
    def kernel(self) -> str:
        return "norm_backward_long" if self.backward else "norm_long"

    @property
    def block_threads(self) -> int:
        return self.threads + COORDINATORS

    @property
    def macros(self) -> dict[str, object]:
        return {
            "THREADS": self.threads,
            "VECS_PER_THREAD": self.vecs_per_thread,
            "STAGES": self.stages,
            "CLUSTER": self.cluster,
            "WEIGHTS_IN_REGISTERS": int(self.weights_in_registers),
            "NO_TAIL": int(self.no_tail),
        }

    @property
    def label(self) -> str:
        """A text that differs for different programs."""
        flags = f"{int(self.weights_in_registers)}{int(self.no_tail)}"
        return f"{self.threads}x{self.vecs_per_thread}-{self.stages}-{self.cluster}-{flags}"

    def dynamic_smem(self, columns: int, variant: KernelVariant) -> int:
        """Dynamic shared memory of a block in bytes: weights and stages."""
        slice_vectors = -(-(columns // variant.vec_width) // self.cluster)
        weight_bytes = 0
        if not self.weights_in_registers:  # aligned to 128 bytes, as in backward_long.cu
            size = slice_vectors * variant.vec_width * variant.weight_dtype.itemsize
            weight_bytes = -(-size // 128) * 128
        tensors = 1 + self.backward + variant.residual
        return weight_bytes + self.stages * tensors * (slice_vectors + (variant.peel == SHIFTED)) * 16

    def static_smem(self, variant: KernelVariant) -> int:
        """Static shared memory in bytes: mbarriers, tables of sums and of terms, and 256 for alignment."""
        fields = (1 + variant.centred) * 2 + variant.centred
        entries = self.threads // 32 + self.cluster
        return 8 * (self.stages + 3 * TABLES) + TABLES * (4 * entries * fields + TERMS_BYTES) + 256


def long_backward_config(columns: int, variant: KernelVariant, smem_per_sm: int) -> LongConfig | None:
    """Return the smallest cluster with room for a row and for its columns' sums, or None."""
    for most_sums, cluster in product(MOST_SUMS, CLUSTERS):
        vecs_per_thread = _vecs_per_thread(columns, variant, cluster)
        sums = vecs_per_thread * variant.vec_width * (1 + variant.centred)
        if sums > most_sums:
            continue
        in_registers = sums + vecs_per_thread * variant.vec_width <= MOST_FLOATS[bool(variant.peel)]
        config = _config(columns, variant, smem_per_sm, cluster, backward=True, in_registers=in_registers)
        if config:
            return config
    return None


def long_forward_config(columns: int, variant: KernelVariant, smem_per_sm: int) -> LongConfig | None:
    """Return the smallest cluster whose threads have room for their columns' weights, or None."""
    if variant.residual or variant.dropout or variant.vec_width * variant.x_dtype.itemsize != 16:
        return None
    for cluster in CLUSTERS:
        vecs_per_thread = _vecs_per_thread(columns, variant, cluster)
        words = vecs_per_thread * variant.vec_width * variant.weight_dtype.itemsize // 4
        if vecs_per_thread <= MOST_FORWARD_VECTORS and words * (1 + variant.centred) <= MOST_WEIGHT_WORDS:
            return _config(columns, variant, smem_per_sm, cluster, backward=False)
    return None


def long_candidates(
    columns: int, variant: KernelVariant, smem_per_sm: int, *, backward: bool
) -> list[LongConfig]:
    """Return the configurations worth timing, one for each size of a cluster."""
    most = (
        MOST_SUMS[1] // (variant.vec_width * (1 + variant.centred)) if backward else 2 * MOST_FORWARD_VECTORS
    )
    sizes = [c for c in CLUSTERS if 1 < _vecs_per_thread(columns, variant, c) <= most]
    configs = [_config(columns, variant, smem_per_sm, cluster, backward=backward) for cluster in sizes]
    return [config for config in configs if config]


def _vecs_per_thread(columns: int, variant: KernelVariant, cluster: int) -> int:
    vectors = -(-(columns // variant.vec_width) // cluster)
    return max(1, -(-vectors // THREADS))


def _config(
    columns: int,
    variant: KernelVariant,
    smem_per_sm: int,
    cluster: int,
    *,
    backward: bool,
    in_registers: bool = True,
) -> LongConfig | None:
    """Return the configuration with enough stages, or as many as fit in shared memory; None below three."""
    vectors = max(1, -(-(columns // variant.vec_width) // cluster))
    vecs_per_thread = -(-vectors // THREADS)
    threads = -(-vectors // (32 * vecs_per_thread)) * 32
    capacity = cluster * threads * vecs_per_thread * variant.vec_width
    config = LongConfig(
        threads=threads,
        vecs_per_thread=vecs_per_thread,
        cluster=cluster,
        stages=3,
        weights_in_registers=in_registers,
        no_tail=columns == capacity and not variant.peel,
        backward=backward,
    )
    stage_bytes = vectors * 16 * (1 + backward + variant.residual)
    enough = min(MOST_STAGES, 2 + -(-ENOUGH_BYTES_AHEAD // stage_bytes))
    for stages in range(max(3, enough), 2, -1):
        staged = replace(config, stages=stages)
        # 1024 bytes a block belong to the CUDA runtime.
        if staged.dynamic_smem(columns, variant) + staged.static_smem(variant) + 1024 <= smem_per_sm:
            return staged
    return None
