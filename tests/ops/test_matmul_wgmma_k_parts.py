"""Products whose K is divided among the blocks of a cluster, in the emulator; planted faults are seen."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.paths import SRC
from helpers.warp_emulator import EmulatorError, copy_with_fault
from ops.test_matmul_tf32 import error, operands
from ops.test_matmul_wgmma import emulated, epilogue_errors, needs_compiler, product  # noqa: F401
from ops.test_repeated_products import addresses, call, kernel  # noqa: F401
from weft.backends import disassemble
from weft.backends.nvrtc import CudaSource
from weft.ops._common.products import wgmma, wgmma_fused
from weft.ops._common.products.wgmma_model import WITH_K_PARTS, Config, Epilogue

PRODUCTS = SRC / "weft/ops/_common/products"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# m, n, k, configuration, dtype, whether a and b are contiguous along K
POINTS = [
    (136, 136, 456, "128x128x7-2k2", BF16, True, True),  # eight steps: as many as two blocks have stages
    (136, 136, 1160, "128x128x7-2k2", BF16, True, False),  # stages are filled again
    (136, 136, 456, "128x128x7-4k4", FP16, False, False),
    (72, 264, 712, "128x256x4-3k3", BF16, True, False),  # shares of five and six times 16 columns
    (264, 200, 968, "128x192x5-2k2", BF16, False, True),
    (200, 392, 1160, "192x192x4-5k5", BF16, True, True),
    (330, 264, 712, "192x192x4-3k3", BF16, True, False),
    (72, 136, 100, "64x128x4-4k4", BF16, True, True),  # two steps for four blocks
    (1, 8, 8, "128x128x7-6k6", BF16, True, True),  # one step for six, whose shares differ
    (300, 264, 1032, "128x256x4-4k2", BF16, True, True),  # two blocks share b
    (200, 136, 2100, "64x128x4-6k3", BF16, True, False),
    (520, 136, 40, "128x128x7-8k4", BF16, False, True),
    # Rows of a, b or c are no multiple of 16 bytes.
    (130, 131, 197, "128x128x7-2k2", BF16, True, True),
    (77, 133, 709, "128x192x5-3k3", FP16, False, False),
]
EPILOGUE_POINTS = [
    (72, 264, 712, "128x256x4-2k2", BF16, Epilogue.BIAS),
    (200, 136, 456, "128x128x7-4k4", FP16, Epilogue.GELU),
    (136, 200, 712, "128x192x5-3k3", FP16, Epilogue.GELU_PRE),
    (300, 136, 456, "64x128x4-4k2", BF16, Epilogue.RESIDUAL),
    (139, 265, 197, "128x128x7-3k3", BF16, Epilogue.RESIDUAL),
    (139, 265, 197, "192x192x4-2k2", BF16, Epilogue.GELU_PRE),
]
Point = tuple[int, int, int, str]


def config_of(label: str) -> Config:
    """Return the configuration with this label. The kernel takes more of them than products are given."""
    numbers = re.fullmatch(r"(\d+)x(\d+)x(\d+)-(\d+)k(\d+)", label)
    assert numbers, label
    rows, columns, stages, cluster, k_parts = map(int, numbers.groups())
    return Config(rows=rows, columns=columns, stages=stages, cluster=cluster, k_parts=k_parts)


SPLIT: Point = (136, 136, 1160, "128x128x7-3k3")  # m, n, k, configuration
SHARED: Point = (300, 136, 968, "64x128x4-4k2")  # blocks of two tiles that share b
# name: file, the text that is replaced, by what, and a product that shows it
FAULTS: dict[str, tuple[str, str, str, Point]] = {
    "sums come while products read the stages": (
        "cluster_sum.cuh",
        "    wait(stages + READY_AT, 0);\n",
        "",
        SPLIT,
    ),
    "sums are added before they have come": (
        "cluster_sum.cuh",
        "    wait(stages + RECEIVED_AT + group * 8, 0);\n",
        "",
        SPLIT,
    ),
    "a block with few rows ends while others send it sums": (
        "cluster_sum.cuh",
        "    send(sums, own_part);\n",
        "    send(sums, own_part);\n    if (row + 8 >= arguments.rows) return;\n",
        SPLIT,
    ),
    "a group waits for another's sums": (
        "cluster_sum.cuh",
        "received = stages + RECEIVED_AT + group * 8;",
        "received = stages + RECEIVED_AT;",
        SPLIT,
    ),
    "parts are added in another order": (
        "cluster_sum.cuh",
        "load_four(four, slot(part) +",
        "load_four(four, slot(K_PARTS - 1 - part) +",
        SPLIT,
    ),
    "each block begins with its own part": (
        "cluster_sum.cuh",
        "load_four(four, slot(part) +",
        "load_four(four, slot((own_part + part) % K_PARTS) +",
        SPLIT,
    ),
    "a block's own share is not counted out": (
        "cluster_sum.cuh",
        "(K_PARTS - 1) * pairs",
        "K_PARTS * pairs",
        SPLIT,
    ),
    "too few blocks say that they are ready": (
        "cluster_sum.cuh",
        "stages + READY_AT, K_PARTS * CONSUMERS * 4",
        "stages + READY_AT, CONSUMERS * 4",
        SPLIT,
    ),
    "the columns of a share begin early": (
        "cluster_sum.cuh",
        "column += first_pair(own_part) * PAIR_COLUMNS;",
        "column += (PAIRS / K_PARTS) * own_part * PAIR_COLUMNS;",
        SPLIT,
    ),
    "words of the wrong row are stored": (
        "cluster_sum.cuh",
        "two[half][0] = is_odd ? other : own;",
        "two[half][0] = own;",
        SPLIT,
    ),
    "a part of K ends one step early": (
        "wgmma.cu",
        "(part_of_block() + 1) / K_PARTS);",
        "(part_of_block() + 1) / K_PARTS) - 1;",
        SPLIT,
    ),
    "an empty part is not zero": (
        "wgmma.cu",
        "sums[0][i] = 0.0f;",
        "sums[0][i] = 1.0f;",
        (136, 136, 100, "128x128x7-3k3"),
    ),
    "a stage that is filled again is not freed": (
        "wgmma.cu",
        "step - 1 + STAGES < k_steps",
        "step + STAGES < k_steps",
        (136, 136, 1800, "128x128x7-3k3"),
    ),
    "stages are freed in a block that may have ended": (
        "wgmma.cu",
        "threadIdx.x % 32 != 0 || (K_PARTS > 1 && !is_filled_again)",
        "threadIdx.x % 32 != 0",
        SHARED,
    ),
    "blocks with another part of K get the tile": (
        "wgmma.cu",
        "SHARING_BLOCKS << part_of_block() * SHARERS",
        "SHARING_BLOCKS",
        SHARED,
    ),
    "stages of another part of K are freed": (
        "wgmma.cu",
        "(stage, part_of_block() * SHARERS)",
        "(stage, 0)",
        SHARED,
    ),
    "sums go to another tile": ("cluster_sum.cuh", "part * SHARERS + sharer()", "part * SHARERS", SHARED),
}


def title(point: Any) -> str:
    return "x".join(map(str, point[:3])) + f"-{point[3]}"


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("point", POINTS, ids=title)
def test_products_are_right_in_any_schedule(point: tuple[Any, ...], emulated: None) -> None:  # noqa: F811
    for seed in range(3):  # each launch switches threads in another order
        assert product((*point[:3], config_of(point[3]), *point[4:]), seed) < 0.6


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("point", EPILOGUE_POINTS, ids=lambda p: f"{title(p)}-{p[5].name.lower()}")
def test_epilogues_are_right_in_any_schedule(point: tuple[Any, ...], emulated: None) -> None:  # noqa: F811
    *size, label, dtype, epilogue = point
    for seed in range(2):
        assert max(epilogue_errors((*size, config_of(label), dtype, epilogue, 1), seed)) < 0.6


@needs_compiler
@pytest.mark.parametrize("label", ["128x128x7-3k3", "128x256x4-4k2"])
def test_products_of_tf32(label: str, emulated: None) -> None:  # noqa: F811
    for seed, (size, storage) in enumerate((((136, 72, 260), "kk"), ((131, 204, 97), "mn"))):
        a, b = operands((*size, config_of(label), storage, 1), seed)
        assert error(wgmma.forward_with(config_of(label), a, b), a, b) < 0.6


@needs_compiler
def test_rows_are_scaled(emulated: None) -> None:  # noqa: F811
    a, b, factors = torch.randn(136, 328).to(BF16), torch.randn(328, 136).to(BF16), torch.randn(136)
    out = torch.full((136, 136), torch.nan, dtype=BF16)
    wgmma_fused.scaled_rows_with(config_of("128x128x7-2k2"), 1, a, b, factors, out)
    exact = a.double() @ b.double() * factors.double()[:, None]
    unit = torch.finfo(BF16).eps * (exact.abs() + 1e-3 * 328**0.5)
    assert float(((out.double() - exact).abs() / unit).nan_to_num(1e9).max()) < 0.6


def differing(m: int, n: int, k: int, config: Config, seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many elements have other bits than a product whose parts of K are added by a second kernel.

    With a number of SMs that no tile is whole in: there, too, parts are equal and added in the order of K.
    """
    monkeypatch.setattr(wgmma, "num_sms", lambda device: 1000)
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(m, k, generator=generator).to(BF16), torch.randn(n, k, generator=generator).to(BF16)
    usual = Config(columns=config.columns, stages=4, rows=config.rows)
    expected = wgmma.forward_with(usual, a, b.t(), config.k_parts)
    c = wgmma.forward_with(config, a, b.t())
    return int((c.view(torch.int16) != expected.view(torch.int16)).sum())


