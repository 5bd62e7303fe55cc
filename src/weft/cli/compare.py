"""``weft compare``: what became faster, slower or stayed, from records alone; and A/A noise."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.core import Record
    from weft.workbench.compare import Noises
    from weft.workbench.compare_words import Compared
    from weft.workbench.noise import Noise

EPILOG = "How the verdicts come about, and how to use it in CI: docs/compare.md"
STYLES = {"faster": "green", "slower": "bold red", "ambiguous": "yellow", "same": ""}


def compare(
    records: Annotated[
        list[str] | None,
        typer.Argument(help="Records from before and after; one file may hold both."),
    ] = None,
    commits: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="OLD NEW", help="Two commits of the records, by their first digits."),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="The least difference that counts, as a share: 0.02 is 2 %."),
    ] = None,
    fail_on: Annotated[
        str,
        typer.Option(
            help="slower (and failing), missing (and gone), or ambiguous (and undecided)."
        ),
    ] = "missing",
    noise: Annotated[
        Path | None, typer.Option(help="A file of measured noise, not the one kept here.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Compare records of unlike machines.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown for a pull request.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    measure_noise: Annotated[
        bool,
        typer.Option("--measure-noise", help="Measure and keep the noise; operators, not records."),
    ] = False,
    pairs: Annotated[int, typer.Option(help="With --measure-noise: how many pairs of runs.")] = 3,
) -> None:
    """Say faster, slower, same or ambiguous for everything that two sides have measured.

    Exit 0: nothing is slower or broken; 1: something is; 2: the call was wrong.

    Example: weft compare before.jsonl after.jsonl
    """
    from weft.core import WeftError
    from weft.workbench import compare as workbench

    if markdown and as_json:
        raise WeftError("one form at a time", expected="--json or --markdown", got="both")
    if measure_noise:
        _measure(records or [], pairs, noise, as_json)
        return
    workbench.against([], fail_on)  # a wrong word is told before anything is read
    told = _compared(records or [], commits, threshold, fail_on, noise, force)
    _tell(told, as_json, markdown)
    _talk(told)
    if told.stops:
        raise typer.Exit(1)


def _tell(told: Compared, as_json: bool, markdown: bool) -> None:
    from weft.workbench import compare_words

    if as_json:
        print(json.dumps(told.to_json()))
    elif markdown:
        print(compare_words.markdown(told))
    else:
        _print(told)


def _compared(
    files: Sequence[str],
    commits: tuple[str, str] | None,
    threshold: float | None,
    fail_on: str,
    noise: Path | None,
    force: bool,
) -> Compared:
    from weft.core import WeftError
    from weft.workbench import compare as workbench
    from weft.workbench.compare_commits import two_sides
    from weft.workbench.compare_words import Compared

    if not files:
        raise WeftError(
            "nothing to compare",
            expected="one or two files of records",
            got="none",
            hint="write them: weft bench --save FILE",
        )
    a, b = two_sides([_read(Path(f)) for f in files], commits)
    noises = _noises([*a, *b], noise, force)
    found = workbench.compare(a, b, threshold=threshold, force=force, noises=noises)
    stops = workbench.against(found, fail_on)
    points = [{(r.operator, r.implementation, r.case, r.direction) for r in s} for s in (a, b)]
    if not stops and points[0].isdisjoint(points[1]):
        raise WeftError(
            "the two sides have nothing in common",
            expected="the same operator, implementation, case and direction on both",
            got=f"{len(a)} records in A and {len(b)} in B of other things",
        )
    return Compared(
        a=a,
        b=b,
        found=found,
        stops=stops,
        noises=noises,
        threshold=threshold,
        fail_on=fail_on,
        by_hand=str(noise or ""),
    )


def _read(path: Path) -> list[Record]:
    from weft.core import record

    records, torn = record.read(path)
    if torn:
        print(f"{path}: {torn} torn line(s) passed over", file=sys.stderr)
    return records


def _noises(records: Sequence[Record], path: Path | None, force: bool) -> Noises:
    """The noise of each machine among the records: the file's, or what is kept here."""
    from weft.core import WeftError
    from weft.workbench import noise

    machines = {noise.identity(r.machine): r.machine for r in records}
    if path is None:
        kept = {key: noise.kept(machine) for key, machine in machines.items()}
        return {key: one for key, one in kept.items() if one is not None}
    one = noise.load(path)
    here = noise.identity(one.machine)
    if here not in machines and not force:
        raise WeftError(
            "the noise of another machine says nothing here",
            expected=" or ".join(" ".join(filter(None, key)) for key in machines),
            got=" ".join(filter(None, here)),
            hint="measure it there: weft compare --measure-noise --noise FILE; or --force",
        )
    return dict.fromkeys(machines, one) if force else {here: one}


def _measure(arguments: Sequence[str], pairs: int, path: Path | None, as_json: bool) -> None:
    from weft.workbench import noise

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    found = noise.measure(arguments, pairs=pairs, say=say)
    where = path or noise.path_for(found.machine)
    noise.save(where, found)
    if as_json:
        points = [vars(s) | {"share": s.share} for s in found.spreads]
        answer = {"machine": found.machine, "usual": found.usual, "wide": found.wide}
        print(json.dumps(answer | {"runs": found.runs, "path": str(where), "points": points}))
    else:
        _show_noise(found)
    say(f"kept in {where}")


def _show_noise(found: Noise) -> None:
    print(f"{found.machine.get('device')}: {found.runs} runs of each")
    for s in sorted(found.spreads, key=lambda s: -s.share):
        print(f"{s.share:7.2%}  {s.operator} {s.implementation} {s.case} {s.direction}")
    print(f"{found.usual:7.2%}  usual, and the least that is taken for any point measured here")
    print(f"{found.wide:7.2%}  taken for points that were not measured")


def _talk(told: Compared) -> None:
    """What a person wants to know beside the table, on stderr."""
    from weft.workbench import compare as workbench
    from weft.workbench.compare_commits import commits, differences
    from weft.workbench.compare_words import AGAIN, noise_lines, sides

    for name, revision, when, number in sides(told):
        print(f"{name}: {revision}, {when}, {number} records", file=sys.stderr)
    for name, records in (("A", told.a), ("B", told.b)):
        if len(commits(records)) > 1:
            print(f"note: {name} pools several commits; --commits names one", file=sys.stderr)
    for note in (*differences(told.a, told.b), *noise_lines(told)):
        print(f"note: {note}", file=sys.stderr)
    counts = workbench.counts(told.found)
    if counts["ambiguous"]:
        print(f"note: {AGAIN}", file=sys.stderr)
    print(", ".join(f"{n} {word}" for word, n in counts.items() if n), file=sys.stderr)
    gone = sum(c.missing for c in told.stops)
    if gone and gone == len(told.stops):
        print(f"hint: only missing: {gone}; --fail-on slower lets that pass", file=sys.stderr)


def _print(told: Compared) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from weft.workbench.compare_words import COLUMNS, cells, in_order
    from weft.workbench.table import console

    out = console()
    table = Table(box=box.SIMPLE_HEAD if out.is_terminal else None, pad_edge=False)
    for name in COLUMNS:
        right = name in ("A", "B", "B / A", "noise")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    changed, rest = in_order(told.found)
    for c in (*changed, *rest):
        style = "red" if c.broken else "dim" if c.verdict is None else STYLES[c.verdict]
        table.add_row(*map(escape, cells(c)), style=style)
    out.print(table)
