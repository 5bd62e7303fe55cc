"""The program that ncu runs: one call of an implementation at one case, and only that is counted.

    python -m weft.workbench.ncu.target JOB.json REPORT.jsonl

Compiling, autotuning and the first calls come before the counting is switched on, by the driver's
``cudaProfilerStart``; then the caches are emptied and the call is made once. After each step a line
goes to the report, so that a run that ends early is seen to have.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weft import machine
from weft.core import BACKWARD
from weft.workbench.target import Tell, one_line, subject, telling

if TYPE_CHECKING:
    from weft.core import Case, Implementation, Operator

WARM = 3  # calls before the one that counts


def main(arguments: Sequence[str]) -> int:
    with telling(arguments) as (job, tell):
        tell("started", pid=os.getpid())
        if not machine.has_gpu():
            tell("refused", why=f"counters are a GPU's, and {machine.gpu_reason()}")
        else:
            _work(job, tell)
        tell("finished")
    return 0


def _work(job: dict[str, Any], tell: Tell) -> None:
    """Read, bind, warm up, count; the first thing that fails is told, and ends it."""
    from weft import backends  # decides what is interpreted, so before torch

    try:
        operator, implementation = subject(job)
        case = operator.case(job["case"])
        support = backends.support(implementation, case, "cuda", job["direction"])
        cost = operator.cost(case, job["direction"])
    except Exception as error:  # noqa: BLE001 - a stranger's file may raise anything at import
        tell("unusable", why=one_line(error))
        return
    if not support:
        tell("refused", why=support.reason)
        return
    told = {"read": cost.read, "written": cost.written, "flops": cost.flops, "rate": cost.rate}
    tell("subject", backend=implementation.backend, cost=told)
    try:
        _count(operator, implementation, case, job, tell)
    except Exception as error:  # noqa: BLE001 - it is the candidate's, and told
        tell("raised", why=one_line(error))


def _count(
    operator: Operator, implementation: Implementation, case: Case, job: dict[str, Any], tell: Tell
) -> None:
    """The call, counted once, with no useful line of its inputs or outputs in any cache."""
    import torch

    from weft.workbench import inputs as drawing
    from weft.workbench.bind import bind, graded

    tell("warming")
    inputs = drawing.make(case, "cuda", job["seed"])
    grad = None
    if job["direction"] == BACKWARD:
        like = graded(operator, implementation.forward(*inputs, **case.params))
        grad = drawing.gradient_like(like, job["seed"], device=str(inputs[0].device))
    call = bind(operator, implementation, case, job["direction"], inputs, grad)
    for _ in range(WARM):
        call()
    flusher = torch.zeros(2 * machine.l2_bytes("cuda") // 4, dtype=torch.int32, device="cuda")
    flusher.sum()  # read, not written: nothing is left to be written back in the call's time
    torch.cuda.synchronize()
    tell("counting")
    torch.cuda.profiler.start()
    try:
        kept = call()
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()
    del kept
    tell("counted")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
