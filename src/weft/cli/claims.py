"""``weft claims``: a ledger of claims about GPU kernels, each with a test that computes its verdict."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import ending, output, progress
from weft.cli.options import Csv, Json

if TYPE_CHECKING:
    from weft.core.table import Table
    from weft.lab.claims.ledger import Claim, Evidence

EPILOG = """Examples:
  weft claims
  weft claims sparsity-halves-weights
  weft claims --json > claims.json

Every claim with its source and figures: weft help claims"""
UNTESTED = "not tested"
Tested = tuple["Claim", "Evidence | None", str]


def claims(
    id: Annotated[
        str | None, typer.Argument(metavar="ID", help="Claim to show in detail [default: list all]")
    ] = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Test what is often said about GPU kernels: true, false, or dependent on what.

    Each verdict is computed now, from cost models, datasheets, exact counting, small experiments, compiled
    code or committed records. No GPU is needed.

    Exit 0: each verdict is as expected; 1: one is not; 2: invalid arguments.
    """
    from weft.lab.claims import ledger

    output.only_one_format(json=as_json, csv=as_csv)
    watch = ending.Stopwatch()
    selected = ledger.all_claims() if id is None else (ledger.find(id),)
    tested: list[Tested] = []
    with progress.stoppable() as stop, progress.Progress(total=len(selected)) as status:
        for number, claim in enumerate(selected, 1):
            status(f"[{number}/{len(selected)}] {claim.id}")
            tested.append(_test(claim))
    if as_json:
        data = [claim.to_json(evidence, reason) for claim, evidence, reason in tested]
        print(json.dumps({"claims": data} | stop.to_json(), indent=1))
    elif as_csv:
        output.print_csv(ledger_table(tested))
    elif id is None:
        output.show_table(ledger_table(tested), options=("json", "csv"))
    elif tested:
        _show(*tested[0])
    unexpected = [c.id for c, evidence, _ in tested if evidence and evidence.verdict != c.expected]
    line = _verdict_line(tested, unexpected, watch)
    if stop:
        line = f"stopped after {len(tested)} of {ending.count_text(len(selected), 'claim')}; {line}"
    ending.print_verdict(line, to_stderr=as_json or as_csv)
    if stop or unexpected:
        raise typer.Exit(stop.exit_code or 1)


def _test(claim: Claim) -> Tested:
    """Return a claim with its evidence, or with the reason why it cannot be tested here."""
    from weft.core import WeftError

    try:
        return claim, claim.compute(), ""
    except WeftError as error:
        return claim, None, str(error)


def _verdict(evidence: Evidence | None) -> str:
    return evidence.verdict if evidence else UNTESTED


def _verdict_line(tested: Sequence[Tested], unexpected: Sequence[str], watch: ending.Stopwatch) -> str:
    counts = Counter(_verdict(evidence) for _, evidence, _ in tested)
    parts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    text = f"{ending.count_text(len(tested), 'claim')}: {parts} ({watch})"
    return f"unexpected: {', '.join(unexpected)}; {text}" if unexpected else f"tested: {text}"


def ledger_table(tested: Sequence[Tested]) -> Table:
    """Return a row for each claim."""
    from weft.core.table import Column, Table

    rows = [
        [
            c.id,
            _verdict(evidence),
            c.text,
            c.theme,
            evidence.range if evidence else reason,
            str(c.source),
            c.test,
        ]
        for c, evidence, reason in tested
    ]
    columns = (
        Column("ID"),
        Column("verdict"),
        Column("claim", fold=30),
        Column("theme", 1),
        Column("range", 2, fold=30),
        Column("source", 2, fold=20),
        Column("test", 2),
    )
    notes = ["weft claims ID shows the source, the argument and the figures of one"]
    return Table(columns, rows, notes=notes)


def _show(claim: Claim, evidence: Evidence | None, reason: str) -> None:
    """Print one claim: sentence, source, argument, settings with their outcomes, and figures."""
    from weft.core.table import Column, Number, Table

    output.show_notes([f"{claim.id}: {_verdict(evidence)}"], style="bold")
    output.show_notes([f"  {claim.text}", ""], style="")
    facts = [("source", str(claim.source)), ("", claim.source.url), ("argument", claim.argument)]
    facts += [("test", claim.test), ("reason", reason)]
    shown = [(name, text) for name, text in facts if text]
    output.show_table(Table([Column(""), Column("", fold=30)], shown))
    if evidence is None:
        return
    print()
    outcomes = [(name, "holds" if holds else "fails") for name, holds in evidence.settings.items()]
    output.show_table(Table([Column("setting", fold=30), Column("claim")], outcomes))
    print()
    figures = [(name, Number(f"{value:.4g}", value)) for name, value in evidence.figures.items()]
    output.show_table(Table([Column("figure", fold=30), Column("value", numeric=True)], figures))
