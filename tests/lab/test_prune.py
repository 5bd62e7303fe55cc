"""Iterative magnitude pruning: masks, rewinding, controls, images, storage, and the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from helpers.paths import ROOT
from weft.cli import app, output
from weft.core import Interrupted, WeftError, no_log
from weft.core.table import plain_table
from weft.lab.prune import experiment, images, networks, report
from weft.lab.prune.experiment import CONDITIONS, Experiment, Plan
from weft.lab.prune.networks import Snapshot

SMALL = Plan(hidden=(24, 12), networks=3, steps=12, rewind=4, share=0.54, rounds=3, batch=16)
FIELDS = ("values", "means", "squares")
FEW = images.drawn_digits(160, 100, 0)


@pytest.fixture(scope="module")
def small() -> Iterator[Experiment]:
    with experiment.one_thread():
        yield Experiment(FEW, SMALL)


def equal(a: Snapshot, b: Snapshot) -> bool:
    pairs = [zip(getattr(a, f), getattr(b, f), strict=True) for f in FIELDS]
    return a.step == b.step and all(torch.equal(x, y) for p in pairs for x, y in p)


def run(plan: Plan = SMALL) -> dict[str, Any]:
    return experiment.run(FEW, plan, log=no_log, expect=lambda remaining: None)


# Masks


def test_masks_have_exactly_the_counted_weights_and_are_nested(small: Experiment) -> None:
    masks, weights = small.full_masks, small.initial.weights
    for number in (1, 2, 3):
        counts, before = SMALL.counts(small.shapes, number), masks
        masks = networks.pruned(weights, masks, counts)
        for mask, outer, weight, count in zip(masks, before, weights, counts, strict=True):
            assert mask.flatten(1).sum(1).tolist() == [count] * SMALL.networks
            assert not (mask & ~outer).any()
            for m, o, w in zip(mask, outer, weight.abs(), strict=True):
                assert w[m].min() >= w[o & ~m].max()
    # Equal magnitudes and zeros among the weights that are left do not change the count.
    tied = tuple(torch.zeros_like(w) for w in weights)
    again = networks.pruned(tied, masks, [3, 2, 1])
    assert [m.flatten(1).sum(1).tolist() for m in again] == [[3] * 3, [2] * 3, [1] * 3]
    assert not any((m & ~outer).any() for m, outer in zip(again, masks, strict=True))


def test_pruned_weights_are_zero_after_every_step_and_the_others_move(small: Experiment) -> None:
    masks = networks.pruned(small.initial.weights, small.full_masks, SMALL.counts(small.shapes, 2))
    dense = small.train(small.initial, small.full_masks, 4)  # its moments of pruned weights are not zero
    for until in range(5, 9):
        trained = small.train(dense, masks, until)
        for weight, mask, start in zip(trained.weights, masks, dense.weights, strict=True):
            assert not weight[~mask].any()
            assert (weight != start)[mask].float().mean() > 0.5


def test_networks_of_a_stack_are_independent(small: Experiment) -> None:
    """A network trains alone as in the stack: no operation mixes two of them."""
    stack = small.train(small.initial, small.full_masks, 6)
    for i in range(SMALL.networks):
        fields = {f: tuple(t[i : i + 1] for t in getattr(small.initial, f)) for f in FIELDS}

        def batches(step: int, i: int = i) -> tuple[torch.Tensor, torch.Tensor]:
            index = small._order[step][i : i + 1]
            return small.train_x[index], small.train_y[index]

        masks, rate = tuple(m[i : i + 1] for m in small.full_masks), SMALL.learning_rate
        alone = networks.train(Snapshot(**fields, step=0), masks, batches, until=6, learning_rate=rate)
        for a, b in zip(alone.values, stack.values, strict=True):
            torch.testing.assert_close(a[0], b[i], rtol=1e-4, atol=1e-6)


# Rewinding and controls


def test_rewinding_restores_the_values_of_step_k_exactly(small: Experiment) -> None:
    rewound = small.train(small.initial, small.full_masks, SMALL.rewind)
    counts = SMALL.counts(small.shapes, 1)
    trained = small.train(rewound, small.full_masks, SMALL.steps)
    masks = networks.pruned(trained.weights, small.full_masks, counts)
    start, _ = small.conditions(rewound, masks, 1)
    for got, then, mask, last in zip(start.weights, rewound.weights, masks, trained.weights, strict=True):
        winning = got[: SMALL.networks]
        assert torch.equal(winning, torch.where(mask, then, 0.0))
        assert not torch.equal(winning[mask], last[mask])
    assert start.step == SMALL.rewind
    # With no weight pruned, the rewound network repeats the dense training, Adam's moments included.
    assert equal(small.train(rewound, small.full_masks, SMALL.steps), trained)
    assert equal(small.train(small.initial, small.full_masks, SMALL.steps), trained)


def test_the_controls_replace_the_values_or_the_mask(small: Experiment) -> None:
    rewound = small.train(small.initial, small.full_masks, SMALL.rewind)
    masks = networks.pruned(rewound.weights, small.full_masks, SMALL.counts(small.shapes, 2))
    start, all_masks = small.conditions(rewound, masks, 2)
    n = SMALL.networks
    for mask, stacked, weight, original in zip(masks, all_masks, start.weights, rewound.weights, strict=True):
        winning, same, shuffled = stacked.split(n)
        assert torch.equal(winning, mask) and torch.equal(same, mask)
        # The random mask has as many weights in each layer of each network, elsewhere.
        assert torch.equal(shuffled.flatten(1).sum(1), mask.flatten(1).sum(1))
        assert not torch.equal(shuffled, mask)
        won, reinitialised, random = weight.split(n)
        assert torch.equal(won[mask], original[mask])
        assert not (reinitialised[mask] == original[mask]).any()
        assert torch.equal(random[shuffled], original[shuffled]) and not random[~shuffled].any()
    # Each network and each round has its own random mask and its own initialisation.
    assert not torch.equal(all_masks[0][2 * n], all_masks[0][2 * n + 1])
    other, other_masks = small.conditions(rewound, masks, 1)
    assert not torch.equal(other.weights[0][n], start.weights[0][n])
    assert not torch.equal(other_masks[0][2 * n], all_masks[0][2 * n])


# The record


@pytest.fixture(scope="module")
def small_record() -> dict[str, Any]:
    return run()


def test_the_same_seed_gives_the_same_result_on_any_number_of_threads(small_record: dict[str, Any]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        again = run()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert again["rows"] == small_record["rows"]
    assert run(replace(SMALL, seed=1))["rows"] != small_record["rows"]


def test_a_record_has_each_density_with_its_bytes(small_record: dict[str, Any]) -> None:
    rows = small_record["rows"]
    assert [list(r["accuracy"]) for r in rows] == [[CONDITIONS[0]], *[list(CONDITIONS)] * 3]
    assert all(len(v) == 3 for r in rows for v in r["accuracy"].values())
    layers = [256 * 24, 24 * 12, 12 * 10]
    assert rows[0]["weights"] == layers and rows[0]["bytes"]["dense"] == 4 * (sum(layers) + 46)
    assert rows[2]["weights"] == [round(n * 0.46**2) for n in layers]
    assert rows[2]["bytes"]["values"] == 4 * (1300 + 61 + 25 + 46)
    assert rows[2]["bytes"]["bitmask"] == 768 + 36 + 15
    assert rows[2]["bytes"]["indices"] == 2 * (1300 + 61 + 25) + 4 * (25 + 13 + 11)
    assert report.stored(rows[0]["bytes"]) == rows[0]["bytes"]["dense"]
    assert report.stored(rows[3]["bytes"]) < 0.2 * rows[0]["bytes"]["dense"]


def row(*accuracies: tuple[float, ...]) -> list[dict[str, Any]]:
    return [{"round": 5, "density": 0.1, "accuracy": dict(zip(CONDITIONS, accuracies, strict=True))}]


def test_the_verdict_needs_both_intervals_above_zero() -> None:
    plan = Plan(networks=3)
    assert plan.verdict_round == 5 and plan.density(5) == pytest.approx(0.1, rel=1e-3)
    high, low, mixed = (0.9, 0.91, 0.92), (0.7, 0.72, 0.71), (0.8, 0.95, 0.9)
    for accuracies, beats in (
        ((high, low, low), True),
        ((high, low, mixed), False),
        ((high, mixed, low), False),
        ((low, high, high), False),
        ((high, high, high), False),  # a difference of zero beats nothing
    ):
        verdict = experiment.verdict(plan, row(*accuracies))
        assert verdict and verdict["beats_both"] is beats
    margin = experiment.verdict(plan, row(high, low, low))["margins"]["reinitialised"]  # type: ignore[index]
    # Differences 0.20, 0.19, 0.21: mean 0.2, deviation 0.01, Student's t of two degrees of freedom 4.303.
    assert margin["mean"] == pytest.approx(0.2)
    assert margin["high"] - margin["mean"] == pytest.approx(4.303 * 0.01 / 3**0.5)
    assert experiment.verdict(plan, []) is None


def test_an_interrupt_keeps_the_densities_that_are_done(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("[3/4]"):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        experiment.run(FEW, SMALL, log=interrupt, expect=lambda remaining: None)
    record = caught.value.partial
    assert [r["round"] for r in record["rows"]] == [0, 1] and record["verdict"] is None
    report.plot(record, tmp_path / "stopped.svg")
    assert "random mask" in (tmp_path / "stopped.svg").read_text()


# Images


def test_drawn_digits_are_the_same_for_a_seed_and_can_be_learnt() -> None:
    again, other = images.drawn_digits(160, 100, 0), images.drawn_digits(160, 100, 1)
    assert np.array_equal(FEW.train_x, again.train_x) and not np.array_equal(FEW.train_x, other.train_x)
    assert FEW.train_x.shape == (160, 256) and np.bincount(FEW.train_y).tolist() == [16] * 10
    assert not (FEW.train_x[:, None] == FEW.test_x[None]).all(-1).any()
    digits = images.drawn_digits(2000, 500, 0)
    means = np.stack([digits.train_x[digits.train_y == c].mean(0) for c in range(10)])
    nearest = ((digits.test_x[:, None] - means) ** 2).sum(-1).argmin(1)
    # The nearest mean image is right much more often than by chance, and far from always.
    assert 0.2 < (nearest == digits.test_y).mean() < 0.8


def save(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "set.npz", **arrays)
    return folder / "set.npz"


X, Y = np.arange(100 * 12, dtype=np.uint8).reshape(100, 3, 4), np.arange(100) % 4


def test_a_user_s_set_is_split_and_scaled(tmp_path: Path) -> None:
    own = images.read_images(save(tmp_path, x=X, y=Y), 0)
    assert (own.train_x.shape, own.test_x.shape, own.classes) == ((80, 12), (20, 12), 4)
    assert own.train_x.dtype == np.float32
    assert own.train_x.mean() == pytest.approx(0, abs=1e-5) and own.train_x.std() == pytest.approx(
        1, abs=1e-4
    )
    rows = {tuple(r) for r in np.concatenate([own.train_x, own.test_x]).round(5).tolist()}
    assert len(rows) == len({tuple(r) for r in X.reshape(100, 12).tolist()})  # every image once


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "the arrays x and y"),
        ({"x": X, "y": Y[:50]}, r"y of integers, shape \(100,\)"),
        ({"x": X, "y": Y + 0.5}, "y of integers"),
        ({"x": X, "y": Y - 1}, "classes from 0"),
        ({"x": X, "y": np.zeros(100, int)}, "classes from 0, 2 to"),
        ({"x": X.ravel()[:100], "y": Y}, "x of numbers"),
        ({"x": X[:9], "y": Y[:9]}, "at least 100 images"),
        ({"x": X.astype(str), "y": Y}, "x of numbers"),
        ({"x": X.astype(object), "y": Y}, "the arrays x and y"),
        ({"x": np.zeros((100, 0)), "y": Y}, "values an image"),
        ({"x": np.zeros((100, 5000), bool), "y": Y}, "values an image"),
        ({"x": np.where(X == 3, np.nan, X), "y": Y}, "finite"),
        ({"x": np.full((100, 2), 1e300), "y": Y}, "finite"),
    ],
)
def test_another_set_is_refused_with_the_reason(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(WeftError, match=message):
        images.read_images(save(tmp_path, **arrays), 0)


def test_files_that_are_no_set_are_one_error(tmp_path: Path) -> None:
    good = save(tmp_path, x=X, y=Y).read_bytes()
    for content in (b"", b"no archive", good[:300], good[:-40], bytes(len(good))):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(WeftError, match="--data"):
            images.read_images(tmp_path / "bad.npz", 0)
    for path in (tmp_path, tmp_path / "missing.npz", Path("/dev/zero")):
        with pytest.raises(WeftError, match="--data"):
            images.read_images(path, 0)


# The command


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--networks", "2"], "--networks: expected a whole number from 3"),
        (["--steps", "0"], "--steps: expected a whole number from 1"),
        (["--rewind", "1000"], "--rewind: expected a whole number from 0 to 999"),
        (["--rewind", "-1"], "--rewind"),
        (["--rounds", "0"], "--rounds"),
        (["--share", "1"], "--share: expected a number between 0 and 1"),
        (["--share", "nan"], "--share"),
        (["--rounds", "2"], "about 10 % of the weights, got 39.8 % at the nearest"),
        (["--data", "no-such.npz"], "--data"),
        (["--out", __file__], "--out: expected a folder"),
    ],
)
def test_invalid_arguments_are_refused_before_any_work(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiment, "run", None)
    done = CliRunner().invoke(app, ["prune", *options])
    assert isinstance(done.exception, WeftError) and message in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_the_help_states_the_defaults_of_the_plan() -> None:
    page = " ".join(CliRunner().invoke(app, ["prune", "--help"]).output.split())
    plan, quick = Plan(), experiment.QUICK
    for field in ("networks", "steps", "rounds"):
        assert f"[default: {getattr(plan, field)}; with --quick {getattr(quick, field)}]" in page, field
    assert f"[default: {plan.share}]" in page and f"[default: {plan.rewind}]" in page


@pytest.mark.pooled(3, "commands that measure")
def test_the_quick_command_prints_json_and_writes_record_and_picture(tmp_path: Path) -> None:
    out = tmp_path / "out"
    call = [sys.executable, "-m", "weft", "prune", "--quick", "--steps", "10", "--json", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"}
    done = subprocess.run(call, capture_output=True, text=True, env=environment)
    record = json.loads(done.stdout)
    assert done.returncode == (0 if record["verdict"]["beats_both"] else 1), done.stderr
    assert json.loads((out / report.RECORD).read_text()) == record
    assert "winning ticket, 95 % interval" in (out / report.PICTURE).read_text()
    assert len(record["rows"]) == 6 and record["plan"]["steps"] == 10
    assert record["verdict"]["density"] == pytest.approx(0.1, abs=0.001)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(("passed: winning tickets beat", "failed: winning tickets do not beat"))


def test_a_stopped_command_shows_and_saves_the_densities_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = experiment._rounds

    def stopped_rounds(*arguments: Any) -> Iterator[dict[str, Any]]:
        for done in rounds(*arguments):
            yield done
            if done["round"] == 1:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(experiment, "_rounds", stopped_rounds)
    before = torch.get_num_threads()
    done = CliRunner().invoke(app, ["prune", "--quick", "--steps", "3", "--out", str(tmp_path)])
    assert done.exit_code == 130, done.output
    assert done.stdout.splitlines()[-1].startswith("stopped after 2 of 6 densities")
    record = json.loads((tmp_path / report.RECORD).read_text())
    assert record["stopped"] is True and [r["round"] for r in record["rows"]] == [0, 1]
    assert torch.get_num_threads() == before


def test_tables_of_the_committed_record_fit_80_columns() -> None:
    (file, *_) = sorted((ROOT / "results").glob(f"*/{report.RECORD}"))
    record = json.loads(file.read_text())
    settings = {**record["plan"], "hidden": tuple(record["plan"]["hidden"])}
    assert record["verdict"] == experiment.verdict(Plan(**settings), record["rows"])
    for columns, rows in (report.accuracy_table(record), report.storage_table(record)):
        lines = [line.plain for line in output.table_lines(plain_table(columns, rows, numeric=columns), 80)]
        assert max(map(len, lines)) <= 80 and "left out" not in "".join(lines)
    text = report.markdown(ROOT / "results")
    assert report.verdict_text(record) in text and record["machine"]["device"] in text
    assert "Not measured yet" in report.markdown(ROOT / "no-such-folder")
