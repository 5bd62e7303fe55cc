"""Content of the report page: several devices, hostile text, absurd numbers, no records; files of records."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from helpers.paths import ROOT
from helpers.sample_records import CPU, GPU, bench, record
from weft.core.errors import WeftError
from weft.core.record import Record, append
from weft.workbench.report import device_records, load, markdown, page
from weft.workbench.report.device_records import by_device
from weft.workbench.report.scales import linear_ticks, log_axis, share, time, times, unit

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;{{ 7*7 }}"
VOID = {"meta", "link", "input", "br"}


class Tree(HTMLParser):
    """Collect tags and attributes, and assert that tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def count_class(self, name: str) -> int:
        return sum(name in (a.get("class") or "").split() for _, a in self.tags)


def roofline_marks(html: str) -> int:
    parts = re.findall(r'<svg class="plot roofline.*?</figure>', html, re.S)
    return sum(part.count('class="mark') for part in parts)


def test_every_timed_record_has_a_mark_a_bar_and_a_row() -> None:
    records = bench()
    timed = sum(r.timing is not None for r in records)
    html = page(records)
    tree = Tree(html)
    assert roofline_marks(html) == timed
    assert sum(t == "rect" and a.get("class", "").startswith("bar ") for t, a in tree.tags) == timed
    assert tree.count_class("whisker") + html.count('class="truncated"') >= timed
    assert html.count('<th scope="row">') == len(records)


def test_page_makes_no_requests() -> None:
    html = page(bench())
    addresses = [
        value
        for _, attributes in Tree(html).tags
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "action", "srcset")
    ]
    assert all(a.startswith(("#", "data:")) for a in addresses if a), addresses
    assert "http://" not in html and "https://" not in html and "@import" not in html
    assert "url(" not in html


def hostile_record() -> Record:
    machine = {
        "device": HOSTILE,
        "kind": HOSTILE,
        HOSTILE: HOSTILE,
        "versions": {HOSTILE: [HOSTILE]},
        "ceilings": {"copy": HOSTILE, "matrix": {HOSTILE: HOSTILE}},
    }
    verdict = {"status": HOSTILE, "reason": HOSTILE, "tolerance_used": HOSTILE}
    texts = dict.fromkeys(("operator", "implementation", "case", "direction", "backend"), HOSTILE)
    return record(**texts, rate=HOSTILE, idea=HOSTILE, flags=(HOSTILE,), machine=machine, verdict=verdict)


def test_hostile_text_is_escaped() -> None:
    html = page([hostile_record()], title=HOSTILE)
    tree = Tree(html)
    names = [tag for tag, _ in tree.tags]
    assert names.count("script") == 1 and "img" not in names
    assert not [a for _, attrs in tree.tags for a in attrs if a.startswith("on")]
    assert "{{ 7*7 }}" in html and "alert(1)</script>" not in html


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0, 1e308, 1e-320, 10**400, "x", None])
def test_invalid_numbers_are_omitted(bad: Any) -> None:
    valid = record(cold=100.0)
    assert valid.timing is not None
    timing = replace(valid.timing, cold=bad, warm=bad, interval=(bad, bad), p10=bad, p90=bad, samples=())
    fields = dict.fromkeys(("floor", "gbps", "tflops", "efficiency", "nbytes", "flops"), bad)
    mixed = [replace(valid, timing=timing), replace(valid, **fields, implementation="cuda"), valid]
    Tree(page(mixed))
    Tree(page(mixed[:1]))
    Tree(page(mixed[1:2]))


@pytest.mark.parametrize("machine", [{}, None, [], "a laptop", {"versions": None, "ceilings": 3}])
def test_page_without_machine_information(machine: Any) -> None:
    html = page([record(machine=machine)])
    assert "unknown device" in html
    Tree(html)


def test_devices_have_sections_of_their_own() -> None:
    records = bench(GPU) + bench(CPU)
    html = page(records)
    assert html.count('class="device"') == 2
    assert html.index("Example GPU 9000") < html.index("Example CPU, 2 cores")
    devices = by_device(records)
    assert [d.kind for d in devices] == ["cuda", "cpu"]
    assert {r.speedup is None for d in devices for r in d.timed} == {False}


def test_generated_pages_begin_with_the_gpu_of_the_latest_records(tmp_path: Path) -> None:
    old, new = (
        {**GPU, "device": "A GPU", "date": "2026-01-01"},
        {**GPU, "device": "B GPU", "date": "2026-01-02"},
    )
    for folder, machine in (("a", old), ("b", new), ("c", {**CPU, "date": "2026-01-03"})):
        (tmp_path / folder).mkdir()
        append(tmp_path / folder / "run.jsonl", [record(machine=machine)])
    names = [device.records.name for device in markdown.devices(tmp_path)]
    assert names == ["B GPU", "A GPU", CPU["device"]]


def test_page_without_records_shows_how_to_make_some() -> None:
    assert "weft bench --save" in page([])
    Tree(page([]))


def test_later_record_replaces_the_earlier_one_with_a_note() -> None:
    html = page([record(cold=300.0), record(cold=123.0)])
    assert "1 earlier record" in html and "123 µs" in html and "300 µs" not in html


