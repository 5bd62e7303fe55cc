"""``weft learn cards``: enough cards, figures that are computed from their sources, a file for Anki."""

from __future__ import annotations

import ast
import csv
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.paths import ROOT
from weft.cli import app
from weft.core import registry
from weft.core.errors import WeftError
from weft.lab.claims import ledger
from weft.learn import cards
from weft.machine import specs

RECORDS = ROOT / "results" / "nvidia-h200"


@pytest.fixture(scope="module")
def deck() -> dict[str, cards.Card]:
    every_card, missing = cards.cards()
    assert not missing
    by_id = {c.id: c for c in every_card}
    assert len(by_id) == len(every_card) >= 80
    return by_id


def figures(text: str) -> list[float]:
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", text)]


def test_every_topic_has_cards_with_a_source(deck: dict[str, cards.Card]) -> None:
    assert {c.topic for c in deck.values()} == set(cards.TOPICS)
    for card in deck.values():
        assert card.question.strip() and card.answer.strip() and card.source.strip(), card.id


def test_figures_of_the_hardware_are_those_of_the_table(deck: dict[str, cards.Card]) -> None:
    for row in json.loads(specs.FILE.read_text())["gpus"]:
        bandwidth = row["bandwidth_gbps"]
        expected = bandwidth if isinstance(bandwidth, list) else [bandwidth]
        assert figures(deck[f"bandwidth-{row['key']}"].answer) == [round(b) for b in expected]
        if "bf16" in row["tflops"]:
            ridge = row["tflops"]["bf16"] * 1e12 / (expected[-1] * 1e9)
            shown = figures(deck[f"ridge-{row['key']}"].answer)
            assert shown[0] == round(ridge) and shown[1] == pytest.approx(row["tflops"]["bf16"], rel=1e-3)
            assert 0 <= shown[-1] - 3 * ridge < 1  # 1.5 times two bytes times the ridge, rounded up
        else:
            assert f"ridge-{row['key']}" not in deck


def test_figures_of_latencies_are_those_of_the_record(deck: dict[str, cards.Card]) -> None:
    record = json.loads((RECORDS / "hierarchy.json").read_text())
    series = {s["key"]: s["plateaus"] for s in record["series"]}
    plateaus = {f"latency-{key}": series[key][0] for key in cards.LEVELS}
    for name, plateau in (plateaus | {"latency-dram": series["chase_l1"][-1]}).items():
        assert figures(deck[name].answer) == [round(plateau["value"]), round(plateau["ns"])]
    values = {f["key"]: f["value"] / (1e12 if f["unit"] == "B/s" else 1) for f in record["figures"]}
    for key in cards.FIGURES:
        assert figures(deck[f"figure-{key}"].answer)[0] == pytest.approx(values[key], rel=6e-3)
    assert figures(deck["limit-registers_per_sm"].answer) == [record["device"]["registers_per_sm"]]


def test_figures_of_floors_and_demonstrations(deck: dict[str, cards.Card]) -> None:
    bandwidth = specs.find("NVIDIA H200")[0].bandwidth
    for name in ("softmax", "rope", "trilinear"):
        operator = registry.operator(name)
        sizes = [operator.cost(c, "forward") for c in operator.select("bench", "cuda")]
        cost = max(sizes, key=lambda c: c.nbytes)
        answer = deck[f"floor-{name}"].answer.partition(";")
        assert figures(answer[0])[0] == pytest.approx(cost.nbytes / 1e6, rel=1e-3)
        assert figures(answer[2])[0] == pytest.approx(cost.nbytes / bandwidth * 1e6, rel=1e-3)
        assert "bytes" in answer[2]
    for result in json.loads((RECORDS / "demos.json").read_text())["demos"]:
        answer = deck[f"demo-{result['name']}"].answer
        assert figures(answer)[0] == pytest.approx(result["ratio"], rel=6e-3)


def test_verdicts_of_claims_are_those_of_the_ledger(deck: dict[str, cards.Card]) -> None:
    for claim in ledger.all_claims():
        assert deck[f"claim-{claim.id}"].answer.lower().startswith(f"{claim.expected}. ")


def test_no_text_of_the_module_has_a_figure_of_its_own() -> None:
    """Names such as bf16, L1 and H200 have digits; a figure has no letter before it."""
    tree = ast.parse(Path(cards.__file__).read_text())
    formats = {
        id(n)
        for f in ast.walk(tree)
        if isinstance(f, ast.FormattedValue) and f.format_spec
        for n in ast.walk(f.format_spec)
    }
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    texts = [
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in formats | docs
    ]
    typed = [t for t in texts if re.search(r"(?<![\w\\<:])\d", t) and not t.startswith(("#", "g<"))]
    assert texts and typed == []


def test_a_changed_source_changes_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads((RECORDS / "hierarchy.json").read_text())
    for figure in record["figures"]:
        figure["value"] *= 3
    monkeypatch.setattr(ledger, "record", lambda path: record)
    tripled = {c.id: c.answer for c in cards._latencies()}
    value = next(f["value"] for f in record["figures"] if f["key"] == "host_launch")
    assert figures(tripled["figure-host_launch"]) == [pytest.approx(value, rel=6e-3)]


def test_the_file_is_what_anki_imports(tmp_path: Path, deck: dict[str, cards.Card]) -> None:
    file = tmp_path / "cards.tsv"
    result = CliRunner().invoke(app, ["learn", "cards", "-o", str(file)])
    assert result.exit_code == 0 and f"wrote {len(deck)} cards" in result.output
    lines = file.read_text().splitlines()
    headers = [line for line in lines if line.startswith("#")]
    assert "#separator:tab" in headers and "#tags column:4" in headers and lines[: len(headers)] == headers
    rows = list(csv.reader(lines[len(headers) :], delimiter="\t"))
    assert [r[0] for r in rows] == [f"weft-{name}" for name in deck] and {len(r) for r in rows} == {4}
    assert all(deck[r[0].removeprefix("weft-")].topic == r[3] for r in rows)


def test_a_missing_record_is_said_and_the_other_cards_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(path: str) -> object:
        raise WeftError("records", expected="a checkout", got="none")

    monkeypatch.setattr(ledger, "record", record)
    result = CliRunner().invoke(app, ["learn", "cards", "--json"])
    shown = json.loads(result.stdout)
    assert set(shown["missing"]) == {"latencies", "floors", "demonstrations"}
    assert {c["topic"] for c in shown["cards"]} == set(cards.TOPICS) - set(shown["missing"])


def test_wrong_calls() -> None:
    for arguments in (["cards", "7"], ["status", "-o", "x"], ["cards", "--seed", "1"]):
        assert isinstance(CliRunner().invoke(app, ["learn", *arguments]).exception, WeftError)
