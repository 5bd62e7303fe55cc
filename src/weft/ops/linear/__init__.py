"""The linear family: a linear layer alone, with GELU, or with a residual, and two layers with GELU between.

Figures are in README.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.core import WeftError, registry
from weft.dispatch import choice as dispatch
from weft.dispatch import invariance
from weft.dispatch.autocast import lowered
from weft.dispatch.invariance import refuse_if_requested
from weft.dispatch.operator import (
    TRACED,
    Schema,
    call,
    can_skip_dispatcher,
    define,
    library,
    plan,
    refuse_unsupported,
    register,
    resolve,
)
from weft.dispatch.plan_cache import memoized, recent
from weft.dispatch.public_calls import Repeat, repeat_of, repeated
from weft.ops.linear.mlp.spec import check_mlp_gelu
from weft.ops.linear.products import bias_or_zeros, library_linear, needs_gradient
from weft.ops.linear.spec import check_flag, check_linear, check_linear_gelu, check_linear_residual
from weft.ops.linear.with_torch import linear_gelu_alone, linear_residual_forward


def _fake_output(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _fake_gradients(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])


register(
    "linear",
    Schema(
        repeats=True,
        inputs="Tensor x, Tensor weight, Tensor bias",
        saved="Tensor x, Tensor weight",
        gradients=3,
        fake=_fake_output,
        fake_backward=_fake_gradients,
    ),
)
register(
    "linear_gelu",
    Schema(
        repeats=True,
        inputs="Tensor x, Tensor weight, Tensor bias",
        saved="Tensor x, Tensor weight, Tensor pre",
        gradients=3,
        outputs=2,
        fake=lambda x, weight, bias: (_fake_output(x, weight), _fake_output(x, weight)),
        fake_backward=_fake_gradients,
    ),
)
register(
    "linear_residual",
    Schema(
        repeats=True,
        inputs="Tensor x, Tensor weight, Tensor bias, Tensor residual",
        saved="Tensor x, Tensor weight",
        gradients=4,
        fake=_fake_output,
        fake_backward=lambda grad, x, weight: (
            *_fake_gradients(grad, x, weight),
            grad.new_empty(grad.shape),
        ),
    ),
)


def _fake_mlp_outputs(
    x: torch.Tensor,
    fc_weight: torch.Tensor,
    fc_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    y, hidden, pre = (x.new_empty(*x.shape[:-1], w.shape[0]) for w in (proj_weight, fc_weight, fc_weight))
    return y, hidden, pre


def _fake_mlp_gradients(
    grad: torch.Tensor, x: torch.Tensor, fc_weight: torch.Tensor, proj_weight: torch.Tensor, *activations: Any
) -> tuple[torch.Tensor, ...]:
    matrices = [t.new_empty(t.shape) for t in (x, fc_weight, proj_weight)]
    biases = [w.new_empty(w.shape[0]) for w in (fc_weight, proj_weight)]
    return matrices[0], matrices[1], biases[0], matrices[2], biases[1]


register(
    "mlp_gelu",
    Schema(
        repeats=True,
        inputs="Tensor x, Tensor fc_weight, Tensor fc_bias, Tensor proj_weight, Tensor proj_bias",
        saved="Tensor x, Tensor fc_weight, Tensor proj_weight, Tensor hidden, Tensor pre",
        gradients=5,
        outputs=3,
        fake=_fake_mlp_outputs,
        fake_backward=_fake_mlp_gradients,
    ),
)


# linear_gelu without the pre-activation (``keep=False`` in the contract) has one output and saves other
# tensors. To PyTorch this is an operator of its own: weft::linear_gelu_lean.
def _lean_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, impl: str) -> Any:
    refuse_unsupported("linear_gelu", impl, (x, weight, bias), {"keep": False})
    return registry.implementation("linear_gelu", impl).forward(x, weight, bias, keep=False)


def _lean_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, impl: str
) -> Any:
    backward = registry.implementation("linear_gelu", impl).backward
    assert backward is not None, "each implementation that is not traced has a backward"
    return backward(grad, x, weight, bias, keep=False)


def _differentiate_lean(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    backward = torch.ops.weft.linear_gelu_lean_backward
    return (*backward(grad, *ctx.saved_tensors, ctx.impl), None)


def _save_lean(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.impl = inputs[3]


define(
    "linear_gelu_lean",
    "(Tensor x, Tensor weight, Tensor bias, str impl) -> Tensor",
    _lean_forward,
    _fake_output,
)
define(
    "linear_gelu_lean_backward",
    "(Tensor grad, Tensor x, Tensor weight, Tensor bias, str impl) -> (Tensor, Tensor, Tensor)",
    _lean_backward,
    _fake_gradients,
)
torch.library.register_autograd(
    "weft::linear_gelu_lean", _differentiate_lean, setup_context=_save_lean, lib=library
)


# Without a bias the kernels add zeros, and so do implementations other than ``torch``, whose functions of
# PyTorch take none.
def _with_given_bias(repeat: Repeat | None, weight: Any, bias: Any, by_library: bool) -> Repeat | None:
    """Return what repeats a call with ``bias``, or None, by a function of x, weight, a bias and the rest."""
    if repeat is None or bias is not None or by_library:
        return repeat
    function, columns = repeat.function, weight.shape[0]

    def with_zeros(x: Any, weight: Any, bias: None = None, *rest: Any) -> Any:
        return function(x, weight, weight.new_zeros(columns), *rest)

    return Repeat(with_zeros, repeat.by_torch)


def _is_by_library(
    name: str,
    inputs: tuple[Any, ...],
    params: dict[str, Any],
    impl: str | None,
    check: Callable[[], None],
    batch_invariant: bool,
) -> bool:
    """True if the implementation of this call, whose arguments are checked here, is ``torch``."""
    if torch.compiler.is_compiling():
        return False
    return plan(name, inputs, params, impl, check, batch_invariant).impl == "torch"


def _repeat_linear(x: Any, weight: Any, bias: Any = None, *, impl: str | None = None) -> Repeat | None:
    inputs = (x, weight, bias_or_zeros(weight, bias))
    known = recent("linear", impl, inputs, {})
    by_library = known is not None and known.impl == "torch"
    return _with_given_bias(repeat_of("linear", impl, inputs, {}), weight, bias, by_library)


@repeated(_repeat_linear)
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return x W^T + b, summed in float32, with one rounding at the end.

    Args:
        x: (..., K); float32, float16 or bfloat16; CPU or CUDA; any strides.
        weight: (N, K), as ``torch.nn.Linear`` stores it; the same dtype and device; any strides.
        bias: (N,); the same dtype and device. None adds zeros.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        (..., N), contiguous, of the inputs' dtype and device. float32 is multiplied in float32.

    Raises:
        WeftError: the arguments are no tensors of these shapes, of one dtype and device; ``impl`` is
            unknown or does not run here.
    """
    inputs = lowered(x, weight, bias_or_zeros(weight, bias))
    options: Any = (inputs, {}, impl, lambda: check_linear(*inputs), batch_invariant)
    if bias is None and _is_by_library("linear", *options):
        return library_linear(inputs[0], inputs[1], None)
    return call("linear", *options)  # type: ignore[no-any-return]


