"""Bank conflicts: shared memory serves 32 threads that use the same bank one after another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weft.backends.nvrtc import CudaSource
from weft.lab.demos.arithmetic import WARP, conflict_degree
from weft.lab.demos.demo import ARITHMETIC, CODE, Counter, Demo, Fact, Variant, normal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("conflicting", "padded"))
ROWS, COLUMNS, BLOCK = 1 << 20, 32, 256
DEGREES = tuple(conflict_degree([4 * lane * width for lane in range(WARP)]) for width in (32, 33))
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"


def _facts(arch: str) -> Sequence[Fact]:
    from weft.lab.demos.evidence import count

    loads = [count(SOURCE, arch, kernel, "LDS") for kernel in ("conflicting", "padded")]
    return [
        Fact(
            label="cycles of a warp's shared load",
            bad=DEGREES[0],
            good=DEGREES[1],
            source=ARITHMETIC,
        ),
        Fact(label="shared loads in the code", bad=loads[0], good=loads[1], source=CODE),
    ]


def _call(kernel: str) -> Callable[..., torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(ROWS)
        SOURCE[kernel](ROWS // BLOCK, BLOCK, x, y)
        return y

    return call


DEMO = Demo(
    name="bank-conflicts",
    sentence="the threads of a warp should use 32 different banks of shared memory",
    source=SOURCE,
    bad=Variant(kernel="conflicting", how="rows of 32 words: one bank", call=_call("conflicting")),
    good=Variant(kernel="padded", how="rows of 33 words: 32 banks", call=_call("padded")),
    expected=4.0,
    because=(
        "With conflicts an SM reads one word a cycle from its shared memory, without them 32. On 132 "
        "SMs at 1.8 GHz the bad kernel reads 0.95 TB/s. The good kernel is bound by DRAM, at about "
        "4 TB/s: a factor of 4."
    ),
    at_least=2.0,
    see=(
        "Both kernels have the same instructions; only the addresses differ. The padding costs 3 % of "
        "the shared memory."
    ),
    facts=_facts,
    inputs=lambda seed: [normal(seed, ROWS, COLUMNS)],
    reference=lambda x: x.double().sum(1),
    tolerance=1e-4,  # 32 additions of values up to 30: half an ulp of 32 is 2e-6, times 32
    counter=Counter(
        label="conflicts, share of the shared loads' cycles (%)",
        metrics=(CONFLICTS, WAVEFRONTS),
        of=lambda v: 100 * v[CONFLICTS] / v[WAVEFRONTS],
        predicted=(100 * 31 / 32, 0.0),
        within=0.2,  # of a tenth of the larger: other users of the pipe count a little
    ),
)
