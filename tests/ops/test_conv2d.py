"""The convolution of images: CUDA kernels in emulators, planted faults, borders, and arguments."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from helpers import warp_emulator
from helpers.guarded_pages import place
from helpers.warp_emulator import COMPILER
from weft import WeftError, ops
from weft.core import registry
from weft.ops.conv2d import ladder, with_cuda
from weft.ops.conv2d.spec import reference

NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
EMULATOR = Path(warp_emulator.__file__).with_name("mma_emulator.hpp")
IMPLS = ("eager", "torch")
Sizes = tuple[tuple[int, int, int, int], int, tuple[int, int], int]
# Image, outputs, window, padding: several chunks of channels and tiles of pixels and outputs; odd sizes.
CALLS: list[Sizes] = [
    ((2, 17, 9, 34), 19, (3, 3), 1),
    ((1, 3, 10, 37), 70, (3, 3), 0),
    ((2, 5, 4, 6), 3, (1, 1), 0),
    ((1, 2, 5, 7), 2, (2, 5), 3),
]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of compiled kernels without a fault, which tests share."""
    return tmp_path_factory.mktemp("conv2d")


def _whole_numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return -1, 0 and 1: sums of their products are exact in float32, and short ones in 16 bits too."""
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype)


def _arguments(call: Sizes, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
    image, outputs, window, padding = call
    weight = _whole_numbers(outputs, image[1], *window, dtype=dtype, seed=5)
    return _whole_numbers(*image, dtype=dtype), weight, padding


def _expected(x: torch.Tensor, weight: torch.Tensor, padding: int) -> torch.Tensor:
    return reference(x.double(), weight.double(), padding=padding)


@NEEDS_COMPILER
@pytest.mark.sampled(1, each=lambda dtype: dtype.itemsize)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_each_dtype_is_exact_in_the_emulator(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    """At both ends of a page no load leaves the image."""
    warp_emulator.emulate(monkeypatch, libraries, EMULATOR)
    for call in CALLS:
        x, weight, padding = _arguments(call, dtype)
        for at_end in (False, True):
            y = with_cuda.forward(place(x, at_end), place(weight, at_end), padding=padding)
            assert torch.equal(y.double(), _expected(x, weight, padding)), (call, at_end)


@NEEDS_COMPILER
def test_strided_images_in_the_emulator(monkeypatch: pytest.MonkeyPatch, libraries: Path) -> None:
    warp_emulator.emulate(monkeypatch, libraries, EMULATOR)
    wide = _whole_numbers(2, 6, 9, 40, dtype=torch.float16)
    for x in (wide[:, 1:4], wide[:, :3, ::2, 3:17], wide[:1, :3].expand(2, 3, 9, 40), wide[:, :3].mT):
        weight = _whole_numbers(4, 3, 3, 3, dtype=torch.float16, seed=5).transpose(2, 3)
        y = with_cuda.forward(x, weight, padding=1)
        assert torch.equal(y.double(), _expected(x, weight, 1)), x.stride()


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_a_nan_reaches_its_window_alone_in_the_emulator(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    warp_emulator.emulate(monkeypatch, libraries, EMULATOR)
    x, weight, padding = _arguments(CALLS[0], dtype)
    weight = weight.abs() + 1
    x[0, 0, 0, 0] = x[1, -1, -1, -1] = math.nan
    y = with_cuda.forward(x, weight, padding=padding)
    torch.testing.assert_close(y.double(), _expected(x, weight, padding), equal_nan=True)
    assert int(y[0, 0].isnan().sum()) == 4


MMA_FAULTS = {
    "the halo begins a row late": ("tile.row + at / HALO_WIDE", "tile.row + at / HALO_WIDE + 1"),
    "a chunk of channels is left out": ("chunk * CHUNK < channels", "(chunk + 1) * CHUNK < channels"),
    "the second channel of a pair is the first": ("channel + 1, i, j)", "channel, i, j)"),
    "the window is turned": ("(warp + r) * HALO_WIDE", "(warp + KR - 1 - r) * HALO_WIDE"),
    "halves of a fragment are exchanged": ("i % 2 * 8;", "i / 2 * 8;"),
    "outputs of the first group for all": ("min(tile.output / 16 + m, groups", "min((index_t)m, groups"),
    "columns of a fragment are exchanged": ("lane % 4 * 2 + k % 2", "lane % 4 * 2 + 1 - k % 2"),
    "no barrier before the products": ("    __syncthreads();\n#pragma unroll 1  //", "#pragma unroll 1  //"),
}  # fmt: skip
FP32_FAULTS = {
    "the halo begins a column late": ("tile.column + at % HALO_WIDE", "tile.column + at % HALO_WIDE + 1"),
    "weights of another place": ("PLACES + k / OUT % PLACES;", "PLACES + k % PLACES;"),
    "a row of the window is the first": ("column[i + r]", "column[i]"),
    "no barrier before the sums": ("    __syncthreads();\n    for (int channel", "    for (int channel"),
}


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", [*MMA_FAULTS, *FP32_FAULTS])
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    is_half = fault in MMA_FAULTS
    file = "conv2d_mma.cu" if is_half else "conv2d_fp32.cu"
    edit = (MMA_FAULTS | FP32_FAULTS)[fault]
    warp_emulator.emulate_edited(monkeypatch, tmp_path, file, *edit, EMULATOR)
    x, weight, padding = _arguments(
        ((1, 34, 9, 33), 70, (3, 3), 1), torch.float16 if is_half else torch.float32
    )
    # Memory behind the last channel's weights is not zeros.
    weight = torch.cat((weight, weight + 1))[: len(weight)]
    y = with_cuda.forward(x, weight, padding=padding)
    assert not torch.equal(y.double(), _expected(x, weight, padding))


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("step", ladder.STEPS)
def test_each_step_of_the_ladder_is_exact_in_the_emulator(
    step: str, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    warp_emulator.emulate(monkeypatch, libraries, EMULATOR)
    for call in CALLS:
        x, weight, padding = _arguments(call, torch.float32)
        assert torch.equal(ladder.apply(step, x, weight, padding).double(), _expected(x, weight, padding)), (
            call
        )


STEP_FAULTS = {
    "01_naive": ("row + r - padding", "row + kr - 1 - r - padding"),
    "02_register_outputs": ("min(first + o, outputs - 1)", "first"),
    "03_shared_halo": ("column0 + k % wide - padding", "column0 + k % wide"),
}


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("step", STEP_FAULTS)
def test_a_fault_in_each_step_is_caught(step: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    warp_emulator.emulate_edited(monkeypatch, tmp_path, f"{step}.cu", *STEP_FAULTS[step], EMULATOR)
    x, weight, padding = _arguments(CALLS[0], torch.float32)
    assert not torch.equal(ladder.apply(step, x, weight, padding).double(), _expected(x, weight, padding))


def test_the_lanes_of_a_load_meet_in_no_bank() -> None:
    """8 pixels by 4 words at the pitch of a pixel use all 32 banks; without padding, only 16."""
    text = (Path(with_cuda.__file__).parent / "conv2d_mma.cu").read_text()
    pitch = int(text.split("constexpr int PITCH = ")[1].split(";")[0])
    banks = {p: {(pixel * p + word) % 32 for pixel in range(8) for word in range(4)} for p in (pitch, 8)}
    assert len(banks[pitch]) == 32 and len(banks[8]) == 16


def test_a_window_that_is_too_large_is_refused_with_a_reason() -> None:
    case = registry.operator("conv2d").case("fp32-2x3x12x17-o5-3x3-p1")
    implementation = registry.implementation("conv2d", "cuda")
    assert implementation.supports(case, "cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(with_cuda, "MAX_SIDE", 2)
        refused = implementation.supports(case, "cuda")
    assert not refused and "2 x 2" in refused.reason


def test_gradients_follow_from_the_definition() -> None:
    for call in CALLS:
        x, weight, padding = _arguments(call, torch.float32)
        wide = [t.double().requires_grad_() for t in (x, weight)]
        y = reference(*wide, padding=padding)
        grad = _whole_numbers(*y.shape, seed=9)
        expected = torch.autograd.grad(y, wide, grad.double())
        for impl in IMPLS:
            backward = registry.implementation("conv2d", impl).backward
            assert backward is not None
            inputs = [t.clone().requires_grad_() for t in (x, weight)]
            by_call = torch.autograd.grad(ops.conv2d(*inputs, padding=padding, impl=impl), inputs, grad)
            for gradients in (backward(grad, x, weight, padding=padding), by_call):
                for g, e in zip(gradients, expected, strict=True):
                    torch.testing.assert_close(g.double(), e)


def test_arguments_without_an_answer_get_one_clear_error() -> None:
    x, w = torch.ones(1, 2, 5, 6), torch.ones(3, 2, 3, 3)
    for arguments in (
        (x[0], w, 0),
        (x, w[0], 0),
        (x, w[:, :1], 0),
        (x, w[:0], 0),
        (x, w.half(), 0),
        (x.double(), w.double(), 0),
        (x, w, -1),
        (x, w, True),
        (x, w, 1.0),
        (x, torch.ones(3, 2, 6, 3), 0),
        (x[:, :, :0], w, 0),
        (x[:, :, :0], w, 2),
    ):
        with pytest.raises(WeftError, match="conv2d") as caught:
            ops.conv2d(*arguments[:2], padding=arguments[2])  # type: ignore[arg-type]
        assert caught.value.expected and caught.value.got
