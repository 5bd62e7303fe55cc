"""The fp8 product's staged candidates: scales of blocks that come through the ring, and other tiles."""

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
    MIDDLE,
    WAIT,
    assert_registers_suffice,
    assert_right_on_a_gpu,
    emulated,
    factors,
    needs_compiler,
    product,
)
from weft.backends.nvrtc import CudaSource
from weft.ops.scaled_matmul import with_cuda
from weft.ops.scaled_matmul.spec import BLOCKS, ROWS, TENSOR

STAGED = KERNEL.with_name("scaled_matmul_staged.cuh")
(
    PAIRS,
    FOURS,
    HALVES,
    PINGPONG,
    HALVES_PAIR,
    HALVES_SHARE_A,
    PINGPONG_SHARE_A,
    THREE,
    THREE_SHARE_A,
    *ODD_PINGPONG,
) = with_cuda.STAGED[1:]
# As POINTS, and the number of parts of K and of clusters that run at once.
STAGED_POINTS = [
    ((264, 392, 528, with_cuda.STAGED[0], BLOCKS, E4M3, E4M3), 1, 2),
    ((300, 264, 784, PAIRS, BLOCKS, E4M3, E5M2), 1, 1),
    ((264, 264, 656, FOURS, BLOCKS, E4M3, E4M3), 1, 1),
    ((520, 392, 144, FOURS, ROWS, E4M3, E4M3), 1, 1),
    ((520, 136, 656, HALVES, BLOCKS, E4M3, E4M3), 1, 1),
    ((264, 264, 784, HALVES, BLOCKS, E4M3, E4M3), 3, 5),
    ((200, 136, 400, HALVES, TENSOR, E5M2, E4M3), 1, 2),
    ((520, 136, 400, PINGPONG, BLOCKS, E4M3, E4M3), 1, 1),
    ((520, 264, 272, HALVES_PAIR, BLOCKS, E4M3, E4M3), 1, 1),
    ((264, 392, 528, HALVES_SHARE_A, BLOCKS, E4M3, E4M3), 2, 3),
    ((264, 392, 528, HALVES_SHARE_A, ROWS, E4M3, E4M3), 3, 3),
    ((72, 264, 656, PINGPONG_SHARE_A, BLOCKS, E4M3, E4M3), 1, 2),
    ((200, 264, 272, THREE, BLOCKS, E4M3, E4M3), 1, 2),
    ((200, 264, 656, THREE_SHARE_A, BLOCKS, E4M3, E4M3), 2, 3),
    ((392, 136, 272, THREE_SHARE_A, ROWS, E4M3, E4M3), 1, 1),
    ((264, 392, 272, ODD_PINGPONG[0], ROWS, E4M3, E4M3), 1, 1),
    ((264, 392, 656, ODD_PINGPONG[1], TENSOR, E4M3, E4M3), 2, 3),
]
STAGED_RELEASE = "    if (half == HALVES - 1) pipeline.release_by_lanes<CLUSTER>(part.stage);\n"
# name: the configuration, and as above
STAGED_FAULTS: dict[str, tuple[with_cuda.Config, str, str]] = {
    "scales are written into a stage in use": (
        PAIRS,
        "        wait(pipeline.empty(ring.stage), ring.parity ^ 1);\n        if (at == own_step)",
        "        if (at == own_step)",
    ),
    "a stage is full without its scales": (PAIRS, "CLUSTER, 1 + SCALE_WARPS)", "CLUSTER, 1)"),
    "four steps have the scales of the first": (HALVES, "first + own_step, unit.end", "first, unit.end"),
    "a half has the other's scales": (HALVES, "(half * 64 + row * 8) * 4", "(row * 8) * 4"),
    "a second warp writes the rows of the first": (
        HALVES,
        "const int own_row = part * SCALE_ROWS +",
        "const int own_row =",
    ),
    "a half multiplies the other's rows": (HALVES, "bytes + half * 64 * BK", "bytes"),
    "a stage is released before the second half": (
        HALVES,
        STAGED_RELEASE,
        STAGED_RELEASE.replace("HALVES - 1", "0"),
    ),
    "staged sums are added before they are complete": (
        HALVES,
        WAIT + STAGED_RELEASE,
        WAIT.replace("PENDING", "PENDING + 1") + STAGED_RELEASE,
    ),
    "staged: no fence before the first product": (
        HALVES,
        "2 * GROUP_THREADS);\n    wgmma_fence();\n",
        "2 * GROUP_THREADS);\n",
    ),
    "one lane frees the stage in its own block alone": (
        PAIRS,
        STAGED_RELEASE,
        STAGED_RELEASE.replace("<CLUSTER>", "<1>"),
    ),
    "no group gives the first turn": (
        PINGPONG,
        "    if (PINGPONG && group == 1) named_barrier_arrive(TURN_BARRIER, 2 * GROUP_THREADS);",
        "   ",
    ),
    "a turn is given while all products run": (
        PINGPONG,
        "      named_barrier_arrive(TURN_BARRIER + 1 - group,",
        "      named_barrier_arrive(TURN_BARRIER + group,",
    ),
    "a block loads the other's share of a": (
        HALVES_SHARE_A,
        "unit.row + a_share * SHARE_ROWS",
        "unit.row",
    ),
    "a row of blocks gets the other's a": (FOURS, "full, same_row << share", "full, same_row"),
    "a column of blocks gets the other's b": (FOURS, "SAME_COLUMN << a_share * CLUSTER_ROWS", "SAME_COLUMN"),
    "a second half is stored in the first's rows": (
        HALVES,
        "part.row += (group * (HALVES - 1) + half) * 64;",
        "part.row += group * (HALVES - 1) * 64;",
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
    """Each program with blocks of 128 columns multiplies the same scales and adds in the same order."""
    for scale_order in (1, -1):
        a, b, scale_a, scale_b = factors(136, 136, 784, BLOCKS, E4M3, E4M3, 0)
        if scale_order == -1:  # stored column by column
            scale_a, scale_b = (s.t().contiguous().t() for s in (scale_a, scale_b))
        expected = with_cuda.forward_with(MIDDLE, a, b, scale_a, scale_b)
        for config in (with_cuda.STAGED[0], HALVES):
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
    monkeypatch.setattr(with_cuda, "num_sms", lambda device: config.cluster)
    point = (2 * config.rows * config.cluster_rows - 56, 264, 1168, config, BLOCKS, E4M3, E4M3)
    errors = []
    for seed in range(4):
        try:
            errors.append(product(point, seed))
        except EmulatorError:
            return
        if errors[-1] > 2:
            return
    pytest.fail(f"not seen: {errors}")


STAGED_SOURCES = [
    with_cuda.source(("e4m3", "e4m3"), torch.bfloat16, config, by_blocks, is_split)
    for config in with_cuda.STAGED
    for by_blocks, is_split in ((False, False), (True, False), (True, True))
    if config.takes_blocks or not by_blocks
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("source", STAGED_SOURCES, ids=lambda s: s.label)
def test_no_program_spills_registers_or_waits_for_more_than_its_block_has(source: CudaSource) -> None:
    assert_registers_suffice(source)


@pytest.mark.gpu
@pytest.mark.parametrize("config", with_cuda.STAGED, ids=lambda c: f"{c.rows}x{c.columns}x{c.cluster}")
@pytest.mark.parametrize("mode", [TENSOR, ROWS, BLOCKS])
def test_staged_products_are_right_on_a_gpu(mode: str, config: with_cuda.Config) -> None:
    assert_right_on_a_gpu(mode, config, [(E4M3, E4M3)])
