"""Tune: points from records, the sweep around a crossover, and the command."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.sample_records import CPU, GPU, record
from weft import WeftError
from weft.cli import app
from weft.core import Case, Operator, Record, registry
from weft.core.record import append
from weft.dispatch import choice as dispatch
from weft.dispatch import keys
from weft.dispatch.choice import Point
from weft.dispatch.operator import clear_caches
from weft.workbench import tune
from weft.workbench.calls.inputs import make
from weft.workbench.tuning import plan as tune_plan

CASE = "bf16-16384x16384"
DEVICE = str(GPU["device"])


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(dispatch, "SHIPPED", tmp_path / "tables")
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "own"))
    clear_caches()
    yield tmp_path
    clear_caches()


def timed(name: str, cold: float, direction: str = "forward", **more: object) -> Record:
    fields = {"case": CASE, "machine": GPU, **more}
    return record(implementation=name, cold=cold, direction=direction, **fields)


RECORDS = [
    timed("torch", 200.0),
    timed("torch", 100.0),  # measured again: the last counts
    timed("triton", 80.0),
    timed("cuda", 10.0, flags=("suspect: faster than the floor",)),
    timed("numba", 10.0, verdict={"status": "fail", "reason": "wrong"}),
    timed("compile", 10.0),
    timed("cuda/01-atomics", 10.0),
    timed("cuda/invariant", 10.0),
    timed("torch", 100.0, "backward"),
    timed("triton", 70.0, "backward"),
    timed("torch", 1.0, machine=CPU),
    record(implementation="torch", case="fp32-1x1-of-old", machine=GPU),
    record(operator="unregistered", implementation="torch", case=CASE, machine=GPU),
]


def test_a_point_has_what_passed_is_not_suspect_and_may_be_chosen() -> None:
    ((device, (point,)),) = tune.from_records(RECORDS).items()
    assert device == DEVICE
    assert (point.dtype, point.elements, point.last) == ("bfloat16", 1 << 28, 16384)
    assert point.forward == {"torch": (100.0, 106.0), "triton": (80.0, 86.0)}
    assert point.backward == {"torch": (100.0, 106.0), "triton": (70.0, 76.0)}
    assert Point.from_json(json.loads(json.dumps(point.to_json()))) == point


def test_a_gradient_that_is_a_view_costs_nothing() -> None:
    operator = registry.operator("sum")
    case = operator.select("bench", "cuda")[0]
    timings = {"torch": 100.0, "triton": 80.0}
    records = [record(implementation=n, cold=t, operator="sum") for n, t in timings.items()]
    point = tune.point_of(operator, case, records)
    assert point is not None and dispatch.best(point, grad=True) == "triton"


def test_a_case_with_a_share_of_its_rows() -> None:
    case = registry.operator("matmul").case("bf16-16384x3072x768")
    smaller = tune.scaled(case, 64)
    assert smaller is not None
    for was, now in zip(case.inputs, smaller.inputs, strict=True):
        assert now.shape == tuple(256 if d == 16384 else d for d in was.shape)
    assert smaller.params == case.params and smaller.name == f"{case.name}/64"
    assert tune.scaled(case, 1 << 20) is None


def test_the_sweep_looks_closer_where_the_choice_changes() -> None:
    operator = registry.operator("gelu")
    measured_rows: list[int] = []

    def measure(_: Operator, case: Case) -> Point:
        rows = case.inputs[0].shape[0]
        measured_rows.append(rows)
        ours = 50.0 if rows > 500 else 200.0
        one = record(implementation="triton", cold=ours), record(implementation="torch", cold=100.0)
        point = tune.point_of(operator, case, one)
        assert point is not None
        return point

    one = replace(operator, cases=(operator.case(CASE),))
    points = list(tune.sweep(one, "cuda", measure))
    assert measured_rows == [16384, 2048, 256, 16384 // 23, 32]
    assert [dispatch.best(p, grad=False) for p in points] == [
        *("triton", "triton", "torch", "triton", "torch")
    ]


def test_points_are_measured_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure eager and torch on a CPU, in the forward: the timing is the same as on a GPU."""
    monkeypatch.setattr("weft.workbench.bench.measured_ceilings", lambda *a, **k: None)
    monkeypatch.setattr("weft.machine.l2_bytes", lambda kind: 1 << 20)
    monkeypatch.setattr(tune_plan, "can_be_chosen", lambda i: i.name in ("eager", "torch"))
    operator = registry.operator("gelu")
    small = replace(operator.case("fp32-1024x1024"), inputs=operator.case("fp32-7x129").inputs)
    one = replace(operator, cases=(small,), differentiable=())
    monkeypatch.setattr(registry, "operator", lambda name: one)
    monkeypatch.setattr(tune_plan, "LEAST", 0.0)  # a case so small would not be worth it
    (case,) = tune_plan.plan([(one, small)], "cpu", ("CPU", None))
    (point,) = tune.measure_planned([case], "cpu")
    assert point is not None and set(point.forward) >= {"eager", "torch"}
    assert all(cold > 0 for cold, _ in point.forward.values())


