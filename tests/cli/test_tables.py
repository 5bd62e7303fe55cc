"""Tables fit the terminal at any width: no line too long, no number cut, columns left out are named."""

from __future__ import annotations

import csv
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers import screens
from helpers.paths import DATA
from weft.cli import app, check, output
from weft.core import WeftError
from weft.core.record import read
from weft.core.table import Column, Number, Table
from weft.workbench.report.table import csv_table

FIXTURES = DATA / "screens"  # written anew by: WEFT_WRITE_SCREENS=1 pytest tests/cli/test_tables.py
FIXTURE_WIDTH = 80
NUMBER = re.compile(r"[-+±~]?\d[\d.,]*(?:e[-+]?\d+)?")
screens_at = cache(screens.screens_at)


def numbers(text: str) -> set[str]:
    return {n.rstrip(".,") for n in NUMBER.findall(text)}


def left_out(text: str) -> list[str]:
    """Return the columns that the text names as left out."""
    # A name that was folded behind a dash or slash is joined again.
    joined = " ".join(re.sub(r"(?<=[/-])\n\s*", "", text).split())
    notes = re.findall(r"columns left out: (.*?) \(a wider terminal", joined)
    return [name for note in notes for name in note.split(", ")]


@pytest.mark.sampled(1, each=lambda columns: columns == FIXTURE_WIDTH)  # other tests share that width
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_line_is_longer_than_the_terminal_and_no_number_is_cut(columns: int) -> None:
    whole = screens_at(screens.PIPE)
    narrow = screens_at(columns)
    assert narrow.keys() == whole.keys() == screens.SCREENS.keys()
    for name, text in narrow.items():
        too_long = [line for line in text.splitlines() if len(line) > columns]
        assert not too_long, (name, too_long)
        assert "…" not in text, name
        unknown = numbers(text) - numbers(whole[name])
        assert not unknown, (name, unknown)
    assert not left_out("".join(whole.values()))


@pytest.mark.parametrize("name", screens.SCREENS)
def test_the_screen_at_80_columns_is_the_committed_one(name: str) -> None:
    text = screens_at(FIXTURE_WIDTH)[name]
    file = FIXTURES / f"{name}.txt"
    if os.environ.get("WEFT_WRITE_SCREENS"):
        file.write_text(text)
    assert text == file.read_text(), f"{file.name} differs; see the comment at FIXTURES"


def rendered(table: Table, width: int | None) -> list[str]:
    return [line.plain for line in output.table_lines(table, width)]


def shown_columns(table: Table, lines: list[str]) -> list[Column]:
    hidden = left_out("\n".join(lines))
    return [c for c in table.columns if c.name not in hidden]


def test_columns_are_left_out_in_the_stated_order_and_each_number_is_whole() -> None:
    tables = list(screens.tables())
    assert {name for name, _ in tables} == screens.SCREENS.keys() - {"demo-list"}  # which is text
    for name, table in tables:
        before: set[str] = set()
        for width in range(30, 201, 5):
            lines = rendered(table, width)
            assert max(map(len, lines)) <= width, (name, width)
            shown = shown_columns(table, lines)
            hidden = [c for c in table.columns if c not in shown]
            # No column that is left out is as important as one that is shown.
            assert all(h.priority > s.priority for h in hidden for s in shown), (name, width)
            # A wider terminal shows all that a narrower one does.
            assert before <= {c.name for c in shown}, (name, width)
            before = {c.name for c in shown}
            for column in shown:
                if column.numeric:
                    check_numbers(table, column, "\n".join(lines))
        assert not left_out("\n".join(rendered(table, None)))


def check_numbers(table: Table, column: Column, text: str) -> None:
    """Find the whole cells of a column in the text, from the first row to the last."""
    position = 0
    for number in filter(None, table.column(column.name)):
        match = re.compile(rf"(?<![\w.]){re.escape(number)}(?![\w.])").search(text, position)
        assert match, (column.name, number, text)
        position = match.start()


