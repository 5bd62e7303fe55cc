"""Rule ``growth``: the error of a sum in a short type may not grow with the length of the sum.

A sum of m partial sums in bf16 or fp16 rounds m times. Its error relative to the answer grows like sqrt(m),
while one that is accumulated in float32 and rounded at its end has the same relative error at any length. The
bounds of ``drift`` have to allow several roundings, because other code may round each of its steps, so a
few dozen partial sums pass them.

Roundings of steps are told from those of a long sum by a second length. Of one input only an eighth of the
entries along one dimension stays, all others become zero. Where the reference is additive in that input
(the answers to the eighth and to the rest add up to the whole answer), roundings in bf16 and fp16 are
independent of the scale, and those of single steps stay as large as the answer: e(eighth) = e(whole), with e
the mean squared error in excess of the baseline's, relative to the answer. Adding zeros rounds nothing, so
for partial sums in the short type e(whole) = 8 e(eighth). The rule refuses more than 4 e(eighth).

It looks only at errors of over 2.75 times the baseline's. In units of one rounding, m partial sums that are
rounded and then added up have a mean squared error of 1 + (m - 1) / 2 and one more for the end, so a product
that is split into eight parts along K (2.35 times the baseline's error) passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from weft.core import FORWARD
from weft.workbench.calls.buffers import tensors_of
from weft.workbench.calls.inputs import KEPT_PARTS, thinned_seed
from weft.workbench.check.oracle import Oracle
from weft.workbench.check.reference import forward_in_float64
from weft.workbench.check.tolerance import Measured, measure, rms

LARGE_ERROR = 2.75  # times the baseline's error, above which the rule looks
GROWTH = 4.0  # of e, where theory says 8 for a sum in the short type and 1 for all others
MIN_ELEMENTS = 256  # of an output: an eighth of them still estimates a mean square within a fifth
MIN_TERMS = 16  # entries along the dimension
MAX_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}  # of all inputs: each dimension costs three references
ADDITIVE = 1e-9  # error in float64, relative to the answer, of a reference that is additive

Call = Callable[[int], Sequence[torch.Tensor]]


def describe_growth(oracle: Oracle, seed: int, errors: Sequence[Measured], call: Call) -> str:
    """Return how the error of a candidate grows with the length of a sum, '' if it does not.

    ``errors`` are those at this seed; ``call(seed)`` returns the candidate's outputs at another seed.
    """
    if oracle.direction != FORWARD or oracle.may_split:
        return ""
    if sum(i.numel for i in oracle.case.inputs) > MAX_ELEMENTS[torch.device(oracle.device).type]:
        return ""
    suspects = [i for i, error in enumerate(errors) if _is_suspect(oracle, i, error)]
    for index, dim in _dimensions(oracle) if suspects else ():
        thinned = thinned_seed(seed, index, dim)
        if not _is_additive(oracle, seed, thinned, index):
            continue
        outputs = call(thinned)
        if len(outputs) != len(errors):
            return ""
        for i in suspects:
            whole, part = _excess(oracle, seed, i, errors[i]), 0.0
            answer = oracle.answer(thinned)[i]
            if outputs[i].shape != answer.shape or not rms(answer):
                continue
            part = _excess(oracle, thinned, i, measure(outputs[i], answer))
            if whole > GROWTH * part:
                size = oracle.case.inputs[index].shape[dim]
                return (
                    f"RMS error {math.sqrt(whole):.3g} of the answer, and {math.sqrt(part):.3g} where only "
                    f"{size // KEPT_PARTS} of {size} terms are not zero (dimension {dim} of "
                    f"{oracle.case.inputs[index].name}): a sum is kept in {oracle.forms[i].dtype}"
                )
    return ""


def _is_suspect(oracle: Oracle, i: int, error: Measured) -> bool:
    dtype, bound = oracle.forms[i].dtype, oracle.bounds[i]
    is_short = dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(torch.float32).eps
    return is_short and error.compared >= MIN_ELEMENTS and error.rms > LARGE_ERROR * bound.baseline_rms > 0.0


def _dimensions(oracle: Oracle) -> Iterator[tuple[int, int]]:
    """Yield the dimensions that can be thinned: of floating-point inputs that store each element."""
    for index, spec in enumerate(oracle.case.inputs):
        if getattr(torch, spec.dtype).is_floating_point and spec.layout != "expanded":
            yield from ((index, dim) for dim, n in enumerate(spec.shape) if n >= MIN_TERMS)


def _is_additive(oracle: Oracle, seed: int, thinned: int, index: int) -> bool:
    """Return True if the answers to the kept entries and to the others add up to the whole answer."""
    rest = [t.double() if t.is_floating_point() else t for t in oracle.inputs(seed)]
    rest[index] = rest[index] - oracle.inputs(thinned)[index].double()
    try:
        others = tensors_of(forward_in_float64(oracle.operator, rest, oracle.case))
        parts = oracle.answer(thinned)
    except Exception:  # noqa: BLE001 - a reference may raise anything at inputs with zeros
        return False
    # A candidate may return the leading outputs alone, and the oracle then answers with those.
    for whole, part, other in zip(oracle.answer(seed), parts, others, strict=False):
        if not (whole.isfinite().all() and rms(whole - part - other) <= ADDITIVE * rms(whole)):
            return False
    return True


def _excess(oracle: Oracle, seed: int, i: int, error: Measured) -> float:
    """Return the mean squared error in excess of the baseline's, relative to the answer's mean square."""
    answer = oracle.answer(seed)[i]
    baseline = measure(oracle.baseline_outputs(seed)[i], answer)
    return max(error.rms**2 - baseline.rms**2, 0.0) / rms(answer) ** 2