@needs_compiler
@pytest.mark.parametrize("point", [SPLIT, SHARED], ids=title)
def test_the_bits_are_those_of_parts_that_a_second_kernel_adds(
    point: Point,
    emulated: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parts are added in one order, so that each schedule gives these bits."""
    m, n, k, label = point
    for seed in range(4):
        assert differing(m, n, k, config_of(label), seed // 2, monkeypatch) == 0


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    fault: str,
    emulated: None,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy of kernel and library with one fault gives other bits or breaks the emulator's rules."""
    name, old, new, (m, n, k, label) = FAULTS[fault]
    copy_with_fault(tmp_path, PRODUCTS, name, old, new)
    real = wgmma.source

    def source(dtype: torch.dtype, config: Config, *arguments: Any, **options: Any) -> CudaSource:
        right = real(dtype, config, *arguments, **options)
        return replace(right, file=tmp_path / "wgmma.cu") if config.k_parts > 1 else right

    monkeypatch.setattr(wgmma, "source", source)
    wrong = 0
    for seed in range(40):
        try:
            wrong = differing(m, n, k, config_of(label), seed, monkeypatch)
        except EmulatorError:
            return
        if wrong:
            return
    pytest.fail("the fault is not seen")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "epilogue", [Epilogue.PLAIN, Epilogue.GELU_PRE, Epilogue.RESIDUAL], ids=lambda e: e.name
)
@pytest.mark.parametrize("config", WITH_K_PARTS, ids=lambda c: c.label)
def test_no_program_spills_registers(config: Config, epilogue: Epilogue) -> None:
    sass = disassemble.sass(wgmma.source(BF16, config, True, False, False, epilogue).compile("sm_90a"))
    assert "HGMMA" in sass
    assert not re.search(r"\b(STL|LDL)\b", sass)
    assert sass.count("MEMBAR.ALL.GPU") == 1  # of the cluster barrier at the beginning


