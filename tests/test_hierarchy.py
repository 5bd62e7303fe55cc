"""The memory hierarchy: chases that go by every line, the arithmetic on a cache that is known
exactly, kernels whose loads are there, and the command on this CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from weft import machine
from weft.cli import app
from weft.core import WeftError
from weft.workbench.hierarchy import chases, launches, on_cpu, page, picture, show, streams
from weft.workbench.hierarchy.plan import KIB, MIB, known_sizes, per_core, sizes
from weft.workbench.hierarchy.result import BANDWIDTH, LATENCY, Figure, Series, hold


def test_known_sizes_are_one_core_s_and_one_sm_s(tmp_path: Path) -> None:
    gpu = machine.Device(
        kind="cuda", name="", arch="sm_90", shared_per_sm=228 * KIB, l2_bytes=60 * MIB
    )
    assert known_sizes(gpu) == {"L1": 256 * KIB, "shared": 228 * KIB, "L2": 60 * MIB}
    assert known_sizes(machine.Device(kind="cuda", name="", arch="sm_999")) == {}
    told = (("Data", "1", "32K"), ("Instruction", "1", "32K"), ("Unified", "3", "8M"))
    core = tmp_path / f"cpu{min(os.sched_getaffinity(0))}"
    for number, texts in enumerate(told):
        index = core / "cache" / f"index{number}"
        index.mkdir(parents=True)
        for word, text in zip(("type", "level", "size"), texts, strict=True):
            (index / word).write_text(text + "\n")
    caches = {"L1d": 64 * KIB, "L3": 16 * MIB}
    assert per_core(caches, tmp_path) == {"L1d": 32 * KIB, "L3": 8 * MIB}
    assert per_core({"L1d": 1}, tmp_path) == {"L1d": 32 * KIB}
    assert per_core(caches, tmp_path / "missing") == {}


def test_a_chase_goes_by_every_line_once() -> None:
    random = torch.Generator().manual_seed(1)
    data = torch.zeros(64 * 16 + 32, dtype=torch.int64)
    chases.link(data, chases.cycle(64, random))
    heads = data[::16].tolist()
    at, seen = data.data_ptr(), []
    for _ in range(64):
        line = (at - data.data_ptr()) // 128
        seen.append(line)
        at = heads[line]
    assert sorted(seen) == list(range(64)) and at == data.data_ptr()
    assert seen != sorted(seen)
    after = on_cpu.linked(8 * KIB, np.random.default_rng(0))
    stops = [0]
    while (following := int(after[stops[-1]])) != 0:
        stops.append(following)
    assert sorted(stops) == list(range(0, 1024, 8))


class Cache:
    """A GPU of one thread whose L1 and L2 drop the oldest line: what chase.cu does, in Python."""

    def __init__(self, data: torch.Tensor, l1: int, l2: int) -> None:
        self.heads = data.numpy().reshape(-1, 16)
        self.base = data.data_ptr()
        self.room = {"L1": l1 // 128, "L2": l2 // 128}
        self.lines: dict[str, OrderedDict[int, None]] = {"L1": OrderedDict(), "L2": OrderedDict()}

    def hit(self, level: str, line: int) -> bool:
        lines = self.lines[level]
        found = line in lines
        lines[line] = None
        lines.move_to_end(line)
        if len(lines) > self.room[level]:
            lines.popitem(last=False)
        return found

    def hop(self, level: str, line: int) -> int:
        if level == "L1" and self.hit("L1", line):
            return 40
        return 250 if self.hit("L2", line) else 800

    def kernel(self, level: str) -> Callable[..., None]:
        def launch(grid: int, block: int, state: torch.Tensor, warm: int, count: int) -> None:
            assert (grid, block) == (1, 1) and warm % 16 == count % 16 == 0
            self.lines["L1"].clear()
            at, cycles = int(state[0]), 0
            for hop in range(warm + count):
                line = (at - self.base) // 128
                cost = self.hop(level, line)
                cycles += cost if hop >= warm else 0
                at = int(self.heads[line, 0])
            state[:] = torch.tensor([at, cycles, cycles // 2])

        return launch


def test_on_a_cache_that_is_known_the_chase_measures_it(monkeypatch: pytest.MonkeyPatch) -> None:
    l1, l2, most = 16 * KIB, 96 * KIB, 512 * KIB
    chaser = object.__new__(chases.Chaser)
    chaser.l2, chaser.most, chaser.ns = l2, most, {}
    chaser.data = torch.zeros(most // 8, dtype=torch.int64)
    chaser.state = torch.zeros(3, dtype=torch.int64)
    chaser.random = torch.Generator().manual_seed(0)
    chaser.where = chaser.random.device
    cache = Cache(chaser.data, l1, l2)
    flush = SimpleNamespace(sum=cache.lines["L2"].clear)
    chaser.flusher = flush  # type: ignore[assignment]
    made = {"chase_l1": cache.kernel("L1"), "chase_l2": cache.kernel("L2")}
    monkeypatch.setattr(chases, "SOURCE", made)
    monkeypatch.setattr(chases, "SMALL", 32 * KIB)
    monkeypatch.setattr(chases, "PAGE", 16 * KIB)
    monkeypatch.setattr(chases, "HOPS", dict.fromkeys(chases.HOPS, 512))
    known = {"L1": l1, "L2": l2}
    planned = sizes(2 * KIB, most, known.values(), 128)
    said = chases._series(chaser, "chase_l1", "", ("L1", "L2"), planned).to_json(known)
    assert [p["value"] for p in said["plateaus"]] == [40, 250, 800]
    assert [p["ns"] for p in said["plateaus"]] == [20, 125, 400]
    assert [h["level"] for h in said["held"]] == ["L1", "L2"]
    assert all(h["within"] == ["leaves", "holds"] for h in said["held"])
    past = chases._series(chaser, "chase_l2", "", ("L2",), planned).to_json(known)
    assert [p["value"] for p in past["plateaus"]] == [250, 800]
    assert {chaser.paged(n) for n in (32 * KIB, most)} == {250.0}  # one line a page: 32 lines
    # A chase that ends anywhere but where it must is no measurement.
    made["chase_l2"] = lambda grid, block, state, warm, count: state.copy_(state + 128)
    with pytest.raises(RuntimeError, match="arrived at line"):
        chaser.point("chase_l2", 8 * KIB)


def test_bytes_a_cycle_are_of_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = object.__new__(streams.Streams)
    made.sms, made.data, made.sink = 3, torch.zeros(1), torch.zeros(1)
    made.cycles = torch.zeros(3, dtype=torch.int64)

    def launch(
        grid: int,
        block: int,
        data: torch.Tensor,
        vectors: int,
        warm: int,
        rounds: int,
        sink: torch.Tensor,
        cycles: torch.Tensor,
        shared: int,
    ) -> None:
        assert grid == 3 and block * 16 * 4 * warm >= vectors * 16 == 40 * KIB
        assert shared in (0, 40 * KIB)
        cycles[:] = torch.tensor([1, 2, 50]) * (rounds * 4 * block * 16 // 100)

    monkeypatch.setattr(streams, "SOURCE", {"read_l1": launch, "read_shared": launch})
    for kernel in ("read_l1", "read_shared"):
        assert made.per_sm(kernel, 40 * KIB) == pytest.approx(50, rel=1e-4)  # the median SM's
        assert made.cost(kernel, 40 * KIB) == pytest.approx(1 / 50, rel=1e-4)


def bandwidth_series() -> Series:
    at = sizes(2 * MIB, 1 << 30, [30 * MIB, 60 * MIB], MIB)
    values = tuple(5.5e12 if s <= 58 * MIB else 4.3e12 * 0.9 for s in at)
    return Series(
        key="read_all",
        label="all SMs",
        kind=BANDWIDTH,
        unit="B/s",
        levels=("L2",),
        sizes=tuple(at),
        values=values,
    )


def test_a_bandwidth_s_plateaus_are_bandwidths_and_its_break_is_held_against_the_level() -> None:
    said = bandwidth_series().to_json({"L2": 60 * MIB})
    assert [round(p["value"] / 1e10) for p in said["plateaus"]] == [550, 387]
    (held,) = said["held"]
    assert held["within"] == ["leaves", "holds"] and -0.1 < held["leaves_off"] < 0
    assert json.loads(json.dumps(said)) == said
    assert hold("L2", 400 * MIB, bandwidth_series().found()[1]) == {
        "level": "L2",
        "known": 400 * MIB,
        "within": [],
    }
    assert Figure(key="", label="", value=97.0, unit="B/s", expected=100.0).to_json()[
        "off"
    ] == pytest.approx(-0.03)


def test_overheads_are_slopes_and_medians() -> None:
    clock = iter(range(0, 10**9, 500_000))  # two looks a batch, half a millisecond apart
    calls: list[int] = []
    us = launches.per_call(lambda: calls.append(1), lambda: None, 100, lambda: next(clock))
    assert us == 5.0 and len(calls) == 100 * launches.ROUNDS
    times = {"one": 9.0, "many": 9.0 + 1.5 * (launches.MANY - 1)}
    one, many = (lambda: "one"), (lambda: "many")
    assert launches.slope(lambda body: times[str(body())], one, many) == 1.5
    spins: list[int] = []

    def timed(before: object, body: object, spin: int) -> float:
        spins.append(spin)
        return 3.0 if spin > 5_000_000 else -1.0

    stand: Any = SimpleNamespace(timed=timed)
    assert launches.behind_a_spin(stand, lambda: None) == 3.0
    assert spins[:3] == [2_000_000, 4_000_000, 8_000_000]
    never: Any = SimpleNamespace(timed=lambda before, body, spin: -1.0)
    with pytest.raises(RuntimeError, match="ahead of the GPU"):
        launches.behind_a_spin(never, lambda: None)


def sass(source: Any, arch: str, folder: Path) -> dict[str, str]:
    """A kernel's name -> its machine code, by the disassembler that Triton's wheel brings."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    file = folder / "kernel.cubin"
    file.write_bytes(source.compile(arch))
    done = subprocess.run([tool, file], capture_output=True, text=True, check=True)
    parts = re.split(r"^\.text\.(\w+):$", done.stdout, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.slow
def test_the_kernels_compile_and_their_loads_are_there(tmp_path: Path) -> None:
    for arch in ("sm_80", "sm_100"):
        assert chases.SOURCE.compile(arch) and streams.SOURCE.compile(arch)
    code = sass(chases.SOURCE, "sm_90", tmp_path)
    for kernel, load in (
        ("chase_l1", "LDG.E.64"),
        ("chase_l2", "LDG.E.64"),
        ("chase_shared", "LDS"),
    ):
        hops = re.findall(rf"\b{load}[.\w]* (R\d+), (?:desc\[\w+\])?\[(R\d+)[\].]", code[kernel])
        chained = sum(a[0] == b[1] for a, b in pairwise(hops))
        assert chained >= 2 * 15  # 16 hops a turn, warm and timed, each from where the last arrived
        assert code[kernel].count("CS2R") + code[kernel].count("S2UR") >= 2
    code |= sass(streams.SOURCE, "sm_90", tmp_path)
    for kernel, load in (
        ("read_l1", "LDG.E.128"),
        ("read_shared", "LDS.128"),
        ("read_all", "LDG.E.128"),
    ):
        assert code[kernel].count(load) >= 4
    assert "LDG.E.128" in code["copy_all"] and "STG.E.128" in code["copy_all"]
    assert not any(word in text for text in code.values() for word in ("STL", "LDL"))


def example() -> dict[str, Any]:
    """A record as a GPU would leave it."""
    known = {"L1": 256 * KIB, "shared": 228 * KIB, "L2": 60 * MIB}
    at = sizes(4 * KIB, 1 << 30, [256 * KIB, 60 * MIB], 128)
    cycles = tuple(40.0 if s < 250 * KIB else 260.0 if s < 40 * MIB else 800.0 for s in at)
    chase = Series(
        key="chase_l1",
        label="global, through L1",
        kind=LATENCY,
        unit="cycles",
        levels=("L1", "L2"),
        sizes=tuple(at),
        values=cycles,
        ns=tuple(c / 2 for c in cycles),
    )
    copy = Figure(
        key="dram_copy", label="DRAM, copy", value=4.2e12, unit="B/s", expected=4.28e12, by="a copy"
    )
    return {
        "device": {"kind": "cuda", "name": "Example GPU"},
        "known": known,
        "quick": False,
        "series": [s.to_json(known) for s in (chase, bandwidth_series())],
        "figures": [copy.to_json()],
        "seconds": 31.0,
        "machine": {
            "device": "Example GPU",
            "date": "2026-01-02T03:04:05",
            "commit": "0123456789abcdef",
            "dirty": True,
        },
    }


def test_a_record_is_told_drawn_and_shown_in_the_page(tmp_path: Path) -> None:
    said = example()
    text = "\n".join(show.lines(said))
    assert "40 cycles (20 ns) from 4 KiB to" in text
    assert re.search(r"L1, known as 256 KiB: .* within 10 %: leaves and holds", text)
    assert re.search(r"L2, known as 60 MiB: .* within 10 %: neither", text)
    assert "DRAM, copy: 4,200 GB/s (-1.9 % against 4,280 GB/s, a copy)" in text
    folder = tmp_path / "example-gpu"
    folder.mkdir()
    (folder / "hierarchy.json").write_text(json.dumps(said))
    picture.latency(said, folder / "hierarchy.svg")
    svg = (folder / "hierarchy.svg").read_text()
    for told in ("working set (bytes)", "latency of a load (ns)", "L2, known as 60 MiB", "L1 at 2"):
        assert told in svg
    block = page.measured(tmp_path)
    assert "### Example GPU" in block and "with uncommitted changes" in block
    assert "| L2 | latency, global, through L1 | 60 MiB |" in block and "**neither**" in block
    assert "hierarchy.svg)" in block and "| -1.9 % |" in block
    assert page.measured(tmp_path / "none") == f"not measured yet: `{page.COMMAND}`\n"
    with pytest.raises(WeftError, match="a latency"):
        picture.latency({**said, "series": []}, tmp_path / "x.svg")


@pytest.mark.slow
def test_the_command_measures_this_cpu(tmp_path: Path) -> None:
    kept, drawn = tmp_path / "h.json", tmp_path / "h.svg"
    options = ["--device", "cpu", "--hierarchy", "--quick", "--json"]
    done = CliRunner().invoke(
        app, ["device", *options, "--save", str(kept), "--picture", str(drawn)]
    )
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)["hierarchy"]
    assert said == json.loads(kept.read_text()) and drawn.stat().st_size > 1000
    assert "latency, one thread" in done.stderr  # a line a step
    chase, read = said["series"]
    assert len(chase["plateaus"]) >= 2 or not said["known"]
    assert all(v > 0 for one in (chase, read) for v in one["values"])
    assert max(chase["values"]) > 1.5 * min(chase["values"])
    for found in chase["held"][:1]:  # the first cache's end is sharp on any machine, if not quiet
        assert 0.5 < found["leaves"] / found["known"] < 2
    assert [f["key"] for f in said["figures"]] == ["host_call", "clock"]
    assert "one thread, random lines" in "\n".join(show.lines(said))


