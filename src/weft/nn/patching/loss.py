"""The loss of a causal language model: with its logits, or together with the head, without them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from weft import ops
from weft.nn._common import cast
from weft.nn.loss import sparing

Module = Any
# Of the arguments that come with labels, those that are the loss's alone.
FOR_LOSS = ("num_items_in_batch", "ignore_index", "shift_labels")


def causal_loss(
    self: Module,
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """transformers' causal loss by ``weft.ops.cross_entropy``: no float32 copy of the logits."""
    targets = _targets(labels, shift_labels, ignore_index).to(logits.device)
    loss = ops.cross_entropy(
        logits.reshape(-1, vocab_size),
        targets,
        ignore_index=ignore_index,
        reduction=_reduction(num_items_in_batch),
        impl=self._weft_impl,
    )
    return _shared_out(loss, num_items_in_batch)


def without_logits(self: Module, *args: Any, **kwargs: Any) -> Any:
    """A causal model's forward whose loss is ``weft.ops.linear_cross_entropy``: ``logits`` is None.

    Only in training and where ``labels=`` is given; else the model's own forward runs.
    """
    fits = kwargs.get("labels") is not None and not kwargs.get("logits_to_keep")
    if not (self.training and fits):
        return type(self).forward(self, *args, **kwargs)
    labels, return_dict = kwargs.pop("labels"), kwargs.pop("return_dict", None)
    kwargs.pop("logits_to_keep", None)
    given = {name: kwargs.pop(name) for name in FOR_LOSS if name in kwargs}
    inner = self.base_model(*args, **kwargs, return_dict=True)
    loss = _head_and_loss(self, inner.last_hidden_state, labels, **given)
    answer = _output_class(self)(loss=loss, **{k: v for k, v in inner.items() if k not in LAST})
    asked = self.config.return_dict if return_dict is None else return_dict
    return answer if asked else answer.to_tuple()


LAST = ("last_hidden_state",)


def _output_class(model: Module) -> Any:
    from transformers import modeling_outputs

    crossed = type(model).__name__.startswith("GPT2")
    name = "CausalLMOutputWithCrossAttentions" if crossed else "CausalLMOutputWithPast"
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
        impl=sparing(model._weft_impl, x),
    )
    return _shared_out(loss, num_items_in_batch)


def _targets(
    labels: torch.Tensor, shift_labels: torch.Tensor | None, ignore_index: int
) -> torch.Tensor:
    """Each position's target is the next position's label; the last has none."""
    if shift_labels is None:
        shift_labels = functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
    return shift_labels.reshape(-1)


def _reduction(num_items_in_batch: Any) -> str:
    return "mean" if num_items_in_batch is None else "sum"


def _shared_out(loss: torch.Tensor, count: torch.Tensor | int | None) -> torch.Tensor:
    if count is None:
        return loss
    return loss / (count.to(loss.device) if isinstance(count, torch.Tensor) else count)
