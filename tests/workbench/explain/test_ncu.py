"""Nsight Compute: parsing of its output, comparison of bytes, bottleneck rules, documentation tables.

``data/ncu_*.csv`` are written by hand in the documented format of the tool; no device produced them.
``test_ncu_run.py`` tests how the tool is found and run.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.paths import DATA
from weft.core import Cost, WeftError
from weft.workbench.explain.ncu import rules, tables
from weft.workbench.explain.ncu.counters import COUNTERS, metric_names
from weft.workbench.explain.ncu.kernel import Kernel
from weft.workbench.explain.ncu.output import number, parse
from weft.workbench.explain.ncu.report import Report
from weft.workbench.explain.ncu.rules import RULES, Evidence
from weft.workbench.explain.ncu.traffic import compare

GELU, SOFTMAX = ((DATA / f"ncu_{name}.csv").read_text() for name in ("gelu", "softmax"))
HALF = 1 << 29  # bytes of a softmax's input
KEYS = tuple(c.key for c in COUNTERS)


def kernel(**counters: float) -> Kernel:
    return Kernel(name="k(float *)", grid=(8,), block=(128,), counters=counters)


def report(text: str = GELU, cost: Cost | None = None, **fields: object) -> Report:
    defaults = {
        "operator": "gelu",
        "implementation": "cuda",
        "backend": "cuda",
        "case": "fp32-16384x16384",
        "direction": "forward",
        "kernels": tuple(map(Kernel.from_row, parse(text).rows)),
        "cost": cost or Cost(read=1 << 30, written=1 << 30),
        "l2_bytes": 60 << 20,
        "tool": "2025.3.1.0",
        "machine": {"device": "Some GPU", "commit": "abc", "date": "2026-11-21T00:00:00"},
    }
    return Report(**{**defaults, **fields})  # type: ignore[arg-type]


# -- output of the tool -------------------------------------------------------------------------


def test_a_row_is_parsed_with_its_units():
    (k,) = report().kernels
    assert (k.name, k.grid, k.block) == (
        "gelu_forward(const float *, float *, unsigned long)",
        (1056, 1, 1),
        (256, 1, 1),
    )
    assert k.short == "gelu_forward"
    assert (k.get("dram_read"), k.get("dram_write")) == (1_074_101_248, 1_031_798_784)
    assert k.us == pytest.approx(498.112) and k.get("l2_read") == 1 << 30
    assert k.sectors("ld") == 16 and k.get("ld_used") == 32
    assert k.get("stall_gmma") is None  # it printed n/a
    assert k.stalls[0][0] == "long_scoreboard" and k.stalls[0][1] == pytest.approx(0.707, abs=0.01)
    assert k.limiter == "registers" and k.conflicts() is None and k.spilled == 0
    assert "127.0.0.1" not in json.dumps(report().to_json())  # no host is named in a record


def test_several_kernels_and_names_with_commas_and_brackets_are_parsed():
    printed = parse(SOFTMAX)
    assert len(printed.rows) == 4 and len(printed.troubles) == 1
    shorts = [Kernel.from_row(r).short for r in printed.rows]
    assert shorts[0].startswith("at::native::reduce_kernel<") and len(set(shorts)) >= 2


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("1,073,741,824", "byte", 1 << 30),
        ("1.07", "Gbyte", 1.07e9),
        ("12.5", "usecond", 12500),
        ("1.18925e+06", "ns", 1.18925e6),
        ("3", "msecond", 3e6),
        ("16.00", "Kbyte/block", 16000),
        ("32", "register/thread", 32),
        ("8", "block", 8),
        ("0.97", "", 0.97),
        ("(!) n/a", "%", None),
        ("n/a", "", None),
        ("nan", "%", None),
        ("", "", None),
    ],
)
def test_numbers_are_converted_to_base_units(text, unit, value):
    assert number(text, unit) == (None if value is None else pytest.approx(value))


def test_the_long_form_of_older_versions_is_parsed():
    head = '"ID","Kernel Name","Block Size","Grid Size","Metric Name","Metric Unit","Metric Value"'
    rows = [
        '"0","f(int, int)","(32, 1, 1)","(4, 1, 1)","gpu__time_duration.sum","usecond","1,5"',
        '"0","f(int, int)","(32, 1, 1)","(4, 1, 1)","dram__bytes_read.sum","Mbyte","2.5"',
        '"1","g","(1, 1, 1)","(1, 1, 1)","dram__bytes_read.sum","byte","n/a"',
    ]
    first, second = parse("\n".join([head, *rows])).rows
    assert first.values == {"gpu__time_duration.sum": 15000.0, "dram__bytes_read.sum": 2.5e6}
    assert (first.name, first.grid, second.values) == ("f(int, int)", (4, 1, 1), {})


@pytest.mark.parametrize("text", ["", "==PROF== Connected\n", '"ID","Kernel Name"\n', GELU[:900]])
def test_a_log_without_kernels_has_no_rows(text):
    assert parse(text).rows == ()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_each_counter_is_requested_once_and_a_renamed_one_by_its_other_name(arch):
    names = metric_names(arch)
    assert len(set(names)) == len(names) and ("gmma" in ",".join(names)) == (arch == "sm_90")
    again = metric_names(arch, ["dram__bytes_read.sum", "lts__throughput.avg.pct_of_peak_sustained_elapsed"])
    assert "dram__bytes_op_read.sum" in again and len(again) == len(names) - 1
    renamed = GELU.replace("dram__bytes_read.sum", "dram__bytes_op_read.sum")
    assert report(renamed).kernels == report().kernels


# -- bytes ----------------------------------------------------------------------------------------


def test_bytes_within_five_percent_are_close():
    traffic = report().traffic
    assert traffic.ratio == pytest.approx(0.98065, abs=1e-4) and traffic.close
    assert traffic.left == pytest.approx((1 << 30) - 1_031_798_784)
    assert traffic.settled == pytest.approx(1.00017, abs=1e-4)
    (line,) = traffic.lines()
    assert "2.11 GB (read 1.07 GB, written 1.03 GB) of 2.15 GB predicted" in line
    assert "0.981 of the prediction, within 5 %" in line


def test_several_kernels_read_more_with_the_reason():
    traffic = report(SOFTMAX, Cost(read=HALF, written=HALF)).traffic
    first, *reasons = traffic.lines()
    assert traffic.ratio > 2.9 and "more than predicted" in first
    assert "4 kernels: the later ones read 1.61 GB" in reasons[0]
    assert "before the last wrote 507 MB, which the next ones read" in reasons[1]


MB = 1e6
SMALL = Cost(read=int(40 * MB), written=int(40 * MB))


@pytest.mark.parametrize(
    ("counters", "word", "reason"),
    [
        (
            {"dram_read": 40 * MB, "dram_write": 4 * MB, "l2_write": 40 * MB},
            "less than",
            "36.0 MB of its output were still in the L2",
        ),
        ({"dram_read": 40 * MB, "dram_write": 4 * MB}, "less than", "does not have them either"),
        (
            {"dram_read": 8 * MB, "dram_write": 40 * MB, "l2_write": 40 * MB},
            "less than",
            "some of them were not read",
        ),
        (
            {"dram_read": 80 * MB, "dram_write": 40 * MB, "local_ld": 20 * MB, "local_st": 20 * MB},
            "more than",
            "registers were spilled: 40.0 MB",
        ),
        (
            {"dram_read": 320 * MB, "dram_write": 40 * MB, "ld_used": 4.0},
            "more than",
            "k uses 4.0 of the 32 bytes",
        ),
        (
            {"dram_read": 80 * MB, "dram_write": 40 * MB, "l2_read": 100 * MB},
            "more than",
            "requests its inputs from the L2 2.50 times",
        ),
        (
            {"dram_read": 40 * MB, "dram_write": 80 * MB, "l2_write": 90 * MB},
            "more than",
            "some outputs are written more than once",
        ),
        ({"dram_read": 80 * MB, "dram_write": 40 * MB}, "more than", "the counters show no reason"),
    ],
)
def test_beyond_five_percent_the_text_gives_the_direction_and_a_reason(counters, word, reason):
    first, *reasons = compare([kernel(**counters)], SMALL, 60 << 20).lines()
    assert word in first and reason in "; ".join(reasons), reasons


def test_bytes_left_in_the_l2_are_limited_by_its_size():
    k = kernel(dram_read=1e9, dram_write=0.0, l2_write=1e9)
    assert compare([k], SMALL, 60 << 20).left == 60 << 20
    assert compare([k], SMALL, None).left is None
    nothing = compare([k], Cost(read=0, written=0), None)
    assert nothing.ratio is None and "needs none" in nothing.lines()[0]


# -- the bottleneck -------------------------------------------------------------------------------

IDLE = {"dram_peak": 20.0, "l2_peak": 15.0, "sm_peak": 25.0, "waves": 8.0, "duration": 50.0}
BUSY = {**IDLE, "sm_peak": 65.0}
WAITS = {"stall_long_scoreboard": 9.0, "stall_selected": 1.0}
CASES = {
    "unknown": ({"duration": 12.0}, "no throughput was counted"),
    "launch": ({**IDLE, "waves": 0.24}, "fill 0.24 of one wave"),
    "uncoalesced": (
        {**IDLE, "ld_sectors": 32e6, "ld_requests": 1e6, "st_sectors": 4e6, "ld_used": 4.0},
        "its global loads are scattered (32.0 sectors a request, 4.0 of 32 bytes a sector used)",
    ),
    "memory": (
        {**IDLE, "dram_peak": 88.0, "dram_read": 1e8, "dram_write": 1e8},
        "the DRAM is at 88 % of its peak, moving 4.00 TB/s",
    ),
    "tensor": ({**IDLE, "tensor_peak": 84.0, "sm_peak": 84.0}, "busy in 84 % of all cycles"),
    "spills": (
        {**BUSY, "local_ld": 4e6, "local_st": 4e6, "ld_sectors": 1e6, "registers": 255.0},
        "8.00 MB of local memory go through the L1, with 255 registers a thread",
    ),
    "bank-conflicts": (
        {**BUSY, "shared_ld": 32e6, "conflicts_ld": 31e6, "shared_st": 0.0, "conflicts_st": 0.0}
        | {"stall_short_scoreboard": 8.0, "stall_selected": 2.0},
        "97 % of shared memory's wavefronts (31.0 M) are repeats; its warps wait 80 %",
    ),
    "l2": ({**IDLE, "l2_peak": 91.0}, "the L2 is at 91 % of its peak, the DRAM at 20 %"),
    "compute": ({**IDLE, "sm_peak": 93.0}, "busiest pipe is at 93 % of its peak"),
    "tail": ({**IDLE, "waves": 1.1}, "1.10 waves of blocks, so that 45 % of"),
    "latency": (
        {**IDLE, **WAITS, "occupancy": 11.9, "theoretical": 12.5, "limit_shared_mem": 1.0},
        "(the SMs the most, 25 % of peak); its warps wait 90 % of their time for data from global "
        "or local memory (long_scoreboard); occupancy 12 % of 12 %, limited by shared memory",
    ),
    "balanced": ({**BUSY, **WAITS}, "the SMs are the busiest, at 65 % of peak"),
}


def test_each_rule_has_an_example():
    assert list(CASES) == [r.name for r in RULES] and all(r.source for r in RULES)


@pytest.mark.parametrize("name", CASES)
def test_the_bottleneck_has_its_evidence(name):
    counters, evidence = CASES[name]
    bottleneck = rules.find_bottleneck(Evidence(kernel=kernel(**counters)))
    assert bottleneck.name == name, bottleneck
    assert evidence in bottleneck.sentence and bottleneck.sentence.startswith("k is ")


@pytest.mark.parametrize(
    ("name", "counters"),
    [
        # One result per block: the stores are scattered, but there are few.
        ("balanced", {**BUSY, "ld_sectors": 1e6, "st_sectors": 100.0, "st_used": 4.0}),
        # The DRAM is the limit, so other faults cost no time.
        ("memory", {**CASES["bank-conflicts"][0], "dram_peak": 85.0}),
        ("memory", {**CASES["uncoalesced"][0], "dram_peak": 85.0}),
        # Bank conflicts for which no warp waits.
        ("compute", {**CASES["bank-conflicts"][0], "sm_peak": 90.0, "stall_short_scoreboard": 0.0}),
        ("latency", {**IDLE, "waves": 1.0}),  # a persistent kernel has one wave, and no tail
    ],
)
def test_a_fault_that_costs_no_time_is_no_bottleneck(name, counters):
    assert rules.find_bottleneck(Evidence(kernel=kernel(**counters))).name == name


def test_wasted_bytes_that_fill_the_dram_are_the_bottleneck():
    k = kernel(**{**CASES["uncoalesced"][0], "dram_peak": 92.0})
    assert rules.find_bottleneck(Evidence(kernel=k, ratio=4.0)).name == "uncoalesced"


counted = st.dictionaries(st.sampled_from(KEYS), st.floats(0, 1e15), max_size=len(KEYS))


@given(st.lists(counted, min_size=1, max_size=3), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_any_counters_give_one_bottleneck_and_a_complete_report(rows, read, written):
    one = report(
        kernels=tuple(kernel(**counters) for counters in rows),
        cost=Cost(read=read, written=written),
    )
    assert one.bottleneck.name in CASES and one.bottleneck.sentence.endswith(".")
    lines = one.lines()
    assert sum(line.startswith("bottleneck") for line in lines) == 1
    assert all("\n" not in line for line in lines)
    assert Report.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_a_report_as_text():
    text = "\n".join(report().lines())
    for part in (
        "gelu cuda fp32-16384x16384 forward: 1 kernel, 498 µs of kernel time, caches cold",
        "kernel 1 of 1: gelu_forward (grid 1056, block 256)",
        "DRAM            88.4 % of peak, 4.23 TB/s; read 1.07 GB, written 1.03 GB",
        "global loads    16.0 sectors a request; 32.0 of 32 bytes a sector used",
        "occupancy       94.4 % achieved of 100.0 %",
        "stalls          long_scoreboard 71 %, lg_throttle 6 %",
        "spills          0 B of local memory",
        "bottleneck: gelu_forward is memory-bound: the DRAM is at 88 % of its peak, moving 4.23 T",
    ):
        assert part in text, text
    assert report().good and not report(GELU.replace("dram__bytes_read", "dram__of_old")).good
    several = report(SOFTMAX, Cost(read=HALF, written=HALF)).lines()
    assert any("bottleneck (the longest kernel, 33 % of the time): at::native::" in x for x in several)


def test_a_record_in_another_format_is_refused():
    good = report().to_json()
    broken = json.loads(json.dumps(good).replace("498.112", "NaN"))
    for bad in ({}, {**good, "format": "x"}, {**good, "kernels": []}, {**good, "cost": {}}, broken):
        with pytest.raises(WeftError, match="not a profile by Nsight Compute"):
            Report.from_json(bad)


# -- tables of the documentation -------------------------------------------------------------


def test_the_tables_come_from_records_or_name_the_command(tmp_path):
    assert tables.measured(tmp_path).startswith("not measured yet: `weft profile softmax --tool ncu")
    (tmp_path / "some-gpu").mkdir()
    rows = [report(), report(SOFTMAX, Cost(read=HALF, written=HALF), implementation="eager")]
    file = tmp_path / "some-gpu" / tables.FILE
    file.write_text("".join(json.dumps(r.to_json()) + "\n" for r in [rows[0], *rows]))
    text = tables.measured(tmp_path)
    assert "**Some GPU**, 2026-11-21, commit abc, Nsight Compute 2025.3.1.0." in text
    assert text.count("| gelu cuda `fp32-16384x16384` | 2.15 GB | 1.07 GB | 1.03 GB | 0.981 |") == 1
    assert "| **2.945** |" in text and text.count("| memory |") == 2
    assert all(f"`{r.name}`" in tables.rules() for r in RULES)
    assert tables.rows().count("\n") == len(tables.ROWS) + 2
    file.write_text(file.read_text()[:-40])
    with pytest.raises(WeftError, match=r"ncu.ndjson:3: a torn line"):
        tables.measured(tmp_path)
