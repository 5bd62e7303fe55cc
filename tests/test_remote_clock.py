"""A stranger under the clock: the judge keeps the race and a watch, and believes nothing else."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.core import Case, Ceilings, Implementation, Input, Operator, case
from weft.workbench import bench, clock_cpu, guest_clock
from weft.workbench.bring import Source
from weft.workbench.cell import CellDied, Reply
from weft.workbench.clock import measure
from weft.workbench.hands import Guest
from weft.workbench.local_rig import Contents
from weft.workbench.plan import CHECKS, Budget, Candidate, Outcome, check_of
from weft.workbench.recheck import Recheck
from weft.workbench.remote_clock import RemoteStand, named
from weft.workbench.slots import Slot, deal

Forward = Callable[..., torch.Tensor]
QUICK = Budget(seconds=0.4, warmup=0.04, minimum=8, maximum=20, side_samples=3, recheck=3.0)
POINT = case(Input(name="x", shape=(160, 128)), tags="bench", devices=("cpu",))
CEILINGS = Ceilings(
    device="toy", copy=1e12, read=1e12, fill=1e12, matrix={"fp32": 1e12}, measured="today"
)


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr("weft.machine.l2_bytes", lambda kind: 1 << 20)
    yield
    torch.set_num_threads(before)


def work(x: torch.Tensor) -> torch.Tensor:
    """Some 30 times dearer than a copy of its answer."""
    for _ in range(6):
        x = torch.tanh(x) + x
    return x


class Loaded:
    """What a guest would have read: one implementation of one toy operator."""

    def __init__(self, forward: Forward) -> None:
        self.implementation = Implementation(
            operator="toy", name="theirs", backend="torch", forward=forward
        )

    def point(self, said: Any) -> tuple[Operator, Implementation, Case, str, str]:
        operator: Any = None  # the clock binds without it in the forward
        operator = type("Toy", (), {"in_place": ()})()
        return operator, self.implementation, POINT, said["direction"], said["device"]


class FakeCell:
    """A guest in this process: JSON goes in and comes out, ``around`` is held while it answers."""

    def __init__(self, forward: Forward, around: Callable[[], Any] = nullcontext) -> None:
        self.verbs = guest_clock.verbs(Loaded(forward))
        self.around, self.asked = around, []

    def ask(self, verb: str, payload: Any = None, tensors: Sequence[Any] = (), **_: Any) -> Reply:
        self.asked.append(verb)
        with self.around():
            told, sent = self.verbs[verb](json.loads(json.dumps(payload or {})), list(tensors))
        return Reply(payload=json.loads(json.dumps(told)), tensors=[t.clone() for t in sent])


def judge_of(slot: Slot) -> Callable[[object], str | None]:
    wanted = work(slot.inputs[0].double())

    def judge(output: object) -> str | None:
        assert isinstance(output, torch.Tensor)
        error = (output.double() - wanted).abs().max().item()
        return None if error < 1e-4 else f"off by {error}"

    return judge


def never(slot: Slot) -> Callable[[], torch.Tensor]:
    raise AssertionError("a stranger's code is not called by the judge")


def race(
    forward: Forward,
    *,
    around: Callable[[], Any] = nullcontext,
    without: Sequence[str] = (),
    budget: Budget = QUICK,
) -> dict[str, Outcome]:
    """A stranger beside an implementation of this process."""
    cell = FakeCell(forward, around)
    point = named("toy", "theirs", POINT.name, "forward", "cpu", None)
    return measure(
        [
            Candidate(name="theirs", bind=never, stand=RemoteStand(cell, point, "cpu", without)),
            Candidate(name="ours", bind=lambda slot: lambda: work(slot.inputs[0])),
        ],
        partial(deal, POINT, "cpu", None),
        device="cpu",
        budget=budget,
        make_judge=judge_of,
        seed=None,
        without=without,
    )


def suspicions(found: Outcome) -> list[str]:
    flags = found.timing.flags if found.timing else ()
    told = [check_of(f) for f in flags if f.startswith("suspect")]
    return [*told, check_of(found.refusal)] if found.refusal else told


def test_a_stranger_gets_every_number_beside_ours() -> None:
    found = race(work)
    for one in found.values():
        assert one.timing is not None, one
        assert suspicions(one) == [] and len(one.timing.samples) >= QUICK.minimum
        assert one.timing.warm and one.timing.host and one.timing.clocks["fresh"] > 0
    ratio = found["theirs"].timing.minimum / found["ours"].timing.minimum  # type: ignore[union-attr]
    assert 0.5 < ratio < 2, "the same work, wherever it is timed"


def kept_by(key: Callable[[torch.Tensor], object]) -> Forward:
    kept: dict[object, torch.Tensor] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        known = key(x)
        if known not in kept:
            kept[known] = work(x)
        return kept[known].clone()

    return forward


def first_bytes(x: torch.Tensor) -> bytes:
    return x.flatten()[:16].numpy().tobytes()


def whole(x: torch.Tensor) -> float:
    return float(x.sum())


@pytest.mark.parametrize("key", [first_bytes, whole])
def test_an_answer_kept_by_contents_is_slower_on_new_ones(key: Callable[..., object]) -> None:
    found = race(kept_by(key))
    assert "fresh" in suspicions(found["theirs"]), found["theirs"]
    assert found["theirs"].timing is not None and suspicions(found["ours"]) == []
    assert found["theirs"].timing.clocks["fresh"] > 1.5


def test_without_fresh_an_answer_kept_by_contents_survives() -> None:
    assert suspicions(race(kept_by(first_bytes), without=["fresh"])["theirs"]) == []


def skips_after(calls: int) -> Forward:
    count = [0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return work(x) if count[0] < calls else torch.zeros_like(x)

    return forward


def test_a_skip_after_40_calls_is_refused_and_only_by_the_recheck() -> None:
    found = race(skips_after(40))["theirs"]
    assert suspicions(found) == ["recheck"] and "is wrong" in found.refusal
    assert race(skips_after(40), without=["recheck"])["theirs"].refusal == ""


def test_calls_that_are_put_off_and_done_together_are_refused() -> None:
    waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        waiting.append((x, torch.empty_like(x)))
        out = waiting[-1][1]
        if len(waiting) == 8:
            for given, due in waiting:
                due.copy_(work(given))
            waiting.clear()
        return out

    assert suspicions(race(forward)["theirs"]) == ["recheck"]


class Slowed:
    """The clock of the samples goes at a tenth of the pace while the guest answers."""

    def __enter__(self) -> None:
        self.real, began = clock_cpu._now, clock_cpu._now()
        real = self.real
        clock_cpu._now = lambda: began + (real() - began) // 10

    def __exit__(self, *_: object) -> None:
        clock_cpu._now = self.real


def test_a_claim_of_a_tenth_is_seen_by_the_judges_own_watch() -> None:
    found = race(work, around=Slowed, without=["replaced"])
    assert "wall" in suspicions(found["theirs"]), found["theirs"]
    assert suspicions(found["ours"]) == []


def test_without_the_wall_a_claim_of_a_tenth_survives() -> None:
    found = race(work, around=Slowed, without=["replaced", "wall", "clocks"])["theirs"]
    assert suspicions(found) == [] and found.timing is not None


def test_a_guest_whose_clock_was_replaced_is_refused() -> None:
    cell = FakeCell(work)
    cell.verbs["clock.replaced"] = lambda said, _: ({"replaced": ["time.sleep"]}, ())  # type: ignore[index]
    stand = RemoteStand(cell, named("toy", "theirs", POINT.name, "forward", "cpu", None), "cpu")
    found = measure(
        [Candidate(name="it", bind=never, stand=stand)],
        partial(deal, POINT, "cpu", None),
        device="cpu",
        budget=QUICK,
        seed=None,
    )["it"]
    assert suspicions(found) == ["replaced"] and "time.sleep" in found.refusal


def test_a_thread_that_outlives_a_call_is_suspect() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        threading.Thread(target=time.sleep, args=(0.2,), name="later", daemon=True).start()
        return work(x)

    few = Budget(seconds=0.1, warmup=0.01, minimum=3, maximum=4, side_samples=1, recheck=1.0)
    found = race(forward, budget=few)["theirs"]
    assert found.timing is not None, found
    assert any("threads: later outlived" in f for f in found.timing.flags), found.timing.flags
    assert "threads" in suspicions(found)


def test_sleeping_through_the_budget_leaves_too_few_samples() -> None:
    calls = [0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] > 60:
            time.sleep(0.05)
        return work(x)

    few = Budget(seconds=0.2, warmup=0.02, minimum=20, maximum=60, side_samples=1, recheck=0.5)
    slept = race(forward, budget=few)["theirs"]
    assert "samples" in suspicions(slept), slept
    assert slept.timing is not None and len(slept.timing.samples) < 20


def test_a_guest_that_dies_is_told_and_ours_goes_on() -> None:
    cell = FakeCell(work)
    real = cell.ask

    def ask(verb: str, *rest: Any, **more: Any) -> Reply:
        if verb == "clock.sample" and cell.asked.count(verb) > 5:
            raise CellDied("was killed by SIGSEGV")
        return real(verb, *rest, **more)

    cell.ask = ask  # type: ignore[method-assign]
    stand = RemoteStand(cell, named("toy", "theirs", POINT.name, "forward", "cpu", None), "cpu")
    found = measure(
        [
            Candidate(name="theirs", bind=never, stand=stand),
            Candidate(name="ours", bind=lambda slot: lambda: work(slot.inputs[0])),
        ],
        partial(deal, POINT, "cpu", None),
        device="cpu",
        budget=QUICK,
        make_judge=judge_of,
        seed=None,
    )
    assert found["theirs"].trouble == "its process was killed by SIGSEGV"
    assert found["ours"].timing is not None


def test_which_far_answers_are_looked_at_is_not_known_before() -> None:
    contents = Contents(partial(deal, POINT, "cpu", None))
    recheck = Recheck(range(100), contents, judge_of, [1, 2], backward=False)
    seen = set()
    for turn in range(20):
        recheck.load(turn)
        chosen = recheck.chosen(100, near=False)
        assert {0, 99} <= set(chosen) and 2 <= len(chosen) <= 13
        assert recheck.chosen(100, near=True) == list(range(100))
        seen |= set(chosen)
    assert len(seen) > 40


def test_seeds_of_strangers_are_nobodys_guess() -> None:
    first, second = FakeCell(work), FakeCell(work)
    seeds: list[list[int]] = []
    for cell in (first, second):
        real = cell.ask

        def ask(verb: str, payload: Any = None, *rest: Any, real: Any = real, **more: Any) -> Reply:
            if verb == "clock.rig":
                seeds.append(payload["seeds"])
            return real(verb, payload, *rest, **more)  # type: ignore[no-any-return]

        cell.ask = ask  # type: ignore[method-assign]
        stand = RemoteStand(cell, named("toy", "theirs", POINT.name, "forward", "cpu", None), "cpu")
        candidates = [Candidate(name="it", bind=never, stand=stand)]
        make_slot = partial(deal, POINT, "cpu", None)
        measure(candidates, make_slot, device="cpu", budget=QUICK, seed=None)
    assert not set(seeds[0]) & set(seeds[-1]), "no slot is drawn from a known seed"


def test_every_check_of_the_clock_has_a_name_for_what_it_says() -> None:
    assert {check_of(begins[0]) for begins in CHECKS.values()} == set(CHECKS)
    assert check_of("noisy") == "" and check_of("suspect: faster than the floor") == ""


def test_honest_ways_are_never_suspect() -> None:
    """Many short races of honest work, here and in a guest, on whatever this machine is doing."""
    few = Budget(seconds=0.1, warmup=0.01, minimum=5, maximum=8, side_samples=1, recheck=0.2)
    races = [race(work, budget=few) for _ in range(15)]
    alarms = [s for found in races for one in found.values() for s in suspicions(one)]
    print(f"30 honest timings, {len(alarms)} alarms")
    assert alarms == []


THEIRS = """
import torch, weft

