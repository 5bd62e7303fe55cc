"""weft profile: the real command on a CPU, what it must refuse, and a GPU's arithmetic by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from sample_trace import TRACE, kernel
from weft.cli import app
from weft.cli.profile import _show as shown
from weft.cli.profile import default_folder
from weft.core import WeftError
from weft.workbench.profile import artefacts, instruments, page, rows, session, words
from weft.workbench.profile import work as working
from weft.workbench.profile.agreement import Agreement, Root
from weft.workbench.profile.instruments import Reading
from weft.workbench.profile.schedule import Schedule
from weft.workbench.profile.stacks import fold

ROOT = Path(__file__).resolve().parent.parent
CALL = ["profile", "gelu", "--impl", "torch", "--case", "fp32-1024x1024", "--device", "cpu"]
ALL = {"trace.json", "stacks.folded", "flame.svg", "profile.json", "tensorboard/"}


def reading(
    name: str,
    *samples: float,
    walls: tuple[float, ...] = (),
    beside: tuple[float, ...] = (),
) -> Reading:
    return Reading(
        instrument=name,
        samples=samples,
        walls=walls or samples,
        beside=beside or walls or samples,
    )


def test_the_command_writes_all_it_says_and_its_instruments_and_root_agree(tmp_path: Path) -> None:
    out = tmp_path / "profile"
    asked = [*CALL, "--out", str(out), "--quick", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "weft", *asked], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert json.loads((out / "profile.json").read_text()) == found
    assert set(found["files"]) == ALL and all((out / name).exists() for name in ALL)
    names = [one["instrument"] for one in found["instruments"]]
    assert names == [instruments.CLOCK, instruments.AUTOGRAD, instruments.TORCH]
    assert all(len(one["samples_us"]) >= 3 for one in found["instruments"])
    assert found["agreement"]["good"] and not found["flags"]
    # The root, read anew from the files, is what our own clock said of those steps.
    folded = (out / "stacks.folded").read_text().splitlines()
    root_us = sum(int(line.rpartition(" ")[2]) for line in folded) / 1000
    walls = sum(found["instruments"][2]["walls_us"][-3:]) * found["calls_a_step"]
    assert root_us == pytest.approx(found["root"]["root_us"])
    assert walls == pytest.approx(found["root"]["wall_us"])
    assert root_us == pytest.approx(walls, rel=0.02)
    # What ran: one gelu a call, and all shares together are the wall.
    gelu = next(row for row in found["rows"] if row["name"] == "aten::gelu")
    assert gelu["launches"] == 3 * found["calls_a_step"] and gelu["share"] > 0.5
    assert sum(row["share"] for row in found["rows"]) == pytest.approx(1, abs=1e-6)
    trace = json.loads((out / "trace.json").read_text())
    assert fold(trace).root_us == pytest.approx(root_us) and "host_name" not in trace
    assert (out / "flame.svg").read_text().startswith("<svg")


def test_a_clock_that_runs_fast_disagrees_and_exits_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = instruments._now
    monkeypatch.setattr(instruments, "_now", lambda: int(1.2 * real()))
    monkeypatch.setattr(session, "TRIES", 1)
    # Of calls this short agreement would not be asked for on a fast machine.
    monkeypatch.setattr("weft.workbench.profile.agreement.ENOUGH", 1.0)
    small = ["--case", "fp32-1031", "--out", str(tmp_path / "out"), "--quick"]
    done = CliRunner().invoke(app, [*CALL, *small])
    assert done.exit_code == 1, done.output
    assert "wrong: disagree: the instruments differ by" in done.stdout
    assert "wrong: root: it differs from the wall time by -1" in done.stdout
    assert "the instruments agree" not in done.stdout


def test_what_fails_its_check_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = working.subject("gelu", "torch", "fp32-1031", "forward", "cpu")
    wrong = SimpleNamespace(status="fail", reason="planted")
    monkeypatch.setattr(session, "checked", lambda subject: (wrong, None))
    with pytest.raises(session.Failed, match="planted"):
        session.run(one, Schedule(), tmp_path / "out", lambda line: None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--with", "mine.py"], "no stranger's file is read"),
        (["--impl", "nothing"], "unknown implementation of gelu"),
        (["--impl", "cuda"], "cannot be profiled here"),
        (["--warmup", "0"], "--warmup: expected at least 1, got 0"),
        (["--tool", "vtune"], "--tool: expected torch or ncu"),
        (["--tool", "ncu"], "expected a GPU, got --device cpu"),
        (["--tool", "ncu", "--active", "3"], "--active with --tool ncu"),
    ],
)
def test_a_wrong_call_is_refused(more: list[str], says: str) -> None:
    if more == ["--impl", "cuda"] and working.backends.backend_support("cuda", "cuda").ok:
        more = ["--impl", "triton"]  # interpreted on a CPU wherever it is
    done = CliRunner().invoke(app, [*CALL, *more])
    assert isinstance(done.exception, WeftError) and says in str(done.exception), done.output


def test_device_time_is_counted_once_and_in_its_step() -> None:
    steps = instruments.steps_in(TRACE)
    assert steps == [(1000, 1100), (1110, 1210)]
    # 1030-1090; then 1130-1190 beside 1180-1230, with a copy within it: once each.
    assert instruments.busy(steps, instruments.device_spans(TRACE)) == [60, 100]
    before = kernel("early", 900, 990, 4)
    assert instruments.busy(steps, instruments.device_spans({"traceEvents": [before]})) == [0, 0]


def test_rows_of_a_gpu_have_each_launch_configuration_and_add_up() -> None:
    args = {"grid": [132, 2, 1], "block": [384, 1, 1], "registers per thread": 168}
    events = [e | {"args": e.get("args", {}) | args} if _is(e, "nvjet") else e for e in _events()]
    again = kernel("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", 1192, 1195, 5)
    found = rows.on_device({"traceEvents": [*events, again, kernel("early", 900, 990, 4)]})
    assert [(r.us, r.launches, r.grid) for r in found] == [
        (120, 2, (132, 2, 1)),
        (50, 1, None),
        (5, 1, None),
        (3, 1, None),
    ]
    assert sum(r.share for r in found) == pytest.approx(1)
    told = [r.to_json() for r in found]
    _, cells = words.ran({"device": "cuda", "rows": told})
    first = cells[0]
    assert first[1:8] == ("cublas", "67.4%", "2", "60.0 us", "132x2", "384", "168")
    assert "128x256" in first[-1] and cells[1][1] == "aten"


def _events() -> list[dict[str, Any]]:
    return list(TRACE["traceEvents"])


def _is(event: dict[str, Any], start: str) -> bool:
    return str(event["name"]).startswith(start)


def test_ranges_that_the_device_saw_are_no_work_of_it() -> None:
    def event(name: str, start: float, end: float, on: Any, marked: bool = False) -> Any:
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(
            name=name, time_range=span, device_type=on, is_user_annotation=marked
        )

    host, gpu = instruments.DeviceType.CPU, instruments.DeviceType.CUDA
    listed = [
        event("weft step", 50, 90, host, True),
        event("weft step", 0, 40, host, True),
        event("cudaLaunchKernel", 1, 3, host),
        event("weft step", 5, 35, gpu, True),
        event("a range of torch's own", 5, 30, gpu, True),
        event("nvjet_tst", 5, 30, gpu),
        event("Memcpy DtoD", 31, 35, gpu),
    ]
    steps, on_device = instruments.parts(listed)
    assert steps == [(0, 40), (50, 90)] and on_device == [(5, 30), (31, 35)]
    assert instruments.busy(steps, on_device) == [29, 0]


def test_a_gpus_trace_becomes_files_a_record_and_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session.machine, "fingerprint", lambda device: {"device": device})
    traced = instruments.Traced(trace=TRACE, walls_us=(100.0, 101.0))
    readings = (
        reading(instruments.EVENTS, 1600.0, walls=(1700.0,)),
        reading(instruments.AUTOGRAD, 1580.0, walls=(1710.0,), beside=(1590.0,)),
        reading(instruments.TORCH, 0.0, walls=(1710.0,), beside=(1590.0,)),
    )
    named = {n: SimpleNamespace(name=n, backend="cuda") for n in ("gelu", "cuda/01-a", "bf16-1")}
    subject: Any = SimpleNamespace(
        **dict(zip(("operator", "implementation", "case"), named.values(), strict=True)),
        direction="forward",
        device="cuda",
    )
    measured = session.Measured(readings=readings, traced=traced, folded=fold(TRACE), tries=1)
    work: Any = SimpleNamespace(calls=1, inputs=1, cold=True)
    (tmp_path / "trace.json").write_text("{}")
    found = session._written(subject, Schedule(), work, measured, tmp_path, print)
    assert json.loads((tmp_path / "profile.json").read_text()) == found
    assert (
        "stacks-gpu-0.folded" in found["files"] and "GPU 0" in (tmp_path / "flame.svg").read_text()
    )
    assert [flag.partition(":")[0] for flag in found["flags"]] == ["unseen"]
    assert found["root"]["gap"] == pytest.approx(200 / 201 - 1)
    shown(found, default_folder("gelu", "cuda/01-a", "bf16-1"))
    text = capsys.readouterr().out
    assert "nvjet_tst" in text and "written to profile-gelu-cuda-01-a-bf16-1:" in text
    assert "the instruments agree" not in text and "wrong: unseen: torch.profiler" in text


def test_on_a_gpu_events_wait_for_the_queue_and_subtract_what_they_cost() -> None:
    spins = []

    class Stand:
        plain_overhead = 4.0

        def timed(self, before: Any, body: Any, spin: int) -> float:
            spins.append(spin)
            body()
            return 104.0 if spin >= 800_000 else -104.0  # negative: the GPU was sooner

    made: list[int] = []
    work = working.Work("cuda", [lambda: made.append(1)] * 5, rounds=2)
    assert instruments._by_events(work, Stand(), 2) == (10.0, 10.0)
    assert spins == [200_000, 400_000, 800_000, 800_000] and len(made) == 40


def test_agreement_is_demanded_from_1_ms_on_and_never_of_the_blind() -> None:
    def gpu(*us: float) -> Agreement:
        names = [instruments.EVENTS, instruments.AUTOGRAD, instruments.TORCH]
        both = zip(names, us, strict=True)
        readings = [reading(n, t, t, walls=(9e9, 9e9), beside=(us[0], us[0])) for n, t in both]
        return Agreement(readings=readings)

    assert gpu(2000, 1960, 1910).good and not gpu(2000, 1960, 1900).good
    assert gpu(900, 800, 700).good and not gpu(900, 800, 700).demanded
    assert gpu(900, 800, 0).blind == [instruments.TORCH] and not gpu(900, 800, 0).good
    # A slow spell is both instruments': what is held together are the very same steps.
    clock = reading(instruments.CLOCK, 2000)
    slow = reading(instruments.TORCH, 4040, 4040, walls=(4000, 4000))
    wrong = reading(instruments.TORCH, 1880, walls=(2000,))
    assert Agreement(readings=[clock, slow]).spread == pytest.approx(0.01)
    assert not Agreement(readings=[clock, wrong]).good
    assert Root(root_us=101.9, wall_us=100).good and not Root(root_us=97.9, wall_us=100).good


def test_a_step_outgrows_the_cache_where_there_is_room_and_lasts_where_calls_allow() -> None:
    assert working.shape(1 << 20, 100.0, 60 << 20, 1 << 40) == (120, 1)
    assert working.shape(1 << 20, 100.0, 60 << 20, 10 << 20) == (10, 5)
    assert working.shape(1 << 30, 1500.0, 60 << 20, 1 << 40) == (1, 4)
    assert working.shape(1 << 33, 1500.0, 60 << 20, 1 << 20)[0] == 1
    inputs, rounds = working.shape(8, 0.0, 60 << 20, 1 << 40)
    assert inputs * rounds <= 256


@pytest.mark.parametrize("there", [True, False])
def test_tensorboard_has_every_step_or_one_line_says_why_not(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there and find_spec("tensorboard") is None:
        pytest.skip("needs tensorboard: pip install 'weft[tensorboard]'")
    (tmp_path / "trace.json").write_text("{}")
    if not there:
        monkeypatch.setattr(artefacts, "find_spec", lambda name: None)
    taken = [reading(instruments.TORCH, 3.0, 2.0, walls=(5.0, 4.0))]
    said = artefacts.tensorboard(tmp_path, "gelu-a/b", taken, rows.on_device(TRACE))
    log = tmp_path / "tensorboard"
    assert [f.read_text() for f in log.glob("gelu-a-b.*.pt.trace.json")] == ["{}"]
    if not there:
        assert said == artefacts.NO_TENSORBOARD and len(list(log.iterdir())) == 1
        return
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    assert not said
    (file,) = log.glob("events.*")
    found = [(v.tag, e.step) for e in EventFileLoader(str(file)).Load() for v in e.summary.value]
    assert ("time a call (us)/torch.profiler", 1) in found
    assert ("wall time a call (us)/torch.profiler", 0) in found
    assert any(tag.startswith("share of the time/") for tag, _ in found)


def test_the_page_shows_committed_profiles_or_the_command(tmp_path: Path) -> None:
    assert page.COMMAND in page.measured(tmp_path)
    one = {
        "format": page.FORMAT,
        "operator": "matmul",
        "implementation": "torch",
        "case": "bf16-8192",
        "direction": "forward",
        "instruments": [{"instrument": n, "us": 1500.0} for n in ("CUDA events", "a", "b")],
        "agreement": {"spread": 0.061, "good": False},
        "root": Root(root_us=1010, wall_us=1000).to_json(),
        "machine": {"device": "toy GPU", "date": "2026-01-02T", "versions": {"torch": "2.11"}},
    }
    (tmp_path / "toy").mkdir()
    file = tmp_path / "toy" / page.FILE
    file.write_text(json.dumps(one) + "\n")
    text = page.measured(tmp_path)
    assert "**6.1%**" in text and "1.50 ms" in text and "+1.00%" in text and "toy GPU" in text
    file.write_text("{}\n")
    with pytest.raises(WeftError, match=r"profile\.ndjson:1"):
        page.measured(tmp_path)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("operator", "name", "case", "direction"),
    [
        ("matmul", "torch", "bf16-8192x8192x8192", "forward"),
        ("gelu", "eager", "bf16-16384x16384", "backward"),
    ],
)
def test_on_a_gpu_the_three_agree_on_calls_over_1_ms(
    operator: str, name: str, case: str, direction: str, tmp_path: Path
) -> None:
    one = working.subject(operator, name, case, direction, "cuda")
    found = session.run(one, Schedule(), tmp_path / "out", print)
    assert found["agreement"]["demanded"] and not found["flags"], found["flags"]
    assert found["rows"][0]["grid"] and found["rows"][0]["block"]
    assert sum(row["share"] for row in found["rows"]) == pytest.approx(1)
    assert any((tmp_path / "out").glob("stacks-gpu-*.folded"))
