"""``weft debug``: what it shows of a program; planted accesses out of bounds and races; clean controls."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from helpers.paths import ROOT
from weft.backends.triton_jit import INTERPRETED, tl, triton
from weft.cli import app
from weft.core import registry
from weft.core.errors import WeftError
from weft.lab.access_text import offsets_text
from weft.lab.program_races import Touches
from weft.lab.triton_trace import Trace, tracing
from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Program
from weft.learn.grading import Refused

EXAMPLES = ROOT / "examples" / "debug"
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="this process compiles Triton kernels")


def debug(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["debug", *arguments, "--json"])
    assert result.exit_code == code, result.output
    fields: dict[str, Any] = json.loads(result.stdout)
    return fields


def with_change(tmp_path: Path, example: str, *changes: tuple[str, str]) -> str:
    """Return a copy of an example with the mistake repaired."""
    text = (EXAMPLES / example).read_text()
    for before, after in changes:
        assert text.count(before) == 1
        text = text.replace(before, after)
    file = tmp_path / example
    file.write_text(text)
    return str(file)


def test_accesses_behind_the_tensors_are_shown_and_not_made(tmp_path: Path) -> None:
    file = str(EXAMPLES / "missing_mask.py")
    shown = debug("relu", "--with", file, "--program", "3", code=1)
    assert shown["program"] == [3, 0, 0] and shown["grid"] == [4, 1, 1]
    load, store = shown["accesses"]
    assert (load["kind"], load["source"]) == ("load", "x = tl.load(x_ptr + at)")
    assert load["offsets"] == list(range(768, 1024)) and load["out_of_bounds"] == list(range(903, 1024))
    assert store["tensor"] == "y_ptr" and not any(store["values"][903 - 768 :])
    summaries = [(o["kind"], o["tensor"], o["offset"], o["elements"]) for o in shown["out_of_bounds"]]
    assert summaries == [("load", "x_ptr", 903, 121), ("store", "y_ptr", 903, 121)]
    masked = with_change(
        tmp_path,
        "missing_mask.py",
        ("def relu_unmasked(x_ptr, y_ptr, ", "def relu_unmasked(x_ptr, y_ptr, n, "),
        ("tl.load(x_ptr + at)", "tl.load(x_ptr + at, mask=at < n)"),
        ("tl.maximum(x, 0.0))", "tl.maximum(x, 0.0), mask=at < n)"),
        ("(x, y, BLOCK", "(x, y, x.numel(), BLOCK"),
    )
    shown = debug("relu", "--with", masked, "--program", "3")
    assert sum(shown["accesses"][0]["mask"]) == 903 - 768 and not shown["out_of_bounds"]


def test_programs_that_race_for_an_element_are_found(tmp_path: Path) -> None:
    shown = debug("sum", "--with", str(EXAMPLES / "racing_sum.py"), code=1)
    (first,) = shown["races"]
    assert first["certain"] and first["tensor"] == "total_ptr" and first["offset"] == 0
    assert "store in line 22 by program 0,0,0" in first["first"] and "load in line 21" in first["second"]
    atomic = with_change(
        tmp_path,
        "racing_sum.py",
        ("    total = tl.load(total_ptr)\n", ""),
        ("tl.store(total_ptr, total + part)", "tl.atomic_add(total_ptr, part)"),
    )
    shown = debug("sum", "--with", atomic)
    assert shown["races"] == [] and shown["accesses"][-1]["kind"] == "atomic"


@triton.jit
def shift(x_ptr, y_ptr, by, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at - by))


def traced_shift(x: torch.Tensor, by: int, programs: int = 2, line: int | None = None) -> tuple[Trace, Any]:
    y = torch.full((8,), -1.0)
    trace = Trace((0,), line=line)
    with tracing(trace):
        shift[(programs,)](x, y, by, BLOCK=4)
    return trace, y


def test_offsets_below_the_tensor_belong_to_it() -> None:
    trace, y = traced_shift(torch.arange(8.0), 2)
    (outside,) = trace.launches[0].out_of_bounds.values()
    assert (outside.tensor, outside.offset, outside.elements, outside.programs) == ("x_ptr", -2, 2, 1)
    assert y.tolist() == [0, 0, 0, 1, 2, 3, 4, 5] and not trace.launches[0].races


def test_elements_between_those_of_a_view_are_gaps_and_within_bounds() -> None:
    launch = traced_shift(torch.arange(16.0)[::2], 0)[0].launches[0]
    assert not launch.out_of_bounds and launch.gaps == 4  # 1, 3, 5, 7
    behind = traced_shift(torch.arange(16.0)[4:8], 1)[0].launches[0]
    assert not behind.out_of_bounds and behind.gaps == 4  # -1, and 4, 5, 6


def test_programs_that_overlap_within_one_tensor_race() -> None:
    x = torch.arange(8.0)
    trace = Trace((0,))
    with tracing(trace):
        shift[(2,)](x, x[1:], 0, BLOCK=4)
    texts = [r.text for r in trace.launches[0].races]
    # Program 0 writes element 4, which program 1 reads; the element behind the storage is not written.
    assert len(texts) == 1 and "[4]" not in texts[0] and "store" in texts[0] and "load" in texts[0]
    assert trace.launches[0].out_of_bounds


def races(*accesses: tuple[str, int, float]) -> list[str]:
    """Return the races of accesses (kind, program, value), all to one float32 element."""
    touches = Touches()
    for kind, program, value in accesses:
        address, values = np.array([4096], dtype=np.uint64), np.array([value], dtype=np.float32)
        touches.add(kind, 1, "y", (program, 0, 0), address, values)
    return [r.text for r in touches.races((9, 1, 1), [("y", 4096, 4, 0, 1)])]


def test_the_definition_of_a_race() -> None:
    nan = float("nan")
    assert races(("store", 0, 1.0), ("store", 1, 2.0)) and races(("load", 0, 1.0), ("store", 1, 2.0))
    assert races(("atomic", 0, 1.0), ("load", 1, 1.0)) and races(("atomic", 0, 1.0), ("store", 1, 1.0))
    assert races(("load", 1, 1.0), ("atomic", 1, 1.0), ("atomic", 0, 1.0))
    assert not races(("load", 0, 1.0), ("load", 1, 1.0)) and not races(("atomic", 0, 1.0), ("atomic", 1, 1.0))
    assert not races(("load", 0, 1.0), ("store", 0, 2.0), ("store", 0, 3.0))
    assert "same value" in races(("store", 0, nan), ("store", 1, nan))[0]
    assert "same value" not in races(("store", 0, 0.0), ("store", 1, -0.0))[0]
    assert "same value" not in races(("store", 0, 1.0), ("store", 1, 1.0), ("load", 2, 1.0))[0]


def test_the_trace_ends_at_a_line_with_its_variables() -> None:
    line = debug(
        "relu", "--with", str(EXAMPLES / "missing_mask.py"), "--program", "2", "--line", "18", code=1
    )
    assert [a["kind"] for a in line["accesses"]] == ["load"]
    assert line["variables"]["at"] == "int32 (256) 512..767" and set(line["variables"]) == {"at", "x"}


@pytest.mark.parametrize("operator", ["softmax", "gelu"])
def test_without_a_case_one_is_taken_that_has_the_program(operator: str) -> None:
    shown = debug(operator, "--impl", "triton", "--program", "3,0")
    assert shown["program"] == [3, 0, 0] and shown["grid"][0] > 3 and shown["accesses"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("relu", "--program", "x"), "one to three ids"),
        (("relu", "--program", "0,7"), "the grid of"),
        (("relu", "--impl", "cuda"), "an implementation in Triton"),
        (("relu", "--case", "bf16-7x129"), "computes bfloat16 wrongly"),
        (("relu", "--line", "1"), "a line that the program reaches"),
        (("relu", "--kernel", "softmax"), "relu"),
        (("sum", "--direction", "backward"), "a launch of a kernel"),
        (("adamw", "--direction", "backward"), "forward"),
        (("relu", "--pdb"), "only one of --pdb and --json"),
        (("sum", "--with", str(EXAMPLES / "missing_mask.py")), "an implementation of sum"),
    ],
)
def test_a_wrong_call_is_one_error(arguments: tuple[str, ...], expected: str) -> None:
    result = CliRunner().invoke(app, ["debug", *arguments, "--json"])
    assert isinstance(result.exception, WeftError) and expected in str(result.exception)


def test_an_exception_in_a_kernel_names_its_line(tmp_path: Path) -> None:
    broken = with_change(tmp_path, "missing_mask.py", ("tl.maximum(x, 0.0)", "tl.maximum(x, at.nothing)"))
    result = CliRunner().invoke(app, ["debug", "relu", "--with", broken])
    assert "line 18 of" in str(result.exception) and "nothing" in str(result.exception)


TRACEABLE = [
    *("gelu", "softmax", "sum", "matmul", "layer_norm", "add_rms_norm", "swiglu", "cross_entropy"),
    *("rope", "adamw", "dropout", "attention", "linear_gelu", "embedding"),
]


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # -inf - -inf in rows that are masked out, and the like
@pytest.mark.parametrize("operator", TRACEABLE)
def test_shipped_kernels_stay_in_bounds_without_races(operator: str) -> None:
    for direction in registry.operator(operator).directions:
        if (operator, direction) != ("sum", "backward"):  # a view: it launches nothing
            shown = debug(operator, "--direction", direction)
            assert shown["out_of_bounds"] == [] and not any(r["certain"] for r in shown["races"])


def test_the_text_shows_arguments_accesses_and_findings() -> None:
    file = str(EXAMPLES / "missing_mask.py")
    shown = CliRunner().invoke(app, ["debug", "relu", "--with", file, "--program", "3"])
    assert shown.exit_code == 1
    for text in ("x_ptr     float32 (7, 129), strides (129, 1)", "768..1023", "903..1023", "x_ptr[903]"):
        assert text in shown.stdout


def test_formulas_of_offsets() -> None:
    block = 5 + 100 * np.arange(4)[:, None] + np.arange(3)
    everywhere = np.ones(block.shape, dtype=bool)
    assert offsets_text(block, everywhere) == "5 + 100 i + j (i < 4, j < 3)"
    assert offsets_text(block, ~everywhere) == "none"
    assert offsets_text(np.array([7, 7, 7]), np.ones(3, dtype=bool)) == "7 (3 times)"
    assert offsets_text(np.array([9, 1, 5, 0, 3, 8, 2]), np.ones(7, dtype=bool)) == "9, 1, 5, 0, ..., 2"


def run_script(*command: str, stdin: str = "") -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *command], input=stdin, capture_output=True, text=True, env=environment, timeout=120
    )
    return done.stdout + done.stderr


def test_pdb_stops_in_the_program_at_the_line() -> None:
    command = ["-m", "weft", "debug", "relu", "--with", str(EXAMPLES / "missing_mask.py"), "--program", "2"]
    shown = run_script(
        *command, "--pdb", "--line", "18", stdin="p at.handle.data[0].item(), len(x.handle.data)\nq\n"
    )
    assert "(512, 256)" in shown and "left the debugger" in shown and "Traceback" not in shown


def test_breakpoint_stops_in_the_interpreter() -> None:
    shown = run_script(str(EXAMPLES / "zero_padding.py"), stdin="p x\np tl.max(x, 0)\nc\n")
    assert "[-101., -102., -103.,    0.]" in shown and "array([0.]" in shown
    assert "sums of rows" in shown and "[0.9679" in shown


def test_device_print_prints_the_offset_of_each_program() -> None:
    shown = run_script(str(EXAMPLES / "printed_offsets.py")).splitlines()
    assert [line.split()[-1] for line in shown[:3]] == ["[0]", "[4]", "[8]"] and "(2, 0, 0)" in shown[2]
    assert shown[3].endswith("[0.0, 4.0, 8.0]")


def test_the_page_shows_what_the_commands_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "learn" / "debugging.md").read_text()
    blocks = re.findall(r"```\n\$ weft (debug [^\n]*)\n(.*?)```", page, re.S)
    assert len(blocks) == 3
    for command, shown in blocks:
        printed = CliRunner().invoke(app, command.split()).stdout
        assert shown.rpartition("(")[0] == printed.rpartition("(")[0], command


LAUNCHES = {
    "overrun.cu": "relu_overrun<<<(n + 255) / 256, 256>>>(x, y);",
    "missing_barrier.cu": "softmax_racing<<<1, 256>>>(x, y, n);",
}


def emulated(file: Path, n: int) -> str:
    """Run the kernel of a .cu example on the CPU, in the emulator of weft learn; return the refusal."""
    x = np.linspace(-1, 1, n, dtype=np.float32)
    text = f"using scalar_t = float;\n#line 1\n{file.read_text()}"
    host = f"void run(const float* x, float* y, int n) {{ {LAUNCHES[file.name]} cudaDeviceSynchronize(); }}"
    try:
        program = Program(Candidate(file), "void run(const float* x, float* y, int n)", extra=host, text=text)
        program.call("run", program.array("x", x), program.empty("y", n), n, case=f"n = {n}")
    except Refused as refused:
        return refused.reason
    return ""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_cuda_examples_have_the_mistakes_that_the_page_describes(tmp_path: Path) -> None:
    overrun = emulated(EXAMPLES / "overrun.cu", 300)
    assert "of x" in overrun and "300" in overrun, overrun
    assert emulated(EXAMPLES / "overrun.cu", 512) == ""  # a multiple of the block hides it
    reason = emulated(EXAMPLES / "missing_barrier.cu", 300)
    assert "element 128 of sums" in reason and "Is a barrier missing?" in reason, reason
    comment = "// Here a __syncthreads() is missing: sums of other warps may not be written yet."
    repaired = with_change(tmp_path, "missing_barrier.cu", (comment, "__syncthreads();"))
    assert emulated(Path(repaired), 300) == ""
