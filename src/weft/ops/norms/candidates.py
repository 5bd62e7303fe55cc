"""Configurations of the CUDA norm kernels that a sweep on a device times."""

from __future__ import annotations

from dataclasses import replace

from weft.ops.norms.configs import (
    BackwardConfig,
    BlockConfig,
    RowLoopConfig,
    block_config,
    persistent_config,
    row_loop_config,
    single_reference_pays,
)
from weft.ops.norms.kernel_variant import KernelVariant
from weft.ops.norms.long_configs import long_candidates

# (vecs_per_thread, cluster, rows, prefetch_weights, evict_first)
SHORT_ROWS = (
    (2, 1, 1, 1, 0), (2, 1, 1, 1, 1), (2, 1, 2, 1, 0), (1, 1, 1, 1, 0), (1, 1, 2, 1, 0),
    (3, 1, 1, 1, 0), (3, 1, 2, 1, 0), (4, 1, 1, 1, 0), (4, 1, 2, 1, 0),
)  # fmt: skip
MEDIUM_ROWS = ((4, 1, 1, 0, 0), (4, 1, 1, 1, 0), (2, 1, 1, 0, 0), (2, 1, 1, 1, 0), (4, 1, 2, 0, 0))
LONG_ROWS = ((8, 4, 1, 0, 0), (8, 4, 1, 0, 1))
# Row loops for rows of 1024 to 4096 vectors: (vecs_per_thread, cluster, rows, blocks_per_sm).
MEDIUM_ROW_LOOPS = ((4, 2, 16, 4), (4, 1, 16, 2), (2, 2, 16, 2), (4, 2, 64, 4))
# Row loops past 4096 vectors: (vecs_per_thread, threads, rows, blocks_per_sm, stages, weights_in_registers).
# Loops over few rows start often and balance the load; loops over many rows read the weights rarely.
ROW_LOOPS = ((4, 256, 8, 4, 0, 0), (4, 256, 4, 4, 0, 0), (8, 128, 8, 5, 0, 0))
PIPELINED = {  # by `centred`
    False: (
        (8, 256, 1, 3, 1, 1), (8, 256, 1, 2, 1, 1), (8, 256, 1, 3, 1, 0), (4, 512, 1, 2, 1, 1),
        (4, 256, 1, 4, 1, 1), (8, 128, 1, 6, 1, 1), (8, 256, 4, 3, 2, 1), (8, 256, 8, 3, 2, 1),
        (8, 256, 2, 3, 2, 1), (8, 256, 4, 2, 2, 0), (8, 256, 8, 2, 3, 1), (4, 256, 4, 4, 2, 0),
        (4, 256, 8, 4, 2, 0), (4, 256, 8, 4, 3, 1), (4, 256, 4, 4, 3, 1), (4, 256, 8, 3, 4, 1),
        (4, 256, 128, 4, 3, 1), (4, 256, 128, 3, 4, 1), (8, 256, 128, 2, 3, 1),
        (4, 1024, 8, 1, 2, 0), (4, 512, 4, 2, 2, 0),
    ),
    True: (
        (4, 256, 8, 4, 3, 1), (4, 256, 4, 4, 3, 1), (4, 256, 2, 4, 2, 1), (4, 256, 1, 4, 1, 1),
        (8, 256, 1, 2, 1, 1), (8, 256, 2, 2, 2, 1), (8, 256, 4, 2, 3, 1), (8, 256, 8, 2, 3, 1),
        (4, 256, 4, 3, 3, 1), (4, 256, 8, 3, 4, 1), (4, 256, 16, 4, 3, 1), (4, 256, 8, 3, 2, 0),
        (4, 256, 4, 4, 1, 0), (4, 256, 8, 2, 5, 1), (4, 256, 128, 4, 3, 1), (4, 256, 128, 3, 4, 1),
        (8, 256, 128, 2, 3, 1), (4, 512, 8, 1, 4, 1), (8, 128, 4, 4, 3, 1), (4, 512, 4, 2, 3, 1),
    ),
}  # fmt: skip
# Backward: (threads, vecs_per_thread, stages). Shallow pipelines above all: the last rows' loads are waited
# for at the end, and a deeper pipeline has more of them.
PERSISTENT = (
    (512, 4, 3), (512, 4, 2), (512, 2, 3), (512, 2, 2), (384, 4, 3), (384, 2, 3),
    (640, 2, 3), (768, 1, 4), (640, 4, 2), (256, 4, 3), (256, 4, 2),
)  # fmt: skip
PERSISTENT_WITH_DROPOUT = ((512, 1, 3), (640, 1, 3), (768, 1, 3), (1024, 1, 3))


