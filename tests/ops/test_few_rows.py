"""Products of few rows with the bits of many (few_rows.py), in the emulator; planted faults are seen."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import warp_emulator
from helpers.paths import SRC, TESTS
from helpers.warp_emulator import EmulatorError, copy_with_fault
from weft.backends import cubin, disassemble
from weft.backends.nvrtc import CudaSource
from weft.ops._common.hopper import tensor_map, wgmma_shapes
from weft.ops._common.products import few_rows, invariant, skinny, wgmma
from weft.ops._common.products.few_rows import Config
from weft.ops._common.products.wgmma_model import Epilogue
from weft.ops.linear import with_cuda as linear_cuda
from weft.ops.matmul import with_cuda as matmul_cuda

EMULATOR = TESTS / "helpers" / "hopper_emulator.hpp"
LIBRARY = SRC / "weft/ops/_common/hopper"
BF16, FP16 = torch.bfloat16, torch.float16
ONE = Config(columns=32, a_rows=8)
PAIR = Config(columns=32, a_rows=64, cluster=2)
# m, n, k, configuration, dtype, epilogue. With four SMs some blocks compute several tiles.
POINTS = [
    (1, 8, 8, replace(ONE, k_blocks=1), BF16, Epilogue.PLAIN),
    (1, 104, 1032, replace(ONE, k_blocks=1), BF16, Epilogue.PLAIN),  # an odd number of blocks of K
    (7, 200, 256, Config(columns=48, a_rows=8), FP16, Epilogue.BIAS),
    (16, 136, 2304, Config(columns=16, a_rows=16), BF16, Epilogue.GELU_PRE),  # more steps than stages
    (33, 136, 640, Config(columns=64, a_rows=64), BF16, Epilogue.RESIDUAL),
    (64, 136, 1408, PAIR, BF16, Epilogue.PLAIN),
    (50, 72, 384, PAIR, FP16, Epilogue.GELU),
    (64, 40, 200, Config(columns=16, a_rows=64, cluster=4, k_blocks=1), BF16, Epilogue.PLAIN),
    (20, 464, 320, Config(columns=224, a_rows=32, k_blocks=1, cluster=2), BF16, Epilogue.BIAS),
    (3, 264, 712, Config(columns=112, a_rows=8, k_blocks=1), BF16, Epilogue.RESIDUAL),
]
# name: file, the text that is replaced, and by what
FAULTS = {
    "a stage is released while products read it": (
        "few_rows.cu",
        "    wgmma_wait<1>();\n    if (previous >= 0 && threadIdx.x % 32 == 0) "
        "pipeline.release_in_cluster<CLUSTER>(previous);\n",
        "    if (threadIdx.x % 32 == 0) pipeline.release_in_cluster<CLUSTER>(ring.stage);\n",
    ),
    "products are not waited for": (
        "few_rows.cu",
        "  wgmma_wait<0>();\n  if (threadIdx.x % 32 == 0)",
        "  if (threadIdx.x % 32 == 0)",
    ),
    "no fence before the first product": (
        "few_rows.cu",
        "    pipeline.wait_full(ring);\n    wgmma_fence();\n",
        "    pipeline.wait_full(ring);\n",
    ),
    "a stage is not waited for": (
        "few_rows.cu",
        "    pipeline.wait_full(ring);\n    wgmma_fence();\n",
        "    wgmma_fence();\n",
    ),
    "bytes of rows are announced that are not loaded": (
        "few_rows.cu",
        "K_BLOCKS * (A_ROWS * 128 + B_BYTES)",
        "K_BLOCKS * (64 * 128 + B_BYTES)",
    ),
    "sums begin with those of the tile before": ("few_rows.cu", "step > 0 || k > 0", "true"),
    "a block of K is read twice": (
        "few_rows.cu",
        "k / 4 * BLOCK_OF_K_BYTES + k % 4",
        "k % 4",
    ),
    "a block loads another's rows": (
        "few_rows.cu",
        "&arguments.a, k, rank * SHARE_ROWS, full,",
        "&arguments.a, k, 0, full,",
    ),
    "the blocks of a cluster compute the same tile": (
        "few_rows.cu",
        "const int column = (tile * CLUSTER + rank) * BN;",
        "const int column = tile * CLUSTER * BN;",
    ),
    "too few arrivals free a stage": ("few_rows.cu", "pipeline.init(4 * CLUSTER)", "pipeline.init(4)"),
    "the last row is not stored": ("few_rows.cu", "row >= arguments.rows ||", "row >= arguments.rows - 1 ||"),
    "the last columns are not stored": (
        "few_rows.cu",
        "column >= arguments.columns)",
        "column >= arguments.columns - 8)",
    ),
    "a block ends before the others' last arrivals": (
        "few_rows.cu",
        "  // Until the others arrive no more at this block's barriers.\n"
        "  if constexpr (CLUSTER > 1) cluster_barrier();\n",
        "",
    ),
    "a block copies before the other's barriers exist": (
        "few_rows.cu",
        "  if constexpr (CLUSTER > 1) cluster_barrier();  // another",
        "  if constexpr (CLUSTER > 1) __syncthreads();  // another",
    ),
}
OF_ONE_BLOCK = (
    "sums begin with those of the tile before",
    "a block of K is read twice",
    "bytes of rows are announced that are not loaded",
)
OF_TWO_BLOCKS_AT_ONCE = (
    "a block ends before the others' last arrivals",
    "a block copies before the other's barriers exist",
)
needs_compiler = pytest.mark.skipif(
    warp_emulator.COMPILER is None, reason="no g++ to compile the kernel with"
)


def toy_map(
    pointer: int, dtype: torch.dtype, columns: int, rows: int, row_bytes: int, box_rows: int
) -> tensor_map.TensorMap:
    """Return a tensor map as the emulator reads it."""
    assert pointer % 16 == 0 and row_bytes % 16 == 0, "the copy engine refuses such a map"
    box = tensor_map.SWIZZLE_BYTES // dtype.itemsize
    words = (pointer, columns, rows, row_bytes, box, box_rows, dtype.itemsize)
    return tensor_map.TensorMap((ctypes.c_uint64 * 16)(*words))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    warp_emulator.emulate(monkeypatch, tmp_path_factory.getbasetemp(), EMULATOR)
    monkeypatch.setattr(tensor_map, "_encode", toy_map)
    monkeypatch.setattr(wgmma, "num_sms", lambda device: 2)
    monkeypatch.setattr(few_rows, "num_sms", lambda device: 4)


def differing(point: tuple[Any, ...], seed: int, device: str = "cpu") -> int:
    """Return how many elements have other bits than the same rows of a product of 130 rows by wgmma.py."""
    m, n, k, config, dtype, epilogue = point
    generator = torch.Generator().manual_seed(seed)
    a, w, bias, residual = (
        torch.randn(*size, generator=generator).to(device, dtype)
        for size in ((130, k), (n, k), (n,), (130, n))
    )
    added = None if epilogue == Epilogue.PLAIN else bias
    second = residual if epilogue == Epilogue.RESIDUAL else None
    few = few_rows.forward_with(
        config, a[:m], w.t(), epilogue, added, second if second is None else second[:m]
    )
    many = wgmma.forward_with(wgmma.CANDIDATES[3], a, w.t(), 1, epilogue, added, second)
    if epilogue != Epilogue.GELU_PRE:
        few, many = (few,), (many,)
    return sum(
        int((x.view(torch.int16) != y[:m].view(torch.int16)).sum()) for x, y in zip(few, many, strict=True)
    )


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "point", POINTS, ids=lambda p: f"{p[0]}x{p[1]}x{p[2]}-{p[3].label}-{p[5].name.lower()}"
)
def test_rows_have_the_bits_of_a_large_product_in_any_schedule(
    point: tuple[Any, ...], emulated: None
) -> None:
    for seed in range(2):  # each launch switches threads in another order
        assert differing(point, seed) == 0


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    fault: str, emulated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of kernel and library with one fault gives other bits or breaks the emulator's rules."""
    name, old, new = FAULTS[fault]
    copy_with_fault(tmp_path, SRC / "weft/ops/_common/products", name, old, new)
    real = few_rows.source
    monkeypatch.setattr(
        few_rows, "source", lambda *arguments: replace(real(*arguments), file=tmp_path / "few_rows.cu")
    )
    point = POINTS[3] if fault in OF_ONE_BLOCK else (64, 264, 1408, PAIR, BF16, Epilogue.PLAIN)
    if fault in OF_TWO_BLOCKS_AT_ONCE:  # a block computes one tile: nothing else keeps the blocks together
        point = (64, 64, 128, PAIR, BF16, Epilogue.PLAIN)
    for seed in range(40 if fault in OF_TWO_BLOCKS_AT_ONCE else 6):
        try:
            if differing(point, seed):
                return
        except EmulatorError:
            return
    pytest.fail("the fault changes nothing")


