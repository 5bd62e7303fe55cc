"""The judge of one slot: the check's own oracle and tolerance at what a slot holds now."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.core import FORWARD, Case, Implementation, Operator
from weft.workbench.oracle import Oracle
from weft.workbench.slots import Leading, Result, Slot, tensors_of
from weft.workbench.tolerance import measure


class _AtSlot(Oracle):
    """The oracle at given tensors in place of a seed's."""

    def __init__(
        self,
        operator: Operator,
        case: Case,
        direction: str,
        device: str,
        baseline: Implementation | None,
        slot: Slot,
    ) -> None:
        super().__init__(operator, case, direction, device, (0,), baseline)
        self.slot = slot

    def inputs(self, seed: int) -> list[torch.Tensor]:
        return self.slot.inputs

    def further_seeds(self) -> tuple[int, ...]:
        return ()  # there are no other contents

    def grad(self, seed: int) -> torch.Tensor | None:
        return self.slot.grad


def judge(
    operator: Operator,
    case: Case,
    direction: str,
    device: str,
    baseline: Implementation | None,
    slot: Slot,
) -> Callable[[Result], str | None]:
    """What says why an output is wrong for the contents that ``slot`` holds now, or None.

    The answers are computed here and kept, so that the slot may be refilled afterwards.
    """
    oracle = _AtSlot(operator, case, direction, device, baseline, slot)
    answers, bounds, terms = oracle.answer(0), oracle.bounds, oracle.terms(0)
    dtypes = [form.dtype for form in oracle.forms]
    del oracle

    def decide(output: Result) -> str | None:
        got = tensors_of(output)
        due = len(answers)
        if isinstance(output, Leading) and direction == FORWARD:
            due = min(due, max(len(got), operator.graded))
        if len(got) != due:
            return f"{len(got)} tensors where {due} are due"
        for one, answer, bound, size, dtype in zip(
            got, answers, bounds, terms, dtypes, strict=False
        ):
            if one.dtype != dtype:
                return f"{one.dtype} where {dtype} is due"
            if one.shape != answer.shape:
                return f"shape {tuple(one.shape)} where {tuple(answer.shape)} is due"
            error = measure(one, answer, bound, size)
            if error.misplaced:
                at, value, wanted = error.first_misplaced
                return f"{error.misplaced} misplaced NaN or Inf; at {at} {value}, not {wanted}"
            if bound.share(error) > 1.0:
                at, value, wanted = error.worst
                share = bound.share(error)
                return f"error {share:.3g} times what is allowed; at {at} {value}, not {wanted}"
        return None

    return decide
