"""The losses: cross entropy of logits, and of the LM head's product; figures are in README.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from weft.core.implementation import without_suffix
from weft.dispatch import repeated_calls
from weft.dispatch.autocast import lowered
from weft.dispatch.invariance import refuse_if_requested
from weft.dispatch.operator import Schema, call, can_skip_dispatcher, plan, register
from weft.dispatch.plan_cache import recent, store_recent
from weft.dispatch.public_calls import Repeat, repeated
from weft.ops._common import validate
from weft.ops.losses.chunks import plan_chunks
from weft.ops.losses.mean import generate_mean, has_mean, mean_cross_entropy
from weft.ops.losses.spec import (
    check_cross_entropy,
    check_linear_cross_entropy,
    check_target_range,
    gradient_like,
    weight_gradient_dtype,
)
from weft.ops.losses.with_torch import (
    reduced_cross_entropy,
    reduced_cross_entropy_function,
    reduced_loss_of_product,
)

_SCALARS = "int ignore_index, float label_smoothing, float z_loss"
_SCALAR_NAMES = ("ignore_index", "label_smoothing", "z_loss")

register(
    "cross_entropy",
    Schema(
        repeats=True,
        inputs=f"Tensor logits, Tensor targets, {_SCALARS}",
        saved=f"Tensor logits, Tensor targets, Tensor lse, {_SCALARS}",
        outputs=2,
        differentiable_outputs=1,
        gradients=1,
        fake=lambda logits, targets: tuple(
            logits.new_empty(logits.shape[:1], dtype=torch.float32) for _ in range(2)
        ),
        fake_backward=lambda grad, logits, targets, lse: (gradient_like(logits),),
        params=_SCALAR_NAMES,
    ),
)
register(
    "linear_cross_entropy",
    Schema(
        inputs=f"Tensor x, Tensor weight, Tensor targets, {_SCALARS}",
        saved=f"Tensor dx, Tensor dweight, {_SCALARS}",
        outputs=3,
        differentiable_outputs=1,
        gradients=2,
        fake=lambda x, weight, targets: (
            x.new_empty((), dtype=torch.float32),
            x.new_empty(x.shape),
            weight.new_empty(weight.shape, dtype=weight_gradient_dtype(weight.dtype)),
        ),
        fake_backward=lambda grad, dx, dweight: (
            torch.empty_like(dx),
            torch.empty_like(dweight, dtype=dx.dtype),
        ),
        params=_SCALAR_NAMES,
    ),
)


def _repeat_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    overwrite: bool = False,
    impl: str | None = None,
) -> Repeat | None:
    """Return what repeats a reduced loss; on a CPU the targets are read in each call."""
    if overwrite or reduction == "none" or (targets.is_cpu and not repeated_calls.records_on_cpu):
        return None
    inputs = (logits, targets)
    params = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    known = recent("cross_entropy", impl, inputs, params)
    if known is None:
        return None
    if known.impl == "torch" and not (label_smoothing or z_loss):
        return Repeat(reduced_cross_entropy_function(ignore_index, reduction), by_torch=True)
    if reduction != "mean" or not has_mean(logits, targets, known.impl):
        return None
    function = generate_mean(inputs, params, known.impl)
    if function is None:
        return None
    repeat = Repeat(function, by_torch=False)
    needs_gradient = torch.is_grad_enabled() and logits.requires_grad
    return repeat.first_result() if needs_gradient else repeat


@repeated(_repeat_cross_entropy)
def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    overwrite: bool = False,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return the cross entropy of each row of logits and its target, in float32.

    Args:
        logits: (N, V), V of any size; float32, float16 or bfloat16; CPU or CUDA. Rows may be strided:
            some columns of a padded vocabulary are read without a copy.
        targets: (N,), int64, on the same device: a column, or ``ignore_index``. On a CPU a target out of
            range raises. On a GPU the check would wait for the device: such a row reads nothing out of
            bounds, and its loss and gradient are NaN (``impl='torch'`` ends the program by an assertion of
            its own). :func:`weft.ops.losses.spec.check_target_range` checks, and waits.
        ignore_index: rows with this target have a loss of 0 and no gradient.
        reduction: ``mean`` over the rows that are not ignored (NaN if all are), ``sum`` or ``none``.
        label_smoothing: the share e in [0, 1] of a target that is spread evenly over all columns.
        z_loss: z >= 0; z lse^2 is added to each loss, which keeps the log-sum-exp near 0.
        overwrite: allow the gradient to be written over ``logits``, whose values are then lost. ``triton``
            and ``cuda`` do so outside of ``torch.compile``, where rows are dense in memory. A second
            backward through the same logits raises torch's error.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        A float32 scalar, or (N,) for ``none``.

    Raises:
        WeftError: a dtype, shape, device, ``reduction`` or scalar is not supported; on a CPU a target is
            out of range; ``impl`` is unknown or does not run here.

    Source: label smoothing arXiv:1512.00567; z-loss arXiv:2204.02311.
    """
    params = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    if type(reduction) is not str or reduction != "mean":
        validate.one_of("cross_entropy: reduction", reduction, ("mean", "sum", "none"))
    if overwrite is not False:
        validate.flag("cross_entropy: overwrite", overwrite)
    if torch.compiler.is_compiling():
        check_cross_entropy(logits, targets, **params)  # type: ignore[arg-type]
        inputs = (logits, targets)
        losses = call("cross_entropy", inputs, params, impl, batch_invariant=batch_invariant)[0]
    else:
        losses = _eager_losses(logits, targets, params, reduction, overwrite, impl, batch_invariant)
    if reduction == "none" or losses.dim() == 0:
        return losses
    # `mean` divides by the rows that count: with none of them 0 / 0 is NaN, as in torch.
    total = losses.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


