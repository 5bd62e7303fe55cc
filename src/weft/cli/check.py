"""``weft check``: is each implementation right? One row each, and every reason in full."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from weft.core import Case, Implementation, Operator, Verdict, WeftError, registry
from weft.core.operator import DIRECTIONS, unknown_name
from weft.core.record import FAIL, PASS, UNSUPPORTED

if TYPE_CHECKING:
    from rich.table import Table

EPILOG = "Example: weft check softmax --impl triton --impl cuda. Each rule: docs/checking.md"
BENCH_SEEDS = 2  # large cases: each seed costs a float64 reference of gigabytes


@dataclass(frozen=True)
class Job:
    """The implementations to check at one case in one direction."""

    operator: Operator
    case: Case
    direction: str
    implementations: tuple[Implementation, ...]


def check(
    operators: Annotated[
        list[str] | None, typer.Argument(metavar="[OPERATOR]...", help="All when none is named.")
    ] = None,
    impl: Annotated[
        list[str] | None, typer.Option("--impl", metavar="NAME", help="Only this one; may repeat.")
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option("--case", metavar="NAME", help="Only this one; may repeat.")
    ] = None,
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
    json: Annotated[bool, typer.Option("--json", help="Verdicts as JSON on stdout.")] = False,
) -> None:
    """Check implementations against the float64 reference, at every check and edge case.

    Exits 1 where one fails, or where nothing could be checked here.
    """
    from weft import machine

    where = device or machine.default_device()
    if where not in ("cpu", "cuda"):
        raise WeftError("--device", expected="cpu or cuda", got=where)
    if where == "cuda" and not machine.has_gpu():
        raise WeftError("--device cuda", got="no NVIDIA GPU is visible", hint="try --device cpu")
    if direction not in (None, *DIRECTIONS):
        raise WeftError("--direction", expected=" or ".join(DIRECTIONS), got=direction)
    jobs = plan(operators or [], impl or [], case or [], direction, where, all_cases)
    verdicts = list(_run(jobs, where, seed))
    failed = any(v.status == FAIL for v in verdicts)
    passed = not failed and any(v.status == PASS for v in verdicts)
    if json:
        data = {"passed": passed, "verdicts": [asdict(v) for v in verdicts]}
        typer.echo(jsonlib.dumps(data))
    else:
        _show(verdicts)
    if not passed and not failed:
        typer.echo("nothing could be checked here; the reasons are above", err=True)
    raise typer.Exit(0 if passed else 1)


def plan(
    operators: Sequence[str],
    impls: Sequence[str],
    cases: Sequence[str],
    direction: str | None,
    device: str,
    all_cases: bool = False,
) -> list[Job]:
    """The jobs that a call names; raises :class:`WeftError` for a name that none has."""
    chosen = [registry.operator(n) for n in operators or registry.operator_names()]
    _all_known("implementation", impls, [n for o in chosen for n in _names(o)])
    _all_known("case", cases, [c.name for o in chosen for c in o.cases])
    tags = {"check", "edge", "bench"} if all_cases else {"check", "edge"}
    jobs = []
    for operator in chosen:
        ways = tuple(
            registry.implementation(operator.name, n)
            for n in _names(operator)
            if n in impls or not impls
        )
        for one in operator.cases:
            wanted = one.name in cases if cases else bool(tags & one.tags)
            if not wanted or (device not in one.devices and not cases):
                continue
            jobs += [
                Job(operator, one, d, ways)
                for d in operator.directions
                if direction in (None, d) and ways
            ]
    if not jobs:
        raise WeftError("nothing to check", hint="see what there is: weft ops")
    return jobs


def _names(operator: Operator) -> list[str]:
    return registry.implementation_names(operator.name)


def _all_known(what: str, wanted: Sequence[str], known: list[str]) -> None:
    for name in wanted:
        if name not in known:
            raise unknown_name(what, name, list(dict.fromkeys(known)))


def _run(jobs: Sequence[Job], device: str, seeds: Sequence[int] | None) -> Iterator[Verdict]:
    """The verdicts as they come, with live progress on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from weft.workbench.check import SEEDS, check_all

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("check", total=sum(len(j.implementations) for j in jobs))
        for job in jobs:
            bar.update(task, description=f"{job.operator.name} {job.case.name} {job.direction}")
            verdicts = check_all(
                job.operator,
                job.implementations,
                job.case,
                job.direction,
                device,
                seeds=seeds,
                n_seeds=BENCH_SEEDS if job.case.tags == {"bench"} else SEEDS,
            )
            for verdict in verdicts:
                bar.advance(task)
                yield verdict


def _show(verdicts: Sequence[Verdict]) -> None:
    """The table, then each distinct reason, then every failure with the call that repeats it."""
    from rich.console import Console
    from rich.markup import escape

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
            console.print(f"  again: {_again(v)}", soft_wrap=True)


def _table(verdicts: Sequence[Verdict]) -> Table:
    from rich.table import Table

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


def _again(v: Verdict) -> str:
    seeds = [s for s in v.seeds if f"seed {s}" in v.reason] or list(v.seeds)
    return (
        f"weft check {v.operator} --impl {v.implementation} --case {v.case} "
        f"--direction {v.direction} " + " ".join(f"--seed {s}" for s in seeds)
    )
