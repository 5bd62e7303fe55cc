"""The ceilings: measured values are plausible, and the stored file is always complete."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from weft import machine
from weft.core import Ceilings
from weft.machine import measure_cpu
from weft.machine.load import Load

store = importlib.import_module("weft.machine.ceilings")  # its name in the package is the function


def test_cpu_ceilings_are_plausible_and_agree_with_a_plain_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setattr(measure_cpu, "BUDGET", 0.02)
    here = dataclasses.replace(machine.query("cpu"), memory_bytes=128 << 20, threads=1)

    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    measured_rates, _ = measure_cpu.measure(torch, here, lambda line: None, sizes=(64, 128))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)
    assert set(measured_rates["matrix"]) == {"fp32", "fp64", "bf16", "fp16", "tf32"}
    for word in ("copy", "read", "fill"):
        assert 1e8 < measured_rates[word] < 1e13
    assert all(1e6 < rate < 1e15 for rate in measured_rates["matrix"].values())
    assert measured_rates["matrix"]["fp64"] < 1.5 * measured_rates["matrix"]["fp32"]
    # A product of n^3 multiply-adds counts 2 n^3, a copy counts both ways: one
    # thread, timed here, has the same order of magnitude, whatever else the machine does meanwhile.
    source = torch.randn(2 << 20)
    target = torch.empty_like(source)
    with measure_cpu.all_threads(torch, 1):
        plain = 2 * source.numel() * 4 / measure_cpu.best_median(lambda: target.copy_(source), 0.02)
    assert measured_rates["copy"] / 50 < plain < 4 * measured_rates["copy"]


GOOD = Ceilings(device="x", copy=2.0, read=3.0, fill=4.0, matrix={"fp32": 5.0}, measured="2026-01-01")


def stored_text(ceilings: object) -> str:
    return json.dumps({"format": 1, "machine": {"versions": {}}, "ceilings": ceilings})


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Ceilings]:
    """Provide an empty cache and a measurement that takes no time; return the list of its results."""
    calls: list[Ceilings] = []

    def fake(device: machine.Device, log: object, readers: object = tuple) -> tuple[Ceilings, str]:
        calls.append(dataclasses.replace(GOOD, copy=2.0 / (1 + len(calls)), fill=4.0 + len(calls)))
        return calls[-1], ""

    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "measure_now", fake)
    monkeypatch.setattr(store, "_measured", set())
    monkeypatch.setattr(store, "measure_load", lambda kind: Load(kind=kind, cores=2, others=0.0))
    return calls


def stored_file() -> Path:
    return store.path_for(machine.query("cpu"))


def test_ceilings_are_measured_once_and_kept(measured: list[Ceilings]) -> None:
    assert machine.ceilings("cpu", measure=False) is None
    assert not measured
    first = machine.ceilings("cpu")
    assert machine.ceilings("cpu") == first == GOOD
    assert machine.ceilings("cpu", measure=False) == first
    assert len(measured) == 1
    assert sorted(json.loads(stored_file().read_text())) == ["ceilings", "doubt", "format", "machine"]


def test_measuring_again_keeps_the_better_of_each(measured: list[Ceilings]) -> None:
    machine.ceilings("cpu")
    again = machine.ceilings("cpu", refresh=True)
    assert again is not None and (again.copy, again.fill) == (2.0, 5.0)
    assert machine.ceilings("cpu") == again


def test_doubtful_ceilings_are_measured_again_by_the_next_process(
    measured: list[Ceilings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = store.measure_now

    def busy(device: machine.Device, log: object, readers: object = tuple) -> tuple[Ceilings, str]:
        return quiet(device, log)[0], "the CPU was busy"

    monkeypatch.setattr(store, "measure_now", busy)
    machine.ceilings("cpu")
    assert "the CPU was busy" in capsys.readouterr().err
    machine.ceilings("cpu")
    assert len(measured) == 1  # a process measures only once
    monkeypatch.setattr(store, "_measured", set())
    monkeypatch.setattr(store, "measure_now", quiet)
    ceilings = machine.ceilings("cpu")
    assert ceilings is not None and (ceilings.copy, ceilings.fill, len(measured)) == (2.0, 5.0, 2)
    assert json.loads(stored_file().read_text())["doubt"] == "" and capsys.readouterr().err == ""


BUSY = Load(kind="cpu", cores=2, others=1.9, average=7.1)


def test_ceilings_of_a_busy_machine_are_doubtful_until_a_quiet_one_measures_them(
    measured: list[Ceilings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = store.measure_load
    monkeypatch.setattr(store, "measure_load", lambda kind: BUSY)
    first = machine.ceilings("cpu")
    assert first is not None and "load 7.1 on 2 cores" in first.doubt
    assert "marked ~" in capsys.readouterr().err
    # The machine is still busy in the next process: it uses the doubtful ceilings and prints a warning.
    monkeypatch.setattr(store, "_measured", set())
    assert machine.ceilings("cpu") == first and len(measured) == 1
    assert "busy now" in capsys.readouterr().err
    # Ceilings that are read from the file still have the doubt.
    assert machine.ceilings("cpu", measure=False) == first
    monkeypatch.setattr(store, "_measured", set())
    monkeypatch.setattr(store, "measure_load", quiet)
    last = machine.ceilings("cpu")
    assert last is not None and last.doubt == "" and len(measured) == 2
    assert json.loads(stored_file().read_text())["doubt"] == ""


@pytest.mark.parametrize(
    "change",
    [
        {"name": "another"},
        {"threads": 7},
        {"units": 99},
        {"driver": "1.2.3"},
        {"power_limit_w": 300.0},
        {"versions": {"torch": "9.9"}},
        {"versions": {"cuda": "99.9"}},
        {"cpus": {5}},
        {"settings": ("OMP_PLACES", "sockets")},
    ],
)
def test_each_thing_that_ceilings_depend_on_has_a_file_of_its_own(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = machine.query("cpu")
    before = store.path_for(here)
    assert store.path_for(here) == before
    for name, value in change.items():
        if name == "versions":
            all_versions = {**store.versions(), **value}
            monkeypatch.setattr(store, "versions", lambda v=all_versions: v)
        elif name == "cpus":
            monkeypatch.setattr(store, "usable_cpus", lambda v=value: frozenset(v))
        elif name == "settings":
            monkeypatch.setenv(*value)
        else:
            here = dataclasses.replace(here, **{name: value})
    assert store.path_for(here) != before


def test_repeats_that_differ_widely_make_ceilings_doubtful(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    spread = [0.0]

    def planted(call: object, budget: float, spreads: list[float] | None = None) -> float:
        if spreads is not None:
            spreads.append(spread[0])
        return 1e-3

    monkeypatch.setattr(measure_cpu, "best_median", planted)
    # This process uses all of the CPU time, as on a quiet machine.
    monkeypatch.setattr(measure_cpu, "process_time", lambda: measure_cpu.perf_counter() * 2)
    here = dataclasses.replace(machine.query("cpu"), memory_bytes=128 << 20, threads=1)
    for share, doubtful in ((0.1, False), (0.9, True)):
        spread[0] = share
        _, doubt = measure_cpu.measure(torch, here, lambda line: None, sizes=(16,))
        assert ("differ by 90%" in doubt) == doubtful


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"format": 1, "ceil',
        "[]",
        "null",
        '{"format": 1}',
        '{"format": 0}',
        "\x00\xff",
        stored_text({"copy": 1}),
        stored_text({**dataclasses.asdict(GOOD), "copy": math.nan}),
        stored_text({**dataclasses.asdict(GOOD), "matrix": {"fp32": -1}}),
    ],
)
def test_an_unreadable_cache_is_measured_again_with_a_warning(
    text: str, measured: list[Ceilings], capsys: pytest.CaptureFixture[str]
) -> None:
    stored_file().parent.mkdir(parents=True)
    stored_file().write_text(text)
    assert machine.ceilings("cpu") == GOOD
    captured = capsys.readouterr()
    assert str(stored_file()) in captured.err and captured.out == ""
    assert machine.ceilings("cpu") == GOOD and len(measured) == 1


def test_another_torch_measures_anew(measured: list[Ceilings], capsys: pytest.CaptureFixture[str]) -> None:
    machine.ceilings("cpu")
    data = json.loads(stored_file().read_text())
    data["machine"]["versions"]["torch"] = "1.0"
    data["ceilings"]["copy"] = 1e9
    stored_file().write_text(json.dumps(data))
    ceilings = machine.ceilings("cpu")
    assert ceilings is not None and ceilings.copy == 1.0 and len(measured) == 2
    assert "torch 1.0" in capsys.readouterr().err


def test_a_failed_write_leaves_the_old_file_and_no_litter(
    measured: list[Ceilings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.ceilings("cpu")
    before = stored_file().read_text()

    def full(*names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert machine.ceilings("cpu", refresh=True) is not None
    assert "No space left" in capsys.readouterr().err
    assert stored_file().read_text() == before
    assert [p.name for p in stored_file().parent.iterdir()] == [stored_file().name]
