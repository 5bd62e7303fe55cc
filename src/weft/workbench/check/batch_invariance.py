"""Batch invariance: do the bits of a row depend on the rows that are computed with it?

An implementation computes a whole batch, and then parts of it: a few rows, at several places, as views of
the batch and in memory of their own, and the batch cut into pieces. A row is *invariant* if it has the same
bits each time, in the outputs and in the gradients of the inputs that have rows. Training and serving that
compute a sample beside others need this to repeat a result: He and others, "Defeating Nondeterminism in LLM
Inference" (Thinking Machines, 2025).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch

from weft import backends
from weft.core import BACKWARD, FORWARD, Case, Implementation, Operator, Support, WeftError, registry
from weft.core.implementation import INVARIANT
from weft.core.text import printable
from weft.dispatch import invariance
from weft.workbench.calls import inputs as call_inputs
from weft.workbench.calls.bind import bind, differentiable_outputs
from weft.workbench.calls.buffers import tensors_of
from weft.workbench.calls.guarded_memory import bits
from weft.workbench.calls.make_calls import call_once

SIZES = (1, 2, 7, 8, 64, 1000, 4096)  # rows of a part
PLACES = 5  # at which a part of each size begins: the first rows, the last, and three at random
BATCH_ROWS = 8192
# Elements of the largest input that has rows: they limit the rows of a batch, to 16 at least.
MAX_ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 22}
INTERPRETED_ROWS = 64  # of a kernel that is interpreted on a CPU
SIMULATED_ROWS = 16  # of a kernel whose every thread is simulated: the fewest that a batch has
SMALL_ROW = 512  # elements of a row on a CPU, at most: the longest such row is compared
CUTS = ("pieces of 64 rows", "pieces of random sizes", "halves")


@dataclass(frozen=True, kw_only=True)
class RowsVerdict:
    """Rows of one implementation at one case and direction; the JSON output has these field names.

    ``rows`` are those of the whole batch. ``compared`` counts comparisons of a row and ``differing`` those
    that showed other bits; ``smallest`` is the smallest number of rows in a part with such a row, and
    ``rows_differing`` the number of rows that differed at least once. ``reason`` says why nothing was
    compared; it is empty otherwise.
    """

    operator: str
    implementation: str
    case: str
    direction: str
    rows: int = 0
    compared: int = 0
    differing: int = 0
    rows_differing: int = 0
    smallest: int | None = None
    reason: str = ""

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> RowsVerdict:
        """Return the verdict of a worker's reply, every field converted: the worker is not trusted."""
        smallest = fields["smallest"]
        return RowsVerdict(
            operator=str(fields["operator"]),
            implementation=str(fields["implementation"]),
            case=str(fields["case"]),
            direction=str(fields["direction"]),
            rows=int(fields["rows"]),
            compared=int(fields["compared"]),
            differing=int(fields["differing"]),
            rows_differing=int(fields["rows_differing"]),
            smallest=None if smallest is None else int(smallest),
            reason=printable(str(fields["reason"])),
        )

    @property
    def is_invariant(self) -> bool:
        return not self.reason and self.differing == 0


@dataclass(frozen=True)
class Part:
    """Rows ``start`` to ``start + size`` of the batch: a view of it, or (``copied``) other memory."""

    start: int
    size: int
    copied: bool


def default_cases(operator: Operator, device: str) -> list[Case]:
    """Return one suitable case of each dtype: the first that is timed on a GPU, on a CPU a small one."""
    chosen: dict[str, Case] = {}
    for case in operator.select("bench" if device == "cuda" else "check", device):
        if unsuitable(operator, case) or any(i.values != "normal" for i in case.inputs):
            continue
        best = chosen.setdefault(case.dtype, case)
        length = _elements_of_a_row(operator, case)
        if device != "cuda" and _elements_of_a_row(operator, best) < length <= SMALL_ROW:
            chosen[case.dtype] = case
    return list(chosen.values())