def _repeat_linear_gelu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    return_pre_activation: bool = False,
    recompute_pre_activation: bool = False,
    impl: str | None = None,
) -> Repeat | None:
    """Return what repeats a call that returns GELU alone, and leaves to dispatch what is saved."""
    if return_pre_activation or recompute_pre_activation:
        return None
    inputs = (x, weight, bias_or_zeros(weight, bias))
    keep = needs_gradient(inputs)
    params = {} if keep else {"keep": False}
    known = recent("linear_gelu", impl, inputs, params)
    if known is not None and known.impl == "torch":
        return Repeat(linear_gelu_alone(inputs, keep=keep), by_torch=True)
    repeat = repeat_of("linear_gelu", impl, inputs, params)
    if repeat is not None and keep:
        repeat = repeat.first_result()
    return _with_given_bias(repeat, weight, bias, by_library=False)


@repeated(_repeat_linear_gelu)
def linear_gelu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    return_pre_activation: bool = False,
    recompute_pre_activation: bool = False,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> Any:
    """Return gelu(x W^T + b), GELU in tanh form.

    Where a gradient is needed, the pre-activation x W^T + b is saved for the backward, as by
    ``torch.nn.functional.gelu`` after ``linear``. Elsewhere it is not written to memory.

    Args:
        x: (..., K); float32, float16 or bfloat16; CPU or CUDA; any strides.
        weight: (N, K), as ``torch.nn.Linear`` stores it; the same dtype and device; any strides.
        bias: (N,); the same dtype and device. None adds zeros.
        return_pre_activation: return ``(y, pre_activation)`` instead of ``y`` alone.
        recompute_pre_activation: do not save the pre-activation. The backward of ``triton`` and
            ``cuda`` computes it again by a product: half as much work again for (..., N) elements less
            of memory. ``eager``, ``torch`` and ``compile`` leave to autograd what is saved.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        ``y``, or ``(y, pre_activation)``; both (..., N), contiguous, of the inputs' dtype and device.
        No gradient flows through the pre-activation.

    Raises:
        WeftError: the arguments are no tensors of these shapes, of one dtype and device; a flag is no
            bool, or both are True; ``impl`` is unknown or does not run here.

    Source of GELU: arXiv:1606.08415.
    """
    inputs = lowered(x, weight, bias_or_zeros(weight, bias))
    check_flag("linear_gelu", "return_pre_activation", return_pre_activation)
    check_flag("linear_gelu", "recompute_pre_activation", recompute_pre_activation)
    # A contradiction is an error, not a silent choice of one of them.
    if return_pre_activation and recompute_pre_activation:
        raise WeftError(
            "linear_gelu: return_pre_activation and recompute_pre_activation",
            expected="at most one of them",
            got="both",
            hint="what is returned need not be computed again",
        )
    is_lean = not return_pre_activation and (recompute_pre_activation or not needs_gradient(inputs))
    # The batch-invariant kernel writes the pre-activation also where no gradient needs it.
    if recompute_pre_activation:
        refuse_if_requested("linear_gelu with recompute_pre_activation", batch_invariant)
    if is_lean and not (invariance.check_flag("linear_gelu", batch_invariant) or invariance.is_requested()):
        return _linear_gelu_lean(inputs, impl, bias is not None)
    options: Any = (inputs, {}, impl, lambda: check_linear_gelu(*inputs), batch_invariant)
    if bias is None and not return_pre_activation and _is_by_library("linear_gelu", *options):
        return linear_gelu_alone(inputs, keep=True)(*inputs[:2])
    y, pre = call("linear_gelu", *options)
    return (y, pre) if return_pre_activation else y


