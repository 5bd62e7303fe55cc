"""The wgmma product in the emulator: orders of operands, edges, schedules; planted faults are seen."""

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
from weft.backends import disassemble
from weft.backends.nvrtc import CudaSource
from weft.ops._common.hopper import tensor_map, wgmma_shapes
from weft.ops._common.products import align, wgmma

EMULATOR = TESTS / "helpers" / "hopper_emulator.hpp"
LIBRARY = SRC / "weft/ops/_common/hopper"
PAIR, WIDE, ODD, MIDDLE, NARROW, MIDDLE_PAIR = wgmma.CANDIDATES[:6]  # PAIR: two blocks in a cluster
NARROW_PAIR, PINGPONG, PINGPONG_PAIR, PINGPONG_WIDE = wgmma.CANDIDATES[6:10]
SMALL_WIDE, SMALL, TALL, TALL_NARROW = wgmma.CANDIDATES[10:]  # tiles of 64 and 192 rows
PINGPONG_WIDE_PAIR = replace(PINGPONG_WIDE, cluster=2, share_a=True)
BIAS, GELU, GELU_PRE, RESIDUAL = list(wgmma.Epilogue)[1:5]
BF16, FP16 = torch.bfloat16, torch.float16
# m, n, k, configuration, dtype, and whether a and b are stored with K as the contiguous dimension. The block
# has 128 rows and takes 64 of K; with two SMs each block computes several tiles.
POINTS = [
    (128, 64, 64, NARROW, BF16, True, False),
    (1, 8, 8, NARROW, BF16, True, False),
    (130, 136, 200, MIDDLE, BF16, True, False),
    (300, 264, 712, WIDE, BF16, True, True),
    (72, 200, 72, MIDDLE, FP16, False, True),
    (264, 392, 136, ODD, FP16, False, False),
    (1030, 72, 264, NARROW, BF16, True, True),
    (300, 264, 712, PAIR, BF16, True, True),
    (520, 264, 200, PAIR, BF16, True, False),
    (300, 264, 200, MIDDLE_PAIR, BF16, True, False),
    (300, 264, 200, NARROW_PAIR, BF16, True, True),
    (264, 136, 712, NARROW_PAIR, BF16, False, False),
    # The groups take tiles alternately: fewer and more steps of K than stages, an odd number of tiles.
    (300, 136, 64, PINGPONG, BF16, True, True),
    (392, 264, 264, PINGPONG, BF16, True, True),
    (136, 392, 968, PINGPONG, BF16, False, False),
    (520, 264, 456, PINGPONG_PAIR, BF16, True, False),
    (392, 392, 328, PINGPONG_WIDE, BF16, True, True),
    (264, 776, 328, PINGPONG_WIDE_PAIR, BF16, True, False),
    (520, 392, 264, replace(PAIR, band=1), BF16, True, True),
    # One group a block, two blocks an SM.
    (200, 264, 456, SMALL, BF16, True, True),
    (72, 136, 72, SMALL, FP16, False, False),
    (330, 264, 328, SMALL_WIDE, BF16, True, False),
    (400, 264, 328, TALL, BF16, True, True),
    (264, 264, 264, TALL_NARROW, BF16, False, False),
]
# m, n, k, configuration, dtype, epilogue, parts of K.
EPILOGUE_POINTS = [
    (300, 264, 200, WIDE, BF16, BIAS, 1),
    (300, 264, 200, WIDE, BF16, GELU_PRE, 1),
    (300, 264, 200, WIDE, BF16, RESIDUAL, 1),
    (136, 200, 72, ODD, FP16, GELU, 1),
    (136, 392, 136, ODD, BF16, RESIDUAL, 1),
    (136, 136, 456, MIDDLE, FP16, GELU_PRE, 1),
    (136, 136, 200, NARROW, FP16, RESIDUAL, 1),
    (300, 136, 200, NARROW_PAIR, BF16, GELU, 1),
    (392, 264, 264, PINGPONG, BF16, GELU, 1),
    (392, 264, 264, PINGPONG, BF16, GELU_PRE, 1),
    (392, 264, 264, PINGPONG, BF16, RESIDUAL, 1),
    (520, 264, 200, PINGPONG_PAIR, BF16, BIAS, 1),
    (264, 392, 328, PINGPONG_WIDE, BF16, GELU_PRE, 1),
    (200, 136, 200, SMALL, BF16, GELU_PRE, 1),
    (136, 264, 264, SMALL_WIDE, BF16, RESIDUAL, 1),
    (72, 264, 712, WIDE, BF16, BIAS, 3),
    (72, 264, 712, WIDE, BF16, GELU, 3),
    (72, 264, 712, WIDE, FP16, GELU_PRE, 3),
    (72, 264, 712, WIDE, BF16, RESIDUAL, 3),
    (300, 520, 456, WIDE, BF16, RESIDUAL, 2),
]
# The same, and the number of parts of K: an even and an uneven share of the steps, and more parts than steps.
SPLIT_POINTS = [
    ((136, 136, 512, MIDDLE, BF16, True, False), 4),
    ((72, 264, 712, WIDE, BF16, False, False), 3),
    ((300, 72, 200, NARROW, FP16, True, True), 8),
    ((264, 392, 392, ODD, BF16, True, True), 2),
    ((300, 264, 712, PAIR, BF16, True, True), 3),
    ((392, 392, 328, PINGPONG_WIDE, BF16, True, True), 2),
    ((136, 72, 456, SMALL, BF16, True, True), 3),
    ((72, 136, 40, NARROW, BF16, True, True), 3),  # one step: nothing to divide
]
SPLIT_SMS = 7  # with which some tiles of each of these points are divided, and others are whole or not there
# name: file, the text that is replaced, and by what
FAULTS = {
    "no proxy fence before a store": ("output.cuh", "      fence_async_proxy();\n", ""),
    "a stage is released while products read it": (
        "wgmma.cu",
        "    wgmma_wait<1>();\n"
        "    if (previous >= 0) release(pipeline, previous, step - 1 + STAGES < k_steps);\n",
        "    release(pipeline, ring.stage, true);\n",
    ),
    "a producer waits for the wrong phase": ("barrier.cuh", "position.parity ^ 1", "position.parity"),
    "a consumer waits for the wrong phase": (
        "barrier.cuh",
        "wait(full(position.stage), position.parity)",
        "wait(full(position.stage), position.parity ^ 1)",
    ),
    "products are not waited for": (
        "wgmma.cu",
        "  wgmma_wait<0>();\n  release(pipeline, previous",
        "  release(pipeline, previous",
    ),
    "accumulators are used before a wait": (
        "wgmma.cu",
        "    wgmma_commit();\n    // The products of this step",
        "    wgmma_commit();\n    sums[0][0] += 1.0f;\n    // The products of this step",
    ),
    "no fence before the first product": (
        "wgmma.cu",
        "    pipeline.wait_full(ring);\n    wgmma_fence();\n",
        "    pipeline.wait_full(ring);\n",
    ),
    "a buffer is overwritten while it is stored": (
        "output.cuh",
        "    if (is_issuer()) tma_wait_read<0>();\n",
        "",
    ),
    "no barrier between the writes and the store": (
        "output.cuh",
        "      fence_async_proxy();\n      named_barrier(1 + group, GROUP_THREADS);\n",
        "      fence_async_proxy();\n",
    ),
    "the block ends before its stores": (
        "wgmma.cu",
        "    if (output.is_issuer()) tma_wait_read<0>();",
        "    //",
    ),
    "groups that alternate do not wait for their turn": (
        "wgmma.cu",
        "        wait(stages + TURNS_AT + group * 8, (turn / CONSUMERS & 1) ^ (group == 0 ? 1 : 0));\n",
        "        ;\n",
    ),
    "a group's turn comes one tile early": (
        "wgmma.cu",
        "(turn / CONSUMERS & 1) ^ (group == 0 ? 1 : 0)",
        "(turn / CONSUMERS & 1) ^ 1",
    ),
    "a group does not skip the other's stages": (
        "wgmma.cu",
        "return ring.skip(unit.end - unit.first);",
        "return;",
    ),
    "a residual comes while the buffer is stored": (
        "output.cuh",
        "    if (!is_issuer()) return;\n    tma_wait_read<0>();\n",
        "    if (!is_issuer()) return;\n",
    ),
    "a residual is not waited for": ("output.cuh", "      wait(barrier, residual_parity);\n", ""),
    "a residual's parity stays": ("output.cuh", "      residual_parity ^= 1;\n", ""),
    "too few arrivals free a stage": (
        "wgmma.cu",
        "pipeline.init((PINGPONG ? 1 : CONSUMERS) * 4 * SHARERS)",
        "pipeline.init(4)",
    ),
    "a block frees only its own stages": (
        "barrier.cuh",
        "mbarrier_arrive_at(empty(stage), first + rank);",
        "mbarrier_arrive(empty(stage));",
    ),
    "a block ends before the others' last arrivals": (
        "wgmma.cu",
        "  // Until the others arrive no more at this block's barriers.\n"
        "  if constexpr (CLUSTER > 1 && K_PARTS == 1) cluster_barrier();\n",
        "",
    ),
    "a block copies before the other's barriers exist": (
        "wgmma.cu",
        "  if constexpr (CLUSTER > 1) cluster_barrier();  // another",
        "  if constexpr (CLUSTER > 1) __syncthreads();  // another",
    ),
    "a part of K ends one step early": (
        "wgmma.cu",
        "(int)((long long)k_steps * (split + 1) / splits);",
        "(int)((long long)k_steps * (split + 1) / splits) - 1;",
    ),
    "the last part of K is not added": (
        "wgmma.cu",
        "split < arguments.splits; ++split",
        "split < arguments.splits - 1; ++split",
    ),
    "bytes are announced that never come": (
        "wgmma.cu",
        "begin_fill(ring, STAGE_BYTES);  // all",
        "begin_fill(ring, STAGE_BYTES + 16);  // all",
    ),
    "a descriptor with the wrong stride": (
        "wgmma.cuh",
        "(unsigned long long)(ATOM_BYTES >> 4) << 32",
        "(unsigned long long)(ATOM_BYTES >> 5) << 32",
    ),
}


