"""Products of sparse matrices: CUDA kernels in an emulator with planted faults, indices, and gradients."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import scan_emulator
from helpers.guarded_pages import place
from helpers.scan_emulator import COMPILER, EmulatorError
from weft import WeftError, ops
from weft.backends.nvrtc import CudaSource
from weft.ops.sparse import csr, ladder, transpose_cuda, with_cuda, with_triton
from weft.ops.sparse.cases import Family
from weft.ops.sparse.pattern import Pattern
from weft.ops.sparse.sliced_ell import PADDING, SlicedEll, source
from weft.ops.sparse.spec import check_indices, reference
from weft.ops.sparse.transpose import Transposition, gradient_of_values, transpose
from weft.ops.sparse.with_cuda import Config, MatrixConfig

NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
SMALL = Config(threads=64, items=4)  # tiles of 256 nonzeros
SMALL_MATRIX = MatrixConfig(threads=64, share=9)  # groups of 4 to 32 lanes with 9 places each
Csr = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
FAMILIES = (
    Family("uniform", 150, 40, 4),
    Family("banded", 90, 90, 3),
    Family("stencil", 81, 81),
    Family("power-law", 200, 150, 6),
    Family("dense-row", 50, 1500, 3),
    Family("empty-rows", 301, 60, 3),
    Family("all-empty", 500, 5),
    Family("unsorted", 40, 50, 9),
    Family("uniform", 1, 7, 3000),  # one row of many tiles
)


class Regions(Family):
    """Regions of rows that fill tiles and shares in each manner that spmv.cu treats apart."""

    def lengths(self, device: str | torch.device = "cpu") -> torch.Tensor:
        short = torch.arange(700) * 7 % 4 + 1  # tiles that end inside a row, and that two full shares have
        few = (torch.arange(900) % 3 == 1).long()  # thin shares inside a tile
        # Long rows among short ones.
        with_long = torch.full((300,), 2).index_fill(0, torch.arange(20, 300, 50), 90)
        empty, longest = torch.zeros(600, dtype=torch.int64), torch.tensor([6000])
        # The first tiles have long rows, and thin shares with the same numbers.
        first = torch.cat((with_long, few, short, empty, longest))
        return torch.cat((first, short[:50], empty[:300], longest // 20, empty))

    @property
    def nonzeros(self) -> int:
        return int(self.lengths().sum())


REGIONS = Regions("uniform", int(Regions("uniform", 0, 0).lengths().numel()), 60)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of compiled kernels without a fault, which tests share."""
    return tmp_path_factory.mktemp("sparse")


@pytest.fixture(autouse=True)
def sparse_device(monkeypatch: pytest.MonkeyPatch) -> None:
    header = Path(scan_emulator.__file__).with_name("sparse_emulator.hpp")
    monkeypatch.setattr(scan_emulator, "HEADER", header)


@pytest.fixture(autouse=True)
def unwritten_rows_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    new_empty = torch.Tensor.new_empty

    def new_nan(x: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        y = new_empty(x, *size, **options)
        return y.fill_(torch.nan) if y.is_floating_point() else y

    monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)


def _matrix(family: Family, dtype: torch.dtype = torch.float32, offsets: torch.dtype = torch.int32) -> Csr:
    """Return a matrix of small whole numbers, whose sums are exact in every order."""
    generator = torch.Generator().manual_seed(family.rows)
    lengths = family.lengths()
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    values = torch.randint(-4, 5, (family.nonzeros,), generator=generator).to(dtype)
    return values, family.column_indices(lengths, generator), starts.to(offsets)


def _vector(family: Family, dtype: torch.dtype = torch.float32, k: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(family.columns + 1)
    shape = (family.columns,) if k is None else (family.columns, k)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def _at_end(x: torch.Tensor) -> torch.Tensor:
    """Return a copy that ends where no memory may be read; an empty tensor as it is."""
    return place(x, True) if x.numel() else x


def _expected(matrix: Csr, dense: torch.Tensor) -> torch.Tensor:
    values, columns, offsets = matrix
    return reference(values.double(), columns, offsets, dense.double())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.kind)
def test_a_family_has_the_nonzeros_that_it_announces(family: Family) -> None:
    values, columns, offsets = _matrix(family)
    assert int(offsets[-1]) == family.nonzeros == columns.numel() == values.numel()
    check_indices("spmv", columns, offsets, family.columns)
    if family.kind not in ("unsorted", "duplicates"):
        inside_a_row = torch.ones(family.nonzeros, dtype=torch.bool)
        inside_a_row[offsets[:-1][offsets[1:] > offsets[:-1]].long()] = False
        assert bool((columns.diff(prepend=columns[:1])[inside_a_row] >= 0).all())


