"""Nsight Systems: the reader of its export, the summary, the command, and a run of a fake tool."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers import nsys_export
from weft import machine
from weft.cli import app
from weft.core import WeftError
from weft.workbench.explain import nsys
from weft.workbench.explain.nsys import export, process, summary, target, timeline
from weft.workbench.explain.nsys.export import ApiCall, Range
from weft.workbench.explain.profile import stacks
from weft.workbench.sanitizer import subprocess_target

KERNEL_TABLE = "CUPTI_ACTIVITY_KIND_KERNEL"
LAUNCH_TABLE = "CUPTI_ACTIVITY_KIND_RUNTIME"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return nsys_export.write(tmp_path / "trace.sqlite")


def test_the_summary_has_the_times_gaps_and_latencies_of_a_known_trace(file: Path) -> None:
    result = nsys.summarise(nsys.load(file))
    other, gelu = result.kernels
    assert (other.short, other.count, other.total_us, other.share) == ("other_kernel", 1, 10, 10 / 18)
    assert (gelu.count, gelu.total_us, gelu.median_us) == (2, 8, 4)
    # 8,000 - 5,000 and 12,000 - 6,000; idle for 6,000 and for 0.
    assert (gelu.latency_us, gelu.gap_us) == (4.5, 3) and (other.latency_us, other.gap_us) == (4, 28)
    (device,) = result.devices
    assert (device.span_us, device.busy_us, device.gaps) == (53, 19, 2)
    assert (device.median_gap_us, device.longest_gap_us) == (17, 28)
    assert (device.after, device.before) == ("gelu_forward_wide", "other_kernel")
    (copy,) = result.copies
    assert (copy.direction, copy.source, copy.target) == ("host to device", "pinned", "device")
    assert (copy.nbytes, copy.total_us, copy.rate) == (25_000, 1, 25e9)
    # The second gelu was launched while nothing ran too: only its start waited for the first.
    latency = result.latency
    assert (latency.launches, latency.median_us, latency.unmatched) == (3, 4, 0)
    assert (latency.idle_launches, latency.idle_median_us) == (2, 3.5)
    assert result.notes == ()


def test_ranges_have_the_kernels_that_were_launched_inside_also_by_a_thread_of_autograd(file: Path) -> None:
    rows = {row.name: row for row in nsys.summarise(nsys.load(file)).ranges}
    assert list(rows) == ["step", "backward", "forward"]
    forward, backward, step = rows["forward"], rows["backward"], rows["step"]
    assert (forward.count, forward.total_us, forward.kernels, forward.kernel_us) == (1, 19, 2, 8)
    assert [(k.short, k.count, k.us) for k in backward.inner] == [("other_kernel", 1, 10)]
    assert (step.kernels, step.kernel_us) == (3, 18)


def test_a_call_is_in_the_ranges_of_its_own_thread_if_it_has_any() -> None:
    def call(start: int, thread: int) -> ApiCall:
        return ApiCall(start, start + 1, "launch", 1, thread, start)

    ranges = [
        Range(0, 100, "a", 1, 7),
        Range(10, 20, "inner", 1, 7),
        Range(0, 100, "b", 1, 8),
        Range(40, 60, "any thread", 1, None),
        Range(0, 100, "another process", 2, 7),
    ]
    calls = [call(5, 7), call(15, 7), call(20, 7), call(50, 8), call(15, 9)]
    inside = {(c.start, c.thread): names for c, names in summary.ranges_of_calls(calls, ranges)}
    assert inside == {
        (5, 7): {"a"},
        (15, 7): {"a", "inner"},
        (20, 7): {"a"},  # a range ends before what begins at its end
        (50, 8): {"b", "any thread"},
        (15, 9): {"a", "inner", "b"},
    }


def test_kernels_of_one_graph_have_one_launch_and_streams_at_once_are_no_gap(tmp_path: Path) -> None:
    # Both gelus come from one call, and the last kernel begins while the first still runs.
    change = f"""
    UPDATE {KERNEL_TABLE} SET correlationId = 11 WHERE correlationId = 12;
    UPDATE {KERNEL_TABLE} SET start = 10000, streamId = 8 WHERE correlationId = 13;
    """
    result = nsys.summarise(nsys.load(nsys_export.write(tmp_path / "a.sqlite", change=change)))
    assert result.latency.launches == 2
    (device,) = result.devices
    assert (device.span_us, device.busy_us, device.gaps) == (53, 47, 1)


def test_absent_tables_are_no_error_and_a_note_says_what_is_missing(tmp_path: Path) -> None:
    only_ranges = nsys_export.write(
        tmp_path / "ranges.sqlite", without=(KERNEL_TABLE, LAUNCH_TABLE, "CUPTI_ACTIVITY_KIND_MEMCPY")
    )
    result = nsys.summarise(nsys.load(only_ranges))
    assert [row.name for row in result.ranges] == ["step", "backward", "forward"] and not result.devices
    assert "trace with --trace=cuda,nvtx" in result.notes[0]
    no_calls = nsys_export.write(tmp_path / "calls.sqlite", without=(LAUNCH_TABLE, "NVTX_EVENTS"))
    result = nsys.summarise(nsys.load(no_calls))
    assert result.latency.unmatched == 3 and result.kernels[0].latency_us is None
    assert "WEFT_NVTX=1" in result.notes[0]
    change = "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER);"
    change += "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1, 2), (3, 4);"
    graphs = nsys.summarise(nsys.load(nsys_export.write(tmp_path / "graph.sqlite", change=change)))
    assert graphs.notes[0].startswith("2 launches of CUDA graphs")


def test_a_range_without_an_end_lasts_to_the_end_of_the_trace(tmp_path: Path) -> None:
    change = "UPDATE NVTX_EVENTS SET end = NULL WHERE text = 'step'"
    result = nsys.load(nsys_export.write(tmp_path / "a.sqlite", change=change))
    assert next(r.end for r in result.ranges if r.name == "step") == 54_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (f"ALTER TABLE {KERNEL_TABLE} DROP COLUMN streamId", "another schema.*got without streamId"),
        ("ALTER TABLE NVTX_EVENTS RENAME COLUMN eventType TO kind", "NVTX_EVENTS.*without eventType"),
        ("DROP TABLE StringIds", "incomplete.*expected the table StringIds"),
        (f"UPDATE {KERNEL_TABLE} SET start = 'soon'", f"integers in {KERNEL_TABLE}.start, got 'soon'"),
        (f"UPDATE {KERNEL_TABLE} SET end = 5", "ends after their starts, got gelu_forward_wide"),
        (
            "".join(f"DROP TABLE {t};" for t in re.findall(r"TABLE (\w+)", nsys_export.SCHEMA))
            + "CREATE TABLE users (id INTEGER)",
            "no trace of a GPU.*got users",
        ),
    ],
)
def test_a_database_with_other_content_is_one_error(tmp_path: Path, change: str, message: str) -> None:
    damaged = nsys_export.write(tmp_path / "a.sqlite", change=change)
    with pytest.raises(WeftError, match=message) as caught:
        nsys.load(damaged)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_database_is_one_error(tmp_path: Path, file: Path) -> None:
    report = tmp_path / "report.nsys-rep"
    report.write_bytes(b"\x89nsys" * 100)
    with pytest.raises(WeftError, match="another format; hint: write one by: nsys export --type sqlite"):
        nsys.load(report)
    with pytest.raises(WeftError, match="cannot be read"):
        nsys.load(tmp_path / "absent.sqlite")
    with pytest.raises(WeftError, match="cannot be read"):
        nsys.load(tmp_path)
    torn = tmp_path / "torn.sqlite"
    torn.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(WeftError, match="damaged"):
        nsys.load(torn)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(WeftError, match="no regular file"):
        nsys.load(tmp_path / "fifo")


def test_reading_changes_no_file(file: Path) -> None:
    before = file.read_bytes()
    nsys.load(file)
    assert file.read_bytes() == before and [p.name for p in file.parent.iterdir()] == [file.name]


def test_the_timeline_folds_to_the_same_times(file: Path) -> None:
    trace = timeline.chrome_trace(nsys.load(file))
    folded = stacks.fold(trace)
    assert folded.root_ns == 100_000
    gpu = folded.lane("GPU 0")
    by_kernel = {stack[-1]: ns for stack, ns in gpu.stacks.items()}
    assert by_kernel == {
        "host to device": 1_000,
        "gelu_forward_wide": 8_000,
        "other_kernel": 10_000,
        stacks.IDLE: 81_000,
    }
    # A kernel lies below the ranges of the thread that launched it.
    assert ("step", "forward", "gelu_forward_wide") in gpu.stacks


def test_the_command_shows_an_export_and_writes_its_files(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["profile", "--from", str(file), "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["format"] == summary.FORMAT and json.loads((out / "nsys.json").read_text()) == data
    names = {"nsys.json", "trace.json", "flame.svg", "stacks.folded", "stacks-gpu-0.folded"}
    assert names <= {p.name for p in out.iterdir()}
    assert (out / "flame.svg").read_text().startswith("<svg")


def test_the_tables_fit_80_columns(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.cli import output
    from weft.workbench.explain.nsys import text

    result = nsys.summarise(nsys.load(file))
    lines = [str(line) for table in text.tables(result) for line in output.table_lines(table, 80)]
    assert max(map(len, lines)) <= 80
    shown = "\n".join(lines)
    assert "gelu_forward_wide" in shown and "25.0 GB/s" in shown and "- other_kernel" in shown
    assert list(text.sentences(result)) == [
        "launch latency: 4.00 us in the median of 3 launches; 3.50 us of the 2 onto an idle device"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gelu", "--from", "x.sqlite"], "--from runs nothing.*got OPERATOR"),
        (["--from", "x.sqlite", "--impl", "cuda", "--quick"], "got --impl, --quick"),
        (["--from", "x.sqlite", "--tool", "ncu", "--direction", "backward"], "got --direction, --tool"),
        (["--tool", "nsys"], "nothing to profile: expected an operator, or --from"),
        (["gelu", "--tool", "nsys", "--device", "cpu"], "--tool nsys: expected a GPU"),
        (["gelu", "--tool", "nsys", "--warmup", "3"], "--warmup with --tool nsys"),
        (["gelu", "--tool", "nsys", "--with", "mine.py"], "--with needs --impl and --case here"),
    ],
)
def test_a_wrong_call_is_refused(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["profile", *arguments])
    assert isinstance(done.exception, WeftError) and re.search(message, str(done.exception)), done.output


# -- runs of a fake tool ------------------------------------------------------

CALL: dict[str, Any] = {
    "operator": "gelu",
    "implementation": "cuda",
    "case": "fp32-16384x16384",
    "direction": "forward",
    "files": [],
}
EVENTS = [
    {"event": "started", "pid": 1},
    {"event": "subject", "backend": "cuda", "cost": {"read": 1, "written": 1, "flops": 0.0, "rate": None}},
    {"event": "traced"},
    {"event": "finished"},
]
FAKE = """\
    #!{python}
    import json, os, shutil, sys
    arguments = sys.argv[1:]
    with open({calls!r}, "a") as calls:
        calls.write(json.dumps([arguments, os.environ.get("WEFT_NVTX")]) + "\\n")
    plan = json.load(open({plan!r}))
    output = next(a for a in arguments if a.startswith("--output=")).partition("=")[2]
    if arguments[0] == "export":
        if "export" in plan:
            shutil.copy(plan["export"], output)
        print(plan.get("complaint", ""))
        sys.exit(plan.get("export_code", 0))
    open(arguments[-1], "w").write("".join(json.dumps(e) + "\\n" for e in plan["events"]))
    if plan.get("report", True):
        open(output + ".nsys-rep", "w").write("a report")
    print(plan.get("print", ""))
    sys.exit(plan.get("code", 0))
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a fake nsys on PATH that follows a plan and appends its arguments to a file."""
    calls, plan = tmp_path / "calls.jsonl", tmp_path / "plan.json"
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(textwrap.dedent(FAKE.format(python=sys.executable, calls=str(calls), plan=str(plan))))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(machine, "has_gpu", lambda: True)

    def plan_run(**reply: object) -> Path:
        plan.write_text(json.dumps(reply))
        return calls

    return plan_run


def test_the_command_lines_are_built_and_the_export_is_read(fake: Any, tmp_path: Path, file: Path) -> None:
    calls, lines = fake(events=EVENTS, export=str(file)), list[str]()
    result = nsys.profile(**CALL, out=tmp_path / "out", log=lines.append)
    assert len(result.kernels) == 3 and lines[-1] == "nsys: exporting"
    (profile, nvtx), (export_call, _) = map(json.loads, calls.read_text().splitlines())
    assert nvtx == "1" and profile[0] == "profile"
    assert {"--trace=cuda,nvtx", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"} <= set(
        profile
    )
    assert "--cuda-graph-trace=node" in profile and target.__name__ in profile
    assert export_call[:2] == ["export", "--type=sqlite"]
    assert export_call[-1] == str(tmp_path / "out" / process.REPORT)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"events": [], "report": False, "print": "no such driver", "code": 1}, "could not start.*no such"),
        ({"events": EVENTS[:2], "code": 9}, r"before the call was over \(exit code 9\)"),
        (
            {"events": [EVENTS[0], {"event": "refused", "why": "too small"}, EVENTS[3]]},
            "not supported: too small",
        ),
        ({"events": EVENTS, "report": False, "print": "disk full"}, "wrote no report.*disk full"),
        (
            {"events": EVENTS, "export_code": 2, "complaint": "newer"},
            r"export failed \(exit code 2\): got newer",
        ),
        ({"events": EVENTS}, r"export failed \(exit code 0\): got it printed nothing"),
    ],
)
def test_a_failed_run_is_one_error(fake: Any, tmp_path: Path, plan: dict[str, Any], message: str) -> None:
    fake(**plan)
    with pytest.raises(WeftError, match=message) as caught:
        nsys.profile(**CALL, out=tmp_path / "out", log=lambda line: None)
    assert "\n" not in str(caught.value)


def test_a_missing_tool_and_a_missing_gpu_are_reported_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "find_program", lambda *_: None)
    with pytest.raises(WeftError, match=r"is not installed here.*apt-get install.*weft profile --from"):
        nsys.profile(**CALL, out=tmp_path / "out", log=print)
    monkeypatch.setattr(process, "find_program", lambda *_: tmp_path / "nsys")
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    monkeypatch.setattr(machine, "gpu_reason", lambda: "no NVIDIA driver")
    with pytest.raises(WeftError, match="traces what runs on a GPU: got no NVIDIA driver"):
        nsys.profile(**CALL, out=tmp_path / "out", log=print)
    assert not (tmp_path / "out").exists()


def test_the_newest_version_of_the_tool_is_found_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft.workbench.explain.ncu import find

    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(find, "TOOLKITS", tmp_path / "none")
    monkeypatch.setattr(process, "STANDALONE", tmp_path)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    for version in ("2024.6.1", "2025.10.1"):
        program = tmp_path / version / "bin" / "nsys"
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    assert process.find() == tmp_path / "2025.10.1/bin/nsys"


def test_the_target_traces_its_calls_in_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the target's steps without a GPU and record the driver's switches and the ranges."""
    import torch

    steps: list[str] = []

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            steps.append(f"+{self.name}")

        def __exit__(self, *_: object) -> None:
            steps.append("-")

    monkeypatch.setattr(target, "annotate", Recorded)
    monkeypatch.setattr(target, "CALLS", 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: steps.append("wait"))
    for word in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, word, lambda word=word: steps.append(word))
    target._trace(lambda: steps.append("call"), lambda event: steps.append(event))
    call = ["+call", "call", "-"]
    wait = ["+wait for the device", "wait", "-"]
    assert steps == ["wait", "tracing", "start", *call, *call, *wait, "stop", "traced"]


