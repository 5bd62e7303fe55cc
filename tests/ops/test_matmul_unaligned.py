"""Products of tf32, and of rows that are no multiple of 16 bytes, in the emulator; planted faults show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.paths import SRC
from helpers.warp_emulator import EmulatorError
from ops.test_matmul_wgmma import emulated, epilogue_errors, needs_compiler, toy_map  # noqa: F401
from weft.backends.nvrtc import CudaSource
from weft.ops._common.hopper import tensor_map
from weft.ops._common.products import transpose, wgmma
from weft.ops.matmul import with_cuda

PRODUCTS = SRC / "weft/ops/_common/products"
LIBRARY = SRC / "weft/ops/_common/hopper"
WIDE, ODD, MIDDLE, NARROW = wgmma.COOPERATIVE
PAIR = next(c for c in wgmma.CANDIDATES if c.cluster == 2)
PINGPONG = next(c for c in wgmma.CANDIDATES if c.pingpong and c.columns == 192)
BIAS, GELU, GELU_PRE, RESIDUAL = list(wgmma.Epilogue)[1:5]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
IS_SHIPPED = wgmma.TAKES_UNALIGNED
SWITCHED_OFF = "products with unaligned rows are switched off: an illegal instruction on an H200 (wgmma.py)"
GUARD = 64  # elements around a buffer
Point = tuple[int, int, int, wgmma.Config, torch.dtype, str, int]
# m, n, k, configuration, dtype, storage of a and b, parts of K. Storage: k is contiguous along K, m and n
# across it; a capital letter is a part of a wider matrix, from its second column on.
POINTS: list[Point] = [
    (131, 201, 97, WIDE, BF16, "kk", 1),
    (131, 201, 97, WIDE, BF16, "kn", 1),
    (131, 201, 97, WIDE, BF16, "mn", 1),
    (131, 201, 97, WIDE, BF16, "mk", 1),
    (300, 77, 515, NARROW, BF16, "kk", 1),
    (300, 77, 515, NARROW, BF16, "kn", 2),
    (72, 260, 332, ODD, FP16, "mn", 3),
    (200, 262, 134, MIDDLE, FP16, "KN", 1),
    (264, 130, 200, MIDDLE, BF16, "KK", 1),
    (130, 136, 70, ODD, BF16, "MN", 1),
    (136, 257, 128, WIDE, FP16, "kk", 2),  # c alone is unaligned
    (136, 136, 97, WIDE, BF16, "kn", 1),  # a alone
    (136, 131, 72, MIDDLE, FP16, "mk", 2),  # a has aligned rows of K
    (8, 8, 8, NARROW, BF16, "KN", 1),
    (9, 13, 3, NARROW, FP16, "kk", 1),
    (136, 136, 136, WIDE, FP32, "kk", 1),
    (136, 72, 132, NARROW, FP32, "kn", 2),
    (260, 264, 100, PAIR, FP32, "mn", 1),
    (131, 201, 97, WIDE, FP32, "kk", 1),
    (131, 201, 97, ODD, FP32, "mn", 1),
    (200, 77, 515, MIDDLE, FP32, "mk", 3),
    (130, 66, 37, NARROW, FP32, "KN", 1),
    (392, 392, 164, PINGPONG, FP32, "kk", 1),
    # The groups take tiles alternately.
    (391, 393, 301, PINGPONG, BF16, "kk", 1),
    (259, 391, 197, PINGPONG, FP16, "mn", 1),
    (387, 389, 133, PINGPONG, FP32, "kk", 1),
]
EPILOGUE_POINTS = [
    (131, 201, 97, WIDE, BF16, BIAS, 1),
    (131, 201, 97, NARROW, FP16, GELU, 1),
    (131, 77, 130, MIDDLE, BF16, GELU_PRE, 1),
    (200, 265, 97, WIDE, FP16, RESIDUAL, 1),
    (72, 139, 515, ODD, BF16, RESIDUAL, 3),
    (391, 393, 130, PINGPONG, BF16, RESIDUAL, 1),
]
# name: file, the text that is replaced, by what, and a point that shows it
FAULTS: dict[str, tuple[str, str, str, Point]] = {
    "a box begins before its row": ("unaligned.cuh", "shifts >> 4 * j & 15", "0", POINTS[0]),
    "c keeps the order of a's tile": (
        "output.cuh",
        "return UNALIGNED && A_MN ? row % 8 * 8 + row / 8 : row;",
        "return row;",
        POINTS[2],
    ),
    "a chunk of c is not swizzled": (
        "output.cuh",
        "((chunk ^ (in_box & 7)) << 4)",
        "(chunk << 4)",
        POINTS[0],
    ),
    "a group reads the other's rows of a": (
        "wgmma.cu",
        "constexpr unsigned long long MORE_STRIDE = ALTERNATE ?",
        "constexpr unsigned long long MORE_STRIDE = false ?",
        POINTS[0],
    ),
    "K of a keeps its order": (
        "unaligned.cuh",
        "load_words(odd, from + ((lane % 4 * 2 + 1 ^ row) << 4))",
        "load_words(odd, from + ((lane % 4 * 2 ^ row) << 4))",
        POINTS[1],
    ),
    "a's registers change while products read them": (
        "wgmma.cu",
        "    wgmma_commit();\n    wgmma_wait<0>();\n",
        "    wgmma_commit();\n    wgmma_wait<1>();\n",
        POINTS[5],
    ),
    "a warp copies into a stage that is read": (
        "wgmma.cu",
        "      else wait(pipeline.empty(ring.stage), ring.parity ^ 1);\n",
        "",
        (300, 77, 1030, MIDDLE, BF16, "kk", 1),
    ),
    "a warp copies half of its boxes": (
        "wgmma.cu",
        "int j = warp * 2; j < warp * 2 + 2",
        "int j = warp * 2; j < warp * 2 + 1",
        POINTS[0],
    ),
    "a part of K is stored without a predicate": (
        "output.cuh",
        "if (row < arguments.rows && column < arguments.columns)\n      to[",
        "if (row < arguments.rows)\n      to[",
        POINTS[5],
    ),
    "the place of a part's column is wrong": (
        "unaligned.cuh",
        "B_MAJOR == K_MAJOR ? column % (WIDTH / 8) * 8 + column / (WIDTH / 8) : column",
        "column",
        POINTS[10],
    ),
    "two blocks of columns are swapped": (
        "output.cuh",
        "+ second * 4) ^ (box_row & 7)",
        "+ time * 4) ^ (box_row & 7)",
        POINTS[15],
    ),
    "no barrier in the transposition": ("transpose.cu", "  __syncthreads();\n", "", POINTS[16]),
    "the transposition writes beyond its rows": (
        "transpose.cu",
        " || column >= arguments.y_pitch",
        "",
        POINTS[20],
    ),
    "the transposition reads beyond its columns": (
        "transpose.cu",
        "if (column + j < arguments.columns) vectors[i].at[j] = from[j];",
        "vectors[i].at[j] = from[j + 1];",
        POINTS[19],
    ),
}


def operands(point: Point, seed: int = 0, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return random a (M, K) and b (K, N) in the storage of a point."""
    m, n, k, _, dtype, storage, _ = point
    generator = torch.Generator(device).manual_seed(seed)

    def stored(rows: int, columns: int, letter: str, by_rows: bool) -> torch.Tensor:
        outer, inner = (rows, columns) if by_rows else (columns, rows)
        extra = 3 if letter.isupper() else 0
        x = torch.randn(outer, inner + extra, generator=generator, device=device).to(dtype)
        x = x[:, 1 : 1 + inner] if extra else x
        return x if by_rows else x.t()

    a_letter, b_letter = storage
    return stored(m, k, a_letter, a_letter in "kK"), stored(k, n, b_letter, b_letter in "nN")


