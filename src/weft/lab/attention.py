"""Attention in bfloat16: each configuration of the wgmma kernels beside PyTorch's and Triton's.

    python3 -m weft.lab.attention [d128] [d64] [padded] [backward] > results/<device>/attention-<date>.txt

A line has TFLOP/s at one shape (B, H, T, D; a causal mask halves the operations) of ``cudnn`` and ``flash``
(PyTorch's SDPA by these backends), ``triton`` (Weft's), and each configuration (queries x keys of a tile; the
operator takes the one that is named). Parts: ``d128`` and ``d64`` are heads of these sizes, ``padded`` heads
of 80 and 96. ``backward`` has the gradients at some of these shapes (2.5 times the operations): SDPA's,
Triton's, and Weft's by ``mma.sync`` and by ``wgmma``.

Each result is compared with SDPA's before it is timed; a wrong one is named and not timed. Forwards are timed
in CUDA graphs, in turn, as weft.lab.products does. A graph cannot capture autograd's gradients of an output
from outside of it: they are timed between events, behind a delay in which the host issues the calls.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft import machine
from weft.core import WeftError, registry
from weft.lab.products import GRAPH_US, ROUNDS, graph_times
from weft.machine.device_limits import smem_per_block
from weft.ops.attention import attention_wgmma, attention_wgmma_backward, with_cuda
from weft.ops.attention.cuda_configs import configure
from weft.ops.attention.layout import like
from weft.ops.attention.spec import AttentionOptions

DTYPE = torch.bfloat16
# (B, H, T, D), heads of keys and values, causal.
Shape = tuple[tuple[int, int, int, int], int, bool]
PARTS: dict[str, tuple[Shape, ...]] = {
    "d128": (
        ((4, 16, 4096, 128), 16, True),
        ((4, 16, 4096, 128), 16, False),
        ((1, 16, 16384, 128), 16, True),
        ((4, 32, 2048, 128), 8, True),
    ),
    "d64": (
        ((32, 12, 1024, 64), 12, True),
        ((2, 16, 8192, 64), 16, True),
        ((16, 8, 512, 64), 8, False),
        ((2, 16, 3001, 64), 16, True),
        ((64, 12, 197, 64), 12, False),
    ),
    "padded": (((4, 16, 4096, 80), 16, True), ((4, 16, 4096, 96), 16, True)),
    "backward": (
        ((4, 16, 4096, 128), 16, True),
        ((4, 16, 4096, 128), 16, False),
        ((4, 32, 2048, 128), 8, True),
        ((32, 12, 1024, 64), 12, True),
        ((2, 16, 8192, 64), 16, True),
    ),
}
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
LIBRARIES = {"cudnn": "torch/cudnn", "flash": "torch/flash", "triton": "triton"}
# Two results that are each rounded once differ by less, in eps of the dtype times SDPA's largest value.
MOST_DIFFERENCE = 4.0
DELAY_CYCLES = 4_000_000  # about 2 ms, in which the host issues the calls of a sample


def contenders(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Callable[[], Tensor]]:
    """Return the calls that are timed, by name; each returns the output (B, H, T, D)."""
    lengths = torch.zeros(q.shape[0], dtype=torch.int32, device=q.device)
    options = AttentionOptions(causal=causal)
    calls: dict[str, Callable[[], Tensor]] = {}
    for name, implementation in LIBRARIES.items():
        forward = registry.implementation("attention", implementation).forward
        calls[name] = lambda f=forward: f(q, k, v, lengths, causal=causal)[0]  # type: ignore[misc]
    for config in attention_wgmma.candidates(q.shape[3]):
        calls[config.label] = lambda c=config: attention_wgmma.forward_with(c, q, k, v, None, options)[0]  # type: ignore[misc]
    return calls


def backward_contenders(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool
) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Return the backwards that are timed, by name; each returns dq, dk and dv."""
    lengths = torch.zeros(q.shape[0], dtype=torch.int32, device=q.device)
    options = AttentionOptions(causal=causal)
    calls: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            y = torch.nn.functional.scaled_dot_product_attention(
                leaves[0], leaves[1], leaves[2], is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
            )
        calls[name] = lambda y=y: torch.autograd.grad(y, leaves, grad, retain_graph=True)  # type: ignore[misc]
    out, lse = registry.implementation("attention", "triton").forward(q, k, v, lengths, causal=causal)
    triton = registry.implementation("attention", "triton").backward
    assert triton is not None
    calls["triton"] = lambda: triton(grad, q, k, v, lengths, out, lse, causal=causal)
    size = (q.shape[3], False, smem_per_block(q.device))
    configs = (configure("queries", *size), configure("keys", *size))
    calls["mma.sync"] = lambda: with_cuda.backward_with(
        configs, grad, q, k, v, lengths, out, lse, causal=causal
    )
    calls["wgmma"] = lambda: attention_wgmma_backward.backward(
        grad, (q, k, v, None, out, lse), options, (like(q), like(k), like(v))
    )
    return calls


