"""compute-sanitizer's output read rightly, a run of it watched, and on a GPU its four tools."""

from __future__ import annotations

import os
import stat
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from sanitize_outputs import (
    CLEAN,
    INITCHECK,
    MEMCHECK,
    NO_RACE,
    NOT_STARTED,
    OLD,
    RACECHECK,
    REFUSED,
    SYNCCHECK,
    UNTRACKED,
)
from started import started
from weft import machine
from weft.core import Input, WeftError, case, registry
from weft.core.cases import LAYOUTS
from weft.core.record import FAIL, PASS, UNSUPPORTED
from weft.workbench import inputs, sanitize
from weft.workbench.sanitize import TOOLS, Told, conclude, find, options, run, tools
from weft.workbench.sanitize_output import parse
from weft.workbench.sanitize_target import moved, smallest

TOYS = Path(__file__).with_name("sanitize_toys.py")


def test_memcheck_s_faults_are_read():
    found = parse(MEMCHECK)
    assert found.count == 769
    assert found.troubles == ("Target application returned an error",)
    first, second = found.faults
    assert first.line == (
        "Invalid __global__ write of size 4 bytes in doubled_past_the_end at toys.cu:39 "
        "(thread (8,0,0) of block (7,0,0), Address 0x7cc43a800fa0 is out of bounds, is 1 bytes "
        "after the nearest allocation at 0x7cc43a800000 of size 4,000 bytes), 2 times"
    )
    assert second.line == (
        "Invalid __shared__ read of size 16 bytes in unaligned_kernel at memcheck_demo.cu:6 "
        "(thread (0,0,0) of block (0,0,0), Access to 0x8 is misaligned)"
    )


def test_racecheck_s_hazards_are_read():
    found = parse(RACECHECK)
    race, warning = found.faults
    assert found.count == 1 and not found.troubles
    assert race.line == (
        "Race reported between Write access in sumKernel at err.cu:41 and err.cu:51 and err.cu:52 "
        "(512 hazards)"
    )
    assert (race.level, warning.level) == ("error", "warning")
    assert warning.kernel == "warp<(int)32>"


def test_initcheck_s_and_synccheck_s_faults_are_read():
    mine, theirs = parse(INITCHECK).faults
    assert mine.line == (
        "Uninitialized __global__ memory read of size 4 bytes in vectorAdd at memset_error.cu:41 "
        "(thread (31,0,0) of block (1,0,0), Address 0x7f3c7ec000fc)"
    )
    assert theirs.kernel.startswith("at::native::reduce_kernel<")
    block, warp = parse(SYNCCHECK).faults
    assert (block.kernel, block.where) == ("myKernel", "test.cu:42")
    assert block.kind == "Barrier error detected. Divergent thread(s) in block"
    assert (warp.kernel, warp.where) == ("myKernel", "sm_30_intrinsics.hpp:110")


def test_what_older_versions_print_is_read_too():
    one, two = parse(OLD).faults
    assert one.kernel == "cudf::count_set_bits_kernel<int=256>" and one.where == ""
    assert (two.kernel, two.where) == ("sum_gpu_2", "52_sum.cl:30")


@pytest.mark.parametrize("text", ["", "nothing of the tool's\n", "========= COMPUTE-SANITIZER\n"])
def test_no_summary_is_no_count(text):
    assert parse(text).count is None and parse(text).faults == ()
    assert parse(CLEAN).count == 0 and parse(NO_RACE).count == 0


def told(**more: object) -> Told:
    whole = {
        "started": True,
        "finished": True,
        "backend": "cuda",
        "cases": ("a", "b"),
        "begun": ["a", "b"],
        "done": ["a", "b"],
    }
    return Told(**{**whole, **more})  # type: ignore[arg-type]


def fails(log: str, tool: str = "memcheck", code: int = sanitize.FOUND, **more: object) -> str:
    report = conclude(tool, log, told(**more), code=code)
    assert report.status == FAIL and "\n" not in report.reason
    return report.reason


def not_run(log: str, code: int = 0, late: bool = False, **more: object) -> str:
    report = conclude("memcheck", log, told(**more), code=code, late=late, seconds=900.0)
    assert report.status == UNSUPPORTED and "\n" not in report.reason
    return report.reason


def test_faults_fail_with_their_count_and_a_line_each():
    report = conclude("memcheck", MEMCHECK, told(raised="x (a)", done=[]), code=sanitize.FOUND)
    assert report.reason.startswith("memcheck found 769 errors: Invalid __global__ write of size 4")
    assert len(report.lines) == 2 and all("\n" not in line for line in report.lines)
    verdict = report.verdict("softmax", "cuda", "forward")
    (finding,) = verdict.findings
    assert (verdict.status, verdict.case) == (FAIL, "a b")
    assert (finding.check, finding.status, finding.detail) == ("sanitize", FAIL, report.reason)
    assert verdict.reason == f"sanitize: {report.reason}"
    assert "1 error: Race" in fails(RACECHECK, "racecheck")
    assert "2 errors: Barrier error detected" in fails(SYNCCHECK, "synccheck")