def test_rows_become_blocks_where_the_essential_columns_do_not_fit() -> None:
    columns = [Column("case"), Column("time", numeric=True), Column("host", 1, numeric=True)]
    table = Table(columns, [("fp32-1024x1024x1024", "12345.678 us", "7.5 us")] * 2)
    assert rendered(table, 60)[0] == "case                         time    host"
    block = ["case: fp32-1024x1024x1024", "  time: 12345.678 us"]
    assert rendered(table, 26)[:4] == block * 2
    assert left_out("\n".join(rendered(table, 26))) == ["host"]


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("takes 1,234.5 us on it", 12, ["takes", "1,234.5 us", "on it"]),  # a number stays with its unit
        ("weft check --seed 12", 14, ["weft check", "--seed 12"]),
        ("cuda/03-shared-tile", 15, ["cuda/03-shared-", "tile"]),  # never before a digit
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
    ],
)
def test_text_is_folded_behind_words(text: str, width: int, lines: list[str]) -> None:
    assert output.fold(text, width) == lines


def test_reasons_of_a_check_are_grouped() -> None:
    """348 verdicts that did not run have three reasons; 58 of them differ in one number."""
    lines = check.reasons(screens.verdicts())
    assert lines == [
        "not run: 1560 to 1617 elements need a GPU: an interpreter takes at most 1024 "
        "(116 cases of softmax numba)",
        "not run: CUDA C++ needs a GPU to run (406 cases of softmax cuda, cuda/01-a-step-of-the-ladder, "
        "cuda/02-a-step-of-the-ladder, cuda/03-a-step-of-the-ladder and 2 more)",
        "not run: computes only the forward (290 cases of softmax cuda/01-a-step-of-the-ladder, "
        "cuda/02-a-step-of-the-ladder, cuda/03-a-step-of-the-ladder, cuda/04-a-step-of-the-ladder, "
        "cuda/05-a-step-of-the-ladder)",
        "note: not timed (no GPU): checked in Triton's interpreter, and compiled "
        "(116 cases of softmax triton)",
    ]


def test_compare_has_a_line_for_each_changed_point_and_with_all_for_every_point() -> None:
    changed = screens_at(120)["compare"].splitlines()
    everything = screens_at(120)["compare-all"].splitlines()
    inconclusive = [line for line in changed if re.search(r"inconclusive +1\.000", line)]
    assert len(inconclusive) == 7 and len(changed) < 30
    points = [line for line in everything if re.search(r" (inconclusive|same|not measured) ", line + " ")]
    rows = [line for line in points if re.match(r"(gelu|softmax|sum|matmul) ", line)]
    assert len(rows) == 38
    assert "same: 8 points" in "\n".join(changed)


def test_csv_has_all_columns_and_plain_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    records, _ = read(screens.H200 / "softmax.jsonl")
    output.print_csv(csv_table(records))
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert len(rows) == len(records)
    for row, record in zip(rows, records, strict=True):
        assert row["implementation"] == record.implementation and row["case"] == record.case
        if record.timing:
            assert float(row["time (us)"]) == record.timing.cold
            assert row["of limit (%)"] == ("" if record.efficiency is None else str(100 * record.efficiency))
        else:
            assert row["verdict"] == "not run" and row["time (us)"] == "" and row["notes"]


def test_csv_of_an_absent_number_is_an_empty_field(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [Column("name"), Column("time", numeric=True, unit="us")]
    output.print_csv(Table(columns, [("a, b", Number("1.5 ms", 1500.0)), ("c", Number("-", None))]))
    assert capsys.readouterr().out == 'name,time (us)\n"a, b",1500.0\nc,\n'


def weft(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_compare_and_tune_print_csv() -> None:
    file = str(screens.EPYC)
    rows = list(csv.DictReader(weft("compare", file, file, "--csv").splitlines()))
    points: list[Any] = json.loads(weft("compare", file, file, "--json"))["comparisons"]
    assert len(rows) == len(points) == 38
    ratios = {(p["operator"], p["implementation"]): p["ratio"] for p in points}
    for row in rows:
        ratio = ratios[row["operator"], row["implementation"]]
        assert row["B / A"] == ("" if ratio is None else str(ratio))
    chosen = list(
        csv.DictReader(weft("tune", "softmax", "--show", "--device", "NVIDIA H200", "--csv").splitlines())
    )
    assert chosen and all(float(row["inference time (us)"]) > 0 for row in chosen if row["inference"] != "-")


@pytest.mark.parametrize("command", ["bench", "check", "compare", "device", "selftest", "tune", "ops"])
def test_two_formats_are_one_clear_error(command: str, tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="only one output format") as caught:
        weft(command, "--csv", "--json")
    assert "--json and --csv" in str(caught.value)
