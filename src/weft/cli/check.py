"""``weft check``: is each implementation right? One row each, and every reason in full."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.options import MEMORY, SECONDS, Files, Memory, Names, Seconds, limits
from weft.core.errors import WeftError

if TYPE_CHECKING:
    from rich.table import Table

    from weft.core import Case, Implementation, Operator, Verdict
    from weft.workbench.strangers import Strangers

EPILOG = "Example: weft check softmax --impl triton --impl cuda. Each rule: docs/checking.md"
SANITIZE = "Run under compute-sanitizer: memcheck, racecheck, initcheck or synccheck (a GPU)."
BENCH_SEEDS = 2  # large cases: each seed costs a float64 reference of gigabytes


@dataclass(frozen=True)
class Wanted:
    """What a call asks for; empty lists ask for everything."""

    operators: Sequence[str]
    impls: Sequence[str]
    cases: Sequence[str]
    direction: str | None
    device: str
    all_cases: bool = False


@dataclass(frozen=True)
class Job:
    """The implementations to check at one case in one direction."""

    operator: Operator
    case: Case
    direction: str
    implementations: tuple[Implementation, ...]


def check(
    operators: Annotated[
        Names, typer.Argument(metavar="[OPERATOR]...", help="All when none is named.")
    ] = None,
    impl: Annotated[Names, typer.Option(metavar="NAME", help="Only this one; may repeat.")] = None,
    case: Annotated[Names, typer.Option(metavar="NAME", help="Only this one; may repeat.")] = None,
    direction: Annotated[
        str | None, typer.Option(metavar="forward|backward", help="Only this one.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="Default: the GPU where there is one.")
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Use this seed, not fresh ones; may repeat."),
    ] = None,
    all_cases: Annotated[
        bool, typer.Option("--all-cases", help="The large bench cases too.")
    ] = False,
    files: Files = None,
    seconds: Seconds = SECONDS,
    memory: Memory = MEMORY,
    sanitize: Annotated[str | None, typer.Option(metavar="TOOL", help=SANITIZE)] = None,
    json: Annotated[bool, typer.Option("--json", help="Verdicts as JSON on stdout.")] = False,
) -> None:
    """Check implementations against the float64 reference, at every check and edge case.

    With --with FILE only what the file declares is checked, unless --impl names others too; it runs
    in a process of its own. Exits 1 where one fails, or where nothing could be checked here.
    """
    from weft.workbench.strangers import Strangers, Unreadable

    wanted = Wanted(
        operators or [], impl or [], case or [], direction, _device(device, direction), all_cases
    )
    try:
        with Strangers(files or [], limits(seconds, memory)) as strangers:
            jobs = plan(wanted, strangers)
            if sanitize is not None:
                verdicts = list(_sanitized(jobs, sanitize, strangers, wanted.cases))
            else:
                verdicts = list(_run(jobs, strangers, wanted.device, seed))
    except Unreadable as error:
        _unreadable(str(error), json)
        raise typer.Exit(1) from error
    raise typer.Exit(_answer(verdicts, strangers, json))


def _device(device: str | None, direction: str | None) -> str:
    """The device that is meant; raises :class:`WeftError` for one that is not here."""
    from weft import machine
    from weft.core.operator import DIRECTIONS

    where = machine.known_kind(device)
    if direction not in (None, *DIRECTIONS):
        raise WeftError("--direction", expected=" or ".join(DIRECTIONS), got=direction)
    return where


def _answer(verdicts: Sequence[Verdict], strangers: Strangers, json: bool) -> int:
    """Print what was found; the exit code."""
    from weft.core.record import FAIL, PASS

    failed = any(v.status == FAIL for v in verdicts)
    passed = not failed and any(v.status == PASS for v in verdicts)
    if json:
        data = {"passed": passed, "verdicts": [asdict(v) for v in verdicts]}
        typer.echo(jsonlib.dumps(data))
    else:
        _show(verdicts, strangers)
    if not passed and not failed:
        typer.echo("nothing could be checked here; the reasons are above", err=True)
    return 0 if passed else 1


def _unreadable(why: str, json: bool) -> None:
    if json:
        typer.echo(jsonlib.dumps({"passed": False, "reason": why, "verdicts": []}))
    typer.echo(f"failed: {why}", err=True)


def plan(wanted: Wanted, strangers: Strangers) -> list[Job]:
    """The jobs that a call names; raises :class:`WeftError` for a name that none has."""
    from weft.core import registry

    names = wanted.operators or strangers.operator_names or registry.operator_names()
    chosen = [strangers.operator(n) for n in names]
    ways = {o.name: _ways(o, strangers) for o in chosen}
    _all_known("implementation", wanted.impls, [n for w in ways.values() for n in w])
    _all_known("case", wanted.cases, [c.name for o in chosen for c in o.cases])
    tags = {"check", "edge", "bench"} if wanted.all_cases else {"check", "edge"}
    jobs = []
    for operator in chosen:
        picked = tuple(
            one
            for name, one in ways[operator.name].items()
            if (name in wanted.impls if wanted.impls else True)
            and (strangers.guest(one) or wanted.impls or not strangers.guests)
        )
        for one in operator.cases:
            meant = one.name in wanted.cases if wanted.cases else bool(tags & one.tags)
            if not meant or (wanted.device not in one.devices and not wanted.cases):
                continue
            jobs += [
                Job(operator, one, d, picked)
                for d in operator.directions
                if wanted.direction in (None, d) and picked
            ]
    if not jobs:
        raise WeftError("nothing to check", hint="see what there is: weft ops")
    return jobs


def _ways(operator: Operator, strangers: Strangers) -> dict[str, Implementation]:
    """All implementations of an operator by name: Weft's own, then what the files declare."""
    from weft.core import registry

    found = {}
    if operator.name not in strangers.operators:
        found = {i.name: i for i in registry.implementations(operator.name)}
    return found | {i.name: i for i in strangers.implementations if i.operator == operator.name}


