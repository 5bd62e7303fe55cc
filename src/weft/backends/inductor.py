"""torch.compile: an implementation derived from another by compiling it.

A large call is compiled for its exact shapes, as a user who wants speed would do. Small calls share code
with dynamic sizes, so that a hundred odd shapes do not compile a hundred times.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any

from weft.core import Implementation

LARGE = 1 << 18  # elements


def compiled(of: Implementation) -> Implementation:
    """Return ``of`` with its forward under torch.compile; the backward goes through autograd."""

    def forward(*inputs: Any, **params: Any) -> Any:
        # Two caches: exact shapes for large calls, which are worth a compilation, and dynamic shapes for
        # small ones.
        large = max(x.numel() for x in inputs) >= LARGE
        # None is the key of the one function for all small shapes.
        shapes = tuple(x.shape for x in inputs) if large else None
        return _compile(of.forward, shapes)(*inputs, **params)

    forward.compiles = of.forward  # type: ignore[attr-defined]  # an outer torch.compile traces this

    return Implementation(
        operator=of.operator,
        backend="compile",
        forward=forward,
        supports=of.supports,
        deterministic=of.deterministic,
        idea=f"torch.compile of {of.name}",
    )


@cache
def _compile(function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...] | None) -> Any:
    import torch

    # Each odd shape, stride and dtype of a check is a specialisation of its own: past the default
    # limit of 8 eager would run in silence, and another kernel would be judged than the one named.
    torch._dynamo.config.recompile_limit = 512
    torch._dynamo.config.accumulated_recompile_limit = 4096
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    # A backward that may run again (retain_graph), as the check and the clock run it, may not eat
    # its saved tensors.
    torch._functorch.config.donated_buffer = False
    # Compiled code is kept by code object: a copy of its own keeps exact shapes apart from dynamic.
    code = function.__code__.replace()
    own = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(own, fullgraph=True, dynamic=None if shapes is None else False)
