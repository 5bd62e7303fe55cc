"""Folded stacks: compared with values worked out by hand, and adding up to the wall time to the ns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.sample_trace import TRACE, event, kernel, launch
from weft.core.errors import WeftError
from weft.workbench.explain.profile import stacks


def test_a_trace_of_two_steps_is_folded_as_worked_out_by_hand() -> None:
    folded = stacks.fold(TRACE)
    assert (folded.root_us, folded.steps) == (200.0, 2)
    assert [lane.name for lane in folded.lanes] == ["host", "host 2 (autograd)", "GPU 0"]
    assert folded.lines() == [
        "wall time;(no operator) 120000",
        "wall time;aten::linear 20000",
        "wall time;aten::linear;aten::mm 40000",
        "wall time;aten::linear;aten::mm;cudaLaunchKernel 20000",
    ]
    assert folded.lines("host 2 (autograd)") == [
        "wall time;(no operator) 180000",
        "wall time;MulBackward0 15000",
        "wall time;MulBackward0;cudaLaunchKernel 5000",
    ]
    # 10 us of two streams and 5 beside the copy are shared evenly; 20 lie after the last step.
    gelu = "at::native::vectorized_elementwise_kernel<GeluFunctor>"
    assert folded.lines("GPU 0") == [
        "wall time;(GPU idle) 60000",
        "wall time;(launch not seen);Memcpy DtoH (Device -> Pinned) 2500",
        f"wall time;MulBackward0;{gelu} 22500",
        "wall time;aten::linear;aten::mm;nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT 115000",
    ]
    lane = folded.lane("GPU 0")
    assert (lane.shared, lane.outside, lane.root) == (15_000, 20_000, folded.root_ns)


def test_ranges_that_only_overlap_keep_their_total_time() -> None:
    crossed = [event("a", 0, 60), event("b", 40, 90), event("c", 80, 100)]
    lines = stacks.fold({"traceEvents": crossed}).lines()
    assert lines == [
        "wall time;a 40000",
        "wall time;a;b 20000",
        "wall time;b 20000",
        "wall time;b;c 10000",
        "wall time;c 10000",
    ]
    # A child that outlasts its parent by a rounding error is cut at the parent's end.
    at = 4408910971740.0
    late = [event("a", at + 0.159, at + 10.160), event("b", at + 5, at + 10.161)]
    self_ns = stacks.fold({"traceEvents": late}).lane().stacks
    assert set(self_ns) == {("a",), ("a", "b"), (stacks.NO_OPERATOR,)}


def test_traces_that_cannot_be_folded_raise() -> None:
    with pytest.raises(WeftError, match="nothing in it"):
        stacks.fold({"traceEvents": [{"ph": "i", "ts": 1}]})
    with pytest.raises(WeftError, match="takes no time"):
        stacks.fold({"traceEvents": [event("a", 5, 5)]})
    with pytest.raises(WeftError, match="no such lane"):
        stacks.fold(TRACE).lines("GPU 3")


@st.composite
def nested_events(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Generate well-nested events of threads, with or without steps, and kernels on streams, in whole ns."""
    events: list[dict[str, Any]] = []
    numbers = iter(range(10_000))

    def add_events(start: int, end: int, tid: int, depth: int) -> None:
        cuts = sorted(draw(st.lists(st.integers(start, end), max_size=6)))
        for a, b in zip(cuts[::2], cuts[1::2], strict=False):
            name = draw(st.sampled_from(["a", "b", "a;b", "long name", "c"]))
            if draw(st.booleans()):
                number = next(numbers)
                events.append(launch(a / 1000, b / 1000, number, tid))
                begin = draw(st.integers(0, 120_000))
                length = draw(st.integers(0, 40_000))
                stream = draw(st.sampled_from([7, 8, 9]))
                events.append(kernel(name, begin / 1000, (begin + length) / 1000, number, stream))
            else:
                events.append(event(name, a / 1000, b / 1000, tid=tid))
                if depth:
                    add_events(a, b, tid, depth - 1)

    for tid in draw(st.sampled_from([(1,), (1, 2)])):
        add_events(0, 100_000, tid, 3)
    steps = sorted(draw(st.sets(st.integers(0, 100_000), min_size=2, max_size=4)))
    if draw(st.booleans()):
        pairs = zip(steps[::2], steps[1::2], strict=False)
        events += [event(f"ProfilerStep#{i}", a / 1000, b / 1000) for i, (a, b) in enumerate(pairs)]
    events.append(event("whole", 0, 100, tid=1))
    return draw(st.permutations(events)) if draw(st.booleans()) else events