def test_a_clean_run_passes_and_only_a_whole_one():
    for log in (CLEAN, NO_RACE):
        report = conclude("memcheck", log, told(), code=0)
        assert (report.status, report.reason) == (PASS, "")
        assert report.verdict("o", "i", "forward").findings[0].status == PASS
    assert "ended before its last case at b (exit code 0)" in fails(CLEAN, code=0, finished=False)
    assert "raised under memcheck: no (b)" in fails(CLEAN, code=0, raised="no (b)")
    assert fails(CLEAN, code=0, unusable="mine.py: line 3: no") == "mine.py: line 3: no"
    assert "raised" in not_run(CLEAN, raised="OutOfMemoryError", memory=True)
    assert "was not done after 900 s at b" in not_run("", late=True, finished=False)
    assert not_run(CLEAN, done=[], begun=[], refused=["needs bf16"]) == "needs bf16"


def test_a_tool_that_looked_at_nothing_passes_nothing():
    assert "could not run Python here: Error: process didn't" in not_run(NOT_STARTED, started=False)
    assert "it wrote nothing" in not_run("", started=False)
    assert "printed no summary" in not_run("========= COMPUTE-SANITIZER\n")
    assert "did not see all of it: Internal Sanitizer Error" in not_run(UNTRACKED)
    assert "refuses this device: Device not supported" in not_run(REFUSED, code=sanitize.FOUND)
    assert "refuses this device" in not_run(REFUSED, code=255, started=False)
    assert "ended with exit code 255" in not_run(CLEAN, code=255)


def test_errors_that_no_line_explains_are_counted_all_the_same():
    log = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 3 errors\n"
    assert fails(log) == "memcheck counts 3 errors, of which 0 could be read"
    assert "counts 0 errors" in fails(CLEAN)


