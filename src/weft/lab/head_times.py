"""The LM head's loss by Hopper's tensor cores: the time of each of its kernels, and of the whole.

    python3 -m weft.lab.head_times [rows inner columns] > results/<device>/head-times-<date>.txt

A chunk of rows is a fixed sequence of launches (ops/losses/head_wgmma.py). A line has the place of a launch
in that sequence, its kernel, mean microseconds, the mean pause before it, and for products TFLOP/s. These
times are torch.profiler's, which adds to the pauses. The whole forward and backward are timed without it, in
CUDA graphs, beside Triton's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from weft import machine
from weft.core import WeftError
from weft.lab.product_choices import timings
from weft.ops.losses import head_wgmma, with_cuda, with_triton
from weft.ops.losses.spec import LossOptions

SIZE = (16384, 768, 50304)  # GPT-2's
PROFILED_CALLS = 3
FIRST = "head_references"  # the first kernel of Weft's in a call
GRAPH_CALLS = 3


class Launch(NamedTuple):
    """One kernel of a call: its name, its beginning and its duration in microseconds."""

    name: str
    begin: float
    us: float


def operands(size: tuple[int, int, int], device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x (rows, inner), a weight (columns, inner) with logits of unit variance, and targets."""
    rows, inner, columns = size
    x = torch.randn(rows, inner, device=device).bfloat16()
    weight = (torch.randn(columns, inner, device=device) * inner**-0.5).bfloat16()
    return x, weight, torch.randint(columns, (rows,), device=device)


def profiled(size: tuple[int, int, int]) -> list[list[Launch]]:
    """Return the launches of some calls, each in the order of time."""
    x, weight, targets = operands(size, "cuda")
    head_wgmma.forward(x, weight, targets, LossOptions())
    torch.cuda.synchronize()
    calls = []
    for _ in range(PROFILED_CALLS):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            head_wgmma.forward(x, weight, targets, LossOptions())
            torch.cuda.synchronize()
        events: Any = profile.events()
        # Without the calls of the runtime that launched them.
        kernels = [(e.name, e.time_range) for e in events if e.device_type.name == "CUDA"]
        launches = [Launch(name, time.start, time.elapsed_us()) for name, time in kernels]
        calls.append(sorted(launches, key=lambda launch: launch.begin))
    return calls


def chunk_lines(calls: Sequence[Sequence[Launch]], chunks: int, flops: float) -> Iterator[str]:
    """Yield a line for each place in a chunk's sequence of launches, and the sums of a call.

    ``flops`` are those of one product of a chunk. The launches after the last chunk are one sum.
    """
    periods: list[Sequence[Launch]] = []
    for call in calls:
        names = [launch.name for launch in call]
        first = next(i for i, name in enumerate(names) if FIRST in name) + 1
        # The sequence ends with the last product; what follows belongs to the sum of the losses.
        last = max(i for i, name in enumerate(names) if "matmul_wgmma" in name) + 1
        length, rest = divmod(last - first, chunks)
        if rest:
            raise WeftError("launches of a chunk", expected=f"a multiple of {chunks}", got=str(last - first))
        # With the launch before, for the pause.
        periods += [call[i - 1 : i + length] for i in range(first, last, length)]
    total = 0.0
    yield f"launch of a chunk ({chunks} chunks): us, pause before it, TFLOP/s of a product"
    for position in range(1, len(periods[0])):
        launches = [(period[position - 1], period[position]) for period in periods]
        us = statistics.mean(launch.us for _, launch in launches)
        pause = statistics.mean(launch.begin - before.begin - before.us for before, launch in launches)
        name = launches[0][1].name.partition("(")[0]
        is_product = name.endswith("matmul_wgmma") and us > 10
        total += us + pause
        yield f"  {position} {name:<18} {us:7.1f} {pause:5.1f}" + f" {flops / us * 1e-6:5.0f}" * is_product
    yield f"all chunks: {total * chunks:.0f} us"


def whole_lines(size: tuple[int, int, int], device: str = "cuda") -> Iterator[str]:
    """Yield the times of forward and backward without a profiler, by ``cuda`` and by ``triton``."""
    x, weight, targets = operands(size, device)
    grad = torch.full((), 1 / size[0], device=device)
    implementations = {"cuda": with_cuda, "triton": with_triton}
    outputs: dict[str, Any] = {
        name: module.linear_cross_entropy_forward(x, weight, targets)
        for name, module in implementations.items()
    }
    calls: list[Any] = []
    for name, module in implementations.items():
        calls.append(lambda m=module: m.linear_cross_entropy_forward(x, weight, targets))
        calls.append(lambda m=module, o=outputs[name]: m.linear_cross_entropy_backward(grad, o[1], o[2]))
    times = timings(calls, GRAPH_CALLS, device)
    for name, forward, backward in zip(implementations, times[::2], times[1::2], strict=True):
        yield (
            f"{name}: forward {forward.us:.0f} us at {forward.mhz:.0f} MHz, backward {backward.us:.0f} us, "
            f"together {forward.us + backward.us:.0f}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return 2 without a GPU that the kernels run on."""
    parser = argparse.ArgumentParser(
        prog="python3 -m weft.lab.head_times",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("size", nargs="*", type=int, help="rows, inner and columns [default: GPT-2's]")
    size = tuple(parser.parse_args(arguments).size) or SIZE
    try:
        if len(size) != len(SIZE):
            raise WeftError("a size", expected="rows, inner and columns", got=f"{len(size)} numbers")
        if not machine.has_gpu() or torch.cuda.get_device_capability() != (9, 0):
            raise WeftError("the head by wgmma", expected="a GPU of compute capability 9.0", got="another")
    except WeftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows, inner, columns = size
    chunk = head_wgmma.chunk_rows(rows, inner, columns)
    chunks = -(-rows // chunk)
    print(
        f"{torch.cuda.get_device_properties(0).name}, torch {torch.__version__}, {rows} x {inner} x {columns}"
    )
    for line in whole_lines(size):
        print(line, flush=True)
    for line in chunk_lines(profiled(size), chunks, 2.0 * chunk * inner * columns):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
