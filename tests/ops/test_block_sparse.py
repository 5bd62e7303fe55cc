"""Products with a weight in blocks: kernels in the emulator, planted faults, code, arguments, a GPU."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import warp_emulator
from helpers.paths import SRC, TESTS
from helpers.warp_emulator import EmulatorError, copy_with_fault
from ops.test_sparse_linear import toy_map
from weft import ops
from weft.backends import disassemble
from weft.backends.nvrtc import CudaSource
from weft.core import WeftError
from weft.ops._common.hopper import tensor_map
from weft.ops._common.offsets import piece_numbers
from weft.ops.block_sparse import blocks, to_blocks, to_dense, transposed_index, with_cuda
from weft.ops.block_sparse.with_cuda import CANDIDATES, Config

EMULATOR = TESTS / "helpers" / "hopper_sparse_emulator.hpp"
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
LINEAR, GRADIENT, STORE = "block_linear.cu", "block_gradient.cu", "transposed_store.cuh"
# The part that shows a fault, its file, the right text and the wrong one.
FAULTS = {
    "the block beside": ("product", LINEAR, ": block;\n#pragma", ": block + 1;\n#pragma"),
    "the first half of a block twice": ("product", LINEAR, ": part * BK;\n", ": 0;\n"),
    "x of the first half twice": ("product", LINEAR, "across * SIDE + part * BK", "across * SIDE"),
    "a group reads the other's rows of W": ("product", LINEAR, "group * BLOCK_BYTES : 0)", "0 : 0)"),
    "a row without blocks has old sums": ("product", LINEAR, "sums[BN / 2] = {};", "sums[BN / 2];"),
    "no bias": ("product", STORE, "sums[i + word * 2] + bias[word % 2],", "sums[i + word * 2],"),
    "a stage is released while products read it": (
        "product",
        LINEAR,
        "    if (previous >= 0 && threadIdx.x % 32 == 0) pipeline.release_in_cluster<CLUSTER>(previous);\n"
        "    previous",
        "    if (threadIdx.x % 32 == 0) pipeline.release_in_cluster<CLUSTER>(ring.stage);\n    previous",
    ),
    "products are not waited for": ("product", LINEAR, "  wgmma_wait<0>();\n", ""),
    "no fence before a product": ("product", LINEAR, "    wgmma_fence();\n", ""),
    "no proxy fence before a store": ("product", STORE, "    fence_async_proxy();\n", ""),
    "a buffer is overwritten while it is stored": (
        "product",
        STORE,
        "    if (is_storer()) tma_wait_read<0>();\n",
        "",
    ),
    "the block ends before its stores": ("product", LINEAR, "    if (is_storer()) tma_wait<0>();", "    //"),
    "transposed: the place in the column's order": (
        "dx",
        LINEAR,
        "TRANSPOSED ? min((unsigned)arguments.places[block], count) : block",
        "block",
    ),
    "transposed: the first 64 columns twice": ("dx", LINEAR, "TRANSPOSED ? box * 64", "TRANSPOSED ? 0"),
    "transposed: the first part of K twice": ("dx", LINEAR, "(TRANSPOSED ? part * BK : 0)", "0"),
    "cluster: a part of W twice": ("product pair", LINEAR, " + rank * BOX_ROWS;\n", ";\n"),
    "cluster: a block ends before the others' last arrivals": (
        "product pair",
        LINEAR,
        "  // Until the others arrive no more at this block's barriers.\n"
        "  if constexpr (CLUSTER > 1) cluster_barrier();\n",
        "",
    ),
    "gradient: the column of the block in the index's order": (
        "dvalues",
        GRADIENT,
        "arguments.col[place]",
        "arguments.col[index]",
    ),
    "gradient: rows of the block's place": (
        "dvalues",
        GRADIENT,
        "arguments.rows[index]",
        "arguments.rows[place]",
    ),
    "gradient: the first half of grad twice": (
        "dvalues",
        GRADIENT,
        "(is_inside ? row : row_blocks) * SIDE + within",
        "(is_inside ? row : row_blocks) * SIDE",
    ),
    "gradient: products are not waited for": ("dvalues", GRADIENT, "  wgmma_wait<0>();\n", ""),
    "gradient: no proxy fence before a store": ("dvalues", GRADIENT, "  fence_async_proxy();\n", ""),
}


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
    """Return the largest error in units of what rounding and sums in float32 may cost."""
    # Sums are in float32, whatever the dtype: a step of 16 terms cuts off 2^-24 of a sum that is as large as
    # the root of the terms, where products cancel.
    unit = torch.finfo(y.dtype).eps / 2 * exact.abs() + 2.0**-28 * terms**1.5 + 2.0**-22
    return float(((y.double() - exact).abs() / unit).nan_to_num(1e9).max())


def error(point: Point, seed: int, parts: str = "product dx dvalues", device: str = "cpu") -> float:
    """Return the largest error of the product and its gradients, or some of them; see :func:`excess`."""
    x, values, crow, col, transposed, bias = inputs(point, seed, device)
    config, columns = point[3], point[2] * point[3].block
    w, errors = to_dense(values.double(), crow, col, columns), []
    if "product" in parts:
        y = with_cuda.product(x, values, crow, col, None, bias, config)
        errors.append(excess(y, x.double() @ w.t() + bias.double(), columns))
    grad = torch.randn(point[0], w.shape[0], generator=torch.Generator().manual_seed(seed)).to(x)
    starts, rows, places = blocks.split_index(transposed, values.shape[0])
    if "dx" in parts:
        dx = with_cuda.product(grad, values, starts, rows, places, None, config)
        errors.append(excess(dx, grad.double() @ w, w.shape[0]))
    if "dvalues" in parts:
        dvalues = with_cuda.gradient_of_values(grad, x, values, col, rows, places)
        dw = grad.double().t() @ x.double()
        tiles = dw.view(-1, config.block, point[2], config.block).transpose(1, 2)
        exact = tiles[piece_numbers(crow, col.shape[0]), col.long()]
        errors.append(excess(dvalues, exact, point[0]))
    return max(errors)


needs_compiler = pytest.mark.skipif(
    warp_emulator.COMPILER is None, reason="no g++ to compile the kernel with"
)


@needs_compiler
@pytest.mark.sampled(2)
@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p[0]}-{p[3].label}")
def test_products_and_gradients_are_right_in_any_schedule(point: Point, emulated: None) -> None:
    for seed in range(2):  # each launch switches threads in another order
        assert error(point, seed) < 1.05


@needs_compiler
@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    fault: str, emulated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of kernels and library with one fault gives a wrong result or breaks the emulator's rules."""
    part, name, old, new = FAULTS[fault]
    copy_with_fault(tmp_path, FOLDER, name, old, new)
    for attribute in ("source", "gradient_source"):
        monkeypatch.setattr(with_cuda, attribute, _copied(getattr(with_cuda, attribute), tmp_path))
    # More steps than stages, several tiles of a block of threads, and a row without blocks.
    point: Point = (300, (0, 4, 1), 4, LARGE_PAIR if "pair" in part else LARGE_MIDDLE, BF16)
    errors = []
    for seed in range(60 if "pair" in part else 6):
        try:
            errors.append(error(point, seed, part))
        except EmulatorError:
            return
        if errors[-1] >= 0.6:
            return
    pytest.fail(f"not seen: {max(errors)}")


