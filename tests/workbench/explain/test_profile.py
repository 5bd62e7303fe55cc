"""weft profile: the command on a CPU, refused calls, and the arithmetic of a GPU by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.paths import ROOT
from helpers.sample_trace import TRACE, kernel
from weft.cli import app
from weft.cli.profile import default_folder
from weft.cli.profile import show as show_profile
from weft.core import WeftError, registry
from weft.workbench.calls.buffers import allocate_buffers
from weft.workbench.explain.profile import instruments, output_files, rows, session, tables, text, workload
from weft.workbench.explain.profile.agreement import Agreement, Root
from weft.workbench.explain.profile.instruments import Reading, Schedule
from weft.workbench.explain.profile.stacks import fold

CALL = ["profile", "gelu", "--impl", "torch", "--case", "fp32-1024x1024", "--device", "cpu"]
ALL = {"trace.json", "stacks.folded", "flame.svg", "profile.json", "tensorboard/"}


def reading(
    name: str,
    *samples: float,
    walls: tuple[float, ...] = (),
    reference: tuple[float, ...] = (),
) -> Reading:
    return Reading(
        instrument=name,
        samples=samples,
        walls=walls or samples,
        reference=reference or walls or samples,
    )


@pytest.mark.pooled(3, "commands that measure")
def test_the_command_writes_its_files_and_its_instruments_and_root_agree(tmp_path: Path) -> None:
    out = tmp_path / "profile"
    arguments = [*CALL, "--out", str(out), "--quick", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "weft", *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    profile = json.loads(done.stdout)
    assert json.loads((out / "profile.json").read_text()) == profile
    assert set(profile["files"]) == ALL and all((out / name).exists() for name in ALL)
    names = [one["instrument"] for one in profile["instruments"]]
    assert names == [instruments.CLOCK, instruments.AUTOGRAD, instruments.TORCH]
    assert all(len(one["samples_us"]) >= 3 for one in profile["instruments"])
    assert profile["agreement"]["good"] and not profile["flags"]
    # The root in the files is the time of the same steps by our own clock.
    folded = (out / "stacks.folded").read_text().splitlines()
    root_us = sum(int(line.rpartition(" ")[2]) for line in folded) / 1000
    walls = sum(profile["instruments"][2]["walls_us"][-3:]) * profile["calls_a_step"]
    assert root_us == pytest.approx(profile["root"]["root_us"])
    assert walls == pytest.approx(profile["root"]["wall_us"])
    assert root_us == pytest.approx(walls, rel=0.02)
    # One gelu a call ran, and all shares together are the wall time.
    gelu = next(row for row in profile["rows"] if row["name"] == "aten::gelu")
    assert gelu["launches"] == 3 * profile["calls_a_step"] and gelu["share"] > 0.5
    assert sum(row["share"] for row in profile["rows"]) == pytest.approx(1, abs=1e-6)
    trace = json.loads((out / "trace.json").read_text())
    assert fold(trace).root_us == pytest.approx(root_us) and "host_name" not in trace
    assert (out / "flame.svg").read_text().startswith("<svg")


def test_python_functions_are_in_the_flame_graph_and_not_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record one cycle of real calls with Python frames, after a cycle without."""
    monkeypatch.setattr(session.machine, "fingerprint", lambda device: {"device": device})
    monkeypatch.setattr(output_files, "find_spec", lambda name: None)  # TensorBoard's import takes seconds
    subject = workload.select_subject("gelu", "eager", "fp32-1031", "forward", "cpu")
    inputs = allocate_buffers(subject.case, "cpu", None, 0)
    one = workload.Workload("cpu", [subject.bind(inputs)], rounds=20)
    one_cycle = Schedule(wait=0, warmup=1, active=2, repeat=1)
    seen, traced = instruments.measure_by_torch_profiler(one, one_cycle, tmp_path / "trace.json")
    readings = (reading(instruments.CLOCK, *seen.walls), seen, seen)
    measured = session.Measurement(readings=readings, traced=traced, folded=fold(traced.trace), attempts=1)
    both = session._with_frames(measured, one, one_cycle, tmp_path)
    profile = session._write(subject, one_cycle, one, both, tmp_path, print)
    folded = (tmp_path / "stacks.folded").read_text()
    line = next(x for x in folded.splitlines() if "aten::tanh " in x)
    frames = line.split(";")
    assert frames[0] == "wall time" and frames[1].endswith(": forward_gelu")
    assert any(f.endswith(": _tanh_gelu") for f in frames) and "workbench" not in folded
    assert "_tanh_gelu" in (tmp_path / "flame.svg").read_text()
    assert fold(json.loads((tmp_path / "trace.json").read_text())).lines() == folded.splitlines()
    names = {row["name"] for row in profile["rows"]}
    assert "aten::tanh" in names and not any(".py(" in name or "built-in" in name for name in names)
    assert profile["python_frames"] and both.root.root_us == pytest.approx(both.folded.root_us)


