"""Vectorised loads: the bytes in flight determine the bandwidth (Little's law)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.backends.nvrtc import CudaSource
from weft.lab.demos.demo import CODE, Counter, Demo, Fact, Variant, elementwise

if TYPE_CHECKING:
    import torch

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("bytewise", "sixteen"))
N, BLOCK, WIDE = 1 << 26, 256, 16
METRIC = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"


def _facts(arch: str) -> Sequence[Fact]:
    from weft.lab.demos.evidence import widest_load

    widths = [widest_load(SOURCE, arch, kernel) for kernel in ("bytewise", "sixteen")]
    return [Fact(label="bits of a thread's load", bad=widths[0], good=widths[1], source=CODE)]


def _inputs(seed: int) -> list[torch.Tensor]:
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randint(0, 256, (N,), generator=generator, device="cuda", dtype=torch.uint8)]


DEMO = Demo(
    name="vectorised-loads",
    sentence="a thread should load 16 bytes at once, so that enough bytes are in flight",
    source=SOURCE,
    bad=Variant(
        kernel="bytewise",
        how="one byte a thread",
        call=elementwise(SOURCE, "bytewise", per_block=BLOCK),
    ),
    good=Variant(
        kernel="sixteen",
        how="sixteen bytes a thread, in one load",
        call=elementwise(SOURCE, "sixteen", per_block=BLOCK * WIDE),
    ),
    expected=5.0,
    because=(
        "An SM has 2048 threads. With one byte each, 2 KiB are in flight, or 270 kB on 132 SMs. Memory "
        "latency is about 0.6 us, so the bandwidth is 0.45 TB/s. Sixteen times as many bytes saturate "
        "DRAM, which reads and writes 2 TB/s each: a factor of 5."
    ),
    at_least=2.0,
    see=(
        "Both loads are coalesced. Their width differs, 8 bits or 128, and with it the number of "
        "requests for the same bytes."
    ),
    facts=_facts,
    inputs=_inputs,
    reference=lambda x: 255 - x.double(),
    counter=Counter(
        label="load requests",
        metrics=(METRIC,),
        of=lambda v: v[METRIC],
        predicted=(N / 32, N / 32 / WIDE),
    ),
)