def _copied(source: Any, folder: Path) -> Any:
    def copied(*arguments: Any) -> CudaSource:
        program = source(*arguments)
        return replace(program, file=folder / program.file.name)

    return copied


@needs_compiler
def test_strided_inputs_other_indices_and_those_without_elements_are_taken(emulated: None) -> None:
    x, values, crow, col, transposed, bias = inputs((40, (1, 2), 2, SMALL_NARROW, BF16), 1)
    expected = with_cuda.forward(x, values, crow, col, transposed, bias)
    wide = torch.stack((x, x), -1).flatten(1)[:, ::2]
    shifted = torch.cat((values.flatten()[:1], values.flatten()))[1:].view(values.shape)
    assert torch.equal(with_cuda.forward(wide, shifted, crow, col, transposed, bias), expected)
    batched = with_cuda.forward(x.view(2, 20, -1), values, crow, col, transposed, bias)
    assert torch.equal(batched.flatten(0, 1), expected)
    assert with_cuda.forward(x[:0], values, crow, col, transposed, bias).shape == (0, 128)
    none = (values[:0], torch.zeros_like(crow), col[:0], transposed[:0])
    assert torch.equal(with_cuda.forward(x, *none, bias), bias.expand(40, -1))
    gradients = with_cuda.backward(expected, x, *none)
    assert [tuple(g.shape) for g in gradients] == [(40, 128), (0, 64, 64), (128,)]
    # A column out of range is no address: its block adds nothing, and gets no gradient.
    beyond, first = torch.tensor([7, 0, -2]).int(), torch.tensor([0, 1, 3]).int()
    index = transposed_index(first, beyond, 2)
    y = with_cuda.forward(x, values, first, beyond, index, bias)
    one = torch.nn.functional.linear(x[:, :64].float(), values[1].float(), bias[64:].float())
    assert torch.equal(y[:, :64], bias[:64].expand(40, -1)) and excess(y[:, 64:], one.double(), 64) < 1.05
    dvalues = with_cuda.backward(y, x, values, first, beyond, index)[1]
    assert dvalues[0].abs().max() == 0 < dvalues[1].abs().max() and dvalues[2].abs().max() == 0


