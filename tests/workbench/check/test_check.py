"""The check is itself checked: each planted wrong kernel is refused, by the rule meant to do it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner

import weft.cli.check
import weft.cli.ops
from helpers.planted import HONEST, WRONG, Planted
from helpers.toys import NORM, PLAIN, SOFTMAX, softmax
from weft import backends
from weft.core import (
    FORWARD,
    Implementation,
    Support,
    Tolerance,
    Verdict,
    WeftError,
    no,
    registry,
)
from weft.core.record import FAIL, PASS, UNSUPPORTED
from weft.workbench.calls import memory
from weft.workbench.calls.call import CallResult
from weft.workbench.calls.errors import SandboxDied
from weft.workbench.calls.guarded_memory import NAN, Arena, Poisoned, pattern_of
from weft.workbench.calls.seeds import fresh_seeds
from weft.workbench.check.check import ACROSS, check, check_all
from weft.workbench.check.oracle import Oracle
from weft.workbench.check.rules import RULES
from weft.workbench.check.tolerance import Measured, bound, measure, participants
from weft.workbench.sources.python_file import reference_implementation


def judge(one: Planted, **more: object) -> Verdict:
    baseline = Implementation(
        operator=one.operator.name, name="eager", backend="eager", forward=one.operator.reference
    )
    seeds = more.pop("seeds", None) or [11, 22, 33, 44, 55]
    oracle = Oracle(one.operator, one.case, one.direction, "cpu", seeds, baseline)
    implementation = more.pop("implementation", None) or one.implementation()
    return check(one.operator, implementation, one.case, one.direction, "cpu", oracle=oracle, **more)


@pytest.mark.parametrize("one", WRONG, ids=lambda p: p.id)
def test_a_wrong_kernel_is_refused_by_the_rule_meant_for_it(one):
    verdict = judge(one)
    assert verdict.status == FAIL
    (refused,) = [f for f in verdict.findings if f.status == FAIL]
    assert refused.check in one.rule.split("|"), verdict.reason
    assert verdict.reason == f"{refused.check}: {refused.detail}"
    json.dumps([f.detail for f in verdict.findings])


@pytest.mark.parametrize("one", HONEST, ids=lambda p: p.id)
def test_an_honest_kernel_passes(one):
    verdict = judge(one)
    assert verdict.status == PASS, verdict.reason
    assert verdict.tolerance_used is not None and verdict.tolerance_used <= 1
    assert {f.status for f in verdict.findings} == {PASS}


def test_every_rule_refuses_something_here():
    # 'stream' needs a GPU, 'replaced' a worker process (weft selftest has both); 'drift' is tested below, and
    # 'growth' in test_growth.py.
    tested_elsewhere = {"stream", "replaced", "drift", "growth"}
    covered = {rule for one in WRONG for rule in one.rule.split("|")} | tested_elsewhere
    assert covered == set(RULES) | set(ACROSS)


def _named(name: str) -> Planted:
    (planted,) = [one for one in WRONG if one.id.startswith(name)]
    return planted


def test_many_small_errors_are_refused_as_one_large_one_is():
    exact = Oracle(SOFTMAX, PLAIN, FORWARD, "cpu", [1], _eager()).answer(1)[0]
    allowed = Oracle(SOFTMAX, PLAIN, FORWARD, "cpu", [1], _eager()).bounds[0]
    off = 0.9 * allowed.maximum
    assert off > allowed.rms
    drifting = Planted("drifts", lambda: lambda x: (exact + off).float(), "drift")
    verdict = judge(drifting, seeds=[1])
    assert verdict.reason.startswith("drift: ")
    one_element = exact.clone()
    one_element[0, 0] += off
    spot = Planted("one element", lambda: lambda x: one_element.float(), "")
    assert judge(spot, seeds=[1]).status == PASS


def _eager() -> Implementation:
    return Implementation(operator="softmax", name="eager", backend="eager", forward=softmax)


@pytest.mark.parametrize(
    "name, rule",
    [
        ("W19 wrong layout", "layout"),
        ("one buffer", "kept"),
        ("other bits each", "repeats"),
        ("other bits elsewhere", "again"),
        ("W05 no mask on the store", "guards"),
    ],
)
def test_a_rule_left_out_lets_its_kernel_through(name, rule):
    one = _named(name)
    # A kernel that passes one rule may be refused by the next.
    without = {rule, "again"} if rule == "repeats" else {rule}
    assert judge(one).status == FAIL
    assert judge(one, without=without).status == PASS


def test_leaving_a_rule_out_never_raises():
    for one in {one.rule: one for one in WRONG}.values():
        verdict = judge(one, without=set(one.rule.split("|")), seeds=[1])
        assert verdict.status in (PASS, FAIL)


def test_an_unsupported_one_is_never_run(monkeypatch):
    def refuse(*arguments: object) -> Support:
        return no("needs a GPU; run on a machine with one")

    monkeypatch.setattr(backends, "support", refuse)
    verdict = judge(_named("exits"))
    assert (verdict.status, verdict.seeds) == (UNSUPPORTED, ())
    assert verdict.reason == "needs a GPU; run on a machine with one"


@pytest.mark.parametrize("free", [1, 1 << 40])
@pytest.mark.parametrize("raised", [True, False], ids=["raised", "died"])
def test_a_lack_of_memory_is_no_verdict_unless_the_code_took_it(raised, free, monkeypatch):
    """If others hold the GPU's memory, nothing is checked; if it is free, the code needed too much."""

    class Short:
        def __init__(self, *_):
            pass

        def load(self, seed):
            if not raised:
                raise SandboxDied("failed outside of a call: OutOfMemoryError: CUDA out of memory")

        def call(self, on_side_stream, without=()):
            violations = {"returns": "raised OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB"}
            return CallResult(outputs=(), layouts=(), violations=violations, seconds=0.0, unguarded=0)

    case = SOFTMAX.cases[0]
    oracle = Oracle(SOFTMAX, case, FORWARD, "cpu", fresh_seeds(1))
    _ = oracle.bounds
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    monkeypatch.setattr(backends, "support", lambda *_: Support(True))
    point = (SOFTMAX, reference_implementation(SOFTMAX), case, FORWARD)
    verdict = check(*point, "cuda", oracle=oracle, make_caller=Short)
    if free == 1:
        assert verdict.status == UNSUPPORTED and not [f for f in verdict.findings if f.status == FAIL]
        assert re.fullmatch(r"out of memory: needed about .* GiB, .* GiB free; run with .*", verdict.reason)
    else:
        rule = "returns" if raised else "channel"
        assert verdict.status == FAIL and verdict.reason.startswith(f"{rule}: ") and "OutOf" in verdict.reason
    assert check(*point, "cpu", oracle=oracle, make_caller=Short).status == FAIL


