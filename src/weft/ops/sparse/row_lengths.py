"""Choice of an implementation of spmv by the lengths of a matrix's rows.

Dispatch sees shapes alone, because reading the offsets would make the host wait for the device. Who uses one
matrix for many products reads them once here, and names the implementation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.sparse.ladder import lanes_of

# A model, not a measurement: groups of lanes are chosen where at least this share of the lanes' loads is of
# nonzeros, and where no warp has more rounds than this many times the mean.
MIN_BUSY, MAX_ROUNDS = 0.8, 8.0


@dataclass(frozen=True)
class RowLengths:
    """Lengths of a matrix's rows, and what they mean for step 3 of the ladder (a group of lanes a row).

    ``busy`` is the share of the lanes' loads that are of nonzeros, where a warp goes on until the longest of
    its rows ends. ``longest_warp`` is the rounds of the slowest warp over those of the mean one.
    """

    rows: int
    nonzeros: int
    shortest: int
    longest: int
    empty: int
    lanes: int
    busy: float
    longest_warp: float

    @property
    def implementation(self) -> str:
        """Return the implementation of spmv on a GPU that the model prefers."""
        regular = self.busy >= MIN_BUSY and self.longest_warp <= MAX_ROUNDS
        return "cuda/03-adaptive-lanes" if regular else "cuda"


def row_lengths(offsets: Tensor) -> RowLengths:
    """Return the distribution of the lengths of rows with these offsets. It waits for the device."""
    lengths = offsets.diff().long()
    rows, nonzeros = lengths.shape[0], int(lengths.sum())
    lanes = lanes_of(rows, nonzeros)
    per_warp = 32 // lanes
    padded = torch.nn.functional.pad(lengths, (0, -rows % per_warp)).view(-1, per_warp)
    rounds = ((padded + lanes - 1) // lanes).amax(1) if rows else lengths
    total, most = int(rounds.sum()), int(rounds.max()) if rows else 0
    return RowLengths(
        rows=rows,
        nonzeros=nonzeros,
        shortest=int(lengths.min()) if rows else 0,
        longest=int(lengths.max()) if rows else 0,
        empty=int((lengths == 0).sum()),
        lanes=lanes,
        busy=nonzeros / (32 * total) if total else 1.0,
        longest_warp=most * rounds.shape[0] / total if total else 1.0,
    )
