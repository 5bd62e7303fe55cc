"""``weft judge``: check and time a candidate in the format of a kernel benchmark."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer

from weft.cli import ending, output, progress
from weft.cli.options import MEMORY, SECONDS, Case, Csv, Device, Json, Memory, Seconds, Seed, limits
from weft.core.errors import WeftError
from weft.core.output_files import ResultFile
from weft.core.text import printable

if TYPE_CHECKING:
    from weft.workbench.judge.judge import JudgeOptions
    from weft.workbench.judge.judgement import Judgement, SpeedUp

EPILOG = """Examples:
  weft judge problem.py candidate.py
  weft judge reference.py submission.py --no-time --out result.json
  weft judge problems/ --candidates kernels/ --save results.jsonl --resume

Formats, checks and results: weft help suites"""
MAX_NONCE = 256
LANGUAGES = {"eager": "PyTorch", "triton": "Triton", "cuda": "CUDA C++", "numba": "Numba"}

Candidates = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Candidates named after the problems: judge all of them"),
]
Jobs = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Judgements at once, where memory allows [default: by cores]"),
]
Save = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Append each result to this file as a JSON line")
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the result as JSON to this new file, which must not exist"),
]
Nonce = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Repeat this text in the JSON result; - reads it from stdin"),
]
Resume = Annotated[bool, typer.Option("--resume", help="Skip what the file of --save already has")]


def judge(
    reference: Annotated[
        Path,
        typer.Argument(
            metavar="REFERENCE",
            help="Problem: KernelBench file, GPU MODE folder, definition.json; with --candidates a folder",
        ),
    ],
    candidate: Annotated[
        Path | None,
        typer.Argument(metavar="CANDIDATE", help="File with ModelNew or custom_kernel, or solution.json"),
    ] = None,
    candidates: Candidates = None,
    jobs: Jobs = None,
    save: Save = None,
    resume: Resume = False,
    case: Case = None,
    device: Device = None,
    seconds: Seconds = SECONDS,
    memory: Memory = MEMORY,
    seed: Seed = None,
    backward: Annotated[
        bool,
        typer.Option("--backward", help="Judge the gradients of inputs and parameters (KernelBench)"),
    ] = False,
    workloads: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Workloads of a definition [default: beside it]"),
    ] = None,
    no_time: Annotated[bool, typer.Option("--no-time", help="Check only; measure no time")] = False,
    out: Out = None,
    nonce: Nonce = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Judge a submission to a kernel benchmark against its reference, without editing either file.

    Formats: KernelBench, GPU MODE, FlashInfer-Bench, SOL-ExecBench.
    The candidate runs in a worker process with limits, and the reference is timed in another. With
    --candidates a folder of problems is judged, each in a process of its own, and scored.

    Exit 0: correct; 1: wrong, cheating or not run; 2: invalid arguments.
    """
    from weft.machine.query import known_kind

    output.only_one_format(json=as_json, csv=as_csv)
    kind = known_kind(device)
    if candidates is not None:
        arguments = {"cases": case or [], "seed": seed, "time": not no_time, "backward": backward}
        sandbox = {"limits": asdict(limits(seconds, memory))}
        flags = SuiteFlags(kind, jobs, arguments | sandbox, save, resume, as_json, as_csv)
        for option, chosen in (("--out", out), ("--nonce", nonce)):
            if chosen is not None:
                raise WeftError(option, expected="one candidate", got="--candidates", hint="use --save FILE")
        _judge_folder(reference, candidate, candidates, flags)
    if candidate is None:
        raise WeftError("CANDIDATE", expected="a file, or --candidates FOLDER", got="none")
    suite_only = (("--save", save), ("--jobs", jobs), ("--resume", resume or None), ("--csv", as_csv or None))
    for option, value in suite_only:
        if value is not None:
            raise WeftError(option, expected="--candidates FOLDER with it", got="one candidate")
    from weft.machine import driver
    from weft.workbench.sandbox import fork_client

    fork_client.prepare()  # its imports run while this process imports its own
    if kind == "cuda":
        driver.open_in_background()
    from weft.workbench.judge.judge import JudgeOptions

    options = JudgeOptions(
        device=kind,
        backward=backward,
        workloads=workloads,
        cases=tuple(case or ()),
        seed=seed,
        time=not no_time,
        limits=limits(seconds, memory),
    )
    _judge_one(reference, candidate, options, Output(as_json, out, nonce))


class Output(NamedTuple):
    """Destination of the result of one judgement, and the text that is repeated in it."""

    as_json: bool
    out: Path | None
    nonce: str | None


def _judge_one(reference: Path, candidate: Path, options: JudgeOptions, to: Output) -> NoReturn:
    """Judge one candidate, write the result where it is asked for, and exit."""
    from weft.workbench.judge import judge as workbench
    from weft.workbench.sandbox import process_tree

    nonce = {} if to.nonce is None else {"nonce": _read_nonce(to.nonce)}
    file = None if to.out is None else ResultFile(to.out)
    if nonce or file:
        # No process of the candidate may then read this one's memory, or open its files through /proc.
        process_tree.prctl(process_tree.PR_SET_DUMPABLE, 0)
    watch = ending.Stopwatch()
    with file or nullcontext():
        with progress.stoppable() as stop, progress.Progress() as status:
            judgement: Judgement | None = workbench.judge(reference, candidate, options, status.describe)
        if stop:
            judgement = stop.partial
        if file is not None and judgement is not None and not file.is_untouched():
            judgement.refuse("channel", f"the file {file.path.name} was changed before the verdict")
        result = judgement.to_json() if judgement else {"correct": False}
        result |= stop.to_json() | nonce
        if file is not None:
            file.write(result)
    if to.as_json:
        print(json.dumps(result))
    elif judgement is not None:
        _show(judgement, reference.name, candidate.name)
    ending.print_verdict(_verdict_line(judgement, watch, stop), to_stderr=to.as_json)
    raise typer.Exit(stop.exit_code or (0 if judgement and judgement.correct else 1))