def forward_candidates(
    columns: int, variant: KernelVariant, smem_per_sm: int
) -> list[BlockConfig | RowLoopConfig]:
    """Return the forward configurations worth timing for rows of ``columns`` and 16-byte vectors.

    ``smem_per_sm``: shared memory of an SM in bytes; 0 on a device without clusters.
    """
    vectors = columns // variant.vec_width
    shapes = SHORT_ROWS if vectors <= 256 else MEDIUM_ROWS if vectors <= 4096 else LONG_ROWS
    configs: list[BlockConfig | RowLoopConfig] = []
    for vecs_per_thread, cluster, rows, prefetch_weights, evict_first in shapes:
        block = block_config(
            columns, variant, vecs_per_thread, cluster=cluster, rows=rows,
            prefetch_weights=bool(prefetch_weights), evict_first=bool(evict_first),
        )  # fmt: skip
        runs = cluster == 1 or smem_per_sm
        if block and runs and (block.no_tail or not prefetch_weights) and block not in configs:
            configs.append(block)
    if vectors <= 4096 and configs and isinstance(configs[0], BlockConfig):
        configs.append(replace(configs[0], no_tail=False))
    return [*configs, *_row_loop_candidates(columns, variant, smem_per_sm)] if smem_per_sm else configs


def _row_loop_candidates(columns: int, variant: KernelVariant, smem_per_sm: int) -> list[RowLoopConfig]:
    vectors = columns // variant.vec_width
    if vectors < 1024:
        return []
    configs = []
    if vectors <= 4096:
        for vecs_per_thread, cluster, rows, blocks_per_sm in MEDIUM_ROW_LOOPS:
            config = row_loop_config(
                columns, variant, vecs_per_thread, cluster=cluster, rows=rows, blocks_per_sm=blocks_per_sm
            )
            if config:
                configs.append(config)
    if vectors < 4096:
        return configs
    shapes = (*ROW_LOOPS, *PIPELINED[variant.centred])
    for vecs_per_thread, threads, rows, blocks_per_sm, stages, weights_in_registers in shapes:
        cluster = -(-vectors // (vecs_per_thread * threads))
        if cluster not in (1, 2, 4, 8):
            continue
        config = row_loop_config(
            columns, variant, vecs_per_thread, cluster=cluster, rows=rows, blocks_per_sm=blocks_per_sm,
            stages=stages, weights_in_registers=bool(weights_in_registers),
        )  # fmt: skip
        # 5 KiB: static shared memory of a block, rounded up.
        fits = config and blocks_per_sm * (config.dynamic_smem(variant) + (5 << 10)) <= smem_per_sm
        if config and fits and config not in configs:
            configs.append(config)
    return configs


def backward_candidates(columns: int, variant: KernelVariant, smem_per_sm: int) -> list[BackwardConfig]:
    """Return the backward configurations worth timing, as :func:`forward_candidates`."""
    configs: list[BackwardConfig] = []
    for threads, vecs_per_thread, stages in PERSISTENT + PERSISTENT_WITH_DROPOUT * variant.dropout:
        config = persistent_config(
            columns, variant, smem_per_sm, threads=threads, vecs_per_thread=vecs_per_thread, stages=stages
        )
        variants = [config] if config else []
        if config and single_reference_pays(variant):
            variants.append(replace(config, single_reference=True))
        configs += [c for c in variants if c not in configs]
    return [*configs, *long_candidates(columns, variant, smem_per_sm, backward=True)]
