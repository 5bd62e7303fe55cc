"""Time and peak memory of the LM head with its loss, forward and backward together: GPU only.

    python tools/head_memory.py > results/<device>/linear_cross_entropy-memory.json

Each implementation runs through autograd, as users call it, at the operator's first bench case. Reported are
the median time of CALLS calls by CUDA events, and the peak of allocated memory beyond what was allocated
before the call and the two gradients that remain after it.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import torch

from weft import machine, ops
from weft.core import registry
from weft.workbench.calls import inputs

OPERATOR, CALLS = "linear_cross_entropy", 20


def measure(name: str, leaves: list[torch.Tensor], targets: torch.Tensor) -> dict[str, Any]:
    """Return the median time of a call in milliseconds, and its extra bytes."""

    def step() -> None:
        for x in leaves:
            x.grad = None
        ops.linear_cross_entropy(leaves[0], leaves[1], targets, impl=name).backward()

    step()  # compiles
    step()  # warms the caching allocator
    for x in leaves:
        x.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    gradient_bytes = sum(x.nbytes for x in leaves)
    extra = torch.cuda.max_memory_allocated() - before - gradient_bytes
    times = []
    for _ in range(CALLS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return {"implementation": name, "extra_bytes": extra, "ms": statistics.median(times)}


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("tools/head_memory.py needs a GPU")
    operator = registry.operator(OPERATOR)
    case = next(c for c in operator.cases if "bench" in c.tags)
    x, weight, targets = inputs.make(case, "cuda", 0)
    rows = []
    for name in registry.implementation_names(OPERATOR):
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        rows.append(measure(name, leaves, targets))
        print(rows[-1], file=sys.stderr)
        del leaves
        torch.cuda.empty_cache()
    report = {"operator": OPERATOR, "case": case.name, "rows": rows}
    print(json.dumps(report | {"machine": machine.fingerprint()}))


if __name__ == "__main__":
    main()
