"""Output staging: a tile is transposed in shared memory, so that both loads and stores coalesce."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from weft.backends.nvrtc import CudaSource
from weft.lab.demos.arithmetic import WARP, conflict_degree, sectors_per_request
from weft.lab.demos.demo import ARITHMETIC, Counter, Demo, Fact, Variant, normal

if TYPE_CHECKING:
    import torch

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("straight", "staged"))
N, TILE, ROWS = 4096, 32, 8
SECTORS = (
    sectors_per_request([4 * N * lane for lane in range(WARP)], 4),
    sectors_per_request([4 * lane for lane in range(WARP)], 4),
)
LABEL = "sectors of a warp's store"
CYCLES = tuple(conflict_degree([4 * lane * w for lane in range(WARP)]) for w in (TILE, TILE + 1))
_METRIC = "l1tex__t_{}_pipe_lsu_mem_global_op_st.sum"


def _call(kernel: str) -> Callable[..., torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        import torch

        y = torch.empty_like(x)
        SOURCE[kernel]((N // TILE, N // TILE), (TILE, ROWS), x, y, N)
        return y

    return call


DEMO = Demo(
    name="output-staging",
    sentence="a transpose should go through shared memory, so that loads and stores both coalesce",
    source=SOURCE,
    bad=Variant(kernel="straight", how="written directly from registers", call=_call("straight")),
    good=Variant(kernel="staged", how="written row by row from shared memory", call=_call("staged")),
    expected=2.5,
    because=(
        "Each warp's store goes to 32 rows, so 16.8 million partial sectors go to the L2 instead of "
        "2.1 million. An SM sends one of them a cycle: 16.8 million over 132 SMs at 1.8 GHz take "
        "71 us, plus the reads and merges in the L2. The good kernel takes 134 MB / 4.2 TB/s = 32 us."
    ),
    at_least=1.4,
    see=(
        "Loads are the same; a store touches 4 sectors instead of 32. The tile's padding matters: "
        f"without it, reading a column takes {CYCLES[0]} cycles instead of {CYCLES[1]} "
        "(see bank-conflicts)."
    ),
    facts=lambda arch: [Fact(label=LABEL, bad=SECTORS[0], good=SECTORS[1], source=ARITHMETIC)],
    inputs=lambda seed: [normal(seed, N, N)],
    reference=lambda x: x.double().T,
    counter=Counter(
        label=LABEL,
        metrics=(_METRIC.format("sectors"), _METRIC.format("requests")),
        of=lambda v: v[_METRIC.format("sectors")] / v[_METRIC.format("requests")],
        predicted=SECTORS,
    ),
)
