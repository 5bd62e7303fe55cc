"""The convolution by wgmma in the emulator: windows, borders, layouts, tilings, schedules; planted faults."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import warp_emulator
from helpers.paths import SRC, TESTS
from helpers.warp_emulator import COMPILER, EmulatorError
from weft.backends import disassemble
from weft.backends.nvrtc import CudaSource
from weft.ops._common.hopper import tensor_map
from weft.ops.conv2d import wgmma, with_cuda
from weft.ops.conv2d.spec import reference
from weft.ops.conv2d.wgmma import Program, Tiling

EMULATOR = TESTS / "helpers" / "conv2d_emulator.hpp"
BF16, FP16 = torch.bfloat16, torch.float16
pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

Point = tuple[tuple[int, int, int, int], int, tuple[int, int], int, torch.dtype, Tiling | None]
# Image, outputs, window, padding, dtype, tiling (None: the chosen one). Two SMs have several tiles each.
POINTS: dict[str, Point] = {
    "chosen": ((1, 24, 9, 17), 70, (3, 3), 1, BF16, None),
    "chosen, one place": ((2, 72, 4, 24), 136, (1, 1), 0, BF16, None),
    "two chunks of channels": ((1, 72, 5, 16), 9, (2, 3), 2, FP16, Tiling(Program(64, 1, 4), 4, 16, 2)),
    "groups of outputs": ((2, 3, 9, 33), 130, (3, 3), 1, BF16, Tiling(Program(128, 1, 1), 4, 32, 3)),
    "groups of pixels": ((1, 20, 11, 19), 70, (3, 2), 0, BF16, Tiling(Program(64, 2, 2), 4, 16, 3)),
    "a place a tile": ((1, 5, 9, 8), 3, (4, 3), 2, BF16, Tiling(Program(64, 2, 1), 8, 8, 1)),
    "two rows of the window a tile": ((1, 8, 9, 8), 3, (3, 1), 1, FP16, Tiling(Program(64, 1, 1), 8, 8, 2)),
    "half a buffer at the end": ((1, 8, 9, 56), 5, (1, 3), 1, BF16, Tiling(Program(224, 1, 1), 4, 56, 1)),
    "an odd number of buffers": ((1, 8, 12, 35), 9, (1, 1), 1, BF16, Tiling(Program(192, 2, 1), 5, 32, 1)),
    "blocks of adjacent pixels": ((2, 80, 8, 25), 70, (1, 1), 0, FP16, Tiling(Program(128, 0, 4), 1, 128, 1)),
}  # fmt: skip
# name: file, the text that is replaced, and by what
FAULTS = {
    "the window is turned": ("= row * arguments", "= (arguments.window_rows - 1 - row) * arguments"),
    "rows of the window are one place": ("B_BYTES + row * row_bytes;", "B_BYTES;"),
    "the halo begins a column late": ("unit.column + column - padding", "unit.column + column - padding + 1"),
    "b is released while products read it": ("row == 0 && b_previous >= 0", "b_previous >= 0"),
    "the tile of b is a row short": ("arguments.tall + count - 1;", "arguments.tall + count - 2;"),
    "a is released while products read it": (
        "a_pipeline.release(a_previous);\n      if (releases && row",
        "a_pipeline.release(a_ring.stage);\n      if (releases && row",
    ),
    "products of a tile before count": ("-1, accumulate = 0;", "-1, accumulate = 1;"),
    "the second group has the first one's pixels": ("group * arguments.tall *", "0 *"),
    "the second group has the first one's outputs": ("(PIXEL_GROUPS == 2 ? 0 : group", "(true ? 0 : group"),
    "a buffer is read before it is written": ("    named_barrier(1 + group, GROUP_THREADS);\n", ""),
    "one buffer by turns": ("    turn ^= 1;\n", ""),
    "chunks of a buffer are not swizzled": ("((thread % 8 ^ (output & 7)) << 4)", "(thread % 8 << 4)"),
    "the weights are read before they came": ("      a_pipeline.wait_full(a_ring);\n", ""),
}  # fmt: skip
FAULTY_POINTS = ("groups of outputs", "groups of pixels", "half a buffer at the end")


def toy_map(pointer: int, dtype: torch.dtype, *sizes: Any) -> tensor_map.TensorMap:
    """Return a tensor map as the emulator reads it, of a matrix or of heads."""
    if isinstance(sizes[0], tuple):
        (columns, rows, *outer), (row_bytes, *strides), box_rows = sizes
    else:
        columns, rows, row_bytes, box_rows, outer, strides = *sizes, [], []
    box = (tensor_map.SWIZZLE_BYTES // dtype.itemsize, box_rows)
    words = (pointer, columns, rows, row_bytes, *box, dtype.itemsize, *outer, *strides)
    return tensor_map.TensorMap((ctypes.c_uint64 * 16)(*words))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    warp_emulator.emulate(monkeypatch, tmp_path_factory.getbasetemp(), EMULATOR)
    monkeypatch.setattr(tensor_map, "_encode", toy_map)
    monkeypatch.setattr(tensor_map, "_encode_heads", toy_map)
    monkeypatch.setattr(wgmma, "num_sms", lambda device: 2)
    monkeypatch.setattr(with_cuda, "has_wgmma", lambda device: True)


def _whole_numbers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return -1, 0 and 1: sums of their products are exact in float32, and short ones in 16 bits too."""
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype)


