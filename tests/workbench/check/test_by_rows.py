"""References by rows: the same verdict as with whole outputs; they are not used for dependent rows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch

from weft.core import FORWARD, Case, Cost, Implementation, Input, Operator, registry
from weft.workbench.calls.buffers import allocate_buffers
from weft.workbench.calls.guarded_memory import digest
from weft.workbench.check import by_rows
from weft.workbench.check import reference as references
from weft.workbench.check.by_rows import Moments, row_reference
from weft.workbench.check.oracle import Oracle
from weft.workbench.check.output_judge import OutputJudges
from weft.workbench.check.tolerance import measure, participants, rms
from weft.workbench.timing.altered_inputs import altered, choose
from weft.workbench.timing.recheck import LargeJudge

ROWS, COLUMNS = 40, 33
Compute = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split problems of a few rows, as gigabytes are split otherwise."""
    monkeypatch.setattr(by_rows, "MIN_BYTES", 1)
    monkeypatch.setattr("weft.workbench.check.oracle.MIN_BYTES", 1)
    monkeypatch.setattr(by_rows, "PIECE_ELEMENTS", (7 * COLUMNS, 7 * COLUMNS))


def make_operator(compute: Compute, *shapes: tuple[int, ...], splits: bool = True) -> Operator:
    inputs = tuple(Input(name=f"x{n}", shape=shape) for n, shape in enumerate(shapes))
    return Operator(
        name="toy",
        reference=compute,
        cases=(Case(name="case", inputs=inputs),),
        cost=lambda case, direction: Cost(read=1, written=1),
        splits_rows=splits,
    )


def oracle_of(operator: Operator, native: Compute | None = None) -> Oracle:
    forward = native or operator.reference
    baseline = Implementation(operator="toy", name="eager", backend="eager", forward=forward)
    oracle = Oracle(operator, operator.cases[0], FORWARD, "cpu", (1, 2), baseline)
    oracle.further_seeds = lambda: ()  # type: ignore[method-assign]  # large problems have none
    return oracle


BY_ROWS: dict[str, tuple[Compute, tuple[tuple[int, ...], ...]]] = {
    "softmax": (lambda x: torch.softmax(x, 1), ((ROWS, COLUMNS),)),
    "two of the same rows": (lambda x, y: (x * y).cumsum(1), ((ROWS, COLUMNS), (ROWS, COLUMNS))),
    "product": (lambda a, b: a @ b, ((ROWS, COLUMNS), (COLUMNS, 5))),
    "square product": (lambda a, b: a @ b, ((ROWS, ROWS), (ROWS, ROWS))),
    "a number for each row": (lambda x, y: x.sum(1) * y, ((ROWS, COLUMNS), (ROWS,))),
}
MEANS: dict[str, tuple[Compute, tuple[tuple[int, ...], ...]]] = {
    "mean squared error": (lambda x, y: ((x - y) ** 2).mean(), ((ROWS, COLUMNS), (ROWS, COLUMNS))),
    "mean over the batch": (lambda x: x.mean(0), ((ROWS, COLUMNS),)),
}
DEPENDENT: dict[str, tuple[Compute, tuple[tuple[int, ...], ...]]] = {
    "batch norm": (lambda x: (x - x.mean(0)) / x.std(0), ((ROWS, COLUMNS),)),
    "norm of all": (lambda x: x / x.norm(), ((ROWS, COLUMNS),)),
    "sum down the rows": (lambda x: x.cumsum(0), ((ROWS, COLUMNS),)),
    "largest of all": (lambda x: x.max(), ((ROWS, COLUMNS),)),
}