def factors(x: torch.Tensor) -> torch.Tensor:
    """Return what the tensor cores multiply, in float64: float32 without the last 13 bits of its mantissa."""
    if x.dtype != FP32:
        return x.double()
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(FP32).double()


def error(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest error in units of one rounding of the exact product, and of float32 sums of K terms.

    On a GPU the tensor cores cut off the last bits of their sums: 2^-20 for each term. For tf32 it is more,
    since a step has half as many terms: up to 1.8 times 2^-20 with K = 8192 on an H200.
    """
    short = 2.0**-18 if a.is_cuda and a.dtype == FP32 else 2.0**-20
    a, b = factors(a), factors(b)
    exact, terms = a @ b, a.abs() @ b.abs()
    unit = torch.finfo(c.dtype).eps * exact.abs() + short * terms
    return float(((c.double() - exact).abs() / unit).nan_to_num(1e9).max())


@pytest.fixture(autouse=True)
def takes_unaligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma, "TAKES_UNALIGNED", True)


def product_error(point: Point, seed: int = 0, device: str = "cpu") -> float:
    a, b = operands(point, seed, device)
    assert wgmma.supports(a, b, "tf32")
    return error(wgmma.forward_with(point[3], a, b, point[6]), a, b)


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
    return f"{point[0]}x{point[1]}x{point[2]}-{point[3].columns}-{point[4]}-{point[5]}-{point[6]}"


@needs_compiler
@pytest.mark.sampled(2)
@pytest.mark.parametrize("point", POINTS, ids=label)
def test_products_are_right_in_any_schedule(
    point: Point,
    emulated: None,  # noqa: F811
    guarded: Callable[[], bool],
) -> None:
    for seed in range(2):  # each launch switches threads in another order
        assert product_error(point, seed) < 0.6
    assert guarded()


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("point", EPILOGUE_POINTS, ids=lambda p: f"{p[1]}-{p[3].columns}-{p[5].name}-{p[6]}")
def test_epilogues_of_unaligned_rows_are_right(
    point: tuple[Any, ...],
    emulated: None,  # noqa: F811
    guarded: Callable[[], bool],
) -> None:
    for seed in range(2):
        assert max(epilogue_errors(point, seed)) < 0.6
    assert guarded()


@needs_compiler
@pytest.mark.sampled(2)
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
    (tmp_path / "hopper").mkdir()
    for file in (*PRODUCTS.glob("*.cu*"), *LIBRARY.glob("*.cuh")):
        text = file.read_text()
        if file.name == name:
            assert text.count(old) == 1, "the text of the fault is not in the file"
            text = text.replace(old, new)
        (tmp_path / ("hopper" if file.parent == LIBRARY else "") / file.name).write_text(text)
    for module in (wgmma, transpose):
        real: Callable[..., CudaSource] = module.source

        def source(*arguments: Any, real: Callable[..., CudaSource] = real, **options: Any) -> CudaSource:
            original = real(*arguments, **options)
            return replace(original, file=tmp_path / original.file.name)

        monkeypatch.setattr(module, "source", source)
    for seed in range(6):
        try:
            if product_error(point, seed) > 2 or not guarded():
                return
        except EmulatorError:
            return
    pytest.fail("the fault does not show")


@needs_compiler
@pytest.mark.parametrize("columns", [3, -1])
def test_a_map_that_does_not_end_with_its_rows_is_seen(
    columns: int,
    emulated: None,  # noqa: F811
    guarded: Callable[[], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tail of K is then no zeros, and c is written beyond its rows."""
    real = tensor_map._encode

    def encode(pointer: int, dtype: torch.dtype, extent: int, *rest: int) -> tensor_map.TensorMap:
        return real(pointer, dtype, extent + columns, *rest)

    monkeypatch.setattr(tensor_map, "_encode", encode)
    tensor_map._encode_unaligned.cache_clear()
    try:
        assert product_error(POINTS[0]) > 2
    finally:
        tensor_map._encode_unaligned.cache_clear()


@needs_compiler
def test_matmul_takes_them_in_both_directions(
    emulated: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three orders of storage of half types: forward kn, da kk, db mn. tf32 where the model prefers it."""
    monkeypatch.setattr(with_cuda, "has_wgmma", lambda device: True)
    monkeypatch.setattr(with_cuda, "forward_with", None)  # mma.sync is not called
    a, b = operands((131, 77, 97, NARROW, BF16, "kn", 1))
    grad = torch.randn(131, 77).to(BF16)
    backward = with_cuda.IMPLEMENTATION.backward
    assert backward is not None
    da, db = backward(grad, a, b, precision="ieee")
    assert error(with_cuda.forward(a, b), a, b) < 0.6
    assert error(da, grad, b.t()) < 0.6 and error(db, a.t(), grad) < 0.6
    a, b = operands((260, 260, 1024, NARROW, FP32, "kk", 1))
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
        a, b = operands(point)
        wgmma.forward(a, b)
        labels = [label for label in launched if "transpose" not in label]
        assert set(labels) == {wgmma.chosen_source(a, b).label}
        launched.clear()


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
@pytest.mark.parametrize("config", wgmma.SINGLE_BLOCKS, ids=lambda c: c.label)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_products_are_right_on_a_gpu(dtype: torch.dtype, config: wgmma.Config) -> None:
    """The grid of the emulator's test, and sizes with many tiles and steps."""
    if not IS_SHIPPED:
        pytest.skip(SWITCHED_OFF)  # it would end the context of every test behind it
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    sizes = {point[:3] for point in POINTS} | {(1001, 1031, 2057), (4095, 777, 513), (520, 4099, 70)}
    # All programs of the widest tile, and three of each other one.
    storages = ("kk", "kn", "mn", "mk", "KK", "KN", "MN", "MK") if config is WIDE else ("kk", "KN", "mn")
    if config.pingpong:
        storages = ("kk", "mn")
    for size in sorted(sizes):
        for storage in storages:
            for splits in (1, 3) if config is WIDE else (1,):
                point = (*size, config, dtype, storage, splits)
                a, b = operands(point, device="cuda")
                c = wgmma.forward_with(config, a, b, splits)
                assert error(c, a, b) < 0.6, point
                assert torch.equal(c, wgmma.forward_with(config, a, b, splits)), point


@pytest.mark.gpu
@pytest.mark.parametrize("config", wgmma.SINGLE_BLOCKS, ids=lambda c: c.label)
@pytest.mark.parametrize("epilogue", [BIAS, GELU, GELU_PRE, RESIDUAL])
def test_epilogues_are_right_on_a_gpu(epilogue: wgmma.Epilogue, config: wgmma.Config) -> None:
    if not IS_SHIPPED:
        pytest.skip(SWITCHED_OFF)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    for m, n, k in ((9, 13, 1), (131, 201, 97), (1000, 1033, 264), (2047, 4099, 101)):
        for dtype in wgmma.DTYPES:
            for splits in (1, 3) if dtype == BF16 and not config.pingpong else (1,):
                # bfloat16's GELU may be off by 2^-11 of x, half a unit more where y is x.
                limit = 1.0 if dtype == BF16 and epilogue in (GELU, GELU_PRE) else 0.6
                errors = epilogue_errors((m, n, k, config, dtype, epilogue, splits), 0, "cuda")
                assert max(errors) < limit, (m, n, k, dtype, splits)
