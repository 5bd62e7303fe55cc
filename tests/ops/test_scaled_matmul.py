"""The fp8 product: its kernel in the emulator with planted faults, its scales, and the quantisation."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import warp_emulator
from helpers.paths import SRC, TESTS
from helpers.warp_emulator import EmulatorError
from weft import WeftError, ops
from weft.backends import support
from weft.core import Implementation, registry
from weft.core.record import FAIL, PASS
from weft.dispatch import keys
from weft.ops._common.hopper import tensor_map, wgmma_shapes
from weft.ops.scaled_matmul import quantize_fp8, with_cuda, with_torch
from weft.ops.scaled_matmul.spec import BLOCK, BLOCKS, ROWS, TENSOR, blocks, widened
from weft.ops.scaled_matmul.with_cuda import HALVES, MIDDLE, NARROW, TWO_SETS, WIDE
from weft.workbench.check.check import check
from weft.workbench.check.oracle import Oracle

EMULATOR = TESTS / "helpers" / "hopper_emulator.hpp"
LIBRARY = SRC / "weft/ops/_common/hopper"
KERNEL = SRC / "weft/ops/scaled_matmul/scaled_matmul.cu"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# m, n, k, configuration, kind of scales, dtypes of a and b. The block has 128 rows and takes 128 of K; with
# two SMs each block computes several tiles.
POINTS = [
    (128, 64, 128, NARROW, TENSOR, E4M3, E4M3),
    (1, 8, 16, NARROW, ROWS, E4M3, E5M2),
    (136, 72, 144, NARROW, BLOCKS, E4M3, E4M3),
    (130, 136, 400, MIDDLE, ROWS, E4M3, E4M3),
    (130, 136, 400, MIDDLE, BLOCKS, E5M2, E4M3),
    (72, 392, 272, WIDE, BLOCKS, E4M3, E4M3),
    (264, 392, 272, WIDE, ROWS, E5M2, E5M2),
    (264, 392, 528, TWO_SETS, BLOCKS, E4M3, E4M3),
    (264, 136, 656, TWO_SETS, TENSOR, E4M3, E4M3),
    (300, 264, 272, TWO_SETS, BLOCKS, E4M3, E5M2),
    (520, 264, 272, TWO_SETS, ROWS, E4M3, E4M3),
    (136, 72, 128, TWO_SETS, BLOCKS, E4M3, E4M3),
]
# The same, the number of parts of K, and SMs: all tiles divided; some of them; an even and an uneven share of
# the steps, and more parts than steps.
SPLIT_POINTS = [
    ((136, 136, 512, MIDDLE, ROWS, E4M3, E4M3), 4, 8),
    ((136, 136, 512, MIDDLE, BLOCKS, E4M3, E4M3), 2, 3),
    ((72, 264, 656, WIDE, BLOCKS, E4M3, E4M3), 3, 8),
    ((200, 72, 272, NARROW, TENSOR, E5M2, E4M3), 8, 3),
    ((200, 264, 400, TWO_SETS, BLOCKS, E4M3, E4M3), 2, 5),
    ((200, 264, 656, TWO_SETS, ROWS, E4M3, E4M3), 3, 4),
    ((16, 200, 528, WIDE, ROWS, E4M3, E4M3), 2, 8),
]
WAIT = "    wgmma_wait<PENDING>();\n"
RELEASE = "    if (threadIdx.x % 32 == 0) pipeline.release_in_cluster<CLUSTER>(stage);\n"
# name: the text of the kernel that is replaced, and by what
FAULTS = {
    "no proxy fence before a store": ("    fence_async_proxy();\n", ""),
    "a stage is released while products read it": (
        WAIT + RELEASE,
        RELEASE + WAIT,
    ),
    "sums are added before they are complete": (
        WAIT + RELEASE,
        WAIT.replace("PENDING", "PENDING + 1") + RELEASE,
    ),
    "two sets: sums are added before they are complete": (
        WAIT + RELEASE,
        WAIT.replace("PENDING", "SETS") + RELEASE,
    ),
    "two sets: the last sums are not waited for": (
        "      sum.add<0>(second, second_stage);\n",
        "      sum.add<1>(second, second_stage);\n",
    ),
    "two sets: a stage of the next step is released": (
        "      first_stage = sum.issue(first);\n      sum.add<1>(second, second_stage);\n",
        "      first_stage = sum.issue(first);\n      sum.add<1>(second, first_stage);\n",
    ),
    "a step's sum begins with that of the step before": (
        "k > 0);\n  wgmma_commit();\n",
        "true);\n  wgmma_commit();\n",
    ),
    "only a step's last 32 of K count": ("k > 0);\n  wgmma_commit();\n", "false);\n  wgmma_commit();\n"),
    "no fence before the first product": (
        "b_at = stage + A_BYTES;\n  wgmma_fence();\n",
        "b_at = stage + A_BYTES;\n",
    ),
    "a group reads the other's rows": ("stage + group * 64 * BK", "stage"),
    "a row has the scale of its neighbour": (
        "of_a.numbers + min(row + half * 8,",
        "of_a.numbers + min(row + half,",
    ),
    "a section has the scale of the tile's first": (
        "min(unit.column + section * 64, arguments.columns - 1) / SCALE_BLOCK",
        "unit.column / SCALE_BLOCK",
    ),
    "scales of the first step everywhere": (
        "      b_at[section] += arguments.scale_b.rows;\n",
        "",
    ),
    "scales of the next step": ("  sum.load_scales();\n", "  sum.load_scales(), sum.load_scales();\n"),
    "a part of K begins with the scales of the first": (
        "                   unit.first * of_a.columns;",
        "                   0;",
    ),
    "a column has the scale of its neighbour": (
        "scale_at(arguments.scale_b, 0, column);\n  }\n}\n\n// Stores the 64",
        "scale_at(arguments.scale_b, 0, max(column - 1, 0));\n  }\n}\n\n// Stores the 64",
    ),
    "a buffer is overwritten while it is stored": (
        "    if (threadIdx.x % GROUP_THREADS == 0) tma_wait_read<0>();\n",
        "",
    ),
    "no barrier between the writes and the store": (
        "    fence_async_proxy();\n    named_barrier(OUT_BARRIER + group, GROUP_THREADS);\n",
        "    fence_async_proxy();\n",
    ),
    "too few arrivals free a stage": (
        "pipeline.init(CONSUMERS * 4 * CLUSTER,",
        "pipeline.init(4,",
    ),
    "a block loads the other's share of b": (
        "unit.column + b_share * SHARE_COLUMNS",
        "unit.column",
    ),
    "a block ends before the others' last arrivals": (
        "  // Until the others arrive no more at this block's barriers.\n"
        "  if constexpr (CLUSTER > 1) cluster_barrier();\n",
        "",
    ),
    "the last part of K is not added": (
        "split < arguments.splits; ++split",
        "split < arguments.splits - 1; ++split",
    ),
    "parts of K are added without scales": (
        "scale_at(arguments.scale_a, of_row, 0) * scale_at(arguments.scale_b, 0, column + j)",
        "scale_at(arguments.scale_a, of_row, 0)",
    ),
}


def toy_map(
    pointer: int, dtype: torch.dtype, columns: int, rows: int, row_bytes: int, box_rows: int
) -> tensor_map.TensorMap:
    """Return a tensor map as the emulator reads it."""
    box_columns = tensor_map.SWIZZLE_BYTES // dtype.itemsize
    words = (pointer, columns, rows, row_bytes, box_columns, box_rows, dtype.itemsize)
    return tensor_map.TensorMap((ctypes.c_uint64 * 16)(*words))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    warp_emulator.emulate(monkeypatch, tmp_path_factory.getbasetemp(), EMULATOR)
    monkeypatch.setattr(tensor_map, "_encode", toy_map)
    monkeypatch.setattr(with_cuda, "num_sms", lambda device: 2)


def scales(mode: str, m: int, n: int, k: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Return random scales of both signs, no two alike."""
    shapes = {
        TENSOR: ((), ()),
        ROWS: ((m, 1), (1, n)),
        BLOCKS: ((m, blocks(k)), (blocks(k), blocks(n))),
    }[mode]
    return [torch.randn(shape, generator=generator) + 0.1 for shape in shapes]


