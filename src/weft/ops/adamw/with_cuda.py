"""AdamW in CUDA C++: 16-byte vectors of every stream, one launch a list; see adamw.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float
from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import Implementation
from weft.ops.adamw.lists import Begun, Numbers, Tensors, forward_of
from weft.ops.adamw.tables import Group, Key, Kind
from weft.ops.adamw.walk import laid, walk

KERNELS = ("adamw_one", "adamw_many", "adamw_norm", "adamw_norm_many", "adamw_factors")
NAMES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
THREADS, CHUNK, NORM_CHUNK = 256, 4096, 32768
Groups = tuple[Group, ...]
FLOATS: Kind = (torch.float32, torch.float32, torch.float32)


@cache
def source(kind: Kind = FLOATS, master: bool = False, stochastic: bool = False) -> CudaSource:
    """adamw.cu compiled for the dtypes of parameter, gradient and averages."""
    told = "-".join(str(d).removeprefix("torch.") for d in kind)
    return CudaSource(
        file=Path(__file__).with_name("adamw.cu"),
        kernels=KERNELS,
        defines=(
            *zip(("WEFT_P", "WEFT_G", "WEFT_M"), (NAMES[d] for d in kind), strict=True),
            ("MASTER", str(int(master))),
            ("STOCHASTIC", str(int(stochastic))),
            ("THREADS", str(THREADS)),
            ("CHUNK", str(CHUNK)),
            ("NORM_CHUNK", str(NORM_CHUNK)),
        ),
        label=told + "-master" * master + "-stochastic" * stochastic,
    )


def run(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    masters: Tensors,
    numbers: Numbers,
) -> None:
    """One step over the lists; nothing waits for the device."""
    walk(
        (params, grads, exp_avgs, exp_avg_sqs, masters),
        lambda dense, groups: _step(dense, groups, numbers),
    )


def begin(lists: Sequence[Tensors], key: Key, clips: bool) -> Begun:
    """The step over contiguous lists, all but its numbers and its launches."""
    groups = laid(lists, key, CHUNK, *[NORM_CHUNK] * clips)
    return lambda numbers: _step(lists, groups, numbers) if groups else None


def _step(lists: Sequence[Tensors], groups: Groups, n: Numbers) -> None:
    moving = isinstance(n.step, torch.Tensor)
    factors = _factors(lists[1], groups, n) if n.clips or moving else 0
    size, widen = (0.0, 0.0) if moving else n.corrections()
    floats = (
        *(1 - n.lr * n.weight_decay, size, widen, n.eps),
        *(n.beta1, 1 - n.beta1, n.beta2, 1 - n.beta2),
    )
    turn = 0 if isinstance(n.step, torch.Tensor) else int(n.step)
    for place, group in enumerate(groups):
        program = source(group.kind, group.masters, n.stochastic)
        numbers = (*map(c_float, floats), n.seed, turn, place)
        if not group.alone:
            table = group.table(CHUNK)
            program["adamw_many"](
                *(table.chunks, THREADS),
                *(table.data, table.rows, int(group.wide), factors, *numbers),
            )
            continue
        tensors, count = group.one(lists), group.addresses[0][-1]
        block = THREADS * (4 if all(d.itemsize == 4 for d in group.kind) else 8)
        program["adamw_one"](
            *(-(-count // block), THREADS), *tensors, count, int(group.wide), factors, *numbers
        )


def _factors(grads: Tensors, groups: Groups, n: Numbers) -> torch.Tensor:
    """[clip, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), t] in float32 on the device."""
    device = groups[0].device
    factors = torch.empty(4, dtype=torch.float32, device=device)
    count, partials = 0, factors
    if n.clips:
        count = sum(g.chunks(NORM_CHUNK) for g in groups)
        partials = torch.empty(count, dtype=torch.float32, device=device)
        _norm(grads, groups, partials)
    size, widen, step = 0.0, 0.0, n.step
    if isinstance(step, torch.Tensor):
        step = step.float()
    else:
        size, widen = n.corrections()
        step = 0
    logs = (math.log(b) if b else -math.inf for b in (n.beta1, n.beta2))
    source()["adamw_factors"](
        *(1, THREADS, partials, count, step, factors),
        *map(c_float, (n.lr, *logs, size, widen, n.max_norm)),
    )
    return factors


def _norm(grads: Tensors, groups: Groups, partials: torch.Tensor) -> None:
    first = 0
    for group in groups:
        # Only the gradient's type counts here.
        program = source((FLOATS[0], group.kind[1], FLOATS[2]))
        blocks = group.chunks(NORM_CHUNK)
        to = partials[first:]
        if not group.alone:
            table = group.table(NORM_CHUNK)
            program["adamw_norm_many"](blocks, THREADS, table.data, table.rows, int(group.wide), to)
        else:
            grad = grads[group.rows[0]]
            program["adamw_norm"](blocks, THREADS, grad, grad.numel(), int(group.wide), to)
        first += blocks


HALF: Kind = (torch.bfloat16, torch.bfloat16, torch.float32)
IMPLEMENTATION = Implementation(
    operator="adamw",
    name="cuda",
    backend="cuda",
    forward=forward_of(run),
    specimens=(source(), source(HALF, True), source(HALF, False, True)),
    idea="16-byte vectors of seven streams, one launch a list",
)
