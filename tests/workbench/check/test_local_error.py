"""The rule ``local``: an error is measured at the scale of its slice of the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from weft.core import BACKWARD, FORWARD, Case, Input, Verdict, registry
from weft.core.record import FAIL, PASS
from weft.workbench.calls.buffers import allocate_buffers
from weft.workbench.check import tolerance
from weft.workbench.check.by_rows import merge
from weft.workbench.check.check import check
from weft.workbench.check.local_error import LocalCall, LocalJudge, SliceFigures
from weft.workbench.check.output_judge import OutputJudges
from weft.workbench.check.slices import SliceLayout
from weft.workbench.check.tolerance import Bound, Measured, measure
from weft.workbench.selftest.judge import Subject
from weft.workbench.selftest.mutants import catalogue
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.selftest.mutants.small_parts import MUTANTS

SEEDS = (5, 6)
SOFTMAX = [m for m in catalogue() if m.id in ("W25/softmax/eager/small-elements", "H8/softmax/eager/flushed")]


def verdicts(mutant: Mutant, without: tuple[str, ...] = ()) -> list[Verdict]:
    subject = Subject.of(mutant)
    cases = subject.operator.select("check", "cpu")
    if mutant.operator == "softmax":
        cases = [subject.operator.case("fp32-24x200-rising")]
    options = {"seeds": SEEDS, "baseline": subject.baseline, "without": without}
    return [check(subject.operator, mutant.make(), c, FORWARD, "cpu", **options) for c in cases]


@pytest.mark.parametrize("mutant", [m for m in (*MUTANTS, *SOFTMAX) if not m.honest], ids=lambda m: m.id)
def test_only_the_local_rule_refuses_what_is_wrong_in_small_parts(mutant: Mutant) -> None:
    for verdict in verdicts(mutant):
        assert verdict.status == FAIL and verdict.reason.startswith("local: RMS error "), verdict.reason
        assert verdict.tolerance_used is not None and verdict.tolerance_used < 0.5
    assert {v.status for v in verdicts(mutant, ("local",))} == {PASS}


@pytest.mark.parametrize("mutant", [m for m in (*MUTANTS, *SOFTMAX) if m.honest], ids=lambda m: m.id)
def test_honest_small_parts_pass(mutant: Mutant) -> None:
    for verdict in verdicts(mutant):
        assert verdict.status == PASS, verdict.reason
        (finding,) = (f for f in verdict.findings if f.check == "local")
        assert "could be zeros without notice" in finding.detail


def test_the_verdict_states_how_much_could_be_zero() -> None:
    """Most elements of noisy rows could be zero, but few of a product; without slices there is no detail."""
    verdict_by_name = {}
    noise = next(m for m in MUTANTS if m.operator == "residue")
    product = registry.operator("matmul")
    verdict_by_name["noise"] = verdicts(noise)[0]
    torchs = registry.implementation("matmul", "torch")
    case = product.case("fp32-128x256x192")
    verdict_by_name["product"] = check(product, torchs, case, FORWARD, "cpu", seeds=SEEDS)
    total = registry.operator("sum")
    case = total.case("fp32-1031")
    verdict_by_name["sum"] = check(
        total, registry.implementation("sum", "torch"), case, FORWARD, "cpu", seeds=SEEDS
    )
    details = {
        n: next(f.detail for f in v.findings if f.check == "local") for n, v in verdict_by_name.items()
    }
    assert details["sum"] == ""
    share = {n: float(d.split(";")[1].split()[0]) for n, d in details.items() if d}
    assert share["noise"] > 0.5 and share["product"] < 0.01


CANCELLING = {
    "layer_norm": ("fp16-7x129",),
    "cross_entropy": ("fp32-2x1000-2-0.1-0.001",),
    "attention": ("fp32-1x1x20x80-causal",),
    "gelu": ("fp32-4099-sweep", "bf16-4099-sweep"),
    "softmax": ("fp32-5x257-large", "fp16-1x4096-rising"),
}


@pytest.mark.parametrize(("name", "case"), [(n, c) for n, cases in CANCELLING.items() for c in cases])
def test_torchs_own_kernels_pass_where_numbers_cancel(name: str, case: str) -> None:
    operator, library = registry.operator(name), registry.implementation(name, "torch")
    details = []
    for direction in operator.directions:
        verdict = check(operator, library, operator.case(case), direction, "cpu", seeds=SEEDS)
        assert verdict.status == PASS, verdict.reason
        details += [f.detail for f in verdict.findings if f.check == "local" and f.detail]
    assert details  # a scalar or two have no slices


@pytest.mark.parametrize("shape", [(100,), (7, 129), (5, 1, 40, 33), (2, 3, 4, 40), (1, 300)])
def test_the_sums_of_slices_do_not_depend_on_the_pieces(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    reference = torch.randn(shape, generator=generator, dtype=torch.float64).exp()
    output = reference + torch.randn(shape, generator=generator)
    layout = SliceLayout(shape)
    whole = layout.error_sums(output, reference)
    for part in layout.split(whole):
        assert float(part.sum()) == pytest.approx(float((output - reference).square().sum()))
    monkeypatch.setitem(tolerance.PIECES, "cpu", 37)
    assert torch.allclose(layout.error_sums(output, reference), whole, rtol=1e-12)
    measured = measure(output, reference, slices=layout)
    assert measured.squares is not None and torch.allclose(measured.squares, whole, rtol=1e-12)
    rows = next((n for n in shape if n > 1), 1)
    if shape[0] == rows:  # in the form of a reference that is computed by rows
        parts = [(output[i : i + 3], reference[i : i + 3], i) for i in range(0, rows, 3)]
        pieces = [(i, measure(o, r, slices=layout, offset=i * reference[0].numel())) for o, r, i in parts]
        merged = merge(pieces).squares
        assert merged is not None and torch.allclose(merged, whole, rtol=1e-12)
    one = torch.zeros(shape, dtype=torch.float64)
    one.view(-1)[70] = 1.0
    names = [layout.name(int(n)) for n in layout.error_sums(one, torch.zeros_like(one)).nonzero()]
    assert len(names) == len(layout.parts)


def test_the_local_rule_applies_to_a_timed_output() -> None:
    """The rule without its oracle refuses an output as wrong as zeros, and accepts rounding noise."""
    mutant = next(m for m in MUTANTS if m.id.startswith("W25/fade_rows/eager/zeros"))
    subject = Subject.of(mutant)
    (case, *_) = subject.operator.cases
    assert isinstance(case, Case) and isinstance(case.inputs[0], Input)
    buffers = allocate_buffers(case, "cpu", None, 3)
    decide = OutputJudges(subject.operator, case, FORWARD, "cpu", subject.baseline)(buffers)
    right = subject.operator.reference(*buffers.inputs)
    assert decide(right) is None
    assert "row" in str(decide(mutant.make().forward(*buffers.inputs)))
    noise = next(m for m in MUTANTS if m.operator == "residue" and m.honest)
    subject = Subject.of(noise)
    case = subject.operator.cases[0]
    buffers = allocate_buffers(case, "cpu", None, 3)
    decide = OutputJudges(subject.operator, case, FORWARD, "cpu", subject.baseline)(buffers)
    assert decide(noise.make().forward(*buffers.inputs)) is None


def test_what_the_check_accepts_is_not_refused_when_it_is_timed() -> None:
    """Two roundings leave an error as large as a sum that cancels. Other inputs show that it is noise."""
    operator, dtype = registry.operator("linear"), "bfloat16"
    shapes = {"x": (512, 8), "weight": (512, 8), "bias": (512,)}
    inputs = tuple(Input(name=name, shape=shape, dtype=dtype) for name, shape in shapes.items())
    case = Case(name="bf16-512x512x8", inputs=inputs)
    baseline = registry.implementation("linear", "eager")
    buffers = allocate_buffers(case, "cpu", None, 3)
    x, weight, bias = buffers.inputs
    decide = OutputJudges(operator, case, FORWARD, "cpu", baseline)(buffers)
    product = x.float() @ weight.float().t()
    assert decide((product.bfloat16() + bias,)) is None
    exact = product + bias.float()
    without_small = torch.where(exact.abs() < 0.5, 0.0, exact).bfloat16()
    assert decide((without_small,)) is not None


def test_small_parts_of_a_gradient_count() -> None:
    operator = registry.operator("softmax")
    library = registry.implementation("softmax", "eager")

    def gradient(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y * (grad - (grad * y).sum(-1, keepdim=True))

    def without_small(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = gradient(grad, y)
        return torch.where(result.abs() < 1e-10, 0.0, result)

    case = operator.case("fp32-24x200-rising")

    def verdict(function: Callable[..., torch.Tensor], without: tuple[str, ...] = ()) -> Verdict:
        candidate = replace(library, name="it", backward=lambda g, y: (function(g, y),))
        return check(operator, candidate, case, BACKWARD, "cpu", seeds=SEEDS, without=without)

    assert verdict(gradient).status == PASS
    assert verdict(without_small).reason.startswith("local: ")
    assert verdict(without_small, ("local",)).status == PASS


def test_a_baseline_that_is_exact_by_luck_at_one_seed_refuses_no_candidate() -> None:
    """The other seeds show how large its error is; a seed at which a slice is noise shows nothing."""
    layout, answer = SliceLayout((64, 64)), torch.ones(64, 64, dtype=torch.float64)
    whole = Bound(own=0.0, maximum=1.0, rms=1.0, scale=1.0, baseline_rms=0.0)
    sizes = layout.size_sums(answer, torch.float32)

    def share(error: float, *baseline_errors: float) -> float:
        local = LocalJudge([layout], lambda seed: [[answer]])
        for seed, baseline in enumerate(baseline_errors):
            squares = layout.error_sums(answer + baseline, answer)
            local.figures[seed, 0] = SliceFigures(sizes, squares, 0.0)
        squares = layout.error_sums(answer + error, answer)
        measured = Measured(maximum=error, rms=error, squares=squares)
        call = LocalCall(0, [answer + error], lambda: [answer])
        return local.judge(call, 0, measured, whole)[0]

    assert share(1e-5, 0.0) > 1 and share(1e-5, 0.0, 1e-9) > 1
    assert share(1e-5, 0.0, 1e-6) == pytest.approx(1e-5 / (16 * 1e-6), rel=1e-3)
    assert share(1e-5, 0.0, 0.5) > 1, "noise at the second seed"