def factors(
    m: int, n: int, k: int, mode: str, a_dtype: torch.dtype, b_dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=generator).to(a_dtype)
    b = torch.randn(n, k, generator=generator).to(b_dtype).t()
    return a, b, *scales(mode, m, n, k, generator)


def product(
    point: tuple[int, int, int, object, str, torch.dtype, torch.dtype], seed: int, splits: int = 1
) -> float:
    """Return the largest error, in roundings to bfloat16 of the size that a sum of K such products has."""
    m, n, k, config, mode, a_dtype, b_dtype = point
    inputs = factors(m, n, k, mode, a_dtype, b_dtype, seed)
    wide_a, wide_b = (x.double() for x in widened(*inputs))
    exact = wide_a @ wide_b
    # Each sum of 128 of K loses up to 4 units of its last bit of 14: the second term.
    size = (wide_a.square() @ wide_b.square()).sqrt()
    unit = torch.finfo(torch.bfloat16).eps * exact.abs() + 2**-10 * size + 1e-30
    c = with_cuda.forward_with(config, *inputs, splits=splits)
    return float(((c.double() - exact).abs() / unit).nan_to_num(1e9).max())


needs_compiler = pytest.mark.skipif(
    warp_emulator.COMPILER is None, reason="no g++ to compile the kernel with"
)


