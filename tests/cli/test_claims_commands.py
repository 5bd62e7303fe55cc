"""``weft hardware``, ``claim`` and ``claims``: JSON, exit codes, errors, and tables at any width."""

from __future__ import annotations

import csv
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from weft.cli import app, claims, main, output
from weft.core.errors import WeftError
from weft.lab.claims import ledger
from weft.machine import specs


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


def data(*arguments: str, code: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", code=code))


def test_the_json_of_hardware() -> None:
    gpus = data("hardware")["gpus"]
    assert [g["key"] for g in gpus] == [spec.key for spec in specs.all_specs()]
    for gpu in gpus:
        assert {"name", "sm_count", "copy_gbps", "tflops", "ridge", "document"} <= set(gpu)
        for rate, tflops in gpu["tflops"].items():
            assert gpu["ridge"][rate] == pytest.approx(tflops * 1e3 / gpu["copy_gbps"])
        assert isinstance(gpu["document"], str) and gpu["url"].startswith("https://")
    (one,) = data("hardware", "a100-sxm-80gb")["gpus"]
    assert one["sm_count"] == 108 and one["copy_gbps"] == 2039
    assert len(data("hardware", "a100")["gpus"]) == 4


def test_the_roof_in_json() -> None:
    answer = data("hardware", "h200", "--operator", "softmax", "--case", "bf16-32768x4096")
    (gpu,) = answer["gpus"]
    assert answer["operator"] == "softmax" and answer["cost"]["nbytes"] == 2 * 2 * 32768 * 4096
    assert gpu["roof"] == {
        "roof_us": pytest.approx(answer["cost"]["nbytes"] / 4800e9 * 1e6),
        "limit": "bytes",
    }
    (old,) = data("hardware", "t4", "--operator", "matmul")["gpus"]
    assert old["roof"] is None  # a T4 has no bf16
    backward = data("hardware", "h200", "--operator", "matmul", "--direction", "backward")
    assert backward["gpus"][0]["roof"]["limit"] == "FLOPs"


def test_hardware_as_csv_has_every_column() -> None:
    rows = list(csv.DictReader(run("hardware", "--csv").splitlines()))
    assert len(rows) == len(specs.all_specs())
    assert rows[-1]["fp4 (TFLOP/s)"] == "1676" and rows[0]["fp4 (TFLOP/s)"] == ""
    roofs = list(csv.DictReader(run("hardware", "--operator", "gelu", "--csv").splitlines()))
    assert all(float(row["roof (us)"]) > 0 for row in roofs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hardware", "mi300x"), "unknown GPU"),
        (("hardware", "--case", "x"), "--operator as well"),
        (("hardware", "--direction", "backward"), "--operator as well"),
        (("hardware", "--operator", "gelu", "--direction", "sideways"), "--direction of gelu"),
        (("hardware", "--operator", "gelu", "--case", "nowhere"), "case of gelu"),
        (("hardware", "--operator", "adamw", "--direction", "backward"), "--direction of adamw"),
        (("hardware", "--csv", "--json"), "only one output format"),
        (("claim", "gelu"), "the claim has no GPU"),
        (("claims", "sparsity"), "unknown claim"),
        (("claims", "--csv", "--json"), "only one output format"),
    ],
)
def test_a_wrong_call_is_one_clear_error(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(WeftError, match=message):
        run(*arguments)


@pytest.mark.parametrize(
    ("sentence", "verdict", "code"),
    [
        ("gelu fp32 16384x16384 in 0.3 ms on a100", "impossible", 1),
        ("gelu fp32 16384x16384 in 0.48 ms on h200 sxm", "close to the limit", 0),
        ("gelu fp32 16384x16384 in 3 ms on a100", "possible", 0),
    ],
)
def test_the_answer_to_a_claim(sentence: str, verdict: str, code: int) -> None:
    answer = data("claim", sentence, code=code)
    assert answer["verdict"] == verdict and answer["claim"] == sentence
    assert answer["understood"]["operator"] == "gelu"
    for bound in answer["bounds"]:
        assert bound["share_of_limit"] == pytest.approx(bound["shortest_us"] / bound["claimed_us"])
        assert bound["nbytes"] == 2 * 4 * (1 << 28) and bound["ridge"] is None
    words = run("claim", *sentence.split(), code=code)  # without quotes it is the same sentence
    assert words.splitlines()[-1].startswith(verdict) or f"{verdict}: " in words


def test_a_claim_that_is_not_understood_exits_2_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["weft", "claim", "gelu fp32 4x4 in no time on t4"])
    with pytest.raises(SystemExit) as stopped:
        main()
    error, hint = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2
    assert (
        error
        == "error: not understood: expected an operator, data type, shape, figure, direction or GPU, got no"
    )
    assert hint.startswith("hint: weft ops lists the operators, weft hardware the GPUs; for example: ")