def test_a_clock_that_runs_fast_disagrees_and_exits_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = instruments._now
    monkeypatch.setattr(instruments, "_now", lambda: int(1.2 * real()))
    monkeypatch.setattr(session, "MAX_ATTEMPTS", 1)
    # Agreement of calls this short is not required by default.
    monkeypatch.setattr("weft.workbench.explain.profile.agreement.REQUIRED_FROM", 1.0)
    small = ["--case", "fp32-1031", "--out", str(tmp_path / "out"), "--quick"]
    done = CliRunner().invoke(app, [*CALL, *small])
    assert done.exit_code == 1, done.output
    assert "wrong: disagree: the instruments differ by" in done.stdout
    assert "wrong: root: it differs from the wall time by -1" in done.stdout
    assert "the instruments agree" not in done.stdout


def test_an_implementation_that_fails_its_check_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = workload.select_subject("gelu", "torch", "fp32-1031", "forward", "cpu")
    wrong = SimpleNamespace(status="fail", reason="planted")
    monkeypatch.setattr(session, "check_subject", lambda subject: (wrong, None))
    with pytest.raises(session.CheckFailed, match="planted"):
        session.run(one, Schedule(), tmp_path / "out", lambda line: None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--with", "mine.py"], "which never loads your code"),
        (["--impl", "nothing"], "unknown implementation of gelu"),
        (["--impl", "cuda"], "cannot be profiled here"),
        (["--warmup", "0"], "--warmup: expected at least 1, got 0"),
        (["--tool", "vtune"], "--tool: expected torch, ncu or nsys"),
        (["--tool", "ncu"], "expected a GPU, got --device cpu"),
        (["--tool", "ncu", "--active", "3"], "--active with --tool ncu"),
        (["--tool", "ncu", "--stacks"], "--stacks with --tool ncu"),
    ],
)
def test_a_wrong_call_is_refused(options: list[str], message: str) -> None:
    if options == ["--impl", "cuda"] and workload.backends.backend_support("cuda", "cuda").ok:
        options = ["--impl", "triton"]  # always interpreted on a CPU
    done = CliRunner().invoke(app, [*CALL, *options])
    assert isinstance(done.exception, WeftError) and message in str(done.exception), done.output


def test_device_time_is_counted_once_and_in_its_step() -> None:
    steps = instruments.step_spans(TRACE)
    assert steps == [(1000, 1100), (1110, 1210)]
    # 1030-1090; then 1130-1190 beside 1180-1230, with a copy within it: once each.
    assert instruments.busy_times(steps, instruments.device_spans(TRACE)) == [60, 100]
    before = kernel("early", 900, 990, 4)
    assert instruments.busy_times(steps, instruments.device_spans({"traceEvents": [before]})) == [0, 0]


def test_rows_of_a_gpu_have_each_launch_configuration_and_add_up() -> None:
    args = {"grid": [132, 2, 1], "block": [384, 1, 1], "registers per thread": 168}
    events = [e | {"args": e.get("args", {}) | args} if _is(e, "nvjet") else e for e in _events()]
    again = kernel("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", 1192, 1195, 5)
    cuda = registry.implementation("gelu", "cuda")
    table = rows.on_device({"traceEvents": [*events, again, kernel("early", 900, 990, 4)]}, cuda)
    assert [(r.us, r.launches, r.grid) for r in table] == [
        (120, 2, (132, 2, 1)),
        (50, 1, None),
        (5, 1, None),
        (3, 1, None),
    ]
    assert sum(r.share for r in table) == pytest.approx(1)
    _, cells = text.kernels({"device": "cuda", "rows": [r.to_json() for r in table]})
    first = cells[0]
    assert first[1:8] == ("cublas", "67.4%", "2", "60.0 us", "132x2", "384", "168")
    assert "128x256" in first[-1] and cells[1][1] == "aten"