@needs_compiler
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "point", POINTS, ids=lambda p: f"{p[0]}x{p[1]}x{p[2]}-{p[3].columns}x{p[3].cluster}-{p[4]}"
)
def test_products_are_right_in_any_schedule(point: tuple[object, ...], emulated: None) -> None:
    for seed in range(2):  # each launch switches threads in another order
        assert product(point, seed) < 1  # type: ignore[arg-type]


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("point", "splits", "sms"),
    SPLIT_POINTS,
    ids=lambda p: f"{p[0]}x{p[1]}x{p[2]}" if isinstance(p, tuple) else None,
)
def test_a_divided_k_gives_the_same_product(
    point: tuple[object, ...], splits: int, sms: int, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(with_cuda, "num_sms", lambda device: sms)
    assert product(point, 0, splits) < 1  # type: ignore[arg-type]


@needs_compiler
@pytest.mark.pooled(1, "long sums: scaled_matmul")
def test_a_divided_k_gives_the_same_bits_twice(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_cuda, "num_sms", lambda device: 3)
    inputs = factors(136, 72, 528, ROWS, E4M3, E4M3, 0)
    runs = [with_cuda.forward_with(NARROW, *inputs, splits=3) for _ in range(3)]  # each in another schedule
    assert all(torch.equal(c, runs[0]) for c in runs)


@needs_compiler
@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    fault: str, emulated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the kernel with one fault gives a wrong product or breaks the emulator's rules."""
    warp_emulator.emulate_edited(monkeypatch, tmp_path, KERNEL.name, *FAULTS[fault], EMULATOR)
    if "part" in fault:
        monkeypatch.setattr(with_cuda, "num_sms", lambda device: 5)
    # Two blocks that each compute one tile, in many schedules, or one block that computes several.
    of_cluster = fault.startswith("a block")
    odd = TWO_SETS if "two sets" in fault else WIDE
    of_columns = fault.startswith(("a column", "parts"))
    mode = ROWS if of_columns else BLOCKS
    point = (
        (256, 192, 272, TWO_SETS, mode, E4M3, E4M3) if of_cluster else (200, 392, 656, odd, mode, E4M3, E4M3)
    )
    errors = []
    for seed in range(20 if of_cluster else 4):
        try:
            errors.append(product(point, seed, 3 if "part" in fault else 1))
        except EmulatorError:
            return
        if errors[-1] > 2:
            return
    pytest.fail(f"not seen: {errors}")


@needs_compiler
@pytest.mark.pooled(1, "long sums: scaled_matmul")
def test_promotion_bounds_the_error_of_a_long_sum(
    emulated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of 8192 products is as good as float16; not so if it is cut to 14 bits every 128 of K."""
    inputs = factors(64, 64, 8192, TENSOR, E4M3, E4M3, 0)
    wide_a, wide_b = (x.double() for x in widened(*inputs))
    exact = wide_a @ wide_b

    def error(config: with_cuda.Config) -> float:
        c = with_cuda.forward_with(config, *inputs, out_dtype="float16").double()
        return float((c - exact).square().mean().sqrt() / exact.square().mean().sqrt())

    configs = NARROW, HALVES
    assert all(error(config) < 6e-4 for config in configs)  # float16's own rounding is 2e-4
    for config, file, added in (
        (NARROW, KERNEL.name, "else total[i] += sums[i];"),
        (HALVES, KERNEL.with_name("scaled_matmul_staged.cuh").name, "else total[half][i] += sums[i];"),
    ):
        total = added.split()[1]
        cut = f"else {total} = __uint_as_float(__float_as_uint({total} + sums[i]) & ~0x3ffu);"
        warp_emulator.emulate_edited(monkeypatch, tmp_path, file, added, cut, EMULATOR)
        assert error(config) > 2 * 6e-4


FORMATS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]


def test_the_generated_shapes_are_current() -> None:
    assert (LIBRARY / "wgmma_fp8_shapes.cuh").read_text() == wgmma_shapes.text_fp8()


def test_the_library_takes_scales_of_any_strides() -> None:
    """Scales of rows that are every second element, also in their dimension of size 1."""
    a, b, scale_a, scale_b = factors(48, 64, 144, ROWS, E4M3, E4M3, 0)
    sparse_a = torch.stack([scale_a, scale_a], -1)[..., 0]
    sparse_b = torch.stack([scale_b, scale_b], -1)[..., 0]
    assert sparse_a.stride(1) == 2
    got = with_torch.forward(a, b, sparse_a, sparse_b)
    assert torch.equal(got, with_torch.forward(a, b, scale_a, scale_b))


def test_factors_in_other_orders_are_copied() -> None:
    a, b = torch.zeros(64, 144, dtype=E4M3), torch.zeros(96, 144, dtype=E4M3).t()
    assert with_cuda.k_major(a, 1) is a and with_cuda.k_major(b, 0) is b
    for x, k_dim in (
        (a.t().contiguous().t(), 1),
        (a[:, 1:], 1),
        (b.contiguous(), 0),
        (b[::2], 0),
        (a[:1, :1], 1),
    ):
        copied = with_cuda.k_major(x, k_dim)
        assert copied.shape == x.shape and copied.stride(k_dim) == 1 and copied.data_ptr() % 16 == 0


@needs_compiler
def test_the_public_forward_pads_nothing_and_copies_what_it_must(emulated: None) -> None:
    """Orders, strides of scales and an unaligned address, through ``forward``."""
    a, b, scale_a, scale_b = factors(40, 72, 272, BLOCKS, E4M3, E4M3, 0)
    right = with_cuda.forward(a, b, scale_a, scale_b)
    shifted = torch.empty(40 * 272 + 1, dtype=E4M3)[1:].view(40, 272).copy_(a)
    for x, y, s in (
        (a.t().contiguous().t(), b, scale_a),
        (shifted, b.contiguous(), scale_a.t().contiguous().t()),
    ):
        assert torch.equal(with_cuda.forward(x, y, s, scale_b), right)


def test_what_the_kernel_cannot_do_is_refused_with_the_reason() -> None:
    operator, cuda = registry.operator("scaled_matmul"), with_cuda.IMPLEMENTATION
    assert cuda.supports(operator.case("e4m3-67x136x272-blocks"), "cpu")
    refused = cuda.supports(operator.case("e4m3-7x13x11-rows"), "cpu")
    assert not refused and "K a multiple of 16 and N of 8" in refused.reason


# ---- The public functions


def call() -> dict[str, torch.Tensor]:
    return dict(zip(("a", "b", "scale_a", "scale_b"), factors(8, 24, 32, ROWS, E4M3, E5M2, 0), strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"a": torch.ones(8, 32)},
        {"a": torch.ones(8, 16).to(E4M3)},
        {"b": torch.ones(2, 32, 24).to(E4M3)},
        {"scale_a": torch.ones(8)},
        {"scale_b": None},
        {"scale_a": torch.ones(1, 8)},
        {"scale_a": torch.ones(8, 1).double()},
        {"scale_a": torch.ones(8, 2), "scale_b": torch.ones(2, 1)},
        {"scale_a": torch.ones(8, 1).to("meta")},
        {"scale_a": torch.ones(8, 1).requires_grad_()},
        {"out_dtype": torch.float32},
        {"impl": "cudda"},
    ],
    ids=lambda c: "-".join(c),
)
def test_a_call_without_an_answer_gets_one_clear_error(changes: dict[str, object]) -> None:
    with pytest.raises(WeftError) as caught:
        ops.scaled_matmul(**{**call(), **changes})  # type: ignore[arg-type]
    assert caught.value.expected and caught.value.got


def test_registered_and_traced_as_pytorch_asks() -> None:
    inputs = call()
    packet = torch.ops.weft.scaled_matmul.default
    for out_dtype in ("bfloat16", "float16"):
        # opcheck's test of the schema compares tensors by functions that torch lacks for fp8.
        results = torch.library.opcheck(
            packet, (*inputs.values(), out_dtype, "eager"), test_utils="test_faketensor"
        )
        assert set(results.values()) == {"SUCCESS"}
    traced = torch.compile(
        lambda **x: ops.scaled_matmul(**x, out_dtype=torch.float16), fullgraph=True, backend="eager"
    )
    assert torch.equal(traced(**inputs), ops.scaled_matmul(**inputs, out_dtype=torch.float16))


@pytest.mark.parametrize("mode", [TENSOR, ROWS, BLOCKS])
def test_eager_is_the_product_of_the_decoded_factors(mode: str) -> None:
    """Multiply by loops over blocks, without the spec's expansion of scales."""
    m, n, k = 20, 200, 300
    a, b, scale_a, scale_b = factors(m, n, k, mode, E4M3, E5M2, 0)
    expected = torch.zeros(m, n, dtype=torch.float64)
    for first in range(0, k, BLOCK):
        for column in range(0, n, BLOCK):
            of_k, of_n = slice(first, first + BLOCK), slice(column, column + BLOCK)
            part = a[:, of_k].double() @ b[of_k, of_n].double()
            if mode == BLOCKS:
                part *= scale_a[:, first // BLOCK, None] * scale_b[first // BLOCK, column // BLOCK]
            else:
                part *= scale_a * (scale_b if mode == TENSOR else scale_b[:, of_n])
            expected[:, of_n] += part
    c = ops.scaled_matmul(a, b, scale_a, scale_b, impl="eager")
    torch.testing.assert_close(c.double(), expected, rtol=2**-8, atol=1e-5)


# ---- Quantisation

KINDS = {"tensor": (), "row": (130, 1), "column": (1, 200), "1x128": (130, 2), "128x128": (2, 2)}


def decoded(values: torch.Tensor, scale: torch.Tensor, block: str) -> torch.Tensor:
    down, across = {"1x128": (1, 128), "128x128": (128, 128)}.get(block, (1, 1))
    if block in ("1x128", "128x128"):
        scale = scale.repeat_interleave(down, 0)[: values.shape[0]]
        scale = scale.repeat_interleave(across, 1)[:, : values.shape[1]]
    return values.double() * scale.double()


@pytest.mark.parametrize("block", KINDS)
@pytest.mark.parametrize(("dtype", "relative", "step"), [(E4M3, 2**-4, 2**-10), (E5M2, 2**-3, 2**-17)])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_the_round_trip_has_the_error_that_the_docstring_says(
    block: str, dtype: torch.dtype, relative: float, step: float, source: torch.dtype
) -> None:
    x = (torch.randn(130, 200) * torch.logspace(-3, 3, 130)[:, None]).to(source)
    values, scale = quantize_fp8(x, block, dtype=dtype)
    assert (values.dtype, scale.dtype, tuple(scale.shape)) == (dtype, torch.float32, KINDS[block])
    unit = decoded(torch.ones_like(values), scale, block)
    gap = (decoded(values, scale, block) - x.double()).abs()
    assert bool((gap <= 1.0001 * (relative * x.double().abs() + step * unit)).all())
    assert float(values.float().abs().max()) == torch.finfo(dtype).max  # the largest number is used


def test_amax_of_zeros_infinities_and_nan() -> None:
    x = torch.zeros(4, 256)
    x[1, 3], x[1, 4], x[1, 130] = torch.inf, 2.0, -torch.inf
    x[2, 5], x[2, 6] = torch.nan, -3.0
    x[3, 7] = 1e-42  # below float32's normal numbers
    for dtype, infinity in ((E4M3, torch.nan), (E5M2, torch.inf)):
        values, scale = quantize_fp8(x, "1x128", dtype=dtype)
        largest = torch.finfo(dtype).max
        assert scale[0].tolist() == [1.0, 1.0]  # zeros alone
        assert scale[1].tolist() == [torch.tensor(2.0).div(largest).item(), 1.0]  # an infinity does not count
        assert scale[2, 0] == torch.tensor(3.0) / largest
        assert scale[3, 0] == torch.finfo(torch.float32).tiny
        wide = values.float()
        torch.testing.assert_close(wide[1, 3], torch.tensor(infinity), equal_nan=True)
        assert wide[2, 5].isnan() and wide[1, 4] == largest and wide[2, 6] == -largest
        assert int(wide.isfinite().logical_not().sum()) == 3
        assert bool((wide[0] == 0).all()) and bool(wide[3].isfinite().all())


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)])
@pytest.mark.parametrize("block", KINDS)
def test_empties_are_quantised(shape: tuple[int, int], block: str) -> None:
    values, scale = quantize_fp8(torch.ones(shape), block)
    rows, columns = shape
    shapes = {
        "tensor": (),
        "row": (rows, 1),
        "column": (1, columns),
        "1x128": (rows, blocks(columns)),
        "128x128": (blocks(rows), blocks(columns)),
    }
    assert tuple(values.shape) == shape and tuple(scale.shape) == shapes[block]


