"""Where a step's time goes, by kind of operator and by layer, as torch.profiler sees it.

By kind: each operator's own time, a GPU's kernels by the operator that launched them. By layer: the
i-th linear and the i-th gelu that ran belong to layer i, and backward goes from the last to the
first; the optimizer passes over all layers at once and is in no layer's time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

KINDS = ("matmul", "gelu", "optimizer", "other")
MATMUL = ("aten::addmm", "aten::mm", "aten::linear", "aten::matmul")
GELU = ("aten::gelu", "aten::gelu_backward")
OPTIMIZER = ("aten::_fused_adam", "aten::_foreach", "Optimizer.")
STEPS, BEFORE = 3, 2  # profiled, and gone through before
NODE = "autograd::engine::evaluate_function: "
# What a layer runs, by the names that begin an event: forward's in order, backward's in reverse.
FORWARD = {"linear": "aten::linear", "gelu": "aten::gelu"}
BACKWARD = {"linear backward": f"{NODE}AddmmBackward", "gelu backward": f"{NODE}GeluBackward"}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """``shares`` by kind sum to 1; ``layers`` has us a step by what ran, a mapping a layer, or is
    empty where the events did not come layer by layer. ``us`` is all operators' time of a step."""

    shares: dict[str, float]
    layers: tuple[dict[str, float], ...]
    us: float


def kind_of(name: str) -> str:
    """The kind of an operator by its event's name.

    >>> kind_of("aten::addmm"), kind_of("aten::_fused_adamw_"), kind_of("aten::sum")
    ('matmul', 'optimizer', 'other')
    """
    if name in MATMUL:
        return "matmul"
    if name in GELU:
        return "gelu"
    return "optimizer" if name.startswith(OPTIMIZER) else "other"


def profile(call: Callable[[], object], depth: int, device: str) -> Profile:
    """Profile ``call``, a step through ``depth`` layers, ``STEPS`` times over.

    Raises ``RuntimeError`` where the profiler saw no time at all.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes to stderr of itself
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for _ in range(BEFORE):
        call()
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(STEPS):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
    # A GPU's kernels come as events of their own too, beside the operators that launched them.
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CPU]
    return sum_up(events, depth, on_gpu=device == "cuda")


def sum_up(events: Iterable[Any], depth: int, *, on_gpu: bool) -> Profile:
    """The profile of ``STEPS`` steps' host events."""
    events = sorted(events, key=lambda e: e.time_range.start)
    own = dict.fromkeys(KINDS, 0.0)
    for event in events:
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        own[kind_of(event.name)] += us
    whole = sum(own.values())
    if whole <= 0:
        raise RuntimeError("the profiler saw no time: are its GPU activities forbidden here?")
    shares = {kind: us / whole for kind, us in own.items()}
    return Profile(shares=shares, layers=_layers(events, depth, on_gpu), us=whole / STEPS)


def _layers(events: list[Any], depth: int, on_gpu: bool) -> tuple[dict[str, float], ...]:
    found: list[dict[str, float]] = [{} for _ in range(depth)]
    for begins, backwards in ((FORWARD, False), (BACKWARD, True)):
        for what, begin in begins.items():
            exact = not backwards  # aten::gelu is no aten::gelu_backward
            mine = [e for e in events if (e.name == begin if exact else e.name.startswith(begin))]
            if len(mine) != STEPS * depth:
                return ()
            for number, event in enumerate(mine):
                place = number % depth
                us = event.device_time_total if on_gpu else event.cpu_time_total
                layer = found[depth - 1 - place if backwards else place]
                layer[what] = layer.get(what, 0.0) + us / STEPS
    return tuple(found)
