"""Linear layer and GELU in one; see README.md beside this for the ways and their figures."""

from __future__ import annotations

from typing import Any

import torch

from weft.core import registry
from weft.ops._shared.autocast import lowered
from weft.ops._shared.public import (
    TRACED,
    Schema,
    call,
    refuse_unsupported,
    register,
    resolve,
)
from weft.ops.linear_gelu.spec import check_arguments


def _output(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _gradients(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
    return (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape[0]),
    )


register(
    "linear_gelu",
    Schema(
        inputs="Tensor x, Tensor weight, Tensor bias",
        saved="Tensor x, Tensor weight, Tensor pre",
        gradients=3,
        outputs=2,
        fake=lambda x, weight, bias: (_output(x, weight), _output(x, weight)),
        fake_backward=_gradients,
    ),
)

# Without keep there is one output, and other tensors are saved: an operator of its own to PyTorch.
_lean = torch.library.Library("weft", "FRAGMENT")
_lean.define("linear_gelu_lean(Tensor x, Tensor weight, Tensor bias, str impl) -> Tensor")
_lean.define(
    "linear_gelu_lean_backward(Tensor grad, Tensor x, Tensor weight, Tensor bias, str impl)"
    " -> (Tensor, Tensor, Tensor)"
)


def _forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, impl: str) -> Any:
    refuse_unsupported("linear_gelu", impl, (x, weight, bias), {"keep": False})
    return registry.implementation("linear_gelu", impl).forward(x, weight, bias, keep=False)


def _backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, impl: str
) -> Any:
    backward = registry.implementation("linear_gelu", impl).backward
    assert backward is not None, "an implementation that is not traced has its own backward"
    return backward(grad, x, weight, bias, keep=False)


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    run = torch.ops.weft.linear_gelu_lean_backward
    return (*run(grad, *ctx.saved_tensors, ctx.impl), None)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.impl = inputs[3]


for _device in ("CPU", "CUDA"):
    _lean.impl("linear_gelu_lean", _forward, _device)
    _lean.impl("linear_gelu_lean_backward", _backward, _device)
torch.library.register_fake("weft::linear_gelu_lean", _output, lib=_lean)
torch.library.register_fake("weft::linear_gelu_lean_backward", _gradients, lib=_lean)
torch.library.register_autograd(
    "weft::linear_gelu_lean", _differentiate, setup_context=_setup, lib=_lean
)


def linear_gelu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    keep: bool = True,
    impl: str | None = None,
) -> Any:
    """gelu(x W^T + b), GELU in tanh form, its argument kept for the backward or not.

    Args:
        x: (..., K); float32, float16 or bfloat16; CPU or CUDA; any strides.
        weight: (N, K), as ``torch.nn.Linear`` stores it; the same dtype and device; any strides.
        bias: (N,); the same dtype and device.
        keep: whether pre = x W^T + b is an output as well. The backward needs it: without, a kernel
            of ours computes it again by a product, a third more work for (..., N) elements less of
            memory; ``eager``, ``torch`` and ``compile`` leave what they keep to autograd.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.

    Returns:
        (y, pre) with ``keep``, else y; both (..., N), contiguous, of the inputs' dtype and device.
        No gradient flows through pre.

    Raises:
        WeftError: no tensors of these shapes, of one dtype and device; ``keep`` is no bool;
            ``impl`` is unknown or does not run here.

    Source of GELU: arXiv:1606.08415.
    """
    x, weight, bias = lowered(x, weight, bias)
    inputs = (x, weight, bias)
    if keep is True:
        return call("linear_gelu", inputs, {}, impl, lambda: check_arguments(*inputs))
    check_arguments(*inputs, keep=keep)
    chosen = impl or "torch"
    if resolve("linear_gelu", chosen) in TRACED:
        return call("linear_gelu", (x, weight, bias), {"keep": False}, impl)
    return torch.ops.weft.linear_gelu_lean(x, weight, bias, chosen)