def _repeat_linear_residual(
    x: Any, weight: Any, bias: Any, residual: Any, *, impl: str | None = None
) -> Repeat | None:
    inputs = (x, weight, bias_or_zeros(weight, bias), residual)
    known = recent("linear_residual", impl, inputs, {})
    by_library = known is not None and known.impl == "torch"
    return _with_given_bias(repeat_of("linear_residual", impl, inputs, {}), weight, bias, by_library)


@repeated(_repeat_linear_residual)
def linear_residual(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    *,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return x W^T + b + residual, summed in float32, with one rounding at the end.

    Args:
        x: (..., K); float32, float16 or bfloat16; CPU or CUDA; any strides.
        weight: (N, K), as ``torch.nn.Linear`` stores it; the same dtype and device; any strides.
        bias: (N,); the same dtype and device. None adds zeros.
        residual: (..., N), with x's leading sizes; the same dtype and device; any strides.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        (..., N), contiguous, of the inputs' dtype and device.

    Raises:
        WeftError: the arguments are no tensors of these shapes, of one dtype and device; ``impl`` is
            unknown or does not run here.
    """
    inputs = lowered(x, weight, bias_or_zeros(weight, bias), residual)
    options: Any = (inputs, {}, impl, lambda: check_linear_residual(*inputs), batch_invariant)
    if bias is None and _is_by_library("linear_residual", *options):
        return linear_residual_forward(inputs[0], inputs[1], None, inputs[3])
    return call("linear_residual", *options)  # type: ignore[no-any-return]


def _repeat_mlp_gelu(*inputs: torch.Tensor, impl: str | None = None) -> Repeat | None:
    """Return what repeats a call with both biases and a gradient, which is one operator's."""
    if len(inputs) != 5 or not needs_gradient(inputs):
        return None
    repeat = repeat_of("mlp_gelu", impl, inputs, {})
    return repeat and repeat.first_result()


@repeated(_repeat_mlp_gelu)
def mlp_gelu(
    x: torch.Tensor,
    fc_weight: torch.Tensor,
    fc_bias: torch.Tensor | None,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor | None = None,
    *,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return gelu(x W1^T + b1) W2^T + b2, GELU in tanh form; products are summed in float32.

    It is ``linear(linear_gelu(x, W1, b1), W2, b2)`` as one operator, so that the backward of ``cuda`` can
    multiply by GELU's slope in the epilogue of a product. Where a gradient is needed, GELU's input and output
    are stored for it, rounded to x's dtype. Elsewhere the call is these two operators.

    Args:
        x: (..., K); float32, float16 or bfloat16; CPU or CUDA; any strides.
        fc_weight: W1 (F, K), as ``torch.nn.Linear`` stores it; the same dtype and device; any strides.
        fc_bias: b1 (F,); the same dtype and device. None adds zeros.
        proj_weight: W2 (N, F); the same dtype and device; any strides.
        proj_bias: b2 (N,); the same dtype and device. None adds zeros.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        (..., N), contiguous, of the inputs' dtype and device.

    Raises:
        WeftError: the arguments are no tensors of these shapes, of one dtype and device; ``impl`` is
            unknown or does not run here.

    Source of GELU: arXiv:1606.08415.
    """
    biases = bias_or_zeros(fc_weight, fc_bias), bias_or_zeros(proj_weight, proj_bias)
    inputs = lowered(x, fc_weight, biases[0], proj_weight, biases[1])
    if needs_gradient(inputs):
        return call("mlp_gelu", inputs, {}, impl, lambda: check_mlp_gelu(*inputs), batch_invariant)[0]  # type: ignore[no-any-return]
    # Without a gradient GELU's input need not be stored, which linear_gelu knows how to avoid.
    check_mlp_gelu(*inputs)
    hidden = linear_gelu(*inputs[:3], impl=impl, batch_invariant=batch_invariant)
    return linear(hidden, *inputs[3:], impl=impl, batch_invariant=batch_invariant)


def _linear_gelu_lean(inputs: tuple[Any, ...], impl: str | None, has_bias: bool) -> torch.Tensor:
    """``linear_gelu`` that neither returns nor saves the pre-activation."""
    params = {"keep": False}

    def check() -> None:
        check_linear_gelu(*inputs)

    def choose() -> str:
        check()
        return impl or dispatch.choose("linear_gelu", inputs, params)

    is_tracing = torch.compiler.is_compiling()
    # A call with a gradient needs the operator's own; while tracing the mode stack is not to be read.
    if not is_tracing and not needs_gradient(inputs) and can_skip_dispatcher(inputs):
        if not has_bias and _is_by_library("linear_gelu", inputs, params, impl, check, False):
            return linear_gelu_alone(inputs, keep=False)(*inputs[:2])
        return call("linear_gelu", inputs, params, impl, check)  # type: ignore[no-any-return]
    # While tracing, the choice becomes a constant of the graph; there is no memo to look up.
    if is_tracing:
        chosen = choose()
    else:
        chosen = memoized(("linear_gelu_lean", impl), inputs, params, choose)
    if resolve("linear_gelu", chosen) not in TRACED:
        return torch.ops.weft.linear_gelu_lean(*inputs, chosen)  # type: ignore[no-any-return]
    if chosen == "torch" and not has_bias and not is_tracing:
        return linear_gelu_alone(inputs, keep=False)(*inputs[:2])
    return call("linear_gelu", inputs, params, chosen)  # type: ignore[no-any-return]
