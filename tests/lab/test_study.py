"""The MLP study of a simulated machine, its sampling rounds, its profile, and its command."""

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

from helpers.paths import ROOT
from helpers.study_toys import FAST, noisy
from weft.cli import app
from weft.core import Ceilings, WeftError, no_log
from weft.lab.study import measure, mlp, report, workload
from weft.lab.study.measure import PointTiming, Trainer, random_batch
from weft.lab.study.workload import Point, Shape
from weft.workbench.timing.stats import summarise


def simulated_timings(
    chosen: workload.Sizes, ceilings: Ceilings, slower: float = 1.2
) -> dict[Point, PointTiming]:
    """Simulate a machine that takes ``slower`` times the roofline's time plus 2 us a call.

    Its cache has 64 MB; a point that fits there takes a third of that time.
    """
    timings = {}
    for point in chosen.points():
        us = 2 + slower * 1e6 * point.steps * workload.floor(point.shape, point.phase, ceilings)
        cold = workload.resident_bytes(point.shape, point.phase) > 128e6
        us = us if cold else us / 3
        summary = summarise(noisy([us] * 9, 0.003))
        timings[point] = PointTiming(summary=summary, flags=(), loss=0.5, cold=cold)
    return timings


@pytest.fixture(scope="module")
def a_study() -> dict[str, Any]:
    """A complete study of small real models, with simulated times of full-size models."""
    chosen, large = workload.default_sizes("cpu", quick=True), workload.default_sizes("cuda")
    with pytest.MonkeyPatch.context() as patch:
        simulated = (simulated_timings(chosen, FAST), {})
        patch.setattr(measure, "time_points", lambda *arguments: simulated)
        record = mlp.run("cpu", chosen, quick=True, log=no_log)
    timings = simulated_timings(large, FAST)
    record |= {
        "sizes": vars(large),
        "base": vars(large.base),
        "fits": mlp.fits(large, timings, FAST),
        "turn": mlp.transitions(large, timings, FAST),
        "points": {
            name: [mlp.point_row(p, timings[p], FAST, "cuda") for p in points]
            for name, points in large.sweeps().items()
        },
    }
    record["profile"][1]["batch"] = large.base.batch
    record["ceilings"]["matrix"] = dict(FAST.matrix)
    return record | {"wrong": mlp.faults(record)}


@pytest.fixture
def study(a_study: dict[str, Any]) -> dict[str, Any]:
    """Return a copy that a test may change, as read from a file."""
    record: dict[str, Any] = json.loads(json.dumps(a_study))
    return record


def test_study_of_a_simulated_machine_reports_its_parameters(study: dict[str, Any], tmp_path: Path) -> None:
    transitions = study["turn"]
    for phase in workload.PHASES:
        predicted, measured = transitions[phase]["predicted"], transitions[phase]["measured"]
        assert measured == pytest.approx(predicted, rel=0.6), phase
        assert transitions[phase]["below"] < 0.2 and transitions[phase]["above"] > 0.7
    # The optimizer's bytes do not grow with the batch, so a step's transition is at a larger batch.
    assert transitions["step"]["predicted"] > 2 * transitions["forward"]["predicted"] > 300
    layers = study["fits"]["layers"]["step"]
    assert layers["each"] == pytest.approx(1.2 * layers["model"]["each"], rel=0.05)
    assert layers["cold"] and study["fits"]["width"]["forward"]["cold"]
    assert study["fits"]["width"]["step"]["slope"] == pytest.approx(1.95, abs=0.1)
    assert study["wrong"] == []
    text = " ".join(report.sentences(study))
    assert f"compute-bound from batch {transitions['step']['measured']:.0f}" in text and "noisy" not in text
    folder = tmp_path / "results" / "a-gpu"
    folder.mkdir(parents=True)
    study["device"] = "cuda"
    (folder / report.RECORD).write_text(json.dumps(study))
    page = report.markdown(tmp_path / "results")
    assert text in page and "A CPU: not measured yet: `weft study mlp --device cpu`" in page
    assert page.count("![") == 5 and "study-mlp-batch.svg" in page
    assert len(report.plot_all(study, tmp_path)) == 5
    batch = (tmp_path / "study-mlp-batch.svg").read_text()
    assert f"transition at {transitions['forward']['predicted']}, predicted" in batch


