"""Softmax's cluster kernels, executed on a CPU by the emulator in float32 and compared with float64.

The emulator executes bulk copies and stores to other blocks. It runs the threads in a new random order each
time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.norm_emulator import COMPILER, Emulated, build
from weft.backends.nvrtc import CudaSource
from weft.ops.softmax import with_cuda
from weft.ops.softmax.with_cuda import Config

TWO_BLOCK_CLUSTER = Config(strategy="shared", threads=64, cluster=2)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run every CUDA kernel by the emulator."""

    def kernel(source: CudaSource, name: str) -> Emulated:
        return Emulated(build(source, name, tmp_path))

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
def test_cluster_forward_matches_float64() -> None:
    x = _rows(1500)
    y = with_cuda.forward_with(TWO_BLOCK_CLUSTER, x)
    expected = torch.softmax(x.double(), -1)
    torch.testing.assert_close(y.double(), expected, rtol=2e-6, atol=1e-9, equal_nan=True)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.usefixtures("emulated")
def test_cluster_backward_matches_float64() -> None:
    y = torch.softmax(torch.randn(5, 1500, dtype=torch.float64), -1)
    grad = torch.randn(5, 1500, dtype=torch.float64)
    (dx,) = with_cuda.backward_with(TWO_BLOCK_CLUSTER, grad.float(), y.float())
    expected = y * (grad - (grad * y).sum(-1, keepdim=True))
    torch.testing.assert_close(dx.double(), expected, rtol=1e-5, atol=1e-8)