def _eager_losses(
    logits: torch.Tensor,
    targets: torch.Tensor,
    params: dict[str, Any],
    reduction: str,
    overwrite: bool,
    impl: str | None,
    batch_invariant: bool,
) -> torch.Tensor:
    """Return the losses of the rows, or their reduction where the library computes it in one launch."""
    inputs = (logits, targets)

    # The plan is needed here, not only its result: the implementation decides what may be overwritten or
    # fused.
    def check() -> None:
        check_cross_entropy(*inputs, **params)

    call_plan = plan("cross_entropy", inputs, params, impl, check, batch_invariant)
    if targets.is_cpu:
        check_target_range("cross_entropy", targets, logits.shape[1], params["ignore_index"])
    # `overwrite` is a permission: where an implementation cannot use it, the call works as without it.
    if overwrite and _can_overwrite(logits, call_plan.impl):
        losses = _OverwritingCrossEntropy.apply(logits, targets, params, call_plan.impl)  # type: ignore[no-untyped-call]
        return losses  # type: ignore[no-any-return]
    plain = not (params["label_smoothing"] or params["z_loss"])
    if call_plan.impl == "torch" and reduction != "none" and plain and not overwrite:
        return reduced_cross_entropy(logits, targets, params["ignore_index"], reduction)
    if reduction == "mean" and has_mean(logits, targets, call_plan.impl):
        return mean_cross_entropy(logits, targets, params, call_plan.impl)
    return call_plan.run(inputs, params)[0]  # type: ignore[no-any-return]


def _can_overwrite(logits: torch.Tensor, impl: str) -> bool:
    """True if ``impl`` can write the gradient into logits of this layout."""
    return without_suffix(impl) in ("triton", "cuda") and logits.stride(1) == 1 and logits.stride(0) > 0


class _OverwritingCrossEntropy(torch.autograd.Function):
    """(logits, targets, params, impl) -> losses, whose backward writes the gradient over the logits.

    A functional operator of ``torch.library`` cannot declare this.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, params: dict[str, Any], impl: str
    ) -> torch.Tensor:
        losses, lse = call("cross_entropy", (logits, targets), params, impl)
        ctx.save_for_backward(logits, targets, lse)
        ctx.params, ctx.impl = params, impl
        return losses  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        logits, targets, lse = ctx.saved_tensors
        backend = without_suffix(ctx.impl)
        module = import_module(f"weft.ops.losses.with_{backend}")
        memory = logits.detach()
        by_column = backend != ctx.impl  # the batch-invariant variant
        arguments = (memory, grads[0], memory, targets, lse)
        module.cross_entropy_backward_into(*arguments, by_column=by_column, **ctx.params)
        # Autograd's version check then refuses a second backward, whose logits are lost.
        torch.autograd.graph.increment_version(logits)
        return memory, None, None, None


def _repeat_linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    impl: str | None = None,
) -> Repeat | None:
    """Return what repeats a loss by products of PyTorch's: with gradients, or without and of few logits."""
    if targets.is_cpu and not repeated_calls.records_on_cpu:
        return None
    params = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    if not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        options = {**params, "reduction": reduction, "impl": impl}
        return Repeat(partial(_loss_of_all_logits, options), by_torch=True) if _fits(x, weight) else None
    known = recent("linear_cross_entropy", impl, (x, weight, targets), params)
    if known is None:
        return None
    options = {**params, "reduction": reduction}
    function = _function_of_library(options, known.impl, may_compose=impl is None and targets.is_cuda)
    return function and Repeat(function, by_torch=True)


