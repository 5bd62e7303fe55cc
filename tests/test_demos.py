"""Demonstrations: both ways are right, arithmetic and code tell why, the ratio is told as it is."""

from __future__ import annotations

import doctest
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from demo_emulator import COMPILER, build, emulate
from weft import machine
from weft.cli import app
from weft.core import WeftError
from weft.workbench import demos
from weft.workbench.demos import arithmetic, counting, evidence, page, running, taking
from weft.workbench.demos import unified_memory as managed_demo
from weft.workbench.demos import wave_quantization as waves_demo
from weft.workbench.demos.demo import BAD, GOOD, SIDES, Taken, Way
from weft.workbench.ncu import find

ADDRESSES = st.lists(st.integers(0, 1 << 20).map(lambda word: 4 * word), min_size=1, max_size=32)
MACHINE = {"device": "Some GPU", "kind": "cuda", "date": "2026-01-02T03:04:05", "commit": None}


def silent(line: str) -> None:
    assert line


@given(ADDRESSES, st.sampled_from([1, 2, 4]))
def test_sectors_are_those_that_hold_a_byte_asked_for(addresses: list[int], width: int) -> None:
    touched = {(a + byte) // 32 for a in addresses for byte in range(width)}
    assert arithmetic.sectors_per_request(addresses, width) == len(touched)


@given(ADDRESSES, st.integers(0, 1 << 20))
def test_conflicts_are_rounds_in_which_each_bank_gives_one_word(
    addresses: list[int], shift: int
) -> None:
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
    for module in (arithmetic, waves_demo):
        tried = doctest.testmod(module)
        assert tried.attempted and not tried.failed


def test_each_counter_is_predicted_in_the_direction_that_the_times_go() -> None:
    for one in demos.all_demos():
        assert one.sentence and one.see and one.because.endswith(".")
        for kernel in {one.bad.kernel, one.good.kernel}:
            assert f" {kernel}(" in one.code and kernel in one.source.kernels
        if one.counter is not None:
            bad, good = one.counter.predicted
            fewer_is_better = one.name not in ("divergence", "occupancy")
            assert (bad > good) == fewer_is_better
            assert one.bad.call and one.good.call and one.inputs
    with pytest.raises(WeftError, match="coalescing"):
        demos.demo("coalesing")


def test_the_code_and_the_addresses_tell_the_cause() -> None:
    found = {
        name: [(f.bad, f.good) for f in demos.demo(name).facts("sm_90")] for name in demos.DEMOS
    }
    assert found["coalescing"] == [(32, 4)]
    assert found["bank-conflicts"] == [(32, 1), (32, 32)]  # the same instructions
    assert found["divergence"] == [(8, 32)]
    assert found["vectorised-loads"] == [(8, 128)]
    assert found["unrolling"] == [(4, 11 / 8)]
    assert found["occupancy"] == [(12.5, 100)]
    assert found["output-staging"] == [(32, 4)]
    assert found["wave-quantization"][0] == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_every_kernel_compiles(arch: str) -> None:
    for one in demos.all_demos():
        assert one.source.compile(arch)[:4] == b"\x7fELF"
    assert evidence.widest_load(demos.demo("vectorised-loads").source, arch, "sixteen") == 128


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The kernels on a CPU, and outputs that hold what no kernel writes."""
    if COMPILER is None:
        pytest.skip("needs g++ to run the kernels on a CPU: apt-get install g++")
    library = build(tmp_path_factory.mktemp("demos"))

    def poisoned(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, float("nan")) if x.is_floating_point() else torch.full_like(x, 7)

    with pytest.MonkeyPatch.context() as patch:
        emulate(library, patch)
        patch.setattr(torch, "empty_like", poisoned)
        patch.setattr(evidence, "sms", lambda: 3)
        patch.setattr(evidence, "shared_of_a_block", lambda: 0)
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
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_both_ways_are_right(name: str, emulated: Any) -> None:
    """The launches and kernels themselves, in miniature, against the float64 reference."""
    one = demos.demo(name)
    make, sizes = SMALL[name]
    module = __import__(f"weft.workbench.demos.{name.replace('-', '_')}", fromlist=["N"])
    x = make()
    with pytest.MonkeyPatch.context() as patch:
        for word, value in sizes.items():
            patch.setattr(module, word, value)
        assert one.reference is not None
        wanted = one.reference(x)
        for side in SIDES:
            call = one.way(side).call
            assert call is not None
            assert taking.differs(call(x), wanted, one.tolerance) is None, side
        changed = x.flip(0)
        assert taking.differs(call(changed), wanted, one.tolerance)  # the check sees the input


@pytest.mark.slow
def test_what_times_itself_computes_what_it_says(emulated: Any) -> None:
    v, x, y = torch.zeros(1024), torch.randn(512), torch.full((512,), float("nan"))
    for _ in range(3):
        demos.demo("launch-overhead").source["step"](4, 256, v)
    demos.demo("unified-memory").source["twice"](2, 256, x.data_ptr(), y)
    assert bool((v == 3).all()) and torch.equal(y, 2 * x)


@pytest.mark.slow
def test_only_right_answers_are_timed_and_by_the_house_s_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The way from a pair to its times, on a CPU, with torch in the kernels' place."""
    monkeypatch.setattr(taking, "SECONDS", 0.1)

    def once(x: torch.Tensor) -> torch.Tensor:
        return x.T.contiguous()

    def three_times(x: torch.Tensor) -> torch.Tensor:
        return once(once(once(x)))

    pair = replace(
        demos.demo("output-staging"),
        bad=Way(kernel="slow", how="", call=three_times),
        good=Way(kernel="quick", how="", call=once),
        inputs=lambda seed: [torch.rand(512, 512, generator=torch.Generator().manual_seed(seed))],
    )
    found = taking.both(pair, silent, "cpu")
    assert all(len(found[side].samples) > 1 and not found[side].wrong for side in SIDES)
    assert running.weighed(pair, found)["ratio"] > 1
    untouched = replace(pair, good=Way(kernel="idle", how="", call=torch.Tensor.clone))
    assert taking.both(untouched, silent, "cpu")[GOOD].wrong.startswith("idle: it is off by")


def test_a_wrong_answer_is_told() -> None:
    wanted = torch.zeros(4, dtype=torch.float64)
    assert taking.differs(torch.zeros(4), wanted, 0.0) is None
    assert "off by 0.5" in str(taking.differs(torch.tensor([0, 0, 0.5, 0]), wanted, 0.1))
    assert taking.differs(torch.full((4,), float("nan")), wanted, 1e9)
    assert taking.differs(torch.zeros(3), wanted, 1e9)


def test_ways_are_interleaved_and_the_first_round_is_dropped() -> None:
    seen: list[str] = []

    def sample(side: str) -> float:
        seen.append(side)
        return float(len(seen))

    found = taking.interleaved(SIDES, sample, 20)
    assert [len(v) for v in found.values()] == [20, 20] and min(found[BAD] + found[GOOD]) > 2
    rounds = [tuple(seen[i : i + 2]) for i in range(0, len(seen), 2)]
    assert set(rounds) == {(BAD, GOOD), (GOOD, BAD)}


def taken(bad: float, *, flags: tuple[str, ...] = ()) -> dict[str, Taken]:
    near = (0.99, 1.0, 1.0, 1.0, 1.01)
    return {
        BAD: Taken(samples=tuple(bad * n for n in near), flags=flags),
        GOOD: Taken(samples=tuple(10 * n for n in near)),
    }


def test_a_ratio_is_shown_only_where_it_is_large_enough_and_not_suspect() -> None:
    one = demos.demo("coalescing")
    found = running.weighed(one, taken(50))
    assert (found["status"], found["ratio"]) == ("shown", 5.0)
    low, high = found["ratio_interval"]
    assert 4.8 < low < 5 < high < 5.2
    assert running.weighed(one, taken(19))["status"] == "not shown"
    doubted = running.weighed(one, taken(50, flags=("noisy", "suspect: clocks disagree")))
    assert doubted["status"] == "not shown" and "clocks disagree" in doubted["reason"]
    wrong = running.weighed(one, {BAD: Taken(wrong="strided: it is off by 2")})
    assert wrong == {"status": "wrong", "reason": "strided: it is off by 2"}


def test_times_without_a_counter_are_shown_and_a_fault_on_the_gpu_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = demos.demo("coalescing")
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(find, "find", lambda: None)
    monkeypatch.setattr(taking, "both", lambda demo, say: taken(50))
    found = running.run(one, silent, arch="sm_90")
    assert found["status"] == "shown" and len(found["evidence"]) == 1
    assert "not installed" in found["not_counted"] and found["hint"]

    def faults(demo: Any, say: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(taking, "both", faults)
    found = running.run(one, silent, arch="sm_90")
    assert found["status"] == "wrong" and "illegal memory access" in found["reason"]


SECTORS, REQUESTS = demos.demo("coalescing").counter.metrics  # type: ignore[union-attr]
HEAD = f'"ID","Kernel Name","Block Size","Grid Size","{SECTORS}","{REQUESTS}"\n'
UNITS = '"","","","","sector",""\n'
ROWS = (
    '"0","strided","(256, 1, 1)","(131072, 1, 1)","33,554,432","1,048,576"\n'
    '"1","adjacent","(256, 1, 1)","(131072, 1, 1)","4,194,304","1,048,576"\n'
)


def test_the_counter_is_read_of_both_kernels_or_of_none() -> None:
    counter = demos.demo("coalescing").counter
    assert counter is not None
    found = counting.read(counter, f"==PROF== Profiling\n{HEAD}{UNITS}{ROWS}==PROF== done\n")
    assert (found.bad, found.good) == counter.predicted
    one_row = ROWS.splitlines(keepends=True)[0]
    for text in (HEAD + UNITS + one_row, HEAD + UNITS + ROWS.replace("1,048,576", "n/a"), ""):
        with pytest.raises(WeftError, match="did not count both"):
            counting.read(counter, text)
    with pytest.raises(WeftError, match="administrators"):
        counting.read(counter, "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")


def test_managed_memory_stays_small_and_is_refused_where_there_is_no_room() -> None:
    assert managed_demo.MANAGED <= managed_demo.MOST == 256 << 20
    assert not managed_demo.refusal(1 << 30, True)
    assert "MiB must be free" in managed_demo.refusal(128 << 20, True)
    assert "share managed pages" in managed_demo.refusal(1 << 30, False)
    with pytest.raises(WeftError, match="no room"):
        managed_demo.told({"refused": "no room"})
    assert managed_demo.told({"wrong": "bad: off"})[BAD].wrong == "bad: off"
    assert managed_demo.told({BAD: [2.0], GOOD: [1.0]})[GOOD].samples == (1.0,)


def saved(path: Path, bad: float = 50.0) -> Path:
    """A file as ``--save`` writes it, of two demonstrations with made-up times."""
    shown = []
    for name in ("coalescing", "wave-quantization"):
        one = demos.demo(name)
        data = running._described(one) | {"arch": "sm_90", "evidence": []}
        shown.append(data | running.weighed(one, taken(bad)))
    fact = demos.demo("coalescing").facts("sm_90")[0]
    shown[0]["evidence"] = [fact.to_json()]
    counts = waves_demo.counts(8)
    curve = waves_demo.sawtooth(8, {b: 10.0 * arithmetic.waves(b, 8) for b in counts})
    assert curve.ys == pytest.approx(curve.predicted) and min(curve.ys) == 12.5
    shown[1]["sweep"] = asdict(curve)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": MACHINE, "demos": shown}))
    return path


def test_what_was_saved_is_shown_drawn_and_told_again(tmp_path: Path) -> None:
    file, svg = saved(tmp_path / "some-gpu" / page.FILE), tmp_path / "some-gpu" / page.PICTURE
    run = CliRunner().invoke(app, ["demo", "--from", str(file), "--picture", str(svg)])
    assert run.exit_code == 0 and "5.00× as long" in run.output
    assert "<svg" in svg.read_text() and "multiple of the 8 SMs" in svg.read_text()
    text = page.section("wave-quantization", tmp_path)
    assert "**Some GPU**, 2026-01-02" in text and svg.name in text and page.MISSING not in text
    told = page.section("coalescing", tmp_path)
    assert "| time | 50.0 µs | 10.0 µs | cold |" in told and "| 32 | 4 | arithmetic |" in told
    assert page.MISSING in page.section("occupancy", tmp_path)
    run = CliRunner().invoke(app, ["demo", "occupancy", "--from", str(file)])
    assert isinstance(run.exception, WeftError)
    slow = saved(tmp_path / "slow.json", bad=15.0)
    run = CliRunner().invoke(app, ["demo", "coalescing", "--from", str(slow), "--json"])
    assert run.exit_code == 1 and json.loads(run.stdout)["demos"][0]["status"] == "not shown"


def test_the_command_lists_them_and_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["demo"])
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.output.splitlines()] == list(demos.DEMOS)
    other = tmp_path / "other.json"
    other.write_text("[1]")
    wrong: list[list[str]] = [
        ["nonsense"],
        ["coalescing", "--arch", "hopper"],
        ["coalescing", "--picture", "a.svg"],
        ["wave-quantization", "--picture", "a.png"],
        ["--from", str(other)],
        ["--from", str(saved(tmp_path / "a.json")), "--save", str(tmp_path / "b.json")],
        ["coalescing", "--save", str(tmp_path)],
    ]
    for arguments in wrong:
        run = CliRunner().invoke(app, ["demo", *arguments])
        assert isinstance(run.exception, WeftError), arguments


