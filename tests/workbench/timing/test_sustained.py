"""Blocks of power-bound calls: their order, the temperature at which they begin, clock and energy."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.sample_records import record
from weft.machine.clocks import Sampler
from weft.workbench import bench
from weft.workbench.report import table
from weft.workbench.timing import sustained
from weft.workbench.timing.plan import RunTimes
from weft.workbench.timing.sustained import Block, blocks_in_turn, is_power_bound, summarise_blocks

WATTS, MHZ = 700.0, 1500
CAPPED, FREE = {"throttle": ["sw_power_cap"]}, {"throttle": []}


class ToyCard(Sampler):
    """Card with a clock of its own: calls use 700 W and heat it by a degree each 0.1 s; it cools as fast."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tells_energy: bool = True) -> None:
        self.ns, self.energy, self.temp, self.tells_energy = 0, 0.0, 40.0, tells_energy
        monkeypatch.setattr(sustained, "_now", lambda: self.ns)
        monkeypatch.setattr(sustained, "_pause", lambda seconds: self.work(seconds, 0.0, -10.0))

    def work(self, seconds: float, watts: float = WATTS, degrees: float = 10.0) -> None:
        self.ns += round(seconds * 1e9)
        self.energy += watts * seconds
        self.temp += degrees * seconds

    def read(self) -> dict[str, Any]:
        return {"sm_mhz": MHZ, "temp_c": self.temp, "throttle": []}

    def joules(self) -> float | None:
        return self.energy if self.tells_energy else None


class ToyCalls:
    """Candidate whose calls take ``us``, two in a sample."""

    calls = 2

    def __init__(self, card: ToyCard, us: float) -> None:
        self.card, self.us = card, us

    def sample(self) -> float:
        return self.us

    def repeat(self, repeats: int, warm: bool) -> RunTimes:
        assert not warm
        total = repeats * self.calls * self.us
        self.card.work(total / 1e6)
        return RunTimes(us=self.us, total_us=total, wall_us=total)


def test_each_runs_twice_in_mirrored_order_from_the_same_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    card = ToyCard(monkeypatch)
    candidates = {"a": ToyCalls(card, 1000.0), "b": ToyCalls(card, 2000.0), "c": ToyCalls(card, 10.0)}
    blocks = [(name, run()) for name, run in blocks_in_turn(candidates, ["b", "a", "c"], card, 1.0)]
    assert [name for name, _ in blocks] == ["b", "a", "c", "c", "a", "b"]
    for name, block in blocks:
        us = candidates[name].us
        assert block.us == pytest.approx(us) and block.sm_mhz == MHZ
        assert block.joules == pytest.approx(WATTS * us / 1e6)
        assert block.temp_c == pytest.approx(40.5, abs=0.51)


def test_a_card_that_stays_warm_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    card = ToyCard(monkeypatch)
    monkeypatch.setattr(sustained, "_pause", lambda seconds: card.work(seconds, 0.0, 0.0))
    blocks = [run() for _, run in blocks_in_turn({"a": ToyCalls(card, 1000.0)}, ["a"], card, 1.0)]
    assert len(blocks) == 2 and card.ns < 6e9
    assert blocks[1].temp_c == pytest.approx(50.0, abs=1.0)  # the record shows that it began warmer


def test_readings_that_the_card_lacks_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    card = ToyCard(monkeypatch, tells_energy=False)
    blocks = [run() for _, run in blocks_in_turn({"a": ToyCalls(card, 1000.0)}, ["a"], card, 0.2)]
    summary = summarise_blocks(blocks)
    assert summary["joules"] is None and summary["us"] == pytest.approx(1000.0)
    mixed = [*blocks, Block(us=3000.0, sm_mhz=None, joules=1.0, temp_c=None)]
    assert summarise_blocks(mixed)["joules"] is None and summarise_blocks(mixed)["sm_mhz"] is None


def test_only_a_clock_that_the_power_limit_holds_down_is_power_bound() -> None:
    assert is_power_bound([CAPPED, FREE, FREE, FREE])
    assert not is_power_bound([CAPPED, FREE, FREE, FREE, FREE]) and not is_power_bound([])
    assert not is_power_bound([{"throttle": ["sw_thermal"]}, {}])


def test_the_table_shows_sustained_times_where_there_are_some() -> None:
    first = record(implementation="cuda", cold=100.0)
    assert first.timing is not None
    figures = {"us": 1234.0, "sm_mhz": 1455.0, "joules": 0.5, "blocks": []}
    first.timing.clocks["sustained"] = figures  # type: ignore[index]
    rows = [first, record(implementation="torch", cold=110.0)]
    names = [c.name for c in next(table.tables(rows)).columns]
    cells = dict(zip(names, next(table.tables(rows)).rows[0], strict=True))
    assert (cells["sustained"], cells["SM MHz"], cells["mJ"]) == ("1.23 ms", "1455", "500")
    assert "sustained" in table.footnote(rows) and "sustained" not in table.footnote(rows[1:])


@pytest.mark.gpu
@pytest.mark.alone
def test_a_large_product_has_sustained_times_at_the_power_limit() -> None:
    records = list(
        bench.run(["matmul"], ["torch", "triton"], ["bf16-8192x8192x8192"], ["forward"], device="cuda")
    )
    for r in records:
        assert r.timing is not None, r.verdict.reason
        if "power-capped" not in r.flags:
            pytest.skip("the power limit of this card holds no product's clock down")
        figures = r.timing.clocks["sustained"]
        watts = figures["joules"] / (figures["us"] / 1e6)
        limit = r.machine.get("power_limit_w") or 1000.0
        assert 0.3 * limit < watts < 1.3 * limit
        assert 300 < figures["sm_mhz"] < 4000 and len(figures["blocks"]) == 2