@pytest.mark.skipif(machine.has_gpu(), reason="tests the target without a GPU")
def test_the_target_imports_no_torch_and_reports_a_missing_gpu(tmp_path: Path) -> None:
    job = {**CALL, "sources": [], "seed": 1}
    (tmp_path / "job.json").write_text(json.dumps(job))
    code = (
        "import sys; from weft.workbench.explain.nsys import target; assert 'torch' not in sys.modules; "
        "sys.exit(target.main(sys.argv[1:]))"
    )
    report = tmp_path / "report.jsonl"
    words = [sys.executable, "-c", code, str(tmp_path / "job.json"), str(report)]
    subprocess.run(words, check=True, env=subprocess_target.environment())
    events = list(subprocess_target.read_events(report))
    assert [e["event"] for e in events] == ["started", "refused", "finished"]
    assert "nsys traces what runs on a GPU" in events[1]["why"]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(process.find() is None, reason=f"nsys is not here: {process.GET}")
def test_a_traced_call_has_its_kernels_and_ranges_on_a_gpu(tmp_path: Path) -> None:
    result = nsys.profile(**CALL, out=tmp_path, log=print)
    rows = nsys.summarise(result)
    assert sum(k.count for k in rows.kernels) >= target.CALLS
    calls = next(row for row in rows.ranges if row.name == "call")
    assert calls.count == target.CALLS and calls.kernels >= target.CALLS
    assert rows.latency.unmatched == 0 and export.load(tmp_path / process.DATABASE) == result
