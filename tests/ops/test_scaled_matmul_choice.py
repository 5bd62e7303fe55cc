"""The fp8 product's choice of a configuration, and the registers of each program that can be chosen."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from ops.test_scaled_matmul import FORMATS
from weft.backends import disassemble
from weft.backends.nvrtc import CudaSource
from weft.ops.scaled_matmul import with_cuda
from weft.ops.scaled_matmul.spec import BLOCKS
from weft.ops.scaled_matmul.with_cuda import MIDDLE, NARROW, TWO_SETS, WIDE

DEVICE = torch.device("cuda")
# Microseconds on an H200 at its power limit (results/nvidia-h200/fp8-candidates-2026-11-28.txt): the size,
# the kind of scales, the fastest of all programs with promotion, and those to choose from, with parts of K.
# The last three sizes were measured in a later session on the same card.
MEASURED = """
4096 7168 16384 blocks fastest=804.3 HALVES/1=805.3 THREE_GROUPS/1=856.7 TWO_SETS/3=860.5
    TWO_SETS/1=877.9 MIDDLE/3=894.3 THREE_GROUPS/3=898.9 MIDDLE/1=900.4
8192 8192 8192 blocks fastest=882.4 THREE_GROUPS/1=882.4 TWO_SETS/4=964.1 HALVES/1=969.9 TWO_SETS/1=994.9
    HALVES/3=995.9 MIDDLE/1=1048.8 MIDDLE/4=1053.1
4096 4096 4096 blocks fastest=120.5 HALVES/1=120.5 TWO_SETS/1=126.7 THREE_GROUPS/1=130.7 MIDDLE/1=133.1
    THREE_GROUPS/3=137.1
4096 2048 7168 blocks fastest=102.9 HALVES/1=102.9 TWO_SETS/1=109.3 MIDDLE/1=112.8 THREE_GROUPS/1=114.6
    THREE_GROUPS/3=128.7 NARROW/1=170.8
4096 24576 1536 blocks fastest=272.3 THREE_GROUPS/1=272.3 HALVES/1=297.3 HALVES/3=312.3 TWO_SETS/1=315.4
    TWO_SETS/3=323.8 MIDDLE/1=334.2 MIDDLE/3=351.3
512 7168 4096 blocks fastest=29.1 HALVES/1=29.1 TWO_SETS/1=30.5 MIDDLE/1=31.6 THREE_GROUPS/3=40.8
    THREE_GROUPS/1=41.0 TWO_SETS/4=44.7 MIDDLE/4=45.7 NARROW/1=49.5 NARROW/2=54.1
4096 7168 16384 tensor fastest=763.2 TWO_SETS/3=763.2 THREE_GROUPS/3=769.4 TWO_SETS/1=776.7 WIDE/4=784.9
    HALVES/1=786.3 THREE_GROUPS/1=818.1 WIDE/1=828.1 MIDDLE/1=858.7 MIDDLE/3=893.1
8192 8192 8192 tensor fastest=861.9 THREE_GROUPS/1=861.9 WIDE/1=876.6 TWO_SETS/1=887.3 TWO_SETS/4=902.2
    HALVES/1=909.7 HALVES/3=952.4 MIDDLE/1=978.9 MIDDLE/4=1012.4
4096 7168 16384 rows fastest=753.8 TWO_SETS/3=763.7 THREE_GROUPS/3=770.1 HALVES/1=770.6 TWO_SETS/1=770.8
    WIDE/4=784.9 THREE_GROUPS/1=809.1 WIDE/1=832.4 MIDDLE/1=857.1 MIDDLE/3=871.8
8192 8192 8192 rows fastest=831.3 THREE_GROUPS/1=831.3 WIDE/1=883.3 TWO_SETS/4=889.3 TWO_SETS/1=894.3
    HALVES/1=904.6 HALVES/3=946.8 MIDDLE/1=975.7 MIDDLE/4=1012.0
