"""AdamW in Triton: a block of elements a program, each of seven streams touched once.

One parameter goes by its addresses; a list by a table of them (``tables.py``), in one launch. With
clipping two kernels come before: partial sums of squares, a chunk each, and one program that adds
them in a fixed order and leaves the factor on the device, where the step reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.backends.triton_jit import triton
from weft.core import Implementation
from weft.ops.adamw.kernels import (
    TYPES,
    adamw_factors,
    adamw_many,
    adamw_norm,
    adamw_norm_many,
    adamw_one,
    specimens,
)
from weft.ops.adamw.lists import Begun, Numbers, Tensors, forward_of
from weft.ops.adamw.tables import Group, Key
from weft.ops.adamw.walk import laid, walk

Groups = tuple[Group, ...]


@dataclass(frozen=True)
class Config:
    """``block`` elements at a time by ``warps`` warps; a program of a list takes ``chunk``."""

    block: int = 1024
    warps: int = 4
    chunk: int = 4096


CANDIDATES = tuple(Config(b, w, c * b) for b in (1024, 2048) for w in (4, 8) for c in (1, 2, 4, 8))
SHIPPED = Config()
NORM_BLOCK, NORM_CHUNK = 2048, 32768


def run(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    masters: Tensors,
    numbers: Numbers,
) -> None:
    """One step over the lists; nothing waits for the device."""
    run_with(SHIPPED, params, grads, exp_avgs, exp_avg_sqs, masters, numbers)


def run_with(config: Config, *given: Any) -> None:
    """The step by one launch configuration."""
    *lists, numbers = given
    walk(lists, lambda dense, groups: _step(config, dense, groups, numbers))


def begin(lists: Sequence[Tensors], key: Key, clips: bool) -> Begun:
    """The step over contiguous lists, all but its numbers and its launches."""
    groups = laid(lists, key, SHIPPED.chunk, *[NORM_CHUNK] * clips)
    return lambda numbers: _step(SHIPPED, lists, groups, numbers) if groups else None


def _step(config: Config, lists: Sequence[Tensors], groups: Groups, n: Numbers) -> None:
    factors, moving = lists[0][0], isinstance(n.step, torch.Tensor)
    if n.clips or moving:
        factors = _factors(lists, groups, n)
    size, widen = (0.0, 0.0) if moving else n.corrections()
    numbers = (
        *(1 - n.lr * n.weight_decay, size, widen, n.eps),
        *(n.beta1, 1 - n.beta1, n.beta2, 1 - n.beta2),
        *(n.seed, 0 if moving else n.step),
    )
    for place, group in enumerate(groups):
        how = {
            "MASTER": group.masters,
            "STOCHASTIC": n.stochastic,
            "FACTORS": n.clips or moving,
            "BLOCK": config.block,
            "num_warps": config.warps,
        }
        if group.alone:
            tensors = group.one(lists)
            size_of = tensors[0].numel()
            grid = (triton.cdiv(size_of, config.block),)
            adamw_one[grid](*tensors, factors, size_of, *numbers, place, **how)
            continue
        table = group.table(config.chunk)
        types = dict(zip("PGM", (TYPES[d] for d in group.kind), strict=True))
        adamw_many[(table.chunks,)](
            table.data,
            factors,
            table.rows,
            *numbers,
            place,
            **types,
            ALIGNED=group.wide,
            CHUNK=config.chunk,
            **how,
        )


def _factors(lists: Sequence[Tensors], groups: Groups, n: Numbers) -> torch.Tensor:
    """[clip, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), t] in float32 on the device."""
    device = groups[0].device
    factors = torch.empty(4, dtype=torch.float32, device=device)
    partials, count = factors, 0
    if n.clips:
        count = sum(g.chunks(NORM_CHUNK) for g in groups)
        partials = torch.empty(count, dtype=torch.float32, device=device)
        _norm(lists[1], groups, partials)
    moving = isinstance(n.step, torch.Tensor)
    size, widen = (0.0, 0.0) if moving else n.corrections()
    adamw_factors[(1,)](
        partials,
        n.step if moving else factors,
        factors,
        count,
        n.lr,
        _log(n.beta1),
        _log(n.beta2),
        size,
        widen,
        n.max_norm,
        CLIPS=n.clips,
        MOVING=moving,
        BLOCK=1024,
        num_warps=4,
    )
    return factors


def _norm(grads: Tensors, groups: Groups, partials: torch.Tensor) -> None:
    first = 0
    how = {"CHUNK": NORM_CHUNK, "BLOCK": NORM_BLOCK, "num_warps": 8}
    for group in groups:
        if group.alone:
            grad = grads[group.rows[0]]
            grid = (triton.cdiv(grad.numel(), NORM_CHUNK),)
            adamw_norm[grid](grad, partials, grad.numel(), first, **how)
            first += grid[0]
            continue
        table, kind = group.table(NORM_CHUNK), TYPES[group.kind[1]]
        adamw_norm_many[(table.chunks,)](
            table.data, partials, table.rows, first, G=kind, ALIGNED=group.wide, **how
        )
        first += table.chunks


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


IMPLEMENTATION = Implementation(
    operator="adamw",
    name="triton",
    backend="triton",
    forward=forward_of(run),
    specimens=specimens(SHIPPED.block, SHIPPED.warps, SHIPPED.chunk),
    idea="one pass over all parameters, by a table",
)
