"""The product with a 2:4 sparse weight: its kernel in the emulator, planted faults, its code, a GPU."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import warp_emulator
from helpers.paths import SRC, TESTS
from helpers.warp_emulator import EmulatorError, copy_with_fault
from weft import ops
from weft.backends import disassemble
from weft.backends.nvrtc import CudaSource, Kernel
from weft.ops._common.hopper import tensor_map, wgmma_shapes
from weft.ops.sparse24 import linear_cuda, pattern
from weft.ops.sparse24.linear_cuda import Config

EMULATOR = TESTS / "helpers" / "hopper_sparse_emulator.hpp"
LIBRARY = SRC / "weft/ops/_common/hopper"
FOLDER = SRC / "weft/ops/sparse24"
WIDE, MIDDLE, NARROW, PAIR, MIDDLE_PAIR, PINGPONG, PINGPONG_PAIR = linear_cuda.CANDIDATES
BF16, FP16 = torch.bfloat16, torch.float16
Point = tuple[int, int, int, Config, torch.dtype]
# Rows of x, outputs, K, configuration, dtype. A block takes 128 outputs and 64 of K; with two SMs each block
# computes several tiles, with more steps of K than stages, and an odd number of them.
POINTS: list[Point] = [
    (64, 128, 64, NARROW, BF16),
    (1, 8, 16, NARROW, BF16),
    (130, 200, 336, MIDDLE, BF16),
    (300, 264, 720, WIDE, BF16),
    (300, 136, 112, WIDE, FP16),
    (72, 392, 592, NARROW, FP16),
    (300, 392, 720, PAIR, BF16),
    (260, 136, 464, MIDDLE_PAIR, FP16),
    # The groups take tiles alternately: an odd number of tiles, fewer and more steps than stages.
    (136, 392, 64, PINGPONG, BF16),
    (264, 392, 272, PINGPONG, FP16),
    (392, 136, 592, PINGPONG, BF16),
    (264, 392, 464, PINGPONG_PAIR, BF16),
]
STORE = "transposed_store.cuh"
FAULTS = {
    "a selector for the other": ("sparse_linear.cu", "WgmmaSparse<T, BN, 1>", "WgmmaSparse<T, BN, 0>"),
    "values of the first 32 columns twice": (
        "sparse_linear.cu",
        "descriptor_64(block_at + 32)",
        "descriptor_64(block_at)",
    ),
    "x of the first 32 columns twice": (
        "sparse_linear.cu",
        "descriptor<K_MAJOR>(x_at + 64)",
        "descriptor<K_MAJOR>(x_at)",
    ),
    "a group reads the other's codes": (
        "sparse_linear.cu",
        "(first * GROUP_THREADS + threadIdx.x % GROUP_THREADS) * 4",
        "(threadIdx.x % GROUP_THREADS) * 4",
    ),
    "a group reads the other's values": ("sparse_linear.cu", "stage + first * 64 * VALUE_ROW", "stage"),
    "the codes of the first step everywhere": (
        "sparse_linear.cu",
        "      codes += (long long)arguments.row_blocks * 32;\n",
        "",
    ),
    "the codes of the first tile everywhere": (
        "sparse_linear.cu",
        "min(row / 16, arguments.row_blocks - BM / 16)",
        "0",
    ),
    "one word for both steps": (
        "sparse_linear.cu",
        "if (done + 1 < k_steps) step(odd, even, true);",
        "if (done + 1 < k_steps) step(even, odd, true);",
    ),
    "a swizzle of 128 bytes for the values": (
        "wgmma.cuh",
        "(unsigned long long)(ATOM_BYTES / 2 >> 4) << 32 | 1ull << 63",
        "(unsigned long long)(ATOM_BYTES / 2 >> 4) << 32 | 1ull << 62",
    ),
    "values with the stride of x": (
        "wgmma.cuh",
        "(unsigned long long)(ATOM_BYTES / 2 >> 4) << 32",
        "(unsigned long long)(ATOM_BYTES >> 4) << 32",
    ),
    "the last step is left out": (
        "sparse_linear.cu",
        "if (done + 1 < k_steps) step(",
        "if (done + 2 < k_steps) step(",
    ),
    "no proxy fence before a store": (STORE, "    fence_async_proxy();\n", ""),
    "sums that are not transposed": (STORE, "store_matrices_transposed(", "store_matrices("),
    "the bias of the row 8 above": (
        STORE,
        "rounded_pair<T>(sums[i + word * 2] + bias[word % 2],",
        "rounded_pair<T>(sums[i + word * 2] + bias[0],",
    ),
    "no fence before the first product": ("sparse_linear.cu", "  wgmma_fence();\n", ""),
    "a stage is released while products read it": (
        "sparse_linear.cu",
        "    if (previous >= 0 && threadIdx.x % 32 == 0) pipeline.release_in_cluster<CLUSTER>(previous);\n",
        "    if (threadIdx.x % 32 == 0) pipeline.release_in_cluster<CLUSTER>(ring.stage);\n",
    ),
    "products are not waited for": ("sparse_linear.cu", "  wgmma_wait<0>();\n", ""),
    "a buffer is overwritten while it is stored": (
        STORE,
        "    if (is_storer()) tma_wait_read<0>();\n",
        "",
    ),
    "the block ends before its stores": ("sparse_linear.cu", "    if (is_storer()) tma_wait<0>();", "    //"),
    "groups that alternate do not wait for their turn": (
        "sparse_linear.cu",
        "        wait(stages + TURNS_AT + group * 8, (turn / CONSUMERS & 1) ^ (group == 0 ? 1 : 0));\n",
        "        ;\n",
    ),
    "a group's turn comes one tile early": (
        "sparse_linear.cu",
        "(turn / CONSUMERS & 1) ^ (group == 0 ? 1 : 0)",
        "(turn / CONSUMERS & 1) ^ 1",
    ),
    "alternating: a group does not skip the other's stages": (
        "sparse_linear.cu",
        "return ring.skip(arguments.k_steps);",
        "return;",
    ),
    "alternating: both blocks of rows read the codes of the first": (
        "sparse_linear.cu",
        "load_word(codes_at + block * GROUP_THREADS * 4)",
        "load_word(codes_at)",
    ),
    "bytes are announced that never come": (
        "sparse_linear.cu",
        "begin_fill(ring, STAGE_BYTES);  // all",
        "begin_fill(ring, STAGE_BYTES + 16);  // all",
    ),
    "a block loads the other's part of x": (
        "sparse_linear.cu",
        "&arguments.x, step * BK, column + part, full",
        "&arguments.x, step * BK, column, full",
    ),
    "a block ends before the others' last arrivals": (
        "sparse_linear.cu",
        "  // Until the others arrive no more at this block's barriers.\n"
        "  if constexpr (CLUSTER > 1) cluster_barrier();\n",
        "",
    ),
}


def toy_map(
    pointer: int,
    dtype: torch.dtype,
    columns: int,
    rows: int,
    row_bytes: int,
    box_rows: int,
    box_bytes: int = tensor_map.SWIZZLE_BYTES,
) -> tensor_map.TensorMap:
    """Return a tensor map as the emulator reads it."""
    assert pointer % 16 == 0 and row_bytes % 16 == 0, "the copy engine refuses such a map"
    words = (pointer, columns, rows, row_bytes, box_bytes // dtype.itemsize, box_rows, dtype.itemsize)
    return tensor_map.TensorMap((ctypes.c_uint64 * 16)(*words))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    warp_emulator.emulate(monkeypatch, tmp_path_factory.getbasetemp(), EMULATOR)
    monkeypatch.setattr(tensor_map, "_encode", toy_map)
    monkeypatch.setattr(linear_cuda, "num_sms", lambda device: 2)


def inputs(point: Point, seed: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Return x, values, metadata and a bias."""
    batch, outputs, k, _, dtype = point
    generator = torch.Generator().manual_seed(seed)
    x, w, bias = (torch.randn(*size, generator=generator) for size in ((batch, k), (outputs, k), (outputs,)))
    values, metadata = ops.prune_2_4(w.to(dtype), impl="eager")
    return tuple(t.to(device) for t in (x.to(dtype), values, metadata, bias.to(dtype)))


