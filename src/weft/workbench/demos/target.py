"""The program that Nsight Compute runs: both ways of a demonstration, the bad one first.

    python -m weft.workbench.demos.target NAME

Compiling and a first call of each come before the counting is switched on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from weft.workbench import demos
from weft.workbench.demos.demo import SIDES

SEED = 20260101


def main(arguments: Sequence[str]) -> int:
    import torch

    one = demos.demo(arguments[0])
    calls = [one.way(side).call for side in SIDES]
    assert one.inputs is not None
    inputs = one.inputs(SEED)
    kept = [call(*inputs) for call in calls if call is not None]
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    kept += [call(*inputs) for call in calls if call is not None]
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