def toy_map(
    pointer: int, dtype: torch.dtype, columns: int, rows: int, row_bytes: int, box_rows: int
) -> tensor_map.TensorMap:
    """Return a tensor map as the emulator reads it."""
    assert pointer % 16 == 0 and row_bytes % 16 == 0, "the copy engine refuses such a map"
    words = (
        pointer,
        columns,
        rows,
        row_bytes,
        tensor_map.SWIZZLE_BYTES // dtype.itemsize,
        box_rows,
        dtype.itemsize,
    )
    return tensor_map.TensorMap((ctypes.c_uint64 * 16)(*words))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    warp_emulator.emulate(monkeypatch, tmp_path_factory.getbasetemp(), EMULATOR)
    monkeypatch.setattr(tensor_map, "_encode", toy_map)
    monkeypatch.setattr(wgmma, "num_sms", lambda device: 2)


def product(
    point: tuple[int, int, int, object, torch.dtype, bool, bool], seed: int, splits: int = 1
) -> float:
    """Return the largest error of a product, in units of what rounding the exact one to the dtype costs."""
    m, n, k, config, dtype, a_is_k_major, b_is_k_major = point
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn((m, k) if a_is_k_major else (k, m), generator=generator).to(dtype)
    b = torch.randn((n, k) if b_is_k_major else (k, n), generator=generator).to(dtype)
    a, b = a if a_is_k_major else a.t(), b.t() if b_is_k_major else b
    assert wgmma.supports(a, b)
    exact = a.double() @ b.double()
    unit = torch.finfo(dtype).eps * (exact.abs() + 1e-3 * k**0.5)
    return float(
        ((wgmma.forward_with(config, a, b, splits).double() - exact).abs() / unit).nan_to_num(1e9).max()
    )


