"""bench: checks before timing, records, points that cannot run, and saving despite kills and full disks."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from helpers.paths import SRC, TESTS
from helpers.sample_records import record
from weft.cli import app, output
from weft.core import (
    Ceilings,
    Cost,
    Implementation,
    Input,
    Operator,
    Record,
    Timing,
    WeftError,
    case,
    check_only,
    no,
)
from weft.core.implementation import with_invariant
from weft.core.record import append, read
from weft.workbench import bench
from weft.workbench.calls.errors import SandboxDied
from weft.workbench.calls.selection import select_points
from weft.workbench.report import table
from weft.workbench.sandbox.candidates import without_external_baseline
from weft.workbench.timing.plan import Budget, is_by_time_alone

QUICK = Budget(seconds=0.3, warmup=0.02, min_samples=5, max_rounds=12, side_samples=2)
CEILINGS = Ceilings(device="toy", copy=1e12, read=1e12, fill=1e12, matrix={"fp32": 1e12}, measured="today")
CASES = tuple(case(Input(name="x", shape=(n, 64)), tags="bench", devices=("cpu",)) for n in (32, 48))
pytestmark = pytest.mark.usefixtures("small_machine")


def _nothing(*_: object, **__: object) -> None:
    return None


TOY = Operator(
    name="toy",
    summary="twice",
    formula="y = 2x",
    signature="toy(x)",
    reference=lambda x: 2 * x,
    cases=CASES,
    cost=lambda c, direction: Cost(read=c.inputs[0].nbytes, written=c.inputs[0].nbytes),
    validate=_nothing,
    dtypes=("float32",),
    differentiable=("x",),
)


def implementation(name: str, forward: Callable[..., Any], **more: Any) -> Implementation:
    return Implementation(
        operator="toy", name=name, backend=more.pop("backend", "eager"), forward=forward, **more
    )


EAGER = implementation("eager", lambda x: x + x)
ALSO = implementation("torch", lambda x: torch.mul(x, 2), backend="torch")


def run(*implementations: Implementation, **options: Any) -> list[Record]:
    options = {"budget": QUICK, "ceilings": CEILINGS, "directions": ["forward"], **options}
    return list(bench.run([TOY], implementations, device="cpu", **options))


def test_a_record_has_its_figures_from_cost_and_ceilings() -> None:
    eager, other = run(EAGER, ALSO)
    assert (eager.implementation, other.implementation) == ("eager", "torch")
    for one in (eager, other):
        assert one.verdict.status == "pass" and one.timing is not None
        cold = one.timing.cold
        assert one.nbytes == 2 * 32 * 64 * 4
        assert one.gbps == pytest.approx(one.nbytes / (cold * 1e-6) / 1e9)
        assert one.floor == pytest.approx(one.nbytes / 1e12 * 1e6)
        assert one.efficiency == pytest.approx(one.floor / cold)
        assert one.timing.first is not None and one.timing.first > 0
        assert one.machine["ceilings"]["copy"] == 1e12
    assert not bench.went_against([eager, other])
    assert Record.from_json(json.loads(json.dumps(eager.to_json()))) == replace(
        eager, machine=dict(eager.machine)
    )


def test_what_fails_the_check_is_never_timed() -> None:
    calls = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(time.perf_counter())
        return x * 2.5

    eager, wrong = run(EAGER, implementation("cuda", forward))
    assert wrong.verdict.status == "fail" and wrong.timing is None and wrong.verdict.reason
    assert eager.timing is not None and len(calls) < 10
    assert bench.went_against([wrong])


def test_an_implementation_that_raises_is_a_fail_with_what_it_raised() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such luck")

    _, raising = run(EAGER, implementation("cuda", forward))
    assert raising.verdict.status == "fail" and "no such luck" in raising.verdict.reason


def test_a_skip_after_the_check_turns_the_verdict() -> None:
    count = [0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return torch.zeros_like(x) if count[0] > 80 and count[0] % 10 == 0 else x + x

    _, skipped = run(EAGER, implementation("cuda", forward))
    assert skipped.verdict.status == "fail" and skipped.timing is None
    assert "call" in skipped.verdict.reason


@pytest.mark.parametrize("answer", [no("not on a Tuesday"), check_only("in a simulator")])
def test_what_cannot_be_timed_is_a_record_with_its_reason(answer: Any) -> None:
    _, skipped = run(EAGER, implementation("cuda", lambda x: x + x, supports=lambda c, d: answer))
    assert skipped.verdict.status == "unsupported" and skipped.timing is None
    assert skipped.verdict.reason == answer.reason and not bench.went_against([skipped])


def test_backward_is_timed_too() -> None:
    (backward,) = run(EAGER, directions=["backward"])
    assert backward.direction == "backward" and backward.timing is not None, backward.verdict.reason


def test_out_of_memory_is_reported_and_the_next_case_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = bench.measure, []

    def measure(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no room")
        return real(*arguments, **more)

    monkeypatch.setattr(bench, "measure", measure)
    first, second = run(EAGER, all_cases=True)
    assert first.flags == ("not timed: out of memory",) and first.timing is None
    assert second.timing is not None and bench.went_against([first])


def test_beating_the_floor_is_suspect_on_a_gpu_and_flagged_on_a_cpu() -> None:
    point = bench.BenchPoint(
        operator=TOY,
        case=CASES[0],
        direction="forward",
        device="cuda",
        baseline=EAGER,
        implementations=(EAGER,),
    )
    timing = record(cold=1e-6).timing
    result = bench.BenchResult(verdict=record().verdict, timing=timing)
    suspect = bench.make_record(point, EAGER, result, CEILINGS, {})
    assert "suspect: faster than the floor" in suspect.flags and bench.went_against([suspect])
    flagged = bench.make_record(replace(point, device="cpu"), EAGER, result, CEILINGS, {})
    assert "faster than the floor" in flagged.flags[0] and not bench.went_against([flagged])


@pytest.mark.parametrize(
    ("flag", "excused"),
    [
        ("suspect: slower on contents it had not seen: 9 us against 1 us", True),
        ("suspect: clocks disagree (9 us by one, 1 us by the other)", True),
        ("suspect: faster than the floor", False),
        ("suspect: threads: Thread-1 worked after its call", False),
    ],
)
def test_load_excuses_suspicions_by_time_alone_of_own_code(flag: str, excused: bool) -> None:
    busy = replace(record(), flags=(flag,), machine={"load": {"busy": "3 others run"}})
    assert bench.went_against([busy], own_code=True) != excused
    assert bench.went_against([busy])  # external code could cause the load
    quiet = replace(busy, machine={"load": {"busy": ""}})
    assert bench.went_against([quiet], own_code=True)
    both = replace(busy, flags=(flag, "suspect: faster than the floor"))
    assert bench.went_against([both], own_code=True)


def test_names_that_are_not_there_are_errors_before_anything_runs() -> None:
    for options in ({"cases": ["fp32-9x9"]}, {"directions": ["sideways"]}):
        with pytest.raises(WeftError, match="unknown"):
            run(EAGER, **options)
    with pytest.raises(WeftError, match="unknown operator"):
        bench.run(["gel"], device="cpu")
    with pytest.raises(WeftError, match="unknown implementation"):
        bench.run(["gelu"], ["tritn"], device="cpu")


def test_a_name_brings_its_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    points = list(select_points(["gelu"], ["numba"], None, ["forward"], "cpu", False))
    assert [i.name for i in points[0].implementations] == ["numba", "numba/parallel"]


def test_batch_invariant_variants_are_timed_beside_their_implementations() -> None:
    both = with_invariant(EAGER, forward=lambda x: 2 * x)
    records = run(both, ALSO, batch_invariant=True)
    assert [r.implementation for r in records] == ["eager", "eager/invariant", "torch"]
    assert all(r.timing for r in records)
    with pytest.raises(WeftError, match="a batch-invariant variant, got toy torch"):
        run(ALSO, batch_invariant=True)


def test_a_variant_is_selected_by_its_own_name() -> None:
    point = next(select_points(["softmax"], ["eager/invariant"], None, ["forward"], "cpu", False))
    assert [i.name for i in point.implementations] == ["eager/invariant"]
    with pytest.raises(WeftError, match="unknown implementation"):
        list(select_points(["matmul"], ["torch/invariant"], None, ["forward"], "cpu", False))


def test_the_price_of_batch_invariance_is_a_column_where_it_was_measured() -> None:
    rows = [record(implementation=n, cold=t) for n, t in (("cuda", 100.0), ("cuda/invariant", 104.0))]
    assert "1.04x" in plain(rows) and "price = " in table.footnote(rows)
    assert table.csv_table(rows).rows[1][8].value == 1.04
    for alone in (rows[:1], [record(implementation="cuda", cold=None), rows[1]]):
        assert "1.04x" not in plain(alone)
    assert "price" not in plain(rows[:1]) + table.footnote(rows[:1])


def plain(records: list[Record]) -> str:
    lines = (line.plain for of_point in table.tables(records) for line in output.table_lines(of_point, None))
    return "\n".join(lines)


def test_the_table_says_time_speed_up_and_reasons() -> None:
    rows = [
        record(implementation="eager", cold=200.0),
        record(implementation="cuda", cold=100.0, flags=("noisy",)),
        record(implementation="triton", cold=None, verdict={"status": "fail", "reason": "off by 3"}),
        record(implementation="numba", cold=None, verdict={"status": "unsupported", "reason": "x"}),
    ]
    text = plain(rows)
    assert "2.00x" in text and "100 us" in text and "noisy" in text
    assert "failed: triton: off by 3" in text and "not run: numba: x" in text
    assert text.isascii() or set(text) - set(map(chr, range(128))) == {"±"}
    assert "\x1b" not in text


def test_durations_read_well() -> None:
    texts = [table.duration(us) for us in (0.512, 12.34, 999.6, 1500, 2.5e6, None)]
    assert texts == ["0.51 us", "12.3 us", "1000 us", "1.50 ms", "2.50 s", ""]


def call(*arguments: object, before: str = "", **more: Any) -> subprocess.CompletedProcess[str]:
    """Run ``weft bench`` as a process; ``before`` is code that it runs first."""
    source = os.pathsep.join((str(SRC), str(TESTS)))
    env = {**os.environ, "PYTHONPATH": source, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", f"{before}\nfrom weft.cli import main; main()", "bench", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
        **more,
    )


SMALL = ("gelu", "--case", "fp32-7x129", "--impl", "eager", "--impl", "torch", "--quick")
SMALL_HERE = (*SMALL, "--device", "cpu", "--direction", "forward")


@pytest.mark.slow
@pytest.mark.pooled(3, "commands that measure")
def test_the_command_by_itself(tmp_path: Path) -> None:
    saved = tmp_path / "deep" / "records.jsonl"
    done = call(*SMALL_HERE, "--json", "--save", saved)
    answer = json.loads(done.stdout)
    # Only other work on the machine may make a time suspect.
    suspicions = [flag for r in answer for flag in r["flags"] if flag.startswith("suspect")]
    assert all(map(is_by_time_alone, suspicions)) and done.returncode == bool(suspicions), done.stderr
    assert [r["implementation"] for r in answer] == ["eager", "torch"]
    assert set(answer[0]["time_us"]) == {"cold", "warm", "host", "first"}
    assert answer[0]["verdict"] == "pass" and len(answer[0]["interval"]) == 2
    records, torn = read(saved)
    assert len(records) == 2 and torn == 0
    assert "checking eager" in done.stderr

    # Once more as text for a terminal; torch is imported already.
    shown = CliRunner().invoke(app, ["bench", *SMALL_HERE, "--save", str(saved)])
    assert shown.exit_code == ("suspect" in shown.output), shown.output
    assert "gelu  fp32-7x129  forward" in shown.stdout
    assert "\x1b" not in shown.stdout and len(read(saved)[0]) == 4


@pytest.mark.slow
def test_a_wrong_call_exits_2() -> None:
    done = call("gelu", "--case", "nope", "--device", "cpu")
    # A note that the machine is busy may come first.
    assert done.returncode == 2 and not done.stdout
    assert any(line.startswith("error:") for line in done.stderr.splitlines())


MEASURED = """
from helpers.sample_records import record
from weft.workbench import bench
bench.run_points = lambda **_: iter([[record()]])
"""


def test_a_full_disk_costs_no_earlier_record(tmp_path: Path) -> None:
    saved = tmp_path / "records.jsonl"
    append(saved, [record()])
    size = saved.stat().st_size

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))

    done = call(*SMALL_HERE, "--save", saved, before=MEASURED, preexec_fn=limit)
    assert done.returncode == 2 and "could not be saved" in done.stderr, done.stderr
    records, torn = read(saved)
    assert len(records) == 1 and torn == 0 and saved.stat().st_size == size


SAVES_FOR_EVER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from helpers.sample_records import record
from weft.core.implementation import with_invariant
from weft.core.record import append
big = record(idea="x" * 200_000)
print("begun", flush=True)
while True:
    append(Path(sys.argv[1]), [big])
"""


