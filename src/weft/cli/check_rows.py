"""``weft check --rows``: batch invariance, as a table with one row for each implementation and direction."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from weft.cli import ending, output, progress
from weft.core.errors import WeftError

if TYPE_CHECKING:
    from weft.core import Implementation
    from weft.core.table import Table
    from weft.workbench.calls.selection import BenchPoint
    from weft.workbench.check.batch_invariance import RowsVerdict
    from weft.workbench.sandbox.caller import WorkerProcess
    from weft.workbench.sandbox.candidates import ExternalCandidates

INTERPRETED = "On a CPU, Triton and numba are interpreted: a kernel on a GPU may add in another order."


@dataclass(frozen=True)
class InvariantCalls:
    """Compare calls with ``batch_invariant=True``; ``dispatched``: of no named implementation."""

    dispatched: bool


def check_row_options(rows: bool, invariant: bool, others: bool, files: bool) -> None:
    """Raise :class:`WeftError` for options that do not go together.

    ``others``: --all-cases or --sanitize is given; ``files``: --with is.
    """
    if invariant and (files or not rows):
        got = "it with --with" if files else "it without --rows"
        raise WeftError("--batch-invariant", expected="--rows with it, and no --with", got=got)
    if rows and others:
        raise WeftError("--rows", expected="no --all-cases and no --sanitize with it", got="both")


def check_rows(
    points: Sequence[BenchPoint],
    candidates: ExternalCandidates,
    device: str,
    seed: int | None,
    invariant: InvariantCalls | None,
    *,
    as_json: bool,
    as_csv: bool,
) -> int:
    """Compare the rows at these points, print the result, and return the exit code.

    With ``invariant`` the rows are those of calls that ask for batch invariance. Raises
    :class:`WeftError` for an operator or case without independent rows.
    """
    from weft.workbench.calls.seeds import fresh_seeds
    from weft.workbench.check.batch_invariance import INTERPRETED_ROWS

    _refuse_unsuitable(points)
    watch = ending.Stopwatch()
    chosen = fresh_seeds(1)[0] if seed is None else seed
    verdicts: list[RowsVerdict] = []
    with (
        progress.stoppable() as stop,
        progress.Progress() as status,
        closing(_compare(points, candidates, device, chosen, status, invariant)) as run,
    ):
        for verdict in run:  # one by one: what was compared before Ctrl-C is shown
            verdicts.append(verdict)
    compared = [v for v in verdicts if not v.reason]
    passed = bool(compared) and all(v.is_invariant for v in compared)
    if as_json:
        report = {"passed": passed and not stop, "seed": chosen, "verdicts": [asdict(v) for v in verdicts]}
        print(json.dumps(report | stop.to_json()))
    elif as_csv:
        output.print_csv(table(verdicts))
    elif compared:
        output.show_table(table(compared), options=("csv", "json"))
        if device == "cpu" and any(v.rows <= INTERPRETED_ROWS for v in compared):
            output.show_notes([INTERPRETED])
    ending.print_verdict(_verdict_line(verdicts, watch, stop), to_stderr=as_json or as_csv)
    return stop.exit_code or (0 if passed else 1)


def _refuse_unsuitable(points: Sequence[BenchPoint]) -> None:
    """Raise :class:`WeftError` for the first operator or case without independent rows."""
    from weft.workbench.check.batch_invariance import unsuitable

    for point in points:
        if reason := unsuitable(point.operator, point.case):
            raise WeftError(
                f"--rows: {point.operator.name} {point.case.name}",
                expected="contiguous inputs with rows that do not depend on each other",
                got=reason,
                hint="an operator of your own names such inputs: Operator(rows=('x',), ...)",
            )


def _compare(
    points: Sequence[BenchPoint],
    candidates: ExternalCandidates,
    device: str,
    seed: int,
    status: progress.Progress,
    invariant: InvariantCalls | None,
) -> Generator[RowsVerdict]:
    from weft.workbench.check.batch_invariance import compare_invariant_rows, compare_rows

    for point in points:
        if invariant and invariant.dispatched:
            status(f"{point.title} dispatched")
            yield compare_invariant_rows(point.operator, None, point.case, point.direction, device, seed)
            status.advance()
            continue
        for one in point.implementations:
            if point.direction not in one.directions:
                continue
            status(f"{point.title} {one.name}")
            worker = candidates.worker(one)
            if invariant:
                name = one.name
                yield compare_invariant_rows(point.operator, name, point.case, point.direction, device, seed)
            elif worker is None:
                yield compare_rows(point.operator, one, point.case, point.direction, device, seed)
            else:
                yield _compare_in_worker(worker, point, one, device, seed)
            status.advance()


def _compare_in_worker(
    worker: WorkerProcess, point: BenchPoint, one: Implementation, device: str, seed: int
) -> RowsVerdict:
    from weft.workbench.calls.errors import SandboxDied, WorkerError
    from weft.workbench.check.batch_invariance import RowsVerdict
    from weft.workbench.sandbox.process import FORGED

    names = (one.operator, one.name, point.case.name, point.direction)
    keys = ("operator", "implementation", "case", "direction")
    payload = dict(zip(keys, names, strict=True)) | {"device": device, "seed": seed}
    try:
        worker.restart_if_broken()
        verdict = RowsVerdict.from_json(payload | worker.request("compare_rows", payload).payload)
    except (SandboxDied, WorkerError) as error:
        why = error.reason if isinstance(error, SandboxDied) else f"raised {error}"
    except (KeyError, TypeError, ValueError):
        why = FORGED
    else:
        return verdict
    operator, implementation, case, direction = names
    return RowsVerdict(
        operator=operator,
        implementation=implementation,
        case=case,
        direction=direction,
        reason=f"its process {why}",
    )


def table(verdicts: Sequence[RowsVerdict]) -> Table:
    """Return a row for each implementation, case and direction."""
    from weft.core.table import Column, Number, Table

    columns = (
        Column("operator"),
        Column("implementation"),
        Column("direction"),
        Column("invariant"),
        Column("rows", 1, numeric=True),
        Column("differ", numeric=True, unit="%"),
        Column("smallest part", 1, numeric=True),
        Column("case", 2),
    )
    rows, styles = [], []
    for v in verdicts:
        share = 100 * v.differing / v.compared if v.compared else None
        rows.append(
            (
                v.operator,
                v.implementation,
                v.direction,
                "not run" if v.reason else "yes" if v.is_invariant else "NO",
                Number(str(v.rows), v.rows),
                Number("-" if share is None else _percent(share), share),
                Number("-" if v.smallest is None else str(v.smallest), v.smallest),
                v.case,
            )
        )
        styles.append("red" if v.differing else "")
    return Table(columns, rows, styles=styles)


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{share:.2g} %" if share >= 0.01 else "<0.01 %"


def _verdict_line(
    verdicts: Sequence[RowsVerdict], watch: ending.Stopwatch, stop: progress.StopRequest
) -> str:
    compared = [v for v in verdicts if not v.reason]
    invariant = sum(v.is_invariant for v in compared)
    operators = ending.names_text([v.operator for v in verdicts], "operator")
    count = ending.count_text(len(compared), "comparison")
    if stop:
        text = f"stopped: {invariant} of {count} of {operators} invariant ({watch})"
    elif not compared:
        text = f"nothing could be compared on this machine ({watch})"
    elif invariant == len(compared):
        text = f"invariant: {invariant} of {count} of {operators} ({watch})"
    else:
        text = f"not invariant: {len(compared) - invariant} of {count} of {operators} ({watch})"
    not_run = [(v.implementation.partition("/")[0], v.reason) for v in verdicts if v.reason]
    return text + ending.not_run_text(not_run)
