"""AdamW in CUDA C++: 16-byte accesses to every tensor, one launch for a list; the kernels are in adamw.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource, Float32
from weft.core import Implementation
from weft.ops._common.layout import CUDA_TYPES, dtype_name
from weft.ops.adamw.parameter_groups import Dtypes, Group, ListsKey, prepare_groups, step_groups
from weft.ops.adamw.step import Numbers, PreparedStep, StepLists, Tensors, forward_of

KERNELS = ("adamw_one", "adamw_many", "adamw_norm", "adamw_norm_many", "adamw_factors")
THREADS, CHUNK, NORM_CHUNK = 256, 4096, 32768
Groups = tuple[Group, ...]
FLOATS: Dtypes = (torch.float32, torch.float32, torch.float32)


@cache
def source(dtypes: Dtypes = FLOATS, master: bool = False, stochastic: bool = False) -> CudaSource:
    """Return adamw.cu for the dtypes of parameter, gradient and averages."""
    label = "-".join(dtype_name(d) for d in dtypes)
    return CudaSource(
        file=Path(__file__).with_name("adamw.cu"),
        kernels=KERNELS,
        defines=(
            *zip(("WEFT_P", "WEFT_G", "WEFT_M"), (CUDA_TYPES[d] for d in dtypes), strict=True),
            ("MASTER", str(int(master))),
            ("STOCHASTIC", str(int(stochastic))),
            ("THREADS", str(THREADS)),
            ("CHUNK", str(CHUNK)),
            ("NORM_CHUNK", str(NORM_CHUNK)),
        ),
        label=label + "-master" * master + "-stochastic" * stochastic,
    )


def run(lists: StepLists, numbers: Numbers) -> None:
    """Take one step over the lists; the host does not wait for the device."""
    step_groups(lists, lambda dense, groups: _step(dense, groups, numbers))


def begin(lists: Sequence[Tensors], key: ListsKey, clips: bool) -> PreparedStep:
    """Write the tables of contiguous lists; return the rest of the step, which only launches."""
    groups = prepare_groups(lists, key, CHUNK, *[NORM_CHUNK] * clips)
    return lambda numbers: _step(lists, groups, numbers) if groups else None


def _step(lists: Sequence[Tensors], groups: Groups, n: Numbers) -> None:
    step_on_device = isinstance(n.step, torch.Tensor)
    # 0 is a null pointer: the kernel then takes the scalars from its arguments, without a launch before.
    factors = _factors(lists[1], groups, n) if n.clips or step_on_device else 0
    size, correction = (0.0, 0.0) if step_on_device else n.corrections()
    floats = (
        *(1 - n.lr * n.weight_decay, size, correction, n.eps),
        *(n.beta1, 1 - n.beta1, n.beta2, 1 - n.beta2),
    )
    step_count = 0 if isinstance(n.step, torch.Tensor) else int(n.step)
    for group_index, group in enumerate(groups):
        program = source(group.dtypes, group.masters, n.stochastic)
        numbers = (*map(Float32, floats), n.seed, step_count, group_index)
        if not group.is_single:
            table = group.table(CHUNK)
            program["adamw_many"](
                *(table.chunks, THREADS),
                *(table.data, table.rows, int(group.aligned), factors, *numbers),
            )
            continue
        tensors, count = group.single_tensors(lists), group.rows[0][-1]
        # The elements of a block: N of adamw.cu, which is 8 if any of the tensors has 16 bits.
        block = THREADS * (4 if all(d.itemsize == 4 for d in group.dtypes) else 8)
        program["adamw_one"](
            *(-(-count // block), THREADS), *tensors, count, int(group.aligned), factors, *numbers
        )


def _factors(grads: Tensors, groups: Groups, n: Numbers) -> torch.Tensor:
    """Compute [clip, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), t] in float32 on the device."""
    device = groups[0].device
    factors = torch.empty(4, dtype=torch.float32, device=device)
    count, partials = 0, factors
    if n.clips:
        count = sum(g.count_chunks(NORM_CHUNK) for g in groups)
        partials = torch.empty(count, dtype=torch.float32, device=device)
        _norm(grads, groups, partials)
    size, correction, step = 0.0, 0.0, n.step
    if isinstance(step, torch.Tensor):
        step = step.float()
    else:
        size, correction = n.corrections()
        step = 0
    # beta = 0 is valid: its logarithm is -inf, and expm1(-inf) = -1 gives a correction of 1.
    logs = (math.log(b) if b else -math.inf for b in (n.beta1, n.beta2))
    source()["adamw_factors"](
        *(1, THREADS, partials, count, step, factors),
        *map(Float32, (n.lr, *logs, size, correction, n.max_norm)),
    )
    return factors


def _norm(grads: Tensors, groups: Groups, partials: torch.Tensor) -> None:
    first = 0
    for group in groups:
        # Only the gradient's type counts here.
        program = source((FLOATS[0], group.dtypes[1], FLOATS[2]))
        blocks = group.count_chunks(NORM_CHUNK)
        to = partials[first:]
        if not group.is_single:
            table = group.table(NORM_CHUNK)
            program["adamw_norm_many"](blocks, THREADS, table.data, table.rows, int(group.aligned), to)
        else:
            grad = grads[group.indices[0]]
            program["adamw_norm"](blocks, THREADS, grad, grad.numel(), int(group.aligned), to)
        first += blocks


HALF: Dtypes = (torch.bfloat16, torch.bfloat16, torch.float32)
IMPLEMENTATION = Implementation(
    operator="adamw",
    backend="cuda",
    forward=forward_of(run),
    aot_kernels=(source(), source(HALF, True), source(HALF, False, True)),
    idea="16-byte vectors of seven streams, one launch for a list",
)