def test_every_configuration_fits_in_shared_memory() -> None:
    assert all(c.smem_bytes * c.blocks_per_sm <= 227 << 10 for c in WITH_K_PARTS)


@pytest.mark.parametrize(
    ("size", "label"),
    [
        ((512, 3072, 9216), "128x192x5-2k2"),
        ((768, 3072, 8192), "192x192x4-2k2"),
        ((512, 768, 3072), "128x128x7-8k4"),
        ((768, 768, 16384), "128x192x5-4k4"),
    ],
)
def test_few_tiles_and_a_long_k_get_parts_in_a_cluster(
    size: tuple[int, int, int], label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wgmma, "num_sms", lambda device: 132)
    m, n, k = size
    a, b = torch.empty(m, k, dtype=BF16, device="meta"), torch.empty(k, n, dtype=BF16, device="meta")
    assert wgmma.choose(a, b) == (config_of(label), 1)
    assert wgmma.choose(a, b, may_split=False)[0].k_parts == 1  # the bits would depend on the parts


@pytest.mark.parametrize(
    "epilogue", [Epilogue.PLAIN, Epilogue.GELU_PRE, Epilogue.RESIDUAL], ids=lambda e: e.name
)
def test_a_repeated_call_has_its_own_addresses(
    kernel: Any,  # noqa: F811
    epilogue: Epilogue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wgmma, "choose", lambda *_, **__: (config_of("128x128x7-2k2"), 1))

    def stored(structure: Any) -> dict[str, int]:
        elements = {"c": structure.c_elements, "extra": structure.extra_elements or 0}
        return addresses(structure) | elements

    first, _ = call(epilogue)
    assert stored(kernel.called[0]) == first
    for _ in range(2):
        expected, _ = call(epilogue)
        assert stored(kernel.repeated[-1]) == expected != first
    assert len(kernel.called) == 1 and kernel.repeated[-1].extra_pitch == kernel.called[0].extra_pitch


