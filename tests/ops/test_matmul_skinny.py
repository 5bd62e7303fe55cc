"""Products of few rows in the emulator: sizes, orders of operands, edges; the same bits in every batch."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import warp_emulator
from helpers.paths import SRC, TESTS
from weft.backends import disassemble
from weft.backends.nvrtc import CudaSource
from weft.ops._common.products import skinny

EMULATOR = TESTS / "helpers" / "mma_emulator.hpp"
BF16, FP16 = torch.bfloat16, torch.float16
# m, n, k, dtype, and how x and w are stored: k (contiguous along K), n (across it), or odd (no 16 bytes).
POINTS = [
    (1, 256, 512, BF16, "k", "k"),
    (16, 520, 712, BF16, "k", "k"),
    (8, 264, 200, BF16, "k", "n"),
    (13, 136, 1000, FP16, "k", "n"),
    (33, 392, 328, BF16, "k", "k"),
    (64, 136, 456, FP16, "k", "n"),
    (17, 130, 264, BF16, "k", "k"),
    (5, 77, 131, BF16, "odd", "odd"),
    (1, 1, 1, FP16, "odd", "odd"),
    (40, 64, 72, BF16, "m", "k"),
    (9, 24, 328, BF16, "m", "n"),
]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    warp_emulator.emulate(monkeypatch, tmp_path_factory.getbasetemp(), EMULATOR)
    monkeypatch.setattr(skinny, "num_sms", lambda device: 3)


def stored(
    rows: int, columns: int, dtype: torch.dtype, order: str, generator: torch.Generator
) -> torch.Tensor:
    """Return a random matrix that is contiguous along its columns (``c``), its rows (``r``), or neither."""
    if order == "odd":  # rows begin between multiples of 16 bytes
        wide = torch.randn(rows, columns + 3, generator=generator).to(dtype)
        return wide[:, 1 : columns + 1]
    shape = (rows, columns) if order == "c" else (columns, rows)
    x = torch.randn(*shape, generator=generator).to(dtype)
    return x if order == "c" else x.t()


def operands(
    point: tuple[int, int, int, torch.dtype, str, str], seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    m, n, k, dtype, x_order, w_order = point
    generator = torch.Generator().manual_seed(seed)
    x = stored(m, k, dtype, {"k": "c", "m": "r"}.get(x_order, x_order), generator)
    return x, stored(k, n, dtype, {"k": "r", "n": "c"}.get(w_order, w_order), generator)


def error(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    """Return the largest error in units of what one rounding to the dtype and float32 sums cost."""
    exact, terms = x.double() @ w.double(), x.double().abs() @ w.double().abs()
    if bias is not None:
        exact, terms = exact + bias.double(), terms + bias.double().abs()
    unit = torch.finfo(y.dtype).eps * exact.abs() + 2**-22 * terms
    return float(((y.double() - exact).abs() / unit).nan_to_num(1e9).max())


needs_compiler = pytest.mark.skipif(
    warp_emulator.COMPILER is None, reason="no g++ to compile the kernel with"
)


@needs_compiler
@pytest.mark.sampled(2)
@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p[0]}x{p[1]}x{p[2]}-{p[4]}{p[5]}")
def test_products_are_right(point: tuple[int, int, int, torch.dtype, str, str], emulated: None) -> None:
    """Stretches begin and end within a group of columns, and cross from one to the next."""
    x, w = operands(point, 0)
    assert skinny.supports(x, w)
    assert error(skinny.forward(x, w), x, w) < 0.6
    bias = torch.randn(point[1], generator=torch.Generator().manual_seed(1)).to(point[3])
    assert error(skinny.forward(x, w, bias), x, w, bias) < 0.6


@needs_compiler
@pytest.mark.pooled(1, "emulated: matmul_skinny")
def test_random_sizes(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(7)
    for seed in range(12):
        sms = chance.choice((1, 2, 5))
        monkeypatch.setattr(skinny, "num_sms", lambda device, sms=sms: sms)
        m, n, k = chance.randint(1, 16), chance.randint(1, 420), chance.randint(1, 700)
        point = (m, n, k, BF16, "k", "k") if k % 8 == 0 else (m, n, k, BF16, "odd", "odd")
        x, w = operands(point, seed)
        assert error(skinny.forward(x, w), x, w) < 0.6, (m, n, k)


@needs_compiler
@pytest.mark.pooled(1, "emulated: matmul_skinny")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("order", ["k", "n"])
def test_the_bits_of_a_row_do_not_depend_on_the_batch(order: str, emulated: None) -> None:
    """All three programs, whole and shared groups of columns, and rows that other rows displace."""
    x, w = operands((64, 264, 712, BF16, "k", order), 3)
    together = skinny.forward(x, w)
    for rows in (slice(0, 1), slice(5, 6), slice(0, 8), slice(3, 16), slice(20, 52), slice(63, 64)):
        assert torch.equal(skinny.forward(x[rows], w), together[rows])
    assert torch.equal(skinny.forward(x, w), together)


@needs_compiler
@pytest.mark.pooled(1, "emulated: matmul_skinny")
def test_what_is_not_a_number_stays_in_its_row(emulated: None) -> None:
    x, w = operands((12, 136, 200, BF16, "k", "k"), 4)
    clean = skinny.forward(x, w)
    x[3, 7] = float("nan")
    y = skinny.forward(x, w)
    assert y[3].isnan().all()
    y[3] = clean[3]
    assert torch.equal(y, clean)


# name: file, the text that is replaced, and by what
FAULTS = {
    "a stage is used before it has come": (
        "skinny.cu",
        "copies_wait<STAGES - 2>()",
        "copies_wait<STAGES - 1>()",
    ),
    "no group for an empty copy": (
        "skinny.cu",
        "    copies_commit();  // also",
        "    if (fetched < end) copies_commit();  // also",
    ),
    "a stretch begins one tile late": (
        "skinny.cu",
        "fetch_step = first % steps",
        "fetch_step = first % steps + 1",
    ),
    "two partial sums share a slot": ("skinny.cu", "{ return block + group; }", "{ return block; }"),
    "the last partial sum is left out": ("skinny.cu", "block <= to", "block < to"),
    "elements beyond K are not zeros": ("operand_tile.cuh", "i < k_left ? valid : 0", "valid"),
}


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    fault: str, emulated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the kernel with one fault gives a wrong product."""
    name, old, new = FAULTS[fault]
    for file in (SRC / "weft/ops/_common/products").glob("*.cu*"):
        text = file.read_text()
        if file.name == name:
            assert text.count(old) == 1, "the text of the fault is not in the file"
            text = text.replace(old, new)
        (tmp_path / file.name).write_text(text)
    real = skinny.source

    def source(*arguments: object) -> CudaSource:
        return replace(real(*arguments), file=tmp_path / "skinny.cu")

    monkeypatch.setattr(skinny, "source", source)
    of_edge = "beyond K" in fault
    point = (16, 304, 680, BF16, "k", "n") if of_edge else (16, 520, 712, BF16, "k", "k")
    x, w = operands(point, 0)
    if of_edge:  # what lies behind the weight is read
        behind = torch.full((760, 304), float("nan"), dtype=BF16)
        behind[:680] = w
        w = behind[:680]
    assert error(skinny.forward(x, w), x, w) > 2


