"""Trilinear interpolation beyond conformance: grid_sample, planted mistakes, emulated CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import warp_emulator
from helpers.guarded_pages import place
from helpers.interpreting import asked_twice
from weft import WeftError, ops
from weft.backends.nvrtc import CudaSource
from weft.core import BACKWARD, FORWARD, registry
from weft.ops.trilinear import with_cuda
from weft.ops.trilinear.spec import OPERATOR, corner_weights, reference
from weft.workbench.check.check import check

# Points and features: vectors of 4, 2 and 1 with lanes that share a point, more vectors than lanes, 16 bits.
SHAPES = [
    (9, 16, "float32"),
    (70, 6, "float32"),
    (41, 1, "float32"),
    (3, 150, "float32"),
    (37, 12, "bfloat16"),
]
needs_compiler = pytest.mark.skipif(warp_emulator.COMPILER is None, reason="needs g++")


def arguments(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(count)
    return torch.randn(count, 8, width), torch.rand(count, 3) * 2 - 1, torch.randn(count, width)


def exact(
    features: torch.Tensor, points: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output and both gradients in float64."""
    f, p = features.double().requires_grad_(), points.double().requires_grad_()
    y = reference(f, p)
    return (y.detach(), *torch.autograd.grad(y, (f, p), grad.double()))


def test_it_is_grid_sample_within_the_cube() -> None:
    features, points, _ = arguments(23, 5)
    # grid_sample's coordinates are in the order of the last dimension first.
    volume = features.view(23, 2, 2, 2, 5).permute(0, 4, 1, 2, 3)
    grid = points.flip(1).view(23, 1, 1, 1, 3)
    sampled = torch.nn.functional.grid_sample(volume, grid, align_corners=True)
    torch.testing.assert_close(ops.trilinear(features, points), sampled.view(23, 5))


def test_a_corner_returns_its_features_and_weights_sum_to_1() -> None:
    bits = torch.tensor([[k >> 2 & 1, k >> 1 & 1, k & 1] for k in range(8)])
    features = torch.randn(8, 8, 3)
    y = ops.trilinear(features, (2 * bits - 1).float())
    assert torch.equal(y, features[torch.arange(8), torch.arange(8)])
    weights = corner_weights(torch.rand(50, 3, dtype=torch.float64) * 4 - 2)
    torch.testing.assert_close(weights.sum(1), torch.ones(50, dtype=torch.float64))


def test_gradients_of_both_arguments() -> None:
    features = torch.randn(4, 8, 3, dtype=torch.float64, requires_grad=True)
    points = (torch.rand(4, 3, dtype=torch.float64) * 2 - 1).requires_grad_()
    assert torch.autograd.gradcheck(reference, (features, points))
    f, p, g = arguments(6, 4)
    y = ops.trilinear(f.requires_grad_(), p.requires_grad_())
    for mine, expected in zip(
        torch.autograd.grad(y, (f, p), g), exact(f.detach(), p.detach(), g)[1:], strict=True
    ):
        torch.testing.assert_close(mine.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("features", "points", "expected"),
    [
        (torch.zeros(2, 7, 4), torch.zeros(2, 3), "8 corners"),
        (torch.zeros(2, 8, 4), torch.zeros(3, 3), "(2, 3)"),
        (torch.zeros(2, 8, 4), torch.zeros(2, 3).half(), "float32"),
        (torch.zeros(2, 8, 4).double(), torch.zeros(2, 3), "float32 or float16"),
        (torch.zeros(8, 4), torch.zeros(2, 3), "3 dimensions"),
    ],
)
def test_mismatched_arguments_raise(features: Any, points: Any, expected: str) -> None:
    with pytest.raises(WeftError) as caught:
        ops.trilinear(features, points)
    assert expected in str(caught.value)


