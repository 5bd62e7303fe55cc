"""Batch invariance: the check detects rows that depend on their batch, position or memory address."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from weft.cli import app
from weft.core import Implementation, WeftError, registry
from weft.dispatch.operator import clear_caches
from weft.workbench.check.batch_invariance import CUTS, SIZES, Part, compare_rows, default_cases, parts

SOFTMAX = registry.operator("softmax")
CASE = SOFTMAX.case("fp32-3x129")


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def other_bits(y: torch.Tensor) -> torch.Tensor:
    """Return the same numbers, one of each row by one unit in the last place larger."""
    y = y.clone()
    y[:, 0] = torch.nextafter(y[:, 0], torch.ones_like(y[:, 0]))
    return y


def by_batch(x: torch.Tensor) -> torch.Tensor:
    return other_bits(softmax(x)) if x.shape[0] == 7 else softmax(x)


def by_place(x: torch.Tensor) -> torch.Tensor:
    y = softmax(x)
    y[-1:] = other_bits(y[-1:])
    return y


def by_memory(x: torch.Tensor) -> torch.Tensor:
    return softmax(x) if x.storage_offset() else other_bits(softmax(x))


def compare(forward: Any, direction: str = "forward", **more: Any) -> Any:
    candidate = Implementation(operator="softmax", name="it", backend="eager", forward=forward, **more)
    return compare_rows(SOFTMAX, candidate, CASE, direction, "cpu", 5)


def test_rows_that_depend_on_nothing_else_are_invariant() -> None:
    verdict = compare(softmax)
    assert verdict.is_invariant and verdict.rows == 8192 and verdict.compared > 5 * sum(SIZES)


@pytest.mark.parametrize("forward", [by_batch, by_place, by_memory])
def test_rows_that_depend_on_their_batch_place_or_memory_differ(forward: Any) -> None:
    verdict = compare(forward)
    assert not verdict.is_invariant and 0 < verdict.rows_differing <= verdict.differing
    assert verdict.smallest == (7 if forward is by_batch else 1)


def test_a_gradients_rows_are_compared_and_a_weights_gradient_is_not() -> None:
    def backward(grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        dx = y * (grad - (grad * y).sum(-1, keepdim=True))
        return (other_bits(dx) if y.shape[0] == 8 else dx,)

    assert compare(softmax, "backward").is_invariant
    verdict = compare(softmax, "backward", backward=backward)
    assert verdict.smallest == 8 and compare(softmax, backward=backward).is_invariant
    # The gradient of a norm's weight is a sum over the rows: it has another value for each batch.
    norm = registry.operator("layer_norm")
    eager = registry.implementation("layer_norm", "eager")
    assert compare_rows(norm, eager, norm.case("fp32-7x129"), "backward", "cpu", 5).rows == 8192


def test_what_cannot_be_compared_has_a_reason() -> None:
    cuda = compare_rows(SOFTMAX, registry.implementation("softmax", "cuda"), CASE, "forward", "cpu", 5)
    assert "GPU" in cuda.reason and not cuda.is_invariant and cuda.compared == 0

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("not today")

    assert compare(fails).reason == "raised ValueError: not today"
    assert "other form" in compare(lambda x: x.sum(-1) if len(x) == 7 else x).reason
    embedding = registry.operator("embedding")
    torch_s = registry.implementation("embedding", "torch")
    none = compare_rows(embedding, torch_s, default_cases(embedding, "cpu")[0], "backward", "cpu", 5)
    assert none.reason == "it returns nothing that has rows in this direction"


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("softmax", "fp32-33x65-sliced", "not contiguous"),
        ("layer_norm", "fp32-1031", "a single row"),
        ("sum", "fp32-7x129", "without rows"),
        ("attention", "fp32-3x1x20x32-1x37-padded", "drawn for this number of rows"),
    ],
)
def test_a_case_without_rows_to_cut_is_refused(name: str, case: str, reason: str) -> None:
    operator, eager = registry.operator(name), registry.implementation(name, "eager")
    with pytest.raises(WeftError, match=reason):
        compare_rows(operator, eager, operator.case(case), "forward", "cpu", 5)


@pytest.mark.parametrize("rows", [16, 64, 8192])
def test_the_parts_have_every_size_both_ends_and_cover_the_batch_by_each_cut(rows: int) -> None:
    every = list(parts(rows, random.Random(3)))
    assert all(p.start >= 0 and p.start + p.size <= rows and p.size > 0 for p in every)
    for size in (s for s in SIZES if s < rows):
        assert {Part(0, size, False), Part(rows - size, size, True)} <= set(every)
    covered = sum(p.size for p in every) - 5 * sum(s for s in SIZES if s < rows)
    assert covered == len(CUTS) * rows
    assert {p.copied for p in every} == {True, False}


@pytest.mark.parametrize("name", [n for n in registry.operator_names() if registry.operator(n).rows])
def test_the_rows_of_each_operator_exist(name: str) -> None:
    operator = registry.operator(name)
    assert set(operator.rows) <= {i.name for i in operator.cases[0].inputs}
    library = "torch" if "torch" in registry.implementation_names(name) else "eager"
    implementation = registry.implementation(name, library)
    for case in default_cases(operator, "cpu")[:1]:
        assert compare_rows(operator, implementation, case, "forward", "cpu", 5).compared, name


RELU = """
import torch, weft

