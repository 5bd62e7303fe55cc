"""Softmax's clusters, executed on a CPU: bulk copies, each other's shared memory and the order of
threads drawn anew each time, in float32 and against float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from norm_emulator import COMPILER, Emulated, build
from weft.backends.nvrtc import CudaSource
from weft.ops.softmax import with_cuda
from weft.ops.softmax.launch import Config

SHARED = Config(strategy="shared", threads=64, cluster=2)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A device of two multiprocessors whose kernels the emulator runs."""
    properties = SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)

    def kernel(source: CudaSource, name: str) -> Emulated:
        return Emulated(build(source, name, tmp_path))

    monkeypatch.setattr(CudaSource, "__getitem__", kernel)
    with_cuda._multiprocessors.cache_clear()
    yield
    with_cuda._multiprocessors.cache_clear()


def _rows(columns: int) -> torch.Tensor:
    """Eleven: some far from zero, one masked in part and one altogether, one with a NaN."""
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
def test_rows_by_clusters_answer_what_float64_does() -> None:
    x = _rows(1500)
    y = with_cuda.forward_with(SHARED, x)
    want = torch.softmax(x.double(), -1)
    torch.testing.assert_close(y.double(), want, rtol=2e-6, atol=1e-9, equal_nan=True)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.usefixtures("emulated")
def test_gradients_of_rows_by_clusters_answer_what_float64_does() -> None:
    y = torch.softmax(torch.randn(5, 1500, dtype=torch.float64), -1)
    grad = torch.randn(5, 1500, dtype=torch.float64)
    (dx,) = with_cuda.backward_with(SHARED, grad.float(), y.float())
    want = y * (grad - (grad * y).sum(-1, keepdim=True))
    torch.testing.assert_close(dx.double(), want, rtol=1e-5, atol=1e-8)