def test_a_rate_above_doubtful_ceilings_is_a_warning_and_no_fault(study: dict[str, Any]) -> None:
    row = study["points"]["batch"][3]
    row["flags"] = ["faster than the matrix ceiling"]
    study["doubt"] = ""
    assert len(mlp.faults(study)) == 1
    study["doubt"] = "the machine was busy"
    assert mlp.faults(study) == []
    text = " ".join(report.warnings(study))
    assert "the machine was busy" in text and "1 of " in text and "faster than these" in text
    row["flags"] = ["suspect: clocks disagree (1 us, 9 us)"]
    assert len(mlp.faults(study)) == 1


def test_faults_are_reported(study: dict[str, Any]) -> None:
    row = study["points"]["batch"][3]
    for change, message in (
        ({"loss": float("nan")}, "the loss is nan"),
        ({"loss": float("inf")}, "the loss is inf"),
        ({"flags": ["suspect: clocks disagree (1 us, 9 us)"]}, "clocks disagree"),
        ({"flags": ["faster than the matrix ceiling"]}, "faster than the matrix ceiling"),
    ):
        original = dict(row)
        row.update(change)
        assert len(mlp.faults(study)) == 1 and message in mlp.faults(study)[0]
        row.clear()
        row.update(original)
    study["flops"]["ours"] += 1
    assert "FLOPs" in mlp.faults(study)[0]
    point = Point(Shape(batch=4096, depth=16, width=4096, dtype="bf16"), "forward")
    quick = PointTiming(summary=summarise([100.0] * 5), flags=(), loss=0.0, cold=True)
    assert "faster than the matrix ceiling" in mlp.point_row(point, quick, FAST, "cuda")["flags"]
    without_records = report.markdown(Path("no-such-folder"))
    assert "An NVIDIA GPU: not measured yet" in without_records


# Sampling rounds


@dataclass(eq=False)
class FakeRunner:
    """A runner that advances a fake clock by its time a sample; its first sample is 1 ms longer."""

    clock: list[float]
    us: float
    order: list[FakeRunner]

    def sample(self) -> float:
        self.clock[0] += self.us / 1e6
        self.order.append(self)
        return self.us + 1000 * (self.order.count(self) == 1)


@pytest.mark.parametrize(("seconds", "rounds"), [(0.001, 3), (3.1, 6), (60.0, 100)])
def test_rounds_discard_the_first_and_respect_the_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int
) -> None:
    clock, order, lines = [0.0], [], []
    monkeypatch.setattr(measure, "_now", lambda: clock[0])
    points = workload.default_sizes("cpu", quick=True).points()[:3]
    runners: Any = {p: FakeRunner(clock, us, order) for p, us in zip(points, (1e5, 2e5, 3e5), strict=True)}
    readings: Any = SimpleNamespace(read=dict)
    samples, _ = measure.sample_rounds(runners, readings, seconds, lines.append)
    assert {len(s) for s in samples.values()} == {rounds}
    assert [set(samples[p]) for p in points] == [{1e5}, {2e5}, {3e5}]  # the slow first samples are discarded
    rounds_run = {tuple(id(t) for t in order[i : i + 3]) for i in range(0, len(order), 3)}
    assert len(rounds_run) > 1 and all(
        len(set(t)) == 3 for t in rounds_run
    )  # random order, each runner once a round
    assert lines[0] == "warm" and all("about" in line for line in lines[1:])


# The model and its profile


def test_trainer_updates_only_the_layers_that_a_step_uses() -> None:
    torch.manual_seed(0)
    trainer = Trainer(4, 32, "fp32", "cpu")
    x, target = random_batch(16, 32, "fp32", "cpu")
    before = [layer.weight.detach().clone() for layer in trainer.model.layers]
    losses = [float(trainer.step(x, target, 3)) for _ in range(60)]
    assert losses[-1] < 0.9 * losses[0]
    changed = [
        not torch.equal(w, layer.weight) for w, layer in zip(before, trainer.model.layers, strict=True)
    ]
    assert changed == [True, True, True, False]
    assert float(trainer.gradients(x, target, 3)) == float(trainer.gradients(x, target, 3))
    assert not trainer.forward(x).requires_grad and trainer.forward(x).shape == (16, 32)