@weft.implementation("relu", backend="eager")
def mine(x):
    return torch.relu(x) if len(x) != 64 else torch.relu(x) + 1e-7
"""


def test_the_command_compares_and_exits_1_if_a_row_differs(tmp_path: Path) -> None:
    def run(*arguments: object) -> Any:
        return CliRunner().invoke(app, ["check", "relu", "--rows", "--device", "cpu", *map(str, arguments)])

    passing = run("--impl", "torch", "--impl", "cuda", "--direction", "forward")
    assert passing.exit_code == 0, passing.output
    assert "invariant: 3 of 3 comparisons of relu" in passing.output and "no GPU: cuda" in passing.output
    file = tmp_path / "mine.py"
    file.write_text(RELU)
    case = ("--case", "fp32-7x129", "--seed", 5)
    differs = run("--with", file, *case, "--json")
    assert differs.exit_code == 1, differs.output
    report = json.loads(differs.stdout)
    assert not report["passed"] and report["seed"] == 5
    assert {(v["direction"], v["smallest"]) for v in report["verdicts"]} == {
        ("forward", 64),
        ("backward", None),
    }
    table = run("--with", file, *case, "--direction", "forward", "--csv")
    assert table.stdout.splitlines()[1].startswith("relu,mine,forward,NO,8192,")
    file.write_text(RELU.replace("return", "import os; os._exit(3);"))
    ended = run("--with", file, *case)
    assert ended.exit_code == 1 and "nothing could be compared" in ended.output


def test_the_command_measures_calls_that_ask_for_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: str) -> Any:
        case = ("--case", "fp32-7x129", "--device", "cpu", "--seed", "5")
        return CliRunner().invoke(app, ["check", "--rows", "--batch-invariant", *case, *arguments])

    # The option does not run torch's GELU, whose rows differ with `--rows` alone.
    result = run("gelu")
    assert result.exit_code == 0, result.output
    assert "eager/invariant" in result.output and "invariant: 2 of 2 comparisons of gelu" in result.output
    eager, torch_s = (registry.implementation("gelu", n) for n in ("eager", "torch"))
    none = run("gelu", "--impl", "torch")
    assert none.exit_code == 1 and "nothing could be compared" in none.output
    # A variant that declares batch invariance wrongly: the call runs it, and the command detects it.
    broken = replace(torch_s, name="eager/invariant", backend="eager")
    monkeypatch.setattr(registry, "implementation", _with_variant(replace(eager, invariant=broken)))
    clear_caches()
    differs = run("gelu", "--csv")
    monkeypatch.undo()
    clear_caches()
    assert differs.exit_code == 1, differs.output
    assert "gelu,eager/invariant,forward,NO,8192," in differs.stdout


def _with_variant(implementation: Implementation) -> Any:
    known = registry.implementation

    def find(operator: str, name: str) -> Any:
        if operator == "gelu" and name.startswith("eager"):
            return implementation.invariant if name.endswith("/invariant") else implementation
        return known(operator, name)

    return find


def test_the_command_refuses_what_has_no_rows() -> None:
    for arguments in (
        ["sum", "--rows"],
        ["gelu", "--rows", "--all-cases"],
        ["gelu", "--batch-invariant"],
        ["gelu", "--rows", "--batch-invariant", "--with", __file__],
    ):
        refused = CliRunner().invoke(app, ["check", *arguments])
        assert isinstance(refused.exception, WeftError) or refused.exit_code == 2, refused.output
