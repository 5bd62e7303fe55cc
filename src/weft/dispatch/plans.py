"""Plans: decisions for one kind of call, in eager mode and in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weft.dispatch import choice

TRACED = ("eager", "torch", "compile")  # implementations of plain torch code
Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """Decision for one kind of call: the implementation's name, and ``run(inputs, params)``.

    ``run_plain`` is ``run`` for tensors that are known to pass :func:`can_skip_dispatcher`, which then asks
    for the modes alone. None: nobody may remember this plan by the tensors of a call. ``repeat(inputs,
    params)`` returns a function of tensors like these that does the same (repeated_calls.py), or None.
    """

    impl: str
    run: Run
    run_plain: Run | None = None
    repeat: Callable[[tuple[Any, ...], dict[str, Any]], Function | None] | None = None


def plan_by_mode(eager: Plan, in_graph: Plan, device: int) -> Plan:
    """Return the plan of calls that have another implementation while they are captured in a CUDA graph.

    ``device`` is the number of the tensors' GPU, -1 for a CPU.
    """
    if in_graph.impl in TRACED and device >= 0:
        # Else cuBLAS may be called for the first time in a capture, which its set-up would break.
        with torch.cuda.device(device):
            torch.cuda.current_blas_handle()

    def run(x: tuple[Any, ...], scalars: dict[str, Any]) -> Any:
        return (in_graph if choice.is_capturing() else eager).run(x, scalars)

    def run_plain(x: tuple[Any, ...], scalars: dict[str, Any]) -> Any:
        known = in_graph if choice.is_capturing() else eager
        return (known.run_plain or known.run)(x, scalars)

    def repeat(x: tuple[Any, ...], scalars: dict[str, Any]) -> Function | None:
        function = eager.repeat(x, scalars) if eager.repeat else None
        if function is None:
            return None
        own_scalars = dict(scalars)

        def repeated(*tensors: Any) -> Any:
            return in_graph.run(tensors, own_scalars) if choice.is_capturing() else function(*tensors)

        return repeated

    return Plan(eager.impl, run, run_plain if eager.run_plain else None, repeat if eager.repeat else None)