def test_options_that_need_the_hierarchy_say_so(tmp_path: Path) -> None:
    for options in (["--quick"], ["--save", "x.json"], ["--picture", "x.svg"]):
        done = CliRunner().invoke(app, ["device", *options])
        assert isinstance(done.exception, WeftError) and "--hierarchy" in str(done.exception)
    done = CliRunner().invoke(app, ["device", "--hierarchy", "--picture", str(tmp_path / "x.png")])
    assert isinstance(done.exception, WeftError) and ".svg" in str(done.exception)


@pytest.mark.gpu
def test_a_gpu_s_levels_come_in_their_order() -> None:
    from weft.workbench.hierarchy import measure

    lines: list[str] = []
    said = measure(machine.query("cuda"), quick=True, say=lines.append)
    by_key = {s["key"]: s for s in said["series"]}
    assert len(lines) >= 8
    first = {key: by_key[key]["plateaus"][0] for key in ("chase_shared", "chase_l1", "chase_l2")}
    assert 10 < first["chase_shared"]["value"] < first["chase_l1"]["value"] < 100
    assert first["chase_l1"]["value"] * 2 < first["chase_l2"]["value"] < 600
    assert by_key["chase_l1"]["values"][-1] > 1.5 * first["chase_l2"]["value"]
    held = {(s["key"], h["level"]): h for s in said["series"] for h in s["held"]}
    assert "leaves" in held["chase_l1", "L1"]
    assert any("leaves" in h for (_, level), h in held.items() if level == "L2")
    figures = {f["key"]: f["value"] for f in said["figures"]}
    assert all(value > 0 for value in figures.values())
    assert 64 < figures["peak_read_shared"] < 130 and 64 < figures["peak_read_l1"] < 140
    assert figures["dram_copy"] > 1e11 and 0.3 < figures["host_launch"] < 50
