"""The MLP study of a planted machine, its rounds, its profile, and its command."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from study_toys import FAST, noisy
from weft.cli import app
from weft.core import Ceilings, WeftError
from weft.workbench.statistics import summarise
from weft.workbench.study import cost, drawn, mlp, profiled, sizes, stopwatch, words
from weft.workbench.study.cost import Shape
from weft.workbench.study.model import Trainer, draw
from weft.workbench.study.sizes import Point
from weft.workbench.study.stopwatch import Timed

ROOT = Path(__file__).resolve().parent.parent


def planted(chosen: sizes.Sizes, ceilings: Ceilings, slower: float = 1.2) -> dict[Point, Timed]:
    """Timings of a machine that takes ``slower`` times what the roofline allows, and 2 us a call;
    its cache holds 64 MB, and what fits there takes a third of that."""
    found = {}
    for point in chosen.points():
        us = 2 + slower * 1e6 * point.steps * cost.floor(point.shape, point.phase, ceilings)
        cold = cost.resident_bytes(point.shape, point.phase) > 128e6
        us = us if cold else us / 3
        summary = summarise(noisy([us] * 9, 0.003))
        found[point] = Timed(summary=summary, flags=(), loss=0.5, cold=cold)
    return found


@pytest.fixture(scope="module")
def a_study() -> dict[str, Any]:
    """A whole study of small real models, whose times are a planted machine's at full size."""
    chosen, large = sizes.default("cpu", quick=True), sizes.default("cuda")
    with pytest.MonkeyPatch.context() as patch:
        answer = (planted(chosen, FAST), {})
        patch.setattr(stopwatch, "time_points", lambda *arguments: answer)
        found = mlp.run("cpu", chosen, quick=True, say=lambda line: None)
    timed = planted(large, FAST)
    found |= {
        "sizes": vars(large),
        "base": vars(large.base),
        "fits": mlp.fits(large, timed, FAST),
        "turn": mlp.turns(large, timed, FAST),
        "points": {
            name: [mlp._row(p, timed[p], FAST, "cuda") for p in points]
            for name, points in large.sweeps().items()
        },
    }
    found["profile"][1]["batch"] = large.base.batch
    found["ceilings"]["matrix"] = dict(FAST.matrix)
    return found | {"wrong": mlp.wrong(found)}


@pytest.fixture
def study(a_study: dict[str, Any]) -> dict[str, Any]:
    """A copy to change, as it comes back from its file."""
    found: dict[str, Any] = json.loads(json.dumps(a_study))
    return found


def test_the_study_of_a_planted_machine_says_what_was_planted(
    study: dict[str, Any], tmp_path: Path
) -> None:
    turn = study["turn"]
    for phase in cost.PHASES:
        predicted, measured = turn[phase]["predicted"], turn[phase]["measured"]
        assert measured == pytest.approx(predicted, rel=0.6), phase
        assert turn[phase]["below"] < 0.2 and turn[phase]["above"] > 0.7
    # The optimizer's bytes do not grow with the batch, so a step turns later than a forward.
    assert turn["step"]["predicted"] > 2 * turn["forward"]["predicted"] > 300
    layers = study["fits"]["layers"]["step"]
    assert layers["each"] == pytest.approx(1.2 * layers["model"]["each"], rel=0.05)
    assert layers["cold"] and study["fits"]["width"]["forward"]["cold"]
    assert study["fits"]["width"]["step"]["slope"] == pytest.approx(1.95, abs=0.1)
    assert study["wrong"] == []
    told = " ".join(words.sentences(study))
    assert f"at a batch of {turn['step']['measured']:.0f}" in told and "Noisy" not in told
    folder = tmp_path / "results" / "a-gpu"
    folder.mkdir(parents=True)
    study["device"] = "cuda"
    (folder / words.RECORD).write_text(json.dumps(study))
    page = words.figures(tmp_path / "results")
    assert told in page and "A CPU: not measured yet: `weft study mlp --device cpu`" in page
    assert page.count("![") == 5 and "study-mlp-batch.svg" in page
    assert len(drawn.pictures(study, tmp_path)) == 5
    batch = (tmp_path / "study-mlp-batch.svg").read_text()
    assert f"turns at {turn['forward']['predicted']}, predicted" in batch


