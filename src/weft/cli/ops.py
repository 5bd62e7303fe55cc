"""``weft ops``: list the operators with their implementations, or show one operator in detail."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import output
from weft.cli.options import Csv, Json

if TYPE_CHECKING:
    from weft.core.table import Table

EPILOG = """Examples:
  weft ops
  weft ops softmax
  weft ops --csv > operators.csv

Formulas of all operators, and the calls that are refused: weft help operators"""
LEGEND = (
    "runs: runs here, and is timed. check: is checked here by an interpreter, not timed.",
    "GPU: needs a GPU. no: does not run here. -: there is no such implementation.",
)
Detail = dict[str, Any]


def ops(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Operator to show in detail [default: list all]")
    ] = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """List the operators and the implementations that run here, or show one operator in detail.

    The detail has formula, implementations, cases, tolerance, the best records and the files.
    """
    from weft import machine
    from weft.core import registry
    from weft.workbench import operators

    output.only_one_format(json=as_json, csv=as_csv)
    device = machine.default_device()
    if name is not None:
        described = [operators.detail(name, device)]
    else:
        described = [operators.summary(n, device) for n in registry.operator_names()]
    if as_json:
        print(json.dumps(described))
    elif as_csv:
        output.print_csv(_all_implementations(described))
    elif name is not None:
        _show_detail(described[0], device)
    else:
        _show_list(described)


def _all_implementations(operators: Sequence[Detail]) -> Table:
    """Return one row for each implementation, for CSV."""
    from weft.core.table import Column, Table

    keys = ("name", "backend", "state", "reason", "idea")
    columns = ("operator", "family", "implementation", "backend", "here", "reason", "idea")
    rows = [[o["operator"], o["family"], *(i[k] for k in keys)] for o in operators for i in _each(o)]
    return Table([Column(name) for name in columns], rows)


def _each(operator: Detail, *, steps: bool | None = None) -> list[Detail]:
    """Return an operator's implementations: all, or only (not) the steps of ladders."""
    return [i for i in operator["implementations"] if steps is None or i["step"] == steps]


def _show_list(operators: Sequence[Detail]) -> None:
    """Print one line for each operator, then the ladders and the meaning of the marks."""
    from weft.core.implementation import BACKENDS
    from weft.core.table import Column, Table
    from weft.workbench.operators import RUNS, backend_states, by_family

    rows, family = [], None
    order = by_family()
    for operator in sorted(operators, key=lambda o: order.index(o["operator"])):
        states = backend_states(operator["implementations"])
        marks = [states.get(backend, "-") for backend in BACKENDS]
        rows.append(
            ["" if operator["family"] == family else operator["family"], operator["operator"], *marks]
        )
        family = operator["family"]
    columns = [Column("family", priority=1), Column("operator"), *(Column(b) for b in BACKENDS)]
    implementations = [i for o in operators for i in _each(o)]
    count = sum(i["state"] == RUNS for i in implementations)
    notes = [
        *LEGEND,
        f"ladders (naive to best, one idea a step): {', '.join(_ladders(operators))}",
        f"{len(operators)} operators, {len(implementations)} implementations, of which {count} run and are "
        "timed here. Detail: weft ops NAME",
    ]
    output.show_table(Table(columns, rows, notes=notes), options=("json", "csv"))


def _ladders(operators: Iterable[Detail]) -> list[str]:
    ladders: dict[tuple[str, str], int] = {}
    for operator in operators:
        for step in _each(operator, steps=True):
            key = (operator["operator"], step["backend"])
            ladders[key] = ladders.get(key, 0) + 1
    return [f"{name} {backend} {steps}" for (name, backend), steps in ladders.items()]


def _show_detail(operator: Detail, device: str) -> None:
    """Print the contract, the implementations, the ladder, cases, records and files of an operator."""
    output.show_notes([f"{operator['operator']}: {operator['summary']}"], style="bold")
    output.show_notes([f"  {operator['signature']}", f"  {operator['formula']}", ""], style="")
    output.show_table(_facts(operator))
    for title, steps in ((f"Implementations on this {device}", False), ("Ladder, naive to best", True)):
        if rows := _each(operator, steps=steps):
            print()
            output.show_table(_implementations(title, rows), options=("json", "csv"))
    print()
    _show_cases(operator)
    print()
    output.show_table(_records(operator))
    print()
    output.show_notes(["Files"], style="bold")
    for path in operator["files"]:
        print(f"  {_relative(path)}")


