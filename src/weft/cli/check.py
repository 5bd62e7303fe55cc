"""``weft check``: check the correctness of implementations; one table row for each, and every reason."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import ending, output, progress
from weft.cli.check_rows import InvariantCalls, check_row_options, check_rows
from weft.cli.options import (
    MAX_SEED,
    MEMORY,
    SECONDS,
    Case,
    Csv,
    Device,
    Files,
    Impl,
    Json,
    Memory,
    Names,
    Seconds,
    limits,
)
from weft.core.errors import WeftError

if TYPE_CHECKING:
    from weft.core import Case as CaseOf
    from weft.core import Implementation, Operator, Verdict
    from weft.core.table import Table
    from weft.workbench.calls.selection import BenchPoint
    from weft.workbench.check.sampling import Sample
    from weft.workbench.sandbox.candidates import ExternalCandidates

EPILOG = """Examples:
  weft check softmax --impl triton --impl cuda
  weft check softmax --with mine.py
  weft check softmax --rows

Rules of the check: weft help correct"""
BENCH_SEEDS = 2  # large cases: each seed costs a float64 reference of gigabytes
# Expected seconds of a sample of an operator's checks. Two processes on two cores take half of the first;
# with what an estimate is off by, that is a minute.
SAMPLE_SECONDS = {"processes": 80.0, "one process": 45.0}
PARALLEL_SECONDS = 15.0  # expected; a process imports torch for some seconds before its first check
SHOWN_NAMES = 4  # names of implementations in a note; the others are counted

BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="With --rows: compare the calls with batch_invariant=True (of --impl, or as dispatched)",
    ),
]


def check(
    operators: Annotated[Names, typer.Argument(metavar="OPERATOR", help="Operators [default: all]")] = None,
    impl: Impl = None,
    case: Case = None,
    direction: Annotated[
        str | None, typer.Option(metavar="forward|backward", help="Direction to check [default: both]")
    ] = None,
    device: Device = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            min=0,
            max=MAX_SEED,
            help="Random seed of the inputs; the first also chooses the sample (repeatable) [default: new "
            "seeds in each run]",
        ),
    ] = None,
    all_cases: Annotated[
        bool,
        typer.Option("--all-cases", help="Check all cases instead of a sample, the large bench cases too"),
    ] = False,
    rows: Annotated[
        bool,
        typer.Option(
            "--rows",
            help="Compare bits instead: does a row depend on the number of rows beside it, or on its place?",
        ),
    ] = False,
    invariant: BatchInvariant = False,
    files: Files = None,
    seconds: Seconds = SECONDS,
    memory: Memory = MEMORY,
    sanitize: Annotated[
        str | None,
        typer.Option(
            metavar="TOOL",
            help="Run under compute-sanitizer (GPU only): memcheck, racecheck, initcheck or synccheck",
        ),
    ] = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Check implementations against the float64 reference, in about a minute for each operator.

    Where all check and edge cases take longer, a random sample of them is checked: every rule, kind of
    edge and dtype of each implementation. A case that is named is always checked.

    With --with FILE only the implementations that the file declares are checked, unless --impl
    names others. Your code runs in a worker process.

    With --rows nothing is compared with the reference. A batch and parts of it are computed, and each row
    must have the same bits (batch invariance).

    Exit 0: at least one case ran and none failed; 1: one failed, or none could run here; 2: invalid
    arguments.
    """
    output.only_one_format(json=as_json, csv=as_csv)
    from weft.machine.query import known_kind
    from weft.workbench.sandbox.candidates import ExternalCandidates, UnreadableFile

    check_row_options(rows, invariant, all_cases or bool(sanitize), bool(files))
    kind, watch = known_kind(device), ending.Stopwatch()
    chosen = (operators or [], impl or [], case or [])
    try:
        with ExternalCandidates(files or [], limits(seconds, memory)) as candidates:
            points = _select(candidates, *chosen, direction, kind, all_cases, rows)
            if rows:
                call = InvariantCalls(dispatched=not impl) if invariant else None
                first = seed[0] if seed else None
                code = check_rows(points, candidates, kind, first, call, as_json=as_json, as_csv=as_csv)
            else:
                sampled = not (all_cases or case or sanitize)
                plan = _plan(points, candidates, kind, seed or [], sampled=sampled)
                code = _run(plan, candidates, kind, seed, sanitize, case or [], watch, as_json, as_csv)
    except UnreadableFile as error:
        code = _print_unreadable(str(error), as_json)
    raise typer.Exit(code)


