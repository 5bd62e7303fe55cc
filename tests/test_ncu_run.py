"""Nsight Compute found, run, watched and ended; on a GPU that has it, asked for real bytes.

Elsewhere an ncu that only pretends to count stands on PATH, and what it is told is looked at.
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

from started import started
from weft import machine
from weft.core import WeftError
from weft.workbench import ncu
from weft.workbench.bring import Source
from weft.workbench.ncu import find, running, target
from weft.workbench.ncu.counters import COUNTERS, STALLS, asked

DATA = Path(__file__).with_name("data")
GELU, SOFTMAX = ((DATA / f"ncu_{name}.csv").read_text() for name in ("gelu", "softmax"))

# -- where the tool is, and whether it may --------------------------------------------------------


def program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_tool_is_looked_for_on_path_then_in_toolkits_newest_first(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(find, "TOOLKITS", tmp_path / "local")
    monkeypatch.setattr(find, "ALONE", tmp_path / "alone")
    assert find.find() is None
    with pytest.raises(WeftError, match=r"is not installed here.*apt-get install.*conda install"):
        find.needed()
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
def test_a_driver_that_lets_only_administrators_count_is_seen_before_any_work(
    tmp_path, monkeypatch, parameters, capabilities, may
):
    (tmp_path / "status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    if parameters is not None:
        (tmp_path / "params").write_text(parameters)
    monkeypatch.setattr(find, "PARAMETERS", tmp_path / "params")
    monkeypatch.setattr(find, "STATUS", tmp_path / "status")
    monkeypatch.setattr(find, "find", lambda: tmp_path / "ncu")
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    if may:
        assert find.needed() == tmp_path / "ncu"
    else:
        with pytest.raises(WeftError, match=r"NVreg_RestrictProfilingToAdminUsers=0.*SYS_ADMIN"):
            find.needed()


def test_without_a_gpu_it_says_so_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(find, "find", lambda: tmp_path / "ncu")
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    monkeypatch.setattr(machine, "gpu_reason", lambda: "no NVIDIA driver is installed here")
    with pytest.raises(WeftError, match=r"on a GPU.*no NVIDIA driver is installed"):
        ncu.profile(**CALL, progress=print)


PERMISSION = (
    "==PROF== Connected to process 1 (/usr/bin/python3)\n==ERROR== ERR_NVGPUCTRPERM - The user "
    "does not have permission to access NVIDIA GPU Performance Counters on the target device 0.\n"
)


@pytest.mark.parametrize(
    ("text", "means", "do"),
    [
        (PERMISSION, "only administrators", "NVreg_RestrictProfilingToAdminUsers=0"),
        ("==ERROR== LibraryNotLoaded\n", "not to be had here", "gVisor"),
        ("==ERROR== Profiling failed because a driver resource was unavailable.", "else", "dcgmi"),
        ("==ERROR== Profiling is not supported on device 0. To find", "know this GPU", "install"),
        ("==ERROR== unrecognised option '--config-file'", "lacks an option", "newer"),
    ],
)
def test_a_known_trouble_says_what_to_do(text, means, do):
    error = find.trouble(text)
    assert error is not None and means in error.what and do in (error.hint or "")
    assert find.trouble(GELU) is None and find.trouble(SOFTMAX) is None


# -- the whole way, with a tool that only pretends to count ---------------------------------------

CALL = {
    "operator": "gelu",
    "implementation": "cuda",
    "case": "fp32-16384x16384",
    "direction": "forward",
    "files": [],
}
TOLD = [
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
    with open({said!r}, "a") as said:
        said.write(json.dumps(arguments) + "\\n")
    turn = len(open({said!r}).readlines()) - 1
    plan = json.load(open({plan!r}))
    plan = plan[min(turn, len(plan) - 1)]
    log = arguments[arguments.index("--log-file") + 1]
    if "log" in plan:
        open(log, "w").write(plan["log"])
    if "told" in plan:
        open(arguments[-1], "w").write("".join(json.dumps(t) + "\\n" for t in plan["told"]))
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
    """An ncu on PATH that does what the plan says, turn by turn; ``said`` are its arguments."""
    said, plan = tmp_path / "said.jsonl", tmp_path / "plan.json"
    text = FAKE.format(python=sys.executable, said=str(said), plan=str(plan))
    one = program(tmp_path / "bin" / "ncu", textwrap.dedent(text))
    monkeypatch.setenv("PATH", f"{one.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(find, "may_count", lambda: True)
    place = ncu.Here(arch="sm_90", l2_bytes=60 << 20, machine={"device": "Some GPU"})
    monkeypatch.setattr(ncu, "here", lambda: place)
    (tmp_path / "tmp").mkdir()

    def does(*turns: dict[str, object]) -> Path:
        plan.write_text(json.dumps(turns))
        return said

    yield does
    kept = [p.name for p in (tmp_path / "tmp").iterdir()]
    assert [n for n in kept if not n.startswith("torchinductor")] == []  # PyTorch's own, at import
    monkeypatch.setattr("tempfile.tempdir", None)


def test_the_command_is_built_run_and_read(fake):
    said, lines = fake({"log": GELU, "told": TOLD}), list[str]()
    one = ncu.profile(**CALL, progress=lines.append)
    assert one.good and one.bottleneck.name == "memory" and one.tool == "2025.3.1.0"
    assert one.traffic.close and one.absent == ("stall_gmma",) and lines[0].startswith("ncu: ")
    (arguments,) = map(json.loads, said.read_text().splitlines())
    at = arguments.index("--metrics")
    given = dict(zip(arguments[3:at:2], arguments[4:at:2], strict=True))
    assert arguments[:3] == ["--csv", "--page", "raw"]
    assert given["--clock-control"] == "none" and given["--profile-from-start"] == "off"
    assert given["--cache-control"] == "all" and given["--replay-mode"] == "kernel"
    assert arguments[at + 1].split(",") == list(asked("sm_90"))
    assert arguments[at + 2 : at + 5] == [sys.executable, "-m", "weft.workbench.ncu.target"]


def test_a_counter_that_the_tool_does_not_know_is_asked_for_by_its_other_name(fake):
    bad = "==PROF== Connected to process 7\n==ERROR== Failed to find metric regex:^{}(\\..*)?$\n"
    said = fake(
        {"log": bad.format("dram__bytes_read\\.sum"), "told": TOLD[:1], "hang": True},
        {"log": bad.format("smsp__average_warps_issue_stalled_imc_miss_per_issue_active")},
        {"log": GELU.replace("dram__bytes_read.sum", "dram__bytes_op_read.sum"), "told": TOLD},
    )
    one = ncu.profile(**CALL, progress=lambda line: None)
    assert one.good and one.traffic.close
    first, second, third = (json.loads(x) for x in said.read_text().splitlines())
    names = [x[x.index("--metrics") + 1].split(",") for x in (first, second, third)]
    assert "dram__bytes_op_read.sum" in names[1] and len(names[2]) == len(names[0]) - 1


def test_a_tool_that_knows_none_of_them_is_given_up(fake):
    said = fake(*({"log": f"==ERROR== Failed to find metric {n}"} for n in asked("sm_90")))
    with pytest.raises(WeftError, match=r"does not know the counters.*gpu__time_duration"):
        ncu.profile(**CALL, progress=lambda line: None)
    assert len(said.read_text().splitlines()) == running.TRIES


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"log": PERMISSION, "told": TOLD[:2]}, "ERR_NVGPUCTRPERM.*SYS_ADMIN"),
        ({"print": "==ERROR== LibraryNotLoaded", "code": 1}, "LibraryNotLoaded.*gVisor"),
        ({"print": "Segmentation fault", "code": 139}, "could not start Python.*Segmentation"),
        ({"told": [TOLD[0], {"event": "unusable", "why": "no"}, TOLD[3]]}, "cannot be read: no"),
        ({"told": [TOLD[0], {"event": "refused", "why": "no"}, TOLD[3]]}, "not supported: no"),
        (
            {"told": [*TOLD[:2], {"event": "raised", "why": "no"}, TOLD[3]]},
            "under the profiler: no",
        ),
        ({"told": TOLD[:2], "log": GELU, "code": 3}, r"ended before .* over \(exit code 3\)"),
        ({"told": TOLD, "log": "==WARNING== No kernels were profiled."}, "no kernel was counted"),
    ],
)
def test_what_goes_wrong_is_one_error(fake, turn, said):
    fake(turn)
    with pytest.raises(WeftError, match=said) as caught:
        ncu.profile(**CALL, progress=lambda line: None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("log", "limit", "said"),
    [
        ("==WARNING== a lock file is there\n", 1.5, r"was stopped: it was not done within 2 s"),
        (PERMISSION, 50.0, "ERR_NVGPUCTRPERM"),
    ],
)
def test_it_is_ended_in_time_with_all_that_it_started(
    fake, monkeypatch, tmp_path, log, limit, said
):
    monkeypatch.setattr(running, "TIMEOUT", limit)
    fake({"hang": True, "log": log, "told": TOLD[:2]})
    began = time.monotonic()
    with pytest.raises(WeftError, match=said):
        ncu.profile(**CALL, progress=lambda line: None)
    assert time.monotonic() - began < 15
    assert started(f"TMPDIR={tmp_path}") == []


@pytest.mark.skipif(machine.has_gpu(), reason="asks what the target says where there is no GPU")
def test_the_target_itself_is_started_and_says_that_it_needs_a_gpu(fake):
    fake({"run": True})
    with pytest.raises(WeftError, match="not supported: counters are a GPU's, and "):
        ncu.profile(**CALL, progress=lambda line: None)


def test_names_that_are_wrong_are_refused_before_anything_is_started(fake):
    said = fake({})
    for change in (
        {"operator": "nosuch"},
        {"case": "fp32-nosuch"},
        {"implementation": "nosuch"},
        {"direction": "sideways"},
        {"files": ["nosuch.py"]},
    ):
        with pytest.raises(WeftError, match=r"nosuch|sideways"):
            ncu.profile(**{**CALL, **change}, progress=lambda line: None)
    assert not said.exists()


def test_the_target_finds_what_a_file_declares():
    toys = str(Path(__file__).with_name("sanitize_toys.py"))
    sources = [Source(kind="file", path=toys).to_json()]
    job = {**CALL, "operator": "doubled", "implementation": "by_hand", "sources": sources}
    operator, implementation = target.subject(job)
    assert (operator.name, implementation.name) == ("doubled", "by_hand")
    ours = target.subject({**CALL, "sources": sources})
    assert (ours[0].name, ours[1].backend) == ("gelu", "cuda")
    for wrong in ({"operator": "doubled"}, {"implementation": "nosuch"}):
        with pytest.raises(WeftError, match="unknown implementation"):
            target.subject({**CALL, "sources": sources, **wrong})


def test_one_call_is_counted_after_all_that_is_not_it(tmp_path, monkeypatch):
    """The target's steps, on a CPU: the driver's switches are recorded, the tensors are real."""
    import torch

    from weft import backends
    from weft.core import YES, registry
    from weft.workbench import inputs

    done = list[str]()
    make, zeros = inputs.make, torch.zeros
    eager = registry.implementation("gelu", "eager")

    def backward(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
        done.append("call")
        return (grad * x,)

    one = replace(eager, backward=backward)
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(machine, "l2_bytes", lambda kind: 1 << 16)
    monkeypatch.setattr(backends, "support", lambda *asked: YES)
    monkeypatch.setattr(target, "subject", lambda job: (registry.operator("gelu"), one))
    monkeypatch.setattr(inputs, "make", lambda case, device, seed: make(case, "cpu", seed))
    monkeypatch.setattr(torch, "zeros", lambda *n, dtype, device: zeros(*n, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    for word in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, word, lambda word=word: done.append(word))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    job = {**CALL, "case": "fp32-7x129", "direction": "backward", "seed": 1}
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert target.main([str(tmp_path / "job.json"), str(tmp_path / "report.jsonl")]) == 0
    assert done == ["call"] * target.WARM + ["wait", "start", "call", "wait", "stop"]
    told = running.Told.read(tmp_path / "report.jsonl")
    assert told.finished and not told.why and told.backend == "eager"
    assert told.cost is not None and (told.cost.read, told.cost.written) == (2 * 3612, 3612)


def test_it_is_light_and_every_stall_has_its_words():
    code = (
        "import sys, weft.workbench.ncu, weft.workbench.ncu.target; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert {c.key for c in COUNTERS if c.key.startswith("stall_")} == {
        f"stall_{r}" for r in (*STALLS, "selected")
    }


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(find.find() is None, reason=f"ncu is not here: {find.GET}")
@pytest.mark.parametrize(("operator", "case"), [("gelu", "fp32-16384x16384"), ("sum", "fp32-2^28")])
def test_on_a_gpu_the_bytes_are_the_predicted_ones(operator, case):
    try:
        one = ncu.profile(**{**CALL, "operator": operator, "case": case}, progress=print)
    except WeftError as error:
        if "cannot count here" in error.what:
            pytest.skip(str(error))
        raise
    assert one.good and one.traffic.close, one.lines()
    assert one.bottleneck.name == "memory", one.lines()
