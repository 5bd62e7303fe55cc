"""The matrix product by the library.

The library is held to the operator's contract for the length of one call: float32 in the precision
asked for, and half types summed in float32 to the end. PyTorch's default lets a product that cuBLAS
splits along K add its parts in the half type: a second rounding, and a softer yardstick.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.core import YES, Case, Implementation, Support, no

REDUCTION = {
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}


def exactly(function: Callable[..., Any], x: torch.Tensor, precision: str, *arguments: Any) -> Any:
    """Call ``function(*arguments)`` with cuBLAS held to ``precision`` for ``x``'s dtype.

    The process-wide switch is set back after; where it stands right already it is not touched.
    """
    if not x.is_cuda:
        return function(*arguments)
    switches = torch.backends.cuda.matmul
    name = REDUCTION.get(x.dtype, "fp32_precision")
    wanted = precision if name == "fp32_precision" else False
    before = getattr(switches, name)
    if before == wanted:
        return function(*arguments)
    setattr(switches, name, wanted)
    try:
        return function(*arguments)
    finally:
        setattr(switches, name, before)


def gradients(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.mm(grad, b.t()), torch.mm(a.t(), grad)


class _Exact(torch.autograd.Function):
    """torch.mm whose backward runs in the same precision as its forward."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, precision: str) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.precision = precision
        return exactly(torch.mm, a, precision, a, b)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        a, b = ctx.saved_tensors
        return (*backward(grads[0], a, b, precision=ctx.precision), None)


def forward(a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee") -> torch.Tensor:
    if a.is_cuda and torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Exact.apply(a, b, precision)  # type: ignore[no-any-return, no-untyped-call]
    return exactly(torch.mm, a, precision, a, b)  # type: ignore[no-any-return]


def backward(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee"
) -> tuple[torch.Tensor, torch.Tensor]:
    return exactly(gradients, a, precision, grad, a, b)  # type: ignore[no-any-return]


def traced(a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee") -> torch.Tensor:
    """What an outer torch.compile traces: it cannot trace a process-wide switch.

    float32 on a GPU stays one opaque operator, so that its precision holds; half types are the
    library's call, which the compiler may fuse with neighbours, under the caller's own switches.
    """
    if a.is_cuda and a.dtype == torch.float32:
        return torch.ops.weft.matmul(a, b, precision, "torch")  # type: ignore[no-any-return]
    return torch.mm(a, b)


forward.compiles = traced  # type: ignore[attr-defined]


def supports(case: Case, device: str) -> Support:
    if case.params.get("precision") == "tf32" and device == "cpu":
        return no("a CPU has no tf32; use precision='ieee' there")
    if device == "cpu" and case.dtype == "bfloat16" and case.inputs[0].values == "special":
        return no(
            "on a CPU with AMX the library's bf16 product of an odd inner size gives NaN where an "
            "Inf in the last column makes Inf; eager is right there"
        )
    return YES


IMPLEMENTATION = Implementation(
    operator="matmul",
    name="torch",
    backend="torch",
    forward=forward,
    backward=backward,
    supports=supports,
    idea="torch.mm: cuBLAS, or the CPU's BLAS",
)
