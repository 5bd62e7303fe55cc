"""Support of numba: the dtypes of ``numba.cuda``, and loops over all cores by ``njit(parallel=True)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from weft.core import YES, Case, Implementation, Support, no


def support_without_bfloat16(alternatives: str) -> Callable[[Case, str], Support]:
    """Return ``supports`` of a ``numba.cuda`` kernel; ``alternatives`` ends the reason."""

    def supports(case: Case, device: str) -> Support:
        if case.dtype == "bfloat16":
            return no(f"numba.cuda takes no bfloat16 arrays; use {alternatives}")
        return YES

    return supports


def parallel_implementation(
    operator: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    idea: str,
    dtypes: Sequence[str] = ("float32",),
) -> Implementation:
    """Return the implementation ``numba/parallel`` of ``operator``, for a CPU and these dtypes.

    numba compiles no arithmetic in 16-bit types for a CPU, and a CPU has no tf32.
    """

    def supports(case: Case, device: str) -> Support:
        if case.dtype not in dtypes:
            return no(f"numba compiles no {case.dtype} arithmetic for a CPU; use {' or '.join(dtypes)}")
        if case.params.get("precision") == "tf32":
            return no("a CPU has no tf32; use precision='ieee' there")
        return YES

    return Implementation(
        operator=operator,
        name="numba/parallel",
        backend="numba",
        forward=forward,
        backward=backward,
        supports=supports,
        idea=idea,
        devices=("cpu",),
    )
