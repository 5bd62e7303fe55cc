"""Sparse matrices from Matrix Market files and from entries in any order, and the choice by row lengths."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weft import WeftError, ops
from weft.core import registry
from weft.ops.sparse import csr, matrix_market
from weft.ops.sparse.cases import Family
from weft.ops.sparse.row_lengths import row_lengths
from weft.ops.sparse.spec import check_indices

GENERAL = """%%MatrixMarket matrix coordinate real general
% a comment

3 4 4
3 1 -2.5e0
1 2 4
% another
1 1 7.25
3 1 1
"""
DENSE = torch.tensor([[7.25, 4, 0, 0], [0, 0, 0, 0], [-1.5, 0, 0, 0]])


def _read(text: str, folder: Path, dtype: torch.dtype = torch.float32) -> matrix_market.SparseMatrix:
    path = folder / "matrix.mtx"
    path.write_text(text)
    return matrix_market.read(path, dtype)


def _dense(matrix: matrix_market.SparseMatrix) -> torch.Tensor:
    check_indices("spmv", matrix.columns, matrix.offsets, matrix.shape[1])
    columns = [
        ops.spmv(matrix.values, matrix.columns, matrix.offsets, unit, impl="eager")
        for unit in torch.eye(matrix.shape[1], dtype=matrix.values.dtype)
    ]
    return torch.stack(columns, 1)


def test_a_general_matrix_with_comments_and_a_repeated_place(tmp_path: Path) -> None:
    matrix = _read(GENERAL, tmp_path)
    assert matrix.shape == (3, 4) and matrix.offsets.tolist() == [0, 2, 2, 4]
    assert matrix.columns.tolist() == [0, 1, 0, 0] and matrix.values.tolist() == [7.25, 4, -2.5, 1]
    assert torch.equal(_dense(matrix), DENSE)


def test_symmetric_integers_and_patterns(tmp_path: Path) -> None:
    text = "%%MatrixMarket MATRIX coordinate integer symmetric\n3 3 3\n1 1 5\n3 1 -2\n3 2 4\n"
    expected = torch.tensor([[5, 0, -2], [0, 0, 4], [-2, 4, 0]], dtype=torch.float64)
    assert torch.equal(_dense(_read(text, tmp_path, torch.float64)), expected)
    pattern = "%%MatrixMarket matrix coordinate pattern general\n2 3 2\n2 3\n1 1\n"
    assert torch.equal(_dense(_read(pattern, tmp_path)), torch.tensor([[1.0, 0, 0], [0, 0, 1]]))
    empty = "%%MatrixMarket matrix coordinate real general\n2 3 0\n"
    assert torch.equal(_dense(_read(empty, tmp_path)), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("real general", "complex general", 1),
        ("real general", "real skew-symmetric", 1),
        ("coordinate", "array", 1),
        ("%%MatrixMarket", "%MatrixMarket", 1),
        ("3 4 4\n", "3 4\n", 4),
        ("3 4 4\n", "3 -4 4\n", 4),
        ("3 4 4\n", "3 4 3\n", 9),
        ("3 4 4\n", "3 4 5\n", 9),
        ("3 4 4\n", f"3 {2**31} 4\n", 4),
        ("1 2 4", "1 5 4", 6),
        ("1 2 4", "0 2 4", 6),
        ("1 2 4", "1 2", 6),
        ("1 2 4", "1 2 4 4", 6),
        ("1 2 4", "1 2.0 4", 6),
        ("1 2 4", "1 2 4_0", 6),
        ("1 2 4", "1 2 four", 6),
        ("1 2 4", "1 2 1e39", 6),
        ("real general", "real symmetric", 4),
        ("real general", "integer general", 5),
    ],
)
def test_a_wrong_line_gets_one_clear_error(old: str, new: str, line: int, tmp_path: Path) -> None:
    assert old in GENERAL
    with pytest.raises(WeftError, match=f"line {line}:") as caught:
        _read(GENERAL.replace(old, new, 1), tmp_path)
    assert caught.value.expected and caught.value.got


def test_files_that_are_no_text_get_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="line 1: expected %%MatrixMarket"):
        _read("", tmp_path)
    with pytest.raises(WeftError, match="Matrix Market file"):
        matrix_market.read(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WeftError, match="ASCII"):
        matrix_market.read(tmp_path / "binary")
    upper = "%%MatrixMarket matrix coordinate real symmetric\n2 2 1\n1 2 3\n"
    with pytest.raises(WeftError, match="below the diagonal"):
        _read(upper, tmp_path)


def test_entries_in_any_order_become_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.randint(n, (90,), generator=generator) for n in (11, 7))
    values = torch.randint(-3, 4, (90,), generator=generator).float()
    parts = csr.from_coo(rows, columns, values, 11)
    check_indices("spmv", parts[1], parts[2], 7)
    expected = torch.zeros(11, 7).index_put((rows, columns), values, accumulate=True)
    x = torch.randint(-3, 4, (7,), generator=generator).float()
    assert torch.equal(ops.spmv(*parts, x), expected @ x)
    rows[3] = 11  # a row that the matrix has not shows in the offsets
    with pytest.raises(WeftError, match="offsets"):
        check_indices("spmv", *csr.from_coo(rows, columns, values, 11)[1:], 7)
    with pytest.raises(WeftError, match="COO"):
        csr.from_coo(rows, columns[1:], values, 11)


@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        (Family("uniform", 4096, 4096, 16), "cuda/03-adaptive-lanes"),
        (Family("banded", 4096, 4096, 8), "cuda"),  # 17 nonzeros take three rounds of 8 lanes
        (Family("power-law", 4096, 4096, 16), "cuda"),
        (Family("dense-row", 4096, 40960, 16), "cuda"),
        (Family("empty-rows", 4096, 4096, 6), "cuda"),
    ],
    ids=lambda v: v.kind if isinstance(v, Family) else v,
)
def test_the_choice_follows_the_lengths(family: Family, implementation: str) -> None:
    lengths = family.lengths()
    measured = row_lengths(torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))))
    assert measured.implementation == implementation
    assert measured.implementation in registry.implementation_names("spmv")
    assert (measured.rows, measured.nonzeros) == (family.rows, family.nonzeros)
    assert (measured.shortest, measured.longest) == (int(lengths.min()), int(lengths.max()))
    assert 0 < measured.busy <= 1 <= measured.longest_warp


def test_matrices_without_rows_or_nonzeros_have_lengths_too() -> None:
    for offsets in (torch.zeros(1, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)):
        measured = row_lengths(offsets)
        assert (measured.nonzeros, measured.longest, measured.busy) == (0, 0, 1.0)
        assert measured.empty == measured.rows
