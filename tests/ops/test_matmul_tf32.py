"""Products of tf32 in the emulator, with transposed operands; planted faults show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.paths import SRC
from helpers.warp_emulator import EmulatorError, copy_with_fault
from ops.test_matmul_wgmma import emulated, needs_compiler, toy_map  # noqa: F401
from weft.backends.nvrtc import CudaSource
from weft.ops._common.hopper import tensor_map
from weft.ops._common.products import transpose, wgmma
from weft.ops.matmul import with_cuda

PRODUCTS = SRC / "weft/ops/_common/products"
PAIR, WIDE, ODD, MIDDLE, NARROW = wgmma.CANDIDATES[:5]
PINGPONG = next(c for c in wgmma.CANDIDATES if c.pingpong and c.columns == 192)
FP32 = torch.float32
GUARD = 64  # elements around a buffer
Point = tuple[int, int, int, wgmma.Config, str, int]
# m, n, k, configuration, storage of a and b, parts of K. Storage: k is contiguous along K, m and n across it;
# a capital letter is a part of a wider matrix, from its second column on. Operands across K are transposed:
# their rows need not be a multiple of 16 bytes.
POINTS: list[Point] = [
    (136, 136, 136, WIDE, "kk", 1),
    (136, 72, 132, NARROW, "kn", 2),
    (260, 264, 100, PAIR, "mn", 1),
    (131, 204, 97, ODD, "mn", 1),
    (200, 76, 516, MIDDLE, "mk", 3),
    (67, 12, 97, NARROW, "mn", 3),  # 804 elements of c: no multiple of 8
    (130, 68, 37, NARROW, "MN", 1),
    (9, 12, 3, NARROW, "mn", 1),
    (392, 392, 164, PINGPONG, "kk", 1),
    (387, 392, 133, PINGPONG, "mN", 1),
]
# name: file, the text that is replaced, by what, and a point that shows it
FAULTS: dict[str, tuple[str, str, str, Point]] = {
    "two blocks of columns are swapped": (
        "output.cuh",
        "+ second * 4) ^ (box_row & 7)",
        "+ time * 4) ^ (box_row & 7)",
        POINTS[0],
    ),
    "a sum of parts of K is stored beyond the columns": (
        "wgmma.cu",
        "if (of_row >= arguments.rows || column >= arguments.columns) continue;",
        "if (of_row >= arguments.rows) continue;",
        POINTS[5],
    ),
    "no barrier in the transposition": ("transpose.cu", "  __syncthreads();\n", "", POINTS[1]),
    "the transposition writes beyond its rows": (
        "transpose.cu",
        " || column >= arguments.y_pitch",
        "",
        POINTS[4],
    ),
    "the transposition reads beyond its columns": (
        "transpose.cu",
        "if (column + j < arguments.columns) vectors[i].at[j] = from[j];",
        "vectors[i].at[j] = from[j + 1];",
        POINTS[3],
    ),
}


def operands(point: Point, seed: int = 0, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return random a (M, K) and b (K, N) in the storage of a point."""
    m, n, k, _, storage, _ = point
    generator = torch.Generator(device).manual_seed(seed)

    def stored(rows: int, columns: int, letter: str, by_rows: bool) -> torch.Tensor:
        outer, inner = (rows, columns) if by_rows else (columns, rows)
        extra = 3 if letter.isupper() else 0
        x = torch.randn(outer, inner + extra, generator=generator, device=device)
        x = x[:, 1 : 1 + inner] if extra else x
        return x if by_rows else x.t()

    a_letter, b_letter = storage
    return stored(m, k, a_letter, a_letter in "kK"), stored(k, n, b_letter, b_letter in "nN")


def factors(x: torch.Tensor) -> torch.Tensor:
    """Return what the tensor cores multiply, in float64: float32 without the last 13 bits of its mantissa."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(FP32).double()


def error(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest error in units of one rounding of the exact product, and of float32 sums of K terms.

    On a GPU the tensor cores cut off the last bits of their sums: up to 1.8 times 2^-20 for each term with
    K = 8192 on an H200.
    """
    short = 2.0**-18 if a.is_cuda else 2.0**-20
    a, b = factors(a), factors(b)
    exact, terms = a @ b, a.abs() @ b.abs()
    unit = torch.finfo(FP32).eps * exact.abs() + short * terms
    return float(((c.double() - exact).abs() / unit).nan_to_num(1e9).max())


