"""Transpositions and gradients of sparse products: kernels in an emulator, planted faults, and patterns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import scan_emulator
from helpers.scan_emulator import COMPILER
from helpers.sparse_matrices import FAMILIES, REGIONS, at_end, expected_product, matrix_of, vector_of
from weft import WeftError, ops
from weft.backends.nvrtc import CudaSource
from weft.ops.sparse import transpose_cuda, with_cuda
from weft.ops.sparse.cases import Family
from weft.ops.sparse.pattern import Pattern
from weft.ops.sparse.transpose import Transposition, gradient_of_values, transpose

NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of compiled kernels without a fault, which tests share."""
    return tmp_path_factory.mktemp("sparse")


@pytest.fixture(autouse=True)
def sparse_device(monkeypatch: pytest.MonkeyPatch) -> None:
    header = Path(scan_emulator.__file__).with_name("sparse_emulator.hpp")
    monkeypatch.setattr(scan_emulator, "HEADER", header)


DUPLICATES = Family("duplicates", 300, 9, 4)
LONG = Family("uniform", 6, 40, 1000)  # more nonzeros than a block sorts


def _is_transposed(family: Family, offsets: torch.dtype = torch.int32) -> bool:
    """Compare the emulated kernels with torch's operations: rows, order, columns and offsets."""
    _, columns, starts = matrix_of(family, offsets=offsets)
    t = transpose_cuda.transpose(at_end(columns), at_end(starts), family.columns)
    expected = transpose(columns, starts, family.columns)
    return all(
        torch.equal(getattr(t, name).long(), getattr(expected, name).long())
        for name in Transposition.__dataclass_fields__
    )


def _gradients_are_right(family: Family, k: int | None, dtype: torch.dtype = torch.float32) -> bool:
    matrix, dense = matrix_of(family, dtype), vector_of(family, dtype, k)
    grad = torch.randint(-3, 4, (family.rows, *dense.shape[1:])).to(dtype)
    implementation = with_cuda.SPMV if k is None else with_cuda.SPMM
    dvalues, ddense = implementation.backward(grad, *matrix, dense)  # type: ignore[misc]
    t = transpose(*matrix[1:], family.columns)
    expected = expected_product((matrix[0][t.order], t.columns, t.offsets), grad).to(dtype)
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
    _, columns, offsets = matrix_of(FAMILIES[0])
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
        t = transpose_cuda.transpose(at_end(columns), at_end(offsets), 40)
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
    _, columns, offsets = matrix_of(FAMILIES[0])
    columns[7] = -1
    ends = [by(columns, offsets, 40).offsets[-1] for by in (transpose_cuda.transpose, transpose)]
    assert not (ok and ends[0] == ends[1])


@pytest.mark.parametrize("k", [None, 5])
def test_a_pattern_has_the_products_and_gradients_of_its_matrix(k: int | None) -> None:
    values, columns, offsets = matrix_of(DUPLICATES)
    dense, name = vector_of(DUPLICATES, k=k), "spmv" if k is None else "spmm"
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
    values, columns, offsets = matrix_of(DUPLICATES)
    pattern, x = Pattern.from_csr(columns, offsets, DUPLICATES.columns), vector_of(DUPLICATES)
    expected = expected_product((values, columns.clone(), offsets.clone()), x)
    columns.fill_(2), offsets.fill_(0)
    assert torch.equal(pattern.spmv(values, x).double(), expected)
    factor = x.clone().requires_grad_()
    pattern.spmv(values, factor).sum().backward()
    assert factor.grad is not None
    sums = torch.zeros(9).index_add(0, pattern.columns.long(), values)
    assert torch.equal(factor.grad, sums)


def test_a_pattern_refuses_what_does_not_fit() -> None:
    values, columns, offsets = matrix_of(DUPLICATES)
    with pytest.raises(WeftError, match="columns"):
        Pattern.from_csr(columns, offsets, 1)
    pattern = Pattern.from_csr(columns, offsets, DUPLICATES.columns)
    for wrong in ((values[1:], torch.ones(9)), (values, torch.ones(8)), (values, torch.ones(9, 1))):
        with pytest.raises(WeftError):
            pattern.spmv(*wrong)
