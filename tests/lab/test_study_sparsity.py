"""The sparsity study: memory to the byte, crossovers, a record of simulated times, and its command."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from weft import ops
from weft.cli import app
from weft.core import Interrupted, WeftError, no_log
from weft.lab.study import sparsity, sparsity_memory, sparsity_report, sparsity_svg
from weft.lab.study.sparsity import BLOCK, CSR, DENSE, SEMI, Contender
from weft.ops.block_sparse import to_blocks, transposed_index
from weft.ops.sparse.transpose import transpose

SIZE = [4096, 4096, 4096]
DENSE_US = 200.0


def times_of(contender: Contender, mode: str) -> float | None:
    """Simulate a time: dense takes 200 us, blocks cross it at a density of side / 256, CSR at 3 %."""
    slower = 1.1 if contender.impl in ("torch", "triton") else 1.0
    at = {DENSE: 1.0, SEMI: 0.7, BLOCK: max(contender.block, 1) / 256, CSR: 0.03}[contender.kind]
    if contender.kind in (DENSE, SEMI):
        return DENSE_US * at * slower * (3 if mode == "training" else 1)
    if mode == "training" and contender.kind == CSR:
        return None
    if contender.block in (16, 32):
        slower = 1.0  # of one implementation
    return DENSE_US * contender.density / at * slower * (3 if mode == "training" else 1)


@pytest.fixture
def record() -> dict[str, Any]:
    rows = []
    for mode in sparsity.MODES:
        for c in sparsity.contenders("cuda", sparsity.DENSITIES):
            us = times_of(c, mode)
            row = {"size": SIZE, "mode": mode, "kind": c.kind, "block": c.block, "impl": c.impl, "us": us}
            row |= {"density": c.density, "error": 1e-3, "flags": [], "reason": "" if us else "too slow"}
            rows.append(row)
    versions = {"weft": "0", "torch": "0"}
    fingerprint = {"device": "A Toy", "date": "2026-01-01", "commit": "0" * 40, "versions": versions}
    densities = list(sparsity.DENSITIES)
    study = {"study": "sparsity", "format": sparsity.FORMAT, "device": "cuda", "dtype": "bf16", "rows": rows}
    study |= {"sizes": [SIZE], "densities": densities, "wrong": [], "machine": fingerprint, "quick": False}
    return json.loads(json.dumps(study))  # type: ignore[no-any-return]


def test_the_study_finds_the_crossovers_of_a_simulated_machine(record: dict[str, Any]) -> None:
    for mode in sparsity.MODES:
        for side in (16, 32, 64):
            how, density = sparsity_report.crossing(record, SIZE, mode, BLOCK, side)
            assert how == "below" and density == pytest.approx(side / 256)
        assert sparsity_report.crossing(record, SIZE, mode, BLOCK, 128) == ("all", 0.5)
    how, density = sparsity_report.crossing(record, SIZE, "inference", CSR, 0)
    assert how == "below" and density == pytest.approx(0.03)
    assert sparsity_report.crossing(record, SIZE, "training", CSR, 0) == ("unknown", None)
    inference, training = sparsity_report.sentences(record)
    assert "2:4 is 1.43× as fast as dense" in inference and "blocks of 64 pay below 25 %" in inference
    assert "unstructured (CSR) pays below 3.0 %" in inference and "CSR" not in training
    head, rows = sparsity_report.times_table(record, SIZE, "inference")
    assert len(head) == 6 and rows[1][1].endswith("1.43× (cuda)") and rows[1][2:] == [""] * 4


def test_the_first_crossing_from_low_densities_counts() -> None:
    times = {0.02: 10.0, 0.05: 30.0, 0.1: 10.0, 0.5: 40.0}
    how, density = sparsity.crossover(times, 20.0)
    assert how == "below" and density is not None and 0.02 < density < 0.05
    assert sparsity.crossover(times, 5.0) == ("none", 0.02)
    assert sparsity.crossover(times, 40.0) == ("all", 0.5)
    assert sparsity.crossover({}, 40.0) == ("unknown", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_the_tensors(dtype: torch.dtype) -> None:
    """The counted bytes are those of what the operators take and make."""
    n, k, item = 384, 256, dtype.itemsize
    w = torch.randn(n, k).to(dtype)

    def nbytes(*tensors: torch.Tensor) -> int:
        return sum(t.numel() * t.element_size() for t in tensors)

    semi = sparsity_memory.semi_structured(n, k, item)
    values, metadata, values_t, metadata_t = ops.prune_2_4_transposable(w)
    assert (semi.values, semi.metadata) == (nbytes(values), nbytes(metadata))
    assert semi.transposed == nbytes(values_t, metadata_t)
    for block, density in ((16, 0.3), (64, 0.5), (128, 0.01)):
        counted = sparsity_memory.in_blocks(n, k, item, block, density)
        values, crow, col = to_blocks(w, block, density)
        assert (counted.values, counted.metadata) == (nbytes(values), nbytes(crow, col))
        assert counted.transposed == nbytes(transposed_index(crow, col, k // block))
    counted = sparsity_memory.unstructured(n, k, item, 0.1)
    values, columns, offsets = sparsity.csr_of(w, 0.1)
    assert (counted.values, counted.metadata) == (nbytes(values), nbytes(columns, offsets))
    t = transpose(columns, offsets, k)
    assert counted.transposed == nbytes(values[t.order], t.columns, t.offsets.int())


def test_2_4_in_16_bits_has_9_16_of_the_bytes() -> None:
    semi, dense = sparsity_memory.semi_structured(4096, 4096, 2), sparsity_memory.dense(4096, 4096, 2)
    assert 16 * semi.inference == 9 * dense.inference and semi.training == 2 * semi.inference


def test_the_picture_has_a_curve_for_each_kind_in_both_themes(record: dict[str, Any], tmp_path: Path) -> None:
    light, dark = sparsity_svg.plot_all(record, tmp_path)
    for path in (light, dark):
        root = ET.parse(path).getroot()
        lines = [e for e in root.iter() if e.tag.endswith("polyline")]
        assert len(lines) == 5 + 4  # no unstructured weight in training
        points = [tuple(map(float, p.split(","))) for p in lines[0].get("points", "").split()]
        # To the right, and down: a denser weight takes longer, and y grows downwards.
        assert [x for x, _ in points] == sorted(x for x, _ in points)
        assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)
    assert "#0d1117" in dark.read_text() and "#0d1117" not in light.read_text()
    for row in record["rows"]:
        row["us"] = None
    assert sparsity_svg.plot_all(record, tmp_path) == []


def test_every_contender_of_a_cpu_computes_the_dense_product() -> None:
    x, w = torch.randn(12, 128), torch.randn(256, 128) / 128**0.5
    for contender in sparsity.contenders("cpu", (0.25,)):
        parts = sparsity.operands(contender, x, w)
        assert sparsity.relative_error(parts) < 1e-5, contender.title
        gradients = sparsity.call_of(parts, "training")()
        assert [g.shape for g in gradients] == [parts.x.shape, parts.values.shape]
        assert int((parts.weight != 0).sum()) <= 0.5 * w.numel() or contender.kind == DENSE


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a study of one size as short as it can be."""
    monkeypatch.setattr(sparsity, "QUICK_SECONDS", 0.01)
    monkeypatch.setitem(
        sparsity.IMPLEMENTATIONS, "cpu", {DENSE: ("torch",), SEMI: (), BLOCK: ("eager",), CSR: ()}
    )