def test_tensors_that_do_not_fit_are_impossible() -> None:
    answer = data("claim", "copy fp32 2^40 in 3600 s on b200", code=1)
    assert "more than the GPU's memory" in answer["reason"]


def test_the_json_of_claims() -> None:
    entries = data("claims")["claims"]
    assert [e["id"] for e in entries] == ledger.claim_ids()
    for entry in entries:
        assert {"id", "claim", "source", "verdict", "range", "test"} <= set(entry)
        assert entry["verdict"] == entry["expected"] in ("true", "false", "depends")
        outcomes = set(entry["settings"].values())
        assert (len(outcomes) == 2) == (entry["verdict"] == "depends")


def test_a_verdict_that_is_not_expected_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    claim = replace(ledger.find("sparsity-halves-weights"), expected=ledger.TRUE)
    monkeypatch.setattr(ledger, "find", lambda id: claim)
    assert (
        run("claims", claim.id, code=1).splitlines()[-1].startswith("unexpected: sparsity-halves-weights; ")
    )


def test_a_claim_without_its_record_is_not_tested(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(ledger, "RESULTS", tmp_path)
    claim = ledger.find("managed-memory-prefetch")
    uncached = claim.compute.__wrapped__  # type: ignore[attr-defined]
    from dataclasses import replace

    monkeypatch.setattr(ledger, "find", lambda id: replace(claim, compute=uncached))
    (entry,) = data("claims", claim.id)["claims"]
    assert entry["verdict"] is None and "records are not part of an installation" in entry["reason"]
    assert "not tested" in run("claims", claim.id)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_ledger_fits_a_terminal(width: int) -> None:
    table = claims.ledger_table([(c, c.compute(), "") for c in ledger.all_claims()])
    lines = [line.plain for line in output.table_lines(table, width)]
    assert max(map(len, lines)) <= width
    if width >= 80:  # below, an ID may be folded
        text = "\n".join(lines)
        assert all(c.id in text for c in ledger.all_claims())


def test_a_claim_as_csv() -> None:
    text = run("claim", "gelu fp32 16384x16384 in 3 ms on a100", "--csv")
    rows = list(csv.DictReader(text[text.index("GPU,") :].splitlines()))
    bounds = data("claim", "gelu fp32 16384x16384 in 3 ms on a100")["bounds"]
    shortest = [float(row["shortest (us)"]) for row in rows if row["claimed (us)"]]
    assert shortest == pytest.approx([bound["shortest_us"] for bound in bounds])


def test_a_signal_keeps_the_claims_that_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    from weft.cli import claims

    calls: list[ledger.Claim] = []
    test = claims._test

    def third_is_interrupted(claim: ledger.Claim) -> claims.Tested:
        calls.append(claim)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return test(claim)

    monkeypatch.setattr(claims, "_test", third_is_interrupted)
    shown = data("claims", code=130)
    assert [entry["id"] for entry in shown["claims"]] == ledger.claim_ids()[:2] and shown["stopped"]


def test_claims_as_csv() -> None:
    rows = list(csv.DictReader(run("claims", "--csv").splitlines()))
    assert len(rows) == len(ledger.all_claims()) and all(
        row["test"].startswith("weft.lab.claims.") for row in rows
    )