def test_blocks_depend_on_the_weight_alone_and_fill_the_machine() -> None:
    assert skinny.num_blocks(14336, 4096, 132) == 264
    assert skinny.num_blocks(1024, 4096, 132) == 8 * 32  # at most 32 blocks share a group of columns
    assert skinny.num_blocks(1, 1, 132) == 1
    assert skinny.num_blocks(128, 10**6, 132) == 32


def test_two_blocks_fit_on_an_sm() -> None:
    """In the 228 KiB of sm_90, 1 KiB of which each block loses; one in the 99 KiB of sm_86."""
    assert all(2 * (config.smem_bytes + 1024) <= 228 << 10 for config in skinny.CONFIGS)
    assert all(config.smem_bytes <= 99 << 10 for config in skinny.CONFIGS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_program_spills_registers(arch: str) -> None:
    for source in skinny.aot_kernels():
        if "bfloat16" in source.label:
            sass = disassemble.sass(source.compile(arch))
            assert "HMMA.16816.F32.BF16" in sass, source.label
            assert not re.search(r"\b(STL|LDL)\b", sass), source.label


def test_rows_and_dtypes_that_are_not_supported() -> None:
    x, w = torch.zeros(65, 64, dtype=BF16), torch.zeros(64, 72, dtype=BF16)
    assert skinny.supports(x[:64], w) and not skinny.supports(x, w)
    assert not skinny.supports(x[:8].float(), w.float()) and not skinny.supports(x[:0], w)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", skinny.DTYPES)
def test_products_are_right_on_a_gpu(dtype: torch.dtype) -> None:
    for n, k, order in ((14336, 4096, "k"), (4096, 14336, "k"), (1000, 1032, "n"), (77, 131, "odd")):
        for m in (1, 7, 16, 17, 64):
            x = torch.randn(m, k, device="cuda").to(dtype)
            w = torch.randn(k, n + 3, device="cuda").to(dtype)[:, 1 : n + 1]
            w = w if order == "odd" else w.contiguous() if order == "n" else w.t().contiguous().t()
            exact = x.double() @ w.double()
            # The second term: the tensor cores add in float32 and cut its last bits off.
            unit = torch.finfo(dtype).eps * exact.abs() + 2**-20 * k
            y = skinny.forward(x, w)
            assert float(((y.double() - exact).abs() / unit).nan_to_num(1e9).max()) < 0.6, (m, n, k)
            assert torch.equal(y, skinny.forward(x, w))
            assert torch.equal(y[-1:], skinny.forward(x[-1:], w))