def test_a_quantised_weight_goes_into_the_product_without_a_copy() -> None:
    x, weight = torch.randn(24, 272), torch.randn(200, 272)
    a, scale_a = quantize_fp8(x, "1x128")
    b, scale_b = quantize_fp8(weight.t(), "128x128")
    assert with_cuda.k_major(a, 1) is a and with_cuda.k_major(b, 0) is b
    exact = x.double() @ weight.double().t()
    c = ops.scaled_matmul(a, b, scale_a, scale_b)
    assert float((c.double() - exact).norm() / exact.norm()) < 0.04  # 2^-4 / sqrt(3) each, and rounding


@pytest.mark.parametrize(
    ("x", "options"),
    [
        (torch.ones(3), {}),
        (torch.ones(3, 4, dtype=torch.int32), {}),
        (torch.ones(3, 4), {"block": "128"}),
        (torch.ones(3, 4), {"dtype": torch.float16}),
    ],
)
def test_quantisation_refuses_with_one_clear_error(x: torch.Tensor, options: dict[str, object]) -> None:
    with pytest.raises(WeftError) as caught:
        quantize_fp8(x, **options)  # type: ignore[arg-type]
    assert caught.value.expected and caught.value.got


@pytest.mark.gpu
@pytest.mark.parametrize("config", with_cuda.CANDIDATES, ids=lambda c: f"{c.rows}x{c.columns}x{c.cluster}")
@pytest.mark.parametrize("mode", [TENSOR, ROWS, BLOCKS])
def test_products_are_right_on_a_gpu(mode: str, config: with_cuda.Config) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    for m, n, k in ((1, 8, 16), (128, 256, 128), (1000, 1032, 2064), (4096, 4096, 512), (520, 4104, 144)):
        for a_dtype, b_dtype in FORMATS:
            inputs = [x.cuda() for x in factors(m, n, k, mode, a_dtype, b_dtype, 0)]
            wide_a, wide_b = (x.double() for x in widened(*inputs))
            exact, size = wide_a @ wide_b, (wide_a.square() @ wide_b.square()).sqrt()
            # The tensor cores keep about 14 bits. Of 16 million sums of 512 the worst is off by 1.3 units of
            # 2^-10, in torch._scaled_mm too.
            unit = torch.finfo(torch.bfloat16).eps * exact.abs() + 2**-9 * size + 1e-30
            for splits in (1, 3):
                c = with_cuda.forward_with(config, *inputs, splits=splits)
                error = float(((c.double() - exact).abs() / unit).nan_to_num(1e9).max())
                assert error < 1, (m, n, k, a_dtype, b_dtype, splits, error)
                again = with_cuda.forward_with(config, *inputs, splits=splits)
                assert torch.equal(c, again)