def test_the_later_record_counts_in_whichever_file_it_is() -> None:
    """Files of a folder come in the order of their names."""
    dates = ("2026-11-28T12:00:00+00:00", "2026-11-28T13:30:00+02:00", "2026-11-21T23:00:00+00:00", "unknown")
    records = [
        record(cold=us, machine=GPU | {"date": d}) for us, d in zip((1.0, 2.0, 3.0, 4.0), dates, strict=True)
    ]
    (device,) = by_device(records)
    assert [row.cold for row in device.rows] == [1.0] and device.superseded == 3
    assert device.machine["date"] == dates[0]


def test_number_of_torn_lines_is_shown() -> None:
    assert "3 torn lines were skipped" in page([record()], torn=3)
    assert "torn line" not in page([record()])


def test_reasons_for_missing_times_are_shown() -> None:
    html = page(bench())
    for text in ("numba has no bf16", "runs in the interpreter here", "worst at [3]: 0.5"):
        assert text in html


def test_peaks_are_derived_from_limits_if_records_have_none() -> None:
    machine = {k: v for k, v in GPU.items() if k != "ceilings"}
    bare = [replace(r, machine=machine) for r in bench()]
    peaks = by_device(bare)[0].peaks
    assert peaks.derived
    assert peaks.copy == pytest.approx(GPU["ceilings"]["read"], rel=1e-6)
    assert peaks.matrix["bf16"] == pytest.approx(7.1e14, rel=1e-6)
    assert "computed from their limits" in page(bare)


def test_records_without_flops_have_a_bandwidth_plot() -> None:
    html = page([record(flops=0.0), record(implementation="cuda", flops=0.0)])
    assert roofline_marks(html) == 2
    assert "<h3>Bandwidth</h3>" in html and "<h3>Roofline</h3>" not in html


def test_ladder_shows_its_speedups() -> None:
    html = page(bench())
    assert "in 5 steps" in html and "the largest single gain" in html
    assert html.count('<li value="') == 5


def test_speedup_is_over_the_faster_of_eager_and_compile() -> None:
    times_us = {"eager": 200.0, "compile": 120.0, "triton": 60.0}
    rows = by_device([record(implementation=k, cold=v) for k, v in times_us.items()])[0].rows
    assert {r.implementation: r.speedup for r in rows} == {"eager": 0.6, "compile": 1, "triton": 2}


def test_page_of_500_records_is_below_4_megabytes() -> None:
    records = [replace(r, case=f"{r.case}-{i}") for i in range(8) for r in bench()]
    html = page(records)
    assert len(records) > 500
    assert len(html) < 4_000_000


def test_numbers_and_axes() -> None:
    assert [time(v) for v in (0.5, 12.345, 1234.5, 2e6)] == [
        "500 ns",
        "12.3 µs",
        "1.23 ms",
        "2.00 s",
    ]
    assert unit(4.17e12, "B/s") == "4.17 TB/s"
    assert [share(None), share(0.976)] == ["–", "97.6 %"]
    assert [times(v) for v in (246.1, 1.843, 0.361, 0.00476)] == [
        "246×",
        "1.84×",
        "0.36×",
        "0.005×",
    ]
    assert linear_ticks(834, 4) == [0, 250, 500, 750]
    axis = log_axis([10.0, 1000.0], margin=1.0)
    assert (axis.at(10), axis.at(100), axis.at(1e9)) == (0, 50, 100)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = (
        "import typer, sys; from weft.cli.report import report\n"
        "from weft.core.errors import WeftError\n"
        "try: typer.run(report)\n"
        "except WeftError as e: print(e, file=sys.stderr); sys.exit(2)\n"
        "finally: assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_command_writes_the_page_and_prints_its_path(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    saved = tmp_path / "results" / "run.jsonl"
    append(saved, bench())
    with saved.open("a") as file:
        file.write('{"operator": "gelu", "impl')
    target = tmp_path / "new" / "page.html"
    done = run(saved.parent, "-o", target, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer == {"page": str(target), "records": len(bench()), "devices": 1, "torn": 1}
    assert "1 torn line was skipped" in target.read_text()
    assert [p.name for p in target.parent.iterdir()] == ["page.html"]
    assert run(saved, "-o", "-").stdout.startswith("<!doctype html>")


def test_a_folder_that_is_a_whole_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(tmp_path / "run.jsonl", bench())
    monkeypatch.setattr(device_records, "MAX_ENTRIES", 3)
    assert load([tmp_path])[0]
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text("")
    with pytest.raises(WeftError, match=r"too many files below a folder: .*at most 3 files"):
        load([tmp_path])


def test_invalid_record_files_are_errors(tmp_path: Path) -> None:
    empty, other, binary = (tmp_path / n for n in ("empty.jsonl", "other.jsonl", "page.png"))
    empty.write_text("")
    other.write_text('{"hello": 1}\n')
    binary.write_bytes(b"\x89PNG\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    for path in (empty, other, binary, tmp_path / "folder", tmp_path / "missing"):
        with pytest.raises(WeftError):
            load([path])
    done = run(tmp_path / "missing")
    assert done.returncode == 2 and "no such records file" in done.stderr
