"""Softmax's CUDA kernels, executed on a CPU by the emulator in float32 and compared with float64.

The emulator executes bulk copies and stores to other blocks. It runs the threads in a new random order each
time. Rows of odd length and rows at odd addresses end at a page that may not be read.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.guarded_pages import place
from helpers.norm_emulator import COMPILER, Emulated, build
from weft.backends.nvrtc import CudaSource
from weft.ops._common.layout import ALIGNED_ALIKE, NO_PEEL, SHIFTED, peel_of
from weft.ops.softmax import with_cuda
from weft.ops.softmax.with_cuda import Config

TWO_BLOCK_CLUSTER = Config(strategy="shared", threads=64, cluster=2)
# Each strategy with the columns of its rows: 8 and 32 lanes a row; a block; two blocks that share a row.
STRATEGIES = {
    "8-lanes": (Config(strategy="warp", threads=64, vecs_per_thread=2, lanes=8), 61),
    "32-lanes": (Config(strategy="warp", threads=64, vecs_per_thread=4), 467),
    "block": (Config(strategy="block", threads=96, vecs_per_thread=2), 741),
    "cluster": (TWO_BLOCK_CLUSTER, 1501),
    "long": (Config(strategy="long", threads=32), 1027),
}


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every CUDA kernel by the emulator."""

    def kernel(source: CudaSource, name: str) -> Emulated:
        return Emulated(build(source, name))

    monkeypatch.setattr(CudaSource, "__getitem__", kernel)


def _rows(columns: int) -> torch.Tensor:
    """Return eleven rows: two with large values, one partly and one fully masked, one with a NaN."""
    torch.manual_seed(columns)
    x = torch.randn(11, columns)
    x[1] += 1e4
    x[2] *= 1e4
    x[3, : columns // 3] = x[4] = -torch.inf
    x[5, 7] = torch.nan
    return x


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.usefixtures("emulated")
@pytest.mark.pooled(2, "emulated: softmax_emulated")
def test_cluster_forward_matches_float64() -> None:
    x = _rows(1500)
    y = with_cuda.forward_with(TWO_BLOCK_CLUSTER, x)
    expected = torch.softmax(x.double(), -1)
    torch.testing.assert_close(y.double(), expected, rtol=2e-6, atol=1e-9, equal_nan=True)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.usefixtures("emulated")
@pytest.mark.pooled(2, "emulated: softmax_emulated")
def test_cluster_backward_matches_float64() -> None:
    y = torch.softmax(torch.randn(5, 1500, dtype=torch.float64), -1)
    grad = torch.randn(5, 1500, dtype=torch.float64)
    (dx,) = with_cuda.backward_with(TWO_BLOCK_CLUSTER, grad.float(), y.float())
    expected = y * (grad - (grad * y).sum(-1, keepdim=True))
    torch.testing.assert_close(dx.double(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("columns", "offsets", "expected"),
    [
        (64, (0, 0), NO_PEEL),  # whole vectors at aligned addresses
        (63, (0, 0), ALIGNED_ALIKE),
        (63, (3, 3), ALIGNED_ALIKE),
        (64, (1, 1), ALIGNED_ALIKE),
        (64, (0, 1), SHIFTED),
        (63, (2, 0), SHIFTED),
        (31, (0, 0), NO_PEEL),  # 124 bytes: too short
    ],
)
def test_the_peel_follows_from_addresses_and_strides(
    columns: int, offsets: tuple[int, int], expected: int
) -> None:
    y, x = (torch.empty(5 * columns + 8)[k : k + 5 * columns].view(5, columns) for k in offsets)
    assert peel_of(columns, y, x) == expected


def test_a_slice_of_columns_of_another_stride_is_shifted() -> None:
    assert peel_of(63, torch.empty(5, 63), torch.empty(5, 70)[:, :63]) == SHIFTED
    assert peel_of(63, torch.empty(5, 63), torch.empty(5, 67)[:, :63]) == ALIGNED_ALIKE


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.usefixtures("emulated")
@pytest.mark.pooled(2, "emulated: softmax_emulated")
@pytest.mark.sampled(2)  # each configuration is compiled for two seconds
@pytest.mark.parametrize("peel", [ALIGNED_ALIKE, SHIFTED])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_of_odd_length_match_float64_and_no_load_leaves_them(strategy: str, peel: int) -> None:
    """Rows of odd length begin at every element of a vector; with ``SHIFTED`` the input's begin elsewhere."""
    config, columns = STRATEGIES[strategy]
    _compare_odd_rows(replace(config, peel=peel), _rows(columns), torch.randn(11, columns))


@pytest.mark.pooled(2, "emulated: softmax_emulated")
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("peel", [ALIGNED_ALIKE, SHIFTED])
def test_blocks_that_share_an_odd_row_match_float64(peel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_cuda, "num_sms", lambda _: 2)
    config = Config(strategy="long", threads=32, peel=peel)
    _compare_odd_rows(config, torch.randn(2, 2093), torch.randn(2, 2093))


def _compare_odd_rows(config: Config, x: torch.Tensor, grad: torch.Tensor) -> None:
    """Compare both directions with float64, the inputs at the start and at the end of a readable page."""
    expected = torch.softmax(x.double(), -1)
    y = torch.softmax(grad.roll(1, 0).double(), -1)
    expected_dx = y * (grad - (grad * y).sum(-1, keepdim=True))
    # Outputs are aligned; aligned alike are inputs that begin with a page. A tensor at the end of a page
    # begins elsewhere unless its bytes are a multiple of 16.
    is_shifted = config.peel == SHIFTED
    for at_end in (False, True) if is_shifted else (False,):
        actual = with_cuda.forward_with(config, place(x, at_end))
        torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=1e-9, equal_nan=True)
        (dx,) = with_cuda.backward_with(
            config, place(grad, at_end), place(y.float(), is_shifted and not at_end)
        )
        torch.testing.assert_close(dx.double(), expected_dx, rtol=1e-5, atol=1e-8)
