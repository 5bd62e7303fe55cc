"""The memory hierarchy: pointer chases visit every line, a simulated cache is measured exactly, the compiled
kernels have the intended loads, and the command runs on this CPU."""

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
from weft.lab.hierarchy import cpu, gpu_bandwidth, gpu_latency, report
from weft.lab.hierarchy.curves import (
    BANDWIDTH,
    KIB,
    LATENCY,
    MIB,
    Figure,
    Series,
    compare_level,
    known_sizes,
    per_core,
    sizes,
)


def test_known_sizes_are_those_of_one_core_or_one_sm(tmp_path: Path) -> None:
    gpu = machine.Device(kind="cuda", name="", arch="sm_90", shared_per_sm=228 * KIB, l2_bytes=60 * MIB)
    assert known_sizes(gpu) == {"L1": 256 * KIB, "shared": 228 * KIB, "L2": 60 * MIB}
    assert known_sizes(machine.Device(kind="cuda", name="", arch="sm_999")) == {}
    entries = (("Data", "1", "32K"), ("Instruction", "1", "32K"), ("Unified", "3", "8M"))
    core = tmp_path / f"cpu{min(os.sched_getaffinity(0))}"
    for number, texts in enumerate(entries):
        index = core / "cache" / f"index{number}"
        index.mkdir(parents=True)
        for word, text in zip(("type", "level", "size"), texts, strict=True):
            (index / word).write_text(text + "\n")
    caches = {"L1d": 64 * KIB, "L3": 16 * MIB}
    assert per_core(caches, tmp_path) == {"L1d": 32 * KIB, "L3": 8 * MIB}
    assert per_core({"L1d": 1}, tmp_path) == {"L1d": 32 * KIB}
    assert per_core(caches, tmp_path / "missing") == {}


def test_a_chase_visits_every_line_once() -> None:
    random = torch.Generator().manual_seed(1)
    data = torch.zeros(64 * 16 + 32, dtype=torch.int64)
    gpu_latency.link_lines(data, gpu_latency.random_cycle(64, random))
    heads = data[::16].tolist()
    at, visited = data.data_ptr(), []
    for _ in range(64):
        line = (at - data.data_ptr()) // 128
        visited.append(line)
        at = heads[line]
    assert sorted(visited) == list(range(64)) and at == data.data_ptr()
    assert visited != sorted(visited)
    successors = cpu.linked_lines(8 * KIB, np.random.default_rng(0))
    stops = [0]
    while (following := int(successors[stops[-1]])) != 0:
        stops.append(following)
    assert sorted(stops) == list(range(0, 1024, 8))