def _gradients(
    change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> Callable[..., Any]:
    def backward(grad: torch.Tensor, features: torch.Tensor, points: torch.Tensor) -> Any:
        f, p = features.detach().requires_grad_(), points.detach().requires_grad_()
        with torch.enable_grad():
            y = registry.implementation("trilinear", "eager").forward(f, p)
        return change(*torch.autograd.grad(y, (f, p), grad))

    return backward


def _swap_axes(f: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return registry.implementation("trilinear", "eager").forward(f, p.flip(1))


def _clamp(f: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return registry.implementation("trilinear", "eager").forward(f, p.clamp(-1, 1))


def _by_differences(f: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Interpolate as a + t (b - a), which is NaN between two infinities of one sign."""
    wide, t = f.float(), (p + 1) / 2
    for axis in range(3):
        low, high = wide.chunk(2, 1)
        wide = low + t[:, axis, None, None] * (high - low)
    return wide[:, 0].to(f.dtype)


def _nearest(f: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return f[torch.arange(len(f), device=f.device), corner_weights(p).argmax(1)].clone()


# (mistake, direction, forward or backward, the case that refuses it)
MISTAKES: list[tuple[str, str, Callable[..., Any], str]] = [
    ("the axes are in the order z, y, x", FORWARD, _swap_axes, "fp32-37x16"),
    ("points outside of the cube are clamped", FORWARD, _clamp, "fp32-19x24-outside"),
    ("differences of corners", FORWARD, _by_differences, "fp16-29x12-special"),
    ("the nearest corner", FORWARD, _nearest, "fp32-37x16"),
    ("the gradient of points lacks its 1/2", BACKWARD, _gradients(lambda f, p: (f, 2 * p)), "fp32-130x33"),
    ("no gradient of points", BACKWARD, _gradients(lambda f, p: (f, p * 0)), "fp32-130x33"),
    ("corners' gradients in reverse", BACKWARD, _gradients(lambda f, p: (f.flip(1), p)), "fp32-130x33"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_planted_mistake_is_refused(mistake: tuple[str, str, Callable[..., Any], str]) -> None:
    _, direction, function, name = mistake
    honest = registry.implementation("trilinear", "eager")
    changes = {"forward": function} if direction == FORWARD else {"backward": function}
    case = OPERATOR.case(name)
    wrong = replace(honest, name="eager/wrong", **changes)
    with asked_twice(True):
        assert check(OPERATOR, wrong, case, direction, "cpu", n_seeds=1).status == "fail"
        assert check(OPERATOR, honest, case, direction, "cpu", n_seeds=1).status == "pass"


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run the CUDA kernels in the CPU emulator."""

    def kernel(source: CudaSource, name: str) -> warp_emulator.Emulated:
        return warp_emulator.Emulated(warp_emulator.build(source, name, tmp_path))

    monkeypatch.setattr(CudaSource, "__getitem__", kernel)


@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.sampled(1)  # each is compiled for some seconds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cuda_matches_float64_in_the_emulator(shape: tuple[int, int, str]) -> None:
    """Each tensor lies at the start and at the end of a readable page."""
    features, points, grad = arguments(*shape[:2])
    dtype = getattr(torch, shape[2])
    features, grad, rtol = features.to(dtype), grad.to(dtype), 1e-5 if shape[2] == "float32" else 2**-8
    y, dfeatures, dpoints = exact(features, points, grad)
    for at_end in (False, True):
        f, p, g = (place(t, at_end) for t in (features, points, grad))
        torch.testing.assert_close(with_cuda.forward(f, p).double(), y, rtol=rtol, atol=1e-5)
        mine = with_cuda.backward(g, f, p)
        torch.testing.assert_close(mine[0].double(), dfeatures, rtol=rtol, atol=1e-5)
        torch.testing.assert_close(mine[1].double(), dpoints, rtol=1e-4, atol=1e-4)


FAULTS = {
    "two axes exchanged": ("return at[1][k >> 1 & 1];", "return at[1][k >> 2 & 1];"),
    "a side of the axis": ("sides.at[axis][0] = (1.0f - p) * 0.5f;", "sides.at[axis][0] = (1.0f - p);"),
    "one corner less": (
        "const float weight = sides.x(k) * sides.y(k) * sides.z(k);\n#pragma unroll\n"
        "    for (int e = 0; e < VEC_WIDTH; ++e) total",
        "const float weight = k == 7 ? 0.0f : sides.x(k) * sides.y(k) * sides.z(k);\n"
        "    for (int e = 0; e < VEC_WIDTH; ++e) total",
    ),
    "a corner's sign": ("k & 2 ? x * z : -(x * z)", "k & 1 ? x * z : -(x * z)"),
    "a step of the shuffles": ("int step = LANES / 2; step > 0;", "int step = LANES / 2; step > 1;"),
    "vectors of one lane": ("column += LANES * VEC_WIDTH", "column += 2 * LANES * VEC_WIDTH"),
    "the half of a slope": ("0.5f * sums[axis]", "sums[axis]"),
    "points behind the last": ("const bool is_point = n < count;", "const bool is_point = true;"),
    "items behind the last": ("if (item >= count * each) return;", ""),
}


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees_a_planted_fault(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A copy of the kernels with one fault gives a wrong result, or leaves the memory of its arguments."""
    warp_emulator.emulate_edited(monkeypatch, tmp_path, "trilinear.cu", *FAULTS[fault])
    features, points, grad = arguments(9, 150)
    y, dfeatures, dpoints = exact(features, points, grad)
    guard = torch.randn(1 << 16)
    outputs = [torch.cat((torch.zeros(t.numel()), guard)) for t in (y, dfeatures, dpoints)]
    sizes = [t.numel() for t in (y, dfeatures, dpoints)]
    program = with_cuda.source(torch.float32, 2, 32)
    # The inputs too have memory behind them, so that a load too far is no crash of the test.
    f, p, g = (torch.cat((t.flatten(), guard)) for t in (features, points, grad))
    program["trilinear_forward"](-(-9 * 75 // 128), 128, f, p, outputs[0], 9, 150)
    program["trilinear_backward"](3, 128, g, f, p, outputs[1], outputs[2], 9, 150)
    intact = all(torch.equal(o[n:], guard) for o, n in zip(outputs, sizes, strict=True))
    right = all(
        torch.allclose(o[:n].double(), t.flatten(), rtol=1e-4, atol=1e-4)
        for o, n, t in zip(outputs, sizes, (y, dfeatures, dpoints), strict=True)
    )
    assert not (intact and right), "the fault does not show"
