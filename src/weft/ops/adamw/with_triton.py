"""AdamW in Triton: each program steps a block of elements and accesses each of seven streams once.

One parameter is passed by its addresses; a list by a table of them (``parameter_groups.py``), in one launch.
Clipping needs two kernels before: partial sums of squares of one chunk each, and one program that adds them
in a fixed order and leaves the factor on the device, where the step reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.backends.triton_jit import triton
from weft.core import Implementation
from weft.ops.adamw.parameter_groups import Group, ListsKey, prepare_groups, step_groups
from weft.ops.adamw.step import Numbers, PreparedStep, StepLists, Tensors, forward_of
from weft.ops.adamw.triton_kernels import (
    TYPES,
    adamw_factors,
    adamw_many,
    adamw_norm,
    adamw_norm_many,
    adamw_one,
    aot_kernels,
)

Groups = tuple[Group, ...]


@dataclass(frozen=True)
class Config:
    """``block`` elements at a time by ``warps`` warps; a program steps ``chunk`` elements of a list."""

    block: int = 1024
    warps: int = 4
    chunk: int = 4096


CANDIDATES = tuple(Config(b, w, c * b) for b in (1024, 2048) for w in (4, 8) for c in (1, 2, 4, 8))
SHIPPED = Config()
NORM_BLOCK, NORM_CHUNK = 2048, 32768


def run(lists: StepLists, numbers: Numbers) -> None:
    """Take one step over the lists; the host does not wait for the device."""
    run_with(SHIPPED, lists, numbers)


def run_with(config: Config, lists: StepLists, numbers: Numbers) -> None:
    """Take one step with one launch configuration."""
    step_groups(lists, lambda dense, groups: _step(config, dense, groups, numbers))


def begin(lists: Sequence[Tensors], key: ListsKey, clips: bool) -> PreparedStep:
    """Write the tables of contiguous lists; return the rest of the step, which only launches."""
    groups = prepare_groups(lists, key, SHIPPED.chunk, *[NORM_CHUNK] * clips)
    return lambda numbers: _step(SHIPPED, lists, groups, numbers) if groups else None


def _step(config: Config, lists: Sequence[Tensors], groups: Groups, n: Numbers) -> None:
    factors, step_on_device = lists[0][0], isinstance(n.step, torch.Tensor)
    if n.clips or step_on_device:
        factors = _factors(lists, groups, n)
    size, correction = (0.0, 0.0) if step_on_device else n.corrections()
    numbers = (
        *(1 - n.lr * n.weight_decay, size, correction, n.eps),
        *(n.beta1, 1 - n.beta1, n.beta2, 1 - n.beta2),
        *(n.seed, 0 if step_on_device else n.step),
    )
    for group_index, group in enumerate(groups):
        options = {
            "MASTER": group.masters,
            "STOCHASTIC": n.stochastic,
            "FACTORS": n.clips or step_on_device,
            "BLOCK": config.block,
            "num_warps": config.warps,
        }
        if group.is_single:
            tensors = group.single_tensors(lists)
            size_of = tensors[0].numel()
            grid = (triton.cdiv(size_of, config.block),)
            adamw_one[grid](*tensors, factors, size_of, *numbers, group_index, **options)
            continue
        table = group.table(config.chunk)
        types = dict(zip("PGM", (TYPES[d] for d in group.dtypes), strict=True))
        adamw_many[(table.chunks,)](
            table.data,
            factors,
            table.rows,
            *numbers,
            group_index,
            **types,
            ALIGNED=group.aligned,
            CHUNK=config.chunk,
            **options,
        )


def _factors(lists: Sequence[Tensors], groups: Groups, n: Numbers) -> torch.Tensor:
    """Compute [clip, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), t] in float32 on the device."""
    device = groups[0].device
    factors = torch.empty(4, dtype=torch.float32, device=device)
    partials, count = factors, 0
    if n.clips:
        count = sum(g.count_chunks(NORM_CHUNK) for g in groups)
        partials = torch.empty(count, dtype=torch.float32, device=device)
        _norm(lists[1], groups, partials)
    step_on_device = isinstance(n.step, torch.Tensor)
    size, correction = (0.0, 0.0) if step_on_device else n.corrections()
    adamw_factors[(1,)](
        partials,
        n.step if step_on_device else factors,
        factors,
        count,
        n.lr,
        _log(n.beta1),
        _log(n.beta2),
        size,
        correction,
        n.max_norm,
        CLIPS=n.clips,
        MOVING=step_on_device,
        BLOCK=1024,
        num_warps=4,
    )
    return factors


def _norm(grads: Tensors, groups: Groups, partials: torch.Tensor) -> None:
    first = 0
    options = {"CHUNK": NORM_CHUNK, "BLOCK": NORM_BLOCK, "num_warps": 8}
    for group in groups:
        if group.is_single:
            grad = grads[group.indices[0]]
            grid = (triton.cdiv(grad.numel(), NORM_CHUNK),)
            adamw_norm[grid](grad, partials, grad.numel(), first, **options)
            first += grid[0]
            continue
        table, kind = group.table(NORM_CHUNK), TYPES[group.dtypes[1]]
        adamw_norm_many[(table.chunks,)](
            table.data, partials, table.rows, first, G=kind, ALIGNED=group.aligned, **options
        )
        first += table.chunks


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


IMPLEMENTATION = Implementation(
    operator="adamw",
    backend="triton",
    forward=forward_of(run),
    aot_kernels=aot_kernels(SHIPPED.block, SHIPPED.warps, SHIPPED.chunk),
    idea="one pass over all parameters, by a table",
)