@pytest.mark.gpu
@pytest.mark.parametrize("config", WITH_K_PARTS, ids=lambda c: c.label)
def test_products_are_right_on_a_gpu(config: Config) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    for m, n, k in ((1, 8, 8), (999, 1029, 515), (1000, 1032, 2056), (512, 768, 3072)):
        for a_is_k_major in (True, False):
            for b_is_k_major in (True, False):
                a = torch.randn((m, k) if a_is_k_major else (k, m), device="cuda").to(BF16)
                b = torch.randn((n, k) if b_is_k_major else (k, n), device="cuda").to(BF16)
                a, b = a if a_is_k_major else a.t(), b.t() if b_is_k_major else b
                exact = a.double() @ b.double()
                # The second term: the tensor cores add in float32 and cut its last bits off.
                unit = torch.finfo(BF16).eps * exact.abs() + 2**-20 * k
                c = wgmma.forward_with(config, a, b)
                largest = float(((c.double() - exact).abs() / unit).nan_to_num(1e9).max())
                assert largest < 0.6, (m, n, k, a_is_k_major, b_is_k_major, largest)
                assert torch.equal(c, wgmma.forward_with(config, a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("config", WITH_K_PARTS, ids=lambda c: c.label)
@pytest.mark.parametrize("epilogue", list(Epilogue)[1:5], ids=lambda e: e.name)
def test_epilogues_are_right_on_a_gpu(config: Config, epilogue: Epilogue) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    for size in ((1, 8, 8), (1000, 1032, 264), (139, 265, 2051)):
        # bfloat16's GELU may be off by 2^-11 of x, half a unit more where y is x.
        limit = 1.0 if epilogue in (Epilogue.GELU, Epilogue.GELU_PRE) else 0.6
        errors = epilogue_errors((*size, config, BF16, epilogue, 1), 0, "cuda")
        assert max(errors) < limit, (size, errors)
