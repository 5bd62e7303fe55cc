"""Products with a weight in blocks: the kernels in the emulator, planted faults, their code, arguments, a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import warp_emulator
from helpers.paths import SRC, TESTS
from helpers.warp_emulator import EmulatorError
from ops.test_sparse_linear import toy_map
from weft import ops
from weft.backends import disassemble
from weft.backends.nvrtc import CudaSource
from weft.core import WeftError
from weft.ops._common.hopper import tensor_map
from weft.ops.block_sparse import blocks, to_blocks, to_dense, transposed_index, with_cuda
from weft.ops.block_sparse.with_cuda import CANDIDATES, Config

EMULATOR = TESTS / "helpers" / "hopper_sparse_emulator.hpp"
LIBRARY = SRC / "weft/ops/_common/hopper"
FOLDER = SRC / "weft/ops/block_sparse"
BF16, FP16 = torch.bfloat16, torch.float16
SMALL, SMALL_NARROW, SMALL_PAIR = CANDIDATES[64]
LARGE, LARGE_MIDDLE, LARGE_NARROW, LARGE_PAIR = CANDIDATES[128]
Point = tuple[int, tuple[int, ...], int, Config, torch.dtype]
# Rows of x, blocks of each row of blocks, columns of blocks, configuration, dtype. With two SMs each block of
# threads computes several tiles, with more steps than stages, and rows of blocks have none.
POINTS: list[Point] = [
    (1, (1,), 1, SMALL_NARROW, BF16),
    (130, (2, 0, 5), 6, SMALL_NARROW, FP16),
    (300, (3, 1, 0, 6), 6, SMALL, BF16),
    (300, (0, 4, 1), 5, SMALL_PAIR, FP16),
    (70, (2, 0, 3), 3, LARGE_NARROW, BF16),
    (140, (0, 3), 4, LARGE_MIDDLE, FP16),
    (300, (1, 4), 4, LARGE, BF16),
    (520, (3, 0, 1), 3, LARGE_PAIR, FP16),
]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    warp_emulator.emulate(monkeypatch, tmp_path_factory.getbasetemp(), EMULATOR)
    monkeypatch.setattr(tensor_map, "_encode", toy_map)
    monkeypatch.setattr(with_cuda, "num_sms", lambda device: 2)


def inputs(point: Point, seed: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Return x, values, crow, col, the transposed index and a bias."""
    batch, lengths, columns, config, dtype = point
    generator = torch.Generator().manual_seed(seed)
    block, count = config.block, sum(lengths)
    x = torch.randn(batch, columns * block, generator=generator).to(dtype)
    values = torch.randn(count, block, block, generator=generator).to(dtype)
    bias = torch.randn(len(lengths) * block, generator=generator).to(dtype)
    crow = torch.tensor([0, *lengths]).cumsum(0).int()
    rows = [torch.randperm(columns, generator=generator)[:n].sort().values for n in lengths]
    col = torch.cat(rows).int()
    tensors = (x, values, crow, col, transposed_index(crow, col, columns), bias)
    return tuple(t.to(device) for t in tensors)


def excess(y: torch.Tensor, exact: torch.Tensor, terms: int) -> float:
    """Return the largest error in units of what rounding the exact result to the dtype costs."""
    # The second term is for sums in float32 of products that cancel.
    unit = torch.finfo(y.dtype).eps * (exact.abs() + 2e-3 * terms**0.5)
    return float(((y.double() - exact).abs() / unit).nan_to_num(1e9).max())


def error(point: Point, seed: int, device: str = "cpu") -> float:
    """Return the largest error of the product and of both its gradients, see :func:`excess`."""
    x, values, crow, col, transposed, bias = inputs(point, seed, device)
    config, columns = point[3], point[2] * point[3].block
    y = with_cuda.product(x, values, crow, col, None, bias, config)
    w = to_dense(values.double(), crow, col, columns)
    errors = [excess(y, x.double() @ w.t() + bias.double(), columns)]
    starts, rows, places = blocks.split_index(transposed, values.shape[0])
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y)
    dx = with_cuda.product(grad, values, starts, rows, places, None, config)
    errors.append(excess(dx, grad.double() @ w, w.shape[0]))
    dvalues = with_cuda.gradient_of_values(grad, x, values, col, rows, places)
    dw = grad.double().t() @ x.double()
    tiles = dw.view(-1, config.block, point[2], config.block).transpose(1, 2)
    exact = tiles[blocks.row_numbers(crow, col.shape[0]), col.long()]
    return max(*errors, excess(dvalues, exact, point[0]))


needs_compiler = pytest.mark.skipif(
    warp_emulator.COMPILER is None, reason="no g++ to compile the kernel with"
)


@needs_compiler
@pytest.mark.sampled(2)
@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p[0]}-{p[3].label}")
def test_products_and_gradients_are_right_in_any_schedule(point: Point, emulated: None) -> None:
    for seed in range(2):  # each launch switches threads in another order
        assert error(point, seed) < 0.6
