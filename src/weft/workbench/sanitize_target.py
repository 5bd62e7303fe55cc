"""The program that compute-sanitizer runs: an implementation's calls at small cases, no more.

    python -m weft.workbench.sanitize_target JOB.json REPORT.jsonl

Inputs are drawn on the host and copied over, so that next to nothing but the candidate's own
kernels run. After each step a line goes to the report: a run that ends early is seen to have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from weft import backends

import torch  # isort: skip  # after weft.backends, which decides what is interpreted

from weft.core import BACKWARD, Case, Implementation, Operator, registry
from weft.workbench import inputs
from weft.workbench.bind import bind
from weft.workbench.oracle import Oracle
from weft.workbench.target import one_line, subject, telling

MOST = 6  # cases, where none are named: each call is tens to hundreds of times slower here
ENOUGH = 257  # elements: more than one warp's and, for most kernels, more than one block's
LARGEST = 1 << 16


def main(arguments: Sequence[str]) -> int:
    with telling(arguments) as (job, tell):
        tell("started")
        try:
            operator, implementation = subject(job)
            cases = [operator.case(name) for name in job["cases"]]
            cases = cases or smallest(operator, implementation, job["direction"], job["device"])
        except Exception as error:  # noqa: BLE001 - a stranger's file may raise anything at import
            tell("unusable", why=one_line(error))
            return 0
        tell("cases", names=[c.name for c in cases], backend=implementation.backend)
        for case in cases:
            support = backends.support(implementation, case, job["device"], job["direction"])
            if not support:
                tell("refused", case=case.name, why=support.reason)
                continue
            tell("begun", case=case.name)
            try:
                call(operator, implementation, case, job)
            except Exception as error:  # noqa: BLE001 - it is the candidate's, and told
                memory = isinstance(error, torch.OutOfMemoryError)
                tell("raised", case=case.name, why=one_line(error), memory=memory)
                break  # a context that broke stays broken
            tell("done", case=case.name)
        tell("finished")
    return 0


def smallest(
    operator: Operator, implementation: Implementation, direction: str, device: str
) -> list[Case]:
    """A few small cases, one for each dtype and layout: the smallest of more than a block."""
    found: dict[tuple[str, Iterable[str]], Case] = {}
    for case in sorted(operator.cases, key=_elements):
        if not 0 < _elements(case) <= LARGEST or device not in case.devices:
            continue
        if not backends.support(implementation, case, device, direction):
            continue
        key = (case.dtype, case.layouts)
        if key not in found or _elements(found[key]) < ENOUGH:
            found[key] = case
    return list(found.values())[:MOST] or list(operator.select("check", device)[:1])


def _elements(case: Case) -> int:
    return sum(i.numel for i in case.inputs)


def call(
    operator: Operator, implementation: Implementation, case: Case, job: dict[str, Any]
) -> None:
    """One call at one case, in one direction, and until all of it is over."""
    device = job["device"]
    tensors = [moved(t, device) for t in inputs.make(case, "cpu", job["seed"])]
    grad = None
    if job["direction"] == BACKWARD:
        oracle = Oracle(operator, case, BACKWARD, "cpu", [job["seed"]], _baseline(operator))
        on_host = oracle.grad(job["seed"])
        assert on_host is not None
        grad = moved(on_host, device)
    closure = bind(operator, implementation, case, job["direction"], tensors, grad)
    kept = closure()
    if device == "cuda":
        torch.cuda.synchronize()
    del kept


def _baseline(operator: Operator) -> Implementation | None:
    """What tells an output's form where the registry has no baseline: the reference itself."""
    if operator.name in registry.operator_names():
        return None
    forward = operator.reference
    return Implementation(
        operator=operator.name, name="reference", backend="eager", forward=forward
    )


def moved(tensor: Any, device: str) -> Any:
    """The tensor on the device, gaps and strides and all, by one copy of the bytes it lies in."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    there = whole.to(device, copy=True).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device=device)
    return empty.set_(there, tensor.storage_offset(), tensor.shape, tensor.stride())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