def test_from_records_to_a_table_that_is_shown(folders: Path) -> None:
    append(folders / "r.jsonl", RECORDS)
    done = CliRunner().invoke(app, ["tune", "--from", str(folders / "r.jsonl"), "--json"])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)
    assert row["inference"] == {"choice": "triton", "us": 80.0, "base_us": 100.0}
    assert row["training"] == {"choice": "triton", "us": 150.0, "base_us": 200.0}
    shown = CliRunner().invoke(app, ["tune", "--show", "--device", DEVICE])
    assert re.search(r"triton +80\.0 us +1\.25x +triton +150 us +1\.33x", shown.stdout)
    assert (dispatch.SHIPPED / "example-gpu-9000.json").read_text().count("\n") == 3
    assert DEVICE in tune.crossovers() and "1.25" in tune.crossovers("gelu")
    unknown = CliRunner().invoke(app, ["tune", "--show", "--device", "another"])
    assert unknown.exit_code == 0 and "torch's own" in unknown.stderr


def test_records_of_a_tuned_case_make_a_point() -> None:
    (name,) = [c.name for _, c in tune.candidates(["gelu"], "cuda") if c.name == f"{CASE}/64"]
    records = [timed("torch", 9.0, case=name), timed("cuda", 5.0, case=name)]
    (point,) = tune.from_records(records)[DEVICE]
    # Both dimensions of this case have the same size: each is divided by 64.
    assert (point.case, point.elements) == (name, (16384 // 64) ** 2) and point.forward["cuda"][0] == 5.0


def test_a_time_of_an_earlier_run_is_brought_to_the_conditions_of_the_last() -> None:
    def on(date: str, name: str, cold: float) -> Record:
        return timed(name, cold, machine={**GPU, "date": date})

    earlier = [on("2026-01-01", "torch", 100.0), on("2026-01-01", "triton", 90.0)]
    last = [on("2026-01-02", "torch", 120.0), on("2026-01-02", "cuda", 110.0)]
    (point,) = tune.from_records([*last, *earlier])[DEVICE]  # whatever the order of the files
    cold = {name: time[0] for name, time in point.forward.items()}
    assert cold == {"torch": 120.0, "cuda": 110.0, "triton": 108.0}


def test_measured_records_are_saved_one_case_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.workbench.bench.run", lambda *_, **__: RECORDS)
    case = registry.operator("gelu").case(CASE)
    saved: list[list[Record]] = []
    planned = tune_plan.plan([(registry.operator("gelu"), case)], "cuda", ("No GPU", None), names=["torch"])
    (point,) = tune.measure_planned(planned, "cuda", save=saved.append, names=["torch"])
    assert saved == [RECORDS] and point is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "gelu", "--impl", "cuda"], "torch or eager among them"),
        (["tune", "gelu", "--show", "--minutes", "2"], "expected a measurement"),
        (["tune", "gelu", "--minutes", "nan"], "above 0"),
        (["tune", "gelu", "--thorough", "--minutes", "2"], "neither --minutes"),
        (["tune", "gelo"], "did you mean gelu"),
        (["tune", "-o", "x.json"], "--from"),
        (["tune", "--from", "nowhere.jsonl"], "nowhere"),
    ],
)
def test_a_wrong_call(arguments: list[str], message: str) -> None:
    with pytest.raises(WeftError, match=message):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_cpu_has_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.machine.has_gpu", lambda: False)
    with pytest.raises(WeftError, match="runs PyTorch's own"):
        CliRunner().invoke(app, ["tune"], catch_exceptions=False)


