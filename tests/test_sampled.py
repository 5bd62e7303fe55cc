"""Samples of tests: equal for equal seeds, different for different seeds, and everything on request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from helpers import sampling

POPULATION = list(range(10))


@pytest.fixture(autouse=True)
def no_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_SAMPLE_ALL", raising=False)


def sample_with_seed(monkeypatch: pytest.MonkeyPatch, seed: int, name: str = "one") -> list[int]:
    monkeypatch.setenv("WEFT_SAMPLE_SEED", str(seed))
    return sampling.sample(POPULATION, 3, name)


def test_a_seed_gives_one_sample_and_all_seeds_give_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [sample_with_seed(monkeypatch, seed) for seed in range(40)]
    assert samples == [sample_with_seed(monkeypatch, seed) for seed in range(40)]
    assert all(len(s) == 3 and s == sorted(s) for s in samples)
    assert {element for s in samples for element in s} == set(POPULATION)
    assert samples != [sample_with_seed(monkeypatch, seed, "another") for seed in range(40)]
    monkeypatch.setenv("WEFT_SAMPLE_ALL", "1")
    assert sample_with_seed(monkeypatch, 0) == POPULATION


def item(test: str, number: int, *marks: pytest.Mark) -> Any:
    by_name = {mark.name: mark for mark in marks}
    callspec = SimpleNamespace(params={"number": number})
    return SimpleNamespace(
        nodeid=f"tests/a.py::{test}[{number}]", get_closest_marker=by_name.get, callspec=callspec
    )


def test_a_marker_leaves_out_all_but_its_count_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_SAMPLE_SEED", "7")
    odd = pytest.mark.sampled(2, each=lambda number: number % 2).mark
    plain, exhaustive = pytest.mark.sampled(3).mark, pytest.mark.exhaustive.mark
    sampled = [item("test_odd", n, odd) for n in range(10)] + [item("test_plain", n, plain) for n in range(9)]
    others = [item("test_unmarked", n) for n in range(3)] + [item("test_plain", 99, plain, exhaustive)]
    left_out = sampling.left_out([*sampled, *others])
    run = [i for i in sampled if i not in left_out]
    assert [i for i in others if i in left_out] == []
    assert [i.nodeid for i in run] == [i.nodeid for i in sampled if i in run] and len(run) == 2 + 2 + 3
    assert sorted(i.callspec.params["number"] % 2 for i in run if "odd" in i.nodeid) == [0, 0, 1, 1]


def test_a_pool_leaves_out_all_but_its_count_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    pooled, sampled = pytest.mark.pooled(2, "stopped").mark, pytest.mark.sampled(1).mark
    items = [item(f"test_{test}", n, pooled, sampled) for test in "abcde" for n in range(3)]
    runs = set()
    for seed in range(60):
        monkeypatch.setenv("WEFT_SAMPLE_SEED", str(seed))
        left_out = sampling.left_out([*items, item("test_unmarked", 0)])
        run = [i.nodeid for i in items if i not in left_out]
        assert len(run) == len({name.partition("[")[0] for name in run}) == 2
        assert len(left_out) == len(items) - 2
        runs |= set(run)
    assert runs == {i.nodeid for i in items}
    with pytest.raises(pytest.UsageError, match="one number"):
        sampling.left_out([*items, item("test_f", 0, pytest.mark.pooled(3, "stopped").mark)])
    monkeypatch.setenv("WEFT_SAMPLE_ALL", "1")
    assert sampling.left_out(items) == []