def _print_unreadable(reason: str, as_json: bool) -> int:
    """Print why a candidate's file could not be loaded; return the exit code."""
    if as_json:
        print(json.dumps({"passed": False, "reason": reason, "verdicts": []}))
    output.log(f"failed: {reason}")
    return 1


def _run(
    plan: _Plan,
    candidates: ExternalCandidates,
    device: str,
    seeds: Sequence[int] | None,
    sanitize: str | None,
    cases: Sequence[str],
    watch: ending.Stopwatch,
    as_json: bool,
    as_csv: bool,
) -> int:
    """Run the planned checks, print their verdicts, and return the exit code."""
    verdicts: list[Verdict] = []
    with progress.stoppable() as stop, progress.Progress() as status:
        if sanitize is not None:
            total = len(_without_cases(plan.points))
            run = _sanitize(plan.points, sanitize, candidates, cases)
        else:
            total = sum(len(p.implementations) for p in plan.points)
            run = _check(plan, candidates, device, seeds, status)
        with closing(run):  # also at Ctrl-C: the processes end before the verdicts are shown
            for verdict in run:
                verdicts.append(verdict)
                status.advance()
    verdicts = plan.in_order(verdicts)
    if not as_json:
        verdicts = plan.by_implementation(verdicts)
    code = _print(verdicts, candidates, as_json, as_csv, stop, plan.sample)
    line = _verdict_line(verdicts, total, watch, stop, plan.sample)
    ending.print_verdict(line, to_stderr=as_json or as_csv)
    return code


def _print(
    verdicts: Sequence[Verdict],
    candidates: ExternalCandidates,
    as_json: bool,
    as_csv: bool,
    stop: progress.StopRequest,
    sample: Sample | None,
) -> int:
    """Print the verdicts; return the exit code."""
    from weft.core.record import FAIL, PASS

    failed = any(v.status == FAIL for v in verdicts)
    passed = not failed and any(v.status == PASS for v in verdicts)
    if as_json:
        report = {"passed": passed and not stop, "verdicts": [asdict(v) for v in verdicts]}
        numbers = {"seed": sample.seed, "checks": sample.checks, "of": sample.total} if sample else None
        print(json.dumps(report | {"sample": numbers} | stop.to_json()))
    elif as_csv:
        output.print_csv(table_by_direction(verdicts))
    elif verdicts:
        show(verdicts, candidates)
    return stop.exit_code or (0 if passed else 1)


def _verdict_line(
    verdicts: Sequence[Verdict],
    total: int,
    watch: ending.Stopwatch,
    stop: progress.StopRequest,
    sample: Sample | None,
) -> str:
    """Return the last line: counts, seconds, and the reasons of the checks that did not run."""
    from weft.core.record import FAIL, PASS, UNSUPPORTED

    passed, failed = (sum(v.status == s for v in verdicts) for s in (PASS, FAIL))
    not_run = [(v.implementation.partition("/")[0], v.reason) for v in verdicts if v.status == UNSUPPORTED]
    operators = ending.names_text([v.operator for v in verdicts], "operator")
    implementations = {(v.operator, v.implementation) for v in verdicts if v.status != UNSUPPORTED}
    checks = f"{ending.count_text(passed + failed, 'check')} of {operators}"
    checks += f", {ending.count_text(len(implementations), 'implementation')} ({watch})"
    if stop:
        text = f"stopped after {len(verdicts)} of {ending.count_text(total, 'check')}"
        text += f": {passed} passed, {failed} failed ({watch})"
    elif failed:
        text = f"failed: {failed} of {checks}"
    elif passed:
        text = f"passed: {passed} of {checks}"
    else:
        text = f"nothing could be checked on this machine ({watch})"
    if sample:
        text += f"; {_sample_text(sample)}"
    return text + ending.not_run_text(not_run)


