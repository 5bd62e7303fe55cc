"""Judge of timed outputs: the check's oracle and tolerance at the contents that buffers hold now."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.core import FORWARD, Case, Implementation, Operator
from weft.workbench.calls.buffers import (
    InputBuffers,
    LeadingOutputs,
    Outputs,
    allocate_buffers,
    apply_changes,
    tensors_of,
)
from weft.workbench.check.local_error import LocalCall, LocalJudge
from weft.workbench.check.oracle import Oracle
from weft.workbench.check.tolerance import Bound, Measured, measure


def _judge_by_rows(oracle: _BufferOracle) -> Callable[[Outputs], str | None]:
    """Return the judge of a large problem: it stores the bounds, and computes answers when it is asked."""
    bounds, forms, local = oracle.bounds, oracle.forms, oracle.local.without_noise()
    seed, changes = oracle.buffers.seed, oracle.buffers.changes
    arguments = (oracle.operator, oracle.case, oracle.direction, oracle.device, oracle.baseline)
    del oracle  # it holds the buffers, which are overwritten before the judge is used

    def decide(outputs: Outputs) -> str | None:
        tensors = tensors_of(outputs)
        if len(tensors) != len(forms):
            return f"{len(tensors)} tensors where {len(forms)} are due"
        for tensor, form in zip(tensors, forms, strict=True):
            if tensor.dtype != form.dtype:
                return f"{tensor.dtype} where {form.dtype} is due"
            if tensor.shape != form.shape:
                return f"shape {tuple(tensor.shape)} where {tuple(form.shape)} is due"
        case, device = arguments[1], arguments[3]
        buffers = allocate_buffers(case, device, None, seed)
        apply_changes(buffers, changes)
        same = _BufferOracle(*arguments, buffers)
        errors = same.errors(0, tensors, bounds)
        for i, (error, bound) in enumerate(zip(errors, bounds, strict=True)):
            if reason := _violation(i, error, bound, local):
                return reason
        return None

    return decide


def _violation(index: int, error: Measured, bound: Bound, local: LocalJudge) -> str | None:
    if error.misplaced:
        flat, value, expected = error.first_misplaced
        return f"{error.misplaced} misplaced NaN or Inf; at {flat} {value}, not {expected}"
    if bound.share(error) > 1.0:
        flat, value, expected = error.worst
        share = bound.share(error)
        return f"error {share:.3g} times what is allowed; at {flat} {value}, not {expected}"
    # Without the noise of the computation, whose inputs are gone: only what is as wrong as zeros is refused.
    _, violation = local.judge(LocalCall(0, (), tuple), index, error, bound)
    return violation or None


class _BufferOracle(Oracle):
    """Oracle at the tensors of these buffers in place of a seed's."""

    def __init__(
        self,
        operator: Operator,
        case: Case,
        direction: str,
        device: str,
        baseline: Implementation | None,
        buffers: InputBuffers,
    ) -> None:
        super().__init__(operator, case, direction, device, (0,), baseline)
        self.buffers = buffers

    def inputs(self, seed: int) -> list[torch.Tensor]:
        return self.buffers.inputs

    def further_seeds(self) -> tuple[int, ...]:
        return ()  # there are no other contents

    def grad(self, seed: int) -> torch.Tensor | None:
        return self.buffers.grad


def judge(
    operator: Operator,
    case: Case,
    direction: str,
    device: str,
    baseline: Implementation | None,
    buffers: InputBuffers,
) -> Callable[[Outputs], str | None]:
    """Return a function that says why outputs are wrong at these contents, or None if they are right.

    The answers are computed here and stored, so that the buffers may be overwritten afterwards.
    """
    oracle = _BufferOracle(operator, case, direction, device, baseline, buffers)
    if oracle.may_split:
        return _judge_by_rows(oracle)
    answers, bounds, terms = oracle.answer(0), oracle.bounds, oracle.terms(0)
    local = oracle.local.without_noise()
    dtypes = [form.dtype for form in oracle.forms]
    del oracle  # it holds the buffers, which are overwritten before the judge is used

    def decide(outputs: Outputs) -> str | None:
        tensors = tensors_of(outputs)
        # An implementation of Weft may return fewer outputs than the operator has, but never fewer than
        # the differentiable ones.
        due = len(answers)
        if isinstance(outputs, LeadingOutputs) and direction == FORWARD:
            due = min(due, max(len(tensors), operator.differentiable_outputs))
        if len(tensors) != due:
            return f"{len(tensors)} tensors where {due} are due"
        columns = zip(tensors, answers, bounds, terms, dtypes, strict=False)
        for index, (tensor, answer, bound, size, dtype) in enumerate(columns):
            if tensor.dtype != dtype:
                return f"{tensor.dtype} where {dtype} is due"
            if tensor.shape != answer.shape:
                return f"shape {tuple(tensor.shape)} where {tuple(answer.shape)} is due"
            error = measure(tensor, answer, bound, size, local.layouts[index])
            if reason := _violation(index, error, bound, local):
                return reason
        return None

    return decide