def _arguments(point: Point) -> tuple[torch.Tensor, torch.Tensor, int]:
    image, outputs, window, padding, dtype, _ = point
    weight = _whole_numbers(outputs, image[1], *window, dtype=dtype, seed=5)
    return _whole_numbers(*image, dtype=dtype, seed=0), weight, padding


def _is_right(x: torch.Tensor, weight: torch.Tensor, padding: int, point: Point, patch: Any) -> bool:
    expected = reference(x.double(), weight.double(), padding=padding).to(x.dtype)
    with patch.context() as inner:
        empty = torch.Tensor.new_empty  # memory that holds the right answer would hide what is not stored
        inner.setattr(torch.Tensor, "new_empty", lambda *a, **k: empty(*a, **k).fill_(math.nan))
        if point[5] is not None:
            inner.setattr(wgmma, "choose", lambda *a: point[5])
        y = with_cuda.forward(x, weight, padding=padding)
    return torch.equal(y, expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", POINTS)
def test_windows_are_exact_in_any_schedule(
    name: str, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):  # each launch has a schedule of its own
        assert _is_right(*_arguments(POINTS[name]), POINTS[name], monkeypatch)


def test_images_of_any_layout(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    point: Point = ((2, 16, 5, 24), 9, (3, 3), 1, BF16, Tiling(Program(64, 1, 1), 2, 24, 3))
    whole, weight, padding = _arguments(((3, 20, 7, 48), *point[1:]))
    weight = weight[:, :16]
    images = {
        "adjacent channels": whole[:2, :16].contiguous(memory_format=torch.channels_last),
        "channels of more": whole.contiguous(memory_format=torch.channels_last)[:, :16],
        "sliced": whole[1:, 1:17, 1:6, 3:27],
        "every second": whole[:, :16, ::2, ::2],
        "expanded": whole[:1, :16].expand(3, -1, -1, -1),
        "whole planes": whole[:, 2:18],
    }
    for name, x in images.items():
        assert _is_right(x, weight.transpose(2, 3), padding, point, monkeypatch), name
    # A window of one place reads planes as they lie, or else goes by adjacent channels.
    for x in images.values():
        chosen: Point = (*point[:5], None)
        assert _is_right(x, weight[:, :, :1, :1].contiguous(), 0, chosen, monkeypatch)
        assert _is_right(x, weight[:, :, 1:2, 1:2], 1, chosen, monkeypatch)


def test_gradients_follow_from_the_definition(emulated: None) -> None:
    for image, outputs, window, padding in (
        ((1, 24, 6, 16), 10, (3, 3), 1),
        ((2, 8, 4, 8), 16, (1, 1), 0),
        ((1, 3, 6, 9), 5, (2, 2), 0),
        ((1, 8, 5, 8), 4, (3, 2), 1),
    ):
        x = _whole_numbers(*image, dtype=BF16, seed=0)
        weight = _whole_numbers(outputs, image[1], *window, dtype=BF16, seed=5)
        wide = [t.double().requires_grad_() for t in (x, weight)]
        y = reference(*wide, padding=padding)
        grad = _whole_numbers(*y.shape, dtype=BF16, seed=9)
        expected = torch.autograd.grad(y, wide, grad.double())
        gradients = with_cuda.backward(grad, x, weight, padding=padding)
        for g, e in zip(gradients, expected, strict=True):
            assert g.is_contiguous() and torch.equal(g, e.to(BF16)), (image, window)


def test_a_nan_reaches_its_window_alone(emulated: None) -> None:
    x, weight, padding = _arguments(POINTS["chosen"])
    weight = weight.abs() + 1
    x[0, 0, 0, 0] = x[0, -1, -1, -1] = math.nan
    y = with_cuda.forward(x, weight, padding=padding)
    expected = reference(x.double(), weight.double(), padding=padding)
    torch.testing.assert_close(y.double(), expected, equal_nan=True, rtol=2**-8, atol=0.0)
    assert int(y[0, 0].isnan().sum()) == 8


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    fault: str, emulated: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right, wrong = FAULTS[fault]
    file = SRC / "weft/ops/conv2d/conv2d_wgmma.cu"
    text = file.read_text()
    assert text.count(right) == 1, "the text of the fault is not in the file once"
    edited = tmp_path / file.name
    edited.write_text(text.replace(right, wrong))
    monkeypatch.setattr(wgmma, "source", _edited_source(wgmma.source, edited))
    for name in FAULTY_POINTS:
        for _ in range(6):  # an error of a protocol shows in some schedules
            try:
                if not _is_right(*_arguments(POINTS[name]), POINTS[name], monkeypatch):
                    return
            except EmulatorError:
                return
    pytest.fail("no schedule shows the fault")


def _edited_source(source: Any, edited: Path) -> Any:
    def of(dtype: torch.dtype, program: Program) -> CudaSource:
        return replace(source(dtype, program), file=edited)

    return of


def test_tilings_fit_the_kernel() -> None:
    """Each choice has whole atoms, room in shared memory, and a tile of b that holds its rows."""
    for channels, outputs in ((3, 64), (64, 64), (256, 256), (512, 40)):
        for rows, columns in ((112, 112), (56, 56), (28, 30), (7, 7), (1, 900), (500, 3)):
            for window in ((3, 3), (1, 1), (7, 7), (11, 1)):
                sizes = (4, channels, outputs, rows, columns, window)
                program, tall, wide, row_group = wgmma.choose(*sizes, False, 132)
                lines = program.groups * tall + row_group - 1
                assert wide % 8 == 0 and tall * wide <= program.pixels and 1 <= row_group <= window[0]
                assert lines * wide <= wgmma.B_ROWS[program.groups] and wide <= tensor_map.MAX_BOX
                assert 16 * program.steps >= min(channels, 64)
                pointwise = wgmma.choose(*sizes[:3], 1, rows * columns, (1, 1), True, 132)
                assert pointwise.program.smem_bytes <= 227 << 10 and program.smem_bytes <= 227 << 10


def test_a_step_multiplies_without_a_wait_between() -> None:
    """The main loop has its products in one group, no spills, and stores of 16 bytes."""
    code = disassemble.sass(wgmma.source(BF16, Program(224, 1, 4)).compile("sm_90a"))
    lines = code.splitlines()
    products = [i for i, line in enumerate(lines) if "HGMMA.64x224x16" in line]
    between = "\n".join(lines[products[0] : products[-1]])
    assert len(products) == 4 and "DEPBAR" not in between
    assert "STL" not in code and "STG.E.128" in code and "LDS.128" in code
