"""Before kernels that walk memory: tensors that lie unlike each other give way to copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.ops._shared.layout import dense
from weft.ops.adamw.lists import Tensors
from weft.ops.adamw.tables import Group, Key, key_of, layout_of

Step = Callable[[Sequence[Tensors], tuple[Group, ...]], None]


def laid(lists: Sequence[Tensors], key: Key, *chunks: int) -> tuple[Group, ...]:
    """The groups of contiguous tensors, their tables for these chunks on the device."""
    groups = layout_of(lists, key).groups
    for group in groups:
        for chunk in () if group.alone else chunks:
            group.table(chunk)
    return groups


def walk(lists: Sequence[Tensors], step: Step) -> None:
    """``step(lists, groups)`` over [params, grads, exp_avgs, exp_avg_sqs, masters or none]."""
    if not lists[0]:
        return
    key = key_of(lists)
    if key is not None:
        if groups := layout_of(lists, key).groups:
            step(lists, groups)
        return
    present = [x for x in lists if x]
    uneven = [i for i, each in enumerate(zip(*present, strict=True)) if not _alike(each)]
    copied = [list(x) for x in lists]
    for xs in copied:
        for i in uneven:
            if xs:
                xs[i] = xs[i].contiguous()
    if groups := tuple(layout_of(copied).groups):
        step(copied, groups)
    for number, (xs, given) in enumerate(zip(copied, lists, strict=True)):
        for i in uneven:
            if number != 1 and xs and xs[i] is not given[i]:
                given[i].copy_(xs[i])


def _alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these have no gaps and one order, so that one index walks through all of them."""
    first = tensors[0]
    return dense(first) is first and all(t.stride() == first.stride() for t in tensors)
