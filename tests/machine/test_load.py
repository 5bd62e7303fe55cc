"""Load by other processes: from planted texts of /proc/stat and planted clocks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from helpers.sample_records import GPU, bench, record
from weft.cli.output import table_lines
from weft.machine import load
from weft.machine.load import Load, busier, busy_seconds
from weft.workbench.records import doubts
from weft.workbench.report import page, table

STAT = """cpu  900 0 0 900 0 0 0 0 0 0
cpu0 100 10 20 500 40 1 2 3 0 0
cpu1 300 0 0 400 0 0 0 0 50 0
intr 1 2 3
"""


def test_seconds_are_those_of_the_usable_cpus_without_idle_time() -> None:
    assert busy_seconds(STAT, {0}) == pytest.approx(1.36)
    assert busy_seconds(STAT, {0, 1}) == pytest.approx(4.36)  # guests are counted in user already
    assert busy_seconds(STAT, {7}) is None and busy_seconds("", {0}) is None


@pytest.mark.parametrize(("own", "others"), [(0.0, 1.8), (0.8, 1.0), (1.9, 0.0)])
def test_own_time_is_not_the_others(
    own: float, others: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cores work 1.8 s in a second, of which this process takes ``own``."""
    stat, now = tmp_path / "stat", [0.0]
    stat.write_text("cpu0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0\n")

    def sleep(seconds: float) -> None:
        now[0] += 1.0
        stat.write_text("cpu0 90 0 0 10 0 0 0 0\ncpu1 90 0 0 10 0 0 0 0\n")

    monkeypatch.setattr(load, "STAT", stat)
    monkeypatch.setattr(load, "usable_cpus", lambda: frozenset({0, 1}))
    monkeypatch.setattr(load.time, "sleep", sleep)
    monkeypatch.setattr(load.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(load.time, "process_time", lambda: own * now[0])
    monkeypatch.setattr(load.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(load.os, "getloadavg", lambda: (7.1, 1.0, 1.0))
    measured = load.measure("cpu")
    assert measured.others == pytest.approx(others) and measured.cores == 2
    assert bool(measured.busy) == (others > 0)
    assert not measured.busy or "load 7.1 on 2 cores" in measured.busy
    monkeypatch.setattr(load, "STAT", tmp_path / "missing")
    by_average = load.measure("cpu")
    assert by_average.others is None and by_average.busy == "load 7.1 on 2 cores"


@pytest.mark.parametrize(
    ("machine", "busy"),
    [
        (Load(kind="cpu", cores=2, others=0.2, average=9.0), False),
        (Load(kind="cpu", cores=2, others=0.3), True),
        (Load(kind="cpu", cores=64, others=3.0), False),
        (Load(kind="cpu", cores=64, others=4.0), True),
        (Load(kind="cpu", cores=2, average=1.0), False),
        (Load(kind="cpu", cores=2), False),
        (Load(kind="cuda", cores=16, others=12.0), False),
        (Load(kind="cuda", cores=16, others=15.5), True),
        (Load(kind="cuda", cores=16, others=0.0, gpu=0.37), True),
        (Load(kind="cuda", cores=16, others=0.0, gpu=0.01), False),
    ],
)
def test_limits_of_a_quiet_machine(machine: Load, busy: bool) -> None:
    assert bool(machine.busy) == busy
    assert machine.to_json()["busy"] == machine.busy


def test_the_busier_of_two_readings_counts() -> None:
    quiet, busy = Load(kind="cpu", cores=2, others=0.0), Load(kind="cpu", cores=2, others=1.5)
    assert busier(quiet, busy) is busy and busier(busy, quiet) is busy


def test_records_say_once_why_their_times_and_shares_are_doubtful() -> None:
    quiet = record()
    here = {**quiet.machine, "load": Load(kind="cpu", cores=2, others=1.9, average=7.1).to_json()}
    busy = dataclasses.replace(quiet, machine=here, doubt="repeats differ")
    assert doubts([quiet]) == []
    times, shares = doubts([quiet, busy, busy])
    assert times.startswith("the machine was busy (load 7.1 on 2 cores") and "doubtful" in times
    assert "marked ~" in shares and "repeats differ" in shares


def test_doubtful_shares_are_marked_in_json_table_and_page() -> None:
    good = bench(GPU)
    bad = [dataclasses.replace(r, doubt="repeats differ" if r.efficiency else "") for r in good]
    assert all(type(r).from_json(r.to_json()) == r for r in bad)
    for records, marked in ((good, False), (bad, True)):
        text = "\n".join(map(str, (line for t in table.tables(records) for line in table_lines(t, None))))
        html = page(records)
        assert ("~" in text) == marked and ("repeats differ" in html) == marked
        shares = [r.efficiency for r in records if r.efficiency]
        assert html.count("~") >= len(shares) if marked else " ~" not in html