def test_seeds_are_fresh_and_recorded():
    assert len(set(fresh_seeds(20))) == 20
    verdict = judge(HONEST[0], seeds=[7, 8, 9])
    assert verdict.seeds == (7, 8, 9)
    again = judge(HONEST[0], seeds=[7, 8, 9])
    assert again.tolerance_used == verdict.tolerance_used


def test_a_raising_baseline_gives_no_pass():
    broken = Implementation(operator="softmax", name="eager", backend="eager", forward=_raises)
    oracle = Oracle(SOFTMAX, PLAIN, FORWARD, "cpu", [1], broken)
    verdict = check(SOFTMAX, _eager(), PLAIN, FORWARD, "cpu", oracle=oracle)
    assert verdict.status == FAIL
    assert "no tolerance" in verdict.reason and "boom" in verdict.reason


SWIGLU = registry.operator("swiglu")


def _swiglu(activation, name="eager"):
    def forward(gate, up):
        return (activation(gate.float()) * up.float()).to(gate.dtype).contiguous()

    return Implementation(operator="swiglu", name=name, backend="eager", forward=forward)


@pytest.mark.parametrize(
    "case", ["fp32-7x129", "fp32-2051-sweep", "fp16-7x129", "bf16-7x129", "fp32-3x1000-large"]
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "activation", [torch.sigmoid, torch.relu, torch.tanh], ids=["sigmoid", "relu", "tanh"]
)
def test_a_wrong_baseline_is_named_as_the_fault(activation, direction, case):
    """The baseline, torch and a copy of the baseline: all get the same verdict, and none passes."""
    eager, copy = _swiglu(activation), _swiglu(activation, "copy")
    candidates = [eager, copy, registry.implementation("swiglu", "torch")]
    point = (SWIGLU.case(case), direction, "cpu")
    if (case, direction) == ("fp32-3x1000-large", "forward") and activation is torch.relu:
        pytest.skip("relu and SiLU agree at values of 1e4, but for the rounding of a few near zero")
    for verdict in check_all(SWIGLU, candidates, *point, seeds=[5, 6], baseline=eager):
        assert verdict.status == FAIL and [f.check for f in verdict.findings] == ["yardstick"]
        assert "the baseline 'eager' disagrees with the reference: error " in verdict.reason
        assert f"of case {case} (got " in verdict.reason and "seed 5" in verdict.reason
        assert verdict.reason.endswith("fix spec.py's reference or with_eager.py first")
        json.dumps([f.detail for f in verdict.findings])
    for verdict in check_all(SWIGLU, candidates[2:], *point, seeds=[5, 6]):
        assert verdict.status == PASS, verdict.reason