def test_faults_are_told(study: dict[str, Any]) -> None:
    row = study["points"]["batch"][3]
    for change, said in (
        ({"loss": float("nan")}, "the loss is nan"),
        ({"loss": float("inf")}, "the loss is inf"),
        ({"flags": ["suspect: clocks disagree (1 us, 9 us)"]}, "clocks disagree"),
        ({"flags": ["faster than the matrix ceiling"]}, "faster than the matrix ceiling"),
    ):
        kept = dict(row)
        row.update(change)
        assert len(mlp.wrong(study)) == 1 and said in mlp.wrong(study)[0]
        row.clear()
        row.update(kept)
    study["flops"]["ours"] += 1
    assert "FLOPs" in mlp.wrong(study)[0]
    point = Point(Shape(batch=4096, depth=16, width=4096, dtype="bf16"), "forward")
    quick = Timed(summary=summarise([100.0] * 5), flags=(), loss=0.0, cold=True)
    assert "faster than the matrix ceiling" in mlp._row(point, quick, FAST, "cuda")["flags"]
    nothing = words.figures(Path("no-such-folder"))
    assert "An NVIDIA GPU: not measured yet" in nothing


# The clock's rounds


@dataclass(eq=False)
class Toy:
    """A rig whose samples take a planted time of a clock that only it moves, the first more."""

    clock: list[float]
    us: float
    order: list[Toy]

    def sample(self) -> float:
        self.clock[0] += self.us / 1e6
        self.order.append(self)
        return self.us + 1000 * (self.order.count(self) == 1)


@pytest.mark.parametrize(("seconds", "rounds"), [(0.001, 3), (3.1, 6), (60.0, 100)])
def test_rounds_keep_all_but_the_first_and_the_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int
) -> None:
    clock, order, said = [0.0], [], []
    monkeypatch.setattr(stopwatch, "_now", lambda: clock[0])
    points = sizes.default("cpu", quick=True).points()[:3]
    rigs: Any = {p: Toy(clock, us, order) for p, us in zip(points, (1e5, 2e5, 3e5), strict=True)}
    readings: Any = SimpleNamespace(read=dict)
    samples, _ = stopwatch._rounds(rigs, readings, seconds, said.append)
    assert {len(s) for s in samples.values()} == {rounds}
    assert [set(samples[p]) for p in points] == [{1e5}, {2e5}, {3e5}]  # none of the slow first
    turns = {tuple(id(t) for t in order[i : i + 3]) for i in range(0, len(order), 3)}
    assert len(turns) > 1 and all(len(set(t)) == 3 for t in turns)  # in random order, all in each
    assert said[0] == "warm" and all("about" in line for line in said[1:])


# The model and its profile


def test_a_trainer_trains_only_the_layers_it_went_through() -> None:
    torch.manual_seed(0)
    trainer = Trainer(4, 32, "fp32", "cpu")
    x, target = draw(16, 32, "fp32", "cpu")
    before = [layer.weight.detach().clone() for layer in trainer.model.layers]
    losses = [float(trainer.step(x, target, 3)) for _ in range(60)]
    assert losses[-1] < 0.9 * losses[0]
    moved = [
        not torch.equal(w, one.weight) for w, one in zip(before, trainer.model.layers, strict=True)
    ]
    assert moved == [True, True, True, False]
    assert float(trainer.gradients(x, target, 3)) == float(trainer.gradients(x, target, 3))
    assert not trainer.forward(x).requires_grad and trainer.forward(x).shape == (16, 32)


def event(name: str, start: float, own: float, whole: float | None = None) -> Any:
    times = dict.fromkeys(("self_device_time_total", "self_cpu_time_total"), own)
    times |= dict.fromkeys(("device_time_total", "cpu_time_total"), whole or own)
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start), **times)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_profile_finds_each_layer_and_kind(on_gpu: bool) -> None:
    at = itertools.count()
    events = []
    for _ in range(profiled.STEPS):
        for layer in (1, 2):
            events.append(event("aten::linear", next(at), 0, 10 * layer))
            events.append(event("aten::addmm", next(at), 10 * layer))
            events.append(event("aten::gelu", next(at), layer))
        for layer in (2, 1):
            events.append(event(f"{profiled.NODE}GeluBackward0", next(at), 0, 2 * layer))
            events.append(event("aten::gelu_backward", next(at), 2 * layer))
            events.append(event(f"{profiled.NODE}AddmmBackward0", next(at), 0, 20 * layer))
            events.append(event("aten::mm", next(at), 20 * layer))
        events.append(event("aten::_fused_adamw_", next(at), 32))
        events.append(event("aten::sum", next(at), 19))
    found = profiled.sum_up(reversed(events), 2, on_gpu=on_gpu)
    assert found.us == 90 + 9 + 32 + 19
    assert found.shares == {
        k: pytest.approx(v / 150)
        for k, v in {"matmul": 90, "gelu": 9, "optimizer": 32, "other": 19}.items()
    }
    for number, layer in enumerate(found.layers, 1):
        assert layer == {
            "linear": pytest.approx(10 * number),
            "gelu": pytest.approx(number),
            "linear backward": pytest.approx(20 * number),
            "gelu backward": pytest.approx(2 * number),
        }
    assert profiled.sum_up(events[1:], 2, on_gpu=on_gpu).layers == ()  # rather none than wrong ones
    with pytest.raises(RuntimeError, match="no time"):
        profiled.sum_up([], 2, on_gpu=on_gpu)


