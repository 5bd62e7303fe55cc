"""Program that ncu runs: one call of an implementation at one case; only this call is counted.

    python -m weft.workbench.explain.ncu.target JOB.json REPORT.jsonl

Compilation, autotuning and the first calls precede the counting, which the driver's ``cudaProfilerStart``
switches on. Then the caches are emptied and the call is made once. Each step writes an event to the
report, so that a run that ends early is recognised.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from weft import machine
from weft.core import BACKWARD
from weft.workbench.sanitizer.subprocess_target import WriteEvent, error_line, load_subject, open_job

if TYPE_CHECKING:
    from weft.core import Case, Implementation, Operator

WARMUP_CALLS = 3
Measure = Callable[[Callable[[], Any], WriteEvent], None]  # a call that is warm, and where to report


def main(arguments: Sequence[str]) -> int:
    return run(arguments, _count, needs="only a GPU has counters")


def run(arguments: Sequence[str], measure: Measure, *, needs: str) -> int:
    """Run the target of a job: ``measure`` makes the calls that the tool observes.

    ``needs`` is the reason to report where there is no GPU.
    """
    with open_job(arguments) as (job, write_event):
        write_event("started", pid=os.getpid())
        if not machine.has_gpu():
            write_event("refused", why=f"{needs}: {machine.gpu_reason()}")
        else:
            _run(job, measure, write_event)
        write_event("finished")
    return 0


def _run(job: dict[str, Any], measure: Measure, write_event: WriteEvent) -> None:
    """Load, bind, warm up and measure; the first failure goes to the report and ends the run."""
    from weft import backends  # decides what is interpreted, so before torch

    try:
        operator, implementation = load_subject(job)
        case = operator.case(job["case"])
        support = backends.support(implementation, case, "cuda", job["direction"])
        cost = operator.cost(case, job["direction"])
    except Exception as error:  # noqa: BLE001 - an external file may raise anything at import
        write_event("unusable", why=error_line(error))
        return
    if not support:
        write_event("refused", why=support.reason)
        return
    fields = {"read": cost.read, "written": cost.written, "flops": cost.flops, "rate": cost.rate}
    write_event("subject", backend=implementation.backend, cost=fields)
    try:
        write_event("warming")
        measure(_warmed_call(operator, implementation, case, job), write_event)
    except Exception as error:  # noqa: BLE001 - an error of the candidate goes to the report
        write_event("raised", why=error_line(error))


def _warmed_call(
    operator: Operator, implementation: Implementation, case: Case, job: dict[str, Any]
) -> Callable[[], Any]:
    """Return a call on inputs of the job's seed, after the first calls, which compile and tune."""
    from weft.workbench.calls import inputs as generation
    from weft.workbench.calls.bind import bind, differentiable_outputs

    inputs = generation.make(case, "cuda", job["seed"])
    grad = None
    if job["direction"] == BACKWARD:
        like = differentiable_outputs(operator, implementation.forward(*inputs, **case.params))
        grad = generation.gradient_like(like, job["seed"], device=str(inputs[0].device))
    call = bind(operator, implementation, case, job["direction"], inputs, grad)
    for _ in range(WARMUP_CALLS):
        call()
    return call


def _count(call: Callable[[], Any], write_event: WriteEvent) -> None:
    """Make the counted call, with no useful line of its inputs or outputs in any cache."""
    import torch

    flusher = torch.zeros(2 * machine.l2_bytes("cuda") // 4, dtype=torch.int32, device="cuda")
    # Read, not written: dirty lines of the flusher would be written back during the counted call.
    flusher.sum()
    torch.cuda.synchronize()
    write_event("counting")
    torch.cuda.profiler.start()
    try:
        outputs = call()
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()
    del outputs  # freed only after counting, since a freed block could be reused within the call
    write_event("counted")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
