"""Nsight Compute: search, command, limits and errors with a fake tool; real counters on a GPU.

The fake ncu on PATH counts nothing. It writes a planned log and records its arguments.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.marked_processes import marked_processes
from helpers.paths import DATA, HELPERS
from weft import machine
from weft.core import WeftError
from weft.workbench.explain import ncu
from weft.workbench.explain.ncu import find, process, target
from weft.workbench.explain.ncu.counters import COUNTERS, STALLS, metric_names
from weft.workbench.explain.tool_process import TargetState
from weft.workbench.sources.source import Source

GELU, SOFTMAX = ((DATA / f"ncu_{name}.csv").read_text() for name in ("gelu", "softmax"))

# -- search and permission --------------------------------------------------------


def program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_tool_is_searched_on_path_then_in_toolkits_newest_first(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(find, "TOOLKITS", tmp_path / "local")
    monkeypatch.setattr(find, "STANDALONE", tmp_path / "alone")
    assert find.find() is None
    with pytest.raises(WeftError, match=r"is not installed here.*apt-get install.*conda install"):
        find.require()
    for folder in ("alone/2024.1.1", "alone/2025.10.0", "alone/2025.9.0", "local/cuda-9.2/bin"):
        program(tmp_path / folder / "ncu")
    assert find.find() == tmp_path / "local/cuda-9.2/bin/ncu"
    newer = program(tmp_path / "local/cuda-13.0/bin/ncu")
    assert find.find() == newer
    for old in (newer, tmp_path / "local/cuda-9.2/bin/ncu"):
        old.unlink()
    assert find.find() == tmp_path / "alone/2025.10.0/ncu"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    home = program(tmp_path / "home/bin/ncu")
    assert find.find() == home
    assert find.find() != program(tmp_path / "bin/ncu") == find.find()


@pytest.mark.parametrize(
    ("parameters", "capabilities", "may"),
    [
        ("RmProfilingAdminOnly: 1\n", "00000000a80425fb", False),
        ("RmProfilingAdminOnly: 1\n", "000001ffffffffff", True),
        ("RmProfilingAdminOnly: 1\n", "0000004000000000", True),
        ("Other: 1\nRmProfilingAdminOnly: 0\n", "0000000000000000", True),
        (None, "0000000000000000", True),
    ],
)
def test_missing_permission_is_reported_before_any_work(tmp_path, monkeypatch, parameters, capabilities, may):
    (tmp_path / "status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    if parameters is not None:
        (tmp_path / "params").write_text(parameters)
    monkeypatch.setattr(find, "PARAMETERS", tmp_path / "params")
    monkeypatch.setattr(find, "STATUS", tmp_path / "status")
    monkeypatch.setattr(find, "find", lambda: tmp_path / "ncu")
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    if may:
        assert find.require() == tmp_path / "ncu"
    else:
        with pytest.raises(WeftError, match=r"NVreg_RestrictProfilingToAdminUsers=0.*SYS_ADMIN"):
            find.require()


def test_a_missing_gpu_is_reported_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(find, "find", lambda: tmp_path / "ncu")
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    monkeypatch.setattr(machine, "gpu_reason", lambda: "no NVIDIA driver is installed here")
    with pytest.raises(WeftError, match=r"on a GPU.*no NVIDIA driver is installed"):
        ncu.profile(**CALL, log=print)


PERMISSION = (
    "==PROF== Connected to process 1 (/usr/bin/python3)\n==ERROR== ERR_NVGPUCTRPERM - The user "
    "does not have permission to access NVIDIA GPU Performance Counters on the target device 0.\n"
)


@pytest.mark.parametrize(
    ("text", "meaning", "hint"),
    [
        (PERMISSION, "only administrators", "NVreg_RestrictProfilingToAdminUsers=0"),
        ("==ERROR== LibraryNotLoaded\n", "not available here", "gVisor"),
        ("==ERROR== Profiling failed because a driver resource was unavailable.", "else", "dcgmi"),
        ("==ERROR== Profiling is not supported on device 0. To find", "know this GPU", "install"),
        ("==ERROR== unrecognised option '--config-file'", "lacks an option", "newer"),
    ],
)
def test_a_known_problem_has_a_hint(text, meaning, hint):
    error = find.explain_problem(text)
    assert error is not None and meaning in error.what and hint in (error.hint or "")
    assert find.explain_problem(GELU) is None and find.explain_problem(SOFTMAX) is None


# -- complete runs with a fake tool ---------------------------------------

CALL = {
    "operator": "gelu",
    "implementation": "cuda",
    "case": "fp32-16384x16384",
    "direction": "forward",
    "files": [],
}
EVENTS = [
    {"event": "started", "pid": 1},
    {
        "event": "subject",
        "backend": "cuda",
        "cost": {"read": 1 << 30, "written": 1 << 30, "flops": 0.0, "rate": None},
    },
    {"event": "counted"},
    {"event": "finished"},
]
FAKE = """\
    #!{python}
    import json, os, subprocess, sys, time
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print("NVIDIA (R) Nsight Compute\\nVersion 2025.3.1.0 (build 1) (public-release)")
        sys.exit(0)
    with open({calls!r}, "a") as calls:
        calls.write(json.dumps(arguments) + "\\n")
    turn = len(open({calls!r}).readlines()) - 1
    plan = json.load(open({plan!r}))
    plan = plan[min(turn, len(plan) - 1)]
    log = arguments[arguments.index("--log-file") + 1]
    if "log" in plan:
        open(log, "w").write(plan["log"])
    if "events" in plan:
        open(arguments[-1], "w").write("".join(json.dumps(t) + "\\n" for t in plan["events"]))
    if plan.get("run"):
        sys.exit(subprocess.call(arguments[arguments.index("--metrics") + 2:]))
    if plan.get("hang"):
        subprocess.Popen(["sleep", "61.25"], start_new_session=True)
        time.sleep(60)
    print(plan.get("print", ""))
    sys.exit(plan.get("code", 0))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Put a fake ncu on PATH that follows a plan, one entry a call; it appends its arguments to a file."""
    calls, plan = tmp_path / "calls.jsonl", tmp_path / "plan.json"
    text = FAKE.format(python=sys.executable, calls=str(calls), plan=str(plan))
    one = program(tmp_path / "bin" / "ncu", textwrap.dedent(text))
    monkeypatch.setenv("PATH", f"{one.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(find, "may_count", lambda: True)
    device = ncu.CountedDevice(arch="sm_90", l2_bytes=60 << 20, machine={"device": "Some GPU"})
    monkeypatch.setattr(ncu, "counted_device", lambda: device)
    (tmp_path / "tmp").mkdir()

    def plan_calls(*replies: dict[str, object]) -> Path:
        plan.write_text(json.dumps(replies))
        return calls

    yield plan_calls
    remaining = [p.name for p in (tmp_path / "tmp").iterdir()]
    assert [n for n in remaining if not n.startswith("torchinductor")] == []  # PyTorch's own, at import
    monkeypatch.setattr("tempfile.tempdir", None)


def test_the_command_is_built_and_its_output_read(fake):
    calls, lines = fake({"log": GELU, "events": EVENTS}), list[str]()
    one = ncu.profile(**CALL, log=lines.append)
    assert one.good and one.bottleneck.name == "memory" and one.tool == "2025.3.1.0"
    assert one.traffic.close and one.absent == ("stall_gmma",) and lines[0].startswith("ncu: ")
    (arguments,) = map(json.loads, calls.read_text().splitlines())
    at = arguments.index("--metrics")
    values = dict(zip(arguments[3:at:2], arguments[4:at:2], strict=True))
    assert arguments[:3] == ["--csv", "--page", "raw"]
    assert values["--clock-control"] == "none" and values["--profile-from-start"] == "off"
    assert values["--cache-control"] == "all" and values["--replay-mode"] == "kernel"
    assert arguments[at + 1].split(",") == list(metric_names("sm_90"))
    assert arguments[at + 2 : at + 5] == [sys.executable, "-m", "weft.workbench.explain.ncu.target"]


def test_an_unknown_counter_is_requested_by_its_other_name(fake):
    bad = "==PROF== Connected to process 7\n==ERROR== Failed to find metric regex:^{}(\\..*)?$\n"
    calls = fake(
        {"log": bad.format("dram__bytes_read\\.sum"), "events": EVENTS[:1], "hang": True},
        {"log": bad.format("smsp__average_warps_issue_stalled_imc_miss_per_issue_active")},
        {"log": GELU.replace("dram__bytes_read.sum", "dram__bytes_op_read.sum"), "events": EVENTS},
    )
    one = ncu.profile(**CALL, log=lambda line: None)
    assert one.good and one.traffic.close
    first, second, third = (json.loads(x) for x in calls.read_text().splitlines())
    names = [x[x.index("--metrics") + 1].split(",") for x in (first, second, third)]
    assert "dram__bytes_op_read.sum" in names[1] and len(names[2]) == len(names[0]) - 1


def test_a_tool_that_knows_no_counter_is_an_error(fake):
    calls = fake(*({"log": f"==ERROR== Failed to find metric {n}"} for n in metric_names("sm_90")))
    with pytest.raises(WeftError, match=r"does not know the counters.*gpu__time_duration"):
        ncu.profile(**CALL, log=lambda line: None)
    assert len(calls.read_text().splitlines()) == process.MAX_RUNS


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"log": PERMISSION, "events": EVENTS[:2]}, "ERR_NVGPUCTRPERM.*SYS_ADMIN"),
        ({"print": "==ERROR== LibraryNotLoaded", "code": 1}, "LibraryNotLoaded.*gVisor"),
        ({"print": "Segmentation fault", "code": 139}, "could not start Python.*Segmentation"),
        ({"events": [EVENTS[0], {"event": "unusable", "why": "no"}, EVENTS[3]]}, "cannot be read: no"),
        ({"events": [EVENTS[0], {"event": "refused", "why": "no"}, EVENTS[3]]}, "not supported: no"),
        (
            {"events": [*EVENTS[:2], {"event": "raised", "why": "no"}, EVENTS[3]]},
            "under the profiler: no",
        ),
        ({"events": EVENTS[:2], "log": GELU, "code": 3}, r"ended before .* over \(exit code 3\)"),
        ({"events": EVENTS, "log": "==WARNING== No kernels were profiled."}, "no kernel was counted"),
    ],
)
def test_a_failed_run_is_one_error(fake, turn, message):
    fake(turn)
    with pytest.raises(WeftError, match=message) as caught:
        ncu.profile(**CALL, log=lambda line: None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("log", "limit", "message"),
    [
        ("==WARNING== a lock file is there\n", 1.5, r"was stopped: it was not done within 2 s"),
        (PERMISSION, 50.0, "ERR_NVGPUCTRPERM"),
    ],
)
def test_a_run_is_killed_with_its_child_processes(fake, monkeypatch, tmp_path, log, limit, message):
    monkeypatch.setattr(process, "TIMEOUT", limit)
    fake({"hang": True, "log": log, "events": EVENTS[:2]})
    start = time.monotonic()
    with pytest.raises(WeftError, match=message):
        ncu.profile(**CALL, log=lambda line: None)
    assert time.monotonic() - start < 15
    assert marked_processes(f"TMPDIR={tmp_path}") == []


@pytest.mark.skipif(machine.has_gpu(), reason="tests the target without a GPU")
def test_the_target_reports_a_missing_gpu(fake):
    fake({"run": True})
    with pytest.raises(WeftError, match="not supported: only a GPU has counters: "):
        ncu.profile(**CALL, log=lambda line: None)


def test_wrong_names_are_refused_before_a_process_starts(fake):
    calls = fake({})
    for change in (
        {"operator": "nosuch"},
        {"case": "fp32-nosuch"},
        {"implementation": "nosuch"},
        {"direction": "sideways"},
        {"files": ["nosuch.py"]},
    ):
        with pytest.raises(WeftError, match=r"nosuch|sideways"):
            ncu.profile(**{**CALL, **change}, log=lambda line: None)
    assert not calls.exists()


def test_the_target_loads_what_a_file_declares():
    toys = str(HELPERS / "sanitize_toys.py")
    sources = [Source(kind="file", path=toys).to_json()]
    job = {**CALL, "operator": "doubled", "implementation": "by_hand", "sources": sources}
    operator, implementation = target.load_subject(job)
    assert (operator.name, implementation.name) == ("doubled", "by_hand")
    builtin = target.load_subject({**CALL, "sources": sources})
    assert (builtin[0].name, builtin[1].backend) == ("gelu", "cuda")
    for wrong in ({"operator": "doubled"}, {"implementation": "nosuch"}):
        with pytest.raises(WeftError, match="unknown implementation"):
            target.load_subject({**CALL, "sources": sources, **wrong})


def test_exactly_one_call_is_counted(tmp_path, monkeypatch):
    """Run the target's steps on a CPU with real tensors and record the driver's switches."""
    import torch

    from weft import backends
    from weft.core import YES, registry
    from weft.workbench.calls import inputs

    steps = list[str]()
    make, zeros = inputs.make, torch.zeros
    eager = registry.implementation("gelu", "eager")

    def backward(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
        steps.append("call")
        return (grad * x,)

    one = replace(eager, backward=backward)
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(machine, "l2_bytes", lambda kind: 1 << 16)
    monkeypatch.setattr(backends, "support", lambda *asked: YES)
    monkeypatch.setattr(target, "load_subject", lambda job: (registry.operator("gelu"), one))
    monkeypatch.setattr(inputs, "make", lambda case, device, seed: make(case, "cpu", seed))
    monkeypatch.setattr(torch, "zeros", lambda *n, dtype, device: zeros(*n, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: steps.append("wait"))
    for word in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, word, lambda word=word: steps.append(word))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    job = {**CALL, "case": "fp32-7x129", "direction": "backward", "seed": 1}
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert target.main([str(tmp_path / "job.json"), str(tmp_path / "report.jsonl")]) == 0
    assert steps == ["call"] * target.WARMUP_CALLS + ["wait", "start", "call", "wait", "stop"]
    state = TargetState.read(tmp_path / "report.jsonl")
    assert state.finished and not state.why and state.backend == "eager"
    assert state.cost is not None and (state.cost.read, state.cost.written) == (2 * 3612, 3612)


def test_the_target_imports_no_torch_and_every_stall_has_a_description():
    code = "import sys, weft.workbench.explain.ncu.target; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert {c.key for c in COUNTERS if c.key.startswith("stall_")} == {
        f"stall_{r}" for r in (*STALLS, "selected")
    }


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(find.find() is None, reason=f"ncu is not here: {find.GET}")
@pytest.mark.parametrize(("operator", "case"), [("gelu", "fp32-16384x16384"), ("sum", "fp32-2^28")])
def test_the_counted_bytes_are_the_predicted_ones_on_a_gpu(operator, case):
    try:
        one = ncu.profile(**{**CALL, "operator": operator, "case": case}, log=print)
    except WeftError as error:
        if "cannot count here" in error.what:
            pytest.skip(str(error))
        raise
    assert one.good and one.traffic.close, one.lines()
    assert one.bottleneck.name == "memory", one.lines()
