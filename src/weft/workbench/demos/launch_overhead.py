"""Launch overhead: a kernel shorter than its launch waits for the host; a graph does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from weft.backends.nvrtc import CudaSource
from weft.workbench.demos.demo import ARITHMETIC, BAD, GOOD, SIDES, Demo, Fact, Say, Taken, Way

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("step",))
N, BLOCK, LAUNCHES, ROUNDS = 1024, 256, 100, 30


def _facts(arch: str) -> Sequence[Fact]:
    label = f"times that the host launches something, for {LAUNCHES} steps"
    return [Fact(label=label, bad=LAUNCHES, good=1, source=ARITHMETIC)]


def _take(say: Say) -> Mapping[str, Taken]:
    """Wall time from the first launch until the GPU has done all, by each way, per step."""
    import torch

    from weft.workbench.demos.taking import differs, interleaved

    v = torch.zeros(N, device="cuda")

    def one_by_one() -> None:
        for _ in range(LAUNCHES):
            SOURCE["step"](N // BLOCK, BLOCK, v)

    one_by_one()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_by_one()
    calls: dict[str, Callable[[], None]] = {BAD: one_by_one, GOOD: graph.replay}
    wanted = torch.full((N,), float(LAUNCHES), dtype=torch.float64, device="cuda")
    for side in SIDES:
        v.zero_()
        calls[side]()
        if wrong := differs(v, wanted, 0.0):
            return {side: Taken(wrong=f"{side}: {wrong}")}
    say("launch-overhead: both did all steps; timing")

    def sample(side: str) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter_ns()
        calls[side]()
        torch.cuda.synchronize()
        return (time.perf_counter_ns() - began) / 1000 / LAUNCHES

    found = interleaved(SIDES, sample, ROUNDS)
    return {side: Taken(samples=tuple(us)) for side, us in found.items()}


DEMO = Demo(
    name="launch-overhead",
    sentence="many small kernels should be launched together, as a CUDA graph",
    source=SOURCE,
    bad=Way(kernel="step", how=f"{LAUNCHES} launches from Python"),
    good=Way(kernel="step", how=f"one CUDA graph of the {LAUNCHES} launches"),
    expected=4.0,
    because=(
        "A launch from Python costs the host 5 us or so, all of which the GPU waits for, since the "
        "kernel itself takes under 2; in a graph the next kernel begins 1 to 1.5 us after the "
        "one before: a factor of 4."
    ),
    at_least=1.5,
    see=(
        "Nothing is computed faster: the graph takes the host out of the way. Here the time itself "
        "is the counter, as it is in a model of many small calls. (One kernel that does all steps "
        "would be faster still.)"
    ),
    facts=_facts,
    clock="warm, of the host: wall time until the GPU has done all, for each step",
    take=_take,
)