def test_families_look_as_they_are_named() -> None:
    assert Family("banded", 5, 5, 1).lengths().tolist() == [2, 3, 3, 3, 2]
    assert Family("stencil", 9, 9).lengths().tolist() == [3, 4, 3, 4, 5, 4, 3, 4, 3]
    lengths = Family("power-law", 4000, 4000, 16).lengths().sort(descending=True).values
    assert int(lengths.sum()) == 64000 and lengths[0] > 1000 and int(lengths[2000]) < 16
    columns = Family("stencil", 9, 9).column_indices(Family("stencil", 9, 9).lengths(), torch.Generator())
    assert columns[:7].tolist() == [0, 1, 3, 0, 1, 2, 4]
    with pytest.raises(WeftError, match="sparse family"):
        Family("dense", 3, 3)


TYPES = [
    (dtype, offsets, 4)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    for offsets in (torch.int32, torch.int64)
] + [(torch.float32, torch.int32, 1), (torch.bfloat16, torch.int64, 1)]


@NEEDS_COMPILER
@pytest.mark.pooled(5, "emulated: sparse")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "offsets", "width"), TYPES)
def test_tiles_of_nonzeros_are_exact_in_the_emulator(
    dtype: torch.dtype,
    offsets: torch.dtype,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    libraries: Path,
) -> None:
    """All families; tensors that end at a page's end, so that no load leaves them."""
    scan_emulator.emulate(monkeypatch, libraries)
    if width == 1:
        monkeypatch.setattr(with_cuda, "vec_width_of", lambda values, columns: 1)
    for family in (*FAMILIES, REGIONS):
        matrix, x = _matrix(family, dtype, offsets), _vector(family, dtype)
        expected = _expected(matrix, x).to(dtype)
        y = with_cuda.spmv(*(_at_end(t) for t in (*matrix, x)), config=SMALL)
        assert torch.equal(y, expected), family


def test_a_vector_needs_aligned_values_and_columns() -> None:
    values, columns, _ = _matrix(FAMILIES[0])
    assert with_cuda.vec_width_of(values, columns) == 4
    assert with_cuda.vec_width_of(values[1:], columns) == with_cuda.vec_width_of(values, columns[3:]) == 1
    assert with_cuda.vec_width_of(values.half()[4:], columns[4:]) == 4