def _read_nonce(text: str) -> str:
    """Return the nonce: the option's value, or the first line of stdin for ``-``."""
    if text == "-":
        text = sys.stdin.readline(MAX_NONCE + 2).rstrip("\n")
    if not 0 < len(text) <= MAX_NONCE or not text.isprintable():
        raise WeftError("--nonce", expected=f"1 to {MAX_NONCE} visible characters", got=repr(text[:80]))
    return text


def _verdict_line(judgement: Judgement | None, watch: ending.Stopwatch, stop: progress.StopRequest) -> str:
    """Return the last line: the verdict, the number of checks that passed, and the speed."""
    checks = judgement.checks if judgement else []
    passed = ending.count_text(sum(c.status == "pass" for c in checks), "check") + " passed"
    if stop or judgement is None:
        return f"stopped after {ending.count_text(len(checks), 'check')}: {passed} ({watch})"
    if judgement.correct:
        comparison = judgement.comparison
        unknown = "no speed-up" if judgement.times else "not timed"
        return f"correct: {passed}; {_speed_text(comparison) if comparison else unknown} ({watch})"
    if judgement.reason.startswith("not run"):
        return f"{judgement.reason} ({watch})"
    return f"not correct: {judgement.reason}; {passed} ({watch})"


def _speed_text(comparison: SpeedUp) -> str:
    """Describe a speed-up with its 95 % interval, or say that there is none to tell."""
    low, high = comparison.interval
    if not comparison.is_known:
        return "no speed-up: the reference differed as much from itself"
    if not comparison.is_shown:
        return f"no difference shown ({low:.2f} to {high:.2f} times as fast)"
    if comparison.ratio < 1:
        low, high = 1 / high, 1 / low
    return f"{ending.speed_text(comparison.ratio)} ({low:.2f} to {high:.2f})"


class SuiteFlags(NamedTuple):
    """Options of a suite as the command line has them."""

    device: str
    jobs: int | None
    arguments: dict[str, Any]
    save: Path | None
    resume: bool
    as_json: bool
    as_csv: bool


def _judge_folder(problems: Path, candidate: Path | None, candidates: Path, flags: SuiteFlags) -> NoReturn:
    """Judge a folder of problems; exit."""
    from weft.cli.judge_suite import judge_suite
    from weft.workbench.judge.suite import SuiteOptions

    if candidate is not None:
        raise WeftError("--candidates", expected="no CANDIDATE beside it", got=candidate)
    if not problems.is_dir():
        raise WeftError("REFERENCE", expected="a folder of problems with --candidates", got=problems)
    if flags.resume and flags.save is None:
        raise WeftError("--resume", expected="--save FILE, which has what is done", got="none")
    options = SuiteOptions(device=flags.device, jobs=flags.jobs, arguments=flags.arguments)
    judge_suite(
        problems,
        candidates,
        options,
        flags.save,
        flags.resume,
        as_json=flags.as_json,
        as_csv=flags.as_csv,
    )


def _show(judgement: Judgement, reference: str, candidate: str) -> None:
    """Print the verdict on one line, then the checks, the file's own check, times and kernels."""
    from rich.markup import escape

    console = output.console()

    def show(line: str) -> None:
        console.print(printable(line), soft_wrap=True)

    verdict = "[green]correct[/]" if judgement.correct else "[red]not correct[/]"
    backend = judgement.backend
    language = f"{LANGUAGES.get(backend, backend)} code" if backend else "not loaded"
    reason = f": {escape(judgement.reason)}" if judgement.reason else ""
    subject = "gradients against" if judgement.direction == "backward" else "against"
    show(f"{escape(candidate)} is {verdict} ({language}, {subject} {escape(reference)}){reason}")
    if judgement.gradients:
        show(f"gradients compared: {escape(', '.join(judgement.gradients))}")
    for check in judgement.checks:
        status = {"pass": "[green]pass[/]", "fail": "[red]FAIL[/]"}.get(check.status, check.status)
        show(f"  {status}  {check.check:9} {escape(check.detail)}".rstrip())
    if judgement.own is not None:
        passed = judgement.own.passed
        result = "not run" if passed is None else "would accept it" if passed else "would reject it"
        detail = f" ({escape(judgement.own.detail)})" if judgement.own.detail else ""
        show(f"the problem's own check ({escape(judgement.own.rule)}): {result}{detail}")
    for timed in judgement.times:
        times = f"{timed.time_us:.2f} us, reference {timed.baseline_us:.2f} us"
        measured = "time of forward and backward" if judgement.direction == "backward" else "time"
        show(f"{measured} at {escape(timed.case)}: {times}; {_speed_text(timed.comparison)}")
    if len(judgement.times) > 1 and judgement.comparison is not None:
        show(f"geometric mean of all cases: {_speed_text(judgement.comparison)}")
    if judgement.kernels:
        show(f"kernels: {escape(', '.join(judgement.kernels))}")
    for flag in judgement.flags:
        show(f"flag: {escape(flag)}")
    for note in judgement.notes:
        show(f"note: {escape(note)}")
