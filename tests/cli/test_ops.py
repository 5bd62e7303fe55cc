"""``weft ops``: a line for each operator, and the detail of one, as a terminal of 80 columns shows them."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from helpers.paths import DATA, ROOT
from weft import machine
from weft.cli import app, output
from weft.core import WeftError, no, registry
from weft.core.implementation import BACKENDS
from weft.workbench import operators

SCREENS = DATA / "screens"  # written anew by: WEFT_WRITE_SCREENS=1 pytest tests/cli/test_ops.py


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run commands on a terminal of 80 columns without styles, in the root of a checkout."""
    monkeypatch.chdir(ROOT)

    def console() -> Console:
        return Console(force_terminal=True, color_system=None, no_color=True, width=80, highlight=False)

    monkeypatch.setattr(output, "console", console)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["ops", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def sample_record(case: str, implementation: str, us: float, doubt: str = "") -> dict[str, object]:
    record = {"device": "NVIDIA H200", "case": case, "direction": "forward", "torch_us": 2 * us}
    return record | {"implementation": implementation, "us": us, "of_limit": 0.9582, "doubt": doubt}


RECORDS = [
    sample_record("bf16-32768x4096", "cuda", 131.2),
    sample_record("bf16-4096x65536", "cuda/03-warp-per-row", 1262.4, "measured on a busy machine"),
]


@pytest.mark.skipif(machine.has_gpu(), reason="the screens are those of a machine without a GPU")
@pytest.mark.parametrize(("arguments", "name"), [((), "ops.txt"), (("softmax",), "ops-softmax.txt")])
def test_the_screen_at_80_columns(
    arguments: tuple[str, ...], name: str, terminal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New operators and records change no screen: it has its own."""
    screen = SCREENS / name
    write = bool(os.environ.get("WEFT_WRITE_SCREENS"))
    if not write and not arguments:
        shown = screen.read_text().split()
        names = [n for n in registry.operator_names() if n in shown]
        monkeypatch.setattr(registry, "operator_names", lambda: names)
    monkeypatch.setattr(operators, "records", lambda name: RECORDS)
    text = run(*arguments)
    assert all(len(line) <= 80 for line in text.splitlines())
    if write:
        SCREENS.mkdir(exist_ok=True)
        screen.write_text(text)
    assert text == screen.read_text(), f"see {screen}"


def test_the_list_has_one_line_for_each_operator(terminal: None) -> None:
    lines = run().splitlines()
    assert len(lines) <= len(registry.operator_names()) + 13, "the heading, the legend and the ladders"
    rows = lines[1 : 1 + len(registry.operator_names())]
    for name in registry.operator_names():
        (line,) = [row for row in rows if row.split()[-1 - len(BACKENDS)] == name]
        states = line.split()[-len(BACKENDS) :]
        present = {i.backend for i in registry.implementations(name)}
        assert [b in present for b in BACKENDS] == [s != "-" for s in states]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", registry.operator_names())
def test_the_detail_names_every_case_implementation_and_file(name: str, terminal: None) -> None:
    text = run(name)
    assert all(len(line) <= 80 for line in text.splitlines())
    words = set(text.replace(",", " ").split())
    operator = registry.operator(name)
    assert {c.name for c in operator.cases} <= words
    assert set(registry.implementation_names(name)) <= words
    for file in operators.files(name):
        assert file.is_file() and str(file.relative_to(ROOT)) in words
    entry = registry.entry(name)
    assert {f"{t.partition(':')[0]}.py" for t in entry.implementations.values() if "." not in t} <= {
        f.name for f in operators.files(name)
    } | {"ladder.py"}


def test_json_is_a_list_with_the_same_keys_for_all_and_for_one() -> None:
    (one,) = json.loads(run("softmax", "--json"))
    summary = next(o for o in json.loads(run("--json")) if o["operator"] == "softmax")
    assert {k: one[k] for k in summary} == summary
    contract = {"name", "backend", "supported", "reason", "idea"}
    assert all(contract <= set(i) for i in summary["implementations"])
    assert one["tolerance"]["accumulator_ulps"] == registry.operator("softmax").tolerance.chain
    assert len(one["cases"]) == len(registry.operator("softmax").cases)
    with pytest.raises(WeftError, match="only one output format"):
        CliRunner().invoke(app, ["ops", "--json", "--csv"], catch_exceptions=False)


def test_csv_has_a_row_for_each_implementation() -> None:
    rows = list(csv.DictReader(run("--csv").splitlines()))
    pairs = {(o, i) for o in registry.operator_names() for i in registry.implementation_names(o)}
    assert {(r["operator"], r["implementation"]) for r in rows} == pairs and len(rows) == len(pairs)


def test_an_unknown_operator_gets_the_nearest_names() -> None:
    with pytest.raises(WeftError, match=r"unknown operator.*softmx; hint: did you mean softmax"):
        CliRunner().invoke(app, ["ops", "softmx"], catch_exceptions=False)


def test_states_tell_a_missing_gpu_from_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def state(implementation: str) -> str:
        (entry,) = [
            i for i in operators.summary("softmax", "cpu")["implementations"] if i["name"] == implementation
        ]
        return entry["state"]

    monkeypatch.setattr(operators.machine, "has_gpu", lambda: False)
    monkeypatch.setattr(operators, "missing_package", lambda backend: None)
    assert (state("eager"), state("cuda")) == ("runs", "GPU")
    monkeypatch.setattr(operators, "missing_package", lambda backend: "cuda.core")
    assert state("cuda") == "no"
    monkeypatch.setattr(operators, "support", lambda *_: no("out of order"))
    assert state("eager") == "no"


def test_the_best_state_of_a_backend_is_shown() -> None:
    def implementation(backend: str, state: str) -> dict[str, str]:
        return {"backend": backend, "state": state}

    mixed = [implementation("numba", "check"), implementation("numba", "runs"), implementation("cuda", "no")]
    assert operators.backend_states(mixed) == {"numba": "runs", "cuda": "no"}


def test_without_a_checkout_records_come_from_the_dispatch_tables(tmp_path: Path) -> None:
    shipped = operators.records("softmax", tmp_path / "no-results")
    committed = operators.records("softmax", ROOT / "results")
    keys = ("device", "case", "direction", "implementation")
    gpu = {tuple(r[k] for k in keys) for r in committed if r["device"].startswith("NVIDIA")}
    assert shipped and all(r["us"] > 0 for r in shipped)
    assert {r["device"] for r in shipped} == {device for device, *_ in gpu}
    assert {tuple(r[k] for k in keys[:3]) for r in shipped} <= {key[:3] for key in gpu}
