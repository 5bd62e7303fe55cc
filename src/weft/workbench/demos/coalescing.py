"""Coalescing: a warp's 32 loads of 4 bytes are 4 sectors where they lie side by side, else 32."""

from __future__ import annotations

from pathlib import Path

from weft.backends.nvrtc import CudaSource
from weft.workbench.demos.arithmetic import WARP, sectors_per_request
from weft.workbench.demos.demo import ARITHMETIC, Counter, Demo, Fact, Way, elementwise, normal

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("strided", "adjacent"))
N, BLOCK = 1 << 25, 256
SECTORS = (
    sectors_per_request([4 * t * (N // BLOCK) for t in range(WARP)], 4),
    sectors_per_request([4 * t for t in range(WARP)], 4),
)
LABEL = "sectors that a warp's load touches"

DEMO = Demo(
    name="coalescing",
    sentence="neighbouring threads should touch neighbouring addresses",
    source=SOURCE,
    bad=Way(
        kernel="strided",
        how="a warp's threads lie 512 KiB apart",
        call=elementwise(SOURCE, "strided", per_block=BLOCK),
    ),
    good=Way(
        kernel="adjacent",
        how="a warp's threads lie side by side",
        call=elementwise(SOURCE, "adjacent", per_block=BLOCK),
    ),
    expected=5.0,
    because=(
        "Each sector carries 32 bytes, of which the strided warp uses 4, so that eight times the "
        "bytes go between the SMs and the L2. That path is some 1.5 times as fast as DRAM, which "
        "is what holds the good way back: 8 / 1.5 is about 5."
    ),
    at_least=2.0,
    see=(
        "Both ways read and write the same bytes. Only the number of sectors a request differs, "
        "and the time goes with it."
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