@pytest.mark.parametrize("config", [*CANDIDATES[64], *CANDIDATES[128]], ids=lambda c: c.label)
def test_the_machine_code_multiplies_in_tensor_cores_and_spills_nothing(config: Config) -> None:
    for transposed in (False, True):
        text = disassemble.sass(with_cuda.source(BF16, config, transposed).compile("sm_90a"))
        assert len(re.findall(rf"HGMMA\.64x{config.columns}x16\.F32\.BF16", text)) == 4  # 64 columns
        assert "STSM.16.MT88.4" in text and not re.search(r"\b(STL|LDL)\b", text)
    text = disassemble.sass(with_cuda.gradient_source(BF16, config.block).compile("sm_90a"))
    assert len(re.findall(rf"HGMMA\.64x{config.block}x16\.F32\.BF16", text)) == 4
    assert not re.search(r"\b(STL|LDL)\b", text) and config.smem_bytes <= 227 << 10


def test_few_rows_of_x_take_narrow_tiles_and_large_products_wide_ones() -> None:
    assert with_cuda.choose(16, 64, 410, 64, 132).columns == 64
    assert with_cuda.choose(16, 32, 102, 128, 132).columns == 64
    assert with_cuda.choose(16384, 32, 512, 128, 132).columns == 256
    assert with_cuda.choose(16384, 64, 2048, 64, 132).columns == 128


def test_the_blocks_of_largest_norm_stay_and_come_back() -> None:
    w = torch.randn(96, 64)
    w[32:48, 16:32] *= 9
    w[0:16, 48:64] *= 8
    w[80, 3] = torch.nan
    values, crow, col = to_blocks(w, 16, 3 / 24)
    assert crow.tolist() == [0, 1, 1, 2, 2, 2, 3] and col.tolist() == [3, 1, 0]
    dense = to_dense(values, crow, col, 64)
    stored = dense != 0
    assert (
        torch.equal(dense[stored].nan_to_num(1e9), w[stored].nan_to_num(1e9)) and int(stored.sum()) == 3 * 256
    )
    full = to_blocks(w.t(), 32, 1.0)
    assert torch.equal(to_dense(*full, 96).nan_to_num(1e9), w.t().nan_to_num(1e9))
    assert to_blocks(w, 16, 0.0)[0].shape == (0, 16, 16) and len(to_blocks(w, 16, 1e-6)[0]) == 1
    equal = to_blocks(torch.ones(32, 32), 16, 0.5)
    assert equal[1].tolist() == [0, 2, 2] and equal[2].tolist() == [0, 1]


def test_the_transposed_index_is_the_pattern_of_the_transpose() -> None:
    w = torch.randn(96, 128)
    values, crow, col = to_blocks(w, 16, 0.4)
    index = transposed_index(crow, col, 8)
    starts, rows, places = blocks.split_index(index, len(values))
    transpose = to_dense(values[places.long()].mT.contiguous(), starts, rows, 96)
    assert torch.equal(transpose, to_dense(values, crow, col, 128).t())


