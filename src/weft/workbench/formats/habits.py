"""How a reference behaves, found by running it a few times: what it writes, whether it draws.

A tensor that it overwrites and never reads is a buffer for the answer; one that it reads and then
overwrites is changed in place. Neither can be told from the file, and a candidate may do the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from weft.core import WeftError
from weft.workbench.formats.data import Form, results
from weft.workbench.formats.on_cpu import on_cpu
from weft.workbench.formats.problem import Compute, Generator, Habits, Point, own_random
from weft.workbench.memory import bits
from weft.workbench.slots import tensors_of

Answer = list[torch.Tensor]


def observe(
    narrow: Compute,
    exact: Compute,
    point: Point,
    generator: Generator,
    device: str,
    weights: Sequence[torch.Tensor] = (),
) -> Habits:
    """Run a reference at one point and say how it behaves.

    Raises :class:`WeftError` where it cannot be run here, or not in float64.
    """
    form, drawn = generator.data(point, 0)
    tensors = [t.to(device) for t in drawn]

    def run(given: Sequence[torch.Tensor], seed: int, wide: bool = False) -> tuple[Answer, Answer]:
        copies = [t.clone() for t in given]
        torch.manual_seed(seed)
        compute = exact if wide else narrow
        with torch.no_grad(), on_cpu() if generator.elsewhere else nullcontext():
            answer = results(compute(form.build(copies)[0], point))
        changed = [c for c, t in zip(copies, given, strict=True) if not _same([c], [t])]
        return (tensors_of(results(tuple(changed)) if answer is None else answer), copies)

    with own_random():
        answer, after = _said("the reference raised", run, tensors, 1)
        wide = [t.double() if t.is_floating_point() else t for t in tensors]
        truth, _ = _said("the reference cannot be run in float64", run, wide, 1, True)
        _comparable(answer, truth)
        answer = [a.clone() for a in answer]
        again, _ = run(tensors, 1)
        other, _ = run(tensors, 2)
        steady = _same(answer, again)
        changed = [n for n, t in enumerate(tensors) if not _same([t], [after[n]])]
        unread = _unread(run, tensors, answer, changed) if steady else []
    return Habits(
        buffers=unread,
        in_place=[form.inputs[n].name for n in changed if n not in unread],
        random=steady and not _same(answer, other),
        steady=steady,
        longest=_longest(form, answer, weights),
    )


def _unread(
    run: Callable[..., tuple[Answer, Answer]],
    tensors: Sequence[torch.Tensor],
    answer: Answer,
    changed: Sequence[int],
) -> list[int]:
    """The numbers of those tensors, formed as an answer is, whose contents make no difference."""
    kinds = {(a.shape, a.dtype) for a in answer}
    found = []
    for number, tensor in enumerate(tensors):
        if number not in changed and (tensor.shape, tensor.dtype) not in kinds:
            continue
        if not tensor.numel() or len(tensors) == 1:
            continue
        others = [t.clone() for t in tensors]
        others[number].fill_(math.nan if tensor.is_floating_point() else 1)
        other, _ = _said("the reference raised", run, others, 1)
        if _same(answer, other):
            found.append(number)
    return found


def _same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    if [x.shape for x in a] != [y.shape for y in b]:
        return False
    pairs = zip(a, b, strict=True)
    return all(bool((bits(x) == bits(y)).all()) for x, y in pairs)


def _said(what: str, run: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return run(*arguments)
    except WeftError:
        raise
    except torch.OutOfMemoryError as error:
        raise WeftError(what, got="out of memory") from error
    except Exception as error:  # the file's own, whatever it is
        text = " ".join(str(error).split())[:300]
        raise WeftError(what, got=f"{type(error).__name__}: {text}") from error


def _comparable(answer: Answer, exact: Answer) -> None:
    for one in answer:
        if not isinstance(one, torch.Tensor):
            raise WeftError("the reference", expected="tensors as its answer", got=type(one))
    if not answer or [a.shape for a in answer] != [e.shape for e in exact]:
        raise WeftError(
            "the reference in float64",
            expected=f"the shapes of its own answer, {[tuple(a.shape) for a in answer]}",
            got=[tuple(e.shape) for e in exact],
        )


def _longest(form: Form, answer: Answer, weights: Sequence[torch.Tensor]) -> int:
    """The most terms that a sum may have, one after another: along a dimension, or, of all that
    makes one element, a tenth, since nobody adds those in one chain."""
    sizes = [n for i in form.inputs for n in i.shape] + [n for w in weights for n in w.shape]
    least = max(1, min(a.numel() for a in answer))
    return max([1, *sizes, *(i.numel // least // 10 for i in form.inputs)])