def test_reports_in_a_library_s_kernels_and_warnings_are_left_out_and_said():
    library = INITCHECK.replace("vectorAdd(int *)", "void at::native::reduce_kernel<512>(int)")
    report = conclude("initcheck", library, told(), code=sanitize.FOUND)
    assert (report.status, report.left_out, report.count) == (PASS, 2, 2)
    assert (
        "2 warnings or reports of libraries left out"
        in report.verdict("o", "i", "f").findings[0].detail
    )
    assert conclude("initcheck", library, told(backend="eager"), code=87).status == FAIL
    warned = RACECHECK[: RACECHECK.index("========= Error")] + RACECHECK[
        RACECHECK.index("========= Warning") :
    ].replace("1 error,", "0 errors,")
    report = conclude("racecheck", warned, told(), code=sanitize.FOUND)
    assert (report.status, report.left_out) == (PASS, 1)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A compute-sanitizer on PATH that runs its target, then writes the log it is told to."""
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text(
        textwrap.dedent(
            f"""\
            #!{sys.executable}
            import os, subprocess, sys
            options = [a for a in sys.argv[1:] if a.startswith("--")]
            target = sys.argv[1 + len(options):]
            assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
            code = subprocess.call(target)
            log = next(o.partition("=")[2] for o in options if o.startswith("--log-file="))
            open(log, "w").write(os.environ["FAKE_LOG"])
            sys.exit(code or int(os.environ.get("FAKE_CODE", "0")))
            """
        )
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LOG", CLEAN)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    yield program
    assert list((tmp_path / "tmp").iterdir()) == []
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.mark.slow
def test_a_built_in_is_run_at_small_cases_of_its_own_choice(fake):
    lines: list[str] = []
    report = run("softmax", "triton", direction="backward", device="cpu", progress=lines.append)
    assert report.status == PASS, report.reason
    assert 1 < len(report.cases) <= 6 and report.seconds > 0
    assert any(f"cases, {report.cases[-1]}" in line for line in lines), lines
    assert find() == fake and tools() == tuple(TOOLS)


def test_what_the_tool_says_of_a_file_of_one_s_own_is_the_verdict(fake, monkeypatch):
    case = ["fp32-1000"]
    monkeypatch.setenv("FAKE_LOG", MEMCHECK.replace("Target application", "Tracking kernels"))
    monkeypatch.setenv("FAKE_CODE", str(sanitize.FOUND))
    report = run("doubled", "by_hand", case, with_file=TOYS, device="cpu")
    assert report.status == FAIL and "memcheck found 769 errors" in report.reason
    assert report.cases == ("fp32-1000",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "the call raised under memcheck: RuntimeError: no such luck (fp32-1000)"),
        ("leaves", "the process ended before its last case at fp32-1000 (exit code 0)"),
        ("nobody", "unknown implementation of doubled"),
    ],
)
def test_a_candidate_that_ends_early_passes_nothing(fake, name, reason):
    report = run("doubled", name, ["fp32-1000"], with_file=TOYS, device="cpu")
    assert report.status == FAIL and reason in report.reason


@pytest.mark.slow
def test_a_hang_is_ended_with_all_that_it_started(fake, monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_TEST_MARK", str(tmp_path))
    report = run("doubled", "hangs", with_file=TOYS, device="cpu", timeout=9.0)
    assert report.status == UNSUPPORTED
    assert "memcheck was not done after 9 s" in report.reason
    assert started(f"WEFT_TEST_MARK={tmp_path}") == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_input_is_moved_as_it_is_with_its_strides(layout):
    one = case(Input(name="x", shape=(5, 7), layout=layout))
    (there,) = (moved(t, "cpu") for t in inputs.make(one, "cpu", 3))
    (here,) = inputs.make(one, "cpu", 3)
    assert torch.equal(there, here) and there.data_ptr() != here.data_ptr()
    assert (there.stride(), there.storage_offset()) == (here.stride(), here.storage_offset())
    assert there.untyped_storage().nbytes() == here.untyped_storage().nbytes()


def test_the_cases_chosen_are_few_small_and_of_each_kind():
    operator, name = registry.operator("softmax"), "eager"
    chosen = smallest(operator, registry.implementation("softmax", name), "forward", "cpu")
    kinds = [(c.dtype, c.layouts) for c in chosen]
    assert 3 <= len(chosen) <= 6 and len(set(kinds)) == len(kinds)
    assert {"float32", "float16", "bfloat16"} <= {c.dtype for c in chosen}
    assert all(0 < c.inputs[0].numel < 5000 for c in chosen)
    assert sum(c.inputs[0].numel > 256 for c in chosen) >= 3


def test_where_the_tool_is_missing_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitize, "find", lambda: None)
    assert tools() == ()
    report = run("softmax", "cuda")
    assert report.status == UNSUPPORTED and report.verdict("s", "c", "forward").findings == ()
    assert "pip install nvidia-cuda-sanitizer-api" in report.reason


def test_it_is_found_in_a_toolkit_that_is_not_on_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    program = tmp_path / "cuda" / "compute-sanitizer" / "compute-sanitizer"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    assert find() != program  # it cannot be run
    program.chmod(0o755)
    assert find() == program


def test_a_call_that_is_wrong_is_refused(fake):
    with pytest.raises(WeftError, match="memcheck, racecheck, initcheck, synccheck"):
        run("softmax", "cuda", tool="leakcheck")
    with pytest.raises(WeftError, match="forward or backward"):
        run("softmax", "cuda", direction="sideways")
    if not machine.has_gpu():
        assert "a GPU" in run("softmax", "cuda").reason


@pytest.mark.parametrize("tool", TOOLS)
def test_options_say_the_tool_and_leave_the_others_theirs(tool, tmp_path):
    given = options(tool, tmp_path / "log")
    assert f"--tool={tool}" in given and f"--error-exitcode={sanitize.FOUND}" in given
    assert ("--padding=1024" in given) == (tool == "memcheck")


needs_tool = pytest.mark.skipif(find() is None, reason=f"needs compute-sanitizer: {sanitize.HINT}")


@pytest.mark.gpu
@pytest.mark.slow
@needs_tool
@pytest.mark.parametrize("name", ["cuda", "triton", "numba"])
def test_on_a_gpu_memcheck_finds_the_built_in_clean(name):
    report = run("softmax", name, tool="memcheck")
    assert report.status == PASS, report


@pytest.mark.gpu
@pytest.mark.slow
@needs_tool
@pytest.mark.parametrize("tool", TOOLS)
def test_on_a_gpu_each_tool_finds_the_clean_toy_clean(tool):
    report = run("doubled", "clean", tool=tool, with_file=TOYS)
    assert report.status == PASS, report


@pytest.mark.gpu
@pytest.mark.slow
@needs_tool
@pytest.mark.parametrize(
    ("tool", "name", "kind"),
    [
        ("memcheck", "past_the_end", "Invalid __global__ write of size 4 bytes"),
        ("racecheck", "no_barrier", "Race reported between"),
        ("initcheck", "unwritten", "Uninitialized __global__ memory read of size 4 bytes"),
        ("synccheck", "divergent", "Barrier error detected. Divergent thread"),
    ],
)
def test_on_a_gpu_each_tool_finds_what_was_planted_for_it(tool, name, kind):
    report = run("doubled", name, ["fp32-1000"], tool=tool, with_file=TOYS)
    assert report.status == FAIL, report
    first = report.faults[0]
    assert first.kind.startswith(kind) and first.kernel == f"doubled_{name}", report
    assert "sanitize_toys.cu:" in first.where, report
