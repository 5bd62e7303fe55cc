"""The search in the flip graph finds schemes that verify, and lifts them to the integers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.lab import fast_matmul, flip_graph
from weft.lab.fast_matmul import INTEGERS, MODULO_2, standard


@pytest.mark.parametrize(
    ("size", "rank", "seed"), [((2, 2, 2), 7, 0), ((2, 2, 3), 11, 0), ((3, 2, 3), 15, 1)]
)
def test_a_scheme_is_found_and_lifted(size: tuple[int, int, int], rank: int, seed: int) -> None:
    scheme = flip_graph.search(size, rank, seed=seed, flips=200_000)
    assert scheme is not None and scheme.rank == rank and scheme.field == MODULO_2
    scheme.verify()
    lifted = flip_graph.lift(scheme)
    assert lifted is not None and lifted.field == INTEGERS and lifted.rank == rank
    lifted.verify()
    assert {x for rows in (lifted.u, lifted.v, lifted.w) for row in rows for x in row} <= {-1, 0, 1}


def test_an_impossible_rank_is_not_found() -> None:
    assert flip_graph.search((2, 2, 2), 6, flips=3000) is None  # 7 is the least


def test_signs_are_lost_and_found() -> None:
    for scheme in (fast_matmul.STRASSEN, fast_matmul.LADERMAN, standard(2, 3, 2)):
        rows = flip_graph._to_bits(scheme)
        lifted = flip_graph.lift(flip_graph._to_scheme(rows, scheme.size))
        assert lifted is not None and lifted.rank == scheme.rank


def test_the_command_prints_a_scheme_that_can_be_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flip_graph.main(["2x2x2", "--rank", "7"]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "scheme.json"
    path.write_text(text)
    assert fast_matmul.load(path).label == "<2,2,2;7>"
    assert json.loads(text)["field"] == INTEGERS
    assert flip_graph.main(["2x2x2", "--rank", "6", "--flips", "100"]) == 1
    assert flip_graph.main(["2x2", "--rank", "6"]) == 2