@pytest.mark.parametrize(
    ("operator", "name"),
    [("gelu", "cuda"), ("gelu", "triton"), ("matmul", "cuda"), ("layer_norm", "cuda"), ("sum", "triton")],
)
def test_kernels_of_weft_have_the_origin_of_their_backend(operator: str, name: str) -> None:
    implementation = registry.implementation(operator, name)
    own = sorted(rows.kernel_names(implementation))
    assert own
    events = [kernel(n, 1020 + 10 * i, 1029 + 10 * i, 1) for i, n in enumerate(own)]
    events += [kernel("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", 1000, 1001, 1)]
    events += [kernel("somebody_elses", 1001, 1002, 1)]
    expected = dict.fromkeys(own, f"{name} (weft)") | {"somebody_elses": "unknown"}
    table = rows.on_device({"traceEvents": events}, implementation)
    assert {r.name: r.library for r in table if r.library != "cublas"} == expected
    # The same kernels of an implementation that is not in the registry are its own code.
    external = replace(implementation, name="mine")
    table = rows.on_device({"traceEvents": events}, external)
    assert {r.library for r in table} == {"cublas", "own code"}
    _, cells = text.kernels({"device": "cuda", "rows": [r.to_json() for r in table]})
    assert {line[1] for line in cells} == {"cublas", "own code"}


def test_kernels_of_numba_have_their_origin_by_their_mark() -> None:
    name = "_ZN6cudapy4weft4gelu7forwardB2v1E5ArrayIfLi1E1C7mutable7alignedE"
    implementation = registry.implementation("gelu", "numba")
    assert rows.kernel_origin(name, implementation) == "numba (weft)"
    assert rows.kernel_origin(name, replace(implementation, name="mine")) == "own code"


def _events() -> list[dict[str, Any]]:
    return list(TRACE["traceEvents"])


def _is(event: dict[str, Any], start: str) -> bool:
    return str(event["name"]).startswith(start)


def test_ranges_on_the_device_are_not_device_work() -> None:
    def event(name: str, start: float, end: float, on: Any, marked: bool = False) -> Any:
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, time_range=span, device_type=on, is_user_annotation=marked)

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
    steps, on_device = instruments.profiler_spans(listed)
    assert steps == [(0, 40), (50, 90)] and on_device == [(5, 30), (31, 35)]
    assert instruments.busy_times(steps, on_device) == [29, 0]


def test_a_trace_of_a_gpu_becomes_files_a_record_and_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session.machine, "fingerprint", lambda device: {"device": device})
    traced = instruments.TracedCycle(trace=TRACE, walls_us=(100.0, 101.0))
    readings = (
        reading(instruments.EVENTS, 1600.0, walls=(1700.0,)),
        reading(instruments.AUTOGRAD, 1580.0, walls=(1710.0,), reference=(1590.0,)),
        reading(instruments.TORCH, 0.0, walls=(1710.0,), reference=(1590.0,)),
    )
    external = replace(registry.implementation("gelu", "cuda"), name="cuda/01-a")
    subject: Any = SimpleNamespace(
        operator=registry.operator("gelu"),
        implementation=external,
        case=SimpleNamespace(name="bf16-1"),
        direction="forward",
        device="cuda",
    )
    measurement = session.Measurement(readings=readings, traced=traced, folded=fold(TRACE), attempts=1)
    step: Any = SimpleNamespace(calls=1, inputs=1, cold=True)
    (tmp_path / "trace.json").write_text("{}")
    profile = session._write(subject, Schedule(), step, measurement, tmp_path, print)
    assert json.loads((tmp_path / "profile.json").read_text()) == profile
    assert "stacks-gpu-0.folded" in profile["files"] and "GPU 0" in (tmp_path / "flame.svg").read_text()
    assert [flag.partition(":")[0] for flag in profile["flags"]] == ["unseen"]
    assert profile["root"]["gap"] == pytest.approx(200 / 201 - 1)
    show_profile(profile, default_folder("gelu", "cuda/01-a", "bf16-1"))
    output = capsys.readouterr().out
    assert "nvjet_tst" in output and "written to profile-gelu-cuda-01-a-bf16-1:" in output
    assert "the instruments agree" not in output and "wrong: unseen: torch.profiler" in output


def test_on_a_gpu_events_wait_for_the_queue_and_subtract_what_they_cost() -> None:
    spins = []

    class FakeBackend:
        plain_overhead = 4.0

        def timed(self, before: Any, body: Any, spin: int) -> float:
            spins.append(spin)
            body()
            return 104.0 if spin >= 800_000 else -104.0  # negative: the GPU was sooner

    calls: list[int] = []
    step = workload.Workload("cuda", [lambda: calls.append(1)] * 5, rounds=2)
    assert instruments._event_times(step, FakeBackend(), 2) == (10.0, 10.0)
    assert spins == [200_000, 400_000, 800_000, 800_000] and len(calls) == 40