@repeated(_repeat_linear_cross_entropy)
def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return the cross entropy of ``x @ weight.T``, where it is faster without storing all logits.

    Without ``impl`` PyTorch's products and :func:`weft.ops.cross_entropy` compute a loss that dispatch does
    not know to be faster in chunks, and store its logits once. Name an ``impl`` to keep memory small.

    ``triton`` and ``cuda`` take chunks of rows (at most 320 MiB of logits, or as much as the weight's
    gradient takes) and compute both gradients with the loss, so that no product is computed twice. Between
    forward and backward they store dx and dweight (of float16 in float32). If nothing needs a
    gradient they compute the loss alone. ``torch``, ``eager`` and ``compile`` store all logits.

    Args:
        x: (N, C), float32, float16 or bfloat16; CPU or CUDA; any strides.
        weight: (V, C), of the same dtype and device (under autocast both take its dtype).
        targets: (N,), int64: a row of ``weight``, or ``ignore_index``. Out of range as in
            :func:`weft.ops.cross_entropy`: an error on a CPU, NaN on a GPU, never read out of bounds.
        ignore_index: rows with this target have a loss of 0 and no gradient.
        reduction: ``mean`` over the rows that are not ignored (NaN if all are) or ``sum``.
        label_smoothing: the share in [0, 1] of a target that is spread evenly over all columns.
        z_loss: z >= 0; z lse^2 is added to each loss.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        A float32 scalar.

    Raises:
        WeftError: a dtype, shape, device, ``reduction`` or scalar is not supported; on a CPU a target is
            out of range; ``impl`` is unknown or does not run here.

    Source: chunks and the gradient in the forward, arXiv:2410.10989.
    """
    refuse_if_requested("linear_cross_entropy", batch_invariant)
    params = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    x, weight = lowered(x, weight)
    validate.one_of("linear_cross_entropy: reduction", reduction, ("mean", "sum"))
    _check_linear_once((x, weight, targets), params)
    if not torch.compiler.is_compiling() and targets.device.type == "cpu":
        check_target_range("linear_cross_entropy", targets, weight.shape[0], ignore_index)
    # The fused forward computes both gradients: without a need for them it would triple the work.
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        if not torch.compiler.is_compiling():
            chosen = plan("linear_cross_entropy", (x, weight, targets), params, impl).impl
            options = {**params, "reduction": reduction}
            function = _function_of_library(options, chosen, may_compose=impl is None and targets.is_cuda)
            if function is not None:
                return function(x, weight, targets)  # type: ignore[no-any-return]
        loss = call("linear_cross_entropy", (x, weight, targets), params, impl)[0]
    elif _fits(x, weight):
        return _loss_of_all_logits({**params, "reduction": reduction, "impl": impl}, x, weight, targets)
    else:
        loss = _loss_without_gradients(x, weight, targets, params, impl)
    if reduction == "mean":
        loss = loss / (targets != ignore_index).sum()
    return loss  # type: ignore[no-any-return]


def _function_of_library(
    options: dict[str, Any], chosen: str, may_compose: bool
) -> Callable[..., Any] | None:
    """Return the loss with gradients if PyTorch computes the products, or None for another implementation.

    PyTorch's loss converts half types to float32 and back, where ours reads and writes the logits. So a call
    on a GPU without ``impl`` takes PyTorch's products and the operator cross_entropy. The gradient is not
    written over the logits, although nothing else needs them: a second backward may come.
    """
    if chosen != "torch":
        return None
    if may_compose:
        return partial(_loss_of_all_logits, options)
    if options["label_smoothing"] or options["z_loss"]:
        return None
    return reduced_loss_of_product(options["ignore_index"], options["reduction"])


def _fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """True if all logits are one chunk."""
    return x.shape[0] <= plan_chunks(x.shape[0], x.shape[1], weight.shape[0], x.element_size()).rows


def _loss_of_all_logits(
    options: dict[str, Any], x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return the loss of logits that are stored: two public calls."""
    return cross_entropy(torch.nn.functional.linear(x, weight), targets, **options)


def _check_linear_once(inputs: tuple[Any, ...], params: dict[str, Any]) -> None:
    """Check arguments, unless those of a recent call were like them."""
    name = "checked linear_cross_entropy"
    is_tracing = torch.compiler.is_compiling()
    if is_tracing or recent(name, None, inputs, params) is None:
        check_linear_cross_entropy(*inputs, **params)
        if not is_tracing and can_skip_dispatcher(inputs):
            store_recent(name, None, inputs, params, name)


def _loss_without_gradients(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    params: dict[str, float],
    impl: str | None,
) -> torch.Tensor:
    """Return the summed loss, by the operator cross_entropy on chunks of logits: enough for evaluation."""
    rows = plan_chunks(x.shape[0], x.shape[1], weight.shape[0], x.element_size()).rows
    total = x.new_zeros((), dtype=torch.float32)
    for x_chunk, target_chunk in zip(x.split(rows), targets.split(rows), strict=True):
        inputs = (x_chunk @ weight.T, target_chunk)
        total = total + call("cross_entropy", inputs, params, impl)[0].sum()
    return total