def test_a_baseline_a_thousandth_off_is_a_fault_in_float32():
    eager = _swiglu(lambda x: 1.001 * torch.nn.functional.silu(x))
    verdict = check(SWIGLU, eager, SWIGLU.case("fp32-7x129"), FORWARD, "cpu", baseline=eager)
    assert verdict.status == FAIL and verdict.reason.startswith("yardstick: the baseline 'eager' disagrees")


@pytest.mark.sampled(15)  # a point of test_conformance.py refuses a faulty baseline too
@pytest.mark.parametrize("name", registry.operator_names())
def test_no_baseline_of_weft_is_a_fault(name):
    """Run at every small case of a CPU, so that no kind is left out: cancellation, long rows, short types."""
    operator = registry.operator(name)
    cases = [c for c in operator.cases if {"check", "edge"} & c.tags and "cpu" in c.devices]
    faults = {}
    for case in cases:
        for direction in operator.directions:
            if max(i.numel for i in case.inputs) > 1 << 16:
                continue
            oracle = Oracle(operator, case, direction, "cpu", fresh_seeds(2))
            if backends.support(oracle.baseline, case, "cpu", direction):
                assert oracle.bounds
                if fault := oracle.baseline_fault:
                    faults[case.name, direction] = fault
    assert not faults


def test_a_reference_in_its_own_dtype_is_no_fault_however_it_rounds():
    """Without an eager baseline the reference is one: its float16 sum has one or two correct bits."""
    operator = replace(NORM, name="sums", reference=lambda x: (x + 2048.0) - 2048.0)
    half = replace(PLAIN, inputs=tuple(replace(i, dtype="float16") for i in PLAIN.inputs))
    baseline = reference_implementation(operator)
    oracle = Oracle(operator, half, FORWARD, "cpu", [1], baseline)
    assert oracle.bounds and oracle.baseline_fault == ""
    written_apart = replace(baseline, forward=lambda x: baseline.forward(x))
    oracle = Oracle(operator, half, FORWARD, "cpu", [1], written_apart)
    assert oracle.bounds and oracle.baseline_fault.endswith("the function of the baseline first")