@pytest.mark.skipif(machine.has_gpu(), reason="there is a GPU here, so that it is timed")
def test_with_no_gpu_the_kernels_and_the_evidence_are_shown_and_nothing_is_timed(
    tmp_path: Path,
) -> None:
    run = CliRunner().invoke(app, ["demo", "unrolling", "--source"])
    assert run.exit_code == 0
    for text in ("#pragma unroll 8", "unrolling.py", "1.38", "SASS, sm_90", "timing needs a GPU"):
        assert text in run.output
    kept = CliRunner().invoke(app, ["demo", "unrolling", "--save", str(tmp_path / "a.json")])
    assert isinstance(kept.exception, WeftError) and not (tmp_path / "a.json").exists()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", demos.DEMOS)
def test_the_effect_is_seen_on_a_gpu(name: str) -> None:
    one = demos.demo(name)
    found = running.run(one, silent)
    print(f"{name}: {page.verdict(found)}")
    if found["status"] == "not timed" and name == "unified-memory":
        pytest.skip(f"no managed memory here: {found['reason']}")
    assert found["status"] == "shown", found["reason"]
    if one.sweep is not None:
        curve = page.sweep(found)
        assert curve is not None
        at = dict(zip(curve.xs, curve.us, strict=True))
        units = evidence.sms()
        assert at[units + 1] > 1.5 * at[units] and at[2 * units] < 1.2 * at[units + 1]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", [d.name for d in demos.all_demos() if d.counter])
def test_the_counter_is_what_arithmetic_predicts(name: str) -> None:
    counter = demos.demo(name).counter
    assert counter is not None
    try:
        find.needed()
        found = counting.counted(demos.demo(name))
    except WeftError as error:
        pytest.skip(str(error))
    print(f"{name}: {found.label}: {found.bad:g}, {found.good:g}; predicted {counter.predicted}")
    for seen, predicted in zip((found.bad, found.good), counter.predicted, strict=True):
        room = counter.within * max(predicted, 0.1 * max(counter.predicted))
        assert abs(seen - predicted) <= room
