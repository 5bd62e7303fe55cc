"""Traffic of a chain of operators: the DRAM's bytes of one call of each implementation, by Nsight Compute.

The tool runs this module as a program:

    python -m weft.lab.demos.traffic DEMO IMPLEMENTATION
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weft.core.errors import WeftError
from weft.core.log import Log
from weft.lab.demos.chain import COLUMNS, COMPILED, EAGER, FUSED, Chain, rows_that_fit
from weft.lab.demos.demo import BAD, GOOD, Demo, normal

if TYPE_CHECKING:
    import torch

SEED = 20260101
SIDE_OF = {EAGER: BAD, COMPILED: "compile", FUSED: GOOD}  # names of the times in a result
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
WITHIN = 0.02  # relative difference that counted bytes may have


def rows_here() -> int:
    """Return the rows of a tensor that fit this GPU."""
    import torch

    return rows_that_fit(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def make_inputs(chain: Chain, rows: int, draw: Callable[..., torch.Tensor] = normal) -> list[torch.Tensor]:
    """Generate the inputs of a call; ``draw(seed, *shape)`` draws one tensor."""
    shapes = [(COLUMNS,) if name in ("bias", "weight") else (rows, COLUMNS) for name in chain.inputs]
    return [draw(SEED + n, *shape) for n, shape in enumerate(shapes)]


def count(demo: Demo, log: Log) -> list[dict[str, Any]]:
    """Return the prediction at this GPU's size, with the DRAM's bytes that Nsight Compute counted.

    Raises :class:`WeftError` if the tool is missing, may not read counters here, or failed.
    """
    from weft.lab.demos.evidence import profile

    assert demo.chain is not None
    entries = demo.chain.prediction(rows_here())
    for entry in entries:
        log(f"{demo.name}: counting the bytes of {entry['name']}")
        entry |= read_counters(profile("weft.lab.demos.traffic", [demo.name, entry["name"]], METRICS))
    return entries


def read_counters(text: str) -> dict[str, float]:
    """Parse the tool's output: the DRAM's bytes of all kernels together, and the number of kernels."""
    from weft.workbench.explain.ncu import find
    from weft.workbench.explain.ncu.output import parse

    rows = parse(text).rows
    if not rows or any(metric not in row.values for row in rows for metric in METRICS):
        end = " ".join(text.split())[-300:] or "it printed nothing"
        raise find.explain_problem(text) or WeftError(
            f"{find.TOOL} did not count the call's kernels",
            expected=f"a row for each kernel with {', '.join(METRICS)}",
            got=end,
        )
    return {"counted": sum(row.values[m] for row in rows for m in METRICS), "launches": len(rows)}


def deviations(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the implementations whose counted bytes are not the predicted ones, within ``WITHIN``."""
    ratios = {e["name"]: e["counted"] / e["bytes"] for e in entries if "counted" in e}
    return [
        f"{name} moved {ratio:.3f} times the predicted bytes"
        for name, ratio in ratios.items()
        if abs(ratio - 1) > WITHIN
    ]


def main(arguments: Sequence[str]) -> int:
    """Call one implementation once inside the profiler's range; Nsight Compute counts its kernels."""
    import torch

    from weft.lab import demos

    chain = demos.demo(arguments[0]).chain
    assert chain is not None
    inputs, call = make_inputs(chain, rows_here()), chain.calls(arguments[1])
    # Compilation and first calls happen outside the range; the outputs stay alive, as in a model.
    outputs = [call(*inputs) for _ in range(2)]
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    outputs.append(call(*inputs))
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
