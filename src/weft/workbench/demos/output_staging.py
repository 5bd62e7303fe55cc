"""Output staging: what would be written far apart is gathered in shared memory first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from weft.backends.nvrtc import CudaSource
from weft.workbench.demos.arithmetic import WARP, conflict_degree, sectors_per_request
from weft.workbench.demos.demo import ARITHMETIC, Counter, Demo, Fact, Way, normal

if TYPE_CHECKING:
    import torch

SOURCE = CudaSource(file=Path(__file__).with_suffix(".cu"), kernels=("straight", "staged"))
N, TILE, ROWS = 4096, 32, 8
SECTORS = (
    sectors_per_request([4 * N * lane for lane in range(WARP)], 4),
    sectors_per_request([4 * lane for lane in range(WARP)], 4),
)
LABEL = "sectors that a warp's store touches"
CYCLES = tuple(conflict_degree([4 * lane * w for lane in range(WARP)]) for w in (TILE, TILE + 1))
_ASKED = "l1tex__t_{}_pipe_lsu_mem_global_op_st.sum"


def _call(kernel: str) -> Callable[..., torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        import torch

        y = torch.empty_like(x)
        SOURCE[kernel]((N // TILE, N // TILE), (TILE, ROWS), x, y, N)
        return y

    return call


DEMO = Demo(
    name="output-staging",
    sentence="a transpose should turn its tile in shared memory, so that stores coalesce too",
    source=SOURCE,
    bad=Way(kernel="straight", how="written straight from registers", call=_call("straight")),
    good=Way(kernel="staged", how="written row by row out of shared memory", call=_call("staged")),
    expected=2.5,
    because=(
        "Each warp's store goes to 32 rows, so that 16.8 million partial sectors go to the L2 "
        "where 2.1 million would do. An SM passes on one such line a cycle: 16.8 million over "
        "132 SMs at 1.8 GHz are 71 us, and reading and merging in the L2 come on top; the good "
        "way takes 134 MB / 4.2 TB/s = 32 us."
    ),
    at_least=1.4,
    see=(
        "Loads are the same; a store's sectors fall from 32 to 4. The tile's padding matters: "
        f"without it, reading a column would take {CYCLES[0]} cycles and not {CYCLES[1]} "
        "(see bank-conflicts)."
    ),
    facts=lambda arch: [Fact(label=LABEL, bad=SECTORS[0], good=SECTORS[1], source=ARITHMETIC)],
    inputs=lambda seed: [normal(seed, N, N)],
    reference=lambda x: x.double().T,
    counter=Counter(
        label=LABEL,
        metrics=(_ASKED.format("sectors"), _ASKED.format("requests")),
        of=lambda v: v[_ASKED.format("sectors")] / v[_ASKED.format("requests")],
        predicted=SECTORS,
    ),
)
