"""The grammar of a claim, its bound, and the ledger, whose verdicts are computed and compared."""

from __future__ import annotations

import json
from importlib import import_module

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core import Case, registry
from weft.core.errors import WeftError
from weft.lab.claims import bounds, inductor, ledger, sentence
from weft.machine import specs


def answer(text: str) -> str:
    return bounds.decide(list(bounds.bounds(sentence.parse(text))))


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("gelu fp32 16384x16384 in 0.3 ms on A100", bounds.IMPOSSIBLE),
        ("gelu fp32 16384x16384 in 1.06 ms on a100 sxm 80gb", bounds.CLOSE),
        ("gelu fp32 16384x16384 in 2 ms on A100", bounds.POSSIBLE),
        ("sum fp32 2^28 in 235us on H200 SXM", bounds.CLOSE),
        ("matmul bf16 8192^3 at 1200 TFLOPS on an H100", bounds.IMPOSSIBLE),
        ("matmul bf16 8192x8192x8192 at 600 TFLOP/s on h100 sxm", bounds.POSSIBLE),
        ("matmul fp32 4096x4096x4096 at 60 TFLOPs on A100", bounds.IMPOSSIBLE),
        ("matmul tf32 4096x4096x4096 at 60 TFLOPs on A100", bounds.POSSIBLE),
        ("matmul fp8 8192x8192x8192 at 1500 TFLOP/s on rtx 4090", bounds.IMPOSSIBLE),
        ("attention bf16 causal 4x16x4096x128 in 470 us on h200 sxm", bounds.POSSIBLE),
        ("full attention bf16 4x16x4096x128 in 470 us on h200 sxm", bounds.IMPOSSIBLE),
        ("copy fp32 2^30 at 5 TB/s on h200", bounds.IMPOSSIBLE),
        ("softmax backward bf16 32768x4096 at 3 TB/s on h200 sxm", bounds.POSSIBLE),
        ("embedding bf16-64x1024x768-50304-1024 in 1 ms on a100", bounds.POSSIBLE),
        ("copy fp32 2^40 in 3600 s on b200", bounds.IMPOSSIBLE),  # it does not fit into the memory
        ("copy fp8 2^30 in 1 ms on h200", bounds.POSSIBLE),
        ("matmul fp32 4096x4096x4096 in 10 ms on a single a100", bounds.POSSIBLE),
    ],
)
def test_the_answer(text: str, verdict: str) -> None:
    assert answer(text) == verdict


@pytest.mark.parametrize(
    "text",
    [
        "gelu fp32 16384x16384 in 300 us on a100",
        "on A100, our gelu kernel runs 16384*16384 fp32 elements in 300 microseconds.",
        "forward GELU float32 (16384, 16384) takes 0.3ms on an NVIDIA A100 GPU",
        "gelu f32 16k x 16k in 300µs on a100",
        "gelu fp32 16384×16384 in 300 μs on A100",
        "0.0003 s: gelu of shape 16384x16384, float32, a100",
        "gelu fp32 2^28 in 3e-4 s on a100",
        "We measured 16384 by 16384 fp32 gelu on A100: got 300 us",
        "gelu fp32 16,384 x 16,384 in 0.3 ms on an A100",
    ],
)
def test_spellings_of_one_claim_mean_the_same(text: str) -> None:
    statement = sentence.parse(text)
    ((_, case),) = statement.cases.items()
    assert statement.operator == "gelu" and statement.direction == "forward"
    assert case.inputs[0].numel == 1 << 28 and case.dtype == "float32"
    assert statement.value == pytest.approx(3e-4) and statement.unit == "s"
    assert {gpu.key[:4] for gpu in statement.gpus} == {"a100"} and len(statement.gpus) == 4