def _sample_text(sample: Sample) -> str:
    numbers = f"{sample.checks} of {ending.count_text(sample.total, 'check')}"
    return f"a sample of {numbers} (repeat: --seed {sample.seed}, all: --all-cases)"


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Points to check, the sample that they are (None if they are all), and how.

    ``seconds`` are the expected ones of each check, in the order of the points and their implementations.
    """

    points: tuple[BenchPoint, ...]
    sample: Sample | None
    seconds: tuple[float, ...]
    processes: int
    implementations: tuple[tuple[str, str], ...]  # all, by the names of operator and implementation

    def in_order(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Return verdicts in the order of the points: several processes give them in another one."""
        names = [(p.operator.name, p.case.name, p.direction) for p in self.points]
        numbers = {name: number for number, name in enumerate(names)}
        return sorted(verdicts, key=lambda v: numbers.get((v.operator, v.case, v.direction), 0))

    def by_implementation(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Return verdicts in the order of the operators and their implementations, as all points have it."""
        numbers = {name: number for number, name in enumerate(self.implementations)}
        return sorted(verdicts, key=lambda v: numbers.get((v.operator, v.implementation), 0))


def _plan(
    points: Sequence[BenchPoint],
    candidates: ExternalCandidates,
    device: str,
    seeds: Sequence[int],
    *,
    sampled: bool,
) -> _Plan:
    """Return how the points are checked; with ``sampled``, a part of them if all take too long."""
    from weft.workbench.calls.seeds import fresh_seeds
    from weft.workbench.check.parallel import default_processes
    from weft.workbench.check.sampling import sample
    from weft.workbench.durations import expected_check_cost

    # External code has one worker process, and a GPU is shared: several checks there would wait for each
    # other and exhaust its memory.
    in_one = device == "cuda" or bool(candidates.workers)
    # The same budget for any number of processes, so that a seed repeats the sample on another machine.
    budget = SAMPLE_SECONDS["one process" if in_one else "processes"] if sampled else math.inf
    seed = seeds[0] if seeds else fresh_seeds(1)[0]
    chosen = sample(points, expected_check_cost, budget=budget, seed=seed)
    return _Plan(
        points=chosen.points,
        sample=None if chosen.is_all else chosen,
        seconds=chosen.seconds,
        implementations=tuple(
            dict.fromkeys((p.operator.name, i.name) for p in points for i in p.implementations)
        ),
        processes=1 if in_one or sum(chosen.seconds) < PARALLEL_SECONDS else default_processes(),
    )


def _select(
    candidates: ExternalCandidates,
    operators: Sequence[str],
    impls: Sequence[str],
    cases: Sequence[str],
    direction: str | None,
    device: str,
    all_cases: bool,
    rows: bool,
) -> list[BenchPoint]:
    """Return the selected points; raise :class:`WeftError` for an unknown name."""
    from weft.core import registry
    from weft.workbench.calls.selection import select
    from weft.workbench.check import batch_invariance

    tags = {"check", "edge", "bench"} if all_cases else {"check", "edge"}

    def default_cases(operator: Operator) -> Sequence[CaseOf]:
        if rows:
            suitable = batch_invariance.default_cases(operator, device)
            # An operator that was named is refused by a case of it, and not left out.
            return suitable or (operator.cases[:1] if operators else ())
        return [c for c in operator.cases if tags & c.tags and device in c.devices]

    names = operators or candidates.operator_names or registry.operator_names()
    selection = select(
        [candidates.operator(n) for n in names],
        default_cases,
        device=device,
        impls=impls,
        cases=cases,
        directions=[direction] if direction else (),
        external=candidates.implementations,
    )
    points = list(selection.points())
    if not points:
        raise WeftError("nothing to check", hint="list operators and implementations with weft ops")
    return points


def _check(
    plan: _Plan,
    candidates: ExternalCandidates,
    device: str,
    seeds: Sequence[int] | None,
    status: progress.Progress,
) -> Generator[Verdict]:
    """Yield the verdicts one by one, in the order in which they are ready."""
    if sample := plan.sample:
        status.keep(_sample_text(sample))
    each = [s / plan.processes for s in plan.seconds]
    status.expect(each, ending.count_text(len(each), "check"))
    if plan.processes == 1:
        yield from _check_here(plan.points, candidates, device, seeds, status)
    else:
        yield from _check_in_processes(plan, device, seeds, status)


def _check_in_processes(
    plan: _Plan, device: str, seeds: Sequence[int] | None, status: progress.Progress
) -> Generator[Verdict]:
    from weft.workbench.check.check import SEEDS
    from weft.workbench.check.parallel import CheckTask, check_in_processes

    status(f"starting {plan.processes} processes")
    tasks = [
        CheckTask(
            operator=p.operator.name,
            case=p.case.name,
            direction=p.direction,
            device=device,
            implementations=tuple(i.name for i in p.implementations),
            seeds=tuple(seeds or ()),
            n_seeds=BENCH_SEEDS if p.case.tags == {"bench"} else SEEDS,
        )
        for p in sorted(plan.points, key=_form)
    ]
    with closing(check_in_processes(tasks, plan.processes)) as run:
        for verdict in run:
            yield verdict
            status(f"{verdict.operator} {verdict.case} {verdict.direction} {verdict.implementation}")


def _form(point: BenchPoint) -> tuple[object, ...]:
    """Return what the code that a compiler makes for a point depends on; alike points are sorted together."""
    forms = [(i.dtype, i.layout, len(i.shape)) for i in point.case.inputs]
    return (point.operator.name, point.direction, forms)


def _check_here(
    points: Sequence[BenchPoint],
    candidates: ExternalCandidates,
    device: str,
    seeds: Sequence[int] | None,
    status: progress.Progress,
) -> Generator[Verdict]:
    """Yield the verdicts of checks in this process and in the candidates' worker processes.

    A candidate whose worker process ended (a hang or a crash) is skipped at all further points.
    """
    from weft.workbench.check.check import SEEDS, check_all

    ended: set[tuple[str, str]] = set()
    for point in points:
        implementations = [i for i in point.implementations if (i.operator, i.name) not in ended]
        status(point.title)
        verdicts = check_all(
            point.operator,
            implementations,
            point.case,
            point.direction,
            device,
            seeds=seeds,
            n_seeds=BENCH_SEEDS if point.case.tags == {"bench"} else SEEDS,
            baseline=candidates.baseline(point.operator.name),
            factory_of=candidates.caller_factory,
        )
        # With the next implementation, which is checked while the status shows its name.
        for verdict, following in zip_longest(verdicts, implementations[1:]):
            if any(f.check == "channel" for f in verdict.findings):
                ended.add((verdict.operator, verdict.implementation))
            yield verdict
            status(f"{point.title} {following.name}" if following else point.title)


def _sanitize(
    points: Sequence[BenchPoint], tool: str, candidates: ExternalCandidates, cases: Sequence[str]
) -> Generator[Verdict]:
    """Yield the sanitizer's verdict on each implementation, at ``cases`` or else at a few small ones."""
    from weft.workbench.sanitizer import sanitize

    for operator, implementation, direction in _without_cases(points):

        def log_line(line: str, title: str = f"{operator} {implementation.name} {direction}") -> None:
            output.log(f"{title}: {line}")

        worker = candidates.worker(implementation)
        report = sanitize.run(
            operator,
            implementation.name,
            cases,
            direction,
            tool,
            with_file=worker.source if worker else None,
            log=log_line,
        )
        yield report.verdict(operator, implementation.name, direction)


def _without_cases(points: Sequence[BenchPoint]) -> list[tuple[str, Implementation, str]]:
    """Return operator, implementation and direction of the points, without repetitions."""
    runs = {
        (p.operator.name, i.name, p.direction): (p.operator.name, i, p.direction)
        for p in points
        for i in p.implementations
        if p.direction in i.directions
    }
    return list(runs.values())


def show(verdicts: Sequence[Verdict], candidates: ExternalCandidates) -> None:
    """Print the table, the reasons in groups, and every failure with the command that repeats it."""
    from weft.core.record import FAIL

    summary = summary_table(verdicts)
    if summary.rows:
        output.show_table(summary, options=("csv", "json"))
    output.show_notes(reasons(verdicts), style="")
    _show_yardstick_faults(verdicts, candidates)
    for v in verdicts:
        if v.status == FAIL and not _is_yardstick_fault(v):
            title = f"{v.operator} {v.implementation} {v.case} {v.direction}"
            output.show_notes([f"failed: {title}: {v.reason}"], style="red")
            output.show_command(f"  rerun: {_rerun_command(v, candidates)}")


def _is_yardstick_fault(v: Verdict) -> bool:
    return any(f.check == "yardstick" for f in v.findings)


def _show_yardstick_faults(verdicts: Sequence[Verdict], candidates: ExternalCandidates) -> None:
    """Print an operator's wrong baseline once, in place of the same failure of each implementation."""
    groups: dict[str, list[Verdict]] = {}
    for v in verdicts:
        if _is_yardstick_fault(v):
            groups.setdefault(v.operator, []).append(v)
    for operator, group in groups.items():
        names = ", ".join(dict.fromkeys(v.implementation for v in group))
        points = len({(v.case, v.direction) for v in group})
        dependents = f"{names} cannot be judged at {points} point{'s'[: points != 1]} (case and direction)"
        output.show_notes([f"failed: {operator}: {group[0].reason}; until then {dependents}"], style="red")
        output.show_command(f"  rerun: {_rerun_command(group[0], candidates)}")


def summary_table(verdicts: Sequence[Verdict]) -> Table:
    """Return a row for each implementation that ran at some case, over both directions."""
    from weft.core.record import UNSUPPORTED

    rows: dict[tuple[str, ...], list[Verdict]] = {}
    for v in verdicts:
        rows.setdefault((v.operator, v.implementation), []).append(v)
    return _table({k: r for k, r in rows.items() if any(v.status != UNSUPPORTED for v in r)})


def table_by_direction(verdicts: Sequence[Verdict]) -> Table:
    """Return a row for each operator, implementation and direction, also for those that did not run."""
    rows: dict[tuple[str, ...], list[Verdict]] = {}
    for v in verdicts:
        rows.setdefault((v.operator, v.implementation, v.direction), []).append(v)
    return _table(rows)


def _table(rows: Mapping[tuple[str, ...], Sequence[Verdict]]) -> Table:
    """Return a table with the verdicts counted; a key has operator, implementation and perhaps direction."""
    from weft.core.record import FAIL
    from weft.core.table import Column, Table

    directions = any(len(key) == 3 for key in rows)
    columns = (
        Column("operator"),
        Column("implementation"),
        *([Column("direction")] if directions else []),
        Column("verdict"),
        Column("passed", numeric=True),
        Column("failed", numeric=True),
        Column("not run", numeric=True),
        Column("of tolerance", 1, numeric=True, unit="%"),
        Column("at case", 2),
    )
    styles = ["red" if any(v.status == FAIL for v in group) else "" for group in rows.values()]
    return Table(columns, [(*key, *_summary(group)) for key, group in rows.items()], styles=styles)


def _summary(verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    """Return the verdict in one word, the three counts, the worst error and its case."""
    from weft.core.record import FAIL, PASS, UNSUPPORTED
    from weft.core.table import Number

    counts = {s: sum(v.status == s for v in verdicts) for s in (PASS, FAIL, UNSUPPORTED)}
    verdict = "FAIL" if counts[FAIL] else "pass" if counts[PASS] else "not run"
    compared = [v for v in verdicts if v.tolerance_used is not None]
    worst = max(compared, key=lambda v: v.tolerance_used or 0.0, default=None)
    percent = 100 * (worst.tolerance_used or 0.0) if worst else None
    return (
        verdict,
        *(Number(str(n), n) for n in counts.values()),
        Number("-" if percent is None else f"{percent:.0f} %", percent),
        worst.case if worst else "",
    )


def reasons(verdicts: Sequence[Verdict]) -> list[str]:
    """Return each reason of what did not run, then each note, with its cases and implementations.

    Reasons that differ only in the implementation's own name or in numbers are one.
    """
    from weft.core.record import FAIL, UNSUPPORTED
    from weft.core.table import group_notes

    groups: dict[tuple[str, str], list[Verdict]] = {}
    for v in verdicts:
        if v.status != FAIL and v.reason:
            label = "not run" if v.status == UNSUPPORTED else "note"
            reason = v.reason.removeprefix(f"{v.implementation} ")
            groups.setdefault((label, reason), []).append(v)
    lines = []
    for label in ("not run", "note"):
        for text, originals in group_notes(r for key, r in groups if key == label).items():
            group = [v for original in originals for v in groups[label, original]]
            number = f"{len(group)} case{'s'[: len(group) != 1]}"
            lines.append(f"{label}: {text} ({number} of {_names(group)})")
    return lines


def _names(verdicts: Sequence[Verdict]) -> str:
    """Name the first implementations of the verdicts, with each operator once, and count the others."""
    pairs = list(dict.fromkeys((v.operator, v.implementation) for v in verdicts))
    # One name more takes no more space than its count.
    shown = pairs if len(pairs) <= SHOWN_NAMES + 1 else pairs[:SHOWN_NAMES]
    names: dict[str, list[str]] = {}
    for operator, implementation in shown:
        names.setdefault(operator, []).append(implementation)
    text = "; ".join(f"{operator} {', '.join(of)}" for operator, of in names.items())
    return text if shown is pairs else f"{text} and {len(pairs) - len(shown)} more"


def _rerun_command(v: Verdict, candidates: ExternalCandidates) -> str:
    """Return the command that repeats a failure, with the seeds that its reason names, else the first."""
    worker = candidates.workers.get((v.operator, v.implementation))
    seeds = [s for s in v.seeds if f"seed {s}" in v.reason] or v.seeds[:1]
    return " ".join(
        [
            f"weft check {v.operator} --impl {v.implementation}",
            *([f"--with {worker.source.path}"] if worker else []),
            f"--case {v.case} --direction {v.direction}",
            *(f"--seed {s}" for s in seeds),
        ]
    )
