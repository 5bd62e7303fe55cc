"""``weft claim``: is a claimed speed possible at all, by the bytes, the FLOPs and the GPU's datasheet?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import ending, output
from weft.cli.options import Csv, Json

if TYPE_CHECKING:
    from weft.core.table import Table
    from weft.lab.claims.bounds import Bound, Statement

EPILOG = """Examples:
  weft claim "gelu fp32 16384x16384 in 0.3 ms on a100"
  weft claim "matmul bf16 8192x8192x8192 at 700 TFLOP/s on h100 sxm"
  weft claim "softmax backward bf16 32768x4096 at 3 TB/s on h200 sxm" --json

Grammar, and the bound: weft help claims"""


def claim(
    words: Annotated[
        list[str],
        typer.Argument(metavar="SENTENCE", help="Operator, data type, shape, figure and GPU, in any order"),
    ],
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Judge a claimed time, TFLOP/s or GB/s: is it possible on this GPU?

    The bound is the larger of compulsory bytes / bandwidth and FLOPs / rate, by the GPU's datasheet. No
    kernel runs. A name such as a100 stands for all its variants; the answer must hold for each of them.

    Exit 0: possible; 1: impossible; 2: not understood, or ambiguous.
    """
    from weft.lab.claims.bounds import IMPOSSIBLE, bounds, decide
    from weft.lab.claims.sentence import parse

    output.only_one_format(json=as_json, csv=as_csv)
    text = " ".join(words)
    statement = parse(text)
    rows = list(bounds(statement))
    verdict = decide(rows)
    if as_json:
        print(json.dumps(to_json(text, statement, rows, verdict), indent=1))
    elif as_csv:
        output.print_csv(bounds_table(statement, rows))
    else:
        output.show_table(bounds_table(statement, rows), options=("json", "csv"))
    ending.print_verdict(f"{verdict}: {reason(statement, rows, verdict)}", to_stderr=as_json or as_csv)
    if verdict == IMPOSSIBLE:
        raise typer.Exit(1)


def reason(statement: Statement, rows: Sequence[Bound], verdict: str) -> str:
    """Return the sentence that explains a verdict, by the reading that is most favourable to the claim."""
    from weft.lab.claims.bounds import COLD, IMPOSSIBLE

    if not any(row.fits for row in rows):
        nbytes = min(row.cost.nbytes for row in rows)
        return f"the tensors have {nbytes / 1e9:,.4g} GB, more than the GPU's memory"
    # The cold bound is the one to quote where both states of the caches lead to the same answer.
    quoted = [row for row in rows if row.cache == COLD] or list(rows)
    best = min(quoted, key=lambda row: row.share)
    shortest = f"{_microseconds(best.roof.seconds)} on {best.gpu.key}"
    if verdict == IMPOSSIBLE:
        return (
            f"it would be {best.share:.3g} times the limit by {best.roof.limit}; the shortest is {shortest}"
        )
    spans = {
        f"{100 * row.share:{'.0f' if row.share >= 0.1 else '.2g'}}"
        for row in (best, max(quoted, key=lambda row: row.share))
    }
    share = " to ".join(sorted(spans, key=float))
    return f"it would be {share} % of the limit by {best.roof.limit}; the shortest is {shortest}"


def _microseconds(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:,.0f} us" if value >= 1e4 else f"{value:,.4g} us"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.4g} MB" if nbytes >= 1e4 else f"{nbytes:,.0f} bytes"


def bounds_table(statement: Statement, rows: Sequence[Bound]) -> Table:
    """Return a row for each reading of the claim."""
    from weft.core.table import Column, Number, Table

    lines = []
    for row in rows:
        ridge = None if row.cost.rate is None else row.gpu.ridge(row.cost.rate)
        lines.append(
            [
                f"{row.gpu.key}{' ' if row.reading else ''}{row.reading}",
                row.cache,
                Number(_microseconds(row.roof.seconds), row.roof.seconds * 1e6),
                Number(_microseconds(row.claimed), row.claimed * 1e6),
                Number(f"{100 * row.share:.3g} %", 100 * row.share),
                row.roof.limit if row.fits else "memory size",
                Number("-" if ridge is None else f"{ridge:.0f}", ridge),
            ]
        )
    columns = (
        Column("GPU"),
        Column("caches"),
        Column("shortest", numeric=True, unit="us"),
        Column("claimed", numeric=True, unit="us"),
        Column("of limit", numeric=True, unit="%"),
        Column("limit by"),
        Column("ridge", 1, numeric=True),
    )
    cost, case = rows[0].cost, next(iter(statement.cases.values()))
    work = [f"{_megabytes(cost.read)} read, {_megabytes(cost.written)} written"]
    if cost.rate is not None:
        intensity = f"{cost.flops / cost.nbytes:,.4g} FLOP/byte"
        work.append(f"{cost.flops / 1e9:,.6g} GFLOP in {cost.rate}, {intensity}")
    documents = dict.fromkeys(str(row.gpu.document) for row in rows)
    notes = [
        f"understood: {statement.operator} {statement.direction} {case.name}, {statement.figure}, "
        f"{statement.gpu}",
        f"work: {'; '.join(work)}. Each input is read once, each output written once.",
        "warm: as many of the bytes as the L2 holds come from it.",
        f"by {', '.join(documents)}",
    ]
    return Table(columns, lines, notes=notes)


def to_json(text: str, statement: Statement, rows: Sequence[Bound], verdict: str) -> dict[str, Any]:
    """Return the answer as JSON: the claim as it was understood, the verdict, and each reading's bound."""
    case = next(iter(statement.cases.values()))
    understood = {
        "operator": statement.operator,
        "direction": statement.direction,
        "case": case.name,
        "figure": statement.figure,
        "gpu": statement.gpu,
        "gpus": [gpu.key for gpu in statement.gpus],
        "caches": list(statement.caches),
    }
    return {
        "claim": text,
        "verdict": verdict,
        "reason": reason(statement, rows, verdict),
        "understood": understood,
        "bounds": [row.to_json() for row in rows],
    }