def test_the_command_measures_saves_and_draws_again(quick: None, tmp_path: Path) -> None:
    options = ["study", "sparsity", "--device", "cpu", "--quick", "--densities", "0.5"]
    run = CliRunner().invoke(app, [*options, "--sizes", "8x128x64", "--out", str(tmp_path)])
    assert run.exit_code == 0, run.output
    record = json.loads((tmp_path / "sparsity.json").read_text())
    assert len(record["rows"]) == 2 * 5 and record["wrong"] == []
    reasons = {row["block"]: row["reason"] for row in record["rows"]}
    assert reasons[128] == "128 x 64 is not in blocks of 128" and not reasons[64]
    assert "good: 8 products" in run.output and "blocks of 16" in run.output
    again = CliRunner().invoke(
        app, ["study", "sparsity", "--redraw", str(tmp_path / "sparsity.json"), "--out", str(tmp_path / "b")]
    )
    assert again.exit_code == 0 and len(list((tmp_path / "b").glob("*.svg"))) == 2


@pytest.mark.parametrize(
    "option",
    [("--sizes", "8x128"), ("--sizes", "8x100x64"), ("--densities", "1.5"), ("--densities", "x"),
     ("--dtype", "fp8"), ("--widths", "8")],
    ids=" ".join,
)  # fmt: skip
def test_bad_options_are_refused(option: tuple[str, str], tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["study", "sparsity", "--device", "cpu", *option, "--out", str(tmp_path)])
    assert isinstance(run.exception, WeftError) and option[0] in str(run.exception)


