"""Nsight Compute's output read rightly, its bytes compared, its bottleneck named, its run watched.

``data/ncu_*.csv`` are composed by hand after the documented shape of the tool's output; no device
wrote them. On a GPU with ncu the last test asks the tool itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft import machine
from weft.core import Cost, WeftError
from weft.workbench import ncu
from weft.workbench.ncu import find, page, rules, running, target
from weft.workbench.ncu.counters import COUNTERS, STALLS, asked
from weft.workbench.ncu.kernel import Kernel
from weft.workbench.ncu.output import number, parse
from weft.workbench.ncu.report import Report
from weft.workbench.ncu.rules import RULES, Seen
from weft.workbench.ncu.traffic import compare

DATA = Path(__file__).with_name("data")
GELU, SOFTMAX = ((DATA / f"ncu_{name}.csv").read_text() for name in ("gelu", "softmax"))
HALF = 1 << 29  # bytes of a softmax's input
KEYS = tuple(c.key for c in COUNTERS)


def kernel(**counters: float) -> Kernel:
    return Kernel(name="k(float *)", grid=(8,), block=(128,), counters=counters)


def report(text: str = GELU, cost: Cost | None = None, **more: object) -> Report:
    whole = {
        "operator": "gelu",
        "implementation": "cuda",
        "backend": "cuda",
        "case": "fp32-16384x16384",
        "direction": "forward",
        "kernels": tuple(map(Kernel.of, parse(text).rows)),
        "cost": cost or Cost(read=1 << 30, written=1 << 30),
        "l2_bytes": 60 << 20,
        "tool": "2025.3.1.0",
        "machine": {"device": "Some GPU", "commit": "abc", "date": "2026-11-21T00:00:00"},
    }
    return Report(**{**whole, **more})  # type: ignore[arg-type]


# -- what the tool prints -------------------------------------------------------------------------


def test_one_kernel_s_row_is_read_with_its_units():
    (k,) = report().kernels
    assert (k.name, k.grid, k.block) == (
        "gelu_forward(const float *, float *, unsigned long)",
        (1056, 1, 1),
        (256, 1, 1),
    )
    assert k.short == "gelu_forward"
    assert (k.get("dram_read"), k.get("dram_write")) == (1_074_101_248, 1_031_798_784)
    assert k.us == pytest.approx(498.112) and k.get("l2_read") == 1 << 30
    assert k.sectors("ld") == 16 and k.get("ld_used") == 32
    assert k.get("stall_gmma") is None  # it printed n/a
    assert k.stalls[0][0] == "long_scoreboard" and k.stalls[0][1] == pytest.approx(0.707, abs=0.01)
    assert k.limiter == "registers" and k.conflicts() is None and k.spilled == 0
    assert "127.0.0.1" not in json.dumps(report().to_json())  # no host is named in a record


def test_several_kernels_and_names_with_commas_and_brackets():
    printed = parse(SOFTMAX)
    assert len(printed.rows) == 4 and len(printed.troubles) == 1
    shorts = [Kernel.of(r).short for r in printed.rows]
    assert shorts[0].startswith("at::native::reduce_kernel<") and len(set(shorts)) >= 2


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("1,073,741,824", "byte", 1 << 30),
        ("1.07", "Gbyte", 1.07e9),
        ("12.5", "usecond", 12500),
        ("1.18925e+06", "ns", 1.18925e6),
        ("3", "msecond", 3e6),
        ("16.00", "Kbyte/block", 16000),
        ("32", "register/thread", 32),
        ("8", "block", 8),
        ("0.97", "", 0.97),
        ("(!) n/a", "%", None),
        ("n/a", "", None),
        ("nan", "%", None),
        ("", "", None),
    ],
)
def test_numbers_come_in_base_units(text, unit, value):
    assert number(text, unit) == (None if value is None else pytest.approx(value))


def test_the_long_form_of_older_versions_is_read_alike():
    head = '"ID","Kernel Name","Block Size","Grid Size","Metric Name","Metric Unit","Metric Value"'
    rows = [
        '"0","f(int, int)","(32, 1, 1)","(4, 1, 1)","gpu__time_duration.sum","usecond","1,5"',
        '"0","f(int, int)","(32, 1, 1)","(4, 1, 1)","dram__bytes_read.sum","Mbyte","2.5"',
        '"1","g","(1, 1, 1)","(1, 1, 1)","dram__bytes_read.sum","byte","n/a"',
    ]
    first, second = parse("\n".join([head, *rows])).rows
    assert first.values == {"gpu__time_duration.sum": 15000.0, "dram__bytes_read.sum": 2.5e6}
    assert (first.name, first.grid, second.values) == ("f(int, int)", (4, 1, 1), {})


@pytest.mark.parametrize("text", ["", "==PROF== Connected\n", '"ID","Kernel Name"\n', GELU[:900]])
def test_a_log_with_no_kernel_has_none(text):
    assert parse(text).rows == ()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_each_counter_is_asked_for_once_and_a_renamed_one_by_its_other_name(arch):
    names = asked(arch)
    assert len(set(names)) == len(names) and ("gmma" in ",".join(names)) == (arch == "sm_90")
    again = asked(
        arch, ["dram__bytes_read.sum", "lts__throughput.avg.pct_of_peak_sustained_elapsed"]
    )
    assert "dram__bytes_op_read.sum" in again and len(again) == len(names) - 1
    renamed = GELU.replace("dram__bytes_read.sum", "dram__bytes_op_read.sum")
    assert report(renamed).kernels == report().kernels


# -- bytes ----------------------------------------------------------------------------------------


def test_bytes_within_five_percent_are_said_to_be():
    moved = report().traffic
    assert moved.ratio == pytest.approx(0.98065, abs=1e-4) and moved.close
    assert moved.left == pytest.approx((1 << 30) - 1_031_798_784)
    assert moved.settled == pytest.approx(1.00017, abs=1e-4)
    (line,) = moved.lines()
    assert "2.11 GB (read 1.07 GB, written 1.03 GB) of 2.15 GB predicted" in line
    assert "0.981 of the prediction, within 5 %" in line


def test_more_kernels_read_more_and_it_says_so():
    moved = report(SOFTMAX, Cost(read=HALF, written=HALF)).traffic
    first, *reasons = moved.lines()
    assert moved.ratio > 2.9 and "more than predicted" in first
    assert "4 kernels: the later ones read 1.61 GB" in reasons[0]
    assert "before the last wrote 507 MB, which the next ones read" in reasons[1]


MB = 1e6
SMALL = Cost(read=int(40 * MB), written=int(40 * MB))


@pytest.mark.parametrize(
    ("counters", "word", "reason"),
    [
        (
            {"dram_read": 40 * MB, "dram_write": 4 * MB, "l2_write": 40 * MB},
            "less than",
            "36.0 MB of what it wrote were still in the L2",
        ),
        ({"dram_read": 40 * MB, "dram_write": 4 * MB}, "less than", "did not keep them all"),
        (
            {"dram_read": 8 * MB, "dram_write": 40 * MB, "l2_write": 40 * MB},
            "less than",
            "not all of them were looked at",
        ),
        (
            {"dram_read": 80 * MB, "dram_write": 40 * MB, "local_ld": 20 * MB, "local_st": 20 * MB},
            "more than",
            "registers were spilled: 40.0 MB",
        ),
        (
            {"dram_read": 320 * MB, "dram_write": 40 * MB, "ld_used": 4.0},
            "more than",
            "k uses 4.0 of the 32 bytes",
        ),
        (
            {"dram_read": 80 * MB, "dram_write": 40 * MB, "l2_read": 100 * MB},
            "more than",
            "asks the L2 for its inputs 2.50 times over",
        ),
        (
            {"dram_read": 40 * MB, "dram_write": 80 * MB, "l2_write": 90 * MB},
            "more than",
            "some outputs are written more than once",
        ),
        ({"dram_read": 80 * MB, "dram_write": 40 * MB}, "more than", "the counters show no reason"),
    ],
)
def test_beyond_five_percent_it_says_which_is_more_and_what_shows_why(counters, word, reason):
    first, *told = compare([kernel(**counters)], SMALL, 60 << 20).lines()
    assert word in first and reason in "; ".join(told), told


def test_what_was_left_cannot_be_more_than_the_l2_holds():
    k = kernel(dram_read=1e9, dram_write=0.0, l2_write=1e9)
    assert compare([k], SMALL, 60 << 20).left == 60 << 20
    assert compare([k], SMALL, None).left is None
    nothing = compare([k], Cost(read=0, written=0), None)
    assert nothing.ratio is None and "needs none" in nothing.lines()[0]


# -- the bottleneck -------------------------------------------------------------------------------

IDLE = {"dram_peak": 20.0, "l2_peak": 15.0, "sm_peak": 25.0, "waves": 8.0, "duration": 50.0}
BUSY = {**IDLE, "sm_peak": 65.0}
WAITS = {"stall_long_scoreboard": 9.0, "stall_selected": 1.0}
CASES = {
    "unknown": ({"duration": 12.0}, "no throughput was counted"),
    "launch": ({**IDLE, "waves": 0.24}, "fill 0.24 of one wave"),
    "uncoalesced": (
        {**IDLE, "ld_sectors": 32e6, "ld_requests": 1e6, "st_sectors": 4e6, "ld_used": 4.0},
        "its global loads are scattered (32.0 sectors a request, 4.0 of 32 bytes a sector used)",
    ),
    "memory": (
        {**IDLE, "dram_peak": 88.0, "dram_read": 1e8, "dram_write": 1e8},
        "the DRAM is at 88 % of its peak, moving 4.00 TB/s",
    ),
    "tensor": ({**IDLE, "tensor_peak": 84.0, "sm_peak": 84.0}, "busy in 84 % of all cycles"),
    "spills": (
        {**BUSY, "local_ld": 4e6, "local_st": 4e6, "ld_sectors": 1e6, "registers": 255.0},
        "8.00 MB of local memory go through the L1, with 255 registers a thread",
    ),
    "bank-conflicts": (
        {**BUSY, "shared_ld": 32e6, "conflicts_ld": 31e6, "shared_st": 0.0, "conflicts_st": 0.0}
        | {"stall_short_scoreboard": 8.0, "stall_selected": 2.0},
        "97 % of shared memory's wavefronts (31.0 M) are repeats; its warps wait 80 %",
    ),
    "l2": ({**IDLE, "l2_peak": 91.0}, "the L2 is at 91 % of its peak, the DRAM at 20 %"),
    "compute": ({**IDLE, "sm_peak": 93.0}, "busiest pipe is at 93 % of its peak"),
    "tail": ({**IDLE, "waves": 1.1}, "1.10 waves of blocks, so that 45 % of"),
    "latency": (
        {**IDLE, **WAITS, "occupancy": 11.9, "theoretical": 12.5, "limit_shared_mem": 1.0},
        "(the SMs the most, 25 % of peak); its warps wait 90 % of their time for data from global "
        "or local memory (long_scoreboard); occupancy 12 % of 12 %, limited by shared memory",
    ),
    "balanced": ({**BUSY, **WAITS}, "the SMs are the busiest, at 65 % of peak"),
}


def test_each_rule_has_its_kernel():
    assert list(CASES) == [r.name for r in RULES] and all(r.source for r in RULES)


@pytest.mark.parametrize("name", CASES)
def test_the_bottleneck_is_named_with_its_evidence(name):
    counters, evidence = CASES[name]
    found = rules.name(Seen(kernel=kernel(**counters)))
    assert found.name == name, found
    assert evidence in found.sentence and found.sentence.startswith("k is ")


@pytest.mark.parametrize(
    ("name", "counters"),
    [
        # One result a block: scattered stores, but next to none of them.
        ("balanced", {**BUSY, "ld_sectors": 1e6, "st_sectors": 100.0, "st_used": 4.0}),
        # The DRAM is the limit, whatever else is not as it should be.
        ("memory", {**CASES["bank-conflicts"][0], "dram_peak": 85.0}),
        ("memory", {**CASES["uncoalesced"][0], "dram_peak": 85.0}),
        # Conflicts that nobody waits for.
        ("compute", {**CASES["bank-conflicts"][0], "sm_peak": 90.0, "stall_short_scoreboard": 0.0}),
        ("latency", {**IDLE, "waves": 1.0}),  # a persistent kernel has one wave, and no tail
    ],
)
def test_what_looks_like_a_fault_is_no_bottleneck_where_it_costs_nothing(name, counters):
    assert rules.name(Seen(kernel=kernel(**counters))).name == name


def test_wasted_bytes_are_the_reason_where_they_fill_the_dram():
    k = kernel(**{**CASES["uncoalesced"][0], "dram_peak": 92.0})
    assert rules.name(Seen(kernel=k, ratio=4.0)).name == "uncoalesced"


counted = st.dictionaries(st.sampled_from(KEYS), st.floats(0, 1e15), max_size=len(KEYS))


@given(st.lists(counted, min_size=1, max_size=3), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_whatever_was_counted_one_bottleneck_comes_out_and_the_report_is_whole(
    found, read, written
):
    one = report(
        kernels=tuple(kernel(**counters) for counters in found),
        cost=Cost(read=read, written=written),
    )
    assert one.bottleneck.name in CASES and one.bottleneck.sentence.endswith(".")
    lines = one.lines()
    assert sum(line.startswith("bottleneck") for line in lines) == 1
    assert all("\n" not in line for line in lines)
    assert Report.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_a_report_on_paper():
    text = "\n".join(report().lines())
    for part in (
        "gelu cuda fp32-16384x16384 forward: 1 kernel, 498 µs of kernel time, caches cold",
        "kernel 1 of 1: gelu_forward (grid 1056, block 256)",
        "DRAM            88.4 % of peak, 4.23 TB/s; read 1.07 GB, written 1.03 GB",
        "global loads    16.0 sectors a request; 32.0 of 32 bytes a sector used",
        "occupancy       94.4 % achieved of 100.0 %",
        "stalls          long_scoreboard 71 %, lg_throttle 6 %",
        "spills          0 B of local memory",
        "bottleneck: gelu_forward is memory-bound: the DRAM is at 88 % of its peak, moving 4.23 T",
    ):
        assert part in text, text
    assert report().good and not report(GELU.replace("dram__bytes_read", "dram__of_old")).good
    several = report(SOFTMAX, Cost(read=HALF, written=HALF)).lines()
    assert any(
        "bottleneck (the longest kernel, 33 % of the time): at::native::" in x for x in several
    )


def test_a_record_of_another_shape_is_refused():
    good = report().to_json()
    broken = json.loads(json.dumps(good).replace("498.112", "NaN"))
    for bad in ({}, {**good, "format": "x"}, {**good, "kernels": []}, {**good, "cost": {}}, broken):
        with pytest.raises(WeftError, match="not a profile of Nsight Compute's"):
            Report.from_json(bad)


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
    assert list((tmp_path / "tmp").iterdir()) == []
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
        {"log": bad.format("dram__bytes_read\\.sum"), "told": TOLD[:1]},
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
    [("", 1.5, r"was stopped: it was not done within 2 s"), (PERMISSION, 50.0, "ERR_NVGPUCTRPERM")],
)
def test_it_is_ended_in_time_with_all_that_it_started(fake, monkeypatch, log, limit, said):
    monkeypatch.setattr(running, "TIMEOUT", limit)
    fake({"hang": True, "log": log, "told": TOLD[:2]})
    began = time.monotonic()
    with pytest.raises(WeftError, match=said):
        ncu.profile(**CALL, progress=lambda line: None)
    assert time.monotonic() - began < 15
    assert not any("61.25" in c or "ncu.target" in c for c in _commands())


def _commands() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # it has ended meanwhile
    return found


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
    job = {**CALL, "operator": "doubled", "implementation": "by_hand", "files": [toys]}
    operator, implementation = target.subject(job)
    assert (operator.name, implementation.name) == ("doubled", "by_hand")
    ours = target.subject({**CALL, "files": [toys]})
    assert (ours[0].name, ours[1].backend) == ("gelu", "cuda")
    for wrong in ({"operator": "doubled"}, {"implementation": "nosuch"}):
        with pytest.raises(WeftError, match="unknown implementation"):
            target.subject({**CALL, "files": [toys], **wrong})


# -- the page -------------------------------------------------------------------------------------


def test_the_page_is_drawn_from_records_or_says_how_to_make_them(tmp_path):
    assert page.measured(tmp_path).startswith("not measured yet: `weft profile softmax --tool ncu")
    (tmp_path / "some-gpu").mkdir()
    rows = [report(), report(SOFTMAX, Cost(read=HALF, written=HALF), implementation="eager")]
    file = tmp_path / "some-gpu" / page.FILE
    file.write_text("".join(json.dumps(r.to_json()) + "\n" for r in [rows[0], *rows]))
    text = page.measured(tmp_path)
    assert "**Some GPU**, 2026-11-21, commit abc, Nsight Compute 2025.3.1.0." in text
    assert text.count("| gelu cuda `fp32-16384x16384` | 2.15 GB | 1.07 GB | 1.03 GB | 0.981 |") == 1
    assert "| **2.945** |" in text and text.count("| memory |") == 2
    assert all(f"`{r.name}`" in page.rules() for r in RULES)
    assert page.rows().count("\n") == len(page.LINES) + 2
    file.write_text(file.read_text()[:-40])
    with pytest.raises(WeftError, match=r"ncu.ndjson:3: a torn line"):
        page.measured(tmp_path)


def test_it_is_light_and_every_stall_has_its_words():
    code = (
        "import sys, weft.workbench.ncu, weft.workbench.ncu.target; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert {k for k in KEYS if k.startswith("stall_")} == {
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