def test_a_kill_in_mid_save_leaves_the_earlier_records_readable(tmp_path: Path) -> None:
    saved = tmp_path / "records.jsonl"
    append(saved, [record(implementation="cuda")])
    here = TESTS
    command = [
        sys.executable,
        "-c",
        SAVES_FOR_EVER,
        str(saved),
        str(here),
        str(here.parent / "src"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        time.sleep(0.1)
        process.kill()
    records, torn = read(saved)
    assert records[0].implementation == "cuda" and torn <= 1
    with saved.open("ab") as file:
        file.write(b'{"operator": "gelu", "impl')  # a line torn in its middle
    append(saved, [record(implementation="eager")])
    again, torn = read(saved)
    assert len(again) == len(records) + 1 and again[-1].implementation == "eager" and torn >= 1


def test_records_are_saved_and_shown_point_by_point(tmp_path: Path) -> None:
    """A crash at the second point leaves the first one's records."""
    from weft.cli.bench import save_and_show

    def points() -> Iterator[list[Record]]:
        yield [record(case="first"), record(case="first", implementation="cuda")]
        raise KeyboardInterrupt

    saved = tmp_path / "r.jsonl"
    with pytest.raises(KeyboardInterrupt):
        list(save_and_show(points(), saved, True, lambda: None))
    assert [r.case for r in read(saved)[0]] == ["first", "first"]


def test_a_timing_with_flags_reaches_the_record() -> None:
    timing = record(cold=5.0).timing
    assert isinstance(timing, Timing)
    point = next(iter(select_points([TOY], [EAGER], None, ["forward"], "cpu", False)))
    result = bench.BenchResult(verdict=record().verdict, timing=replace(timing, flags=("no-graph",)))
    assert "no-graph" in bench.make_record(point, EAGER, result, None, {}).flags


def test_with_patience_forward_comes_first_and_skipped_work_is_reported() -> None:
    lines: list[str] = []
    how: dict[str, Any] = {"directions": None, "all_cases": True, "on_event": lines.append}
    records = run(EAGER, patience=0.0, **how)
    assert [r.direction for r in records] == ["forward", "forward"]
    assert any(line.startswith("Skipped backward") and "toy" in line for line in lines)
    assert len(run(EAGER, **how)) == 4


class Broken:
    """Worker process that cannot be restarted."""

    sandbox = make_caller = None

    def restart(self) -> None:
        raise SandboxDied("was killed by SIGKILL")


def test_a_worker_that_cannot_be_restarted_fails_and_the_others_are_timed() -> None:
    """Each point restarts the worker; a worker that is not running gets no requests."""
    theirs, worker = implementation("theirs", _nothing), Broken()
    point = next(iter(select_points([TOY], [EAGER, theirs], None, ["forward"], "cpu", False)))
    options = bench._Options(budget=QUICK, workers={"theirs": worker})  # type: ignore[dict-item]
    results = bench._bench_point(point, options, restart_external=True)
    assert results["theirs"].verdict.status == "fail"
    assert results["theirs"].verdict.reason == "channel: was killed by SIGKILL"
    assert results["eager"].timing is not None


def test_an_external_candidate_does_not_set_the_tolerance_by_its_name() -> None:
    point = next(iter(select_points([TOY], [EAGER], None, ["forward"], "cpu", False)))
    assert point.baseline is EAGER
    workers: dict[str, Any] = {"eager": Broken()}
    assert without_external_baseline(point, workers, {}).baseline is None
    assert without_external_baseline(point, workers, {"toy": EAGER}).baseline is EAGER
    assert without_external_baseline(point, {}, {}).baseline is EAGER


def test_a_first_look_has_no_ladder_steps_and_checks_a_small_case_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[tuple[str, str, int]] = []
    real = bench.check

    def check(operator: Any, one: Any, at: Any, *rest: Any, **more: Any) -> Any:
        verdict = real(operator, one, at, *rest, **more)
        checked.append((one.name, at.name, len(verdict.seeds)))
        return verdict

    monkeypatch.setattr(bench, "check", check)
    small = case(Input(name="x", shape=(7, 9)), devices=("cpu",))
    toy = replace(TOY, cases=(*CASES, small))
    step, more = (
        implementation("eager/01-naive", lambda x: x + x),
        implementation("torch", lambda x: 2 * x, backend="torch"),
    )
    implementations = (EAGER, step, more)
    point = next(iter(select_points([toy], [EAGER], None, ["forward"], "cpu", False)))
    point = bench._without_variants(replace(point, implementations=implementations))
    assert [i.name for i in point.implementations] == ["eager", "torch"]
    results = bench._bench_point(
        point, bench._Options(budget=QUICK, workers={}, first_look=True), restart_external=False
    )
    assert all(r.timing is not None for r in results.values())
    large, few = CASES[0].name, bench.CHECK_SEEDS - 1
    assert checked == [
        ("eager", small.name, 5), ("eager", large, few), ("torch", small.name, 5), ("torch", large, few)
    ]  # fmt: skip
