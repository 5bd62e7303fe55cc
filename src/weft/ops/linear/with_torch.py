"""The linear family by the library: cuBLAS adds the bias in its own epilogue.

cuBLAS fuses bias and GELU (tanh form) too, which PyTorch offers as ``_addmm_activation``: on a GPU
alone, without a derivative, and without the pre-activation as an output. It serves where the
pre-activation is not kept and no gradient is needed; elsewhere GELU is a pass of its own.

``forward.compiles`` is the function that an outer ``torch.compile`` traces: it cannot trace the
process-wide switch of ``call_at_precision``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.core import Implementation
from weft.ops._common.cublas import call_at_precision, held_at_precision
from weft.ops.linear.products import backward_products, library_linear, to_2d

# PyTorch's functions of the repeated calls. They begin in C++; those of torch.ops.aten begin in Python.
_linear, _gelu = torch._C._nn.linear, torch._C._nn.gelu
_addmm_activation: Any = torch._addmm_activation  # type: ignore[attr-defined]


def linear_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return library_linear(x, weight, bias)


def linear_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    grad2d = to_2d(grad)
    return (*backward_products(grad2d, x, weight), grad2d.sum(0))


linear_forward.compiles = torch.nn.functional.linear  # type: ignore[attr-defined]
linear_forward.like = lambda inputs, params: held_at_precision(torch.nn.functional.linear, inputs[0])  # type: ignore[attr-defined]


def _linear_then_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    pre = torch.nn.functional.linear(x, weight, bias)
    return torch.nn.functional.gelu(pre, approximate="tanh"), pre.detach()


def _has_fast_epilogue(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """True where cuBLAS's product with a GELU is fast: half types, rows of whole 16 bytes.

    With 50257 columns it was measured at 0.29 of the speed of a product and a pass (bfloat16, K = 1600), and
    in float32 at 0.84.
    """
    return x.dtype != torch.float32 and weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0


def _fused_linear_gelu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    bias = weight.new_zeros(weight.shape[0]) if bias is None else bias  # a launch, as a GELU of its own is
    if x.dim() == 2:
        return _addmm_activation(bias, x, weight.t(), use_gelu=True)  # type: ignore[no-any-return]
    y: torch.Tensor = _addmm_activation(bias, to_2d(x), weight.t(), use_gelu=True)
    return y.view(*x.shape[:-1], weight.shape[0])


def linear_gelu_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, keep: bool = True
) -> Any:
    needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, bias))
    # On a CPU _addmm_activation computes the erf form.
    if not keep and x.is_cuda and not needs_gradient and _has_fast_epilogue(x, weight):
        return call_at_precision(_fused_linear_gelu, x, "ieee", x, weight, bias)
    y, pre = call_at_precision(_linear_then_gelu, x, "ieee", x, weight, bias)
    return (y, pre) if keep else y


def linear_gelu_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, pre_or_bias: torch.Tensor, *, keep: bool = True
) -> tuple[torch.Tensor, ...]:
    """``pre_or_bias`` is pre, or without ``keep`` the bias, with which pre is computed again."""
    pre = pre_or_bias if keep else library_linear(x, weight, pre_or_bias)
    dpre = to_2d(torch.ops.aten.gelu_backward(grad, pre, approximate="tanh"))
    return (*backward_products(dpre, x, weight), dpre.sum(0))


def _traced_linear_gelu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, keep: bool = True
) -> Any:
    y, pre = _linear_then_gelu(x, weight, bias)
    return (y, pre) if keep else y


linear_gelu_forward.compiles = _traced_linear_gelu  # type: ignore[attr-defined]


def _gelu_of_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _gelu(_linear(x, weight, bias), approximate="tanh")


def linear_gelu_alone(inputs: tuple[torch.Tensor, ...], *, keep: bool) -> Callable[..., torch.Tensor]:
    """Return the function of inputs like these whose result is that of GELU alone, as ``linear_gelu_forward``
    computes it. The bias may be left out."""
    x, weight = inputs[:2]
    needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    is_fused = not keep and x.is_cuda and not needs_gradient and _has_fast_epilogue(x, weight)
    return held_at_precision(_fused_linear_gelu if is_fused else _gelu_of_linear, x)


def _linear_plus_residual(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    y = torch.nn.functional.linear(x, weight, bias) + residual
    return y.contiguous()  # torch's sum takes the residual's strides


def linear_residual_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    return call_at_precision(_linear_plus_residual, x, "ieee", x, weight, bias, residual)  # type: ignore[no-any-return]


def linear_residual_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """dresidual is a copy: a backward's results share no memory with the gradient that came in."""
    return (*linear_backward(grad, x, weight), grad.clone())


linear_residual_forward.compiles = _linear_plus_residual  # type: ignore[attr-defined]


def _repeated_linear_residual(inputs: tuple[torch.Tensor, ...], params: dict[str, Any]) -> Any:
    *_, residual = inputs
    linear = held_at_precision(_linear, inputs[0])
    if not residual.is_contiguous():
        return None
    return lambda x, weight, bias, residual: linear(x, weight, bias) + residual


linear_residual_forward.like = _repeated_linear_residual  # type: ignore[attr-defined]

LINEAR = Implementation(
    operator="linear",
    backend="torch",
    forward=linear_forward,
    backward=linear_backward,
    idea="F.linear: cuBLAS with its bias epilogue",
)

LINEAR_GELU = Implementation(
    operator="linear_gelu",
    backend="torch",
    forward=linear_gelu_forward,
    backward=linear_gelu_backward,
    idea="cuBLAS with its bias epilogue, then F.gelu; with both fused where pre is not kept",
)

LINEAR_RESIDUAL = Implementation(
    operator="linear_residual",
    backend="torch",
    forward=linear_residual_forward,
    backward=linear_residual_backward,
    idea="F.linear, then a sum",
)