def _elements_of_a_row(operator: Operator, case: Case) -> int:
    return max(i.numel // max(i.shape[0], 1) for i in case.inputs if i.name in operator.rows)


def unsuitable(operator: Operator, case: Case) -> str:
    """Return why the rows of a case cannot be compared, or an empty string."""
    if not operator.rows:
        return "outputs without rows that are independent of each other"
    inputs = [i for i in case.inputs if i.name in operator.rows]
    if any(not i.shape for i in inputs) or max(len(i.shape) for i in inputs) < 2:
        return "a single row"  # the one dimension that a norm of it is over
    if len({i.shape[0] for i in inputs}) > 1:
        return "inputs whose first dimensions differ, such as pages: they count no common rows"
    if case.draw is not None and operator.draw is None:
        return "inputs that are drawn for this number of rows alone"
    if any(i.layout != "contiguous" for i in inputs):
        return "an input that is not contiguous, so that a part of it has yet another layout"
    return ""


def batch_case(operator: Operator, case: Case, device: str, support: Support) -> Case:
    """Return the case with as many rows as the batch has; its name stays that of ``case``."""
    rows = BATCH_ROWS if support.timed else INTERPRETED_ROWS
    if "simulator" in support.reason:
        rows = SIMULATED_ROWS
    elements = max(_elements_of_a_row(operator, case), 1)
    rows = min(rows, max(SIMULATED_ROWS, MAX_ELEMENTS[device] // elements))
    inputs = tuple(
        replace(i, shape=(rows, *i.shape[1:])) if i.name in operator.rows else i for i in case.inputs
    )
    batch = replace(case, inputs=inputs)
    return replace(batch, draw=partial(operator.draw, batch)) if operator.draw else batch


def parts(rows: int, generator: random.Random) -> Iterator[Part]:
    """Yield the parts of a batch that are computed by themselves."""
    for size in (s for s in SIZES if s < rows):
        starts = [0, rows - size, *(generator.randrange(rows - size + 1) for _ in range(PLACES - 2))]
        for number, start in enumerate(starts):
            yield Part(start, size, copied=number % 2 == 1)
    for number, cut in enumerate(CUTS):
        start = 0
        while start < rows:
            size = _piece(cut, rows, generator)
            yield Part(start, min(size, rows - start), copied=number % 2 == 1)
            start += size


def _piece(cut: str, rows: int, generator: random.Random) -> int:
    if cut == "halves":
        return -(-rows // 2)
    if cut == "pieces of random sizes":
        return generator.randint(1, max(1, rows // 8))
    return 64 if rows > 64 else 4


def compare_rows(
    operator: Operator, implementation: Implementation, case: Case, direction: str, device: str, seed: int
) -> RowsVerdict:
    """Compare the rows of one implementation; ``case`` gives the columns, dtype and parameters.

    Raises :class:`WeftError` for a case whose rows cannot be compared. What the implementation raises is
    the verdict's ``reason``.
    """
    if reason := unsuitable(operator, case):
        raise WeftError(
            f"the rows of {operator.name} {case.name} cannot be compared",
            expected="contiguous inputs with rows",
            got=reason,
        )
    nothing = RowsVerdict(
        operator=operator.name, implementation=implementation.name, case=case.name, direction=direction
    )
    support = backends.support(implementation, case, device, direction)
    batch = batch_case(operator, case, device, support)
    if not (support := backends.support(implementation, batch, device, direction)):
        return replace(nothing, reason=support.reason)
    try:
        return _compare(nothing, operator, implementation, batch, direction, device, seed)
    except torch.OutOfMemoryError:
        return replace(nothing, reason="out of memory")
    except WeftError as error:
        return replace(nothing, reason=str(error).splitlines()[0])
    except Exception as error:  # noqa: BLE001 - a candidate may raise anything
        return replace(nothing, reason=f"raised {type(error).__name__}: {error}")


def compare_invariant_rows(
    operator: Operator, impl: str | None, case: Case, direction: str, device: str, seed: int
) -> RowsVerdict:
    """Compare the rows of calls with ``batch_invariant=True``, as a user makes them; arguments as above.

    ``impl`` None leaves the choice to dispatch, once for each part. Gradients go through autograd. The
    verdict names the variant that runs the case; its ``reason`` is the refusal if there is none.
    """
    from weft import ops  # not above: it takes 0.4 s, and a judgement imports this module but calls none

    try:
        variant = invariance.variant_at(case, operator.name, device, impl, grad=direction == BACKWARD)
    except WeftError as error:
        return RowsVerdict(
            operator=operator.name,
            implementation=impl or "dispatch",
            case=case.name,
            direction=direction,
            reason=error.got or str(error),
        )

    function = getattr(ops, operator.name)
    options: dict[str, Any] = {"impl": impl, "batch_invariant": True}
    if "reduction" in signature(function).parameters:
        options["reduction"] = "none"  # the loss of each row

    def forward(*inputs: Any, **params: Any) -> Any:
        named = dict(zip([i.name for i in case.inputs], inputs, strict=True))
        return function(**operator.public_arguments({**named, **params}), **options)

    dispatched = replace(variant, forward=forward, backward=None)
    return compare_rows(operator, dispatched, case, direction, device, seed)


def _compare(
    nothing: RowsVerdict,
    operator: Operator,
    implementation: Implementation,
    batch: Case,
    direction: str,
    device: str,
    seed: int,
) -> RowsVerdict:
    inputs = call_inputs.make(batch, device, seed)
    has_rows = [i.name in operator.rows for i in batch.inputs]
    rows = next(i.shape[0] for i, its in zip(batch.inputs, has_rows, strict=True) if its)
    grad = None
    if direction == BACKWARD:
        outputs = call_once(bind(operator, implementation, batch, FORWARD, inputs))
        like = differentiable_outputs(operator, outputs)
        grad = call_inputs.gradient_like(like, seed, device=device)
    # The gradients of several outputs are stacked: their rows come second.
    axis = 0 if operator.differentiable_outputs == 1 else 1

    def compute(part: Part) -> list[torch.Tensor]:
        def cut(t: torch.Tensor, dim: int = 0) -> torch.Tensor:
            view = t.narrow(dim, part.start, part.size)
            return view.clone() if part.copied else view

        own = [cut(t) if its else t for t, its in zip(inputs, has_rows, strict=True)]
        its_grad = None if grad is None else cut(grad, axis)
        results = tensors_of(call_once(bind(operator, implementation, batch, direction, own, its_grad)))
        if direction == FORWARD:
            return list(results)
        # Optional inputs are in some cases only.
        names = [i.name for i in batch.inputs if i.name in operator.differentiable]
        return [result for name, result in zip(names, results, strict=True) if name in operator.rows]

    whole = [t.clone() for t in compute(Part(0, rows, copied=False))]
    if not whole or any(t.dim() == 0 or t.shape[0] != rows for t in whole):
        return replace(nothing, reason="it returns nothing that has rows in this direction")
    compared = differing = 0
    differed = torch.zeros(rows, dtype=torch.bool, device=whole[0].device)
    smallest: int | None = None
    for part in parts(rows, random.Random(seed)):
        wrong = _differing_rows(compute(part), [t.narrow(0, part.start, part.size) for t in whole])
        count = int(wrong.count_nonzero())
        compared += part.size
        differing += count
        if count:
            differed[part.start : part.start + part.size] |= wrong
            smallest = min(smallest or part.size, part.size)
    return replace(
        nothing,
        rows=rows,
        compared=compared,
        differing=differing,
        rows_differing=int(differed.count_nonzero()),
        smallest=smallest,
    )


def _differing_rows(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a mask of the rows with other bits in any of the tensors; all NaNs are equal."""
    rows = expected[0].shape[0]
    wrong = torch.zeros(rows, dtype=torch.bool, device=expected[0].device)
    for one, other in zip(got, expected, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            raise WeftError("a part has another form", expected=tuple(other.shape), got=tuple(one.shape))
        if one.numel():
            differ = bits(one.contiguous()) != bits(other.contiguous())
            if one.is_floating_point():
                differ &= ~(one.isnan() & other.isnan())
            wrong |= differ.reshape(rows, -1).any(1)
    return wrong


def markdown() -> str:
    """Return the table of operators that can be asked for batch invariance, and what runs them."""
    lines = ["| operator | on a CPU | on a GPU | gradients of |", "| --- | --- | --- | --- |"]
    for name in registry.operator_names():
        operator = registry.operator(name)
        variants = [i.invariant for i in registry.implementations(name) if i.invariant is not None]
        by_device = [
            ", ".join(f"`{n}`" for n in invariance.PREFERENCE[device] if _runs(variants, n, device))
            for device in ("cpu", "cuda")
        ]
        inputs = ", ".join(f"`{i}`" for i in operator.differentiable if i in operator.rows)
        if variants:
            lines.append(f"| {name} | {by_device[0]} | {by_device[1]} | {inputs or '–'} |")
    return "\n".join(lines)


def _runs(variants: Sequence[Implementation], name: str, device: str) -> bool:
    return any(v.name == name + INVARIANT and device in v.devices for v in variants)
