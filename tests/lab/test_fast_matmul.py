"""Bilinear schemes: exact by integers, counted, recursive on any size; a wrong factor is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import WeftError
from weft.lab import fast_matmul
from weft.lab.fast_matmul import SCHEMES, Scheme, combine, multiply, scheme, shortest_program, standard


@pytest.mark.parametrize(
    ("name", "label", "plain", "additions"),
    [
        ("strassen", "<2,2,2;7>", 18, 18),
        ("winograd", "<2,2,2;7>", 24, 15),
        ("laderman", "<3,3,3;23>", 98, 66),
        ("hopcroft-kerr", "<2,2,3;11>", 20, 20),
        ("flip-3x2x3", "<3,2,3;15>", 67, 47),
        ("winograd-winograd", "<4,4,4;49>", 474, 163),
    ],
)
def test_rank_and_additions(name: str, label: str, plain: int, additions: int) -> None:
    built = scheme(name)
    assert built.label == label and built.plain_additions == plain
    assert sum(built.additions) <= additions


@pytest.mark.parametrize("name", SCHEMES)
def test_a_product_of_integers_is_exact(name: str) -> None:
    built = scheme(name)
    m, n, p = built.size
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-9, 10, (2 * m + 1, 3 * n), generator=generator)
    b = torch.randint(-9, 10, (3 * n, p + 2), generator=generator)
    for levels in (0, 1, 2):
        if built.rank**levels < 600:
            assert torch.equal(multiply(a, b, built, levels), a @ b)


@pytest.mark.parametrize("factor", ["u", "v", "w"])
@pytest.mark.parametrize("row", [0, 3, 6])
def test_a_wrong_coefficient_is_refused(factor: str, row: int) -> None:
    for column in range(4):
        for value in (-1, 0, 1):
            rows = [list(r) for r in getattr(fast_matmul.WINOGRAD, factor)]
            if rows[row][column] == value:
                continue
            rows[row][column] = value
            wrong = replace(fast_matmul.WINOGRAD, **{factor: tuple(map(tuple, rows))})
            with pytest.raises(WeftError, match="terms differ"):
                wrong.verify()


def test_a_scheme_modulo_2_is_for_integers_modulo_2() -> None:
    """Signs do not matter modulo 2: without them Strassen's factors hold there, and only there."""
    unsigned = [tuple(tuple(abs(x) for x in row) for row in getattr(fast_matmul.STRASSEN, f)) for f in "uvw"]
    modular = Scheme("unsigned", (2, 2, 2), *unsigned, field=fast_matmul.MODULO_2)
    modular.verify()
    with pytest.raises(WeftError, match="integers"):
        replace(modular, field=fast_matmul.INTEGERS).verify()
    a, b = (torch.randint(0, 2, (8, 8), generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    assert torch.equal(multiply(a, b, modular, 2), (a @ b) % 2)
    with pytest.raises(WeftError, match="modulo 2"):
        multiply(a.float(), b.float(), modular)


def test_the_tensor_product_and_columns_side_by_side_are_exact() -> None:
    for built in (
        fast_matmul.STRASSEN @ standard(1, 2, 3),
        standard(3, 1, 2) @ fast_matmul.WINOGRAD,
        fast_matmul.side_by_side("wide", fast_matmul.STRASSEN, fast_matmul.STRASSEN, "twice"),
    ):
        built.verify()
    with pytest.raises(WeftError, match="an A of 2 x 2"):
        fast_matmul.side_by_side("no", fast_matmul.STRASSEN, standard(3, 2, 1), "")


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(st.integers(-2, 2), min_size=n, max_size=n), min_size=1, max_size=6)
    )
)
def test_shared_sums_compute_the_same_combinations(rows: list[list[int]]) -> None:
    matrix = tuple(map(tuple, rows))
    for program in (combine(matrix), combine(matrix, 3)):
        assert program.matrix() == matrix
        plain = sum(max(sum(map(bool, row)) - 1, 0) for row in matrix)
        assert program.additions <= plain
        inputs = [torch.tensor(float(i + 1)) for i in range(len(matrix[0]))]
        for value, row in zip(program.run(inputs), matrix, strict=True):
            assert (0.0 if value is None else float(value)) == sum(c * (i + 1) for i, c in enumerate(row))
    assert shortest_program(matrix).additions <= combine(matrix).additions


