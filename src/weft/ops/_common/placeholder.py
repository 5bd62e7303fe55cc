"""Tensors that stand for an absent argument of an operator, whose schema has a tensor in its place.

Nothing reads or writes their elements. They are made once for each shape: a new one in each call would cost
the host as much as a launch.
"""

from __future__ import annotations

import torch

from weft.dispatch.operator import PLAIN_TYPES, can_skip_dispatcher

MAX_PLACEHOLDERS = 256
_placeholders: dict[tuple[tuple[int, ...], torch.dtype, torch.device], torch.Tensor] = {}


def placeholder(like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor on the device of ``like``, perhaps the one of an earlier call.

    A trace gets a new one, and so does a call with a tensor subclass.
    """
    if torch.compiler.is_dynamo_compiling() or type(like) not in PLAIN_TYPES:
        return like.new_empty(shape, dtype=dtype)
    key = (shape, dtype, like.device)
    x = _placeholders.get(key)
    if x is not None:
        return x
    # Not an inference tensor, which a later call outside of that mode could not take.
    with torch.inference_mode(False):
        x = like.detach().new_empty(shape, dtype=dtype)
    # While a mode or a transform replaces tensors, this one is of a kind that no other call can take.
    if can_skip_dispatcher((like, x)):
        # Cleared as a whole: an eviction order would cost each hit more than a rare rebuild costs.
        if len(_placeholders) >= MAX_PLACEHOLDERS:
            _placeholders.clear()
        _placeholders[key] = x
    return x
