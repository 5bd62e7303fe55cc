"""The matrix product by the library, held to the operator's precision (``call_at_precision``)."""

from __future__ import annotations

from typing import Any

import torch

from weft.core import YES, Case, Implementation, Support, no
from weft.dispatch.autograd_context import apply_without_checks
from weft.ops._common.cublas import call_at_precision, held_at_precision, is_always_at


def gradients(grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.mm(grad, b.t()), torch.mm(a.t(), grad)


class _PreciseProduct(torch.autograd.Function):
    """torch.mm in float32 whose backward runs in the same precision as its forward.

    PyTorch's own backward takes the precision that is set when it runs, which may be another one. Where no
    switch is needed, PyTorch's own is the same, and costs the host half as much.
    """

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, precision: str) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.precision = precision
        return call_at_precision(torch.mm, a, precision, a, b)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        a, b = ctx.saved_tensors
        wants_a, wants_b, _ = ctx.needs_input_grad
        da = call_at_precision(torch.mm, a, ctx.precision, grads[0], b.t()) if wants_a else None
        db = call_at_precision(torch.mm, a, ctx.precision, a.t(), grads[0]) if wants_b else None
        return da, db, None


def _needs_precise_gradient(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if autograd records a call in float32 on a GPU. The gradient of half types is PyTorch's own, as in
    the linear family: a function in Python would cost the host more than the products."""
    needs_gradient = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    return a.is_cuda and a.dtype == torch.float32 and needs_gradient


def forward(a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee") -> torch.Tensor:
    if _needs_precise_gradient(a, b) and not is_always_at(a, precision):
        return _PreciseProduct.apply(a, b, precision)  # type: ignore[no-any-return, no-untyped-call]
    return call_at_precision(torch.mm, a, precision, a, b)  # type: ignore[no-any-return]


def backward(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee"
) -> tuple[torch.Tensor, torch.Tensor]:
    return call_at_precision(gradients, a, precision, grad, a, b)  # type: ignore[no-any-return]


def traced(a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee") -> torch.Tensor:
    """Return the product as an outer torch.compile traces it: it cannot trace a process-wide switch.

    float32 on a GPU stays one opaque operator, so that its precision holds. Half types are the library's
    call, which the compiler may fuse with neighbours, under the caller's own switches.
    """
    if a.is_cuda and a.dtype == torch.float32:
        return torch.ops.weft.matmul(a, b, precision, "torch")  # type: ignore[no-any-return]
    return torch.mm(a, b)


forward.compiles = traced  # type: ignore[attr-defined]


def like(inputs: tuple[torch.Tensor, ...], params: dict[str, Any]) -> Any:
    """Return the shortest function of inputs like these that does what :func:`forward` does."""
    (a, b), precision = inputs, params["precision"]
    if not _needs_precise_gradient(a, b):
        return held_at_precision(torch.mm, a, precision)
    apply, product = apply_without_checks(_PreciseProduct), torch.mm
    return lambda a, b: product(a, b) if is_always_at(a, precision) else apply(a, b, precision)


forward.like = like  # type: ignore[attr-defined]


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
    backend="torch",
    forward=forward,
    backward=backward,
    supports=supports,
    idea="torch.mm: cuBLAS, or the CPU's BLAS",
)