def test_show_says_whose_table_counts(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(folders / "r.jsonl", RECORDS)
    CliRunner().invoke(app, ["tune", "--from", str(folders / "r.jsonl")])
    facts = json.loads((dispatch.SHIPPED / "example-gpu-9000.json").read_text())
    tune.write(dispatch.SHIPPED / "x.json", DEVICE, dispatch.points(DEVICE), "r", {"arch": "sm_70"})
    assert facts["format"] == 2
    monkeypatch.setattr("weft.cli.tune._gpu_name", lambda request: "Other GPU")
    monkeypatch.setattr("weft.cli.tune._architecture", lambda: "sm_70")
    shown = CliRunner().invoke(app, ["tune", "--show"])
    assert f"no table for Other GPU: that of {DEVICE} (sm_70)" in shown.stderr and "1.25x" in shown.stdout
    monkeypatch.setattr("weft.cli.tune._architecture", lambda: "sm_71")
    assert "torch's own" in CliRunner().invoke(app, ["tune", "--show"]).stderr


def test_the_facts_of_a_table_are_those_of_the_newest_record() -> None:
    def record_at(date: str, copy: float) -> Record:
        machine = {**GPU, "date": date, "arch": "sm_70", "units": 8, "ceilings": {"copy": copy}}
        return timed("torch", 1.0, machine=machine)

    facts = tune.facts_of(
        [record_at("2026-02-01", 2e12), record_at("2026-01-01", 1e12), timed("torch", 1.0, machine=CPU)]
    )
    assert facts == {DEVICE: {"arch": "sm_70", "units": 8, "copy": 2e12}}


def test_host_times_come_from_the_records_of_a_device(tmp_path: Path) -> None:
    times = {"aten": 1.0, "dispatched": 2.0, "torch": 2.0, "cuda": 3.0}
    machine = {"device": DEVICE, "date": "2026-02-01"}
    record = {"machine": machine, "dtype": "bfloat16", "us": {"gelu": times}}
    record |= {"forward_us": {"gelu": times}, "backward_us": {"gelu": {**times, "cuda": 9.0}}}
    (tmp_path / "host-time.json").write_text(json.dumps(record))
    older = {**record, "machine": {**machine, "date": "2026-01-01"}, "us": {"gelu": {"torch": 9.0}}}
    (tmp_path / "host-time-older.json").write_text(json.dumps(older))
    (tmp_path / "host-time-float32.json").write_text(json.dumps({**record, "dtype": "float32"}))
    by_name = {"gelu": {"torch": [2.0, 2.0, 2.0], "cuda": [3.0, 3.0, 9.0]}}
    host = tune.host_times_of(DEVICE, tmp_path)["host"]
    assert host == {"bfloat16": by_name, "float32": by_name}
    assert tune.host_times_of("Other GPU", tmp_path) == {}


def _plan(names: list[str], limit: float = 1e9, device: str = "No GPU") -> list[str]:
    cases = tune.candidates(names, "cuda")
    return [f"{c.operator.name} {c.case.name}" for c in tune_plan.plan(cases, "cuda", (device, None), limit)]


def test_the_plan_begins_with_what_is_unknown_and_then_spreads_out() -> None:
    planned = _plan(["softmax"])
    cases = {f"softmax {c.name}" for _, c in tune.candidates(["softmax"], "cuda")}
    assert planned and set(planned) < cases
    first = planned[:2]
    assert {p.split()[1][:4] for p in first} == {"bf16", "fp32"}  # one of each dtype before a second one
    assert len(planned) == len(set(planned))


def test_what_was_measured_here_is_not_planned_again() -> None:
    operator = registry.operator("softmax")
    for case in operator.select("bench", "cuda"):
        key = keys.lookup_key("softmax", case.inputs, case.params)
        times = {"torch": (100.0, 9.0), "triton": (98.0, 9.0)}
        point = Point(operator="softmax", case=case.name, **vars(key), forward=times, backward=times)
        tune.store("No GPU", [point])
    names = {f"softmax {c.name}" for c in operator.select("bench", "cuda")}
    assert not names & set(_plan(["softmax"])) and _plan(["softmax"])


def test_a_plan_fits_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_plan, "point_seconds", lambda *_: 10.0)
    assert len(_plan(["softmax", "gelu"], 35.0)) == 3
    assert _plan(["softmax"], 5.0) == []