def test_a_real_profile_has_every_layer() -> None:
    trainer = Trainer(3, 64, "fp32", "cpu")
    x, target = draw(32, 64, "fp32", "cpu")
    found = profiled.profile(lambda: trainer.step(x, target), 3, "cpu")
    assert sum(found.shares.values()) == pytest.approx(1)
    assert all(found.shares[k] > 0 for k in ("matmul", "gelu", "optimizer"))
    assert len(found.layers) == 3
    assert all(
        set(one) == {"linear", "gelu", "linear backward", "gelu backward"} and min(one.values()) > 0
        for one in found.layers
    )


# The command


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"}


@pytest.mark.slow
def test_the_command_answers_draws_and_draws_again(tmp_path: Path) -> None:
    asked = ["--device", "cpu", "--quick", "--json", "--out", str(tmp_path / "a")]
    call = [sys.executable, "-m", "weft", "study", "mlp", *asked]
    done = subprocess.run(call, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    study = json.loads(done.stdout)
    assert study == json.loads((tmp_path / "a" / "study.json").read_text())
    assert study["flops"]["ours"] == study["flops"]["torch"] > 0
    assert study["wrong"] == [] and study["machine"]["versions"]["torch"]
    rows = [r for rows in study["points"].values() for r in rows]
    assert all(r["us"] > 0 and r["samples"] >= 3 and math.isfinite(r["loss"]) for r in rows)
    assert "s left" in done.stderr
    again = ["--redraw", str(tmp_path / "a" / "study.json"), "--out", str(tmp_path / "b")]
    drawn_again = CliRunner().invoke(app, ["study", "mlp", *again])
    assert drawn_again.exit_code == 0 and "optimizer" in drawn_again.stdout
    for name in drawn.NAMES:
        file = drawn.file_name(name)
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert not (tmp_path / "b" / "study.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cnn"], "a study: expected mlp, got cnn"),
        (["mlp", "--depths", "1,x,3"], "--depths"),
        (["mlp", "--depths", "1,2"], "3 or more"),
        (["mlp", "--widths", "0,8,16"], "from 1"),
        (["mlp", "--batches", "1,2,4,8"], "5 or more"),
        (["mlp", "--dtype", "fp8"], "fp32 or bf16 or fp16"),
        (["mlp", "--widths", "8,16,1000000"], "GB of memory"),
        (["mlp", "--redraw", "no-such.json"], "--redraw"),
        (["mlp", "--out", __file__], "expected a folder"),
    ],
)
def test_a_call_that_cannot_be_answered_says_why(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    device = [] if "--redraw" in arguments or "cnn" in arguments else ["--device", "cpu"]
    done = CliRunner().invoke(app, ["study", *arguments, *device])
    assert isinstance(done.exception, WeftError) and said in str(done.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_on_a_gpu_a_small_study_is_captured_and_sound() -> None:
    chosen = sizes.Sizes(
        depths=(2, 4, 6),
        widths=(256, 512, 1024),
        batches=(1, 8, 64, 512, 4096),
        steps=(1, 2, 4),
        dtype="bf16",
    )
    study = mlp.run("cuda", chosen, quick=True, say=lambda line: None)
    assert study["wrong"] == []
    rows = [r for rows in study["points"].values() for r in rows]
    assert not any("no-graph" in flag or "host-bound" in flag for r in rows for flag in r["flags"])
    assert study["fits"]["steps"]["step"]["each"] > 0
    for seen in study["profile"]:
        assert len(seen["layers"]) == 4 and seen["shares"]["matmul"] > 0.02
        assert seen["shares"]["optimizer"] > 0.003