@NEEDS_COMPILER
@pytest.mark.pooled(5, "emulated: sparse")
def test_bits_of_rounded_sums_do_not_depend_on_the_schedule(
    monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    scan_emulator.emulate(monkeypatch, libraries)
    family = Family("dense-row", 50, 1500, 3)
    matrix, x = _matrix(family), torch.randn(1500)
    y = with_cuda.spmv(torch.randn(family.nonzeros), *matrix[1:], x, config=SMALL)
    torch.manual_seed(3)
    values = torch.randn(family.nonzeros)
    first, second = (with_cuda.spmv(values, *matrix[1:], x, config=SMALL) for _ in range(2))
    assert torch.equal(first, second) and not torch.equal(first, y)
    error = (first.double() - _expected((values, *matrix[1:]), x)).abs()
    assert float(error.max()) < 1e-4  # of a sum of 1500 products of size 1


@NEEDS_COMPILER
@pytest.mark.pooled(5, "emulated: sparse")
def test_special_values_and_wrong_columns_reach_their_row_alone(
    monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    scan_emulator.emulate(monkeypatch, libraries)
    family = Family("banded", 90, 90, 3)
    values, columns, offsets = _matrix(family)
    x = _vector(family)
    expected = _expected((values, columns, offsets), x)
    values[300], columns[17], columns[500] = torch.inf, -1, 90
    hit = [int((offsets <= k).sum()) - 1 for k in (300, 17, 500)]
    x[int(columns[300])] = 2
    expected = reference(values.double(), columns.clamp(0, 89), offsets, x.double())
    y = with_cuda.spmv(values, columns, offsets, x, config=SMALL)
    assert y[hit[0]].isinf() and y[hit[1]].isnan() and y[hit[2]].isnan()
    others = torch.ones(90, dtype=torch.bool)
    others[hit] = False
    assert torch.equal(y[others].double(), expected[others])


@NEEDS_COMPILER
@pytest.mark.pooled(5, "emulated: sparse")
def test_wrong_offsets_leave_no_tensor(monkeypatch: pytest.MonkeyPatch, libraries: Path) -> None:
    """Offsets that fall, or that leave the range, give any numbers, and no access past a page's end."""
    scan_emulator.emulate(monkeypatch, libraries)
    family = Family("uniform", 150, 40, 4)
    values, columns, _ = _matrix(family)
    generator = torch.Generator().manual_seed(0)
    for low, high in ((-700, 1300), (0, 601), (599, 600)):
        offsets = torch.randint(low, high, (151,), generator=generator, dtype=torch.int32)
        inputs = [_at_end(t) for t in (values, columns, offsets, _vector(family))]
        assert with_cuda.spmv(*inputs, config=SMALL).shape == (150,)


@NEEDS_COMPILER
@pytest.mark.pooled(5, "emulated: sparse")
def test_rows_close_to_2_31_take_64_bit_offsets(monkeypatch: pytest.MonkeyPatch, libraries: Path) -> None:
    scan_emulator.emulate(monkeypatch, libraries)
    taken: list[torch.dtype] = []
    program = with_cuda.source

    def noting(dtype: torch.dtype, offsets: torch.dtype, *sizes: Any) -> CudaSource:
        taken.append(offsets)
        return program(dtype, offsets, *sizes)

    monkeypatch.setattr(with_cuda, "source", noting)
    monkeypatch.setattr(with_cuda, "MAX_ROWS_INT32", 89)
    for family in FAMILIES[1:3]:  # of 90 and of 81 rows
        matrix, x = _matrix(family), _vector(family)
        assert torch.equal(with_cuda.spmv(*matrix, x, config=SMALL).double(), _expected(matrix, x))
    assert taken == [torch.int64, torch.int32]


FAULTS = {
    "no barrier before the products are read": (
        "x_size, products, count);\n    __syncthreads();",
        "x_size, products, count);",
    ),
    "no barrier before a share's products are read": (
        "x_size, products, count);\n  __syncthreads();",
        "x_size, products, count);",
    ),
    "no barrier before a share's products are written": (
        "__syncthreads();  // all warps have read the tile's products and its list",
        "",
    ),
    "no barrier before the long rows": ("__syncthreads();\n  // The order of the list", "// The order of"),
    "long rows that no warp takes": ("i < *num_long;", "i < 0;"),
    "a group that adds half of its lanes": ("int step = lanes / 2;", "int step = lanes / 4;"),
    "a step too few": ("- lane + lanes - 1) >> shift", "- lane - 1) >> shift"),
    "vectors that are not padded": ("(products + padded(at)) = p", "(products + at) = p"),
    "a guess that counts a row too many": (
        "low = guess + distance(count - 1) + 1;",
        "low = guess + distance(count - 1) + 2;",
    ),
    "a guess that leaves out a row": (
        "high = guess + distance(count);",
        "high = guess + distance(count) - 1;",
    ),
    "empty rows at the end of the matrix": ("if (!warp || tile < tiles - 1)", "if (true)"),
    "a tile without the row before": ("count, num_rows, first > 0}", "count, num_rows, false}"),
    "a tile without its last share": ("&& last_share >= share_end)", "&& last_share > share_end)"),
    "thin shares that no block takes": ("if (start >= rows || !is_thin(offsets, tile, rows))", "if (true)"),
    "thin shares only of blocks with a tile": ("if (start >= rows ||", "if (tile >= tiles ||"),
    "a tail that is stored as a row": (
        "else if (end > stop) tails[tile] = sum;\n      else y[first",
        "else y[first",
    ),
    "a lost tail": ("acc_t sum = tails[tile];", "acc_t sum = 0;"),
    "a carry without the last tile": ("t = tile + 1; t <= last", "t = tile + 1; t < last"),
    "a long carry of one tile fewer": ("t = source + 1 + threadIdx.x", "t = source + 2 + threadIdx.x"),
    "a long carry without its tail": ("sum + tails[source]", "sum"),
    "long carries that no block takes": ("i < num_long[0];", "i < 0;"),
}


@NEEDS_COMPILER
@pytest.mark.pooled(5, "emulated: sparse")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("step", ladder.KERNELS)
def test_each_step_of_the_ladder_is_exact_in_the_emulator(
    step: str, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    scan_emulator.emulate(monkeypatch, libraries)
    for family in FAMILIES:
        matrix, x = _matrix(family), _vector(family)
        inputs = [_at_end(t) for t in (*matrix, x)]
        y = ladder.product(step, *inputs, threads=64)
        assert torch.equal(y.double(), _expected(matrix, x)), family
        inputs[2] = _at_end(matrix[2].flip(0) * 2 - 100)  # offsets that fall, and that leave the range
        assert ladder.product(step, *inputs, threads=64).shape == y.shape


def test_lanes_follow_the_mean_length() -> None:
    assert [ladder.lanes_of(100, n) for n in (0, 300, 1600, 10**6)] == [2, 2, 8, 32]
    assert [with_triton.lanes_of(100, n) for n in (0, 300, 1600, 10**6)] == [2, 4, 16, 64]


@pytest.mark.parametrize("family", (FAMILIES[3], FAMILIES[4], FAMILIES[5]), ids=lambda f: f.kind)
def test_long_rows_in_triton_take_the_whole_program(family: Family) -> None:
    matrix, x = _matrix(family), _vector(family)
    assert torch.equal(with_triton.spmv(*matrix, x, tile=64).double(), _expected(matrix, x))


def test_gradients_are_those_of_a_dense_product() -> None:
    values, columns, offsets = _matrix(Family("duplicates", 12, 5, 4))
    rows = torch.repeat_interleave(torch.arange(12), offsets.diff().long())
    grad = torch.randint(-3, 4, (12,)).float()
    for impl in ("eager", "torch", "triton"):
        x = _vector(Family("duplicates", 12, 5, 4)).requires_grad_()
        leaf = values.clone().requires_grad_()
        ops.spmv(leaf, columns, offsets, x, impl=impl).backward(grad)
        dense = torch.zeros(12, 5).index_put((rows, columns.long()), values, accumulate=True)
        assert leaf.grad is not None and x.grad is not None
        assert torch.equal(x.grad, dense.T @ grad), impl
        assert torch.equal(leaf.grad, grad[rows] * x.detach()[columns.long()]), impl


DUPLICATES = Family("duplicates", 300, 9, 4)
LONG = Family("uniform", 6, 40, 1000)  # more nonzeros than a block sorts


def _is_transposed(family: Family, offsets: torch.dtype = torch.int32) -> bool:
    """Compare the emulated kernels with torch's operations: rows, order, columns and offsets."""
    _, columns, starts = _matrix(family, offsets=offsets)
    t = transpose_cuda.transpose(_at_end(columns), _at_end(starts), family.columns)
    expected = transpose(columns, starts, family.columns)
    return all(
        torch.equal(getattr(t, name).long(), getattr(expected, name).long())
        for name in Transposition.__dataclass_fields__
    )


def _gradients_are_right(family: Family, k: int | None, dtype: torch.dtype = torch.float32) -> bool:
    matrix, dense = _matrix(family, dtype), _vector(family, dtype, k)
    grad = torch.randint(-3, 4, (family.rows, *dense.shape[1:])).to(dtype)
    implementation = with_cuda.SPMV if k is None else with_cuda.SPMM
    dvalues, ddense = implementation.backward(grad, *matrix, dense)  # type: ignore[misc]
    t = transpose(*matrix[1:], family.columns)
    expected = _expected((matrix[0][t.order], t.columns, t.offsets), grad).to(dtype)
    return torch.equal(ddense, expected) and torch.equal(
        dvalues, gradient_of_values(grad, t.rows, matrix[1], dense)
    )


@NEEDS_COMPILER
@pytest.mark.pooled(5, "emulated: sparse")
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64])
def test_transpositions_are_exact_in_the_emulator(
    offsets: torch.dtype, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    scan_emulator.emulate(monkeypatch, libraries)
    for family in (*FAMILIES, REGIONS, DUPLICATES, LONG):
        assert _is_transposed(family, offsets), family


@NEEDS_COMPILER
@pytest.mark.pooled(5, "emulated: sparse")
@pytest.mark.parametrize("k", [None, 5])
def test_gradients_are_exact_in_the_emulator(
    k: int | None, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    scan_emulator.emulate(monkeypatch, libraries)
    for family in (FAMILIES[0], FAMILIES[4], FAMILIES[6], DUPLICATES):
        assert _gradients_are_right(family, k), family
    assert _gradients_are_right(DUPLICATES, k, torch.float64)
    assert _gradients_are_right(FAMILIES[1], k, torch.bfloat16)


@NEEDS_COMPILER
@pytest.mark.pooled(5, "emulated: sparse")
def test_wrong_indices_of_a_gradient_leave_no_tensor(
    monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    """A wrong column is dropped; wrong offsets give any numbers, and no access past a page's end."""
    scan_emulator.emulate(monkeypatch, libraries)
    _, columns, offsets = _matrix(FAMILIES[0])
    columns[3], columns[200] = -5, 40
    t, expected = transpose_cuda.transpose(columns, offsets, 40), transpose(columns, offsets, 40)
    end = int(expected.offsets[-1])
    assert end == 598 and torch.equal(t.offsets.long(), expected.offsets)
    assert torch.equal(t.columns[:end], expected.columns[:end])
    dvalues = transpose_cuda.gradient_of_values(torch.ones(150), t.rows, columns, torch.ones(40))
    assert dvalues.isnan().nonzero().flatten().tolist() == [3, 200]
    generator = torch.Generator().manual_seed(0)
    for low, high in ((-700, 1300), (0, 601), (599, 600)):
        offsets = torch.randint(low, high, (151,), generator=generator, dtype=torch.int32)
        t = transpose_cuda.transpose(_at_end(columns), _at_end(offsets), 40)
        assert int(t.rows.min()) >= 0 and int(t.rows.max()) < 150


TRANSPOSE_FAULTS = {
    "a row that begins with the tile": ("warp ? start + count : start + 1", "warp ? start + count : start"),
    "empty rows": ("&& offsets[row + 1] > offsets[row])", ")"),
    "the tile's first row": ("if (thread == 0) heads[0] = (int)first;", ""),
    "no barrier before the heads": ("  __syncthreads();\n  const offset_t first", "  const offset_t first"),
    "no barrier before the scan": ("  __syncthreads();\n  // Row numbers rise", "  // Row numbers rise"),
    "no barrier before the warps' rows": (
        "  __syncthreads();\n  for (int k = 0; k < warp",
        "  for (int k = 0; k < warp",
    ),
    "no barrier before rows are stored": (
        "  __syncthreads();\n  for (int i = thread; i < count; i += THREADS) row_numbers",
        "  for (int i = thread; i < count; i += THREADS) row_numbers",
    ),
    "the rows of earlier warps": ("k < warp; ++k) before", "k < 0; ++k) before"),
    "the rows of earlier lanes": ("int before = lane ? left : 0;", "int before = 0;"),
    "a column's start is that of the next": ("sorted[middle] < column", "sorted[middle] <= column"),
    "values stay where they are": ("moved[i] = values[order[i]];", "moved[i] = values[i];"),
    "one lane of a gradient": ("int step = LANES / 2;", "int step = 0;"),
    "a column out of range is the last one": ("? column : (int)size;", "? column : (int)size - 1;"),
}


@NEEDS_COMPILER
@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", TRANSPOSE_FAULTS)
def test_a_fault_in_a_transposition_is_caught(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scan_emulator.emulate(monkeypatch, tmp_path)
    right = CudaSource.__getitem__

    def kernel(source: CudaSource, name: str) -> Any:
        if source.file.name == "transpose.cu":
            library = scan_emulator._library(source, name, tmp_path, TRANSPOSE_FAULTS[fault])
            return scan_emulator.warp_emulator.Emulated(library)
        return right(source, name)

    monkeypatch.setattr(CudaSource, "__getitem__", kernel)
    ok = True
    for _ in range(8 if "barrier" in fault else 1):
        ok = ok and all(_is_transposed(f) for f in (FAMILIES[0], FAMILIES[5], REGIONS, DUPLICATES, LONG))
    ok = ok and _gradients_are_right(FAMILIES[0], None) and _gradients_are_right(FAMILIES[0], 5)
    _, columns, offsets = _matrix(FAMILIES[0])
    columns[7] = -1
    ends = [by(columns, offsets, 40).offsets[-1] for by in (transpose_cuda.transpose, transpose)]
    assert not (ok and ends[0] == ends[1])


@pytest.mark.parametrize("k", [None, 5])
def test_a_pattern_has_the_products_and_gradients_of_its_matrix(k: int | None) -> None:
    values, columns, offsets = _matrix(DUPLICATES)
    dense, name = _vector(DUPLICATES, k=k), "spmv" if k is None else "spmm"
    pattern = Pattern.from_csr(columns, offsets, DUPLICATES.columns)
    outcomes = []
    for product in (
        getattr(pattern, name),
        lambda v, d: getattr(ops, name)(v, columns, offsets, d),
    ):
        leaf, factor = values.clone().requires_grad_(), dense.clone().requires_grad_()
        y = product(leaf, factor)
        y.backward(torch.arange(y.numel()).view(y.shape) % 5 - 2.0)
        outcomes.append((y, leaf.grad, factor.grad))
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_a_pattern_does_not_change_with_the_tensors_it_was_made_from() -> None:
    """A transposition of other columns than the product's would give wrong gradients and no error."""
    values, columns, offsets = _matrix(DUPLICATES)
    pattern, x = Pattern.from_csr(columns, offsets, DUPLICATES.columns), _vector(DUPLICATES)
    expected = _expected((values, columns.clone(), offsets.clone()), x)
    columns.fill_(2), offsets.fill_(0)
    assert torch.equal(pattern.spmv(values, x).double(), expected)
    factor = x.clone().requires_grad_()
    pattern.spmv(values, factor).sum().backward()
    assert factor.grad is not None
    sums = torch.zeros(9).index_add(0, pattern.columns.long(), values)
    assert torch.equal(factor.grad, sums)


def test_a_pattern_refuses_what_does_not_fit() -> None:
    values, columns, offsets = _matrix(DUPLICATES)
    with pytest.raises(WeftError, match="columns"):
        Pattern.from_csr(columns, offsets, 1)
    pattern = Pattern.from_csr(columns, offsets, DUPLICATES.columns)
    for wrong in ((values[1:], torch.ones(9)), (values, torch.ones(8)), (values, torch.ones(9, 1))):
        with pytest.raises(WeftError):
            pattern.spmv(*wrong)


def test_a_wrong_column_is_dropped_from_gradients() -> None:
    values, columns, offsets = (t.clone() for t in _matrix(Family("uniform", 6, 5, 2)))
    x, grad = torch.ones(5), torch.ones(6)
    expected = torch.zeros(5).index_add(0, columns[1:].long(), values[1:])
    columns[0] = 77
    dvalues, dx = with_triton.SPMV.backward(grad, values, columns, offsets, x)  # type: ignore[misc]
    assert dvalues[0].isnan() and torch.equal(dvalues[1:], torch.ones(11)) and torch.equal(dx, expected)


def test_indices_out_of_range_get_one_clear_error_on_a_cpu() -> None:
    values, columns, offsets = _matrix(Family("uniform", 4, 5, 2))
    x = torch.ones(5)

    def changed(tensor: torch.Tensor, at: int, to: int) -> torch.Tensor:
        copy = tensor.clone()
        copy[at] = to
        return copy

    for wrong in (
        (values, changed(columns, 3, 5), offsets, x),
        (values, changed(columns, 3, -1), offsets, x),
        (values, columns, changed(offsets, 0, 1), x),
        (values, columns, changed(offsets, 4, 9), x),
        (values, columns, changed(offsets, 2, 1), x),
        (values, columns[:-1], offsets, x),
        (values, columns.long(), offsets, x),
        (values, columns, offsets[:0], x),
        (values, columns, offsets, x.double()),
        (values, columns, offsets, x[:, None]),
    ):
        with pytest.raises(WeftError, match="spmv") as caught:
            ops.spmv(*wrong)
        assert caught.value.expected


def test_int32_offsets_of_too_many_nonzeros_are_refused() -> None:
    # Expanded tensors: nobody has to store 2^31 nonzeros to be told so.
    values, columns = torch.ones(1).expand(2**31), torch.zeros(1, dtype=torch.int32).expand(2**31)
    offsets = torch.tensor([0, 2**31 - 1], dtype=torch.int32)
    with pytest.raises(WeftError, match="int64, since int32 ends"):
        ops.spmv(values, columns, offsets, torch.ones(1))
    with pytest.raises(WeftError, match="which int32 columns can name"):
        ops.spmv(values[:1], columns[:1], offsets.clamp(max=1), values)


def test_parts_of_torch_s_sparse_tensors() -> None:
    dense = torch.randint(-2, 3, (6, 9)).float()
    x = torch.randint(-2, 3, (9,)).float()
    for matrix in (dense.to_sparse_csr(), dense.to_sparse_coo()):
        parts = csr.parts(matrix)
        assert [p.dtype for p in parts] == [torch.float32, torch.int32, torch.int64]
        assert torch.equal(ops.spmv(*parts, x), dense @ x)
    for wrong in (dense, "text", torch.ones(2, 3, 3).to_sparse_csr(), dense.to_sparse_bsr((2, 3))):
        with pytest.raises(WeftError, match="sparse matrix"):
            csr.parts(wrong)  # type: ignore[arg-type]


# ---- A dense matrix


WIDTHS = [
    (torch.float32, torch.int32, 5),
    (torch.float32, torch.int64, 64),
    (torch.float32, torch.int32, 300),  # three slices of columns
    (torch.float16, torch.int32, 24),
    (torch.bfloat16, torch.int64, 1),
    (torch.float64, torch.int32, 6),
]


@NEEDS_COMPILER
@pytest.mark.pooled(5, "emulated: sparse")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "offsets", "k"), WIDTHS)
def test_groups_of_lanes_are_exact_in_the_emulator(
    dtype: torch.dtype, offsets: torch.dtype, k: int, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    scan_emulator.emulate(monkeypatch, libraries)
    for family in FAMILIES if k < 300 else FAMILIES[3:6]:
        matrix, b = _matrix(family, dtype, offsets), _vector(family, dtype, k)
        expected = _expected(matrix, b).to(dtype)
        y = with_cuda.spmm(*(_at_end(t) for t in (*matrix, b)), config=SMALL_MATRIX)
        assert torch.equal(y, expected), family


@NEEDS_COMPILER
@pytest.mark.pooled(5, "emulated: sparse")
def test_wrong_indices_of_a_product_with_a_matrix(monkeypatch: pytest.MonkeyPatch, libraries: Path) -> None:
    """A column out of range makes its row NaN; offsets out of order leave no tensor."""
    scan_emulator.emulate(monkeypatch, libraries)
    family = Family("uniform", 150, 40, 4)
    values, columns, offsets = _matrix(family)
    b = _vector(family, k=5)
    expected = _expected((values, columns, offsets), b)
    columns[77], columns[402] = -1, 40
    y = with_cuda.spmm(*(_at_end(t) for t in (values, columns, offsets, b)), config=SMALL_MATRIX)
    rows = torch.tensor([77 // 4, 402 // 4])
    assert bool(y[rows].isnan().all())
    others = torch.ones(150, dtype=torch.bool).index_fill(0, rows, False)
    assert torch.equal(y[others].double(), expected[others])
    generator = torch.Generator().manual_seed(0)
    for low, high in ((-700, 1300), (0, 601)):
        wrong = torch.randint(low, high, (151,), generator=generator, dtype=torch.int32)
        inputs = [_at_end(t) for t in (values, columns, wrong, b)]
        assert with_cuda.spmm(*inputs, config=SMALL_MATRIX).shape == (150, 5)
    no_rows = with_cuda.spmm(values, columns, offsets, b[:0], config=SMALL_MATRIX)
    assert bool(no_rows.isnan().all())


MATRIX_FAULTS = {
    "no barrier before the nonzeros are read": (
        "acc_t(__int_as_float(0x7fc00000));\n  }\n  __syncthreads();",
        "acc_t(__int_as_float(0x7fc00000));\n  }",
    ),
    "no barrier before the tails are read": (
        "any_ended[group] = head_row >= 0;\n  __syncthreads();",
        "any_ended[group] = head_row >= 0;",
    ),
    "the tail of one group alone": ("if (any_ended[g]) break;", "break;"),
    "tails past a row's end": ("if (any_ended[g]) break;", ""),
    "a lost carry between tiles": (
        "for (index_t t = source; t < tile; ++t) sum += tails[t * k + column];",
        "",
    ),
    "the tail of the last group alone": ("g >= 0 && !any_ended[g + 1]; --g", "g >= 0 && false; --g"),
    "a long row by one warp alone": ("sum += partial[other * 32 + lane];", ";"),
    "a long row that begins one tile late": (") / TILE + warp; t < end", ") / TILE + warp + 1; t < end"),
    "a split that is one place late": ("ends[middle] + middle < place", "ends[middle] + middle <= place"),
    "four rows of b, of which one is dropped": ("add_product(sums, values[at + i], packs[i]);",
                                                "if (i) add_product(sums, values[at + i], packs[i]);"),
}  # fmt: skip


def test_long_rows_in_triton_take_the_whole_program_also_with_a_matrix() -> None:
    family = Family("dense-row", 20, 200, 3)
    matrix, b = _matrix(family), _vector(family, k=5)
    assert torch.equal(with_triton.spmm(*matrix, b).double(), _expected(matrix, b))


def test_gradients_with_a_matrix_are_those_of_a_dense_product() -> None:
    family = Family("duplicates", 12, 5, 4)
    values, columns, offsets = _matrix(family)
    rows = torch.repeat_interleave(torch.arange(12), offsets.diff().long())
    dense = torch.zeros(12, 5).index_put((rows, columns.long()), values, accumulate=True)
    grad = torch.randint(-3, 4, (12, 7)).float()
    for impl in ("eager", "torch", "triton"):
        b, leaf = _vector(family, k=7).requires_grad_(), values.clone().requires_grad_()
        ops.spmm(leaf, columns, offsets, b, impl=impl).backward(grad)
        assert b.grad is not None and leaf.grad is not None
        assert torch.equal(b.grad, dense.T @ grad), impl
        assert torch.equal(leaf.grad, (grad[rows] * b.detach()[columns.long()]).sum(1)), impl
    with pytest.raises(WeftError, match="spmm: b"):
        ops.spmm(values, columns, offsets, torch.ones(5))


# ---- Sliced ELL


def test_sliced_ell_is_exact_on_a_cpu_and_pads_to_the_longest_row_of_a_slice() -> None:
    for family in FAMILIES:
        matrix, x = _matrix(family), _vector(family)
        plain, ordered = (SlicedEll.from_csr(*matrix, family.columns, window=w) for w in (1, 10**6))
        for ell in (plain, ordered):
            assert torch.equal(ell.product(x).double(), _expected(matrix, x)), family
            assert int((ell.columns != PADDING).sum()) == family.nonzeros
        widths = torch.nn.functional.pad(family.lengths(), (0, -family.rows % 32)).view(-1, 32).amax(1)
        assert plain.columns.shape[0] == 32 * int(widths.sum()) >= ordered.columns.shape[0]
    with pytest.raises(WeftError, match="sliced ELL: x"):
        plain.product(torch.ones(3))
    with pytest.raises(WeftError, match="columns"):
        SlicedEll.from_csr(*matrix, 2)


@NEEDS_COMPILER
@pytest.mark.pooled(5, "emulated: sparse")
def test_sliced_ell_in_the_emulator(monkeypatch: pytest.MonkeyPatch, libraries: Path) -> None:
    scan_emulator.emulate(monkeypatch, libraries)
    for family in FAMILIES:
        matrix, x = _matrix(family), _vector(family)
        assert torch.equal(_by_sliced_ell(*matrix, x).double(), _expected(matrix, x)), family


def _by_sliced_ell(*inputs: torch.Tensor) -> torch.Tensor:
    ell = SlicedEll.from_csr(*inputs[:3], inputs[3].shape[0], window=64)
    return ell.launch(_at_end(inputs[3]), torch.empty(ell.num_rows))


def test_sliced_ell_compiles_without_a_gpu() -> None:
    assert all(len(source(torch.bfloat16).compile(arch)) > 1000 for arch in ("sm_80", "sm_90", "sm_100"))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f.kind}-{f.rows}")
def test_sliced_ell_on_a_gpu(family: Family) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        matrix, x = _matrix(family, dtype), _vector(family, dtype)
        ell = SlicedEll.from_csr(*(t.cuda() for t in matrix), family.columns, window=64)
        assert torch.equal(ell.product(x.cuda()).cpu(), _expected(matrix, x).to(dtype))


# ---- Planted faults


STEP_FAULTS = {
    "01_thread_a_row": ("k = row_begin(offsets, row); k < end", "k = row_begin(offsets, row); k <= end"),
    "02_warp_a_row": ("sum = warp_sum(sum);", "sum = warp_sum<16>(sum);"),
    "03_adaptive_lanes": ("if (k < end) sums[0]", "if (k + group < end) sums[0]"),
}

CALLS = {
    "spmv": lambda *inputs: with_cuda.spmv(*inputs, config=SMALL),
    "spmm": lambda *inputs: with_cuda.spmm(*inputs, config=SMALL_MATRIX),
    "sliced ELL": _by_sliced_ell,
    **{step: partial(ladder.product, step, threads=64) for step in ladder.KERNELS},
}
PLANTED = [
    *(("spmv", fault, texts) for fault, texts in FAULTS.items()),
    *(("spmm", fault, texts) for fault, texts in MATRIX_FAULTS.items()),
    *((step, "a wrong end", texts) for step, texts in STEP_FAULTS.items()),
    ("sliced ELL", "padding is added", ("if (column != PADDING) sum", "sum")),
]


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("call", "fault", "texts"), PLANTED, ids=lambda v: v if isinstance(v, str) else "")
def test_a_planted_fault_is_caught(
    call: str, fault: str, texts: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scan_emulator.emulate(monkeypatch, tmp_path, texts)
    # A missing barrier shows in some schedules only, a lost carry in each.
    long_row = REGIONS if call == "spmv" else Family("dense-row", 60, 6000, 3)
    families = (long_row, *FAMILIES)
    for family in families * (10 if "barrier" in fault else 1):
        matrix, dense = _matrix(family), _vector(family, k=5 if call == "spmm" else None)
        try:
            y = CALLS[call](*matrix, dense)
        except EmulatorError:
            return
        if not torch.equal(y.double(), _expected(matrix, dense)):
            return
    pytest.fail("the fault was not caught")
