"""Launch overhead: a kernel that is shorter than its launch waits for the host; a graph does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from weft.backends.nvrtc import CudaSource
from weft.core.log import Log
from weft.lab.demos.demo import ARITHMETIC, BAD, GOOD, SIDES, Demo, Fact, Measurement, Variant

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("step",))
N, BLOCK, LAUNCHES, ROUNDS = 1024, 256, 100, 30


def _facts(arch: str) -> Sequence[Fact]:
    label = f"launches by the host, for {LAUNCHES} steps"
    return [Fact(label=label, bad=LAUNCHES, good=1, source=ARITHMETIC)]


def _measure(log: Log) -> Mapping[str, Measurement]:
    """Measure the wall time a step of each variant, from the first launch until the GPU has finished."""
    import torch

    from weft.lab.demos.run import interleaved, mismatch

    v = torch.zeros(N, device="cuda")

    def launch_all() -> None:
        for _ in range(LAUNCHES):
            SOURCE["step"](N // BLOCK, BLOCK, v)

    launch_all()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_all()
    calls: dict[str, Callable[[], None]] = {BAD: launch_all, GOOD: graph.replay}
    expected = torch.full((N,), float(LAUNCHES), dtype=torch.float64, device="cuda")
    for side in SIDES:
        v.zero_()
        calls[side]()
        if wrong := mismatch(v, expected, 0.0):
            return {side: Measurement(wrong=f"{side}: {wrong}")}
    log("launch-overhead: both outputs are correct; timing")

    def sample(side: str) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        calls[side]()
        torch.cuda.synchronize()
        return (time.perf_counter_ns() - start) / 1000 / LAUNCHES

    samples = interleaved(SIDES, sample, ROUNDS)
    return {side: Measurement(samples=tuple(us)) for side, us in samples.items()}


DEMO = Demo(
    name="launch-overhead",
    sentence="many small kernels should be launched together, as a CUDA graph",
    source=SOURCE,
    bad=Variant(kernel="step", how=f"{LAUNCHES} launches from Python"),
    good=Variant(kernel="step", how=f"one CUDA graph of the {LAUNCHES} launches"),
    expected=4.0,
    because=(
        "A launch from Python takes about 5 us of the host, and the GPU waits for it, since the kernel "
        "takes under 2 us. In a graph a kernel begins 1 to 1.5 us after the one before: a factor of "
        "4."
    ),
    at_least=1.5,
    see=(
        "The kernels are not faster; the GPU no longer waits for the host. The time itself is the "
        "evidence, as in a model of many small calls. (One kernel for all steps would be faster "
        "still.)"
    ),
    facts=_facts,
    clock="warm, of the host: wall time a step, until the GPU has finished",
    measure=_measure,
)