def error(point: Point, seed: int) -> float:
    """Return the largest error of a product, in units of what rounding the exact one to the dtype costs."""
    x, values, metadata, bias = inputs(point, seed)
    y = linear_cuda.forward_with(point[3], x, values, metadata, bias)
    exact = x.double() @ pattern.expand(values, metadata).double().t() + bias.double()
    # The second term is for sums in float32 of products that cancel.
    unit = torch.finfo(x.dtype).eps * (exact.abs() + 2e-3 * point[2] ** 0.5)
    return float(((y.double() - exact).abs() / unit).nan_to_num(1e9).max())


needs_compiler = pytest.mark.skipif(
    warp_emulator.COMPILER is None, reason="no g++ to compile the kernel with"
)


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p[0]}x{p[1]}x{p[2]}-{p[3].label}")
def test_products_are_right_in_any_schedule(point: Point, emulated: None) -> None:
    for seed in range(3):  # each launch switches threads in another order
        assert error(point, seed) < 0.6


@needs_compiler
def test_strided_inputs_and_those_without_elements_are_taken(emulated: None) -> None:
    x, values, metadata, bias = inputs((48, 72, 96, NARROW, BF16), 1)
    expected = linear_cuda.linear(x, values, metadata, bias)
    wide = torch.stack((x, x), -1).flatten(1)[:, ::2]
    shifted = torch.cat((values.flatten()[:1], values.flatten()))[1:].view(values.shape)
    assert torch.equal(linear_cuda.linear(wide, shifted, metadata, bias), expected)
    assert torch.equal(linear_cuda.linear(x.view(2, 24, 96), values, metadata, bias).flatten(0, 1), expected)
    assert linear_cuda.linear(x[:0], values, metadata, bias).shape == (0, 72)
    nothing = ops.prune_2_4(values[:, :0], impl="eager")
    assert torch.equal(linear_cuda.linear(x[:, :0], *nothing, bias), bias.expand(48, -1))


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    fault: str, emulated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of kernel and library with one fault gives a wrong product or breaks the emulator's rules."""
    name, old, new = FAULTS[fault]
    copy_with_fault(tmp_path, FOLDER, name, old, new)
    real = linear_cuda.source

    def source(*arguments: Any) -> CudaSource:
        return replace(real(*arguments), file=tmp_path / "sparse_linear.cu")

    monkeypatch.setattr(linear_cuda, "source", source)
    in_cluster = "a block" in fault and "ends before its stores" not in fault
    # Two blocks that each compute one tile, in many schedules; or a block with several tiles.
    point = (128, 256, 80, MIDDLE_PAIR, BF16) if in_cluster else (300, 264, 720, WIDE, BF16)
    if "turn" in fault or "alternat" in fault:
        point = (392, 520, 592, PINGPONG, BF16)
    errors = []
    for seed in range(60 if in_cluster else 6):
        try:
            errors.append(error(point, seed))
        except EmulatorError:
            return
        if errors[-1] >= 0.6:
            return
    pytest.fail(f"not seen: {max(errors)}")