def test_the_choice_reads_the_weight_by_all_sms_once() -> None:
    """Tiles of a Llama 8B's weights are one wave of nearly all of 132 SMs."""
    for n, k, columns in ((6144, 4096, 48), (4096, 14336, 32), (28672, 4096, 224), (2048, 2048, 16)):
        for m in (1, 64) if n > 2048 else (1,):
            config = few_rows.choose(m, n, k, 132)
            assert (config.columns, config.cluster) == (columns, 1), (n, config)
    assert few_rows.choose(1, 4096, 1032, 132).k_blocks == 1  # no empty block of K


def test_few_rows_are_taken_where_both_operands_are_k_major(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.zeros(64, 72, dtype=BF16), torch.zeros(40, 72, dtype=BF16)
    assert few_rows.supports(x, w.t()) and few_rows.supports(x[:1], w.t())
    assert not few_rows.supports(torch.zeros(65, 72, dtype=BF16), w.t())
    assert not few_rows.supports(x, torch.zeros(72, 40, dtype=BF16))
    called = []
    for module in (few_rows, wgmma):
        monkeypatch.setattr(module, "forward", lambda *a, module=module, **k: called.append(module))
    invariant.forward(x, w.t())
    invariant.forward(x, torch.zeros(72, 40, dtype=BF16))
    assert called == [few_rows, wgmma]


def test_weights_of_too_few_columns_are_left_to_the_division_of_k() -> None:
    """A Llama 8B's and GPT-2's weights are read fastest in one chain; 1024 columns of 14336 are not."""
    llama = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
    gpt2 = ((2304, 768), (768, 768), (3072, 768), (768, 3072), (50304, 768))
    assert all(few_rows.is_faster_than_skinny(*weight, 132) for weight in (*llama, *gpt2))
    assert not any(
        few_rows.is_faster_than_skinny(n, k, 132) for n, k in ((1024, 14336), (512, 4096), (64, 4096))
    )


@needs_compiler
def test_operators_compute_few_rows_and_their_epilogues_by_one_kernel(
    emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pass and no other product: x has three dimensions, the bias is not aligned, the residual has gaps.

    Without wgmma, or with a weight across K, skinny.py is asked.
    """
    monkeypatch.setattr(few_rows, "has_wgmma", lambda device: True)
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 72).bfloat16(), torch.randn(136, 72).bfloat16()
    bias, residual = torch.randn(137).bfloat16()[1:], torch.randn(5, 3, 144).bfloat16()[..., :136]
    rows = x.view(15, 72)
    asked = []
    for module in (skinny, wgmma, linear_cuda):
        name = "epilogue" if module is linear_cuda else "forward"
        monkeypatch.setattr(module, name, lambda *a, module=module, **k: asked.append(module))
    plain = x.double() @ weight.double().t()
    sums = plain + bias.double()
    gelu = torch.nn.functional.gelu(sums, approximate="tanh")
    y, pre = linear_cuda.linear_gelu_forward(x, weight, bias)
    for got, expected in (
        (matmul_cuda.forward(rows, weight.t()), plain.view(15, 136)),
        (linear_cuda.multiply(rows, weight.t()), plain.view(15, 136)),
        (linear_cuda.linear_forward(x, weight, bias), sums),
        (linear_cuda.linear_residual_forward(x, weight, bias, residual), sums + residual.double()),
        (linear_cuda.linear_gelu_forward(x, weight, bias, keep=False), gelu),
        (y, gelu),
        (pre, sums),
    ):
        torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=1e-3)
    assert asked == []
    matmul_cuda.forward(rows, weight.t().contiguous())
    monkeypatch.setattr(few_rows, "has_wgmma", lambda device: False)
    matmul_cuda.forward(rows, weight.t())
    assert asked == [skinny, skinny]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("source", few_rows.aot_kernels(), ids=lambda s: s.label)
def test_no_program_spills_registers(source: CudaSource) -> None:
    sass = disassemble.sass(source.compile("sm_90a"))
    assert "HGMMA" in sass
    assert not re.search(r"\b(STL|LDL)\b", sass)


@pytest.mark.parametrize(
    "source",
    [
        few_rows.source(BF16, PAIR, Epilogue.RESIDUAL),
        wgmma.source(BF16, wgmma.CANDIDATES[0], True, True, False, Epilogue.RESIDUAL),
    ],
    ids=lambda s: s.label,
)
def test_a_product_that_overlaps_waits_before_it_reads(source: CudaSource) -> None:
    """The kernel before it may still write the operands, the bias and the residual."""
    pytest.importorskip("cuda.bindings")
    text = cubin.ptx(source.compile("sm_90a"))
    wait = text.index("griddepcontrol.wait")
    loads = ("cp.async.bulk.tensor.2d.shared", "ld.global")
    assert all(wait < text.index(load) for load in loads if load in text)
    assert loads[0] in text and "ld.global.nc" not in text


def test_the_generated_shapes_are_current() -> None:
    assert (LIBRARY / "wgmma_narrow_shapes.cuh").read_text() == wgmma_shapes.text_narrow()


@pytest.mark.gpu
@pytest.mark.parametrize("columns", few_rows.WIDTHS)
@pytest.mark.parametrize("epilogue", list(Epilogue)[:5], ids=lambda e: e.name.lower())
def test_rows_have_the_bits_of_a_large_product_on_a_gpu(epilogue: Epilogue, columns: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these products need wgmma, compute capability 9.0")
    for a_rows in few_rows.BOXES:
        for cluster in (c for c in (1, 2, 4) if a_rows // c >= 8):
            for k, k_blocks in ((4096, 2), (4096, 1), (1032, 1)):
                config = Config(columns=columns, a_rows=a_rows, k_blocks=k_blocks, cluster=cluster)
                if config.stages < 2:
                    continue
                point = (a_rows - 3, 2056, k, config, BF16, epilogue)
                assert differing(point, columns, "cuda") == 0, config