@pytest.mark.parametrize(
    ("impl", "error", "is_fault"),
    [("eager", RuntimeError("an illegal address"), True), ("eager", WeftError("no"), False),
     ("torch", RuntimeError("not implemented for this dtype"), False)],
)  # fmt: skip
def test_a_kernel_of_weft_that_fails_is_a_fault_and_the_study_goes_on(
    quick: None, monkeypatch: pytest.MonkeyPatch, impl: str, error: Exception, is_fault: bool
) -> None:
    real = sparsity.operands

    def failing(contender: Contender, x: torch.Tensor, w: torch.Tensor) -> sparsity.Operands:
        if contender.kind == BLOCK and contender.block == 32:
            raise error
        return real(contender, x, w)

    monkeypatch.setattr(sparsity, "operands", failing)
    monkeypatch.setitem(
        sparsity.IMPLEMENTATIONS, "cpu", {DENSE: ("torch",), SEMI: (), BLOCK: (impl,), CSR: ()}
    )
    record = sparsity.run("cpu", [(8, 64, 64)], (0.5,), "fp32", quick=True, log=no_log)
    assert bool(record["wrong"]) is is_fault
    assert all(str(error) in line for line in record["wrong"])
    rows = {row["block"]: row for row in record["rows"] if row["mode"] == "inference"}
    assert rows[32]["us"] is None and str(error).split()[0] in rows[32]["reason"] and rows[64]["us"]


def test_a_wrong_result_is_a_fault_and_a_stop_keeps_complete_sizes(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sparsity.operands

    def wrong(contender: Contender, x: torch.Tensor, w: torch.Tensor) -> sparsity.Operands:
        parts = real(contender, x, w)
        if contender.block == 32:
            parts.values[0, 0] *= 2
        return parts

    monkeypatch.setattr(sparsity, "operands", wrong)
    record = sparsity.run("cpu", [(8, 64, 64)], (0.5,), "fp32", quick=True, log=no_log)
    assert len(record["wrong"]) == 2 and "block 32 eager" in record["wrong"][0]
    rounds = sparsity.sample_rounds

    def stopped(runners: Any, *arguments: Any) -> Any:
        if next(iter(runners)).kind == DENSE and len(stops) == 1:
            raise KeyboardInterrupt
        stops.append(1)
        return rounds(runners, *arguments)

    stops: list[int] = []
    monkeypatch.setattr(sparsity, "sample_rounds", stopped)
    with pytest.raises(Interrupted) as caught:
        sparsity.run("cpu", [(8, 64, 64)], (0.5,), "fp32", quick=True, log=no_log)
    assert {row["mode"] for row in caught.value.partial["rows"]} == {"inference"}


@pytest.mark.parametrize("is_measured", [False, True])
def test_the_page_says_what_was_measured(is_measured: bool, record: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    if is_measured:
        (tmp_path / "toy" / sparsity_report.RECORD).write_text(json.dumps(record))
    text = sparsity_report.markdown(tmp_path)
    assert ("Not measured yet" in text) != is_measured and (
        "blocks of 64 pay below 25 %" in text
    ) == is_measured
