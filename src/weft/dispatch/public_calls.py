"""Public functions whose arguments are not those of their operator: a repeated call is looked up before.

``weft.ops.embedding(ids, weight)`` makes a table of no positions, ``weft.ops.attention(q, k, v)`` eight
scalars and a placeholder, and a mean of cross entropy is two launches. A call like an earlier one needs none
of that: its function takes the public arguments (repeated_calls.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from weft.dispatch import invariance
from weft.dispatch.operator import _gradient_positions, _with_backward, can_skip_dispatcher
from weft.dispatch.plan_cache import _recent, find_recent, recent, store_recent
from weft.dispatch.repeated_calls import Function, Implemented, is_due, repeated_call_of

# Names of the fast path are bound once: each attribute in a chain is another look-up in each call.
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_function_modes = torch._C._len_torch_function_stack
_is_profiling = torch._C._autograd._profiler_enabled


def repeat_public(name: str, impl: str | None, inputs: tuple[Any, ...], scalars: tuple[Any, ...] = ()) -> Any:
    """Return the result of a public call by the function that was generated for calls like it, or None.

    A public function whose arguments are not yet those of its operator asks first. ``name`` is the public
    call's among recent ones; see :func:`count_public`.
    """
    if _is_dynamo_compiling() or torch.compiler._is_compiling_flag or invariance.anywhere:
        return None
    try:
        for x in inputs:
            if x.is_nested:
                return None
        for entry in _recent.get((name, impl, _is_grad_enabled(), *scalars), ()):
            if entry.is_alike(*inputs):
                break
        else:
            return None
    except (TypeError, AttributeError, RuntimeError):
        return None
    direct = entry.direct
    if (
        direct is None
        or _function_modes()  # is_alike() knows of a dispatch mode
        or _is_profiling()
        or forward_ad._current_level >= 0
    ):
        return None
    return direct(*inputs)


def count_public(
    name: str,
    impl: str | None,
    inputs: tuple[Any, ...],
    scalars: dict[str, Any],
    generate: Callable[[], Function | None],
) -> None:
    """Count a public call that :func:`repeat_public` did not run; ``generate`` its function when due."""
    if torch.compiler.is_compiling() or invariance.anywhere or not can_skip_dispatcher(inputs):
        return
    entry = find_recent(name, impl, inputs, scalars)
    if entry is None:
        store_recent(name, impl, inputs, scalars, name)
    elif is_due(entry):
        entry.direct = generate()


def generate_public(
    name: str,
    impl: str | None,
    arguments: tuple[Any, ...],
    params: dict[str, Any],
    count: int,
) -> Function | None:
    """Return the function of the first ``count`` of an operator's arguments that repeats a call.

    The others are placeholders, which take no gradient. None if the call is not one that is repeated.
    """
    known = recent(name, impl, arguments, params)
    if known is None or known.repeat is None:
        return None
    rest, params = arguments[count:], dict(params)
    inputs, schema = arguments[:count], _with_backward[name]
    positions = _gradient_positions(name, schema)
    kernels = Implemented.of(name, known.impl, params, schema, positions, can_skip_dispatcher)
    return repeated_call_of(kernels.with_constants(rest), inputs)