def epilogue_errors(point: tuple[Any, ...], seed: int, device: str = "cpu") -> list[float]:
    """Return the largest error of each output of a product with an epilogue, in the same units."""
    m, n, k, config, dtype, epilogue, splits = point
    generator = torch.Generator().manual_seed(seed)
    a, w, bias, residual = (
        torch.randn(*size, generator=generator).to(device, dtype) for size in ((m, k), (n, k), (n,), (m, n))
    )
    second = residual if epilogue == RESIDUAL else None
    outputs = wgmma.forward_with(config, a, w.t(), splits, epilogue, bias, second)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sums = a.double() @ w.double().t() + bias.double()
    expected = [sums + residual.double() if epilogue == RESIDUAL else sums]
    if epilogue in (GELU, GELU_PRE):
        expected.insert(0, torch.nn.functional.gelu(sums, approximate="tanh"))
    errors = []
    for y, exact in zip(outputs, expected[: len(outputs)], strict=True):
        # On a GPU the second term is wider: the tensor cores add in float32 and cut its last bits off. cuBLAS
        # has the same errors to the last bit.
        least = 2**-20 * k if device == "cuda" else torch.finfo(dtype).eps * 1e-3 * k**0.5
        unit = torch.finfo(dtype).eps * exact.abs() + least
        errors.append(float(((y.double() - exact).abs() / unit).nan_to_num(1e9).max()))
    return errors


