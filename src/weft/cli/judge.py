"""``weft judge``: is a candidate in KernelBench's or GPU MODE's format right, and how fast?"""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.core import WeftError

if TYPE_CHECKING:
    from weft.workbench.formats.judgement import Judgement

EPILOG = "Example: weft judge problem.py candidate.py --json. What it means: docs/judge.md"


def judge(
    reference: Annotated[
        Path, typer.Argument(help="KernelBench's file, or GPU MODE's folder or reference.py.")
    ],
    candidate: Annotated[Path, typer.Argument(help="The file with ModelNew or custom_kernel.")],
    case: Annotated[
        list[str] | None, typer.Option("--case", metavar="NAME", help="Only this; may repeat.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="Default: the GPU where there is one.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="The longest that one call may take.")
    ] = 120.0,
    memory: Annotated[
        float, typer.Option(metavar="GIB", help="The most memory of the candidate, in GiB.")
    ] = 8.0,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Draw everything from this seed, to repeat it.")
    ] = None,
    no_time: Annotated[bool, typer.Option("--no-time", help="Judge it, time nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Judge a candidate by a reference, both in the format they are in.

    The reference runs here, the candidate in a process of its own with limits.

    Exit 0: right; 1: wrong, cheating or not run; 2: the call was wrong.
    """
    from weft.machine.query import known_kind
    from weft.workbench.cell import Limits
    from weft.workbench.formats.judge import Wanted
    from weft.workbench.formats.judge import judge as verdict_on

    for name, value in (("--seconds", seconds), ("--memory", memory)):
        if value <= 0:
            raise WeftError(name, expected="a number above 0", got=value)
    wanted = Wanted(
        device=known_kind(device),
        cases=tuple(case or ()),
        seed=seed,
        time=not no_time,
        limits=Limits(seconds=seconds, memory_bytes=int(memory * (1 << 30))),
    )
    with _Progress() as say:
        found = verdict_on(reference, candidate, wanted, say)
    if json:
        typer.echo(jsonlib.dumps(found.to_json()))
    else:
        _show(found, candidate.name)
    raise typer.Exit(0 if found.correct else 1)


class _Progress:
    """One line on a terminal's stderr, rewritten as work goes on; nothing in a pipe."""

    def __enter__(self) -> _Progress:
        from rich.console import Console

        self.console = Console(stderr=True, highlight=False)
        return self

    def __call__(self, line: str) -> None:
        if self.console.is_terminal:
            self.console.print(f"\r\x1b[2K{line}", end="", markup=False, soft_wrap=True)

    def __exit__(self, *raised: object) -> None:
        if self.console.is_terminal:
            self.console.print("\r\x1b[2K", end="")


def _show(found: Judgement, name: str) -> None:
    """The verdict on one line, then its findings, the file's own check, times and kernels."""
    from rich.console import Console
    from rich.markup import escape

    out = Console(highlight=False, soft_wrap=True)
    word = "[green]right[/]" if found.correct else "[red]not right[/]"
    told = f": {escape(found.reason)}" if found.reason else ""
    out.print(f"{escape(name)} ({found.backend or 'unread'}) as {found.operator}: {word}{told}")
    for one in found.checks:
        mark = {"pass": "[green]pass[/]", "fail": "[red]FAIL[/]"}.get(one.status, one.status)
        out.print(f"  {mark}  {one.check:9} {escape(one.detail)}".rstrip())
    if found.own is not None:
        passed = found.own.passed
        said = "not asked" if passed is None else "would pass it" if passed else "would refuse it"
        detail = f" ({escape(found.own.detail)})" if found.own.detail else ""
        out.print(f"its own check ({escape(found.own.rule)}): {said}{detail}")
    for timed in found.times:
        times = f"{timed.time_us:.2f} us, the reference {timed.baseline_us:.2f} us"
        out.print(f"time at {escape(timed.case)}: {times}: {timed.speedup:.2f} times as fast")
    if len(found.times) > 1 and found.speedup is not None:
        out.print(f"over all of them {found.speedup:.2f} times as fast (geometric mean)")
    if found.kernels:
        out.print(f"kernels: {escape(', '.join(found.kernels))}")
    for flag in found.flags:
        out.print(f"flag: {escape(flag)}")
    for note in found.notes:
        out.print(f"note: {escape(note)}")
