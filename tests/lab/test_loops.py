"""The loop study: its variants, the check before the timing, its record, its report and its command."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from helpers.paths import ROOT
from weft.cli import app, study_loops
from weft.core import Interrupted, WeftError, no_log
from weft.lab.loops import addresses, in_c, in_numba, report, run
from weft.lab.loops.problem import INTEGERS, NORMAL, Problem, gamma, swept
from weft.lab.loops.variants import (
    PROGRAMS,
    TILE,
    VARIANTS,
    Variant,
    parse_languages,
    parse_programs,
    units_of_work,
    variants,
)

SIZES = {"product": (1, 3, 37, 2 * TILE + 5), "stencil": (3, 9, 1031), "sum": (1, 3, 12347)}
SMALL = {"product": 33, "stencil": 70, "sum": 1000}
SMALL_TEXT = ",".join(f"{name}={size}" for name, size in SMALL.items())
NAMES = [f"{v.program}-{v.name}" for v in VARIANTS]
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, in_c.COMPILERS)), reason="needs a C compiler (gcc or clang)"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> in_c.Library:
    return in_c.build(tmp_path_factory.mktemp("loops"))


# Variants


@needs_compiler
@pytest.mark.parametrize("variant", VARIANTS, ids=NAMES)
def test_variant_in_c_is_right_at_odd_sizes(library: in_c.Library, variant: Variant) -> None:
    for size in SIZES[variant.program]:
        problem = Problem(variant.program, size)
        for threads in (1, 3):
            verdict = problem.check(library.call(variant, problem.arrays(variant), problem.shape, threads))
            assert not verdict.reason, (size, threads)
            assert verdict.share < 1


def in_python(variant: Variant, problem: Problem) -> Callable[[], None]:
    """Return a call of a variant of in_numba.py, run by Python."""
    source = in_numba.source(variant)
    assert source is not None
    return lambda: source(*problem.arrays(variant), 3)


WRITTEN = [v for v in VARIANTS if in_numba.source(v) is not None]


@pytest.mark.parametrize("variant", WRITTEN, ids=[f"{v.program}-{v.name}" for v in WRITTEN])
def test_variant_of_numba_is_right_as_python(variant: Variant) -> None:
    for size in {"product": (1, 6, 13), "stencil": (3, 8, 41), "sum": (1, 3, 1237)}[variant.program]:
        problem = Problem(variant.program, size)
        assert not problem.check(in_python(variant, problem)).reason, size


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", WRITTEN, ids=[f"{v.program}-{v.name}" for v in WRITTEN])
def test_variant_is_right_when_numba_has_compiled_it(variant: Variant) -> None:
    compiled = in_numba.compiled(variant, 2)
    for size in SIZES[variant.program]:
        problem = Problem(variant.program, size)
        verdict = problem.check(lambda problem=problem: compiled(*problem.arrays(variant), 2))  # type: ignore[misc]
        assert not verdict.reason, size


def test_only_what_llvm_vectorises_by_itself_is_not_written_in_numba() -> None:
    missing = {(v.program, v.name) for v in VARIANTS} - {(v.program, v.name) for v in WRITTEN}
    assert missing == {("product", "vectorisation"), ("stencil", "vectorisation")}
    assert in_numba.PACKED.search("\tvfmadd231ps\t(%rax), %ymm1, %ymm0") and in_numba.PACKED.search("addps x")
    assert in_numba.PACKED.search("fmla\tv0.4s, v1.4s, v2.4s")
    assert not in_numba.PACKED.search("\tvaddss\t%xmm1, %xmm0, %xmm0")


def test_every_variant_changes_a_base_and_names_a_kernel_of_weft() -> None:
    for program in PROGRAMS:
        own = variants(program)
        names = [v.name for v in own]
        assert own[0].base is None and len(set(names)) == len(names)
        for variant in own[1:]:
            assert variant.base in names
        for variant in own:
            assert (ROOT / variant.kernel).is_file() and variant.change and variant.gpu
            assert (program, variant.stream) in addresses.STREAMS
    assert {v.name for v in variants("product")} >= {"interchange", "tiling", "unrolling", "vectorisation"}
    assert {v.name for v in variants("stencil")} >= {"fusion", "fission", "tiling", "parallelisation"}


# The check


def test_reference_is_that_of_the_formulas() -> None:
    x = np.arange(20.0).reshape(4, 5) ** 2
    y = swept(x)
    assert y[1, 2] == 0.5 * x[1, 2] + 0.125 * (x[0, 2] + x[2, 2] + x[1, 1] + x[1, 3])
    assert (y[0] == x[0]).all() and (y[:, 4] == x[:, 4]).all()
    assert gamma(1000) == pytest.approx(1000 * 2.0**-24, rel=1e-4)
    problem = Problem("product", 4)
    problem.fill(INTEGERS)
    a, b = problem.inputs
    exact, bound = problem.reference(INTEGERS)
    assert exact[1, 2] == sum(float(a[1, p]) * float(b[p, 2]) for p in range(4))
    assert bound[1, 2] == pytest.approx(gamma(4) * sum(abs(a[1, p] * b[p, 2]) for p in range(4)))
    assert units_of_work("product", (2, 3, 4)) == 24
    assert units_of_work("stencil", (5, 6)) == 24 and units_of_work("sum", (9,)) == 9


def call_with(problem: Problem, variant: Variant, change: Callable[[], object]) -> Callable[[], None]:
    call = in_python(variant, problem)

    def changed() -> None:
        call()
        change()

    return changed


@pytest.mark.parametrize("program", PROGRAMS)
def test_check_finds_the_smallest_faults(program: str) -> None:
    variant = variants(program)[0]
    problem = Problem(program, {"product": 9, "stencil": 40, "sum": 3001}[program])
    last = (problem.output.shape[0] - 2, problem.output.shape[1] - 2) if problem.output.ndim == 2 else (0,)

    def one_term_more() -> None:
        problem.output[last] += 1 if problem.inputs[0].flat[0] == round(problem.inputs[0].flat[0]) else 0

    def nan() -> None:
        problem.output[last] = np.nan

    def another_input() -> None:
        problem.inputs[0].flat[-1] += 1

    for change, reason in (
        (one_term_more, "are wrong on integers"),
        (nan, "nan"),
        (another_input, "changes"),
    ):
        assert reason in problem.check(call_with(problem, variant, change)).reason
    # What no call has written is poison.
    assert "nan" in problem.check(lambda: None).reason
    # An error that integers cannot show, above the bound of normal numbers.
    problem.fill(NORMAL)
    in_python(variant, problem)()
    assert not problem.compare(NORMAL).reason
    problem.output[last] += 3 * np.float32(problem.reference(NORMAL)[1][last])
    assert f"1 of {problem.output.size} elements are wrong on normal" in problem.compare(NORMAL).reason


FAULTS = {
    "the last term of k": ("p < k; p++) sum +=", "p < k - 1; p++) sum +=", "product", "naive"),
    "what is left of four columns": (
        "}\n      for (; j < n; j++) c[i * n + j] += factor",
        "}\n      for (; j < n - 1; j++) c[i * n + j] += factor",
        "product",
        "unrolling",
    ),
    "a row of the ring too early": ("(i - 2) % 3", "(i - 1) % 3", "stencil", "fusion"),
    "the last span": ("(last - first) * (t + 1)", "(last - first - 1) * (t + 1)", "sum", "parallelisation"),
}


@needs_compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_variant_is_refused_before_it_is_timed(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after, program, name = FAULTS[fault]
    text = in_c.SOURCE.read_text()
    assert before in text
    planted = tmp_path / "programs.c"
    planted.write_text(text.replace(before, after, 1))
    monkeypatch.setattr(in_c, "SOURCE", planted)
    monkeypatch.setattr(run, "_misses", lambda *_: ({}, "not in this test"))
    timed: list[str] = []
    monkeypatch.setattr(run, "_time", lambda entries, *_: timed.extend(e.title for e in entries))
    options = ("--programs", f"{program}={SMALL[program]}", "--languages", "c", "--no-pictures")
    done = run_study("--quick", *options, "--out", tmp_path / "out")
    assert done.exit_code == 1
    study = json.loads((tmp_path / "out" / "loops.json").read_text())
    wrong = [r for r in study["rows"] if r["refused"]]
    assert name in {r["name"] for r in wrong} and all(r["us"] is None for r in wrong)
    assert f"{program} {name} in c" not in timed
    assert len(timed) == len(study["rows"]) - len(wrong) and len(study["wrong"]) == len(wrong)
    assert done.stdout.splitlines()[-1].startswith("wrong: ")
    assert f"wrong: {program} {name} in c:" in done.stdout


# The command


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"}


def run_study(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["study", "loops", *map(str, arguments)])


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A real study of small sizes in C."""
    if not any(map(shutil.which, in_c.COMPILERS)):
        pytest.skip("needs a C compiler (gcc or clang)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "QUICK_SECONDS", 0.1)
        yield run.run(SMALL, ("c",), quick=True, log=no_log)


def test_record_has_every_variant_with_its_check_misses_and_time(study: dict[str, Any]) -> None:
    assert (study["study"], study["format"], study["wrong"]) == ("loops", run.FORMAT, [])
    assert [(r["program"], r["name"]) for r in study["rows"]] == [(v.program, v.name) for v in VARIANTS]
    for row in study["rows"]:
        low, high = row["interval"]
        assert 0 < low <= row["us"] <= high and row["samples"] >= 3
        assert 0 <= row["share_of_bound"] < 1 and row["refused"] is row["skipped"] is None
        assert (row["gain"] is None) == (row["base"] is None)
    for program in study["programs"]:
        assert program["size"] == SMALL[program["name"]]
        assert set(program["misses"]) == {v.name for v in variants(program["name"])}
        for misses in program["misses"].values():
            assert misses["accesses"] >= program["simulated_units"] > 0
            assert misses["accesses"] > misses["l1"] >= misses["l2"] > 0
    by_rows = next(r for r in study["rows"] if (r["program"], r["name"]) == ("product", "interchange"))
    naive = next(r for r in study["rows"] if (r["program"], r["name"]) == ("product", "naive"))
    assert by_rows["gain"] == pytest.approx(naive["us"] / by_rows["us"])
    assert study["not_counted"] == run.NOT_QUICK and study["compiler"]["flags"] == list(in_c.FLAGS)
    assert json.loads(json.dumps(study)) == study


def test_report_shows_the_record(study: dict[str, Any], tmp_path: Path) -> None:
    text = " ".join(report.sentences(study))
    assert "simulated" in text and "measured" in text and study["compiler"]["version"] in text
    busy = {"before": {"busy": "load 3.0 on 2 cores"}, "after": {"busy": ""}}
    assert "the machine was shared: load 3.0 on 2 cores" in " ".join(report.warnings({**study, "load": busy}))
    product = study["programs"][0]
    head, rows = report.program_table(study, product)
    assert head == ("variant", "from", "L1 sim.", "L2 sim.", "C", "gain")
    assert [r[0] for r in rows] == [v.name for v in variants("product")]
    assert float(rows[1][2]) == pytest.approx(
        1000 * product["misses"]["interchange"]["l1"] / product["simulated_units"], rel=0.01
    )
    folder = tmp_path / "results" / "a-cpu"
    folder.mkdir(parents=True)
    (folder / "loops-2026-01-01.json").write_text("{}")  # an older one is not read
    (folder / "loops-2026-11-24.json").write_text(json.dumps(study))
    page = report.markdown(tmp_path / "results")
    assert page.count("\n| naive |") == 3 and " to " in page
    assert "weft study loops" in report.markdown(tmp_path / "nothing")
    (path,) = report.plot_all(study, tmp_path)
    assert "simulated L1 misses" in path.read_text() and "stencil in C" in path.read_text()
    assert re.search(
        r"\[03_shared_tile.cu\]\(../../src/weft/ops/matmul/ladder/", report.gpu_markdown("product")
    )


def test_page_shows_the_conflicts_of_a_power_of_two() -> None:
    rows = [line.split(" | ") for line in report.conflict_markdown((500, 512), 2).splitlines()[2:]]
    misses = {
        name.strip("| "): (float(a.replace(",", "")), float(b.strip(" |").replace(",", "")))
        for name, a, b in rows
    }
    # A column of 512 rows has two sets of 12 lines; 500 rows of 31.25 lines are spread over all sets.
    assert misses["naive"][0] < 80 and misses["naive"][1] > 1000
    assert misses["tiling"][1] > 1.5 * misses["tiling"][0]


def test_counted_misses_are_a_column(study: dict[str, Any]) -> None:
    rows = [{**r, "counted_l1": 1e4 if r["name"] == "naive" else None} for r in study["rows"]]
    head, lines = report.program_table({**study, "rows": rows}, study["programs"][0])
    assert head[4] == "L1 perf" and lines[1][4] == "–"
    assert float(lines[0][4]) == pytest.approx(1e7 / 33**3, rel=0.01)


def test_tables_fit_a_terminal_of_80_columns(study: dict[str, Any]) -> None:
    from weft.cli.output import table_lines
    from weft.core.table import plain_table

    rows = [{**r, "language": language} for r in study["rows"] for language in ("c", "numba")]
    both = {**study, "languages": ["c", "numba"], "rows": rows}
    for program in study["programs"]:
        columns, cells = report.program_table(both, program)
        table = plain_table(columns, cells, numeric=columns[2:], priorities=study_loops.PRIORITIES)
        lines = list(table_lines(table, 80))
        assert max(len(line.plain) for line in lines) <= 80
        assert "C" in lines[0].plain and "numba" in lines[0].plain and "L1 sim." in lines[0].plain


def test_interrupted_timing_keeps_what_was_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(samplers: dict[Any, Any], *_: Any) -> Any:
        raise Interrupted(({entry: [3.0, 4.0, 5.0] for entry in samplers}, {}))

    monkeypatch.setattr(run, "sample_rounds", interrupted)
    monkeypatch.setattr(in_c, "build", lambda *_: pytest.fail("not asked for C"))
    monkeypatch.setattr(run, "variants", lambda name: variants(name)[:2])  # without a slow compilation
    with pytest.raises(Interrupted) as caught:
        run.run({"sum": 100}, ("numba",), quick=True, log=no_log)
    assert {r["us"] for r in caught.value.partial["rows"]} == {4.0}
    assert caught.value.partial["programs"][0]["misses"]


def test_without_a_compiler_the_reason_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    options = ("--quick", "--programs", "sum=100", "--languages", "c", "--no-pictures", "--out", tmp_path)
    done = run_study(*options)
    assert done.exit_code == 0, done.output
    assert "CC names no-such-compiler, which is not on the path" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("nothing timed (") and "not run: 4 variants" in done.stdout
    record = json.loads((tmp_path / "loops.json").read_text())
    assert {r["us"] for r in record["rows"]} == {None} and record["compiler"] is None
    monkeypatch.setenv("CC", "false")
    with pytest.raises(in_c.NoCompiler, match="false failed: exit 1"):
        in_c.build(tmp_path)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(in_c.NoCompiler, match="install gcc or clang, or set CC"):
        in_c.find_compiler()


@pytest.mark.slow
@needs_compiler
@pytest.mark.pooled(3, "commands that measure")
def test_command_writes_record_and_picture_and_redraws_it(tmp_path: Path) -> None:
    options = [
        "--quick",
        "--programs",
        SMALL_TEXT,
        "--languages",
        "c",
        "--json",
        "--out",
        str(tmp_path / "a"),
    ]
    call = [sys.executable, "-m", "weft", "study", "loops", *options]
    done = subprocess.run(call, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record == json.loads((tmp_path / "a" / "loops.json").read_text())
    assert f"good: {len(VARIANTS)} loop nests timed on the CPU" in done.stderr and "checking" in done.stderr
    redrawn = run_study("--redraw", tmp_path / "a" / "loops.json", "--out", tmp_path / "b")
    assert redrawn.exit_code == 0 and "unroll-and-jam" in redrawn.stdout
    assert "coalescing" in redrawn.stdout and "1 picture" in redrawn.stdout
    assert (tmp_path / "a" / report.PICTURE).read_bytes() == (tmp_path / "b" / report.PICTURE).read_bytes()
    assert not (tmp_path / "b" / "loops.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--programs", "fft"], "--programs: expected different names of product, stencil, sum"),
        (["--programs", "sum,sum"], "different names"),
        (["--programs", "sum=many"], "--programs sum: expected a size such as 300, got many"),
        (["--programs", "stencil=2"], "a size from 3 to 16384"),
        (["--programs", "product=5000"], "a size from 1 to 4096"),
        (["--programs", ""], "--programs"),
        (["--languages", "rust"], "--languages: expected c or numba, or both, got rust"),
        (["--languages", "c,c"], "--languages"),
        (["--device", "cuda"], "the loop study runs on the CPU"),
        (["--depths", "1,2,3"], "options of weft study loops: expected none but --programs, --languages"),
        (["--dtype", "bf16", "--steps", "2"], "got --steps, --dtype"),
        (["--redraw", "no-such.json"], "expected a loops.json"),
        (["--redraw", str(ROOT / "results" / "nvidia-h200" / "study-mlp.json")], "a study of the loops"),
        (["--out", __file__], "expected a folder"),
    ],
)
def test_invalid_arguments_are_refused_with_the_reason(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_study(*arguments)
    assert isinstance(done.exception, WeftError) and message in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_options_of_the_loop_study_are_refused_by_the_other() -> None:
    done = CliRunner().invoke(app, ["study", "mlp", "--programs", "sum"])
    assert isinstance(done.exception, WeftError) and "got --programs" in str(done.exception)


def test_sizes_are_the_defaults_or_those_of_the_argument() -> None:
    assert parse_programs(None, False) == {name: p.size for name, p in PROGRAMS.items()}
    assert parse_programs("sum, product=7", True) == {"sum": PROGRAMS["sum"].quick_size, "product": 7}
    assert parse_languages(None) == ("c", "numba") and parse_languages("numba") == ("numba",)
