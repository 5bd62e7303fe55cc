"""Demonstrations: both variants are correct, the evidence matches the prediction, the ratio is reported."""

from __future__ import annotations

import doctest
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from helpers.demo_emulator import COMPILER, build, emulate
from weft import machine
from weft.cli import app
from weft.core import WeftError, no_log
from weft.lab import demos
from weft.lab.demos import arithmetic, evidence, report, run, unified_memory, wave_quantization
from weft.lab.demos.demo import BAD, GOOD, SIDES, Measurement, Variant
from weft.workbench.explain.ncu import find

ADDRESSES = st.lists(st.integers(0, 1 << 20).map(lambda word: 4 * word), min_size=1, max_size=32)
MACHINE = {"device": "Some GPU", "kind": "cuda", "date": "2026-01-02T03:04:05", "commit": None}


@given(ADDRESSES, st.sampled_from([1, 2, 4]))
def test_sectors_are_those_with_a_requested_byte(addresses: list[int], width: int) -> None:
    touched = {(a + byte) // 32 for a in addresses for byte in range(width)}
    assert arithmetic.sectors_per_request(addresses, width) == len(touched)


@given(ADDRESSES, st.integers(0, 1 << 20))
def test_conflict_degree_is_the_rounds_of_one_word_from_each_bank(addresses: list[int], shift: int) -> None:
    waiting, rounds = {a // 4 for a in addresses}, 0
    while waiting:
        served: dict[int, int] = {}
        for word in sorted(waiting):
            served.setdefault(word % 32, word)
        waiting -= set(served.values())
        rounds += 1
    degree = arithmetic.conflict_degree(addresses)
    assert degree == rounds
    assert arithmetic.conflict_degree(a + 4 * shift for a in reversed(addresses)) == degree


def test_examples_in_docstrings_hold() -> None:
    for module in (arithmetic, wave_quantization):
        result = doctest.testmod(module)
        assert result.attempted and not result.failed


def test_predicted_counters_agree_with_the_direction_of_the_times() -> None:
    for one in demos.all_demos():
        assert one.sentence and one.see and one.because.endswith(".")
        if one.source is not None:
            for kernel in {one.bad.kernel, one.good.kernel}:
                assert f" {kernel}(" in one.code and kernel in one.source.kernels
        if one.counter is not None:
            bad, good = one.counter.predicted
            fewer_is_better = one.name not in ("divergence", "occupancy")
            assert (bad > good) == fewer_is_better
            assert one.bad.call and one.good.call and one.inputs
    with pytest.raises(WeftError, match="coalescing"):
        demos.demo("coalesing")


def test_static_evidence_of_each_demo() -> None:
    facts = {name: [(f.bad, f.good) for f in demos.demo(name).facts("sm_90")] for name in demos.DEMOS}
    assert facts["coalescing"] == [(32, 4)]
    assert facts["bank-conflicts"] == [(32, 1), (32, 32)]  # the same instructions
    assert facts["divergence"] == [(8, 32)]
    assert facts["vectorised-loads"] == [(8, 128)]
    assert facts["unrolling"] == [(4, 11 / 8)]
    assert facts["occupancy"] == [(12.5, 100)]
    assert facts["output-staging"] == [(32, 4)]
    assert facts["wave-quantization"][0] == (2, 1)
    assert facts["pinned-memory"] == [(1, 0)]
    assert facts["overlapped-copies"] == [(2, 1.125)]
    assert facts["volatile"] == [(16, 1)]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_every_kernel_compiles(arch: str) -> None:
    for source in (one.source for one in demos.all_demos()):
        assert source is None or source.compile(arch)[:4] == b"\x7fELF"
    loads = demos.demo("vectorised-loads").source
    assert loads is not None and evidence.widest_load(loads, arch, "sixteen") == 128
    assert [fact.bad for fact in demos.demo("volatile").facts(arch)] == [16]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Emulate the kernels on a CPU, with outputs that start with values that no kernel writes."""
    if COMPILER is None:
        pytest.skip("needs g++ to run the kernels on a CPU: apt-get install g++")
    library = build(tmp_path_factory.mktemp("demos"))

    def poisoned(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, float("nan")) if x.is_floating_point() else torch.full_like(x, 7)

    with pytest.MonkeyPatch.context() as patch:
        emulate(library, patch)
        patch.setattr(torch, "empty_like", poisoned)
        patch.setattr(evidence, "num_sms", lambda: 3)
        patch.setattr(evidence, "max_shared_per_block", lambda: 0)
        yield patch


SMALL: dict[str, tuple[Callable[[], torch.Tensor], dict[str, int]]] = {
    "coalescing": (lambda: torch.randn(1024), {}),
    "bank-conflicts": (lambda: torch.randn(512, 32), {"ROWS": 512}),
    "divergence": (lambda: torch.rand(512) / 2, {}),
    "vectorised-loads": (lambda: torch.randint(0, 256, (8192,), dtype=torch.uint8), {}),
    "unrolling": (lambda: torch.rand(512) / 2, {}),
    "wave-quantization": (lambda: torch.rand(901) / 2, {}),
    "occupancy": (lambda: torch.randn(512), {"N": 512}),
    "output-staging": (lambda: torch.randn(64, 64), {"N": 64}),
    "volatile": (lambda: torch.rand(512), {}),
}


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SMALL)
def test_both_variants_are_correct(name: str, emulated: Any) -> None:
    """Compare the real launches and kernels at small sizes with the float64 reference."""
    one = demos.demo(name)
    make, sizes = SMALL[name]
    module = __import__(f"weft.lab.demos.{name.replace('-', '_')}", fromlist=["N"])
    x = make()
    with pytest.MonkeyPatch.context() as patch:
        for word, value in sizes.items():
            patch.setattr(module, word, value)
        assert one.reference is not None
        expected = one.reference(x)
        for side in SIDES:
            call = one.variant(side).call
            assert call is not None
            assert run.mismatch(call(x), expected, one.tolerance) is None, side
        other_input = x.flip(0)
        assert run.mismatch(call(other_input), expected, one.tolerance)  # the check sees the input


@pytest.mark.slow
def test_kernels_of_self_timed_demos_are_correct(emulated: Any) -> None:
    v, x, y = torch.zeros(1024), torch.randn(512), torch.full((512,), float("nan"))
    for _ in range(3):
        demos.demo("launch-overhead").source["step"](4, 256, v)
    assert bool((v == 3).all())
    for name in ("unified-memory", "pinned-memory", "overlapped-copies"):
        one = demos.demo(name)
        one.source[one.bad.kernel](2, 256, x.data_ptr(), y.fill_(float("nan")))
        assert torch.equal(y, 2 * x), name


@pytest.mark.slow
def test_only_correct_outputs_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Verify and time a pair on a CPU, with torch functions instead of kernels."""
    monkeypatch.setattr(run, "SECONDS", 0.1)

    def once(x: torch.Tensor) -> torch.Tensor:
        return x.T.contiguous()

    def three_times(x: torch.Tensor) -> torch.Tensor:
        return once(once(once(x)))

    pair = replace(
        demos.demo("output-staging"),
        bad=Variant(kernel="slow", how="", call=three_times),
        good=Variant(kernel="quick", how="", call=once),
        inputs=lambda seed: [torch.rand(512, 512, generator=torch.Generator().manual_seed(seed))],
    )
    measurements = run.measure(pair, no_log, "cpu")
    assert all(len(measurements[side].samples) > 1 and not measurements[side].wrong for side in SIDES)
    medians = {side: statistics.median(measurements[side].samples) for side in SIDES}
    assert run.compare(pair, measurements)["ratio"] == pytest.approx(medians[BAD] / medians[GOOD])
    untouched = replace(pair, good=Variant(kernel="idle", how="", call=torch.Tensor.clone))
    assert run.measure(untouched, no_log, "cpu")[GOOD].wrong.startswith("idle: it is off by")


def test_mismatch_reports_wrong_outputs() -> None:
    expected = torch.zeros(4, dtype=torch.float64)
    assert run.mismatch(torch.zeros(4), expected, 0.0) is None
    assert "off by 0.5" in str(run.mismatch(torch.tensor([0, 0, 0.5, 0]), expected, 0.1))
    assert run.mismatch(torch.full((4,), float("nan")), expected, 1e9)
    assert run.mismatch(torch.zeros(3), expected, 1e9)


def test_samples_are_interleaved_and_the_first_round_is_discarded() -> None:
    order: list[str] = []

    def sample(side: str) -> float:
        order.append(side)
        return float(len(order))

    samples = run.interleaved(SIDES, sample, 20)
    assert [len(v) for v in samples.values()] == [20, 20] and min(samples[BAD] + samples[GOOD]) > 2
    rounds = [tuple(order[i : i + 2]) for i in range(0, len(order), 2)]
    assert set(rounds) == {(BAD, GOOD), (GOOD, BAD)}


def measured(bad: float, *, flags: tuple[str, ...] = ()) -> dict[str, Measurement]:
    spread = (0.99, 1.0, 1.0, 1.0, 1.01)
    return {
        BAD: Measurement(samples=tuple(bad * n for n in spread), flags=flags),
        GOOD: Measurement(samples=tuple(10 * n for n in spread)),
    }


def test_a_ratio_counts_only_if_it_is_large_enough_and_not_suspect() -> None:
    one = demos.demo("coalescing")
    comparison = run.compare(one, measured(50))
    assert (comparison["status"], comparison["ratio"]) == ("shown", 5.0)
    low, high = comparison["ratio_interval"]
    assert 4.8 < low < 5 < high < 5.2
    assert run.compare(one, measured(19))["status"] == "not shown"
    suspect = run.compare(one, measured(50, flags=("noisy", "suspect: clocks disagree")))
    assert suspect["status"] == "not shown" and "clocks disagree" in suspect["reason"]
    wrong = run.compare(one, {BAD: Measurement(wrong="strided: it is off by 2")})
    assert wrong == {"status": "wrong", "reason": "strided: it is off by 2"}


def test_a_missing_counter_keeps_the_times_and_a_gpu_fault_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = demos.demo("coalescing")
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(find, "find", lambda: None)
    monkeypatch.setattr(run, "measure", lambda demo, log: measured(50))
    result = run.run(one, no_log, arch="sm_90")
    assert result["status"] == "shown" and len(result["evidence"]) == 1
    assert "not installed" in result["not_counted"] and result["hint"]

    def fault(demo: Any, log: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(run, "measure", fault)
    result = run.run(one, no_log, arch="sm_90")
    assert result["status"] == "wrong" and "illegal memory access" in result["reason"]


SECTORS, REQUESTS = demos.demo("coalescing").counter.metrics  # type: ignore[union-attr]
HEAD = f'"ID","Kernel Name","Block Size","Grid Size","{SECTORS}","{REQUESTS}"\n'
UNITS = '"","","","","sector",""\n'
ROWS = (
    '"0","strided","(256, 1, 1)","(131072, 1, 1)","33,554,432","1,048,576"\n'
    '"1","adjacent","(256, 1, 1)","(131072, 1, 1)","4,194,304","1,048,576"\n'
)


def test_counters_are_read_for_both_kernels_or_not_at_all() -> None:
    counter = demos.demo("coalescing").counter
    assert counter is not None
    fact = evidence.read_counter(counter, f"==PROF== Profiling\n{HEAD}{UNITS}{ROWS}==PROF== done\n")
    assert (fact.bad, fact.good) == counter.predicted
    one_row = ROWS.splitlines(keepends=True)[0]
    for text in (HEAD + UNITS + one_row, HEAD + UNITS + ROWS.replace("1,048,576", "n/a"), ""):
        with pytest.raises(WeftError, match="did not count both"):
            evidence.read_counter(counter, text)
    with pytest.raises(WeftError, match="administrators"):
        evidence.read_counter(counter, "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")


def test_managed_memory_is_small_and_refused_without_free_memory() -> None:
    assert unified_memory.MANAGED_BYTES <= unified_memory.MAX_MANAGED_BYTES == 256 << 20
    assert not unified_memory.refusal(1 << 30, True)
    assert "MiB must be free" in unified_memory.refusal(128 << 20, True)
    assert "share managed pages" in unified_memory.refusal(1 << 30, False)
    with pytest.raises(WeftError, match="no room"):
        unified_memory.measurements({"refused": "no room"})
    assert unified_memory.measurements({"wrong": "bad: off"})[BAD].wrong == "bad: off"
    assert unified_memory.measurements({BAD: [2.0], GOOD: [1.0]})[GOOD].samples == (1.0,)


def saved(path: Path, bad: float = 50.0) -> Path:
    """Write a file like ``--save`` does, of two demonstrations with invented times."""
    results = []
    for name in ("coalescing", "wave-quantization"):
        one = demos.demo(name)
        data = run.description(one) | {"arch": "sm_90", "evidence": []}
        results.append(data | run.compare(one, measured(bad)))
    fact = demos.demo("coalescing").facts("sm_90")[0]
    results[0]["evidence"] = [fact.to_json()]
    counts = wave_quantization.counts(8)
    curve = wave_quantization.sawtooth(8, {b: 10.0 * arithmetic.waves(b, 8) for b in counts})
    assert curve.ys == pytest.approx(curve.predicted) and min(curve.ys) == 12.5
    results[1]["sweep"] = asdict(curve)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": MACHINE, "demos": results}))
    return path


def test_a_saved_run_is_shown_plotted_and_reported(tmp_path: Path) -> None:
    file, svg = saved(tmp_path / "some-gpu" / report.FILE), tmp_path / "some-gpu" / report.PLOT
    command = CliRunner().invoke(app, ["demo", "--from", str(file), "--picture", str(svg)])
    assert command.exit_code == 0 and "5.00× as long" in command.output
    assert "<svg" in svg.read_text() and "multiple of the 8 SMs" in svg.read_text()
    text = report.section("wave-quantization", tmp_path)
    assert "**Some GPU**, 2026-01-02" in text and svg.name in text and report.MISSING not in text
    coalescing = report.section("coalescing", tmp_path)
    assert "| time | 50.0 µs | 10.0 µs | cold |" in coalescing and "| 32 | 4 | arithmetic |" in coalescing
    assert report.MISSING in report.section("occupancy", tmp_path)
    command = CliRunner().invoke(app, ["demo", "occupancy", "--from", str(file)])
    assert isinstance(command.exception, WeftError)
    slow = saved(tmp_path / "slow.json", bad=15.0)
    command = CliRunner().invoke(app, ["demo", "coalescing", "--from", str(slow), "--json"])
    assert command.exit_code == 1 and json.loads(command.stdout)["demos"][0]["status"] == "not shown"


def test_command_lists_demos_and_refuses_invalid_arguments(tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["demo"])
    assert listed.exit_code == 0
    *lines, ending = listed.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(demos.DEMOS)
    assert ending.startswith(f"{len(demos.DEMOS)} ")
    other = tmp_path / "other.json"
    other.write_text("[1]")
    invalid: list[list[str]] = [
        ["nonsense"],
        ["coalescing", "--arch", "hopper"],
        ["coalescing", "--picture", "a.svg"],
        ["wave-quantization", "--picture", "a.png"],
        ["--from", str(other)],
        ["--from", str(saved(tmp_path / "a.json")), "--save", str(tmp_path / "b.json")],
        ["coalescing", "--save", str(tmp_path)],
    ]
    for arguments in invalid:
        command = CliRunner().invoke(app, ["demo", *arguments])
        assert isinstance(command.exception, WeftError), arguments


@pytest.mark.skipif(machine.has_gpu(), reason="a GPU is here, so it is timed")
def test_without_a_gpu_kernels_and_evidence_are_shown_and_not_timed(
    tmp_path: Path,
) -> None:
    command = CliRunner().invoke(app, ["demo", "unrolling", "--source"])
    assert command.exit_code == 0
    for text in ("#pragma unroll 8", "unrolling.py", "1.38", "SASS, sm_90", "timing needs a GPU"):
        assert text in command.output
    refused = CliRunner().invoke(app, ["demo", "unrolling", "--save", str(tmp_path / "a.json")])
    assert isinstance(refused.exception, WeftError) and not (tmp_path / "a.json").exists()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", demos.DEMOS)
def test_effect_is_shown_on_a_gpu(name: str) -> None:
    one = demos.demo(name)
    result = run.run(one, no_log, counts=False)  # tests of their own compare the counters
    print(f"{name}: {report.verdict(result)}")
    if result["status"] == "not timed" and name == "unified-memory":
        pytest.skip(f"no managed memory here: {result['reason']}")
    assert result["status"] == "shown", result["reason"]
    if one.sweep is not None:
        curve = report.sweep(result)
        assert curve is not None
        at = dict(zip(curve.xs, curve.us, strict=True))
        units = evidence.num_sms()
        assert at[units + 1] > 1.5 * at[units] and at[2 * units] < 1.2 * at[units + 1]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", [d.name for d in demos.all_demos() if d.counter])
def test_counters_match_the_prediction(name: str) -> None:
    counter = demos.demo(name).counter
    assert counter is not None
    try:
        find.require()
        fact = evidence.count_with_ncu(demos.demo(name))
    except WeftError as error:
        pytest.skip(str(error))
    print(f"{name}: {fact.label}: {fact.bad:g}, {fact.good:g}; predicted {counter.predicted}")
    for counted, predicted in zip((fact.bad, fact.good), counter.predicted, strict=True):
        allowed = counter.within * max(predicted, 0.1 * max(counter.predicted))
        assert abs(counted - predicted) <= allowed
