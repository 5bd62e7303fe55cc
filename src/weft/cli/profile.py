"""``weft profile``: where the time of a call went, by three instruments, or by Nsight Compute."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.options import Files

if TYPE_CHECKING:
    from weft.workbench.profile.words import Table

EPILOG = "What each instrument measures, and how to read the files: docs/profile.md"
TOOLS = ("torch", "ncu")
STEPS = "Steps of a cycle"
Wait = Annotated[int | None, typer.Option(help=f"{STEPS} that no profiler sees.")]
Warmup = Annotated[int | None, typer.Option(help=f"{STEPS} seen, and thrown away.")]
Active = Annotated[int | None, typer.Option(help=f"{STEPS} that are kept.")]
Repeat = Annotated[int | None, typer.Option(help="Cycles.")]


def profile(
    operator: Annotated[str, typer.Argument(help="An operator: see weft ops.")],
    impl: Annotated[
        str | None,
        typer.Option("--impl", metavar="NAME", help="By default torch, the vendor's own call."),
    ] = None,
    case: Annotated[
        str | None, typer.Option(metavar="NAME", help="By default the first bench case.")
    ] = None,
    direction: Annotated[
        str, typer.Option(metavar="forward|backward", help="Which of the two.")
    ] = "forward",
    device: Annotated[
        str | None, typer.Option("--device", help="cuda or cpu; by default a GPU if there is one.")
    ] = None,
    tool: Annotated[
        str, typer.Option(metavar="torch|ncu", help="PyTorch's profilers, or Nsight Compute.")
    ] = "torch",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where it goes; by default profile-OP-IMPL-CASE."),
    ] = None,
    wait: Wait = None,
    warmup: Warmup = None,
    active: Active = None,
    repeat: Repeat = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps.")] = False,
    files: Files = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Show where the time of a call goes: kernels, trace, flame graph, TensorBoard log.

    Measured by CUDA events (on a CPU the clock), torch.autograd.profiler and torch.profiler, which
    must agree within 5 % where a call takes over 1 ms.

    Exit 0: good; 1: it fails its check, or the instruments disagree; 2: the call was wrong.

    Example: weft profile softmax --impl triton --out profile
    """
    from weft.core import WeftError

    if tool not in TOOLS:
        raise WeftError("--tool", expected=" or ".join(TOOLS), got=tool)
    given = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
    steps = {name: n for name, n in given.items() if n is not None}
    if tool == "ncu":
        _refuse_for_ncu([*steps, *(["quick"] if quick else [])])
        _by_ncu(operator, impl, case, direction, device, files or [], out, as_json)
        return
    _refuse_strangers(files or [])
    _by_torch(operator, impl, case, direction, device, steps, quick, out, as_json)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _refuse_for_ncu(options: list[str]) -> None:
    from weft.core import WeftError

    if options:
        named = ", ".join(f"--{name}" for name in options)
        raise WeftError(f"{named} with --tool ncu", hint="ncu counts one call, in no schedule")


def _refuse_strangers(files: list[str]) -> None:
    from weft.core import WeftError

    if files:
        raise WeftError(
            "--with is read by --tool ncu only",
            expected="an implementation of Weft's own",
            got=files[0],
            hint="the profilers run within our process, where no stranger's file is read; "
            "--tool ncu runs in a process of its own, and weft bench --with times it and "
            "names its kernels",
        )


def _by_torch(
    operator: str,
    impl: str | None,
    case: str | None,
    direction: str,
    device: str | None,
    steps: dict[str, int],
    quick: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    from dataclasses import replace

    from weft.machine import known_kind
    from weft.workbench.profile import session
    from weft.workbench.profile.schedule import QUICK, Schedule
    from weft.workbench.profile.work import subject

    schedule = replace(QUICK if quick else Schedule(), **steps)
    one = subject(operator, impl, case, direction, known_kind(device))
    folder = out or default_folder(operator, one.implementation.name, one.case.name)
    try:
        found = session.run(one, schedule, folder, _say)
    except session.Failed as error:
        _say(f"failed: {error}")
        raise typer.Exit(1) from error
    if as_json:
        print(json.dumps(found))
    else:
        _show(found, folder)
    if found["flags"]:
        for flag in found["flags"] if as_json else ():
            _say(f"wrong: {flag}")
        raise typer.Exit(1)


def default_folder(operator: str, implementation: str, case: str) -> Path:
    """``profile-softmax-cuda-03-shared-fp32-64x64``: a name's slash would be another folder."""
    return Path(f"profile-{operator}-{implementation}-{case}".replace("/", "-"))


def _show(found: dict[str, Any], folder: Path) -> None:
    from weft.workbench.profile import words

    print(words.title(found))
    print()
    _table(words.instruments(found))
    _table(words.ran(found))
    for line in words.sentences(found):
        print(line)
    print(f"written to {folder}: {', '.join(found['files'])}")


def _table(made: Table) -> None:
    """Words from the left and numbers from the right; a name is folded, a number is not."""
    from rich.markup import escape
    from rich.table import Table as Rich

    from weft.workbench import table
    from weft.workbench.profile.words import LEFT

    head, rows = made
    drawn = Rich(box=None, header_style="bold", pad_edge=False)
    for column in head:
        left = column in LEFT
        drawn.add_column(
            column, justify="left" if left else "right", overflow="fold", no_wrap=not left
        )
    for row in rows:
        drawn.add_row(*map(escape, row))
    out = table.console()
    out.print(drawn)
    out.print()


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
    """Hand over to Nsight Compute, which runs in a process of its own."""
    from weft.core import WeftError, registry
    from weft.workbench import ncu

    if device == "cpu":
        raise WeftError("--tool ncu", expected="a GPU", got="--device cpu")
    if files and not (impl and case):
        raise WeftError(
            "--with needs --impl and --case here",
            expected="both, since the file is read in the counted process only",
            got=", ".join(f"no --{n}" for n, v in (("impl", impl), ("case", case)) if not v),
        )
    if case is None:
        known = registry.operator(operator)
        case = next(iter(known.select("bench", "cuda")), known.cases[0]).name
    report = ncu.profile(
        operator=operator,
        implementation=impl or "torch",
        case=case,
        direction=direction,
        files=files,
        progress=_say,
    )
    said = report.to_json()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "ncu.json").write_text(json.dumps(said, indent=1) + "\n")
    if as_json:
        print(json.dumps(said))
    else:
        print(*report.lines(), sep="\n")
    if not report.good:
        raise typer.Exit(1)