@pytest.mark.parametrize("name", [*BY_ROWS, *MEANS])
def test_bounds_and_errors_are_those_of_whole_answers(name: str) -> None:
    compute, shapes = (BY_ROWS | MEANS)[name]
    split, whole = oracle_of(make_operator(compute, *shapes)), oracle_of(make_operator(compute, *shapes))
    whole.may_split = False
    reference = row_reference(split.operator, split.inputs(1), split.case)
    assert reference is not None and reference.mean == (name in MEANS)
    for ours, theirs in zip(split.bounds, whole.bounds, strict=True):
        for field in ("maximum", "rms", "scale", "baseline_rms"):
            assert getattr(ours, field) == pytest.approx(getattr(theirs, field), rel=1e-9, abs=1e-12)
    assert split.may_split
    output = compute(*split.inputs(2))
    output.view(-1)[output.numel() * 2 // 3] += 0.5
    ours, theirs = (o.errors(2, [output], o.bounds)[0] for o in (split, whole))
    assert ours.maximum == pytest.approx(theirs.maximum) and ours.rms == pytest.approx(theirs.rms)
    assert ours.worst[0] == theirs.worst[0] == output.numel() * 2 // 3


@pytest.mark.parametrize("name", DEPENDENT)
def test_dependent_rows_are_not_split(name: str) -> None:
    compute, shapes = DEPENDENT[name]
    oracle = oracle_of(make_operator(compute, *shapes))
    assert row_reference(oracle.operator, oracle.inputs(1), oracle.case) is None
    assert oracle.bounds and not oracle.may_split
    x = torch.randn(ROWS, COLUMNS)
    assert row_reference(make_operator(torch.relu, (ROWS, COLUMNS), splits=False), [x], oracle.case) is None


def test_rows_that_depend_only_in_large_batches_are_noticed_by_the_baseline() -> None:
    def centred_if_many(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0) * 10 if x.shape[0] > 20 else x

    oracle = oracle_of(make_operator(centred_if_many, (ROWS, COLUMNS)))
    assert row_reference(oracle.operator, oracle.inputs(1), oracle.case) is not None
    assert oracle.bounds[0].baseline_rms < 1e-5  # with the result of the pieces it would be about 1
    assert not oracle.may_split
    assert oracle.errors(1, [centred_if_many(oracle.inputs(1)[0])])[0].maximum < 1e-4


def test_moments_of_pieces_are_those_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    for values in (
        torch.randn(1000, generator=generator, dtype=torch.float64) * torch.logspace(-3, 3, 1000),
        torch.tensor([1.0, float("nan"), float("-inf"), 2.0, 3.0]).double(),
        torch.full((100,), 7.0).double(),
        torch.zeros(10).double(),
    ):
        moments = Moments(values.numel(), values.dtype)
        for piece in values.split(7):
            moments.add(piece)
        assert moments.rms == pytest.approx(rms(values))
        assert moments.participants == pytest.approx(participants(values))


def test_special_values_are_compared_as_before() -> None:
    want = torch.tensor([1.0, 2.0, float("inf"), float("nan"), 1e300], dtype=torch.float64)
    right = want.float()
    assert measure(right, want).misplaced == 0 and measure(right, want).maximum == 0.0
    for index, value in ((0, float("nan")), (2, 1.0), (3, 0.0), (4, 3.0)):
        wrong = right.clone()
        wrong[index] = value
        measured = measure(wrong, want)
        assert measured.misplaced == 1 and measured.first_misplaced[0] == index


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.int64])
def test_a_digest_shows_every_changed_element(dtype: torch.dtype) -> None:
    for count in (1, 7, 8, 1027):
        tensor = torch.randint(0, 2, (count,)).to(dtype)
        before = digest(tensor)
        assert digest(tensor.clone()) == before and digest(tensor.view(1, -1)) == before
        for index in {0, count // 2, count - 1}:
            changed = tensor.clone()
            changed[index] = 1 - changed[index].to(torch.int64)
            assert digest(changed) != before, (count, index)
    exchanged = torch.arange(1 << 21)
    before = digest(exchanged)
    exchanged[[0, 1 << 20]] = exchanged[[1 << 20, 0]]  # the same position in two pieces
    assert digest(exchanged) != before
    assert digest(torch.arange(10.0)[1:]) == digest(torch.arange(1.0, 10.0))  # not at a word's beginning


@pytest.mark.parametrize("by_rows", [True, False])
def test_a_judge_remembers_altered_elements(by_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not by_rows:
        monkeypatch.setattr("weft.workbench.check.oracle.MIN_BYTES", 1 << 60)
    operator = make_operator(lambda x: 2 * x, (ROWS, COLUMNS))
    case, baseline = operator.cases[0], oracle_of(operator).baseline
    buffers, other = (allocate_buffers(case, "cpu", None, seed) for seed in (1, 2))
    before = 2 * buffers.inputs[0]
    with altered(buffers, choose(other, seed=3, many=True)) as contents:
        decide = OutputJudges(operator, case, FORWARD, "cpu", baseline)(contents)
        after = 2 * buffers.inputs[0]
    assert not after.equal(before)
    assert decide(after) is None
    assert "error" in (decide(before) or "")


def test_contents_of_a_large_problem_share_the_first_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return torch.sigmoid(x)

    operator = make_operator(torch.sigmoid, (ROWS, COLUMNS))
    baseline = Implementation(operator="toy", name="eager", backend="eager", forward=forward)
    for elements, expected in ((ROWS * COLUMNS, 0), (ROWS * COLUMNS + 1, 2)):
        monkeypatch.setattr("weft.workbench.check.output_judge.SHARED_ELEMENTS", elements)
        judges = OutputJudges(operator, operator.cases[0], FORWARD, "cpu", baseline)
        judges(allocate_buffers(operator.cases[0], "cpu", None, 1))
        calls.clear()
        for seed in (2, 3):
            buffers = allocate_buffers(operator.cases[0], "cpu", None, seed)
            decide, output = judges(buffers), torch.sigmoid(buffers.inputs[0])
            assert decide(output) is None
            stale = torch.sigmoid(allocate_buffers(operator.cases[0], "cpu", None, 1).inputs[0])
            assert "error" in (decide(stale) or "")
        assert len(calls) >= expected and bool(calls) == bool(expected)


def test_shared_bounds_are_computed_beforehand_for_large_problems_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    compute, shapes = DEPENDENT["batch norm"]
    for reference, elements, is_shared in (
        (torch.sigmoid, ROWS * COLUMNS, True),
        (torch.sigmoid, ROWS * COLUMNS + 1, False),
        (compute, ROWS * COLUMNS, True),
        (compute, ROWS * COLUMNS + 1, False),
    ):

        def forward(x: torch.Tensor, compute: Any = reference) -> torch.Tensor:
            calls.append(x)
            return compute(x)

        baseline = Implementation(operator="toy", name="eager", backend="eager", forward=forward)
        monkeypatch.setattr("weft.workbench.check.output_judge.SHARED_ELEMENTS", elements)
        operator = make_operator(reference, *shapes)
        case = operator.cases[0]
        judges = OutputJudges(operator, case, FORWARD, "cpu", baseline)
        judges.share_bounds(allocate_buffers(case, "cpu", None, 1))
        calls.clear()
        if is_shared:
            buffers = allocate_buffers(case, "cpu", None, 2)
            decide, output = judges(buffers), reference(buffers.inputs[0])
            assert isinstance(decide, LargeJudge) and decide.by_rows == (reference is torch.sigmoid)
            assert not calls and decide(output) is None and "error" in (decide(output + 1.0) or "")
        assert (judges._shared is not None) == is_shared


@pytest.mark.parametrize("name", ["by rows", "batch norm"])
def test_the_bounds_of_a_check_serve_the_timing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.workbench.check.output_judge.SHARED_ELEMENTS", 1)
    calls: list[torch.Tensor] = []
    compute, shapes = DEPENDENT.get(name, (torch.sigmoid, ((ROWS, COLUMNS),)))
    operator = make_operator(compute, *shapes)
    baseline = Implementation(
        operator="toy", name="eager", backend="eager", forward=lambda x: (calls.append(x), compute(x))[1]
    )
    case = operator.cases[0]
    oracle = Oracle(operator, case, FORWARD, "cpu", (5, 6), baseline)
    bounds = oracle.bounds
    judges = OutputJudges(operator, case, FORWARD, "cpu", baseline)
    judges.share_bounds_of(oracle)
    del oracle
    calls.clear()
    buffers = allocate_buffers(case, "cpu", None, 2)
    judges.share_bounds(buffers)
    decide = judges(buffers)
    assert isinstance(decide, LargeJudge) and decide.bounds == bounds and decide.seed == 2
    right = compute(buffers.inputs[0])
    assert decide(right) is None and "error" in str(decide(right + 1.0)) and not calls


def test_a_share_of_the_rows_is_compared_at_random() -> None:
    operator = make_operator(torch.sigmoid, (ROWS, COLUMNS))
    judges = OutputJudges(operator, operator.cases[0], FORWARD, "cpu", oracle_of(operator).baseline)
    buffers = allocate_buffers(operator.cases[0], "cpu", None, 1)
    judge_rows = judges(buffers)
    assert isinstance(judge_rows, LargeJudge)
    half = judge_rows.of_share(0.5)
    right = torch.sigmoid(buffers.inputs[0])
    wrong = right.clone()
    wrong[3, 5] += 1.0  # in one of six pieces
    assert half(right) is None and judge_rows(wrong) is not None
    detections = sum(half(wrong) is not None for _ in range(40))
    assert 5 <= detections <= 35  # the chance of another number is below 1e-6


def test_inputs_are_freed_when_an_output_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle of objects would keep gigabytes until the garbage collector runs."""
    operator = make_operator(torch.sigmoid, (ROWS, COLUMNS))
    case = operator.cases[0]
    eager = Implementation(operator="toy", name="eager", backend="eager", forward=torch.sigmoid)
    input_refs = []

    def allocate(*arguments):
        buffers = allocate_buffers(*arguments)
        input_refs.extend(map(ref, buffers.inputs))
        return buffers

    monkeypatch.setattr("weft.workbench.check.output_judge.allocate_buffers", allocate)
    gc.collect()
    gc.disable()
    try:
        buffers = allocate(case, "cpu", None, 3)
        decide = OutputJudges(operator, case, FORWARD, "cpu", eager)(buffers)
        output = torch.sigmoid(buffers.inputs[0])
        del buffers
        assert decide(output) is None and "error" in str(decide(output + 1.0))
        assert len(input_refs) == 3 and [tensor() for tensor in input_refs] == [None] * 3
    finally:
        gc.enable()


def test_rows_of_a_square_transpose_are_not_computed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Input and gradient have one shape, and the rows of one are the columns of the other."""
    monkeypatch.setattr(references, "PIECE", 1)
    operator = registry.operator("transpose")
    case = Case(name="fp32-8x8", inputs=(Input(name="x", shape=(8, 8), dtype="float32"),))
    x, grad = torch.randn(8, 8), torch.randn(8, 8)
    (gradient,) = references.gradients_in_float64(operator, [x], grad, case)
    assert torch.equal(gradient, grad.t().double())