@weft.implementation("gelu", backend="torch", name="honest")
def honest(x):
    return torch.nn.functional.gelu(x, approximate="tanh")

kept = {}

@weft.implementation("gelu", backend="torch", name="first-bytes")
def first_bytes(x):
    key = (x.shape, x.dtype, x.stride(), x.flatten()[:16].numpy().tobytes())
    if key not in kept:
        kept[key] = honest(honest(x) * 0 + x)
    return kept[key].clone()
"""


@pytest.mark.slow
@pytest.mark.alone
def test_a_file_is_timed_in_its_own_process(tmp_path: Path) -> None:
    """From a file to records, through a real cell; the cheat among them is suspect."""
    path = tmp_path / "theirs.py"
    path.write_text(THEIRS)
    budget = Budget(seconds=0.6, warmup=0.1, minimum=8, maximum=30, side_samples=2, recheck=2.0)
    with Guest(Source(kind="file", path=str(path))) as guest:
        (records,) = bench.run_points(
            ["gelu"],
            ["torch", *guest.implementations],
            directions=["forward"],
            device="cpu",
            budget=budget,
            guests={i.name: guest for i in guest.implementations},
            ceilings=CEILINGS,
        )
    found = {r.implementation: r for r in records}
    for name in ("torch", "honest"):
        assert found[name].timing is not None, found[name].verdict.reason
        assert not [f for f in found[name].flags if f.startswith("suspect")], found[name].flags
    cheat = found["first-bytes"]
    assert any(check_of(f) == "fresh" for f in cheat.flags), (cheat.verdict, cheat.flags)
    assert bench.went_against([cheat]) and not bench.went_against([found["honest"]])
