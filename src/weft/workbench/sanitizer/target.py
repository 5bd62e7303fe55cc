"""Program that compute-sanitizer runs: calls of one implementation at small cases.

    python -m weft.workbench.sanitizer.target JOB.json REPORT.jsonl

Inputs are generated on the host and copied to the device, so that the instrumented kernels are almost
only the candidate's. Each step writes an event to the report: a run that ends early is recognised.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from weft import backends

import torch  # isort: skip  # after weft.backends, which decides what is interpreted

from weft.core import BACKWARD, Case, Implementation, Operator, registry
from weft.workbench.calls import inputs
from weft.workbench.calls.bind import bind
from weft.workbench.check.oracle import Oracle
from weft.workbench.sanitizer.subprocess_target import error_line, load_subject, open_job

MAX_CASES = 6  # where no case is named: a call is tens to hundreds of times slower under the tool
MIN_NUMEL = 257  # elements: more than one warp and, for most kernels, more than one block
MAX_NUMEL = 1 << 16


def main(arguments: Sequence[str]) -> int:
    with open_job(arguments) as (job, write_event):
        write_event("started")
        try:
            operator, implementation = load_subject(job)
            cases = [operator.case(name) for name in job["cases"]]
            cases = cases or smallest(operator, implementation, job["direction"], job["device"])
        except Exception as error:  # noqa: BLE001 - an external file may raise anything at import
            write_event("unusable", why=error_line(error))
            return 0
        write_event("cases", names=[c.name for c in cases], backend=implementation.backend)
        for case in cases:
            support = backends.support(implementation, case, job["device"], job["direction"])
            if not support:
                write_event("refused", case=case.name, why=support.reason)
                continue
            write_event("begun", case=case.name)
            try:
                call(operator, implementation, case, job)
            except Exception as error:  # noqa: BLE001 - an error of the candidate goes to the report
                out_of_memory = isinstance(error, torch.OutOfMemoryError)
                write_event("raised", case=case.name, why=error_line(error), memory=out_of_memory)
                break  # after a CUDA error the context refuses every further call
            write_event("done", case=case.name)
        write_event("finished")
    return 0


def smallest(operator: Operator, implementation: Implementation, direction: str, device: str) -> list[Case]:
    """Return a few small cases, one for each dtype and layout, each of more than one block if possible."""
    chosen: dict[tuple[str, Iterable[str]], Case] = {}
    for case in sorted(operator.cases, key=_numel):
        if not 0 < _numel(case) <= MAX_NUMEL or device not in case.devices:
            continue
        if not backends.support(implementation, case, device, direction):
            continue
        key = (case.dtype, case.layouts)
        if key not in chosen or _numel(chosen[key]) < MIN_NUMEL:
            chosen[key] = case
    return list(chosen.values())[:MAX_CASES] or list(operator.select("check", device)[:1])


def _numel(case: Case) -> int:
    return sum(i.numel for i in case.inputs)


def call(operator: Operator, implementation: Implementation, case: Case, job: dict[str, Any]) -> None:
    """Call the implementation once at one case and direction, and wait until the device is done."""
    device = job["device"]
    tensors = [copy_to(t, device) for t in inputs.make(case, "cpu", job["seed"])]
    grad = None
    if job["direction"] == BACKWARD:
        oracle = Oracle(operator, case, BACKWARD, "cpu", [job["seed"]], _baseline(operator))
        grad_on_host = oracle.grad(job["seed"])
        assert grad_on_host is not None
        grad = copy_to(grad_on_host, device)
    closure = bind(operator, implementation, case, job["direction"], tensors, grad)
    outputs = closure()
    if device == "cuda":
        torch.cuda.synchronize()
    del outputs  # freed only after the kernels that write them have ended


def _baseline(operator: Operator) -> Implementation | None:
    """Return the reference as the baseline of an external operator, which has none in the registry.

    The oracle takes only the shape and dtype of the output from it.
    """
    if operator.name in registry.operator_names():
        return None
    forward = operator.reference
    return Implementation(operator=operator.name, name="reference", backend="eager", forward=forward)


def copy_to(tensor: Any, device: str) -> Any:
    """Copy a tensor to the device with its strides, its offset and the gaps of its storage."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    # The bytes of the storage are copied at once: tensor.to() would run a kernel for a strided tensor.
    storage_bytes = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    storage = storage_bytes.to(device, copy=True).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device=device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