def event(name: str, start: float, own: float, whole: float | None = None) -> Any:
    times = dict.fromkeys(("self_device_time_total", "self_cpu_time_total"), own)
    times |= dict.fromkeys(("device_time_total", "cpu_time_total"), whole or own)
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start), **times)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_profile_attributes_times_to_layers_and_kinds(on_gpu: bool) -> None:
    at = itertools.count()
    events = []
    for _ in range(measure.PROFILED_STEPS):
        for layer in (1, 2):
            events.append(event("aten::linear", next(at), 0, 10 * layer))
            events.append(event("aten::addmm", next(at), 10 * layer))
            events.append(event("aten::gelu", next(at), layer))
        for layer in (2, 1):
            events.append(event(f"{measure.NODE}GeluBackward0", next(at), 0, 2 * layer))
            events.append(event("aten::gelu_backward", next(at), 2 * layer))
            events.append(event(f"{measure.NODE}AddmmBackward0", next(at), 0, 20 * layer))
            events.append(event("aten::mm", next(at), 20 * layer))
        events.append(event("aten::_fused_adamw_", next(at), 32))
        events.append(event("aten::sum", next(at), 19))
    summary = measure.summarise_events(reversed(events), 2, on_gpu=on_gpu)
    assert summary.us == 90 + 9 + 32 + 19
    assert summary.shares == {
        k: pytest.approx(v / 150) for k, v in {"matmul": 90, "gelu": 9, "optimizer": 32, "other": 19}.items()
    }
    for number, layer in enumerate(summary.layers, 1):
        assert layer == {
            "linear": pytest.approx(10 * number),
            "gelu": pytest.approx(number),
            "linear backward": pytest.approx(20 * number),
            "gelu backward": pytest.approx(2 * number),
        }
    assert (
        measure.summarise_events(events[1:], 2, on_gpu=on_gpu).layers == ()
    )  # no layers rather than wrong ones
    with pytest.raises(RuntimeError, match="no time"):
        measure.summarise_events([], 2, on_gpu=on_gpu)


def test_profile_of_a_real_step_has_every_layer() -> None:
    trainer = Trainer(3, 64, "fp32", "cpu")
    x, target = random_batch(32, 64, "fp32", "cpu")
    result = measure.profile(lambda: trainer.step(x, target), 3, "cpu")
    assert sum(result.shares.values()) == pytest.approx(1)
    assert all(result.shares[k] > 0 for k in ("matmul", "gelu", "optimizer"))
    assert len(result.layers) == 3
    assert all(
        set(layer) == {"linear", "gelu", "linear backward", "gelu backward"} and min(layer.values()) > 0
        for layer in result.layers
    )


# The command


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"}


@pytest.mark.slow
@pytest.mark.pooled(3, "commands that measure")
def test_command_writes_record_and_plots_and_redraws_them(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--quick", "--json", "--out", str(tmp_path / "a")]
    call = [sys.executable, "-m", "weft", "study", "mlp", *options]
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
    redrawn = CliRunner().invoke(app, ["study", "mlp", *again])
    assert redrawn.exit_code == 0 and "optimizer" in redrawn.stdout
    for name in report.PLOTS:
        file = report.plot_file(name)
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert not (tmp_path / "b" / "study.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cnn"], "a study: expected mlp, loops or sparsity, got cnn"),
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
def test_invalid_arguments_are_refused_with_the_reason(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    device = [] if "--redraw" in arguments or "cnn" in arguments else ["--device", "cpu"]
    done = CliRunner().invoke(app, ["study", *arguments, *device])
    assert isinstance(done.exception, WeftError) and message in str(done.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.alone  # it measures times
def test_small_study_on_a_gpu_is_captured_and_sound() -> None:
    chosen = workload.Sizes(
        depths=(2, 4, 6),
        widths=(256, 512, 1024),
        batches=(1, 8, 64, 512, 4096),
        steps=(1, 2, 4),
        dtype="bf16",
    )
    study = mlp.run("cuda", chosen, quick=True, log=no_log)
    assert study["wrong"] == []
    rows = [r for rows in study["points"].values() for r in rows]
    assert not any("no-graph" in flag or "host-bound" in flag for r in rows for flag in r["flags"])
    assert study["fits"]["steps"]["step"]["each"] > 0
    for profile in study["profile"]:
        assert len(profile["layers"]) == 4 and profile["shares"]["matmul"] > 0.02
        assert profile["shares"]["optimizer"] > 0.003