def test_a_file_is_loaded_and_verified(tmp_path: Path) -> None:
    data = {"name": "mine", "size": [2, 2, 2], **{f: getattr(fast_matmul.STRASSEN, f) for f in "uvw"}}
    path = tmp_path / "scheme.json"
    path.write_text(json.dumps(data))
    loaded = fast_matmul.load(path)
    assert (loaded.u, loaded.v, loaded.w) == (
        fast_matmul.STRASSEN.u,
        fast_matmul.STRASSEN.v,
        fast_matmul.STRASSEN.w,
    )
    broken = (
        {"size": [2, 2]},
        {"size": [2, 2, 3]},
        {"u": data["u"][:6]},
        {"u": [[1.5, 0, 0, 0]] * 7},
        {"u": [[True, 0, 0, 0]] * 7},
        {"w": data["v"]},
        {"field": "complex"},
        {"u": [], "v": [], "w": []},
        {"v": None},
        {"size": [0, 2, 2]},
    )
    for change in broken:
        path.write_text(json.dumps(data | change))
        with pytest.raises(WeftError):
            fast_matmul.load(path)
    path.write_text("[]")
    with pytest.raises(WeftError):
        fast_matmul.load(path)


def test_errors_of_a_call() -> None:
    a = torch.zeros(4, 4)
    for x, y, levels in ((a, torch.zeros(5, 4), 1), (a[0], a, 1), (a, a, -1)):
        with pytest.raises(WeftError, match="a product of two matrices"):
            multiply(x, y, fast_matmul.STRASSEN, levels)
    with pytest.raises(WeftError, match="scheme"):
        scheme("strasen")
    with pytest.raises(WeftError, match="crossover"):
        fast_matmul.crossover(scheme("hopcroft-kerr"), 1.0, 1.0, 4)


def test_the_error_grows_with_the_levels_and_stays_bounded() -> None:
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    winograd = scheme("winograd")
    errors = [fast_matmul.relative_error(multiply(a, b, winograd, level), a, b) for level in range(4)]
    assert errors[3] > errors[0]
    # Higham, chapter 23: a level of Winograd's form multiplies the bound by 18 (here: at most).
    for level in range(4):
        assert errors[level] < 18**level * 1e-5


def test_the_crossover_is_where_both_sides_of_the_model_are_equal() -> None:
    winograd, flops, bandwidth = scheme("winograd"), 1e12, 1e11
    n = fast_matmul.crossover(winograd, flops, bandwidth, 4)
    plain = 2 * n**3 / flops
    one_level = 7 * 2 * (n / 2) ** 3 / flops + 15 * 3 * (n / 2) ** 2 * 4 / bandwidth
    assert plain == pytest.approx(one_level)


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert fast_matmul.main(["--sizes", "16,32", "--levels", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("winograd <2,2,2;7>") and len(lines) == 3 + 4 + 1
    assert lines[-1].startswith("model: ") and all(len(line) <= 110 for line in lines)
    assert [line.split()[2] for line in lines[3:7]] == ["1", "7", "1", "7"]


@pytest.mark.parametrize(
    "arguments",
    [["--sizes", "x"], ["--sizes", "0"], ["--levels", "9"], ["--scheme", "no"], ["--file", "/no/such/file"],
     ["--scheme", "strassen", "--file", "x"]],
)  # fmt: skip
def test_a_wrong_call_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert fast_matmul.main(arguments) == 2
    except OSError:
        assert "--file" in arguments
        return
    assert capsys.readouterr().err.startswith("error: ")
