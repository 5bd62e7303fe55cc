"""``weft profile``: show where the time of a call goes, by PyTorch's profilers or NVIDIA's tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli import ending, output, progress
from weft.cli.options import Device, Files, Json

EPILOG = """Examples:
  weft profile softmax --stacks --out profile
  weft profile gelu --impl cuda --tool ncu
  weft profile --from train.sqlite

Instruments and output files: weft help profile"""
FOLD = 16  # characters to which names are folded at least
TOOLS = ("torch", "ncu", "nsys")
Wait = Annotated[int | None, typer.Option(metavar="N", help="Steps per cycle that no profiler records")]
Warmup = Annotated[
    int | None, typer.Option(metavar="N", help="Warm-up steps per cycle (profiled but discarded)")
]
Active = Annotated[int | None, typer.Option(metavar="N", help="Recorded steps per cycle")]
Repeat = Annotated[int | None, typer.Option(metavar="N", help="Number of cycles")]


def profile(
    operator: Annotated[
        str | None, typer.Argument(metavar="OPERATOR", help="Operator, as listed by weft ops")
    ] = None,
    impl: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Implementation [default: torch, PyTorch's own]"),
    ] = None,
    case: Annotated[
        str | None, typer.Option(metavar="NAME", help="Case [default: the first bench case]")
    ] = None,
    direction: Annotated[
        str, typer.Option(metavar="forward|backward", help="Direction to profile")
    ] = "forward",
    device: Device = None,
    tool: Annotated[
        str,
        typer.Option(
            metavar="torch|ncu|nsys",
            help="PyTorch's profilers (torch), Nsight Compute (ncu) or Nsight Systems (nsys)",
        ),
    ] = "torch",
    export: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Show an SQLite export of nsys; run nothing"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Output folder [default: profile-OPERATOR-IMPL-CASE]"),
    ] = None,
    wait: Wait = None,
    warmup: Warmup = None,
    active: Active = None,
    repeat: Repeat = None,
    quick: Annotated[bool, typer.Option("--quick", help="Record fewer steps")] = False,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Show Python's functions in trace and flame graph")
    ] = False,
    files: Files = None,
    as_json: Json = False,
) -> None:
    """Show where the time of a call goes: kernels, trace, flame graph, TensorBoard log.

    Three instruments measure it: CUDA events (on a CPU the clock), torch.autograd.profiler and
    torch.profiler. They must agree within 5 % where a call takes over 1 ms.

    Exit 0: good; 1: the implementation fails its check, or the instruments disagree; 2: invalid
    arguments.
    """
    from weft.core import WeftError

    if tool not in TOOLS:
        raise WeftError("--tool", expected=f"{', '.join(TOOLS[:-1])} or {TOOLS[-1]}", got=tool)
    cycle = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
    steps = {name: n for name, n in cycle.items() if n is not None}
    schedule = [f"--{name}" for name in steps] + ["--quick"] * quick + ["--stacks"] * stacks
    if export is not None:
        call: dict[str, object] = {"OPERATOR": operator, "--impl": impl, "--case": case, "--with": files}
        call |= {"--direction": direction != "forward", "--device": device, "--tool": tool == "ncu"}
        refused = [name for name, value in call.items() if value] + schedule
        _show_export(export, refused, out, as_json)
        return
    if operator is None:
        raise WeftError("nothing to profile", expected="an operator, or --from", hint="list them: weft ops")
    if tool != "torch":
        if schedule:
            what = f"{', '.join(schedule)} with --tool {tool}"
            raise WeftError(what, hint=f"{tool} measures in a process of its own, without cycles")
        by_tool = _by_ncu if tool == "ncu" else _by_nsys
        by_tool(operator, impl, case, direction, device, files or [], out, as_json)
        return
    if files:
        raise WeftError(
            "--with requires --tool ncu or nsys",
            expected="one of Weft's own implementations",
            got=files[0],
            hint="the profilers run in Weft's own process, which never loads your code; ncu and nsys run it "
            "in another process, and weft bench --with times it and names its kernels",
        )
    _by_torch(operator, impl, case, direction, device, steps, quick, stacks, out, as_json)


def _by_torch(
    operator: str,
    impl: str | None,
    case: str | None,
    direction: str,
    device: str | None,
    steps: dict[str, int],
    quick: bool,
    stacks: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    from dataclasses import replace

    from weft.machine import known_kind
    from weft.workbench.explain.profile import session
    from weft.workbench.explain.profile.instruments import QUICK, Schedule
    from weft.workbench.explain.profile.workload import select_subject

    schedule = replace(QUICK if quick else Schedule(), **steps)
    subject = select_subject(operator, impl, case, direction, known_kind(device))
    folder = out or default_folder(operator, subject.implementation.name, subject.case.name)
    watch = ending.Stopwatch()
    try:
        with progress.Progress(every_line=True) as status:
            result = session.run(subject, schedule, folder, status, python_frames=stacks)
    except session.CheckFailed as error:
        output.log(f"failed: {error}")
        raise typer.Exit(1) from error
    if as_json:
        print(json.dumps(result))
        for flag in result["flags"]:
            output.log(f"wrong: {flag}")
    else:
        show(result, folder)
    verdict = f"wrong: {ending.count_text(len(result['flags']), 'flag')}" if result["flags"] else "good"
    files = ending.count_text(len(result["files"]), "file")
    ending.print_verdict(f"{verdict}: {files} written to {folder} ({watch})", to_stderr=as_json)
    if result["flags"]:
        raise typer.Exit(1)


def default_folder(operator: str, implementation: str, case: str) -> Path:
    """Return a name such as ``profile-softmax-cuda-03-shared-fp32-64x64``.

    A slash of the implementation's name becomes a dash, because it would make a folder of its own.
    """
    return Path(f"profile-{operator}-{implementation}-{case}".replace("/", "-"))


def show(result: dict[str, Any], folder: Path) -> None:
    """Print a profile's tables and sentences, and the list of its files."""
    from weft.core.table import plain_table
    from weft.workbench.explain.profile import text

    output.show_notes([text.title(result)], indent="", style="")
    print()
    for names, rows in (text.instruments(result), text.kernels(result)):
        numeric = [name for name in names if name not in text.LEFT_ALIGNED]
        table = plain_table(names, rows, numeric=numeric, priorities=text.PRIORITIES, fold=FOLD)
        output.show_table(table)
        print()
    output.show_notes(text.sentences(result), style="")
    output.show_notes([f"written to {folder}: {', '.join(result['files'])}"], style="")