4096 4096 4096 rows fastest=116.1 HALVES/1=116.1 TWO_SETS/1=120.1
4096 4096 7168 rows fastest=198.9 HALVES/1=198.9 TWO_SETS/1=199.7
1024 8192 8192 rows fastest=111.8 HALVES/1=111.8 TWO_SETS/1=114.6
"""


def points() -> list[tuple[tuple[int, int, int], bool, float, dict[tuple[with_cuda.Config, int], float]]]:
    """Return for each size: the size, whether scales are of blocks, the fastest time, and times by choice."""
    parsed = []
    for record in re.split(r"\n(?=\d)", MEASURED.strip()):
        m, n, k, mode, fastest, *times = record.split()
        by_choice = {}
        for time in times:
            name, splits, us = re.split("[/=]", time)
            by_choice[getattr(with_cuda, name), int(splits)] = float(us)
        parsed.append(((int(m), int(n), int(k)), mode == BLOCKS, float(fastest.split("=")[1]), by_choice))
    return parsed


@pytest.fixture(autouse=True)
def sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_cuda, "num_sms", lambda device: 132)


@pytest.mark.parametrize(("size", "by_blocks", "fastest", "measured"), points())
def test_the_choice_takes_at_most_3_percent_longer_than_the_fastest_program(
    size: tuple[int, int, int], by_blocks: bool, fastest: float, measured: dict[Any, float]
) -> None:
    assert measured[with_cuda.choose(*size, DEVICE, by_blocks)] <= 1.03 * fastest


@pytest.mark.parametrize(("size", "by_blocks", "fastest", "measured"), points())
def test_the_model_gives_the_measured_times(
    size: tuple[int, int, int], by_blocks: bool, fastest: float, measured: dict[Any, float]
) -> None:
    """The model may be 13 % too high at 512 rows: with one wave or two the clock is higher than in it."""
    most = 1.13 if size[0] == 512 else 1.03
    for (config, splits), us in measured.items():
        estimated = with_cuda.estimated_us(*size, config, splits, 132, by_blocks)
        assert 0.945 < estimated / us < most, (config, splits, estimated, us)


@pytest.mark.parametrize(
    ("m", "n", "k", "by_blocks", "config", "splits"),
    [
        (16, 4096, 14336, False, WIDE, 6),  # 132 units
        (16, 4096, 14336, True, MIDDLE, 4),
        (256, 256, 256, False, NARROW, 1),
        (512, 4096, 4096, True, TWO_SETS, 1),
        (128, 28672, 256, True, MIDDLE, 1),
    ],
)
def test_few_tiles_are_narrow_or_divided(
    m: int, n: int, k: int, by_blocks: bool, config: with_cuda.Config, splits: int
) -> None:
    assert with_cuda.choose(m, n, k, DEVICE, by_blocks) == (config, splits)


@pytest.mark.parametrize("by_blocks", [False, True])
def test_up_to_128_rows_get_tiles_and_clusters_of_128_rows(by_blocks: bool) -> None:
    for m in (1, 16, 64, 100, 128):
        for n in (128, 1536, 4096, 7168, 28672, 128256):
            for k in (128, 256, 512, 2048, 14336):
                config, _ = with_cuda.choose(m, n, k, DEVICE, by_blocks)
                assert config.rows * config.cluster_rows == 128, (m, n, k, config)


def test_every_configuration_fits_in_shared_memory_and_can_be_chosen() -> None:
    assert all(config.smem_bytes <= 227 << 10 for config in with_cuda.CANDIDATES)
    assert {config for costs in with_cuda.COSTS.values() for config in costs} == set(with_cuda.CANDIDATES)


PROGRAMS = [
    with_cuda.source(tuple(with_cuda.FORMATS[x] for x in formats), out_dtype, config, by_blocks, is_split)
    for by_blocks, costs in with_cuda.COSTS.items()
    for config in costs
    for formats in FORMATS
    for out_dtype in (torch.bfloat16, torch.float16)
    for is_split in (False, True)
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("source", PROGRAMS, ids=lambda s: s.label)
def test_no_program_spills_registers_or_waits_for_more_than_its_block_has(source: CudaSource) -> None:
    sass = disassemble.sass(source.compile("sm_90a"))
    assert "QGMMA" in sass
    assert not re.search(r"\b(STL|LDL)\b", sass)
    consumers, producers = (
        int(re.findall(rf"USETMAXREG\.{kind}\.CTAPOOL (?:UP\d, )?(0x\w+)", sass)[0], 16)
        for kind in ("TRY_ALLOC", "DEALLOC")
    )
    groups = int(dict(source.defines)["GROUPS"])
    at_launch = 65536 // (1 + groups) // 128 // 8 * 8  # of a thread: registers come in eights
    assert producers + groups * consumers <= (1 + groups) * at_launch


def test_each_configuration_has_a_compiled_program_for_each_kind_of_scales() -> None:
    """Ahead of time are compiled: those for e4m3 and bfloat16, whole and with parts of K."""
    labels = {source.label for source in with_cuda.IMPLEMENTATION.aot_kernels}
    assert len(labels) == len(with_cuda.IMPLEMENTATION.aot_kernels)
    assert {s.label for s in PROGRAMS if s.label.startswith("e4m3-e4m3-bfloat16-")} <= labels
    assert labels <= {source.label for source in PROGRAMS}