@pytest.mark.parametrize(
    ("text", "what", "got"),
    [
        ("not gelu fp32 4x4 in 1 ms on t4", "not understood", "not"),
        ("gelu fp32 4x4 in 1 ms on mi300x", "not understood", "mi300x"),
        ("gelu fp32 4x4 in 1 fortnight on t4", "not understood", "fortnight"),
        ("gelu fp32 4x4 in over 1 ms on t4", "not understood", "over"),
        ("gelu fp32 4x4 at 300 Gb/s on t4", "not understood", "300 Gb/s"),
        ("gelu fp32 4m in 1 ms on t4", "not understood", "4m"),
        ("gelu fp32 512,512 in 1 ms on t4", "ambiguous: the shape", "512 and 512"),
        ("swish fp32 4x4 in 1 ms on t4", "not understood", "swish"),
        ("gelu fp32 4x4 at 95% of peak on t4", "not understood", "%"),
        ("gelu fp32 4x4 in 1 ms on 8 h100", "ambiguous: the shape", "4x4 and 8"),
        ("gelu fp32 4x4 in 1 ms, 2 GB/s on t4", "ambiguous: the figure", "1 ms and 2 GB/s"),
        ("gelu relu fp32 4x4 in 1 ms on t4", "ambiguous: the operator", "gelu and relu"),
        ("gelu fp32 bf16 4x4 in 1 ms on t4", "ambiguous: the data type", "fp32 and bf16"),
        ("gelu fp32 4x4 in 1 ms on t4 or a100", "ambiguous: the GPU", "t4 and a100"),
        ("gelu forward backward fp32 4x4 in 1 ms on t4", "ambiguous: the direction", "forward and backward"),
        ("fp32 4x4 in 1 ms on t4", "the claim has no operator", None),
        ("gelu 4x4 in 1 ms on t4", "the claim has no data type", None),
        ("gelu fp32 in 1 ms on t4", "the claim has no shape", None),
        ("gelu fp32 4x4 on t4", "the claim has no figure", None),
        ("gelu fp32 4x4 in 1 ms", "the claim has no GPU", None),
        ("gelu fp32 4x4 in 0 ms on t4", "not understood", "0 ms"),
        ("gelu fp32 4x4 in 1e-300 s on t4", "not understood", "1e-300 s"),
        ("gelu fp32 4x4 at 1e300 TB/s on t4", "not understood", "1e300 TB/s"),
        ("gelu fp32 1x1x1x1x1x1x1x1x1 in 1 ms on t4", "the shape of gelu", "1x1x1x1x1x1x1x1x1"),
        ("embedding bf16 64x1024 in 1 ms on t4", "the shape of embedding", "(64, 1024)"),
        ("gelu bf16-1x1 in 1 ms on h200", "unknown case of gelu", "bf16-1x1"),
        ("gelu bf16-1024x3072 fp32 in 1 ms on h200", "ambiguous: the case", "bf16-1024x3072 and float32"),
        ("copy backward fp32 2^20 in 1 ms on t4", "the direction of copy", "backward"),
        ("gelu fp32 0x4 in 1 ms on t4", "the shape of gelu", "0x4"),
        ("matmul fp32 4x4 in 1 ms on t4", "the shape of matmul", "4x4"),
        ("gelu fp64 4x4 in 1 ms on t4", "the data type of gelu", "fp64"),
        ("gelu causal fp32 4x4 in 1 ms on t4", "a mask of gelu", "causal"),
        ("adamw backward fp32 2^20 in 1 ms on t4", "the direction of adamw", "backward"),
        ("gelu fp32 99999999999999999999999 in 1 ms on t4", "not understood", "99999999999999999999999"),
        ("gelu fp32 4x4 in 1 ms on t4 \x1b[1m", "not understood", None),
        ("", "the claim has no operator", None),
    ],
)
def test_what_is_not_clear_is_refused(text: str, what: str, got: str | None) -> None:
    with pytest.raises(WeftError) as caught:
        answer(text)
    assert caught.value.what == what and caught.value.expected
    assert got is None or caught.value.got == got


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gelu fp32 16384x16384 in 1.2 ms on A100", "depends on the GPU"),
        ("gelu bf16 1024x3072 in 2 us on h200 sxm", "depends on the cache"),
        ("attention bf16 4x16x4096x128 in 400 us on h200 sxm", "depends on the mask"),
    ],
)
def test_an_answer_that_depends_on_the_reading_is_refused(text: str, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        answer(text)


def test_a_word_decides_between_readings() -> None:
    assert answer("gelu bf16 1024x3072 in 2 us on h200 sxm, cold") == bounds.IMPOSSIBLE
    assert answer("gelu bf16 1024x3072 in 2 us on h200 sxm, warm") == bounds.POSSIBLE


def test_a_rate_that_the_operator_or_the_gpu_lacks_is_an_error() -> None:
    with pytest.raises(WeftError, match="a time or GB/s"):
        answer("gelu fp32 2^20 at 3 tflops on t4")
    with pytest.raises(WeftError, match="a rate of its datasheet"):
        answer("matmul bf16 4096x4096x4096 at 3 tflops on t4")


@given(st.text(max_size=60), st.integers(0, 40))
def test_any_text_is_an_answer_or_one_clear_error(noise: str, position: int) -> None:
    base = "gelu fp32 16384x16384 in 3 ms on a100"
    for text in (noise, base[:position] + noise + base[position:]):
        try:
            assert answer(text) in (bounds.IMPOSSIBLE, bounds.CLOSE, bounds.POSSIBLE)
        except WeftError as error:
            assert error.expected or error.hint


def test_no_recorded_time_is_judged_impossible() -> None:
    """The bounds are bounds: every time that was measured on a GPU of the table is possible there."""
    checked = 0
    for name in registry.operator_names():
        file = ledger.RESULTS / ledger.MEASURED / f"{name}.jsonl"
        gpu = specs.one("h200")
        for line in file.read_text().splitlines() if file.is_file() else ():
            row = json.loads(line)
            timing = row["detail"].get("timing")
            cases = {c.name: c for c in registry.operator(name).cases}
            if not timing or row["case"] not in cases:
                continue
            roof = gpu.roof(bounds.operator_cost(name, cases[row["case"]], row["direction"]))
            assert roof is not None
            assert roof.seconds * 1e6 <= bounds.HIGHEST_SHARE * timing["cold"], (name, row["case"])
            checked += 1
    assert checked > 300


@pytest.mark.parametrize("operator", sorted(bounds.FORMS))
def test_the_case_of_a_shape_costs_what_the_operators_own_case_costs(operator: str) -> None:
    """A form builds the same inputs as the operator's cases: their costs agree."""
    if operator == bounds.COPY:
        case = bounds.build_case(operator, (64, 64), "bfloat16")
        assert bounds.operator_cost(operator, case, "forward").nbytes == 2 * 2 * 64 * 64
        return
    loaded = registry.operator(operator)
    form, compared = bounds.FORMS[operator], 0
    for case in loaded.select("bench", "cuda"):
        shape = _shape_of(operator, case)
        built = bounds.build_case(operator, shape, case.dtype, causal=bool(case.params.get("causal")))
        if dict(built.params).get("out_dtype") != case.params.get("out_dtype"):
            continue
        same = [(i.shape, i.dtype) for i in built.inputs] == [(i.shape, i.dtype) for i in case.inputs]
        if not same or case.params.get("keep", True) != built.params.get("keep", True):
            continue
        if case.params.get("window") or case.params.get("softcap"):
            continue  # no claim names them
        if case.params.get("precision") != built.params.get("precision") or "max_norm" in case.params:
            continue
        for direction in loaded.directions:
            assert loaded.cost(built, direction) == loaded.cost(case, direction), (case.name, direction)
        compared += 1
    assert compared, f"no case of {operator} has the form {form.dimensions}"


def _shape_of(operator: str, case: Case) -> tuple[int, ...]:
    inputs = {i.name: i.shape for i in case.inputs}
    if operator in ("matmul", "scaled_matmul"):
        (m, k), (_, n) = inputs["a"], inputs["b"]
        return (m, n, k)
    if operator.startswith("linear") and operator != "linear_cross_entropy":
        (m, k), (n, _) = inputs["x"], inputs["weight"]
        return (m, n, k)
    if operator == "mlp_gelu":
        return (*inputs["x"], *inputs["proj_weight"][::-1])
    if operator == "trilinear":
        count, _, width = inputs["features"]
        return (count, width)
    if operator == "linear_cross_entropy":
        return (*inputs["x"], inputs["weight"][0])
    return case.inputs[0].shape


def test_the_bare_optimizer_step_moves_28_bytes_a_parameter() -> None:
    case = bounds.build_case("adamw", (1000,), "float32")
    assert bounds.operator_cost("adamw", case, "forward").nbytes == 28 * 1000


CLAIMS = ledger.all_claims()


@pytest.mark.parametrize("claim", CLAIMS, ids=[c.id for c in CLAIMS])
def test_the_computed_verdict_is_the_expected_one(claim: ledger.Claim) -> None:
    evidence = claim.compute()
    assert evidence.verdict == claim.expected, (evidence.range, evidence.figures)
    assert evidence.settings and evidence.figures
    json.dumps(claim.to_json(evidence))


def test_the_ledger_has_many_claims_and_many_that_are_wrong() -> None:
    assert len(CLAIMS) >= 50 and len({c.text for c in CLAIMS}) == len(CLAIMS)
    assert sum(c.expected != ledger.TRUE for c in CLAIMS) >= 10
    assert sum(c.expected == ledger.FALSE for c in CLAIMS) >= 10
    assert {c.theme for c in CLAIMS} == set(ledger.THEMES)
    assert ledger.claim_ids() == [c.id for c in CLAIMS]
    for c in CLAIMS:
        module, _, name = c.test.rpartition(".")
        assert callable(getattr(import_module(module), name))
        assert c.source.author and c.source.title and c.argument


def test_a_verdict_follows_from_the_settings() -> None:
    assert ledger.Evidence({"a": True, "b": True}).verdict == ledger.TRUE
    assert ledger.Evidence({"a": False}).verdict == ledger.FALSE
    mixed = ledger.Evidence({"a": True, "b": False})
    assert mixed.verdict == ledger.DEPENDS and mixed.range == "holds: a. fails: b"
    many = ledger.Evidence({str(n): True for n in range(20)})
    assert many.range == "holds: 20 settings, such as 0"


def test_without_records_a_claim_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(ledger, "RESULTS", tmp_path)
    with pytest.raises(WeftError, match="records are not part of an installation"):
        ledger.demo_ratio("coalescing")


def test_a_record_that_changes_would_change_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.lab.claims import memory

    monkeypatch.setattr(memory, "demo_ratio", lambda name: 2.0)
    assert memory.strided_loads_cost_eight_times().verdict == ledger.DEPENDS


@pytest.mark.exhaustive  # the import of Inductor takes ten seconds
def test_the_record_of_inductor_is_current() -> None:
    assert inductor.fusion() == ledger.record("inductor/fusion.json")["functions"]
