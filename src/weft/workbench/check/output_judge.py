"""Judge of timed outputs: the check's oracle and tolerance at the contents that buffers hold now."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch

from weft.core import FORWARD, Case, Implementation, Operator
from weft.workbench.calls.buffers import (
    ElementChanges,
    InputBuffers,
    LeadingOutputs,
    Outputs,
    allocate_buffers,
    apply_changes,
    tensors_of,
)
from weft.workbench.calls.staging import TensorForm
from weft.workbench.check.local_error import LocalCall, LocalJudge
from weft.workbench.check.oracle import Oracle
from weft.workbench.check.tolerance import Bound, Measured, measure

SHARED_ELEMENTS = 1 << 20  # of each output, from which contents share their bounds
SEED_ELSEWHERE = 1  # of contents that show how large the errors of honest code are


@dataclass(frozen=True, kw_only=True)
class _LargeJudge:
    """Judge of a large problem's outputs: it computes the answers when it is asked, ``by_rows`` if it can.

    ``arguments`` are those of :class:`Oracle` before the seeds, and the baseline. ``share`` is the part of
    the rows that is compared, picked at random each time.
    """

    arguments: tuple[Operator, Case, str, str, Implementation | None]
    bounds: tuple[Bound, ...]
    forms: tuple[TensorForm, ...]
    local: LocalJudge
    seed: int
    changes: Sequence[ElementChanges]
    by_rows: bool
    share: float = 1.0
    prepared: list[Oracle] = field(default_factory=list)

    def of_share(self, share: float) -> _LargeJudge:
        return replace(self, share=share)

    def at(self, buffers: InputBuffers) -> _LargeJudge:
        """Return a judge with these bounds at the contents of other buffers."""
        return replace(self, seed=buffers.seed, changes=buffers.changes, prepared=[])

    def prepare(self) -> None:
        """Compute the whole answers, for the next output."""
        operator, case, direction, device, baseline = self.arguments
        buffers = allocate_buffers(case, device, None, self.seed)
        apply_changes(buffers, self.changes)
        oracle = _BufferOracle(operator, case, direction, device, baseline, buffers)
        oracle.forms = self.forms  # they are known: the baseline need not be called for them
        oracle.may_split, oracle.gives_inputs = self.by_rows, not self.by_rows
        del buffers
        if not self.by_rows:
            oracle.keep_answer()
        self.prepared[:] = [oracle]

    def __call__(self, outputs: Outputs) -> str | None:
        tensors = tensors_of(outputs)
        if len(tensors) != len(self.forms):
            return f"{len(tensors)} tensors where {len(self.forms)} are due"
        for tensor, form in zip(tensors, self.forms, strict=True):
            if tensor.dtype != form.dtype:
                return f"{tensor.dtype} where {form.dtype} is due"
            if tensor.shape != form.shape:
                return f"shape {tuple(tensor.shape)} where {tuple(form.shape)} is due"
        if not self.prepared:
            self.prepare()
        errors = self.prepared.pop().errors(0, tensors, self.bounds, self.share)
        for i, (error, bound) in enumerate(zip(errors, self.bounds, strict=True)):
            if reason := _violation(i, error, bound, self.local):
                return reason
        return None


def _violation(index: int, error: Measured, bound: Bound, local: LocalJudge) -> str | None:
    if error.misplaced:
        flat, value, expected = error.first_misplaced
        return f"{error.misplaced} misplaced NaN or Inf; at {flat} {value}, not {expected}"
    if bound.share(error) > 1.0:
        flat, value, expected = error.worst
        share = bound.share(error)
        return f"error {share:.3g} times what is allowed; at {flat} {value}, not {expected}"
    # Without the noise of the computation, whose inputs are gone: only what is as wrong as zeros is refused,
    # and more wrong than noise at other inputs.
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
        self.gives_inputs = False  # once: a whole reference has them in float64, and no room for both

    def keep_answer(self) -> None:
        """Compute the answer and keep it, whatever its size."""
        self._answers[0] = self.answer(0)

    def inputs(self, seed: int) -> list[torch.Tensor]:
        inputs = self.buffers.inputs
        if self.gives_inputs:
            self.buffers = replace(self.buffers, inputs=[])
        return inputs

    def further_seeds(self) -> tuple[int, ...]:
        return ()  # there are no other contents

    def grad(self, seed: int) -> torch.Tensor | None:
        return self.buffers.grad


def _magnitude_limits(
    arguments: tuple[Operator, Case, str, str, Implementation | None], index: int
) -> torch.Tensor | None:
    """Return an output's limits by magnitude with the noise of honest code, at contents of their own.

    They are computed only for an output that would be refused without them: the check, which has its inputs,
    knows the noise there, and what it accepts must not be refused when it is timed.
    """
    operator, case, direction, device, baseline = arguments
    oracle = Oracle(operator, case, direction, device, (SEED_ELSEWHERE,), baseline)
    oracle.may_split = False  # rows alone have no noise
    try:
        call = LocalCall(SEED_ELSEWHERE, (), partial(oracle.answer, SEED_ELSEWHERE))
        return oracle.local.magnitude_limits(call, index, oracle.bounds[index])
    except torch.OutOfMemoryError:
        return None


class OutputJudges:
    """Maker of judges of one point's outputs, each at the contents that buffers hold when it is made.

    The answers are computed there and stored, so that the buffers may be overwritten afterwards. Those of a
    large problem are computed by rows when a judge is asked, and all contents share the first bounds: a
    baseline's error over a million elements hardly depends on the seed, and costs as much as all else.
    """

    def __init__(
        self,
        operator: Operator,
        case: Case,
        direction: str,
        device: str,
        baseline: Implementation | None,
    ) -> None:
        self.arguments = (operator, case, direction, device, baseline)
        self._shared: _LargeJudge | None = None
        self._limits_elsewhere = cache(partial(_magnitude_limits, self.arguments))

    def share_bounds(self, buffers: InputBuffers) -> None:
        """Compute the shared bounds of a large problem at these contents; nothing for any other.

        It takes more memory than a comparison, so it comes before others need theirs.
        """
        oracle = self._oracle(buffers)
        if self._shared is None and oracle.is_large and _are_large(oracle.forms):
            self._large_judge(oracle, buffers)

    def share_bounds_of(self, oracle: Oracle) -> None:
        """Take over the bounds that a check has just computed at this point, where they would be shared."""
        if oracle.is_large and _are_large(oracle.forms):
            self._large_judge(oracle, InputBuffers([]))

    def __call__(self, buffers: InputBuffers) -> Callable[[Outputs], str | None]:
        """Return a function that says why outputs are wrong at these contents, or None if they are right."""
        if self._shared is not None:
            return self._shared.at(buffers)
        oracle = self._oracle(buffers)
        if oracle.is_large:
            return self._large_judge(oracle, buffers)
        operator, _, direction, _, _ = self.arguments
        return _judge_answers(operator, direction, oracle, self._limits_elsewhere)

    def _large_judge(self, oracle: Oracle, buffers: InputBuffers) -> _LargeJudge:
        """Return the judge at these contents; the later ones share its bounds if outputs are large."""
        judge = _LargeJudge(
            arguments=self.arguments,
            bounds=oracle.bounds,
            forms=oracle.forms,
            local=oracle.local.without_noise(self._limits_elsewhere),
            seed=buffers.seed,
            changes=buffers.changes,
            by_rows=oracle.may_split,  # the bounds may have found that the rows depend on each other
        )
        if _are_large(judge.forms):
            self._shared = judge
        return judge

    def _oracle(self, buffers: InputBuffers) -> _BufferOracle:
        operator, case, direction, device, baseline = self.arguments
        return _BufferOracle(operator, case, direction, device, baseline, buffers)


def _are_large(forms: Sequence[TensorForm]) -> bool:
    return all(math.prod(form.shape) >= SHARED_ELEMENTS for form in forms)


def _judge_answers(
    operator: Operator,
    direction: str,
    oracle: _BufferOracle,
    limits_elsewhere: Callable[[int], torch.Tensor | None],
) -> Callable[[Outputs], str | None]:
    """Return the judge with an oracle's answers; it does not hold the oracle's buffers."""
    answers, bounds, terms = oracle.answer(0), oracle.bounds, oracle.terms(0)
    local = oracle.local.without_noise(limits_elsewhere)  # the bounds have given it its figures
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