class Cache:
    """Simulation of chase.cu on a GPU with one thread whose L1 and L2 evict the oldest line."""

    def __init__(self, data: torch.Tensor, l1: int, l2: int) -> None:
        self.heads = data.numpy().reshape(-1, 16)
        self.base = data.data_ptr()
        self.capacity = {"L1": l1 // 128, "L2": l2 // 128}
        self.lines: dict[str, OrderedDict[int, None]] = {"L1": OrderedDict(), "L2": OrderedDict()}

    def hit(self, level: str, line: int) -> bool:
        lines = self.lines[level]
        is_hit = line in lines
        lines[line] = None
        lines.move_to_end(line)
        if len(lines) > self.capacity[level]:
            lines.popitem(last=False)
        return is_hit

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


def test_chases_measure_a_simulated_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    l1, l2, most = 16 * KIB, 96 * KIB, 512 * KIB
    chaser = object.__new__(gpu_latency.Chaser)
    chaser.l2, chaser.most, chaser.ns = l2, most, {}
    chaser.data = torch.zeros(most // 8, dtype=torch.int64)
    chaser.state = torch.zeros(3, dtype=torch.int64)
    chaser.random = torch.Generator().manual_seed(0)
    chaser.device = chaser.random.device
    cache = Cache(chaser.data, l1, l2)
    flush = SimpleNamespace(sum=cache.lines["L2"].clear)
    chaser.flusher = flush  # type: ignore[assignment]
    kernels = {"chase_l1": cache.kernel("L1"), "chase_l2": cache.kernel("L2")}
    monkeypatch.setattr(gpu_latency, "SOURCE", kernels)
    monkeypatch.setattr(gpu_latency, "SMALL_SET", 32 * KIB)
    monkeypatch.setattr(gpu_latency, "PAGE", 16 * KIB)
    monkeypatch.setattr(gpu_latency, "HOPS", dict.fromkeys(gpu_latency.HOPS, 512))
    known = {"L1": l1, "L2": l2}
    planned = sizes(2 * KIB, most, known.values(), 128)
    through_l1 = gpu_latency.latency_series(chaser, "chase_l1", "", ("L1", "L2"), planned).to_json(known)
    assert [p["value"] for p in through_l1["plateaus"]] == [40, 250, 800]
    assert [p["ns"] for p in through_l1["plateaus"]] == [20, 125, 400]
    assert [h["level"] for h in through_l1["held"]] == ["L1", "L2"]
    assert all(h["within"] == ["leaves", "holds"] for h in through_l1["held"])
    past_l1 = gpu_latency.latency_series(chaser, "chase_l2", "", ("L2",), planned).to_json(known)
    assert [p["value"] for p in past_l1["plateaus"]] == [250, 800]
    assert {chaser.pages(n) for n in (32 * KIB, most)} == {250.0}  # one line a page: 32 lines
    # A pointer chase that ends at a wrong line is refused.
    kernels["chase_l2"] = lambda grid, block, state, warm, count: state.copy_(state + 128)
    with pytest.raises(RuntimeError, match="arrived at line"):
        chaser.lines("chase_l2", 8 * KIB)


def test_bytes_a_cycle_count_the_timed_rounds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = object.__new__(gpu_bandwidth.Reader)
    reader.sms, reader.data, reader.sink = 3, torch.zeros(1), torch.zeros(1)
    reader.cycles = torch.zeros(3, dtype=torch.int64)

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

    monkeypatch.setattr(gpu_bandwidth, "SOURCE", {"read_l1": launch, "read_shared": launch})
    for kernel in ("read_l1", "read_shared"):
        assert reader.per_sm(kernel, 40 * KIB) == pytest.approx(50, rel=1e-4)  # the median SM's
        assert reader.cost(kernel, 40 * KIB) == pytest.approx(1 / 50, rel=1e-4)


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


def test_bandwidth_plateaus_and_their_break_are_compared_with_the_level() -> None:
    curve = bandwidth_series().to_json({"L2": 60 * MIB})
    assert [round(p["value"] / 1e10) for p in curve["plateaus"]] == [550, 387]
    (level,) = curve["held"]
    assert level["within"] == ["leaves", "holds"] and -0.1 < level["leaves_off"] < 0
    assert json.loads(json.dumps(curve)) == curve
    assert compare_level("L2", 400 * MIB, bandwidth_series().plateaus_and_breaks()[1]) == {
        "level": "L2",
        "known": 400 * MIB,
        "within": [],
    }
    assert Figure(key="", label="", value=97.0, unit="B/s", expected=100.0).to_json()["off"] == pytest.approx(
        -0.03
    )


def test_overheads_are_slopes_and_medians() -> None:
    clock = iter(range(0, 10**9, 500_000))  # two readings a batch, half a millisecond apart
    calls: list[int] = []
    us = gpu_latency.time_per_call(lambda: calls.append(1), lambda: None, 100, lambda: next(clock))
    assert us == 5.0 and len(calls) == 100 * gpu_latency.ROUNDS
    times = {"one": 9.0, "many": 9.0 + 1.5 * (gpu_latency.MANY - 1)}
    one, many = (lambda: "one"), (lambda: "many")
    assert gpu_latency.slope(lambda body: times[str(body())], one, many) == 1.5
    spins: list[int] = []

    def timed(before: object, body: object, spin: int) -> float:
        spins.append(spin)
        return 3.0 if spin > 5_000_000 else -1.0

    backend: Any = SimpleNamespace(timed=timed)
    assert gpu_latency.time_behind_spin(backend, lambda: None) == 3.0
    assert spins[:3] == [2_000_000, 4_000_000, 8_000_000]
    never: Any = SimpleNamespace(timed=lambda before, body, spin: -1.0)
    with pytest.raises(RuntimeError, match="ahead of the GPU"):
        gpu_latency.time_behind_spin(never, lambda: None)


def sass(source: Any, arch: str, folder: Path) -> dict[str, str]:
    """Return the machine code of each kernel by name, from the disassembler in Triton's wheel."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    file = folder / "kernel.cubin"
    file.write_bytes(source.compile(arch))
    done = subprocess.run([tool, file], capture_output=True, text=True, check=True)
    parts = re.split(r"^\.text\.(\w+):$", done.stdout, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.slow
def test_kernels_compile_and_keep_their_loads(tmp_path: Path) -> None:
    for arch in ("sm_80", "sm_100"):
        assert gpu_latency.SOURCE.compile(arch) and gpu_bandwidth.SOURCE.compile(arch)
    code = sass(gpu_latency.SOURCE, "sm_90", tmp_path)
    for kernel, load in (
        ("chase_l1", "LDG.E.64"),
        ("chase_l2", "LDG.E.64"),
        ("chase_shared", "LDS"),
    ):
        hops = re.findall(rf"\b{load}[.\w]* (R\d+), (?:desc\[\w+\])?\[(R\d+)[\].]", code[kernel])
        chained = sum(a[0] == b[1] for a, b in pairwise(hops))
        assert (
            chained >= 2 * 15
        )  # 16 hops an iteration, warm and timed, each from the address the last one loaded
        assert code[kernel].count("CS2R") + code[kernel].count("S2UR") >= 2
    code |= sass(gpu_bandwidth.SOURCE, "sm_90", tmp_path)
    for kernel, load in (
        ("read_l1", "LDG.E.128"),
        ("read_shared", "LDS.128"),
        ("read_all", "LDG.E.128"),
    ):
        assert code[kernel].count(load) >= 4
    assert "LDG.E.128" in code["copy_all"] and "STG.E.128" in code["copy_all"]
    assert not any(word in text for text in code.values() for word in ("STL", "LDL"))


def example() -> dict[str, Any]:
    """Return a record like one of a GPU."""
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


def test_a_record_is_printed_plotted_and_shown_in_the_docs(tmp_path: Path) -> None:
    record = example()
    text = "\n".join(report.text_lines(record))
    assert "40 cycles (20 ns) from 4 KiB to" in text
    assert re.search(r"L1: latency rises at .*, specification 256 KiB; within 10 %: both", text)
    assert re.search(r"L2: latency rises at .*, specification 60 MiB; within 10 %: neither", text)
    assert "DRAM, copy: 4,200 GB/s (-1.9 % against 4,280 GB/s, a copy)" in text
    folder = tmp_path / "example-gpu"
    folder.mkdir()
    (folder / "hierarchy.json").write_text(json.dumps(record))
    report.plot_latency(record, folder / "hierarchy.svg")
    svg = (folder / "hierarchy.svg").read_text()
    for label in ("working set (bytes)", "latency of a load (ns)", "L2, specified 60 MiB", "L1 at 2"):
        assert label in svg
    block = report.markdown(tmp_path)
    assert "### Example GPU" in block and "with uncommitted changes" in block
    assert "| L2 | latency, global, through L1 | 60 MiB |" in block and "**neither**" in block
    assert "hierarchy.svg)" in block and "| -1.9 % |" in block
    assert report.markdown(tmp_path / "none") == f"not measured yet: `{report.COMMAND}`\n"
    with pytest.raises(WeftError, match="a latency"):
        report.plot_latency({**record, "series": []}, tmp_path / "x.svg")


@pytest.mark.slow
@pytest.mark.pooled(3, "commands that measure")
def test_command_measures_this_cpu(tmp_path: Path) -> None:
    saved, plot = tmp_path / "h.json", tmp_path / "h.svg"
    options = ["--device", "cpu", "--hierarchy", "--quick", "--json"]
    done = CliRunner().invoke(app, ["device", *options, "--save", str(saved), "--picture", str(plot)])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)["hierarchy"]
    assert record == json.loads(saved.read_text()) and plot.stat().st_size > 1000
    assert "latency, one thread" in done.stderr  # a line for each step
    chase, read = record["series"]
    assert len(chase["plateaus"]) >= 2 or not record["known"]
    assert all(v > 0 for curve in (chase, read) for v in curve["values"])
    assert max(chase["values"]) > 1.5 * min(chase["values"])
    for level in chase["held"][:1]:  # the end of the first cache is clear even on a busy machine
        assert 0.5 < level["leaves"] / level["known"] < 2
    assert [f["key"] for f in record["figures"]] == ["host_call", "clock"]
    assert "one thread, random lines" in "\n".join(report.text_lines(record))


def test_options_of_the_hierarchy_are_refused_without_it(tmp_path: Path) -> None:
    for options in (["--quick"], ["--save", "x.json"], ["--picture", "x.svg"]):
        done = CliRunner().invoke(app, ["device", *options])
        assert isinstance(done.exception, WeftError) and "--hierarchy" in str(done.exception)
    done = CliRunner().invoke(app, ["device", "--hierarchy", "--picture", str(tmp_path / "x.png")])
    assert isinstance(done.exception, WeftError) and ".svg" in str(done.exception)


@pytest.mark.gpu
@pytest.mark.alone  # it measures times
def test_levels_of_a_gpu_are_in_order() -> None:
    from weft.lab.hierarchy import measure

    lines: list[str] = []
    record = measure(machine.query("cuda"), quick=True, log=lines.append)
    by_key = {s["key"]: s for s in record["series"]}
    assert len(lines) >= 8
    first = {key: by_key[key]["plateaus"][0] for key in ("chase_shared", "chase_l1", "chase_l2")}
    assert 10 < first["chase_shared"]["value"] < first["chase_l1"]["value"] < 100
    assert first["chase_l1"]["value"] * 2 < first["chase_l2"]["value"] < 600
    assert by_key["chase_l1"]["values"][-1] > 1.5 * first["chase_l2"]["value"]
    levels = {(s["key"], h["level"]): h for s in record["series"] for h in s["held"]}
    assert "leaves" in levels["chase_l1", "L1"]
    assert any("leaves" in h for (_, level), h in levels.items() if level == "L2")
    figures = {f["key"]: f["value"] for f in record["figures"]}
    assert all(value > 0 for value in figures.values())
    assert 64 < figures["peak_read_shared"] < 130 and 64 < figures["peak_read_l1"] < 140
    assert figures["dram_copy"] > 1e11 and 0.3 < figures["host_launch"] < 50