def test_agreement_is_required_from_1_ms_on_and_an_instrument_that_saw_nothing_fails() -> None:
    def gpu(*us: float) -> Agreement:
        names = [instruments.EVENTS, instruments.AUTOGRAD, instruments.TORCH]
        pairs = zip(names, us, strict=True)
        readings = [reading(n, t, t, walls=(9e9, 9e9), reference=(us[0], us[0])) for n, t in pairs]
        return Agreement(readings=readings)

    assert gpu(2000, 1960, 1910).good and not gpu(2000, 1960, 1900).good
    assert gpu(900, 800, 700).good and not gpu(900, 800, 700).required
    assert gpu(900, 800, 0).blind == [instruments.TORCH] and not gpu(900, 800, 0).good
    # A slow period affects both instruments: the same steps are compared.
    clock = reading(instruments.CLOCK, 2000)
    slow = reading(instruments.TORCH, 4040, 4040, walls=(4000, 4000))
    wrong = reading(instruments.TORCH, 1880, walls=(2000,))
    assert Agreement(readings=[clock, slow]).spread == pytest.approx(0.01)
    assert not Agreement(readings=[clock, wrong]).good
    assert Root(root_us=101.9, wall_us=100).good and not Root(root_us=97.9, wall_us=100).good


def test_a_step_exceeds_the_cache_if_memory_allows_and_lasts_long_enough() -> None:
    assert workload.step_size(1 << 20, 100.0, 60 << 20, 1 << 40) == (120, 1)
    assert workload.step_size(1 << 20, 100.0, 60 << 20, 10 << 20) == (10, 5)
    assert workload.step_size(1 << 30, 1500.0, 60 << 20, 1 << 40) == (1, 4)
    assert workload.step_size(1 << 33, 1500.0, 60 << 20, 1 << 20)[0] == 1
    inputs, rounds = workload.step_size(8, 0.0, 60 << 20, 1 << 40)
    assert inputs * rounds <= 256


@pytest.mark.parametrize("installed", [True, False])
def test_tensorboard_has_every_step_or_a_line_says_why_not(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed and find_spec("tensorboard") is None:
        pytest.skip("needs tensorboard: pip install 'weft[tensorboard]'")
    (tmp_path / "trace.json").write_text("{}")
    if not installed:
        monkeypatch.setattr(output_files, "find_spec", lambda name: None)
    readings = [reading(instruments.TORCH, 3.0, 2.0, walls=(5.0, 4.0))]
    cuda = registry.implementation("gelu", "cuda")
    message = output_files.write_tensorboard(tmp_path, "gelu-a/b", readings, rows.on_device(TRACE, cuda))
    log = tmp_path / "tensorboard"
    assert [f.read_text() for f in log.glob("gelu-a-b.*.pt.trace.json")] == ["{}"]
    if not installed:
        assert message == output_files.NO_TENSORBOARD and len(list(log.iterdir())) == 1
        return
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    assert not message
    (file,) = log.glob("events.*")
    scalars = [(v.tag, e.step) for e in EventFileLoader(str(file)).Load() for v in e.summary.value]
    assert ("time a call (us)/torch.profiler", 1) in scalars
    assert ("wall time a call (us)/torch.profiler", 0) in scalars
    assert any(tag.startswith("share of the time/") for tag, _ in scalars)


def test_the_documentation_shows_committed_profiles_or_the_command(tmp_path: Path) -> None:
    assert tables.COMMAND in tables.measured(tmp_path)
    one = {
        "format": tables.FORMAT,
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
    file = tmp_path / "toy" / tables.FILE
    file.write_text(json.dumps(one) + "\n")
    markdown = tables.measured(tmp_path)
    assert "**6.1%**" in markdown and "1.50 ms" in markdown
    assert "+1.00%" in markdown and "toy GPU" in markdown
    file.write_text("{}\n")
    with pytest.raises(WeftError, match=r"profile\.ndjson:1"):
        tables.measured(tmp_path)


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
def test_the_three_instruments_agree_on_calls_over_1_ms_on_a_gpu(
    operator: str, name: str, case: str, direction: str, tmp_path: Path
) -> None:
    one = workload.select_subject(operator, name, case, direction, "cuda")
    profile = session.run(one, Schedule(), tmp_path / "out", print)
    assert profile["agreement"]["demanded"] and not profile["flags"], profile["flags"]
    assert profile["rows"][0]["grid"] and profile["rows"][0]["block"]
    assert sum(row["share"] for row in profile["rows"]) == pytest.approx(1)
    assert any((tmp_path / "out").glob("stacks-gpu-*.folded"))
