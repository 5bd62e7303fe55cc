"""Vectorised loads: the bytes that are under way at once decide the bandwidth (Little's law)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.backends.nvrtc import CudaSource
from weft.workbench.demos.demo import CODE, Counter, Demo, Fact, Way, elementwise

if TYPE_CHECKING:
    import torch

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("bytewise", "sixteen"))
N, BLOCK, WIDE = 1 << 26, 256, 16
METRIC = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"


def _facts(arch: str) -> Sequence[Fact]:
    from weft.workbench.demos.evidence import widest_load

    widths = [widest_load(SOURCE, arch, way) for way in ("bytewise", "sixteen")]
    return [
        Fact(label="bits that a thread's load asks for", bad=widths[0], good=widths[1], source=CODE)
    ]


def _inputs(seed: int) -> list[torch.Tensor]:
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randint(0, 256, (N,), generator=generator, device="cuda", dtype=torch.uint8)]


DEMO = Demo(
    name="vectorised-loads",
    sentence="a thread should ask for 16 bytes at once, so that enough of them are under way",
    source=SOURCE,
    bad=Way(
        kernel="bytewise",
        how="a byte a thread",
        call=elementwise(SOURCE, "bytewise", per_block=BLOCK),
    ),
    good=Way(
        kernel="sixteen",
        how="sixteen bytes a thread, one load",
        call=elementwise(SOURCE, "sixteen", per_block=BLOCK * WIDE),
    ),
    expected=5.0,
    because=(
        "An SM holds 2048 threads; with a byte each, 2 KiB are under way, on 132 SMs 270 kB, every "
        "0.6 us or so that memory takes to answer: 0.45 TB/s. Sixteen times as many are more than "
        "DRAM can take, and it reads and writes 2 TB/s each: a factor of 5."
    ),
    at_least=2.0,
    see=(
        "Both loads are coalesced. It is the width that differs, 8 bits or 128, and with it the "
        "number of requests for the same bytes."
    ),
    facts=_facts,
    inputs=_inputs,
    reference=lambda x: 255 - x.double(),
    counter=Counter(
        label="load requests of warps",
        metrics=(METRIC,),
        of=lambda v: v[METRIC],
        predicted=(N / 32, N / 32 / WIDE),
    ),
)
