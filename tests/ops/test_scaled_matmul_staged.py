"""The fp8 product in tiles of more than 128 rows, whose scales of blocks come through the ring."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers import warp_emulator
from helpers.warp_emulator import EmulatorError
from ops.test_scaled_matmul import (  # noqa: F401
    E4M3,
    E5M2,
    EMULATOR,
    KERNEL,
    emulated,
    factors,
    needs_compiler,
    product,
)
from weft.ops.scaled_matmul import with_cuda
from weft.ops.scaled_matmul.spec import BLOCKS, ROWS, TENSOR
from weft.ops.scaled_matmul.with_cuda import HALVES, MIDDLE, THREE_GROUPS

STAGED = KERNEL.with_name("scaled_matmul_staged.cuh")
# As POINTS, and the number of parts of K and of clusters that run at once.
STAGED_POINTS = [
    ((520, 136, 656, HALVES, BLOCKS, E4M3, E4M3), 1, 1),
    ((264, 264, 784, HALVES, BLOCKS, E4M3, E4M3), 3, 5),
    ((200, 136, 400, HALVES, TENSOR, E5M2, E4M3), 1, 2),
    ((264, 392, 528, HALVES, ROWS, E4M3, E4M3), 3, 4),
    ((72, 8, 16, HALVES, BLOCKS, E4M3, E5M2), 1, 1),
    ((200, 264, 272, THREE_GROUPS, BLOCKS, E5M2, E5M2), 1, 1),
    ((200, 264, 656, THREE_GROUPS, BLOCKS, E4M3, E4M3), 2, 3),
    ((392, 136, 272, THREE_GROUPS, ROWS, E4M3, E4M3), 1, 1),
    ((264, 520, 656, THREE_GROUPS, TENSOR, E4M3, E4M3), 3, 4),
]
WAIT = "    wgmma_wait<0>();\n"
RELEASE = "    if (half == HALVES - 1) pipeline.release_by_lanes<CLUSTER>(stage);\n"
# name: the configuration, and as above
STAGED_FAULTS: dict[str, tuple[with_cuda.Config, str, str]] = {
    "scales are written into a stage in use": (
        THREE_GROUPS,
        "        wait(pipeline.empty(ring.stage), ring.parity ^ 1);\n        if (at == own_step)",
        "        if (at == own_step)",
    ),
    "a stage is full without its scales": (HALVES, "CLUSTER, 1 + SCALE_WARPS)", "CLUSTER, 1)"),
    "four steps have the scales of the first": (HALVES, "first + own_step, unit.end", "first, unit.end"),
    "a half has the other's scales": (HALVES, "(half * 64 + row * 8) * 4", "(row * 8) * 4"),
    "a second warp writes the rows of the first": (
        THREE_GROUPS,
        "const int own_row = part * SCALE_ROWS +",
        "const int own_row =",
    ),
    "a half multiplies the other's rows": (HALVES, "STAGE_BYTES + half * 64 * BK", "STAGE_BYTES"),
    "a group multiplies the first's rows": (
        THREE_GROUPS,
        "(stages + group * HALVES * 64 * BK)",
        "(stages)",
    ),
    "a stage is released before the second half": (HALVES, RELEASE, RELEASE.replace("HALVES - 1", "0")),
    "a stage is released while products read it": (THREE_GROUPS, WAIT + RELEASE, RELEASE + WAIT),
    "sums are added before they are complete": (HALVES, WAIT, WAIT.replace("0", "1")),
    "no fence before the first product": (
        HALVES,
        "wait_full(ring);\n    wgmma_fence();\n",
        "wait_full(ring);\n",
    ),
    "one lane frees the stage in its own block alone": (
        THREE_GROUPS,
        RELEASE,
        RELEASE.replace("<CLUSTER>", "<1>"),
    ),
    "a block loads the other's share of a": (THREE_GROUPS, "unit.row + a_share * SHARE_ROWS", "unit.row"),
    "a share of a reaches one block": (
        THREE_GROUPS,
        "tma_load_multicast(a_at, &arguments.a, step * BK, row, full, ALL_BLOCKS)",
        "tma_load(a_at, &arguments.a, step * BK, row, full)",
    ),
    "blocks that share a compute the same columns": (THREE_GROUPS, "(SHARE_A ? rank : 0)) * BN", "0) * BN"),
    "a second half is stored in the first's rows": (
        HALVES,
        "part.row += (group * (HALVES - 1) + half) * 64;",
        "part.row += group * (HALVES - 1) * 64;",
    ),
    "partial sums of a second half replace the first's": (
        HALVES,
        "arguments, unit, group * HALVES + half);",
        "arguments, unit, group * HALVES);",
    ),
    "partial sums of one block of a cluster replace the other's": (
        THREE_GROUPS,
        "(index - whole) * CLUSTER + rank;",
        "(index - whole) * CLUSTER;",
    ),
}


@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("point", "splits", "clusters"),
    STAGED_POINTS,
    ids=lambda p: f"{p[0]}x{p[1]}x{p[2]}-{p[3].rows}x{p[3].cluster}-{p[4]}" if isinstance(p, tuple) else None,
)
def test_staged_products_are_right_in_any_schedule(
    point: tuple[object, ...], splits: int, clusters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sms = clusters * point[3].cluster  # type: ignore[attr-defined]
    monkeypatch.setattr(with_cuda, "num_sms", lambda device: sms)
    for _ in range(2):
        assert product(point, 0, splits) < 1  # type: ignore[arg-type]


@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.pooled(1, "long sums: scaled_matmul")
def test_staged_scales_change_no_bit() -> None:
    """Each program with tiles of 128 columns multiplies the same scales and adds in the same order."""
    for scale_order in (1, -1):
        a, b, scale_a, scale_b = factors(136, 136, 784, BLOCKS, E4M3, E4M3, 0)
        if scale_order == -1:  # stored column by column
            scale_a, scale_b = (s.t().contiguous().t() for s in (scale_a, scale_b))
        expected = with_cuda.forward_with(MIDDLE, a, b, scale_a, scale_b)
        for config in (THREE_GROUPS, HALVES):
            assert torch.equal(with_cuda.forward_with(config, a, b, scale_a, scale_b), expected)


@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", STAGED_FAULTS)
def test_a_planted_fault_of_staged_scales_is_seen(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, old, new = STAGED_FAULTS[fault]
    file = STAGED if old in STAGED.read_text() else KERNEL
    warp_emulator.emulate_edited(monkeypatch, tmp_path, file.name, old, new, EMULATOR)
    splits, clusters = (3, 5) if "partial" in fault else (1, 1)
    monkeypatch.setattr(with_cuda, "num_sms", lambda device: clusters * config.cluster)
    point = (2 * config.rows * config.cluster_rows - 56, 264, 1168, config, BLOCKS, E4M3, E4M3)
    errors = []
    for seed in range(4):
        try:
            errors.append(product(point, seed, splits))
        except EmulatorError:
            return
        if errors[-1] > 2:
            return
    pytest.fail(f"not seen: {errors}")
