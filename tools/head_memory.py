"""Time and peak memory of the LM head with its loss, forward and backward together: GPU only.

    python tools/head_memory.py > results/<device>/linear_cross_entropy-memory.json

Each implementation runs as its users call it, through autograd, at the operator's bench case: the
median of some calls by events, and what was allocated at most beyond what lay there before the call
and the two gradients that stay after it.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import torch

from weft import machine, ops
from weft.core import registry
from weft.workbench import inputs

OPERATOR, CALLS = "linear_cross_entropy", 20


def measure(name: str, leaves: list[torch.Tensor], targets: torch.Tensor) -> dict[str, Any]:
    """Median milliseconds of a call and its extra bytes."""

    def step() -> None:
        for x in leaves:
            x.grad = None
        ops.linear_cross_entropy(leaves[0], leaves[1], targets, impl=name).backward()

    step()
    step()
    for x in leaves:
        x.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    stays = sum(x.nbytes for x in leaves)
    extra = torch.cuda.max_memory_allocated() - before - stays
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
    told = {"operator": OPERATOR, "case": case.name, "rows": rows}
    print(json.dumps(told | {"machine": machine.fingerprint()}))


if __name__ == "__main__":
    main()