def _raises(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("boom")


def test_the_tolerance_follows_the_magnitude_and_refuses_zeros():
    for operator in (SOFTMAX, NORM):
        eager = Implementation(
            operator=operator.name, name="eager", backend="eager", forward=operator.reference
        )
        allowed = Oracle(operator, PLAIN, FORWARD, "cpu", [1, 2], eager).bounds[0]
        assert allowed.maximum < 1e-5 * allowed.scale or operator is NORM
        assert not allowed.passes_zeros


def test_no_comparison_with_a_nan_decides():
    nan = float("nan")
    reference = torch.tensor([1.0, nan, float("inf"), -float("inf"), 2.0], dtype=torch.float64)
    assert measure(reference.float(), reference).misplaced == 0
    for at in range(5):
        got = reference.float()
        got[at] = 0.0 if at in (1, 2, 3) else nan
        assert measure(got, reference).misplaced == 1
    flipped = reference.float()
    flipped[2] = -float("inf")
    assert measure(flipped, reference).first_misplaced[0] == 2
    allowed = bound(Tolerance(), torch.float32, 1.0, [], 5)
    assert allowed.share(Measured(maximum=nan, rms=0.0)) > 1


def test_an_element_may_be_off_by_units_in_its_own_last_place_and_none_below_the_scale():
    eps = torch.finfo(torch.float32).eps
    allowed = bound(Tolerance(), torch.float32, 1.0, [], 1e6)
    reference = torch.tensor([1e3, 1.0, 1e-3], dtype=torch.float64)
    for at, units, fits in ((0, 1.9, True), (0, 2.1, False), (1, 1.9, True), (1, 2.1, False)):
        got = reference.clone()
        got[at] += units * eps * float(reference[at])
        error = measure(got, reference, allowed)
        assert (error.maximum <= allowed.maximum) == fits, (at, units)
    small = reference.clone()
    small[2] += 2.1 * eps  # the tolerance of an element below the scale is that of the scale
    assert measure(small, reference, allowed).maximum > allowed.maximum
    assert measure(got, reference, allowed).rms == measure(got, reference).rms


def test_a_long_sum_in_eight_lanes_passes_and_a_scaled_row_does_not():
    # 0.12 sqrt(n) / 8 units of the sum is one standard deviation of such a sum's rounding.
    operator = registry.operator("softmax")
    deviation = 0.12 / 8 * 70000**0.5 * torch.finfo(torch.float32).eps
    (case,) = (c for c in operator.cases if c.name == "fp32-2x70000")
    oracle = Oracle(operator, case, FORWARD, "cpu", [1])
    (allowed,), (answer,) = oracle.bounds, oracle.answer(1)
    for deviations, fits in ((-4, True), (4, True), (-20, False), (20, False)):
        error = measure((answer * (1 + deviations * deviation)).float(), answer, allowed)
        assert (allowed.share(error) <= 1) == fits, deviations
    short = next(c for c in operator.cases if c.name == "fp32-3x129")
    assert operator.tolerance.chain_at(short) == operator.tolerance.chain


def test_the_floor_of_the_rms_follows_how_many_elements_make_it():
    alike = 1 + 1e-9 * torch.arange(100, dtype=torch.float64)
    one = torch.eye(10, dtype=torch.float64)[0]
    assert participants(alike) == pytest.approx(100) and participants(one) == pytest.approx(1)
    assert participants(1e-300 * alike) == pytest.approx(100)
    equal = torch.ones(100_000, dtype=torch.float64)  # which share one error
    assert participants(equal) == 1 and participants(equal.cumsum(0) % 7) == 7
    values = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert participants(values) == pytest.approx(100_000 / 3, rel=0.05)
    values[:2] = torch.tensor([float("nan"), float("inf")])
    assert participants(values) == pytest.approx(100_000 / 3, rel=0.05)
    many, few = (bound(Tolerance(), torch.float32, 1.0, [], n) for n in (1e6, 1.0))
    assert many.rms == pytest.approx(many.maximum / 4) and few.rms == few.maximum


def test_an_overflow_of_the_output_type_is_right_as_inf():
    reference = torch.tensor([1e6, -1e6, 1.0], dtype=torch.float64)
    right = torch.tensor([float("inf"), -float("inf"), 1.0], dtype=torch.float16)
    assert measure(right, reference).misplaced == 0
    assert measure(right.clamp(-6e4, 6e4), reference).misplaced == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_poison_is_a_nan_of_its_own_in_every_type(dtype):
    poison = Arena("cpu").take((3,), dtype)
    assert poison.isnan().all()
    pattern = pattern_of(NAN, dtype.itemsize)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for other in (torch.tensor(float("nan"), dtype=dtype), torch.zeros((), dtype=dtype) / 0):
        assert other.view(integer) != pattern
    assert (poison.view(integer) == pattern).all()


def test_allocations_come_guarded_and_poisoned():
    arena = Arena("cpu")
    x = torch.ones(4, 6).t()
    with Poisoned(arena):
        uninitialized = [
            torch.empty(5),
            torch.empty((2, 3), dtype=torch.float16),
            torch.empty_like(x),
            x.new_empty(7),
            x.new_empty_strided((2, 2), (1, 2)),
            torch.empty_strided((3, 2), (1, 3)),
        ]
        zeros = [torch.zeros(3), torch.zeros_like(x), x.new_zeros(2)]
    assert all(t.isnan().all() and t.data_ptr() % 256 == 0 for t in uninitialized)
    assert uninitialized[2].stride() == x.stride()
    assert all((t == 0).all() for t in zeros)
    assert all(type(t) is torch.Tensor and not t._is_view() for t in uninitialized + zeros)
    assert len(arena.blocks) == 9 and arena.broken() == []
    torch.empty(0).set_(
        uninitialized[0].untyped_storage(), uninitialized[0].storage_offset() + 5, (1,), (1,)
    ).zero_()
    assert len(arena.broken()) == 1


def test_allocations_too_large_to_guard_are_counted():
    arena = Arena("cpu", limit=1000)
    with Poisoned(arena):
        torch.empty(10_000)
    assert (arena.unguarded, len(arena.blocks)) == (1, 0)


def _cli(*arguments: str) -> object:
    app = typer.Typer()
    app.command()(weft.cli.check.check)
    return CliRunner().invoke(app, arguments)


def test_the_command_answers_in_json_and_by_its_exit_code():
    result = _cli("gelu", "--impl", "eager", "--case", "fp32-7x129", "--seed", "5", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["passed"] is True
    assert [v["direction"] for v in answer["verdicts"]] == ["forward", "backward"]
    for verdict in answer["verdicts"]:
        assert verdict["status"] == "pass" and verdict["seeds"] == [5]
        assert {"operator", "implementation", "case", "reason", "tolerance_used"} <= set(verdict)


def test_the_command_shows_a_failure_in_full_and_exits_1(monkeypatch):
    eager = registry.implementation("gelu", "eager")
    wrong = replace(eager, name="torch", forward=torch.zeros_like)
    genuine = registry.implementation
    monkeypatch.setattr(
        registry,
        "implementation",
        lambda operator, name: wrong if name == "torch" else genuine(operator, name),
    )
    result = _cli("gelu", "--impl", "torch", "--case", "fp32-7x129", "--direction", "forward")
    assert result.exit_code == 1
    assert "error: largest error" in result.stdout
    assert "rerun: weft check gelu" in result.stdout and "--seed " in result.stdout


@pytest.mark.parametrize("wrong", [False, True])
def test_the_rounding_of_a_stored_result_is_no_fault_of_the_baseline(wrong):
    """A log-sum-exp of 14,142.6466 is stored as 14,142.6465: p is wrong by 4e-5, and no logit shows it."""
    operator = registry.operator("cross_entropy")
    eager = registry.implementation("cross_entropy", "eager")
    off = replace(eager, backward=lambda g, x, t, lse, **params: eager.backward(g, x, t, lse + 0.5, **params))
    case = operator.case("fp32-4x32-4-large")
    oracle = Oracle(operator, case, "backward", "cpu", [2111233991], off if wrong else eager)
    assert ("disagrees with the reference" in oracle.baseline_fault) is wrong


def test_the_command_names_a_wrong_baseline_once_and_exits_1(monkeypatch):
    eager = replace(registry.implementation("gelu", "eager"), forward=torch.sigmoid)
    genuine = registry.implementation
    monkeypatch.setattr(
        registry,
        "implementation",
        lambda operator, name: eager if name == "eager" else genuine(operator, name),
    )
    arguments = ["gelu", "--impl", "eager", "--impl", "torch", "--case", "fp32-7x129", "--case", "fp16-7x129"]
    result = _cli(*arguments)
    assert result.exit_code == 1
    output = " ".join(result.stdout.split())
    assert output.count("disagrees with the reference") == output.count("rerun: ") == 1
    assert "failed: gelu: yardstick: the baseline 'eager' disagrees with the reference: error " in output
    assert "or with_eager.py first; until then eager, torch cannot be judged at 4 points" in output
    answer = json.loads(_cli(*arguments, "--json").stdout)
    assert len(answer["verdicts"]) == 8 and not answer["passed"]
    for verdict in answer["verdicts"]:
        assert verdict["status"] == FAIL and verdict["findings"][0]["check"] == "yardstick"
        assert verdict["reason"].startswith("yardstick: the baseline 'eager' disagrees")


def test_the_command_refuses_names_that_are_not_there():
    for arguments in (["gelo"], ["--impl", "tritton"], ["--case", "nothing"], ["--device", "tpu"]):
        result = _cli(*arguments)
        assert isinstance(result.exception, WeftError), arguments


def test_where_nothing_can_be_checked_nothing_has_passed(monkeypatch):
    monkeypatch.setattr(backends, "support", lambda *_: no("needs a GPU"))
    result = _cli("gelu", "--impl", "cuda", "--case", "fp32-7x129", "--json", "--device", "cpu")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert not answer["passed"]
    assert {v["status"] for v in answer["verdicts"]} == {"unsupported"}


def test_ops_lists_every_implementation_with_its_reason():
    app = typer.Typer()
    app.command()(weft.cli.ops.ops)
    result = CliRunner().invoke(app, ["--json"])
    listed = json.loads(result.stdout)
    assert [o["operator"] for o in listed] == registry.operator_names()
    for operator in listed:
        assert operator["summary"]
        for implementation in operator["implementations"]:
            assert {"name", "backend", "supported", "reason"} <= set(implementation)
            assert implementation["supported"] or implementation["reason"]


def test_a_baseline_s_error_is_taken_from_more_draws_where_a_case_is_small():
    gelu, total = registry.operator("gelu"), registry.operator("sum")
    few = Oracle(gelu, gelu.case("fp32-1"), FORWARD, "cpu", (5,))
    assert len(few.further_seeds()) == 15 and few.further_seeds() == few.further_seeds()
    assert few.bounds[0].maximum > 0
    five = Oracle(gelu, gelu.case("fp32-7x129"), FORWARD, "cpu", (5, 6, 7, 8, 9))
    assert len({*five.seeds, *five.further_seeds()}) == 16
    many = gelu.case("fp32-64x64-outliers")
    assert len(Oracle(gelu, many, FORWARD, "cpu", (5,)).further_seeds()) == 3
    assert Oracle(gelu, many, FORWARD, "cpu", (5, 6, 7, 8, 9)).further_seeds() == ()
    assert Oracle(gelu, gelu.case("fp32-0"), FORWARD, "cpu", (5,)).further_seeds() == ()
    large = next(c for c in total.cases if max(i.numel for i in c.inputs) > 1 << 20)
    assert Oracle(total, large, FORWARD, "cpu", (5,)).further_seeds() == ()
    scalar = Oracle(total, total.case("fp32-30011"), FORWARD, "cpu", (5, 6))
    assert len({*scalar.seeds, *scalar.further_seeds()}) == 16  # a large input, but one element
    errors = [few.bounds[0].baseline_rms]
    alone = Oracle(gelu, gelu.case("fp32-1"), FORWARD, "cpu", (5,))
    alone.further_seeds = lambda: ()  # type: ignore[method-assign]
    errors.append(alone.bounds[0].baseline_rms)
    assert errors[0] > errors[1], errors  # one draw of sixteen is not the worst of them
