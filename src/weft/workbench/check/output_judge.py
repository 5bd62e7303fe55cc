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
from weft.workbench.check.oracle import Oracle
from weft.workbench.check.tolerance import Bound, Measured, measure


def _judge_by_rows(oracle: _BufferOracle) -> Callable[[Outputs], str | None]:
    """Return the judge of a large problem: it stores the bounds, and computes answers when it is asked."""
    bounds, forms = oracle.bounds, oracle.forms
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
        for error, bound in zip(same.errors(0, tensors, bounds), bounds, strict=True):
            if reason := _violation(error, bound):
                return reason
        return None

    return decide


def _violation(error: Measured, bound: Bound) -> str | None:
    if error.misplaced:
        index, value, expected = error.first_misplaced
        return f"{error.misplaced} misplaced NaN or Inf; at {index} {value}, not {expected}"
    if bound.share(error) > 1.0:
        index, value, expected = error.worst
        share = bound.share(error)
        return f"error {share:.3g} times what is allowed; at {index} {value}, not {expected}"
    return None


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
        for tensor, answer, bound, size, dtype in zip(tensors, answers, bounds, terms, dtypes, strict=False):
            if tensor.dtype != dtype:
                return f"{tensor.dtype} where {dtype} is due"
            if tensor.shape != answer.shape:
                return f"shape {tuple(tensor.shape)} where {tuple(answer.shape)} is due"
            if reason := _violation(measure(tensor, answer, bound, size), bound):
                return reason
        return None

    return decide
