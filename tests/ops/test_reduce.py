"""Reductions along dimensions: the CUDA kernels in an emulator, planted faults, gradients, and arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.guarded_pages import place
from helpers.scan_emulator import COMPILER, EmulatorError, emulate
from weft import WeftError, ops
from weft.backends.nvrtc import CudaSource
from weft.ops.reduce import spec, with_cuda, with_triton
from weft.ops.reduce.strided import strided

NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
EVERY = (*spec.OPS, *spec.ARGUMENT_OPS)
# Two warps a block; an input of a few kilobytes is cut into parts.
SMALL = with_cuda.Config(threads=64, blocks=4, part_bytes=1 << 11, warps=4)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of compiled kernels without a fault, which tests share."""
    return tmp_path_factory.mktemp("reduce")


def _whole_numbers(*shape: int) -> torch.Tensor:
    """Return small whole numbers with many ties, whose float32 sums are exact in every order."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-8, 9, shape, generator=generator).float()


def _expected(x: torch.Tensor, op: str, first: int, last: int) -> torch.Tensor:
    function = spec.first_best if op in spec.ARGUMENT_OPS else spec.reference
    return function(x.double(), op=op, first=first, last=last)


def _is_right(x: torch.Tensor, op: str, dim: int | tuple[int, int], config: with_cuda.Config = SMALL) -> bool:
    first, last = dim if isinstance(dim, tuple) else (dim, dim)
    y, expected = with_cuda.run(x, op, first, last, config), _expected(x, op, first, last)
    if y.shape != expected.shape:
        return False
    if op in ("mean", "logsumexp") or x.dtype != torch.float32:
        eps = torch.finfo(y.dtype).eps if y.is_floating_point() else 0.0
        return torch.allclose(y.double(), expected.double(), rtol=2 * eps, atol=4 * eps, equal_nan=True)
    return torch.equal(y.double().nan_to_num(0.5), expected.double().nan_to_num(0.5))


# Short rows, rows of one lane and of several, long rows, rows in parts; columns of one and of several
# vectors, in parts, of few rows, of many outer indices.
SHAPES: tuple[tuple[tuple[int, ...], int | tuple[int, int]], ...] = (
    ((5, 3), 1), ((70, 4), 1), ((9, 67), 1), ((3, 600), 1), ((2, 3001), 1), ((9, 1500), 1), ((1, 4099), 1),
    ((3, 5), 0), ((600, 3), 0), ((1030, 8), 0), ((7, 264), 0), ((2, 1000), 0), ((40, 5, 4), 1),
    ((3, 100, 36), 1), ((2, 3, 70, 8), (1, 2)),
)  # fmt: skip


@NEEDS_COMPILER
@pytest.mark.pooled(2, "emulated: reduce")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", EVERY)
def test_each_operation_is_exact_in_the_emulator(
    op: str, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    emulate(monkeypatch, libraries)
    monkeypatch.setattr(with_cuda, "MANY_RESULTS", 8)
    for shape, dim in SHAPES:
        x = _whole_numbers(*shape)
        for at_end in (False, True):  # of a page, where no load may leave the tensor
            assert _is_right(place(x, at_end), op, dim), (shape, dim, at_end)


@NEEDS_COMPILER
@pytest.mark.pooled(2, "emulated: reduce")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("op", EVERY)
def test_special_values_in_the_emulator(op: str, monkeypatch: pytest.MonkeyPatch, libraries: Path) -> None:
    """NaN wins and stays, -Inf alone is an answer, and each stays in its own row."""
    emulate(monkeypatch, libraries)
    rows = _whole_numbers(6, 1300)
    rows[0, 700], rows[1, 3], rows[1, 9], rows[2, 1299] = torch.nan, torch.inf, torch.inf, -torch.inf
    rows[3], rows[4, ::2], rows[4, 1::2], rows[5] = -torch.inf, 0.0, -0.0, torch.inf
    for x, dim in ((rows, 1), (rows.T.contiguous(), 0), (rows.T, 0), (rows.T.contiguous().T, 1)):
        assert _is_right(x, op, dim), (dim, x.stride())


@NEEDS_COMPILER
@pytest.mark.pooled(2, "emulated: reduce")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32], ids=str)
def test_other_dtypes_in_the_emulator(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    emulate(monkeypatch, libraries)
    for op in spec.ARGUMENT_OPS if dtype == torch.int32 else ("sum", "amin", "argmax"):
        for shape, dim in (((3, 1003), 1), ((301, 24), 0), ((301, 7), 0)):
            x = _whole_numbers(*shape).to(dtype)
            if dtype == torch.int32:
                x[1, 2], x[2, 3] = 2**31 - 1, -(2**31)
            assert _is_right(x, op, dim), (op, shape)


@NEEDS_COMPILER
@pytest.mark.pooled(2, "emulated: reduce")
def test_layouts_in_the_emulator(monkeypatch: pytest.MonkeyPatch, libraries: Path) -> None:
    emulate(monkeypatch, libraries)
    x = _whole_numbers(6, 40, 24)
    views = (
        x[:, :, 1:9],
        x[:, ::2],
        x.transpose(1, 2),
        x.permute(2, 0, 1),
        x[:1].expand(5, -1, -1),
        x[..., ::3],
    )
    for view in views:
        for dim in (0, 1, 2, (0, 1), (1, 2)):
            for op in ("sum", "argmax"):
                assert _is_right(view, op, dim), (view.shape, view.stride(), dim, op)


@NEEDS_COMPILER
def test_sums_have_the_same_bits_in_every_schedule(monkeypatch: pytest.MonkeyPatch, libraries: Path) -> None:
    emulate(monkeypatch, libraries)
    for x, dim in ((torch.randn(2, 5000), 1), (torch.randn(3000, 8), 0)):
        for op in ("sum", "logsumexp"):
            first = with_cuda.run(x, op, dim, dim, SMALL)
            assert torch.equal(first, with_cuda.run(x, op, dim, dim, SMALL))


FAULTS = {
    "the last vector of a row is lost": (
        "vectors = (count - head) / VEC",
        "vectors = (count - head) / VEC - 1",
    ),
    "the elements before the first vector are lost": ("i = thread; i < head;", "i = head; i < head;"),
    "the elements after the last vector are lost": (
        "i = head + vectors * VEC + thread; i < count;",
        "i = count; i < count;",
    ),
    "the last warp is lost": ("w = 1; w < WARPS; ++w", "w = 1; w < WARPS - 1; ++w"),
    "no barrier before the warps are merged": (
        "shared[threadIdx.x / 32] = p;\n  __syncthreads();",
        "shared[threadIdx.x / 32] = p;",
    ),
    "each part is the first of its row": (
        "walk_row(x + row * stride, begin, end,",
        "walk_row(x + row * stride, 0, part_n,",
    ),
    "the last part is left out": ("i = lane; i < count; i += group", "i = lane; i < count - 1; i += group"),
    "a row of threads is lost": ("half = (int)height / 2; half > 0;", "half = (int)height / 2; half > 1;"),
    "no barrier between the halves": (
        "p[j].merge(shared[j * (THREADS / 2) + slot]);\n    __syncthreads();",
        "p[j].merge(shared[j * (THREADS / 2) + slot]);",
    ),
    "the rows after the last whole round are lost": ("  if (row < rows) {", "  if (false) {"),
    "each tile of columns is the first": ("tile = blockIdx.x % tiles,", "tile = 0,"),
    "the mean of two parts": (
        "partials[part * outers * inner + at] = p[j];",
        "p[j].sum /= 2, partials[part * outers * inner + at] = p[j];",
    ),
}
# Faults in what one operation does with its elements.
VALUE_FAULTS = {
    "NaN is lost": ("argmax", "wins || (is_nan(a) && !is_nan(b))", "wins"),
    "a later NaN replaces the first": ("argmax", "(is_nan(a) && !is_nan(b))", "is_nan(a)"),
    "a tie gives the last index": ("argmin", "FINDS_LEAST ? a < b : a > b", "FINDS_LEAST ? a <= b : a > b"),
    "a tie of lanes gives the higher index": ("argmax", "other.index < index", "other.index > index"),
    "-Inf is taken for nothing": ("argmax", " && index != NOWHERE) return;", ") return;"),
    "Inf less Inf": ("logsumexp", "fabsf(top) < __uint_as_float(0x7f800000u) ? top : 0.0f", "top"),
    "the sum is not rescaled": ("logsumexp", "sum * weight(largest, one) + tree(", "sum + tree("),
    "the last of equal elements": ("argmax", "= N - 1; k >= 0; --k) place = v", "= 0; k < N; ++k) place = v"),
    "the last of several NaN": ("argmax", "= N - 1; k >= 0; --k) place = i", "= 0; k < N; ++k) place = i"),
    "the mean is not divided": ("mean", "OP == MEAN ? sum / (float)n : sum", "sum"),
}  # fmt: skip


def _all_right(op: str) -> bool:
    special = _whole_numbers(3, 1300)
    special[0, 700:702], special[0, 900], special[1], special[2, 5] = (
        torch.nan,
        torch.nan,
        -torch.inf,
        -torch.inf,
    )
    rising = torch.arange(-3.0, 17.0).repeat(2, 40)
    inputs = [_whole_numbers(*shape) for shape, _ in SHAPES] + [special, special.T.contiguous(), rising]
    dims = [dim for _, dim in SHAPES] + [1, 0, 1]
    return all(_is_right(x, op, dim) for x, dim in zip(inputs, dims, strict=True))


@NEEDS_COMPILER
@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", [*FAULTS, *VALUE_FAULTS])
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if fault in FAULTS:
        op, texts = "mean" if "mean" in fault else "sum", FAULTS[fault]
    else:
        op, texts = VALUE_FAULTS[fault][0], VALUE_FAULTS[fault][1:]
    emulate(monkeypatch, tmp_path, texts)
    try:
        # A race shows in some schedules only.
        ok = all(_all_right(op) for _ in range(3 if "barrier" in fault else 1))
    except (EmulatorError, RuntimeError):
        return
    assert not ok


def _launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, tuple[Any, ...]]]:
    """Record the launches on a device of 132 SMs, without running them."""
    launches: list[tuple[str, int, tuple[Any, ...]]] = []

    def kernel(source: CudaSource, name: str) -> Callable[..., None]:
        return lambda blocks, threads, *arguments: launches.append((name, blocks, arguments))

    monkeypatch.setattr(CudaSource, "__getitem__", kernel)
    monkeypatch.setattr(with_cuda, "num_sms", lambda *_, **__: 132)
    return launches


def test_launches_fill_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few results are cut into parts; many short rows have a warp each or less; none is cut needlessly."""
    launches = _launches(monkeypatch)

    def blocks(*shape: int, dim: int, op: str = "sum") -> list[tuple[str, int]]:
        launches.clear()
        with_cuda.run(torch.empty(shape, dtype=torch.bfloat16, device="meta"), op, dim, dim)
        return [(name, count) for name, count, _ in launches]

    assert blocks(16384, 16384, dim=1) == [("reduce_parts", 16384)]
    assert blocks(65536, 4096, dim=1) == [("reduce_rows", 8192)]
    assert blocks(2**22, 64, dim=1) == [("reduce_rows", 2**22 // 128)]
    assert blocks(4, 2**26, dim=1) == [("reduce_parts", 4 * 528), ("merge_parts", 1)]
    # 64 tiles of 32 vectors: 33 parts of 497 rows.
    assert blocks(16384, 16384, dim=0) == [("reduce_columns", 64 * 33), ("merge_parts", 64)]
    assert launches[0][2][-4:] == (33, 497, 32, 8)
    # Columns of 8 rows: two rows of threads, and 128 vectors.
    assert blocks(8, 2**22, dim=0) == [("reduce_columns", 2**22 // (8 * 128))] and launches[0][2][-2:] == (
        128,
        2,
    )
    # Short columns leave threads for eight outer indices.
    assert blocks(65536, 64, 16, dim=1) == [("reduce_columns", 8192)] and launches[0][2][-2:] == (2, 16)


def test_sizes_past_32_bits_reach_the_kernel_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = _launches(monkeypatch)
    with_cuda.run(torch.empty(3, 2**31 + 8, dtype=torch.bfloat16, device="meta"), "argmax", 1, 1)
    name, blocks, arguments = launches[0]
    n, stride, parts, part_n = arguments[3:]
    assert name == "reduce_parts" and n == stride == 2**31 + 8 and (parts - 1) * part_n < n <= parts * part_n
    assert blocks == 3 * parts and arguments[2].numel() == 3 * parts * 16


def test_a_matrix_is_read_as_it_lies() -> None:
    x = torch.empty(6, 40)
    assert strided(x, 1, 1).by_rows and not strided(x, 0, 0).by_rows
    assert strided(x.T, 0, 0).by_rows and not strided(x.T, 1, 1).by_rows
    for view, dim in ((x.T, 0), (x.T, 1), (x[:, ::2], 0), (x[::2], 1), (x[:1].expand(6, -1), 0)):
        form = strided(view, dim, dim)
        copied = form.x.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert copied == (view.stride(-1) == 2)


@pytest.mark.parametrize("op", EVERY)
def test_results_of_parts_in_triton(op: str) -> None:
    for shape, dim in (((2, 700), 1), ((900, 3), 0)):
        x = _whole_numbers(*shape)
        y = with_triton.run(x, op, dim, dim, tile=256, part=512)
        expected = _expected(x, op, dim, dim)
        torch.testing.assert_close(y.double(), expected.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("impl", ["eager", "torch", "triton"])
@pytest.mark.parametrize("op", spec.OPS)
def test_gradients_are_those_of_torch(op: str, impl: str) -> None:
    """Three elements that tie get a third each; an infinite element takes the whole gradient."""
    x = torch.tensor([[1.0, 3.0, 3.0, 3.0], [-1.0, -1.0, 0.5, 2.0], [-torch.inf, 1.0, 2.0, -2.0]])
    grad = torch.tensor([1.0, -2.0, 0.5])
    leaf, leaf64 = x.clone().requires_grad_(), x.double().requires_grad_()
    y = ops.reduce(leaf, op, 1, impl=impl)
    (expected,) = torch.autograd.grad(_expected(leaf64, op, 1, 1), leaf64, grad.double())
    (gradient,) = torch.autograd.grad(y, leaf, grad)
    torch.testing.assert_close(gradient, expected.float(), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_sum_and_mean_keep_no_input_for_their_gradient() -> None:
    x = torch.randn(64, 1000, requires_grad=True)
    sizes: list[int] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        sizes.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        for op in ("sum", "mean"):
            ops.reduce(x, op, 1, impl="triton")
    assert sizes and max(sizes) == 64


def test_dimensions_may_be_kept_and_counted_from_the_end() -> None:
    x = torch.randn(2, 3, 4, 5)
    y = ops.reduce(x, "sum", (-2, -3), keepdim=True)
    torch.testing.assert_close(y, x.sum((1, 2), keepdim=True))
    index = ops.argreduce(x, "argmax", [1, 2], keepdim=True)
    assert torch.equal(index, x.flatten(1, 2).argmax(1)[:, None, None])


def test_arguments_without_an_answer_get_one_clear_error() -> None:
    ones, empty = torch.ones(3, 4), torch.ones(3, 0)
    for function, x, op, dim in (
        (ops.reduce, ones, "max", 0), (ops.reduce, ones, "sum", 2), (ops.reduce, ones, "sum", ()),
        (ops.reduce, ones, "sum", (0, 0)), (ops.reduce, torch.ones(2, 2, 2), "sum", (0, 2)),
        (ops.reduce, ones, "sum", 1.0), (ops.reduce, ones, "sum", True), (ops.reduce, empty, "amax", 1),
        (ops.reduce, torch.tensor(1.0), "sum", 0), (ops.reduce, ones.int(), "sum", 0),
        (ops.argreduce, ones, "amax", 0), (ops.argreduce, empty, "argmin", 1),
        (ops.argreduce, ones.requires_grad_(), "argmax", 0),
    ):  # fmt: skip
        with pytest.raises(WeftError, match="reduce") as caught:
            function(x, op, dim)  # type: ignore[arg-type]
        assert caught.value.expected and caught.value.got


def test_a_block_has_threads_for_each_shape() -> None:
    for n in (1, 2, 5, 64, 3000):
        for inner in (2, 3, 8, 33, 264, 5000):
            form = strided(torch.empty(2, n, inner, device="meta"), 1, 1)
            if form.by_rows:
                continue
            for config in (SMALL, replace(SMALL, threads=256)):
                width, height = with_cuda.column_shape(form, with_cuda.column_vec_width(form), config)
                assert config.threads % (width * height) == 0
