"""Program that nsys runs: calls of an implementation at one case, each in an NVTX range.

    python -m weft.workbench.explain.nsys.target JOB.json REPORT.jsonl

Compilation, autotuning and the first calls precede the trace, which the driver's ``cudaProfilerStart``
switches on. The calls are made back to back on the same inputs, as a loop of a user makes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from weft.machine.nvtx import annotate
from weft.workbench.explain.ncu import target
from weft.workbench.sanitizer.subprocess_target import WriteEvent

CALLS = 20  # enough for a median, and few enough that the trace stays small


def main(arguments: Sequence[str]) -> int:
    return target.run(arguments, _trace, needs="nsys traces what runs on a GPU")


def _trace(call: Callable[[], Any], write_event: WriteEvent) -> None:
    import torch

    torch.cuda.synchronize()
    write_event("tracing")
    torch.cuda.profiler.start()
    try:
        for _ in range(CALLS):
            with annotate("call"):
                outputs = call()
        with annotate("wait for the device"):
            torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()
    del outputs
    write_event("traced")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