def test_eight_bits_of_the_factors_widen_no_bound() -> None:
    """A product that is wrong by 2 % fails, though 8-bit factors have steps of 6 to 12 %."""
    operator = registry.operator("scaled_matmul")
    eager = registry.implementation("scaled_matmul", "eager")

    def wrong(*inputs: torch.Tensor, out_dtype: str) -> torch.Tensor:
        return eager.forward(*inputs, out_dtype=out_dtype) * 1.02

    case = operator.case("e4m3-67x136x272-rows")
    verdict = check(operator, replace(eager, forward=wrong, name="eager/wrong"), case, "forward", "cpu")
    assert verdict.status == FAIL
    assert check(operator, eager, case, "forward", "cpu").status == PASS
    # As a baseline it is refused: the yardstick's own bound has bfloat16's steps.
    oracle = Oracle(operator, case, "forward", "cpu", (1, 2))
    assert oracle.bounds and oracle.baseline_fault == ""
    assert oracle._longest_step() == torch.finfo(torch.bfloat16).eps


def test_an_interpreter_takes_no_fp8() -> None:
    case = registry.operator("scaled_matmul").case("e4m3-67x136x272-rows")
    refusal = support(Implementation(operator="scaled_matmul", backend="triton", forward=print), case, "cpu")
    assert not refusal and "fp8 needs a GPU" in refusal.reason


def test_a_measured_point_speaks_for_its_kind_of_scales_alone() -> None:
    operator = registry.operator("scaled_matmul")
    flags = {}
    for name in ("e4m3-8192x8192x8192-tensor", "e4m3-4096x7168x16384-blocks-scales-transposed"):
        case = operator.case(name)
        key = keys.lookup_key("scaled_matmul", case.inputs, case.params)
        flags[name] = dict(key.flags)
        assert key.sizes == (case.inputs[1].shape[1], case.inputs[0].shape[1], case.inputs[0].shape[0])
    assert [f["blocks"] for f in flags.values()] == [False, True]
