"""The command that says what a choice of a product's configuration loses. No clock runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from weft.core import WeftError
from weft.lab import product_choices
from weft.lab.product_choices import Timing
from weft.ops._common.products import wgmma
from weft.ops._common.products.wgmma_model import Config
from weft.workbench.tuning import audit_points


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call each contender once; contender i takes i + 2 us. There is one small model."""

    def times(calls: Sequence[Callable[[], Any]], count: int, device: str) -> list[Timing]:
        for call in calls:
            call()
        return [Timing(i + 2.0, 1000.0) for i in range(len(calls))]

    model = {"width": 64, "mlp": 128, "heads": 2, "head_dim": 32, "vocab": 77}
    shapes = {"tokens": [16, 128, 512], "models": [model]}
    monkeypatch.setattr(product_choices, "timings", times)
    monkeypatch.setattr(product_choices, "model_shapes", lambda: shapes)
    monkeypatch.setattr(wgmma, "forward_with", lambda config, a, b, splits=1: torch.mm(a, b))
    monkeypatch.setattr(product_choices.with_cuda, "forward", torch.mm)
    monkeypatch.setattr(product_choices.with_triton, "forward", torch.mm)


def test_every_configuration_has_a_line_with_its_bytes_a_cycle() -> None:
    head, *lines = product_choices.configuration_lines("cpu", [((256, 512, 128), (True, False))])
    assert head.startswith("256 512 128 chosen ")
    assert [line.split()[0] for line in lines[:3]] == ["cublas", "cublaslt", "triton"]
    names = {line.split()[0] for line in lines}
    assert {"256c2", "256c2b4", "192c1pb16", "192c2ap"} <= names
    # 2 tiles below each other, 2 beside; 2 steps of 128 bytes; 128 rows of a and half of 256 columns of b.
    (pair,) = (line for line in lines if line.split()[0] == "256c2")
    microseconds = float(pair.split()[1])
    assert int(pair.split()[-1]) == round(4 * 2 * 256 * 128 / (microseconds * 1000))


def test_random_products_are_of_models_and_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_choices, "model_shapes", audit_points.model_shapes)
    problems = product_choices.random_problems(100, 18)
    assert len(set(problems)) == 100 == len(problems)
    assert problems == product_choices.random_problems(100, 18) != product_choices.random_problems(100, 19)
    assert {p.kind for p in problems} == {"forward", "dx", "dw"}
    assert all(x % 8 == 0 for p in problems for x in p.size)


def test_more_products_than_the_models_have_are_refused() -> None:
    with pytest.raises(WeftError, match="random products"):
        product_choices.random_problems(1000, 18)


def test_the_survey_times_the_options_near_the_best_one() -> None:
    lines = [json.loads(line) for line in product_choices.survey_lines("cpu", 4, 18)]
    problems = product_choices.random_problems(4, 18)
    assert [(line["m"], line["n"], line["k"]) for line in lines] == [p.size for p in problems]
    for line, problem in zip(lines, problems, strict=True):
        options = product_choices.survey_options(problem.size)
        assert list(line["us"]) == [f"{config.label} s{splits}" for config, splits in options]
        assert line["libraries"][0] == len(options) + 2.0
    large = product_choices.survey_options((512, 768, 3072))
    assert {config.k_parts for config, _ in large} > {1, 2} and {splits for _, splits in large} > {1, 2}


def test_the_worst_products_are_timed_with_all_configurations() -> None:
    lines = list(product_choices.random_lines("cpu", 4, 18))
    assert lines[0].startswith("4 random products")
    assert lines[1].endswith("2.0 3.0 4.0 1.500")
    assert lines[5].startswith("all: 4 products, geometric mean 1.500") and lines[5].endswith("0 below 0.9")
    worst = lines[lines.index(next(line for line in lines if line.startswith("the worst"))) + 1 :]
    assert len(worst) == 4
    assert all("256c2s1 2.0" in line for line in worst)  # the first of all configurations


def test_unaligned_products_stand_beside_their_neighbours() -> None:
    _, *lines, last = product_choices.unaligned_lines("cpu", 3, 18)
    for i, line in enumerate(lines):
        n, k = map(int, line.split()[1:3])
        assert (n % 8, k % 8) == ((5, 0), (0, 5), (5, 5))[i]
        assert "2.0 3.0 1.500; 4.0" in line
    assert last == "geometric mean 1.500, least 1.500"


def test_the_mean_clock_is_the_median_of_the_sms() -> None:
    begin = torch.tensor([[5, 100], [7, 100], [0, 0]])
    end = torch.tensor([[5 + 3000, 2100], [7 + 3200, 2100], [0, 0]])
    assert product_choices.mean_mhz(torch.stack([begin, end])) == pytest.approx(1500)


def test_bytes_from_l2_count_a_shared_tile_once() -> None:
    alone = product_choices.l2_bytes((512, 512, 64), Config(columns=256, stages=4))
    pair = product_choices.l2_bytes((512, 512, 64), Config(columns=256, stages=4, cluster=2))
    assert (alone, pair) == (8 * 384 * 128, 8 * 256 * 128)