class RepeatedInEmulator(Kernel):
    """A kernel in the emulator with prepared launches; it counts both kinds."""

    def __init__(self, emulated_kernel: Any) -> None:
        self.kernel, self.calls, self.repeats = emulated_kernel, 0, 0

    def __call__(self, grid: Any, block: Any, *arguments: Any, **options: Any) -> None:
        self.calls += 1
        self.kernel(grid, block, *arguments, **options)

    def prepare_structure(self, grid: Any, block: Any, *, shared: int = 0) -> Callable[[int], None]:
        def launch(pointer: int) -> None:
            address = ctypes.c_void_p.from_address(pointer).value
            assert address is not None
            self.repeats += 1
            self.kernel(grid, block, linear_cuda.Arguments.from_address(address), shared=shared)

        return launch


@needs_compiler
def test_a_repeated_call_has_its_own_addresses(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of one kind repeat a launch with other tensors; one whose tensors were copied does not."""
    kernels: list[RepeatedInEmulator] = []
    load = CudaSource.__getitem__

    def repeated(source: CudaSource, name: str) -> RepeatedInEmulator:
        kernels.append(RepeatedInEmulator(load(source, name)))
        return kernels[-1]

    monkeypatch.setattr(CudaSource, "__getitem__", repeated)
    monkeypatch.setattr(linear_cuda, "max_clusters", lambda kernel, config, device: 2 // config.cluster)
    monkeypatch.setattr(linear_cuda, "_REPEATED", linear_cuda.LaunchCache())
    alive = []
    for seed in range(3):
        x, values, metadata, bias = inputs((48, 72, 96, NARROW, BF16), seed)
        y = linear_cuda.linear(x, values, metadata, bias)
        expected = torch.nn.functional.linear(x, pattern.expand(values, metadata), bias)
        assert torch.allclose(y, expected, atol=0.05, rtol=0.02)
        alive += [x, values, metadata, bias, y]
    assert [k.calls for k in kernels] == [1] and kernels[0].repeats == 2
    odd = torch.stack((x, x), -1).flatten(1)[:, ::2]
    for _ in range(2):
        assert torch.allclose(linear_cuda.linear(odd, values, metadata, bias), expected, atol=0.05, rtol=0.02)
    assert [k.calls for k in kernels] == [1, 1, 1] and sum(k.repeats for k in kernels) == 2


def test_the_generated_header_is_current() -> None:
    assert (LIBRARY / "wgmma_sparse_shapes.cuh").read_text() == wgmma_shapes.text_sparse()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", linear_cuda.CANDIDATES, ids=lambda c: c.label)
def test_the_machine_code_has_sparse_products_and_spills_nothing(config: Config) -> None:
    """Two products of each of two steps (and of both blocks of rows), with both selectors; nothing in local
    memory."""
    for dtype in (BF16, FP16):
        text = disassemble.sass(linear_cuda.source(dtype, config).compile("sm_90a"))
        products = re.findall(rf"HGMMA\.SP\.64x{config.columns}x32\.F32[^;]*", text)
        selectors = [re.search(r"0x([01])", p)[1] for p in products]  # type: ignore[index]
        assert sorted(selectors) == sorted("01" * 2 * (2 if config.pingpong else 1)), products
        assert "HGMMA.64x" not in text and not re.search(r"\b(STL|LDL)\b", text)
        assert "STSM.16.MT88.4" in text and config.smem_bytes <= 227 << 10


def test_large_products_share_x_in_clusters_and_short_sums_alternate() -> None:
    assert linear_cuda.choose(8192, 8192, 8192, 132) == PAIR
    assert linear_cuda.choose(16384, 3072, 768, 132) == PINGPONG_PAIR
    assert linear_cuda.choose(16, 4096, 4096, 132).columns == 64


@pytest.mark.parametrize("sizes", [(0, 8, 16), (5, 0, 16), (5, 8, 0), (5, 8, 16)])
def test_gradients_of_each_size_are_those_of_the_dense_layer(sizes: tuple[int, int, int]) -> None:
    batch, outputs, k = sizes
    values, metadata = ops.prune_2_4(torch.randn(outputs, k), impl="eager")
    grad, gradients = torch.randn(batch, outputs), []
    leaves = [t.requires_grad_() for t in (torch.randn(batch, k), values, torch.randn(outputs))]
    for impl in ("eager", "triton"):
        x, v, b = leaves
        gradients.append(torch.autograd.grad(ops.sparse_linear(x, v, metadata, b, impl=impl), leaves, grad))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "sizes",
    [(1, 8, 16), (64, 128, 64), (300, 264, 720), (1000, 1016, 1040), (4096, 4096, 4096), (16384, 3072, 768)],
    ids=lambda s: "x".join(map(str, s)),
)
def test_the_kernels_are_right_on_a_gpu(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Compare every configuration with expansion and a product in float64, and with another launch."""
    point = (*sizes, WIDE, dtype)
    x, values, metadata, bias = inputs(point, 1, "cuda")  # type: ignore[arg-type]
    weight = ops.expand_2_4(values, metadata, impl="cuda")
    assert torch.equal(weight, pattern.expand(values, metadata))
    exact = x.double() @ weight.double().t() + bias.double()
    # The tensor cores add in float32 and cut its last bits off: the second term.
    unit = torch.finfo(dtype).eps * exact.abs() + 2**-20 * sizes[2]
    for config in linear_cuda.CANDIDATES:
        y = linear_cuda.forward_with(config, x, values, metadata, bias)
        assert float(((y.double() - exact).abs() / unit).nan_to_num(1e9).max()) < 0.6, config.label
        assert torch.equal(y, linear_cuda.forward_with(config, x, values, metadata, bias)), config.label


@pytest.mark.gpu
def test_pruning_on_a_gpu_gives_the_bits_of_the_cpu() -> None:
    for dtype in (torch.float32, BF16, FP16):
        for shape in ((1000, 1016), (132, 148), (1024, 2048)):
            w = torch.randn(shape, device="cuda").to(dtype)
            for name in ("prune_2_4", "prune_2_4_transposable"):
                outputs = getattr(ops, name)(w, impl="cuda")
                expected = getattr(ops, name)(w.cpu(), impl="eager")
                assert all(torch.equal(a.cpu(), b) for a, b in zip(outputs, expected, strict=True))