def _by_ncu(
    operator: str,
    impl: str | None,
    case: str | None,
    direction: str,
    device: str | None,
    files: list[str],
    out: Path | None,
    as_json: bool,
) -> None:
    """Profile one call by Nsight Compute, in a process of its own."""
    from weft.workbench.explain import ncu

    case = _case_of_tool("ncu", operator, impl, case, device, files)
    watch = ending.Stopwatch()
    report = ncu.profile(
        operator=operator,
        implementation=impl or "torch",
        case=case,
        direction=direction,
        files=files,
        log=output.log,
    )
    result = report.to_json()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "ncu.json").write_text(json.dumps(result, indent=1) + "\n")
    if as_json:
        print(json.dumps(result))
    else:
        print(*report.lines(), sep="\n")
    ending.print_verdict(
        f"{'good' if report.good else 'wrong'}: one call by ncu ({watch})", to_stderr=as_json
    )
    if not report.good:
        raise typer.Exit(1)


def _case_of_tool(
    tool: str, operator: str, impl: str | None, case: str | None, device: str | None, files: list[str]
) -> str:
    """Return the case that a tool profiles; raises for what it cannot profile in a process of its own."""
    from weft.core import WeftError, registry

    if device == "cpu":
        raise WeftError(f"--tool {tool}", expected="a GPU", got="--device cpu")
    if files and not (impl and case):
        missing = [f"no --{name}" for name, value in (("impl", impl), ("case", case)) if not value]
        raise WeftError(
            "--with needs --impl and --case here",
            expected="both, since only the profiled process loads the file",
            got=", ".join(missing),
        )
    if case is not None:
        return case
    cases = registry.operator(operator)
    return next(iter(cases.select("bench", "cuda")), cases.cases[0]).name


def _by_nsys(
    operator: str,
    impl: str | None,
    case: str | None,
    direction: str,
    device: str | None,
    files: list[str],
    out: Path | None,
    as_json: bool,
) -> None:
    """Trace calls by Nsight Systems, in a process of its own."""
    from weft.workbench.explain import nsys

    case = _case_of_tool("nsys", operator, impl, case, device, files)
    folder = out or default_folder(operator, impl or "torch", case)
    watch = ending.Stopwatch()
    export = nsys.profile(
        operator=operator,
        implementation=impl or "torch",
        case=case,
        direction=direction,
        files=files,
        out=folder,
        log=output.log,
    )
    title = f"{operator} {impl or 'torch'} {case} {direction}"
    _show_timeline(export, title, folder, as_json, watch)


def _show_export(file: Path, refused: list[str], out: Path | None, as_json: bool) -> None:
    """Show an export that nsys wrote, on any machine."""
    from weft.core import WeftError
    from weft.workbench.explain import nsys

    if refused:
        raise WeftError(
            "--from runs nothing", expected="only --out and --json with it", got=", ".join(refused)
        )
    watch = ending.Stopwatch()
    _show_timeline(nsys.load(file), file.name, out, as_json, watch)


def _show_timeline(
    export: Any, title: str, folder: Path | None, as_json: bool, watch: ending.Stopwatch
) -> None:
    """Print an export's summary, and write its files into ``folder`` unless None."""
    from weft.workbench.explain import nsys
    from weft.workbench.explain.nsys import text

    summary = nsys.summarise(export)
    files = nsys.write(export, summary, folder, title) if folder else []
    if as_json:
        print(json.dumps(summary.to_json()))
    else:
        output.show_notes([title], indent="", style="")
        print()
        for table in text.tables(summary):
            output.show_table(table)
            print()
        output.show_notes(text.sentences(summary), style="")
    counts = f"{ending.count_text(len(export.kernels), 'kernel')}, "
    counts += ending.count_text(len(export.ranges), "range")
    written = f", {ending.count_text(len(files), 'file')} written to {folder}" if folder else ""
    ending.print_verdict(f"read: {counts}{written} ({watch})", to_stderr=as_json)
