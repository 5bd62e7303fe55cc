"""The audit of dispatch: its points, comparisons, judgement and command."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import weft
from weft import WeftError
from weft.cli import app
from weft.dispatch.choice import Decision
from weft.workbench.tuning import audit, audit_points
from weft.workbench.tuning.audit import AuditResult
from weft.workbench.tuning.audit_points import CALLS, SIZES, AuditPoint

SMALL = {"rows": 6, "columns": 16, "vocabulary": 11}
SMALL_PRODUCT = {"M": 6, "N": 8, "K": 16}
SMALL_HEADS = {"batch": 2, "heads": 4, "kv_heads": 2, "queries": 5, "keys": 5, "head_dim": 16, "causal": 1}


def point(operator: str, **changes: Any) -> AuditPoint:
    products = ("matmul", "linear", "linear_gelu", "linear_residual", "linear_cross_entropy")
    sizes = SMALL_PRODUCT if operator in products else SMALL
    if operator in ("attention", "rope"):
        sizes = SMALL_HEADS
    sound = AuditPoint(
        operator=operator,
        model="small",
        sizes=tuple(sizes.items()),
        dtype="float32",
        training=False,
        captured=False,
    )
    return replace(sound, **changes)


def test_points_are_those_of_the_seed_and_of_the_models() -> None:
    points = audit_points.random_points(400, 7, "cuda")
    assert points == audit_points.random_points(400, 7, "cuda") != audit_points.random_points(400, 8, "cuda")
    assert {p.operator for p in points} == set(SIZES)
    assert {p.captured for p in points} == {p.training for p in points} == {True, False}
    widths = {m["width"] for m in audit_points.model_shapes()["models"]}
    assert {dict(p.sizes)["columns"] for p in points if p.operator == "embedding"} <= widths
    counts = [sum(p.operator == name for p in points) for name in SIZES]
    assert max(counts) - min(counts) <= 1
    assert all(audit_points.expected_us(p, "cuda") <= audit_points.MAX_CALL_US["cuda"] for p in points)
    assert sum(audit.expected_seconds(points, "cuda")) < 420  # of an H200


def test_points_of_a_cpu_are_small_and_eager() -> None:
    points = audit_points.random_points(60, 1, "cpu")
    assert not any(p.captured for p in points)
    assert all(audit_points.expected_us(p, "cpu") <= audit_points.MAX_CALL_US["cpu"] for p in points)


def test_the_dimensions_are_part_of_the_package() -> None:
    shapes = audit_points.model_shapes()
    assert len(shapes["models"]) >= 14 and "configurations" in shapes["note"]
    assert audit_points.SHAPES.is_relative_to(Path(weft.__file__).parent)


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("operator", SIZES)
def test_both_sides_compute_the_same(operator: str, training: bool) -> None:
    p = point(operator, training=training)
    work = audit_points.workload(p)
    buffers = audit._inputs(p, work, "cpu", 0)
    sides = {audit.OURS: work.ours, audit.TORCH: work.torchs}
    assert audit._first_difference(p, sides, buffers) < 1e-4


@pytest.mark.parametrize("operator", ["matmul", "linear", "linear_gelu", "linear_cross_entropy"])
def test_products_of_an_audit_have_outputs_of_unit_variance(operator: str) -> None:
    sizes = {"M": 64, "N": 96, "K": 2048}
    p = point(operator, sizes=tuple(sizes.items()))
    x, weight, *_ = audit._inputs(p, audit_points.workload(p), "cpu", 0).inputs
    weight = weight if operator == "matmul" else weight.t()
    assert 0.9 < float((x @ weight).square().mean()) < 1.1


def test_an_explanation_is_that_of_the_points_mode() -> None:
    eager = Decision("softmax", "triton", "host time")
    captured, inner = (
        Decision("softmax", "torch", "model", in_graph=True),
        Decision("cross_entropy", "cuda", "near"),
    )
    p = point("softmax")
    assert audit._explanation(p, [eager, captured]) == ("triton", "host time")
    assert audit._explanation(replace(p, captured=True), [eager, captured]) == ("torch", "model")
    assert audit._explanation(p, [inner]) == ("cuda", "its cross_entropy: near")
    assert audit._explanation(p, [])[1] == "the operator chooses itself"
    assert audit._explanation(replace(p, compiled=True), [])[1] == "chosen while tracing"


def test_a_wrong_gradient_differs_and_a_vanishing_one_does_not() -> None:
    """The scores of a single key have no gradient: what both sides return there is rounding alone."""
    one_key = tuple({**SMALL_HEADS, "queries": 1, "keys": 1, "causal": 0}.items())
    p = point("attention", sizes=one_key, training=True)
    buffers = audit._inputs(p, (work := audit_points.workload(p)), "cpu", 0)
    assert audit._first_difference(p, {audit.OURS: work.ours, audit.TORCH: work.torchs}, buffers) < 1e-3
    p = point("cross_entropy", training=True)
    buffers = audit._inputs(p, (work := audit_points.workload(p)), "cpu", 0)
    wrong = {audit.OURS: lambda x, t: work.torchs(1.2 * x, t), audit.TORCH: work.torchs}
    assert audit._first_difference(p, wrong, buffers) > 0.05


class ToyTimer:
    """Fake timer with given samples."""

    def __init__(self, *samples: float | None) -> None:
        self.samples, self.calls, self.flags = samples, 0, set[str]()

    def sample(self) -> float | None:
        self.calls += 1
        return self.samples[self.calls % len(self.samples)]


def judged(ours: tuple[float | None, ...], torchs: tuple[float | None, ...]) -> AuditResult:
    result = AuditResult(point=point("softmax"))
    timers: Any = {audit.OURS: ToyTimer(*ours), audit.TORCH: ToyTimer(*torchs)}
    audit._sample(result, timers, 0.0, random.Random(0))
    return result


def test_a_ratio_below_the_least_fails_unless_it_is_noise() -> None:
    slow, equal, fast = judged((10.0,), (9.0,)), judged((10.0,), (9.8,)), judged((10.0,), (30.0,))
    assert [r.is_against for r in (slow, equal, fast)] == [True, False, False]
    assert (slow.ratio, fast.ratio) == (0.9, 3.0)
    noisy = judged((8.0, 12.0, 30.0), (7.0, 10.9, 30.0))
    assert noisy.is_slow is (noisy.ratio is not None and noisy.ratio < 0.95)
    assert noisy.is_noisy and not noisy.is_against
    spoilt = judged((None,), (1.0,))
    assert spoilt.ratio is None and "left out" in spoilt.problem and not spoilt.is_against


def test_a_slow_point_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []

    def sample(result: AuditResult, timers: Any, duration: float, rng: random.Random) -> None:
        result.ratio, result.interval = (0.9, (0.89, 0.91)) if not seconds else (0.99, (0.98, 1.01))
        seconds.append(duration)

    monkeypatch.setattr(audit, "_sample", sample)
    monkeypatch.setattr(audit, "_timers", lambda *_: {})
    (result,) = audit.run([point("relu")], "cpu")
    assert result.ratio == 0.99 and seconds[1] == audit.LONGER * seconds[0]


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(audit, "_timers", lambda *_: {})
    monkeypatch.setattr(audit, "_sample", lambda *_: None)
    return


def test_a_point_beyond_the_memory_is_left_out(no_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "memory_bytes", lambda _: 1 << 60)
    (result,) = audit.run([point("relu")], "cpu")
    assert "left out: needs about" in result.problem and not result.is_against


@pytest.mark.parametrize(
    ("ours", "problem"),
    [(lambda x: torch.relu(x) * 1.1, "differs from torch"), (lambda x: x.no_method(), "raised: Attribute")],
)
def test_other_results_and_errors_are_against(
    ours: Callable[..., Any], problem: str, no_clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CALLS, "relu", (ours, torch.relu))
    (result,) = audit.run([point("relu")], "cpu")
    assert problem in result.problem and result.is_against


def test_a_point_is_timed_on_a_cpu() -> None:
    (result,) = audit.run([point("softmax", training=True)], "cpu")
    assert result.ratio and result.ours_us and result.torch_us and result.interval
    assert result.implementation == "torch" and "CPU" in result.reason and not result.problem


def finished(ratio: float | None, **changes: Any) -> AuditResult:
    interval = None if ratio is None else (0.99 * ratio, 1.01 * ratio)
    sound = AuditResult(point=point("gelu"), implementation="cuda", ratio=ratio, interval=interval)
    return replace(sound, ours_us=1.0, torch_us=ratio, **changes)


def test_the_summary_of_an_audit() -> None:
    results = [finished(r) for r in (0.5, 1.0, 2.0, 1.0)]
    results += [finished(None, problem="left out: x"), finished(0.9, interval=(0.5, 2.0))]
    results += [finished(None, problem="raised", differs=True), finished(0.8, implementation="torch")]
    summary = audit.summarise(results)
    assert (summary.points, summary.left_out, summary.differing) == (6, 1, 1)
    assert (summary.slow, summary.slow_by_host, summary.noisy) == (2, 1, 1)
    assert summary.above == pytest.approx(1 / 6) and summary.below == pytest.approx(3 / 6)
    assert summary.geometric_mean == pytest.approx((0.5 * 2.0 * 0.9 * 0.8) ** (1 / 6))
    assert [r.ratio for r in audit.worst(results, 3)] == [None, 0.5, 0.8]
    nothing = audit.summarise([])
    assert nothing.geometric_mean is None and nothing.quantiles == {}


def run_command(monkeypatch: pytest.MonkeyPatch, results: list[AuditResult], *arguments: str) -> Any:
    monkeypatch.setattr(audit, "run", lambda *a, **k: iter(results))
    return CliRunner().invoke(app, ["tune", "--audit", "--device", "cpu", "--points", "2", *arguments])


def test_the_command_judges_and_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    good = run_command(monkeypatch, [finished(1.2), finished(1.0)], "--seed", "5")
    assert good.exit_code == 0 and "passed: 2 points" in good.stdout and "--seed 5" in good.stderr
    bad = run_command(monkeypatch, [finished(1.2), finished(0.5)])
    assert bad.exit_code == 1 and "failed: 1 slower" in bad.stdout and "geometric mean" in bad.stdout
    data = json.loads(run_command(monkeypatch, [finished(0.5)], "--json", "--seed", "5").stdout)
    assert data["seed"] == 5 and data["summary"]["slow"] == 1
    assert data["points"][0]["sizes"] == {"rows": 6, "columns": 16, "vocabulary": 11}
    nothing = run_command(monkeypatch, [finished(None, problem="left out: memory")])
    assert nothing.exit_code == 1 and "failed: 0 points compared" in nothing.stdout
    assert run_command(monkeypatch, [finished(0.5)], "--csv").stdout.startswith("ratio,point,")


def test_audits_are_merged_into_one_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shards = [
        [finished(1.2), finished(0.9, flags=["weft: noisy"], reason="model")],
        [finished(None, problem="raised", differs=True, point=point("rope", compiled=True))],
    ]
    arguments = []
    for seed, results in enumerate(shards):
        file = tmp_path / f"{seed}.json"
        file.write_text(run_command(monkeypatch, results, "--json", "--seed", str(seed)).stdout)
        arguments += ["--merge", str(file)]
    merged = CliRunner().invoke(app, ["tune", "--audit", *arguments, "--json"])
    data = json.loads(merged.stdout)
    together = [r for results in shards for r in results]
    assert [AuditResult.from_json(p) for p in data["points"]] == together
    assert data["summary"] == audit.summarise(together).to_json() and merged.exit_code == 1
    assert [a["seed"] for a in data["audits"]] == [0, 1]
    text = CliRunner().invoke(app, ["tune", "--audit", *arguments])
    assert text.exit_code == 1 and "failed: 1 slower than 0.95 of torch, 1 with other" in text.stdout
    (tmp_path / "0.json").write_text("{}")
    with pytest.raises(WeftError, match=r"0\.json"):
        CliRunner().invoke(app, ["tune", "--audit", *arguments], catch_exceptions=False)


def test_no_point_is_begun_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_measure", lambda p, *_: AuditResult(point=p, ratio=1.0))
    points = [point("gelu"), point("relu")]
    assert len(list(audit.run(points, "cpu", limit=60.0))) == 2
    assert list(audit.run(points, "cpu", limit=-1.0)) == []


def test_a_compiled_point_compiles_both_sides_without_a_graph_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "COMPILE_OPTIONS", audit.COMPILE_OPTIONS | {"backend": "eager"})
    (result,) = audit.run([point("swiglu", compiled=True, training=True)], "cpu")
    assert result.ratio and not result.problem and result.seconds > 0
    assert result.point.title.endswith("training compiled") and result.reason == "chosen while tracing"
    broken = replace(audit_points.workload(point("gelu")), ours=lambda x: (print(end=""), x)[1])
    monkeypatch.setattr(audit, "workload", lambda p: broken)
    (result,) = audit.run([point("gelu", compiled=True)], "cpu")
    assert result.differs and result.problem.startswith("raised: Unsupported")


def test_a_stopped_audit_shows_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> Iterator[AuditResult]:
        yield finished(1.5)
        os.kill(os.getpid(), signal.SIGINT)
        yield finished(1.5)

    monkeypatch.setattr(audit, "run", run)
    # A job in the background of a script starts with SIGINT ignored, and so would this test there.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = CliRunner().invoke(app, ["tune", "--audit", "--device", "cpu", "--points", "2"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.exit_code == 130 and "stopped after 1 point" in done.stdout and "1.50" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--audit", "--show"], "--audit"),
        (["--points", "3"], "require --audit"),
        (["--compiled"], "require --audit"),
        (["--audit", "--merge", "a.json", "--points", "3"], "--merge"),
        (["sum", "--audit", "--device", "cpu"], "one of softmax"),
    ],
)
def test_a_wrong_call_of_the_audit(arguments: list[str], message: str) -> None:
    with pytest.raises(WeftError, match=message):
        CliRunner().invoke(app, ["tune", *arguments], catch_exceptions=False)
