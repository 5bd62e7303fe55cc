"""Configurations of the CUDA norm kernels: how a row is laid on threads, blocks and clusters.

The norms are limited by memory bandwidth. Two things matter on such kernels: loads never stop, and each row
is read from memory once. docs/log.md has the bandwidth that each configuration reached.

Terms: a *vector* is one load or store of ``vec_width`` elements; a *team* is the threads that share a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from weft.ops._common.layout import SHIFTED
from weft.ops.norms.kernel_variant import KernelVariant
from weft.ops.norms.long_configs import LongConfig, long_backward_config, long_forward_config
from weft.ops.norms.warp_configs import (
    WarpBackwardConfig,
    WarpConfig,
    warp_backward_config,
    warp_config,
)

PERSISTENT_THREADS = 512  # a block of the backward; with 128 registers a thread it fills an SM
ENOUGH_BYTES_IN_FLIGHT = 24 << 10  # loads in flight with which the backward of an SM does not wait
LONGEST_BLOCK_ROW = 1024  # vectors; longer rows with edges are for clusters (forward_long.cu)
NAMED_BARRIERS = 15  # for teams of several warps: a block has 16, and __syncthreads uses one
# Threads of a team: threads of its block, for dropout; the fastest of those timed
# (results/nvidia-h200/sweep-dropout-2026-11-22.ndjson).
DROPOUT_BLOCK_THREADS = {96: 768, 128: 640, 512: 1024}
# (vectors a thread, most threads a block) for rows that one block holds, in order of preference.
ONE_BLOCK_SHAPES = ((2, 128), (3, 128), (4, 1024))


def _check_threads_and_cluster(threads: int, cluster: int) -> None:
    if threads % 32 or not 32 <= threads <= 1024:
        raise ValueError(f"a block has 1 to 32 whole warps, not {threads} threads")
    if cluster not in (1, 2, 4, 8):
        raise ValueError(f"a cluster has 1, 2, 4 or 8 blocks, not {cluster}")


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Forward (``norm_block``): a block, or a ``cluster`` of them, holds ``rows`` rows in registers.

    Each thread has ``vecs_per_thread`` vectors of each row. ``prefetch_weights`` loads the weights with the
    rows; otherwise they are loaded once the statistics are known, one vector at a time. ``no_tail``: every
    thread has all its vectors, so that loads need no predicate. ``evict_first``: rows leave L1 before the
    weights do. ``min_blocks`` must fit on an SM, which limits the registers.
    """

    threads: int
    vecs_per_thread: int
    cluster: int = 1
    rows: int = 1
    prefetch_weights: bool = False
    no_tail: bool = False
    evict_first: bool = False
    min_blocks: int = 1

    def __post_init__(self) -> None:
        _check_threads_and_cluster(self.threads, self.cluster)
        if self.rows not in (1, 2, 4):
            raise ValueError(f"a block has 1, 2 or 4 rows, not {self.rows}")

    @property
    def macros(self) -> dict[str, object]:
        return {
            "THREADS": self.threads,
            "VECS_PER_THREAD": self.vecs_per_thread,
            "CLUSTER": self.cluster,
            "ROWS": self.rows,
            "PREFETCH_WEIGHTS": int(self.prefetch_weights),
            "NO_TAIL": int(self.no_tail),
            "EVICT_FIRST": int(self.evict_first),
            **({"MIN_BLOCKS": self.min_blocks} if self.min_blocks > 1 else {}),
        }

    @property
    def label(self) -> str:
        """A text that differs for different programs."""
        flags = f"{int(self.prefetch_weights)}{int(self.no_tail)}{int(self.evict_first)}"
        flags += f"-{self.min_blocks}" * (self.min_blocks > 1)
        return f"{self.threads}x{self.vecs_per_thread}-{self.cluster}-{self.rows}-{flags}"