needs_compiler = pytest.mark.skipif(
    warp_emulator.COMPILER is None, reason="no g++ to compile the kernel with"
)


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p[0]}x{p[1]}x{p[2]}-{p[3].label}-{p[5]:d}{p[6]:d}")
def test_products_are_right_in_any_schedule(point: tuple[object, ...], emulated: None) -> None:
    for seed in range(3):  # each launch switches threads in another order
        assert product(point, seed) < 0.6  # type: ignore[arg-type]


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("point", "splits"), SPLIT_POINTS, ids=lambda p: f"{p[0]}x{p[1]}x{p[2]}" if isinstance(p, tuple) else None
)
def test_a_divided_k_gives_the_same_product(
    point: tuple[object, ...], splits: int, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wgmma, "num_sms", lambda device: SPLIT_SMS)
    for seed in range(2):
        assert product(point, seed, splits) < 0.6  # type: ignore[arg-type]


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "point", EPILOGUE_POINTS, ids=lambda p: f"{p[0]}x{p[1]}x{p[2]}-{p[3].label}-{p[5].name.lower()}-{p[6]}"
)
def test_epilogues_are_right_in_any_schedule(
    point: tuple[Any, ...], emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if point[-1] > 1:
        monkeypatch.setattr(wgmma, "num_sms", lambda device: SPLIT_SMS)
    for seed in range(3):
        assert max(epilogue_errors(point, seed)) < 0.6


# m, n, k, configuration, parts of K, and whether a and b are contiguous along K. Rows of a, b or c are no
# multiple of 16 bytes: all of them, c alone, a or b alone.
ANY_POINTS = [
    (130, 131, 197, MIDDLE, 1, True, True),
    (131, 261, 193, WIDE, 1, False, False),
    (300, 133, 200, PAIR, 1, True, True),
    (300, 264, 203, PAIR, 1, True, False),
    (392, 391, 331, PINGPONG_WIDE, 1, True, False),
    (77, 129, 1, MIDDLE, 1, True, False),
    (75, 133, 712, MIDDLE, 3, True, False),
    (77, 134, 709, WIDE, 3, False, True),
]


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("point", ANY_POINTS, ids=lambda p: "x".join(map(str, p[:3])))
def test_rows_of_any_alignment(
    point: tuple[Any, ...], emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wgmma, "num_sms", lambda device: SPLIT_SMS if point[4] > 1 else 2)
    m, n, k, config, splits, *orders = point
    for seed, dtype in enumerate((BF16, FP16)):
        assert product((m, n, k, config, dtype, *orders), seed, splits) < 0.6


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("epilogue", [BIAS, GELU_PRE, RESIDUAL], ids=lambda e: e.name.lower())
@pytest.mark.parametrize("splits", [1, 3])
def test_epilogues_of_rows_of_any_alignment(
    epilogue: Any, splits: int, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wgmma, "num_sms", lambda device: SPLIT_SMS if splits > 1 else 2)
    for seed, config in enumerate((WIDE, PINGPONG_WIDE) if splits == 1 else (WIDE,)):
        assert max(epilogue_errors((139, 265, 197, config, BF16, epilogue, splits), seed)) < 0.6


@needs_compiler
def test_operands_that_begin_anywhere(emulated: None) -> None:
    """Views that begin between multiples of 16 bytes, at the end of their memory; nothing else is written."""
    m, n, k = 130, 136, 72
    memory_a, memory_b = torch.randn(m * 77 + 3).to(BF16), torch.randn(n * k + 1).to(BF16)
    before = memory_a.clone(), memory_b.clone()
    a, b = memory_a[3:].view(m, 77)[:, 5:], memory_b[1:].view(k, n)
    exact = a.double() @ b.double()
    unit = torch.finfo(BF16).eps * (exact.abs() + 1e-3 * k**0.5)
    assert float(((wgmma.forward_with(WIDE, a, b).double() - exact).abs() / unit).max()) < 0.6
    assert torch.equal(memory_a, before[0]) and torch.equal(memory_b, before[1])


@needs_compiler
def test_an_aligned_copy_has_zeros_behind_its_rows(emulated: None) -> None:
    for rows, columns, pitch, first in (
        (3, 13, 13, 0),
        (700, 5, 9, 3),
        (5, 8200, 8201, 1),
        (2, 8, 8, 0),
        (1, 1, 1, 7),
    ):
        memory = torch.randn(first + (rows - 1) * pitch + columns).to(BF16)
        x = memory[first:].as_strided((rows, columns), (pitch, 1))
        for view in (x, x.t()):
            y = align.with_aligned_rows(view)
            assert torch.equal(y, view)
            y_rows = y if y.shape == x.shape and y.stride(1) == 1 else y.t()
            whole = y_rows.as_strided((rows, -(-columns // 8) * 8), y_rows.stride())
            assert y_rows.stride(0) % 8 == 0 and y.data_ptr() % 16 == 0
            assert (whole[:, columns:] == 0).all()


@needs_compiler
def test_a_divided_k_gives_the_same_bits_twice(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma, "num_sms", lambda device: 4)
    a, b = torch.randn(136, 456).to(BF16), torch.randn(456, 136).to(BF16)
    runs = [wgmma.forward_with(NARROW, a, b, 3) for _ in range(4)]  # each in another schedule
    assert all(torch.equal(c, runs[0]) for c in runs)


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    fault: str, emulated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of kernel and library with one fault gives a wrong product or breaks the emulator's rules."""
    name, old, new = FAULTS[fault]
    copy_with_fault(tmp_path, SRC / "weft/ops/_common/products", name, old, new)
    real = wgmma.source

    def source(*arguments: object) -> CudaSource:
        return replace(real(*arguments), file=tmp_path / "wgmma.cu")

    monkeypatch.setattr(wgmma, "source", source)
    errors = []
    for seed in range(40 if fault.startswith("a block") else 6):
        try:
            if fault.startswith("a residual"):
                errors += epilogue_errors((300, 264, 200, WIDE, BF16, RESIDUAL, 1), seed)
            elif fault.startswith("a block"):  # two blocks that each compute one tile, in many schedules
                errors.append(product((256, 256, 264, PAIR, BF16, True, True), seed))
            elif "group" in fault:
                errors.append(product((520, 264, 968, PINGPONG, BF16, True, True), seed))
            else:  # a block computes several tiles
                parts = 3 if "part of K" in fault else 1
                sms = 4 if parts > 1 else 2  # four whole tiles, and two that are divided
                monkeypatch.setattr(wgmma, "num_sms", lambda device, sms=sms: sms)
                errors.append(product((300, 264, 712, WIDE, BF16, True, True), seed, parts))
        except EmulatorError:
            return
    assert max(errors) > 2


def test_the_main_loop_of_a_cluster_has_no_fence_of_the_whole_gpu() -> None:
    """The only two fences are those of the cluster barriers at the kernel's beginning and end.

    An arrival at another block's barrier with the scope of the cluster compiles to one in each step.
    """
    sass = disassemble.sass(wgmma.source(BF16, PAIR, True, False).compile("sm_90a"))
    assert "SYNCS.ARRIVE.TRANS64.RED" in sass
    assert sass.count("MEMBAR.ALL.GPU") == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "source",
    [
        s
        for s in wgmma.aot_kernels()
        if "wgmma-float16" not in s.label and not s.label.startswith(("transpose", "align"))
    ],
    ids=lambda s: s.label,
)
def test_no_program_spills_registers(source: CudaSource) -> None:
    sass = disassemble.sass(source.compile("sm_90a"))
    assert "HGMMA" in sass
    assert not re.search(r"\b(STL|LDL)\b", sass)


def test_the_generated_shapes_are_current() -> None:
    assert (LIBRARY / "wgmma_shapes.cuh").read_text() == wgmma_shapes.text()
    assert (LIBRARY / "wgmma_tf32_shapes.cuh").read_text() == wgmma_shapes.text_tf32()
    assert (LIBRARY / "wgmma_register_shapes.cuh").read_text() == wgmma_shapes.text_registers()
    assert (LIBRARY / "wgmma_pixel_shapes.cuh").read_text() == wgmma_shapes.text_pixels()


def test_every_configuration_fits_in_shared_memory() -> None:
    assert all(config.smem_bytes <= 227 << 10 for config in wgmma.CANDIDATES)


def test_operands_that_the_copy_engine_cannot_read_are_copied() -> None:
    a, b = torch.zeros(64, 72, dtype=BF16), torch.zeros(72, 80, dtype=BF16)
    assert wgmma.supports(a, b) and wgmma.supports(a.t().contiguous().t(), b)
    assert not wgmma.supports(a.float(), b.float())
    assert wgmma.supports(a.float(), b.float(), "tf32")

    def copies(a: torch.Tensor, b: torch.Tensor) -> tuple[bool, bool, bool]:
        assert wgmma.supports(a, b)
        plan = wgmma.plan(a, b)
        return plan.align_a, plan.align_b, plan.any_c

    assert copies(a, b) == copies(a[:, :71], b[:71]) == copies(a[:, :71], b[:71, :72]) == (False,) * 3
    assert copies(a[:, 1:], b[1:]) == (True, False, False)  # begins between two multiples of 16 bytes
    assert copies(torch.zeros(64, 71, dtype=BF16), b[:71]) == (True, False, False)
    assert copies(a, torch.zeros(72, 81, dtype=BF16)) == (False, True, True)
    assert copies(a, torch.zeros(72, 88, dtype=BF16)[:, :81]) == (False, False, True)
    assert not wgmma.supports(a.float(), torch.zeros(81, 72).t(), "tf32")  # rows of c
    assert not wgmma.supports(a[:, ::2], b[::2])
    assert not wgmma.supports(a[:0], b)


@pytest.mark.gpu
@pytest.mark.parametrize("config", wgmma.CANDIDATES, ids=lambda c: c.label)
@pytest.mark.parametrize("dtype", wgmma.DTYPES)
def test_products_are_right_on_a_gpu(dtype: torch.dtype, config: wgmma.Config) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    for m, n, k in ((1, 8, 8), (128, 256, 64), (1000, 1032, 2056), (4096, 4096, 512), (520, 4104, 72)):
        for a_is_k_major in (True, False):
            for b_is_k_major in (True, False):
                if (not a_is_k_major and m % 8) or (not b_is_k_major and n % 8):
                    continue
                a = torch.randn((m, k) if a_is_k_major else (k, m), device="cuda").to(dtype)
                b = torch.randn((n, k) if b_is_k_major else (k, n), device="cuda").to(dtype)
                a, b = a if a_is_k_major else a.t(), b.t() if b_is_k_major else b
                exact = a.double() @ b.double()
                # The second term: the tensor cores add in float32 and cut its last bits off.
                unit = torch.finfo(dtype).eps * exact.abs() + 2**-20 * k
                c = wgmma.forward_with(config, a, b)
                error = float(((c.double() - exact).abs() / unit).nan_to_num(1e9).max())
                assert error < 0.6, (m, n, k, a_is_k_major, b_is_k_major, error)
                assert torch.equal(c, wgmma.forward_with(config, a, b))
                if config.pingpong:  # which no divided K has
                    continue
                parts = wgmma.forward_with(config, a, b, 3)
                error = float(((parts.double() - exact).abs() / unit).nan_to_num(1e9).max())
                assert error < 0.6, (m, n, k, a_is_k_major, b_is_k_major, "divided K", error)
                assert torch.equal(parts, wgmma.forward_with(config, a, b, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("config", wgmma.CANDIDATES, ids=lambda c: c.label)
@pytest.mark.parametrize("epilogue", [BIAS, GELU, GELU_PRE, RESIDUAL])
def test_epilogues_are_right_on_a_gpu(config: wgmma.Config, epilogue: wgmma.Epilogue) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    for m, n, k in ((1, 8, 8), (1000, 1032, 264), (4096, 3072, 256)):
        for dtype in wgmma.DTYPES:
            for splits in (1,) if config.pingpong else (1, 3):
                # bfloat16's GELU may be off by 2^-11 of x, half a unit more where y is x.
                limit = 1.0 if dtype == BF16 and epilogue in (GELU, GELU_PRE) else 0.6
                errors = epilogue_errors((m, n, k, config, dtype, epilogue, splits), 0, "cuda")
                assert max(errors) < limit, (m, n, k, dtype, splits, errors)