@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize("impl", ["eager", "torch", "triton"])
def test_gradients_are_those_of_the_dense_layer_in_float64(impl: str, with_index: bool) -> None:
    w, bias, x = torch.randn(64, 96), torch.randn(64), torch.randn(2, 9, 96)
    values, crow, col = to_blocks(w, 32, 0.5)
    leaves = [t.requires_grad_() for t in (x, values, bias)]
    index = transposed_index(crow, col, 3) if with_index else None
    y = ops.block_sparse_linear(x, values, crow, col, index, bias, impl=impl)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    exact = torch.nn.functional.linear(doubles[0], to_dense(doubles[1], crow, col, 96), doubles[2])
    grad = torch.randn(y.shape)
    assert torch.allclose(y.double(), exact, atol=1e-4)
    gradients = torch.autograd.grad(y, leaves, grad)
    expected = torch.autograd.grad(exact, doubles, grad.double())
    assert all(torch.allclose(a.double(), b, atol=1e-4) for a, b in zip(gradients, expected, strict=True))


def test_bad_arguments_get_one_clear_error() -> None:
    x, w = torch.randn(4, 64), torch.randn(32, 64)
    values, crow, col = to_blocks(w, 16, 0.5)
    index = transposed_index(crow, col, 4)
    calls: list[tuple[Any, tuple[Any, ...], str]] = [
        (to_blocks, (w, 24, 0.5), "16 or 32"),
        (to_blocks, (w[:, :40], 16, 0.5), "multiple of 16"),
        (to_blocks, (w, 16, 1.5), "share"),
        (to_blocks, (w[0], 16, 0.5), "matrix"),
        (to_blocks, (w, 16.0, 0.5), "got 16.0"),
        (to_blocks, (w, 16, "half"), "share"),
        (to_blocks, (w, 16, math.nan), "share"),
        (to_dense, (values[0], crow, col, 64), "3 dimensions"),
        (to_dense, (values, crow, None, 64), "col: expected a tensor"),
        (to_dense, (values, crow, col, "64"), "an int"),
        (transposed_index, (crow, col, -1), "at least 0"),
        (transposed_index, (crow.long(), col, 4), "int32"),
        (transposed_index, (crow, col.to("meta"), 4), "move it: col.to"),
        (to_dense, (values, crow, col, 40), "multiple of 16"),
        (ops.block_sparse_linear, (x[:, :40], values, crow, col), "multiple of 16"),
        (ops.block_sparse_linear, (x, values[:, :8], crow, col), "b of 16"),
        (ops.block_sparse_linear, (x.double(), values, crow, col), "float32"),
        (ops.block_sparse_linear, (x.half(), values, crow, col), "float"),
        (ops.block_sparse_linear, (x, values, crow.long(), col), "int32"),
        (ops.block_sparse_linear, (x, values, crow, col[1:]), "entries"),
        (ops.block_sparse_linear, (x, values, crow, col + 1), "below 4"),
        (ops.block_sparse_linear, (x, values, crow.flip(0), col), "from 0"),
        (ops.block_sparse_linear, (x, values, crow, col, index[1:]), "entries, or none"),
        (ops.block_sparse_linear, (x, values, crow, col, index.flip(0)), "index of crow"),
        (ops.block_sparse_linear, (x, values, crow, col, None, torch.ones(9)), "(32,)"),
    ]
    for function, arguments, expected in calls:
        with pytest.raises(WeftError) as caught:
            function(*arguments)
        assert expected in str(caught.value), str(caught.value)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("block", [64, 128])
def test_the_kernels_are_right_on_a_gpu(block: int, dtype: torch.dtype) -> None:
    """Every configuration, against float64 and against another launch; the last shape has many waves."""
    for batch, rows, columns in ((1, 1, 1), (300, 5, 6), (4100, 4096 // block, 2048 // block)):
        lengths = tuple(5 * i % (columns + 1) for i in range(1, rows + 1))
        for config in CANDIDATES[block]:
            point = (batch, lengths, columns, config, dtype)
            assert error(point, 1, device="cuda") < 1.05, config.label
            x, values, crow, col, _, bias = inputs(point, 1, "cuda")
            once, again = (with_cuda.product(x, values, crow, col, None, bias, config) for _ in range(2))
            assert torch.equal(once, again), config.label
