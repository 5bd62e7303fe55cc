"""The stencil: CUDA kernels in an emulator, planted faults, borders, special values, and arguments."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from helpers.guarded_pages import place
from helpers.scan_emulator import COMPILER, emulate
from weft import WeftError, ops
from weft.ops.stencil import ladder, with_cuda
from weft.ops.stencil.spec import reference

NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
IMPLS = ("eager", "torch", "triton")
# Distinct, so that no exchange of two neighbours is right; whole numbers make every sum exact.
WEIGHTS = torch.tensor([-4.0, 1.0, 2.0, 3.0, 5.0])
# Grids, and rows of a warp's piece: one to three strips, several pieces, several grids, one row, one column.
GRIDS = [((5, 7), 8), ((19, 300), 8), ((3, 12, 8), 8), ((37, 520), 16), ((1, 260), 8), ((70, 1), 8)]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of compiled kernels without a fault, which tests share."""
    return tmp_path_factory.mktemp("stencil")


def _whole_numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return small whole numbers: sums and products of them are exact in float32, and 16-bit outputs too."""
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def _gradients(
    grad: torch.Tensor, x: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x, weights = x.double().requires_grad_(), weights.double().requires_grad_()
    return torch.autograd.grad(reference(x, weights), (x, weights), grad.double())  # type: ignore[return-value]


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_both_directions_are_exact_in_the_emulator(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    """At both ends of a page no load leaves the grid."""
    emulate(monkeypatch, libraries)
    weights = WEIGHTS.to(dtype)
    for shape, rows in GRIDS:
        monkeypatch.setattr(with_cuda, "MAX_ROWS", rows)
        for at_end in (False, True):
            x = place(_whole_numbers(*shape, dtype=dtype), at_end)
            grad = place(_whole_numbers(*shape, dtype=dtype, seed=1), at_end)
            y = with_cuda.apply(x, weights, threads=64)
            assert torch.equal(y.double(), reference(x.double(), weights.double())), (shape, at_end)
            dx, dweights = with_cuda.gradients(grad, x, weights, threads=64)
            expected_dx, expected_dweights = _gradients(grad, x, weights)
            assert torch.equal(dx.double(), expected_dx), (shape, at_end)
            assert torch.equal(dweights, expected_dweights.to(dtype)), (shape, at_end)


@NEEDS_COMPILER
def test_strided_grids_in_the_emulator(monkeypatch: pytest.MonkeyPatch, libraries: Path) -> None:
    emulate(monkeypatch, libraries)
    wide = _whole_numbers(2, 12, 72)
    for x in (wide[:, :, 8:40], wide[:, ::2], wide[0, :1].expand(9, 72), wide.mT, wide.transpose(0, 1)):
        grad = _whole_numbers(*x.shape, seed=1)
        assert torch.equal(with_cuda.apply(x, WEIGHTS, 64).double(), reference(x.double(), WEIGHTS.double()))
        dx, dweights = with_cuda.gradients(grad, x, WEIGHTS, 64)
        assert torch.equal(dweights.double(), _gradients(grad, x, WEIGHTS)[1]) and dx.is_contiguous()


@NEEDS_COMPILER
def test_nothing_outside_the_grid_counts_in_the_emulator(
    monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    """NaN in a corner reaches its neighbours; a coefficient of Inf, no cell without that neighbour."""
    emulate(monkeypatch, libraries)
    x = _whole_numbers(10, 40).abs() + 1
    x[0, 0] = x[-1, -1] = math.nan
    for weights in (WEIGHTS, *(WEIGHTS.index_fill(0, torch.tensor(k), math.inf) for k in range(5))):
        y = with_cuda.apply(x, weights, 64)
        torch.testing.assert_close(y.double(), reference(x.double(), weights.double()), equal_nan=True)
        grad = _whole_numbers(10, 40, seed=1).abs() + 1
        for got, expected in zip(
            with_cuda.gradients(grad, x, weights, 64), _gradients(grad, x, weights), strict=True
        ):
            torch.testing.assert_close(got.double(), expected, equal_nan=True)


@NEEDS_COMPILER
def test_the_sum_of_equal_terms_loses_no_digits_in_the_emulator(
    monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    """Without the kept rounding errors, equal terms are off by 20 units in the last place in each piece."""
    emulate(monkeypatch, libraries)
    monkeypatch.setattr(with_cuda, "MANY_PIECES", 1)
    x, grad = torch.full((512, 256), 1.1), torch.full((512, 256), 0.7)
    _, dweights = with_cuda.gradients(grad, x, WEIGHTS, 64)
    expected = _gradients(grad, x, WEIGHTS)[1]
    assert float(((dweights - expected) / expected).abs().max()) < 4 * torch.finfo(torch.float32).eps


def test_an_access_fits_every_row_and_the_width() -> None:
    y = torch.empty(1 << 16)
    expected = {128: 4, 130: 2, 129: 1, 64: 2, 32: 1, 8: 1}
    for columns, width in expected.items():
        assert (
            with_cuda.vec_width(columns, torch.empty(2, 8, columns), y[: 8 * columns].view(1, 8, -1)) == width
        )
    shifted = torch.empty(8 * 128 + 1)[1:].view(1, 8, 128)
    assert with_cuda.vec_width(128, shifted) == 1


FAULTS = {
    "the row before a piece is left out": (
        "first(row > 0 ? -1 : 0)",
        "first(0)",
    ),
    "the row after a piece is left out": (
        "start + u < place.count ? start + u + 1 : -2",
        "start + u + 1 < place.count ? start + u + 1 : -2",
    ),
    "a strip wraps around in the west": ("if (lane == 0) west = side;", ""),
    "a strip wraps around in the east": ("if (lane == 31) east = side;", ""),
    "north is not replaced": (
        "      north = row.own;\n      row = next[u];\n    }\n  }\n}\n\n// grad",
        "      row = next[u];\n    }\n  }\n}\n\n// grad",
    ),
    "the side's cell is one too far": ("(lane ? VEC : -1)", "(lane ? VEC - 1 : -1)"),
    "grids share the first one": ("x + place.batch * batch_stride, row_stride", "x, row_stride"),
    "rows without gaps": (
        "place.batch * batch_stride, row_stride,", "place.batch * batch_stride, columns,"
    ),
    "a row inside is not loaded again": (
        "if (left > 0) packs[u] = load_words<WEFT_T, VEC>(from);", ""
    ),
    "the side of a row inside is not loaded again": ("if (left > 0 && is_end) sides[u] = from[beside];", ""),
    "north of a row inside is not replaced": ("north[j] = own[j], own[j] = south[j]", "own[j] = south[j]"),
    "the side of a row inside is that of the next one": ("side = south_side;", "side = to_float(sides[u]);"),
    "a strip in the west counts as inside": ("strip > 0 &&", "strip >= 0 &&"),
}  # fmt: skip
BACKWARD_FAULTS = {
    "neighbours are not exchanged": ("OPPOSITE[5] = {0, 2, 1, 4, 3}", "OPPOSITE[5] = {0, 1, 2, 3, 4}"),
    "sums of the wrong coefficient": ("[OPPOSITE[k] * items + item]", "[k * items + item]"),
    "the last row of a piece is not summed": (
        "if (i >= place.count) break;",
        "if (i + 1 >= place.count) break;",
    ),
    "x of another row": ("load_pack(gx, is_row ? start + u : -2)", "load_pack(gx, is_row ? start : -2)"),
    "the last pieces are not added": ("k < items; k += blockDim.x", "k + 2 < items; k += blockDim.x"),
    "pieces are added by one warp": ("block_sum(sum.value(), scratch)", "warp_sum(sum.value())"),
}


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulate(monkeypatch, tmp_path, FAULTS[fault])
    monkeypatch.setattr(with_cuda, "MAX_ROWS", 8)
    x = _whole_numbers(2, 24, 1060)[..., :520]  # with strips and pieces inside
    assert not torch.equal(with_cuda.apply(x, WEIGHTS, 64).double(), reference(x.double(), WEIGHTS.double()))


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", BACKWARD_FAULTS)
def test_a_planted_fault_in_the_gradients_is_caught(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    emulate(monkeypatch, tmp_path, BACKWARD_FAULTS[fault])
    monkeypatch.setattr(with_cuda, "MAX_ROWS", 8)
    # Enough pieces for several warps of the last sum.
    x, grad = _whole_numbers(20, 24, 264), _whole_numbers(20, 24, 264, seed=1)
    got, expected = with_cuda.gradients(grad, x, WEIGHTS, 64), _gradients(grad, x, WEIGHTS)
    assert not all(torch.equal(g.double(), e) for g, e in zip(got, expected, strict=True))


@NEEDS_COMPILER
@pytest.mark.parametrize("step", ladder.STEPS)
def test_each_step_of_the_ladder_is_exact_in_the_emulator(
    step: str, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    emulate(monkeypatch, libraries)
    for x in (_whole_numbers(2, 33, 70), _whole_numbers(40, 90)[:, 3:67], _whole_numbers(1, 1)):
        y = ladder.apply(step, x, WEIGHTS, 64)
        assert torch.equal(y.double(), reference(x.double(), WEIGHTS.double())), x.shape


STEP_FAULTS = {
    "01_naive": ("if (j > 0) sum", "if (k > 0) sum"),
    "02_shared_halo": ("t.column + right - 1", "t.column + right"),
    "03_register_march": ("north = own, own = south", "own = south"),
}


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("step", STEP_FAULTS)
def test_a_fault_in_each_step_is_caught(step: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulate(monkeypatch, tmp_path, STEP_FAULTS[step])
    x = _whole_numbers(9, 70)
    y = ladder.apply(step, x, WEIGHTS, 64)
    assert not torch.equal(y.double(), reference(x.double(), WEIGHTS.double()))


def test_a_nan_reaches_its_four_neighbours_alone() -> None:
    x = torch.zeros(5, 6)
    x[0, 5] = x[3, 0] = math.nan
    expected = torch.zeros(5, 6, dtype=torch.bool)
    for i, j in ((0, 5), (0, 4), (1, 5), (3, 0), (2, 0), (4, 0), (3, 1)):
        expected[i, j] = True
    for impl in IMPLS:
        assert torch.equal(ops.stencil(x, WEIGHTS, impl=impl).isnan(), expected), impl


def test_a_grid_of_ones_counts_the_neighbours() -> None:
    y = ops.stencil(torch.ones(2, 4, 5), torch.ones(5), impl="triton")
    assert y[0, 0, 0] == 3 and y[1, 0, 2] == 4 and y[1, 2, 2] == 5 and y[0, 3, 4] == 3


def test_arguments_without_an_answer_get_one_clear_error() -> None:
    x, w = torch.ones(3, 4), torch.ones(5)
    for arguments in (
        (x[0], w),
        (x, w[:4]),
        (x, w[None]),
        (x, w.half()),
        (x.double(), w.double()),
        (x, [1.0] * 5),
        (x, torch.tensor(1.0)),
    ):
        with pytest.raises(WeftError, match="stencil") as caught:
            ops.stencil(*arguments)  # type: ignore[arg-type]
        assert caught.value.expected and caught.value.got
