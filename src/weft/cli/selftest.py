"""``weft selftest``: the judge is judged, by kernels that must not pass and honest ones too."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from weft.workbench.mutants.mutant import Mutant
    from weft.workbench.selftest import Summary
    from weft.workbench.selftest_judge import Judged

EPILOG = "What is planted, and what kills it: docs/selftest.md"
Names = list[str] | None


def selftest(
    operator: Annotated[
        Names, typer.Option("--operator", help="Mutants of this operator alone (repeatable).")
    ] = None,
    row: Annotated[
        Names, typer.Option("--row", help="One way of being wrong, W05 (repeatable).")
    ] = None,
    without: Annotated[
        Names,
        typer.Option("--without", help="Leave a check, or a kind of cases, out (repeatable)."),
    ] = None,
    only: Annotated[
        Names, typer.Option("--mutant", help="One mutant by its id (repeatable).")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cuda or cpu; by default a GPU if there is one.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", help="How many are checked at once.")] = 2,
    as_list: Annotated[
        bool, typer.Option("--list", help="Name what is planted, run none.")
    ] = False,
    honest: Annotated[
        int, typer.Option("--honest", metavar="N", help="N runs of Weft's own kernels instead.")
    ] = 0,
    save: Annotated[
        Path | None, typer.Option("--save", help="Write the JSON to this file too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Judge kernels that are known to be wrong, or to cheat, and honest ones: who kills what?

    Each is judged as a stranger's kernel is. With --without CHECK: who survives then?

    Exit 0: all that ran were killed and every control passed; 1: not so; 2: the call was wrong.

    Example: weft selftest --operator softmax --without guards
    """
    from weft.machine import fingerprint
    from weft.machine.query import known_kind
    from weft.workbench import selftest as mutants_judged

    kind = known_kind(device)
    if honest:
        _honest(honest, kind, as_json, save)
        return
    planted = mutants_judged.select(operator or (), row or (), only or ())
    if as_list:
        _list(planted, as_json)
        return
    found = mutants_judged.run(planted, kind, without=without or (), jobs=jobs, on_done=_progress)
    said = found.to_json() | {"machine": fingerprint(kind)}
    if save is not None:
        save.write_text(json.dumps(said, indent=1) + "\n")
    if as_json:
        print(json.dumps(said))
    else:
        _show(found, said)
    if not found.good:
        raise typer.Exit(1)


def _progress(found: Judged, done: int, total: int) -> None:
    by = f" by {found.check} at {found.case or 'its process'}" if found.check else ""
    passed = found.status == "survived" and found.id.startswith("H")  # an honest control is to
    status = "passed" if passed else found.status
    line = f"[{done}/{total}] {found.id}: {status}{by} ({found.seconds:.1f} s)"
    print(line, file=sys.stderr, flush=True)


def _honest(count: int, device: str, as_json: bool, save: Path | None) -> None:
    from weft.machine import fingerprint
    from weft.workbench import selftest_honest

    def progress(line: str, done: int, total: int) -> None:
        print(f"[{done}/{total}] {line}", file=sys.stderr, flush=True)

    found = selftest_honest.run(count, device, progress)
    said = found.to_json() | {"machine": fingerprint(device)}
    if save is not None:
        save.write_text(json.dumps(said, indent=1) + "\n")
    if as_json:
        print(json.dumps(said))
    else:
        for v in found.alarms:
            print(
                f"false alarm: {v.operator} {v.implementation} {v.case} {v.direction}: {v.reason}"
            )
        told = f"{found.runs} honest runs, {found.verdicts} verdicts"
        print(f"{told}: {len(found.alarms)} false alarms")
    if found.alarms:
        raise typer.Exit(1)


def _list(planted: list[Mutant], as_json: bool) -> None:
    if as_json:
        told = [
            {
                "id": m.id,
                "title": m.title,
                "killed_by": list(m.killed_by),
                "only": m.only,
                "phase": m.phase,
                "devices": list(m.devices),
                "honest": m.honest,
            }
            for m in planted
        ]
        print(json.dumps(told))
        return
    for m in planted:
        by = "must pass" if m.honest else f"killed by {', '.join(m.killed_by)}"
        print(f"{m.id}: {m.title} ({by})")


def _show(found: Summary, said: dict[str, Any]) -> None:
    """The kill rates, then who survived, who was killed by another, and who was not run."""
    from weft.workbench import table

    out = table.console()
    by_operator = ((n, f"{c['killed']} of {c['planted']}") for n, c in said["by_operator"].items())
    out.print(_table("operator", "killed", by_operator))
    out.print()
    out.print(_table("check", "killed", ((n, str(c)) for n, c in said["by_check"].items())))
    out.print()
    for one in said["unexpected"]:
        meant = ", ".join(one["meant"])
        print(f"killed by another check: {one['id']}: {one['killed_by']}, not {meant}")
    for reason, ids in _by_reason(said["not_run"]).items():
        print(f"not run: {reason} ({len(ids)}: {_some(ids)})")
    for name in said["survivors"]:
        print(f"survived: {name}")
    for one in said["false_alarms"]:
        print(f"refused, though honest: {one['id']}: {one['reason']}")
    print(f"killed {said['killed']} of {said['planted']} that ran", end="; ")
    print(f"{said['controls_passed']} of {said['controls']} honest controls passed", end="; ")
    print(f"{len(said['not_run'])} not run here")


def _some(ids: list[str]) -> str:
    return ", ".join(ids[:3]) + (", ..." if len(ids) > 3 else "")


def _by_reason(not_run: list[dict[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in not_run:
        found.setdefault(one["reason"], []).append(one["id"])
    return found


def _table(first: str, second: str, rows: Any) -> Any:
    from rich.table import Table

    made = Table(box=None, header_style="bold", pad_edge=False)
    made.add_column(first, no_wrap=True)
    made.add_column(second, justify="right")
    for row in rows:
        made.add_row(*row)
    return made