def _facts(operator: Detail) -> Table:
    from weft.core.cases import SHORT
    from weft.core.table import Column, Table

    rows = [
        ("family", operator["family"]),
        ("dtypes", ", ".join(SHORT.get(d, d) for d in operator["dtypes"])),
        ("gradients", ", ".join(operator["gradients"]) or "none"),
        ("backward", operator["backward"]),
        ("properties", ", ".join(operator["properties"])),
        ("tolerance", _tolerance(operator["tolerance"])),
        ("reason", operator["tolerance"]["reason"]),
        ("scale", operator["tolerance"]["scale"]),
    ]
    return Table([Column(""), Column("", fold=20)], [[f"  {key}", text] for key, text in rows if text])


def _tolerance(tolerance: Detail) -> str:
    accumulator = tolerance["accumulator_ulps"]
    terms = [f"{tolerance['factor']:g} times the error of {tolerance['baseline']}"]
    terms.append(f"plus {tolerance['ulps']:g} units in the last place")
    if accumulator:
        terms.append(f"plus {accumulator:g} of the accumulator's")
    if tolerance["grows_with_length"]:
        terms.append("more where a sum is long")
    return ", ".join(terms)


def _implementations(title: str, implementations: Sequence[Detail]) -> Table:
    """Return the table of implementations, with the reasons below for those that do not run."""
    from weft.core.table import Column, Table

    rows = [(i["name"], i["state"], i["backward"] or "-", i["idea"]) for i in implementations]
    reasons: dict[str, list[str]] = {}
    for i in implementations:
        if i["reason"]:
            reasons.setdefault(f"{i['state']}: {i['reason']}", []).append(i["name"])
    columns = [Column("name"), Column("here"), Column("backward", priority=1), Column("idea", fold=20)]
    notes = [f"{reason} ({', '.join(names)})" for reason, names in reasons.items()]
    return Table(columns, rows, title=title, notes=notes)


def _show_cases(operator: Detail) -> None:
    """Print the names of the cases by tag and devices. A name stays whole, so that it can be copied."""
    import textwrap

    cases: dict[str, list[str]] = {}
    for case in operator["cases"]:
        for tag in case["tags"]:
            cases.setdefault(f"{tag}, {' and '.join(case['devices'])}", []).append(case["name"])
    stdout = output.console()
    width = stdout.width if stdout.is_terminal else sys.maxsize
    output.show_notes(["Cases"], style="bold")
    for title, names in cases.items():
        print(f"{title}: {len(names)}")
        for line in textwrap.wrap(" ".join(names), max(width - 2, 20), break_on_hyphens=False):
            print(f"  {line}")


def _records(operator: Detail) -> Table:
    """Return the fastest recorded implementation for each device, case and direction."""
    from weft.core.table import Column, Number, Table
    from weft.workbench.report.table import duration

    rows = []
    for r in operator["records"]:
        share = None if r["of_limit"] is None else 100 * r["of_limit"]
        rows.append(
            [
                r["device"],
                r["case"],
                r["direction"],
                r["implementation"],
                Number(duration(r["us"]), r["us"]),
                Number("-" if share is None else f"{'~' if r['doubt'] else ''}{share:.1f} %", share),
                Number(duration(r["torch_us"]) or "-", r["torch_us"]),
            ]
        )
    columns = [
        Column("device", fold=6),
        Column("case"),
        Column("direction", priority=1),
        Column("fastest"),
        Column("time", numeric=True, unit="us"),
        Column("of limit", numeric=True, unit="%"),
        Column("torch", numeric=True, unit="us", priority=2),
    ]
    doubts = dict.fromkeys(r["doubt"] for r in operator["records"] if r["doubt"])
    notes = [f"~: the share of the limit is doubtful: {doubt}" for doubt in doubts]
    if not rows:
        notes.append("No record is committed. weft bench measures this machine.")
    return Table(columns, rows, title="Records: the fastest at each case (cold)", notes=notes)


def _relative(path: str) -> str:
    """Return a path as seen from the current folder if it lies below it."""
    relative = os.path.relpath(path, Path.cwd())
    return path if relative.startswith("..") else relative