@dataclass(frozen=True, kw_only=True)
class RowLoopConfig:
    """Forward of long rows: a ``cluster`` of blocks loops over up to ``rows`` rows.

    The weights are read once. An SM holds ``blocks_per_sm`` blocks. With ``stages`` 0 the next row is loaded
    into registers (``norm_row_loop``); otherwise the bulk copy engine brings that many rows to shared memory
    (``norm_pipelined``), and ``weights_in_registers`` keeps the weights there instead of in shared memory.
    """

    threads: int
    vecs_per_thread: int
    cluster: int
    rows: int
    blocks_per_sm: int
    no_tail: bool = False
    stages: int = 0
    weights_in_registers: bool = False

    def __post_init__(self) -> None:
        _check_threads_and_cluster(self.threads, self.cluster)
        if self.rows < 1:
            raise ValueError(f"a cluster takes at least one row, not {self.rows}")
        if self.weights_in_registers and not self.stages:
            raise ValueError("weights_in_registers needs stages: without them registers hold the next row")

    @property
    def kernel(self) -> str:
        return "norm_pipelined" if self.stages else "norm_row_loop"

    @property
    def macros(self) -> dict[str, object]:
        macros: dict[str, object] = {
            "THREADS": self.threads,
            "VECS_PER_THREAD": self.vecs_per_thread,
            "CLUSTER": self.cluster,
            "BLOCKS_PER_SM": self.blocks_per_sm,
            "NO_TAIL": int(self.no_tail),
        }
        if self.stages:
            macros |= {"STAGES": self.stages, "WEIGHTS_IN_REGISTERS": int(self.weights_in_registers)}
        return macros

    @property
    def label(self) -> str:
        """A text that differs for different configurations, also for ``rows``, which is not compiled in."""
        size = f"{self.threads}x{self.vecs_per_thread}-{self.cluster}-{self.rows}"
        size += f"-{self.blocks_per_sm}-{int(self.no_tail)}"
        return f"{size}-{self.stages}-{int(self.weights_in_registers)}" if self.stages else size

    def dynamic_smem(self, variant: KernelVariant) -> int:
        """Dynamic shared memory of a block in bytes: rows in flight, then weights and biases."""
        slice_vectors = self.threads * self.vecs_per_thread
        weight_bytes = 0
        if not self.weights_in_registers:
            tensors = 1 + variant.centred
            weight_bytes = tensors * slice_vectors * variant.vec_width * variant.weight_dtype.itemsize
        return self.stages * (1 + variant.residual) * slice_vectors * 16 + weight_bytes


@dataclass(frozen=True, kw_only=True)
class MultiPassConfig:
    """Forward (``norm_multi_pass``): one block reads a row of any length three times."""

    threads: int = 512

    @property
    def macros(self) -> dict[str, object]:
        return {"THREADS": self.threads}

    @property
    def label(self) -> str:
        return str(self.threads)


ForwardConfig = WarpConfig | BlockConfig | RowLoopConfig | LongConfig | MultiPassConfig