def event_times(calls: Sequence[Callable[[int], Any]], count: int) -> list[float]:
    """Return microseconds a call of each contender: ``count`` calls between two events, in turn, medians."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times: list[list[float]] = [[] for _ in calls]
    order = [*range(len(calls)), *reversed(range(len(calls)))]
    for contender in order * ROUNDS:
        torch.cuda._sleep(DELAY_CYCLES)
        begin.record()
        for i in range(count):
            calls[contender](i)
        end.record()
        end.synchronize()
        times[contender].append(begin.elapsed_time(end) * 1e3 / count)
    return [statistics.median(t) for t in times]


def is_right(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return True if two results of the same call differ by roundings only."""
    for output, value in zip(outputs, expected, strict=True):
        bound = MOST_DIFFERENCE * torch.finfo(value.dtype).eps * float(value.abs().amax())
        if not bool((output.float() - value.float()).abs().amax() <= bound):  # NaN is wrong
            return False
    return True


def line(shape: Shape, device: str = "cuda", backward: bool = False) -> tuple[str, list[str]]:
    """Return the line of a shape, and the names of the contenders whose results are wrong."""
    (b, h, t, d), kv_heads, causal = shape
    # As a model has them: the heads of a token in one row.
    q, k, v, grad = (
        torch.randn(b, t, heads, d, device=device).to(DTYPE).transpose(1, 2)
        for heads in (h, kv_heads, kv_heads, h)
    )
    calls: dict[str, Callable[[], Sequence[Tensor]]] = {}
    if backward:
        calls |= backward_contenders(q, k, v, grad, causal)
        expected = calls["flash"]()
    else:
        calls |= {name: lambda f=f: (f(),) for name, f in contenders(q, k, v, causal).items()}  # type: ignore[misc]
        expected = (
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=kv_heads != h
            ),
        )
    wrong = [name for name, call in calls.items() if not is_right(call(), expected)]
    right = {name: call for name, call in calls.items() if name not in wrong}
    operations = 4.0 * b * h * t * t * d * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
    count = max(2, min(100, int(GRAPH_US / (operations / 400e6))))  # at 400 TFLOP/s
    timed: Sequence[Callable[[int], Any]] = [lambda i, f=f: f() for f in right.values()]  # type: ignore[misc]
    times = event_times(timed, count) if backward else graph_times(timed, count)
    rates = {name: round(operations / us * 1e-6) for name, us in zip(right, times, strict=True)}
    name = f"{b}x{h}x{t}x{d}" + f"-{kv_heads}" * (kv_heads != h) + "-causal" * causal
    name += " backward" if backward else f" chosen {attention_wgmma.choose(d, t, t, causal).label}"
    return f"{name} {rates}" + f" WRONG: {', '.join(wrong)}" * bool(wrong), wrong


def lines(parts: Sequence[str], device: str = "cuda") -> Iterator[tuple[str, list[str]]]:
    """Yield :func:`line` of each shape of some of ``PARTS``."""
    for part in parts:
        for shape in PARTS[part]:
            yield line(shape, device, part == "backward")


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return 1 if a result is wrong, 2 without a GPU that the kernel runs on."""
    parser = argparse.ArgumentParser(
        prog="python3 -m weft.lab.attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}; without one: all")
    parts = parser.parse_args(arguments).parts or list(PARTS)
    try:
        if unknown := [part for part in parts if part not in PARTS]:
            raise WeftError("part", expected=", ".join(PARTS), got=", ".join(unknown))
        if not machine.has_gpu():
            raise WeftError("the times of attention", expected="an NVIDIA GPU", got="none")
        if torch.cuda.get_device_capability() != (9, 0):
            raise WeftError("the wgmma kernel", expected="compute capability 9.0", got="another")
    except WeftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, TFLOP/s")
    any_wrong = False
    for text, wrong in lines(parts):
        print(text, flush=True)
        any_wrong |= bool(wrong)
    return 1 if any_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
