"""compute-sanitizer: parsing of its log, verdicts, a run with a fake tool, and its four tools on a GPU."""

from __future__ import annotations

import os
import stat
import sys
import textwrap

import pytest
import torch

from helpers.marked_processes import marked_processes
from helpers.paths import HELPERS
from helpers.sanitize_outputs import (
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
from weft import machine
from weft.core import Input, WeftError, case, registry
from weft.core.cases import LAYOUTS
from weft.core.record import FAIL, PASS, UNSUPPORTED
from weft.workbench.calls import inputs
from weft.workbench.sanitizer import sanitize
from weft.workbench.sanitizer.sanitize import (
    TOOLS,
    TargetState,
    conclude,
    find,
    options,
    parse,
    run,
    tools,
)
from weft.workbench.sanitizer.target import copy_to, smallest

TOYS = HELPERS / "sanitize_toys.py"


def test_faults_of_memcheck_are_parsed():
    parsed = parse(MEMCHECK)
    assert parsed.count == 769
    assert parsed.troubles == ("Target application returned an error",)
    first, second = parsed.faults
    assert first.line == (
        "Invalid __global__ write of size 4 bytes in doubled_past_the_end at toys.cu:39 "
        "(thread (8,0,0) of block (7,0,0), Address 0x7cc43a800fa0 is out of bounds, is 1 bytes "
        "after the nearest allocation at 0x7cc43a800000 of size 4,000 bytes), 2 times"
    )
    assert second.line == (
        "Invalid __shared__ read of size 16 bytes in unaligned_kernel at memcheck_demo.cu:6 "
        "(thread (0,0,0) of block (0,0,0), Access to 0x8 is misaligned)"
    )


def test_hazards_of_racecheck_are_parsed():
    parsed = parse(RACECHECK)
    race, warning = parsed.faults
    assert parsed.count == 1 and not parsed.troubles
    assert race.line == (
        "Race reported between Write access in sumKernel at err.cu:41 and err.cu:51 and err.cu:52 "
        "(512 hazards)"
    )
    assert (race.level, warning.level) == ("error", "warning")
    assert warning.kernel == "warp<(int)32>"


def test_faults_of_initcheck_and_synccheck_are_parsed():
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


def test_output_of_older_versions_is_parsed():
    one, two = parse(OLD).faults
    assert one.kernel == "cudf::count_set_bits_kernel<int=256>" and one.where == ""
    assert (two.kernel, two.where) == ("sum_gpu_2", "52_sum.cl:30")


@pytest.mark.parametrize("text", ["", "nothing of the tool's\n", "========= COMPUTE-SANITIZER\n"])
def test_a_log_without_a_summary_has_no_count(text):
    assert parse(text).count is None and parse(text).faults == ()
    assert parse(CLEAN).count == 0 and parse(NO_RACE).count == 0


def target_state(**fields: object) -> TargetState:
    defaults = {
        "started": True,
        "finished": True,
        "backend": "cuda",
        "cases": ("a", "b"),
        "begun": ["a", "b"],
        "done": ["a", "b"],
    }
    return TargetState(**{**defaults, **fields})  # type: ignore[arg-type]


def fails(log: str, tool: str = "memcheck", code: int = sanitize.FAULT_EXIT_CODE, **fields: object) -> str:
    report = conclude(tool, log, target_state(**fields), code=code)
    assert report.status == FAIL and "\n" not in report.reason
    return report.reason


def not_run(log: str, code: int = 0, timed_out: bool = False, **fields: object) -> str:
    report = conclude("memcheck", log, target_state(**fields), code=code, timed_out=timed_out, seconds=900.0)
    assert report.status == UNSUPPORTED and "\n" not in report.reason
    return report.reason


def test_faults_fail_with_their_count_and_one_line_each():
    report = conclude(
        "memcheck", MEMCHECK, target_state(raised="x (a)", done=[]), code=sanitize.FAULT_EXIT_CODE
    )
    assert report.reason.startswith("memcheck found 769 errors: Invalid __global__ write of size 4")
    assert len(report.lines) == 2 and all("\n" not in line for line in report.lines)
    verdict = report.verdict("softmax", "cuda", "forward")
    (finding,) = verdict.findings
    assert (verdict.status, verdict.case) == (FAIL, "a b")
    assert (finding.check, finding.status, finding.detail) == ("sanitize", FAIL, report.reason)
    assert verdict.reason == f"sanitize: {report.reason}"
    assert "1 error: Race" in fails(RACECHECK, "racecheck")
    assert "2 errors: Barrier error detected" in fails(SYNCCHECK, "synccheck")


def test_only_a_complete_clean_run_passes():
    for log in (CLEAN, NO_RACE):
        report = conclude("memcheck", log, target_state(), code=0)
        assert (report.status, report.reason) == (PASS, "")
        assert report.verdict("o", "i", "forward").findings[0].status == PASS
    assert "ended before its last case at b (exit code 0)" in fails(CLEAN, code=0, finished=False)
    assert "raised under memcheck: no (b)" in fails(CLEAN, code=0, raised="no (b)")
    assert fails(CLEAN, code=0, unusable="mine.py: line 3: no") == "mine.py: line 3: no"
    assert "raised" in not_run(CLEAN, raised="OutOfMemoryError", memory=True)
    assert "was not done after 900 s at b" in not_run("", timed_out=True, finished=False)
    assert not_run(CLEAN, done=[], begun=[], refused=["needs bf16"]) == "needs bf16"


def test_a_tool_that_checked_nothing_is_unsupported():
    assert "could not run Python here: Error: process didn't" in not_run(NOT_STARTED, started=False)
    assert "it wrote nothing" in not_run("", started=False)
    assert "printed no summary" in not_run("========= COMPUTE-SANITIZER\n")
    assert "did not see all of it: Internal Sanitizer Error" in not_run(UNTRACKED)
    assert "refuses this device: Device not supported" in not_run(REFUSED, code=sanitize.FAULT_EXIT_CODE)
    assert "refuses this device" in not_run(REFUSED, code=255, started=False)
    assert "ended with exit code 255" in not_run(CLEAN, code=255)


def test_a_count_without_parsed_faults_fails():
    log = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 3 errors\n"
    assert fails(log) == "memcheck counts 3 errors, of which 0 could be read"
    assert "counts 0 errors" in fails(CLEAN)


def test_warnings_and_reports_of_libraries_are_left_out_and_counted():
    library = INITCHECK.replace("vectorAdd(int *)", "void at::native::reduce_kernel<512>(int)")
    report = conclude("initcheck", library, target_state(), code=sanitize.FAULT_EXIT_CODE)
    assert (report.status, report.left_out, report.count) == (PASS, 2, 2)
    assert "2 warnings or reports of libraries left out" in report.verdict("o", "i", "f").findings[0].detail
    assert conclude("initcheck", library, target_state(backend="eager"), code=87).status == FAIL
    warned = RACECHECK[: RACECHECK.index("========= Error")] + RACECHECK[
        RACECHECK.index("========= Warning") :
    ].replace("1 error,", "0 errors,")
    report = conclude("racecheck", warned, target_state(), code=sanitize.FAULT_EXIT_CODE)
    assert (report.status, report.left_out) == (PASS, 1)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A fake compute-sanitizer on PATH: it runs its target, then writes the log in FAKE_LOG."""
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
def test_a_builtin_runs_at_small_cases_by_default(fake):
    lines: list[str] = []
    report = run("softmax", "triton", direction="backward", device="cpu", log=lines.append)
    assert report.status == PASS, report.reason
    assert 1 < len(report.cases) <= 6 and report.seconds > 0
    assert any(f"cases, {report.cases[-1]}" in line for line in lines), lines
    assert find() == fake and tools() == tuple(TOOLS)


def test_the_log_about_an_external_file_decides_its_verdict(fake, monkeypatch):
    case = ["fp32-1000"]
    monkeypatch.setenv("FAKE_LOG", MEMCHECK.replace("Target application", "Tracking kernels"))
    monkeypatch.setenv("FAKE_CODE", str(sanitize.FAULT_EXIT_CODE))
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
def test_a_candidate_that_ends_early_fails(fake, name, reason):
    report = run("doubled", name, ["fp32-1000"], with_file=TOYS, device="cpu")
    assert report.status == FAIL and reason in report.reason


@pytest.mark.slow
def test_a_hang_is_killed_with_its_child_processes(fake, monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_TEST_MARK", str(tmp_path))
    report = run("doubled", "hangs", with_file=TOYS, device="cpu", timeout=9.0)
    assert report.status == UNSUPPORTED
    assert "memcheck was not done after 9 s" in report.reason
    assert marked_processes(f"WEFT_TEST_MARK={tmp_path}") == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_input_is_copied_with_its_strides_and_storage(layout):
    one = case(Input(name="x", shape=(5, 7), layout=layout))
    (copy,) = (copy_to(t, "cpu") for t in inputs.make(one, "cpu", 3))
    (original,) = inputs.make(one, "cpu", 3)
    assert torch.equal(copy, original) and copy.data_ptr() != original.data_ptr()
    assert (copy.stride(), copy.storage_offset()) == (original.stride(), original.storage_offset())
    assert copy.untyped_storage().nbytes() == original.untyped_storage().nbytes()


def test_the_default_cases_are_few_small_and_of_each_dtype_and_layout():
    operator, name = registry.operator("softmax"), "eager"
    chosen = smallest(operator, registry.implementation("softmax", name), "forward", "cpu")
    kinds = [(c.dtype, c.layouts) for c in chosen]
    assert 3 <= len(chosen) <= 6 and len(set(kinds)) == len(kinds)
    assert {"float32", "float16", "bfloat16"} <= {c.dtype for c in chosen}
    assert all(0 < c.inputs[0].numel < 5000 for c in chosen)
    assert sum(c.inputs[0].numel > 256 for c in chosen) >= 3


def test_a_missing_tool_is_unsupported_with_an_installation_hint(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitize, "find", lambda: None)
    assert tools() == ()
    report = run("softmax", "cuda")
    assert report.status == UNSUPPORTED and report.verdict("s", "c", "forward").findings == ()
    assert "pip install nvidia-cuda-sanitizer-api" in report.reason


def test_the_tool_is_found_in_a_toolkit_that_is_not_on_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    program = tmp_path / "cuda" / "compute-sanitizer" / "compute-sanitizer"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    assert find() != program  # it cannot be run
    program.chmod(0o755)
    assert find() == program


def test_a_wrong_tool_direction_or_device_is_refused(fake):
    with pytest.raises(WeftError, match="memcheck, racecheck, initcheck, synccheck"):
        run("softmax", "cuda", tool="leakcheck")
    with pytest.raises(WeftError, match="forward or backward"):
        run("softmax", "cuda", direction="sideways")
    if not machine.has_gpu():
        assert "a GPU" in run("softmax", "cuda").reason


@pytest.mark.parametrize("tool", TOOLS)
def test_options_name_the_tool_and_padding_is_for_memcheck_only(tool, tmp_path):
    arguments = options(tool, tmp_path / "log")
    assert f"--tool={tool}" in arguments and f"--error-exitcode={sanitize.FAULT_EXIT_CODE}" in arguments
    assert ("--padding=1024" in arguments) == (tool == "memcheck")


needs_tool = pytest.mark.skipif(find() is None, reason=f"needs compute-sanitizer: {sanitize.HINT}")


@pytest.mark.gpu
@pytest.mark.slow
@needs_tool
@pytest.mark.parametrize("name", ["cuda", "triton", "numba"])
def test_memcheck_finds_no_fault_in_builtins_on_a_gpu(name):
    report = run("softmax", name, tool="memcheck")
    assert report.status == PASS, report


@pytest.mark.gpu
@pytest.mark.slow
@needs_tool
@pytest.mark.parametrize("tool", TOOLS)
def test_each_tool_finds_no_fault_in_the_clean_kernel_on_a_gpu(tool):
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
def test_each_tool_finds_its_planted_fault_on_a_gpu(tool, name, kind):
    report = run("doubled", name, ["fp32-1000"], tool=tool, with_file=TOYS)
    assert report.status == FAIL, report
    first = report.faults[0]
    assert first.kind.startswith(kind) and first.kernel == f"doubled_{name}", report
    assert "sanitize_toys.cu:" in first.where, report