def test_an_open_choice_is_measured_before_a_clear_one() -> None:
    def planned(octaves: float, gap: float, us: float = 100.0) -> tune_plan.PlannedCase:
        operator = registry.operator("gelu")
        kind = dispatch.Kind("gelu", ("No GPU", None), "float32", (), False)
        fields = {
            "operator": operator,
            "case": operator.cases[0],
            "seconds": 1.0,
            "kind": kind,
            "sizes": (64,),
        }
        return tune_plan.PlannedCase(**fields, octaves=octaves, gap=gap, us=us)

    assert planned(2.0, 0.0).uncertainty > planned(2.0, 1.0).uncertainty > planned(1.0, 1.0).uncertainty
    assert planned(2.0, 0.0).uncertainty > planned(2.0, 0.0, us=4.0).uncertainty  # a launch, whatever runs
    near = planned(5.0, 0.0)
    near.covered.append((128,))
    assert near.uncertainty == planned(1.0, 0.0).uncertainty


def test_measuring_stops_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_plan, "point_seconds", lambda *_: 10.0)
    clock = [0.0]

    def measure(*_: object) -> None:
        clock[0] += 15.0

    monkeypatch.setattr(tune, "_now", lambda: clock[0])
    monkeypatch.setattr(tune, "_measure", measure)
    planned = tune_plan.plan(tune.candidates(["softmax"], "cuda"), "cuda", ("No GPU", None))
    lines: list[str] = []
    # Each case takes 15 s instead of 10, so that four fit.
    assert len(list(tune.measure_planned(planned, "cuda", limit=60.0, on_event=lines.append))) == 4
    assert "left out" in lines[-1]


def test_candidates_have_fewer_rows_or_the_dimensions_of_models() -> None:
    cases = {c.name: c for _, c in tune.candidates(["softmax", "linear", "rope"], "cuda")}
    assert cases["bf16-32768x4096/8"].inputs[0].shape == (4096, 4096)
    assert cases["bf16-32768x1024@50257x5341"].inputs[0].shape == (5341, 50257)
    shapes = [i.shape for i in cases["bf16-65536x2304x768@8192x2048x32768"].inputs]
    assert shapes == [(32768, 2048), (8192, 2048), (8192,)]
    # Batch and head size of this case are the same number: to divide one would change the other.
    assert not any(name.startswith("bf16-64x12x1024x64/") for name in cases)
    assert "dropout" not in {o.name for o, _ in tune.candidates(None, "cuda")}


def test_a_resized_case_draws_inputs_of_its_own_shapes() -> None:
    operator = registry.operator("cross_entropy")
    case = tune.resized(operator.case("bf16-8192x50304-8192"), {50304: 96, 8192: 16})
    assert case is not None
    one = replace(operator, cases=(case,))
    logits, targets = make(one.cases[0], "cpu", 0)
    assert logits.shape == (16, 96) and int(targets.max()) < 96
    assert (
        tune.resized(registry.operator("gelu").case(CASE), {16384: 8}) is None
    )  # rows and columns are alike