@given(nested_events())
@settings(max_examples=100)
def test_self_times_add_up_to_the_root_to_the_nanosecond(events: list[dict[str, Any]]) -> None:
    folded = stacks.fold({"traceEvents": events})
    for lane in folded.lanes:
        assert min(lane.stacks.values()) > 0
        assert lane.root == folded.root_ns
        lines = [line.rsplit(" ", 1) for line in lane.lines()]
        assert sum(int(ns) for _, ns in lines) == folded.root_ns
        assert len({stack for stack, _ in lines}) == len(lines)
    steps = [e for e in events if e["name"].startswith("ProfilerStep")]
    if steps:
        assert folded.root_ns == sum(round(e["dur"] * 1000) for e in steps)


@pytest.mark.slow
def test_a_trace_of_the_profiler_itself_is_folded(tmp_path: Path) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    x = torch.randn(64, 64, requires_grad=True)
    steps = schedule(wait=1, warmup=1, active=3, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=steps) as seen:
        for _ in range(5):
            torch.nn.functional.gelu(x @ x).sum().backward()
            seen.step()
    file = tmp_path / "trace.json"
    seen.export_chrome_trace(str(file))
    trace = stacks.load(file)
    folded = stacks.fold(trace)
    spans = [e["dur"] for e in trace["traceEvents"] if e["name"].startswith("ProfilerStep#")]
    assert folded.steps == len(spans) == 3
    assert folded.root_us == pytest.approx(sum(spans), abs=0.01)
    assert folded.lane().root == folded.root_ns
    assert any(re.search(r";aten::matmul;aten::mm \d+$", line) for line in folded.lines())
    assert not any("Profiler" in line for line in folded.lines())


@pytest.mark.gpu
def test_kernels_of_a_gpu_trace_are_beneath_their_operators(tmp_path: Path) -> None:
    import time

    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    x = torch.randn(8192, 8192, device="cuda").bfloat16()
    steps = schedule(wait=1, warmup=1, active=3, repeat=1)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    times = []
    with profile(activities=activities, schedule=steps) as seen:
        for _ in range(5):
            start = time.perf_counter_ns()
            for _ in range(8):
                torch.nn.functional.gelu(torch.mm(x, x))
            torch.cuda.synchronize()
            times.append(time.perf_counter_ns() - start)
            seen.step()
    file = tmp_path / "trace.json"
    seen.export_chrome_trace(str(file))
    folded = stacks.fold(stacks.load(file))
    assert folded.root_ns == pytest.approx(sum(times[2:]), rel=0.02)
    assert {lane.root for lane in folded.lanes} == {folded.root_ns}
    gpu = folded.lane("GPU 0")
    assert gpu.outside < folded.root_ns * 0.01
    lines = gpu.lines()
    assert any(line.startswith("wall time;aten::mm;") for line in lines), lines
    assert any(line.startswith("wall time;aten::gelu;") for line in lines), lines
    assert not any(stacks.NO_LAUNCH in line for line in lines), lines
    busy = sum(ns for stack, ns in gpu.stacks.items() if stack != (stacks.IDLE,))
    assert busy > folded.root_ns * 0.8, lines


def frame(name: str, start: float, end: float, tid: int = 1) -> dict[str, Any]:
    return event(name, start, end, "python_function", tid=tid)


def test_python_frames_are_those_of_the_calls_and_have_no_addresses() -> None:
    """The loop around the calls, the profiler and a thread that ran no operator leave no frame."""
    workload = "weft/workbench/explain/profile/workload.py"
    events = [
        event("ProfilerStep#0", 100, 200, "user_annotation"),
        frame("weft/__main__.py(1): <module>", 0, 400),
        frame("weft/workbench/explain/profile/instruments.py(142): _time_step", 100, 190),
        frame(f"{workload}(107): enqueue", 105, 180),
        frame("weft/workbench/calls/bind.py(39): <lambda>", 106, 178),
        frame("weft/ops/gelu/with_eager.py(19): forward", 110, 170),
        frame("<built-in method tanh of Tensor object at 0x7f49>", 112, 130),
        frame("<built-in method tanh of Tensor object at 0x7F5A>", 132, 150),
        event("aten::tanh", 115, 125),
        event("aten::tanh", 135, 145),
        frame("torch/profiler/profiler.py(1150): step", 191, 199),
        event("MulBackward0", 140, 160, tid=2),
        frame("mine.py(3): backward", 141, 159, tid=2),
        frame("threading.py(327): wait", 100, 200, tid=3),
    ]
    folded = stacks.fold(stacks.without_own_frames({"traceEvents": events, "schemaVersion": 1}))
    forward = "wall time;weft/ops/gelu/with_eager.py(19): forward"
    tanh = f"{forward};<built-in method tanh of Tensor object>"
    assert folded.lines() == [
        "wall time;(no operator) 40000",
        f"{forward} 24000",
        f"{tanh} 16000",
        f"{tanh};aten::tanh 20000",
    ]
    assert [lane.name for lane in folded.lanes] == ["host", "host 2"]
    assert ("MulBackward0", "mine.py(3): backward") in folded.lanes[1].stacks


def test_a_trace_without_python_frames_stays_as_it_is() -> None:
    assert stacks.without_own_frames(TRACE) == TRACE