def _all_known(what: str, wanted: Sequence[str], known: list[str]) -> None:
    from weft.core.operator import unknown_name

    for name in wanted:
        if name not in known:
            raise unknown_name(what, name, list(dict.fromkeys(known)))


def _run(
    jobs: Sequence[Job], strangers: Strangers, device: str, seeds: Sequence[int] | None
) -> Iterator[Verdict]:
    """The verdicts as they come, with live progress on stderr where that is a terminal.

    A stranger whose process ended (it hung, it crashed) is not asked again.
    """
    from weft.workbench.check import SEEDS, check_all

    gone: set[tuple[str, str]] = set()
    with _bar(sum(len(j.implementations) for j in jobs)) as advance:
        for job in jobs:
            title = f"{job.operator.name} {job.case.name} {job.direction}"
            verdicts = check_all(
                job.operator,
                [i for i in job.implementations if (i.operator, i.name) not in gone],
                job.case,
                job.direction,
                device,
                seeds=seeds,
                n_seeds=BENCH_SEEDS if job.case.tags == {"bench"} else SEEDS,
                baseline=strangers.baseline(job.operator.name),
                hands_of=strangers.hands,
            )
            for verdict in verdicts:
                advance(title)
                if any(f.check == "channel" for f in verdict.findings):
                    gone.add((verdict.operator, verdict.implementation))
                yield verdict


def _sanitized(
    jobs: Sequence[Job], tool: str, strangers: Strangers, named: Sequence[str]
) -> Iterator[Verdict]:
    """The sanitizer's verdicts, one implementation after another: at the cases that were named,
    else at a few small ones."""
    from weft.workbench import sanitize

    for operator, one, direction in _each(jobs):
        title = f"{operator} {one.name} {direction}"
        guest = strangers.guest(one)
        report = sanitize.run(
            operator,
            one.name,
            named,
            direction,
            tool,
            with_file=guest.source if guest else None,
            progress=partial(_told, title),
        )
        yield report.verdict(operator, one.name, direction)


def _told(title: str, line: str) -> None:
    typer.echo(f"{title}: {line}", err=True)


def _each(jobs: Sequence[Job]) -> Iterator[tuple[str, Implementation, str]]:
    """Operator, implementation and direction of these jobs, each once."""
    seen: set[tuple[str, str, str]] = set()
    for job in jobs:
        for one in job.implementations:
            key = (job.operator.name, one.name, job.direction)
            if key not in seen and job.direction in one.directions:
                seen.add(key)
                yield job.operator.name, one, job.direction


@contextmanager
def _bar(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr where that is a terminal; called with a title for each step done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("check", total=total)

        def advance(title: str) -> None:
            bar.update(task, description=title, advance=1)

        yield advance


def _show(verdicts: Sequence[Verdict], strangers: Strangers) -> None:
    """The table, then each distinct reason, then every failure with the call that repeats it."""
    from rich.console import Console
    from rich.markup import escape

    from weft.core.record import FAIL, UNSUPPORTED

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print(_table(verdicts))
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for v in verdicts:
        if v.status != FAIL and v.reason:
            reasons.setdefault((v.status, v.reason), {})[f"{v.operator} {v.implementation}"] = None
    for (status, reason), who in reasons.items():
        word = "not run" if status == UNSUPPORTED else "note"
        console.print(f"{word}: {escape(reason)} ({', '.join(who)})", soft_wrap=True)
    for v in verdicts:
        if v.status == FAIL:
            where = f"{v.operator} {v.implementation} {v.case} {v.direction}"
            console.print(f"[red]failed[/]: {where}: {escape(v.reason)}", soft_wrap=True)
            console.print(f"  again: {_again(v, strangers)}", soft_wrap=True)


def _table(verdicts: Sequence[Verdict]) -> Table:
    from rich.table import Table

    from weft.core.record import FAIL, PASS, UNSUPPORTED

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("operator", "implementation", "direction"):
        table.add_column(name, no_wrap=True)
    for name in ("passed", "failed", "not run", "worst"):
        table.add_column(name, justify="right")
    table.add_column("of the tolerance, at", no_wrap=True)
    rows: dict[tuple[str, str, str], list[Verdict]] = {}
    for v in verdicts:
        rows.setdefault((v.operator, v.implementation, v.direction), []).append(v)
    for key, group in rows.items():
        count = {s: sum(v.status == s for v in group) for s in (PASS, FAIL, UNSUPPORTED)}
        judged = [v for v in group if v.tolerance_used is not None]
        worst = max(judged, key=lambda v: v.tolerance_used or 0.0, default=None)
        table.add_row(
            *key,
            str(count[PASS]),
            f"[red]{count[FAIL]}[/]" if count[FAIL] else "0",
            str(count[UNSUPPORTED]),
            f"{worst.tolerance_used:.0%}" if worst else "-",
            worst.case if worst else "",
        )
    return table


def _again(v: Verdict, strangers: Strangers) -> str:
    guest = strangers.guests.get((v.operator, v.implementation))
    told = [s for s in v.seeds if f"seed {s}" in v.reason]
    return " ".join(
        [
            f"weft check {v.operator} --impl {v.implementation}",
            *([f"--with {guest.source.path}"] if guest else []),
            f"--case {v.case} --direction {v.direction}",
            *(f"--seed {s}" for s in told or v.seeds[:1]),
        ]
    )
