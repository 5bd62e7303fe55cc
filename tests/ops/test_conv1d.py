"""The depthwise causal convolution: CUDA kernels in an emulator, planted faults, causality, and arguments."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from helpers.guarded_pages import place
from helpers.scan_emulator import COMPILER, emulate
from weft import WeftError, ops
from weft.ops.conv1d import ladder, with_cuda
from weft.ops.conv1d.spec import reference

NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
IMPLS = ("eager", "torch", "triton")
# Shapes by coefficients: rows shorter than the window, of one step, of several pieces; each width of access.
SHAPES = {
    2: [(2, 3, 1), (1, 2, 77)],
    3: [(2, 2, 130), (1, 2, 1400)],
    4: [(2, 3, 3), (1, 2, 1160), (2, 2, 64)],
    8: [(2, 2, 5), (1, 2, 133), (1, 2, 1160)],
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of compiled kernels without a fault, which tests share."""
    return tmp_path_factory.mktemp("conv1d")


def _whole_numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return small whole numbers: sums and products of them are exact in float32, and 16-bit outputs too."""
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def _arguments(
    *shape: int, taps: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = _whole_numbers(shape[1], taps, dtype=dtype, seed=7)
    weight[:, 0], weight[:, -1] = 2, -3  # the ends are neither 0 nor equal
    return _whole_numbers(*shape, dtype=dtype), weight, _whole_numbers(shape[1], dtype=dtype, seed=3)


def _expected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return reference(x.double(), weight.double(), bias.double())


def _gradients(grad: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wide = [t.double().requires_grad_() for t in inputs]
    return torch.autograd.grad(reference(*wide), wide, grad.double())


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("taps", SHAPES)
def test_both_directions_are_exact_in_the_emulator(
    taps: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    """At both ends of a page no load leaves a row."""
    emulate(monkeypatch, libraries)
    for shape in SHAPES[taps]:
        x, weight, bias = _arguments(*shape, taps=taps, dtype=dtype)
        grad = _whole_numbers(*shape, dtype=dtype, seed=1)
        for at_end in (False, True):
            x, grad = place(x, at_end), place(grad, at_end)
            y = with_cuda.apply(x, weight, bias, 64)
            assert torch.equal(y.double(), _expected(x, weight, bias)), (shape, at_end)
            got = with_cuda.gradients(grad, x, weight, 64)
            for g, expected in zip(got, _gradients(grad, x, weight, bias), strict=True):
                assert torch.equal(g, expected.to(dtype)), (shape, at_end)


@NEEDS_COMPILER
def test_strided_sequences_in_the_emulator(monkeypatch: pytest.MonkeyPatch, libraries: Path) -> None:
    """Halves of the channels, as Mamba splits its projection, and channels that are columns."""
    emulate(monkeypatch, libraries)
    wide = _whole_numbers(2, 6, 72)
    for x in (
        wide[:, 3:],
        wide[:, :3, 8:48],
        wide[:1, :3].expand(2, 3, 72),
        wide[:, :, :3].mT,
        wide[..., ::2],
    ):
        _, weight, bias = _arguments(*x.shape, taps=4)
        assert torch.equal(with_cuda.apply(x, weight, bias, 64).double(), _expected(x, weight, bias))
        grad = _whole_numbers(*x.shape, seed=1)
        got = with_cuda.gradients(grad, x, weight, 64)
        for g, expected in zip(got, _gradients(grad, x, weight, bias), strict=True):
            assert torch.equal(g.double(), expected) and g.is_contiguous()


@NEEDS_COMPILER
def test_a_nan_reaches_its_window_alone_in_the_emulator(
    monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    """A NaN at the end of a row is in the sums of those coefficients alone that have a gradient there."""
    emulate(monkeypatch, libraries)
    for length in (9, 128):
        x, weight, bias = _arguments(2, 3, length, taps=4)
        grad = _whole_numbers(2, 3, length, seed=1)
        x[0, 0, -1] = x[1, 1, -3] = x[0, 2, 0] = math.nan
        y = with_cuda.apply(x, weight, bias, 64)
        torch.testing.assert_close(y.double(), _expected(x, weight, bias), equal_nan=True)
        got = with_cuda.gradients(grad, x, weight, 64)
        for g, expected in zip(got, _gradients(grad, x, weight, bias), strict=True):
            torch.testing.assert_close(g.double(), expected, equal_nan=True)


def test_an_access_fits_every_row_and_the_length() -> None:
    y = torch.empty(1 << 16)
    for length, width in {128: 4, 130: 2, 129: 1, 64: 2, 32: 1, 8: 1}.items():
        rows = y[: 8 * length].view(1, 8, length)
        assert with_cuda.vec_width(length, torch.empty(2, 8, length), rows) == width
    assert with_cuda.vec_width(128, torch.empty(8 * 128 + 1)[1:].view(1, 8, 128)) == 1


FAULTS = {
    "the halo is one too short": ("j = away * VEC - h;", "j = away * VEC - (h < HALO ? h : HALO - 1);"),
    "the first lanes see the access's own end": ("lane >= 32 - away ? element(before, j)", "lane < 0 ? 0.0f"),
    "a piece begins with zeros": ("own >= STEP - HALO - VEC ? place.first - STEP", "true ? -STEP"),
    "coefficients in reverse": ("TAPS + k]);\n  const float", "TAPS + TAPS - 1 - k]);\n  const float"),
    "the access before is not replaced": ("      before = packs[u];\n", ""),
    "the bias of another channel": ("to_float(bias[place.channel])", "to_float(bias[0])"),
    "the bias twice": ("out[j] = constant;", "out[j] = 2 * constant;"),
    "sequences share the first one": ("x + place.batch * batch_stride", "x"),
}  # fmt: skip
BACKWARD_FAULTS = {
    "x beyond the row's end": ("start + (u + 1) * STEP + HALO <= length", "true"),
    "coefficients not in reverse": ("channel * TAPS + TAPS - 1 - k]", "channel * TAPS + k]"),
    "sums of the wrong coefficient": ("k < TAPS ? TAPS - 1 - k : TAPS", "k"),
    "the next access is not there yet": ("lane < away ? element(after, j)", "lane < 0 ? 0.0f"),
    "the last pieces are not added": ("i < count; i += 32", "i + 1 < count; i += 32"),
    "the first batch alone": ("place.batch * pieces + item % pieces", "item % pieces"),
    "a gradient access is skipped": ("      current = next[u];\n", ""),
}  # fmt: skip


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulate(monkeypatch, tmp_path, FAULTS[fault])
    x, weight, bias = _arguments(2, 3, 1160, taps=4)
    bias += 1
    assert not torch.equal(with_cuda.apply(x, weight, bias, 64).double(), _expected(x, weight, bias))


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", BACKWARD_FAULTS)
def test_a_planted_fault_in_the_gradients_is_caught(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    emulate(monkeypatch, tmp_path, BACKWARD_FAULTS[fault])
    x, weight, bias = _arguments(2, 3, 1160, taps=4)
    x[0, 0, -1] = math.nan
    grad = _whole_numbers(2, 3, 1160, seed=1)
    got, expected = with_cuda.gradients(grad, x, weight, 64), _gradients(grad, x, weight, bias)
    assert not all(
        torch.equal(g.nan_to_num(99), e.nan_to_num(99).float()) for g, e in zip(got, expected, strict=True)
    )


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("step", ladder.STEPS)
def test_each_step_of_the_ladder_is_exact_in_the_emulator(
    step: str, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    emulate(monkeypatch, libraries)
    for shape in ((2, 3, 1100), (2, 2, 3), (1, 1, 1)):
        arguments = _arguments(*shape, taps=4)
        assert torch.equal(ladder.apply(step, *arguments, 64).double(), _expected(*arguments)), shape


STEP_FAULTS = {
    "01_naive": ("from >= 0 ? to_float(row[from]) : 0.0f", "to_float(row[from < 0 ? 0 : from])"),
    "02_register_window": ("first - TAPS + k", "first - TAPS + k + 1"),
    "03_shared_halo": ("first - (TAPS - 1) + i", "first - TAPS + i"),
}


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("step", STEP_FAULTS)
def test_a_fault_in_each_step_is_caught(step: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulate(monkeypatch, tmp_path, STEP_FAULTS[step])
    arguments = _arguments(2, 2, 70, taps=4)
    assert not torch.equal(ladder.apply(step, *arguments, 64).double(), _expected(*arguments))


def test_an_output_depends_on_its_window_of_the_past_alone() -> None:
    x, weight, bias = _arguments(1, 1, 12, taps=3)
    for impl in IMPLS:
        before = ops.conv1d(x, weight, bias, impl=impl)
        changed = x.clone()
        changed[0, 0, 5] += 1
        after = ops.conv1d(changed, weight, bias, impl=impl)
        # The last coefficient is that of the present.
        assert torch.equal((after - before)[0, 0, 5:8], weight[0].flip(0)), impl
        assert torch.equal(after[0, 0, :5], before[0, 0, :5]) and torch.equal(after[..., 8:], before[..., 8:])


def test_without_a_bias_nothing_is_added_and_each_argument_has_its_gradient() -> None:
    x, weight, bias = _arguments(2, 3, 20, taps=4)
    for impl in IMPLS:
        y = ops.conv1d(x, weight, impl=impl)
        assert torch.equal(y.double(), _expected(x, weight, torch.zeros(3))), impl
        inputs = [t.clone().requires_grad_() for t in (x, weight, bias)]
        grad = _whole_numbers(2, 3, 20, seed=1)
        got = torch.autograd.grad(ops.conv1d(*inputs, impl=impl), inputs, grad)
        for g, expected in zip(got, _gradients(grad, x, weight, bias), strict=True):
            torch.testing.assert_close(g.double(), expected)


def test_arguments_without_an_answer_get_one_clear_error() -> None:
    x, w, b = torch.ones(2, 3, 9), torch.ones(3, 4), torch.ones(3)
    for arguments in (
        (x[0], w, b),
        (x, w[:2], b),
        (x, torch.ones(3, 1), b),
        (x, torch.ones(3, 9), b),
        (x, w, b[:2]),
        (x, w.half(), b),
        (x, w, b.half()),
        (x.double(), w.double(), b.double()),
        (x, [[1.0] * 4] * 3, b),
        (x, w[:, None], b),
    ):
        with pytest.raises(WeftError, match="conv1d") as caught:
            ops.conv1d(*arguments)  # type: ignore[arg-type]
        assert caught.value.expected and caught.value.got
