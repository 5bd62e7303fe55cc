"""Volatile: the compiler keeps a value that it has read in a register, unless the access is volatile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.backends.nvrtc import CudaSource
from weft.lab.demos.demo import CODE, Counter, Demo, Fact, Variant, elementwise, uniform

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("rereading", "plain"))
N, BLOCK, READS = 1 << 25, 256, 16  # READS as in the .cu
METRIC = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"


def _facts(arch: str) -> Sequence[Fact]:
    from weft.lab.demos.evidence import count

    loads = [count(SOURCE, arch, kernel, "LDG") for kernel in ("rereading", "plain")]
    return [Fact(label="global loads in the code", bad=loads[0], good=loads[1], source=CODE)]


DEMO = Demo(
    name="volatile",
    sentence="a value that no other thread changes should not be volatile, or each use loads it again",
    source=SOURCE,
    bad=Variant(
        kernel="rereading",
        how="const volatile float*",
        call=elementwise(SOURCE, "rereading", per_block=BLOCK),
    ),
    good=Variant(kernel="plain", how="const float*", call=elementwise(SOURCE, "plain", per_block=BLOCK)),
    expected=6.0,
    because=(
        f"A volatile load must see what other threads have written, so it does not use the L1: {READS} "
        "loads bring 64 bytes an element from the L2, and 4 are written. At about 6 TB/s, 1.5 times the "
        "DRAM's bandwidth, this takes 11 ps. The plain kernel reads and writes 8 bytes at 4.2 TB/s: 1.9 ps."
    ),
    at_least=2.0,
    see=(
        "The source has the same reads. Without volatile the compiler may assume that no other thread "
        "writes x, so that a loop which waits for a flag can read it once and never end. volatile "
        "prevents that and nothing else: it orders no other access, is no barrier, and makes x += 1 no "
        "atomic operation. To wait for another thread use cuda::atomic_ref or ld.acquire."
    ),
    facts=_facts,
    inputs=lambda seed: [uniform(seed, N)],
    reference=lambda x: READS * x.double(),
    tolerance=2e-5,  # 16 additions of values up to 16: half an ulp of 16 is 1e-6
    counter=Counter(
        label="load requests",
        metrics=(METRIC,),
        of=lambda v: v[METRIC],
        predicted=(N / 32 * READS, N / 32),
    ),
)
