"""Coalescing: a warp's 32 loads of 4 bytes touch 4 sectors if they are contiguous, up to 32 otherwise."""

from __future__ import annotations

from pathlib import Path

from weft.backends.nvrtc import CudaSource
from weft.lab.demos.arithmetic import WARP, sectors_per_request
from weft.lab.demos.demo import ARITHMETIC, Counter, Demo, Fact, Variant, elementwise, normal

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("strided", "adjacent"))
N, BLOCK = 1 << 25, 256
SECTORS = (
    sectors_per_request([4 * t * (N // BLOCK) for t in range(WARP)], 4),
    sectors_per_request([4 * t for t in range(WARP)], 4),
)
LABEL = "sectors of a warp's load"

DEMO = Demo(
    name="coalescing",
    sentence="neighbouring threads should access neighbouring addresses",
    source=SOURCE,
    bad=Variant(
        kernel="strided",
        how="a warp's threads access addresses 512 KiB apart",
        call=elementwise(SOURCE, "strided", per_block=BLOCK),
    ),
    good=Variant(
        kernel="adjacent",
        how="a warp's threads access contiguous addresses",
        call=elementwise(SOURCE, "adjacent", per_block=BLOCK),
    ),
    expected=5.0,
    because=(
        "A sector has 32 bytes, of which the strided warp uses 4, so eight times the bytes move "
        "between the SMs and the L2. That path is about 1.5 times as fast as DRAM, which bounds the "
        "good kernel: 8 / 1.5 is about 5."
    ),
    at_least=2.0,
    see=(
        "Both kernels use the same bytes. Only the number of sectors a request differs, and the time "
        "follows it."
    ),
    facts=lambda arch: [Fact(label=LABEL, bad=SECTORS[0], good=SECTORS[1], source=ARITHMETIC)],
    inputs=lambda seed: [normal(seed, N)],
    reference=lambda x: 2 * x.double(),
    counter=Counter(
        label=LABEL,
        metrics=(
            "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
            "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
        ),
        of=lambda v: (
            v["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"]
            / v["l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"]
        ),
        predicted=SECTORS,
    ),
)