def product_error(point: Point, seed: int = 0, device: str = "cpu") -> float:
    a, b = operands(point, seed, device)
    assert wgmma.supports(a, b, "tf32")
    return error(wgmma.forward_with(point[3], a, b, point[5]), a, b)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Put guard bands around each buffer that a product allocates; return a check that they are intact."""
    buffers: list[tuple[torch.Tensor, int]] = []
    real_empty = torch.empty

    def empty(*size: int, dtype: torch.dtype = FP32, device: Any = "cpu") -> torch.Tensor:
        count = torch.Size(size).numel()
        buffer = real_empty(count + 2 * GUARD, dtype=dtype, device=device).fill_(7.0)
        buffers.append((buffer, count))
        return buffer[GUARD : GUARD + count].view(size)

    def new_empty(x: torch.Tensor, *size: int) -> torch.Tensor:
        return empty(*size, dtype=x.dtype, device=x.device)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    return lambda: all(bool((b[:GUARD] == 7).all() and (b[GUARD + n :] == 7).all()) for b, n in buffers)


def label(point: Point) -> str:
    return f"{point[0]}x{point[1]}x{point[2]}-{point[3].columns}-{point[4]}-{point[5]}"


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("point", POINTS, ids=label)
def test_products_are_right_in_any_schedule(
    point: Point,
    emulated: None,  # noqa: F811
    guarded: Callable[[], bool],
) -> None:
    for seed in range(2):  # each launch switches threads in another order
        assert product_error(point, seed) < 0.6
    assert guarded()


def plant(name: str, old: str, new: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products run from a copy of kernels and library with one fault."""
    copy_with_fault(folder, PRODUCTS, name, old, new)
    for module in (wgmma, transpose):
        real: Callable[..., CudaSource] = module.source

        def source(*arguments: Any, real: Callable[..., CudaSource] = real, **options: Any) -> CudaSource:
            original = real(*arguments, **options)
            return replace(original, file=folder / original.file.name)

        monkeypatch.setattr(module, "source", source)


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    fault: str,
    emulated: None,  # noqa: F811
    guarded: Callable[[], bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy of kernels and library with one fault breaks the product, a guard or a rule of the emulator."""
    name, old, new, point = FAULTS[fault]
    plant(name, old, new, tmp_path, monkeypatch)
    for seed in range(6):
        try:
            if product_error(point, seed) > 2 or not guarded():
                return
        except EmulatorError:
            return
    pytest.fail("the fault does not show")


@needs_compiler
def test_a_box_that_begins_between_multiples_of_16_bytes_is_refused(
    emulated: None,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on an H200, where the instruction is illegal."""
    begin = "load<BLOCKS>(to, map, step * BK{}, first, full);"
    plant("wgmma.cu", begin.format(""), begin.format(" + 1"), tmp_path, monkeypatch)
    with pytest.raises(EmulatorError, match="a box begins at a multiple of 16 bytes"):
        product_error(POINTS[0])


@needs_compiler
def test_matmul_takes_them_where_the_model_prefers_it(
    emulated: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(with_cuda, "has_wgmma", lambda device: True)
    monkeypatch.setattr(with_cuda, "forward_with", None)  # mma.sync is not called
    a, b = operands((260, 260, 1024, NARROW, "kk", 1))
    assert error(with_cuda.forward(a, b, precision="tf32"), a, b) < 0.6


def test_the_program_that_a_product_names_is_the_one_that_it_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[str] = []

    def load(source: CudaSource, kernel: str) -> Callable[..., None]:
        launched.append(source.label)
        return lambda *arguments, **options: None

    monkeypatch.setattr(CudaSource, "__getitem__", load)
    monkeypatch.setattr(tensor_map, "_encode", toy_map)
    monkeypatch.setattr(wgmma, "num_sms", lambda device: 132)
    for point in POINTS:
        for dtype in (FP32, torch.bfloat16):
            a, b = (x.to(dtype) for x in operands(point))
            wgmma.forward(a, b)
            labels = [label for label in launched if not label.startswith(("transpose", "align_rows"))]
            assert set(labels) == {wgmma.chosen_source(a, b).label}
            launched.clear()


def test_an_operand_across_k_may_have_any_rows_and_others_may_not() -> None:
    a, b = operands((131, 204, 97, ODD, "MN", 1))
    assert wgmma.supports(a, b, "tf32")
    assert not wgmma.supports(a[:, ::2], b[::2].t().contiguous().t(), "tf32")  # 49 of K: 196 bytes
    assert not wgmma.supports(a, b[:, :203], "tf32")  # rows of c
    assert not wgmma.supports(a[::2], b, "tf32")  # no dimension is contiguous


def test_tf32_stays_with_mma_sync_where_a_transposition_costs_more_than_it_gains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wgmma, "num_sms", lambda device: 132)
    for size, storage, expected in (
        (8192, "kn", True),
        (8192, "mn", True),
        (2048, "kn", True),
        (256, "mn", False),
    ):
        by_k = storage[0] == "k", storage[1] == "k"
        a, b = (torch.empty(size, size, dtype=FP32, device="meta") for _ in range(2))
        assert wgmma.is_faster_than_mma(a if by_k[0] else a.t(), b.t() if by_k[1] else b) == expected, size


@pytest.mark.gpu
@pytest.mark.parametrize("config", wgmma.CHOSEN_FROM, ids=lambda c: c.label)
def test_products_are_right_on_a_gpu(config: wgmma.Config) -> None:
    """The grid of the emulator's test, and sizes with many tiles and steps."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    aligned = ((1000, 1032, 2056), (4096, 776, 512), (520, 4100, 72))
    any_rows = ((1001, 1032, 2057), (520, 4100, 70))  # of transposed operands
    points = [(*size, storage) for size in aligned for storage in ("kk", "kn", "mn", "mk")]
    points += [(*size, storage) for size in any_rows for storage in ("mn", "MN")]
    points += [(*point[:3], point[4]) for point in POINTS]
    for m, n, k, storage in points:
        for splits in (1, 3) if config.columns == 256 else (1,):
            point = (m, n, k, config, storage, splits)
            a, b = operands(point, device="cuda")
            c = wgmma.forward_with(config, a, b, splits)
            assert error(c, a, b) < 0.6, point
            assert torch.equal(c, wgmma.forward_with(config, a, b, splits)), point