@dataclass(frozen=True, kw_only=True)
class PersistentConfig:
    """Backward (``norm_backward``): teams of a persistent kernel loop over rows.

    ``team`` of a block's ``threads`` threads share a row. Each thread has ``vecs_per_thread`` vectors;
    ``stages`` rows are in flight for each team. Weights are in registers (``weights_in_registers``) or in
    shared memory. ``no_tail``: every thread has all its vectors. ``single_reference``: all warps of a 16-bit
    row take their sums about one reference (row_statistics.cuh).
    """

    threads: int
    team: int
    vecs_per_thread: int
    stages: int
    weights_in_registers: bool = True
    no_tail: bool = False
    single_reference: bool = False

    cluster = blocks_per_sm = 1

    def __post_init__(self) -> None:
        _check_threads_and_cluster(self.threads, 1)
        if self.team % 32 or self.threads % self.team:
            raise ValueError(f"a team of {self.team} does not divide {self.threads} threads into whole warps")
        if self.team > 32 and self.teams > NAMED_BARRIERS:
            raise ValueError(f"{self.teams} teams of several warps need more than {NAMED_BARRIERS} barriers")
        if self.stages < 2:
            raise ValueError(f"at least two rows are in flight, not {self.stages}")

    @property
    def block_threads(self) -> int:
        return self.threads

    @property
    def kernel(self) -> str:
        return "norm_backward"

    @property
    def teams(self) -> int:
        return self.threads // self.team

    @property
    def rows_per_block(self) -> int:
        """Adjacent rows that a block takes at once where rows have edges: its teams' rows lie apart."""
        return 1

    @property
    def macros(self) -> dict[str, object]:
        return {
            "THREADS": self.threads,
            "TEAM": self.team,
            "VECS_PER_THREAD": self.vecs_per_thread,
            "STAGES": self.stages,
            "WEIGHTS_IN_REGISTERS": int(self.weights_in_registers),
            "NO_TAIL": int(self.no_tail),
            "SINGLE_REFERENCE": int(self.single_reference),
        }

    @property
    def label(self) -> str:
        """A text that differs for different programs."""
        flags = f"{int(self.weights_in_registers)}{int(self.no_tail)}" + "-single" * self.single_reference
        return f"{self.threads}-{self.team}x{self.vecs_per_thread}-{self.stages}-{flags}"

    def dynamic_smem(self, columns: int, variant: KernelVariant) -> int:
        """Dynamic shared memory of a block in bytes: weights and pipelines, reused for the teams' sums."""
        row_vectors = columns // variant.vec_width
        stage_vectors = row_vectors + (variant.peel == SHIFTED)
        weight_bytes = 0
        if not self.weights_in_registers:  # aligned to 128 bytes, as in backward.cu
            size = row_vectors * variant.vec_width * variant.weight_dtype.itemsize
            weight_bytes = -(-size // 128) * 128
        pipelines = self.teams * self.stages * (2 + variant.residual) * stage_vectors * 16
        thread_sums = (1 + variant.centred) * self.vecs_per_thread * variant.vec_width
        sums = 4 * thread_sums * self.team * self.teams if self.teams > 1 else 0
        return max(weight_bytes + pipelines, sums)

    def static_smem(self, variant: KernelVariant) -> int:
        """Static shared memory in bytes: mbarriers, the tables of sums, and 256 for alignment.

        ``peel`` adds a table with the edges' sums.
        """
        edges = 128 * self.teams * (1 + variant.centred) if variant.peel else 0
        fields = (1 + variant.centred) * 2 + variant.centred
        return 8 * self.teams * self.stages + 8 * self.threads // 32 * fields + 256 + edges


BackwardConfig = WarpBackwardConfig | PersistentConfig | LongConfig


def block_config(
    columns: int,
    variant: KernelVariant,
    vecs_per_thread: int,
    *,
    prefetch_weights: bool = False,
    cluster: int = 1,
    rows: int = 1,
    evict_first: bool = False,
) -> BlockConfig | None:
    """Return the block of the fewest threads with this many vectors each; None above 1024 threads."""
    # Vectors of one block: a cluster shares the row in equal parts, the last of which may be shorter. With
    # ``peel`` the columns past the last whole vector are edges.
    vectors = -(-(columns // variant.vec_width) // cluster)
    threads = -(-vectors // (32 * vecs_per_thread)) * 32
    if threads > 1024:
        return None
    return BlockConfig(
        threads=threads,
        vecs_per_thread=vecs_per_thread,
        cluster=cluster,
        rows=rows,
        prefetch_weights=prefetch_weights,
        no_tail=columns == threads * vecs_per_thread * variant.vec_width * cluster and not variant.peel,
        evict_first=evict_first,
    )


def row_loop_config(
    columns: int,
    variant: KernelVariant,
    vecs_per_thread: int,
    *,
    cluster: int,
    rows: int,
    blocks_per_sm: int,
    stages: int = 0,
    weights_in_registers: bool = False,
) -> RowLoopConfig | None:
    """Return the row loop of the fewest threads with this many vectors each.

    Return None above 1024 threads, or if rows are not whole vectors of 16 bytes.
    """
    block = block_config(columns, variant, vecs_per_thread, cluster=cluster)
    if block is None or not variant.has_aligned_rows:
        return None
    return RowLoopConfig(
        threads=block.threads,
        vecs_per_thread=vecs_per_thread,
        cluster=cluster,
        rows=rows,
        blocks_per_sm=blocks_per_sm,
        no_tail=block.no_tail,
        stages=stages,
        weights_in_registers=weights_in_registers,
    )


@cache
def choose_forward(columns: int, variant: KernelVariant, smem_per_sm: int) -> ForwardConfig:
    """Return the fastest of the forward configurations timed on an H200.

    ``smem_per_sm``: shared memory of an SM in bytes; 0 on a device without clusters.
    """
    if warp := warp_config(columns, variant):
        return warp
    long = long_forward_config(columns, variant, smem_per_sm) if smem_per_sm else None
    if long and variant.peel and columns > LONGEST_BLOCK_ROW * variant.vec_width:
        return long
    block = _one_block_config(columns, variant)
    row_loop = _shipped_row_loop(columns, variant) if smem_per_sm else None
    # A row that fits in one block of up to 512 threads is fastest there; a larger block competes with a
    # pipelined cluster.
    if block and not (row_loop and row_loop.stages and block.threads > 512):
        prefetch = _prefetch_pays(columns, variant, block)
        return replace(block, prefetch_weights=prefetch)
    if row_loop and row_loop.threads <= 256:
        return row_loop
    if long and columns > LONGEST_BLOCK_ROW * variant.vec_width:
        return long
    # Small blocks first: several are then resident on an SM, and one waits for its cluster while others load.
    for vecs_per_thread, max_threads in ((8, 256), (8, 512), (4, 1024)):
        # A residual takes as many registers as the row: two blocks of 512 threads would spill.
        if max_threads == 512 and variant.residual:
            continue
        for cluster in (4, 8) if smem_per_sm else ():
            clustered = block_config(columns, variant, vecs_per_thread, cluster=cluster)
            if clustered and clustered.threads <= max_threads:
                return replace(clustered, min_blocks=2 if max_threads == 512 else 1)
    return MultiPassConfig()


def _one_block_config(columns: int, variant: KernelVariant) -> BlockConfig | None:
    """Return a block that holds a row of at most 4096 vectors; fewer threads wait less at its barrier."""
    blocks = []
    for vecs_per_thread, max_threads in ONE_BLOCK_SHAPES:
        block = block_config(columns, variant, vecs_per_thread)
        if block and block.threads <= max_threads:
            blocks.append(block)
    return next((block for block in blocks if block.no_tail), blocks[0] if blocks else None)


def _prefetch_pays(columns: int, variant: KernelVariant, block: BlockConfig) -> bool:
    """Return True if loading the weights with the row is faster.

    It is where threads have all their vectors and registers for the weights. For block sizes in between,
    and for weight and bias of long rows, weights that are loaded late arrive as soon, because more blocks
    are resident.
    """
    # A 16-byte vector takes four 32-bit registers.
    row_words = 4 * block.vecs_per_thread * (1 + variant.residual)
    thread_elements = block.vecs_per_thread * variant.vec_width
    weight_words = thread_elements * variant.weight_dtype.itemsize // 4 * (1 + variant.centred)
    in_between = 128 <= block.threads < (1024 if variant.centred else 512)
    registers = row_words + weight_words + 24  # 24 for addresses and statistics
    return block.no_tail and not in_between and registers <= min(96, 65536 // block.threads)


def _shipped_row_loop(columns: int, variant: KernelVariant) -> RowLoopConfig | None:
    """Return the row loop for rows too long for one block.

    A weight read from L2 for each row is as many bytes as the row, which L2 can bear; weight and bias are
    twice as many, so that they are read once for two rows, or, where only a cluster fits, once for as many
    rows as the cluster takes.
    """
    if variant.residual or variant.weight_dtype != variant.x_dtype:
        blocks_per_sm = 2 if variant.residual else 4
        return row_loop_config(columns, variant, 4, cluster=8, rows=8, blocks_per_sm=blocks_per_sm)
    rows, vecs_per_thread, blocks_per_sm = (2, 4, 4) if variant.centred else (1, 8, 3)
    for cluster in (2, 4, 8):
        config = row_loop_config(
            columns, variant, vecs_per_thread, cluster=cluster, rows=rows,
            blocks_per_sm=blocks_per_sm, stages=rows, weights_in_registers=True,
        )  # fmt: skip
        if config and config.threads <= 256:
            return config
    if not variant.centred:
        return None
    return row_loop_config(
        columns, variant, 8, cluster=8, rows=128, blocks_per_sm=2, stages=3, weights_in_registers=True
    )


@cache
def choose_backward(
    columns: int, variant: KernelVariant, smem_per_sm: int, max_teams: int
) -> BackwardConfig | None:
    """Return the backward's configuration, or None: the multi-pass kernels take rows of any length.

    A block has at most ``max_teams`` teams of a warp or more, a power of two, so that few rows still spread
    over all SMs.
    """
    if warp := warp_backward_config(columns, variant):
        return warp
    if not smem_per_sm or variant.vec_width * variant.x_dtype.itemsize != 16:
        return None
    config = _one_block_backward_config(columns, variant, smem_per_sm)
    if not config:
        return long_backward_config(columns, variant, smem_per_sm)
    if config.teams > max_teams:
        threads = config.team * max_teams
        vectors = config.vecs_per_thread
        config = persistent_config(columns, variant, smem_per_sm, threads=threads, vecs_per_thread=vectors)
    if variant.dropout or not config:
        return config
    row_bytes = columns * variant.x_dtype.itemsize
    # One row of each team is in use and one in flight: where that suffices, a third stage only takes shared
    # memory.
    if config.teams * (2 + variant.residual) * row_bytes >= ENOUGH_BYTES_IN_FLIGHT:
        config = replace(config, stages=2)
    # Faster with a residual, and for RMS norm of long rows; short rows take the same time either way.
    return replace(config, single_reference=single_reference_pays(variant))


def single_reference_pays(variant: KernelVariant) -> bool:
    """Return True if statistics about a single reference are worth timing.

    They apply to 16-bit rows. Layer norm without a residual is slower with them on an H200:
    results/nvidia-h200/sweep-norm-backward-2026-11-22.ndjson.
    """
    return variant.x_dtype.itemsize == 2 and (variant.residual or not variant.centred)


def _one_block_backward_config(
    columns: int, variant: KernelVariant, smem_per_sm: int
) -> PersistentConfig | None:
    """Return the teams for rows of at most two vectors a thread of a block, or None.

    Longer rows, and one row a block if its rows have edges, are for clusters that sum a row ahead
    (backward_long.cu): with one row a block, all its warps wait for each other, and for the warp with the
    edges (results/nvidia-h200/row-lengths-norms-backward-2026-11-24.txt).
    """
    if variant.dropout and (config := _dropout_config(columns, variant, smem_per_sm)):
        return config
    config = persistent_config(columns, variant, smem_per_sm)
    if not config:
        return None
    # Teams twice as wide with their weights in registers beat teams without. They also beat teams of
    # one warp if every vector is full or there is a residual.
    wider = persistent_config(columns, variant, smem_per_sm, vecs_per_thread=2)
    if wider and wider.weights_in_registers:
        beats_one_warp = config.team == 32 and (wider.no_tail or variant.residual)
        config = wider if beats_one_warp or not config.weights_in_registers else config
    is_long = config.teams == 1 and (config.vecs_per_thread > 2 or variant.peel)
    return None if is_long and not variant.dropout else config


def _dropout_config(columns: int, variant: KernelVariant, smem_per_sm: int) -> PersistentConfig | None:
    """Return teams of one vector a thread: many warps hide the computation of random numbers.

    With a single reference a team of 512 threads has a block for itself, which is faster on an H200 than
    two such teams without; smaller teams are slower with it
    (results/nvidia-h200/sweep-norm-backward-2026-11-22.ndjson).
    """
    team = -(-columns // variant.vec_width // 32) * 32
    if team > 512:
        return None
    single = team == 512 and single_reference_pays(variant)
    threads = team if single else DROPOUT_BLOCK_THREADS.get(team) or team * max(1, 512 // team)
    config = persistent_config(columns, variant, smem_per_sm, threads=threads, vecs_per_thread=1)
    return replace(config, single_reference=single) if config else None


def persistent_config(
    columns: int,
    variant: KernelVariant,
    smem_per_sm: int,
    *,
    threads: int = PERSISTENT_THREADS,
    vecs_per_thread: int = 4,
    stages: int = 3,
) -> PersistentConfig | None:
    """Return the teams that ``threads`` threads with at most ``vecs_per_thread`` vectors each form.

    Return None if rows are too long for them, for their registers, or for the shared memory of an SM.
    """
    vectors = columns // variant.vec_width
    # An SM has 65536 registers for all resident threads.
    register_budget = 65536 // threads - 32  # 32 for addresses and statistics
    for limit in range(vecs_per_thread, 0, -1):
        team = _team_size(vectors, threads, limit)
        needed = -(-vectors // team) if team else 0
        # A row that is read twice from shared memory is in registers one vector at a time.
        row_vectors = 1 if team == 32 else needed
        if team and _registers(variant, row_vectors, needed, weights_in_registers=False) <= register_budget:
            break
    else:
        return None
    config = PersistentConfig(
        threads=threads,
        team=team,
        vecs_per_thread=needed,
        stages=2,
        weights_in_registers=(
            _registers(variant, row_vectors, needed, weights_in_registers=True) <= register_budget - 12
        ),
        no_tail=vectors == team * needed and columns == vectors * variant.vec_width and not variant.peel,
    )
    for count in range(stages, 1, -1):
        staged = replace(config, stages=count)
        # 1024 bytes a block belong to the CUDA runtime.
        # The most stages that fit: more rows in flight hide more latency.
        if staged.dynamic_smem(columns, variant) + staged.static_smem(variant) + 1024 <= smem_per_sm:
            return staged
    return None


def _team_size(vectors: int, threads: int, vecs_per_thread: int) -> int:
    """Return the threads of the smallest team that holds a row and divides ``threads``; 0 if none does."""
    team = -(-vectors // (32 * vecs_per_thread)) * 32
    while threads % team or (team > 32 and threads > NAMED_BARRIERS * team):
        team += 32
        if team > threads:
            return 0
    return team


def _registers(
    variant: KernelVariant, row_vectors: int, vecs_per_thread: int, weights_in_registers: bool
) -> int:
    """Estimate the registers of a backward thread: its sums, the words of ``row_vectors``, the weights'."""
    columns = vecs_per_thread * variant.vec_width
    row_words = 4 * row_vectors * (2 + variant.residual)
    weight_words = columns * variant.weight_dtype.itemsize // 4 if weights_in_registers else 0
    return columns * (1 + variant.centred) + row_words + weight_words
