"""Loss of a causal language model: from its logits, or fused with the head, without logits."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from weft import ops
from weft.nn._common import cast
from weft.nn.loss import without_stored_logits

Module = Any
# Arguments of a model's forward that its loss function receives.
LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index", "shift_labels")


def causal_loss(
    self: Module,
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute transformers' causal loss by ``weft.ops.cross_entropy``, without a float32 copy of the
    logits."""
    loss = ops.cross_entropy(
        logits.reshape(-1, vocab_size),
        _targets(labels, shift_labels, ignore_index).to(logits.device),
        ignore_index=ignore_index,
        reduction=_reduction(num_items_in_batch),
        impl=self._weft_impl,
    )
    return _divide(loss, num_items_in_batch)


def forward_without_logits(self: Module, *args: Any, **kwargs: Any) -> Any:
    """Forward of a causal model whose loss is ``weft.ops.linear_cross_entropy``; ``logits`` is None.

    Used in training with ``labels=`` only; otherwise the model's own forward runs.
    """
    has_labels = kwargs.get("labels") is not None and not kwargs.get("logits_to_keep")
    if not (self.training and has_labels):
        return type(self).forward(self, *args, **kwargs)
    labels, return_dict = kwargs.pop("labels"), kwargs.pop("return_dict", None)
    # 0 or None here, and no argument of the inner model.
    kwargs.pop("logits_to_keep", None)
    loss_arguments = {name: kwargs.pop(name) for name in LOSS_ARGUMENTS if name in kwargs}
    # The model without its head: its last hidden state is the input of the fused operator.
    inner = self.base_model(*args, **kwargs, return_dict=True)
    loss = _head_and_loss(self, inner.last_hidden_state, labels, **loss_arguments)
    fields = {name: value for name, value in inner.items() if name != "last_hidden_state"}
    output = _output_class(self)(loss=loss, **fields)
    as_dict = self.config.return_dict if return_dict is None else return_dict
    return output if as_dict else output.to_tuple()


def _output_class(model: Module) -> Any:
    from transformers import modeling_outputs

    # The class that the model's own forward returns, so that callers see the same fields.
    is_gpt2 = type(model).__name__.startswith("GPT2")
    name = "CausalLMOutputWithCrossAttentions" if is_gpt2 else "CausalLMOutputWithPast"
    return getattr(modeling_outputs, name)


def _head_and_loss(
    model: Module,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
) -> torch.Tensor:
    x, weight = cast(hidden, model.lm_head.weight)
    loss = ops.linear_cross_entropy(
        x.flatten(0, -2),
        weight,
        _targets(labels, shift_labels, ignore_index).to(hidden.device),
        ignore_index=ignore_index,
        reduction=_reduction(num_items_in_batch),
        # The purpose of the fused head; dispatch might choose torch's, which stores the logits.
        impl=without_stored_logits(model._weft_impl, x),
    )
    return _divide(loss, num_items_in_batch)


def _targets(labels: torch.Tensor, shift_labels: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    """Return each position's target: the next position's label; the last position has none."""
    if shift_labels is None:
        # The labels move, not the logits: a slice of the logits would have to be copied.
        shift_labels = functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
    return shift_labels.reshape(-1)


def _reduction(num_items_in_batch: Any) -> str:
    return "mean" if num_items_in_batch is None else "sum"


def _divide(loss: torch.Tensor, count: torch.Tensor | int | None) -> torch.Tensor:
    """Divide a sum by the number of items of the whole batch, which gradient accumulation passes."""
    if count is None:
        return loss
    return loss / (count.to(loss.device) if isinstance(count, torch.Tensor) else count)
