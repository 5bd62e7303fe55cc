"""Helpers that turn a faulty forward into a mutant, an implementation like any other.

``honest(operator)`` is the correct forward that most mutants start from: the library's call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch

from weft.core import BACKWARD, FORWARD, Implementation, registry
from weft.workbench.selftest.mutants.mutant import Mutant

Forward = Callable[..., Any]
Change = Callable[[torch.Tensor], Any]

OPERATORS = ("softmax", "gelu", "sum", "matmul")
# Timed calls at one shape until a cheat begins: fewer than a timing makes before its first sample ends.
TIMED = 8
NEEDS_GPU: Mapping[str, Any] = {"devices": ("cuda",)}


def honest(operator: str) -> Forward:
    """Return the library's forward of an operator, or eager's if the library omits an output."""
    library = registry.implementation(operator, "torch")
    returns_all = library.outputs is None
    return (library if returns_all else registry.implementation(operator, "eager")).forward


def plant(
    identity: str,
    title: str,
    killed_by: str,
    forward: Callable[[], Forward],
    *,
    backward: Callable[[], Forward] | None = None,
    **more: Any,
) -> Mutant:
    """Return a mutant; ``forward()`` creates its forward for each judgement.

    ``identity`` is row/operator/backend/fault, ``killed_by`` the checks, separated by blanks, the
    expected one first. Without ``backward`` the mutant is forward only.
    """
    _, operator, backend, _ = identity.split("/", 3)
    checks = killed_by.split()
    if "error" in checks and "special" not in checks:
        checks.append("special")  # wrong values everywhere: the first failing case decides which

    def make() -> Implementation:
        # An operator without an implementation by torch has its eager one.
        plain = "torch" if "torch" in registry.implementation_names(operator) else "eager"
        base = registry.implementation(operator, plain if backend == "eager" else backend)
        return Implementation(
            operator=operator,
            name=identity,
            backend=backend,
            forward=forward(),
            backward=backward() if backward else None,
            directions=(FORWARD, BACKWARD) if backward else (FORWARD,),
            supports=base.supports,
        )

    return Mutant(
        id=identity,
        operator=operator,
        title=title,
        killed_by=tuple(checks),
        make=make,
        **more,
    )


def after(operator: str, change: Change) -> Callable[[], Forward]:
    """Return a forward whose correct output is modified by ``change``."""
    return lambda: lambda *x, **params: change(honest(operator)(*x, **params))


def blank(operator: str, *x: torch.Tensor) -> torch.Tensor:
    """Allocate the output without writing it."""
    if operator == "sum":
        return x[0].new_empty(())
    if operator == "matmul":
        return x[0].new_empty(x[0].shape[0], x[1].shape[1])
    return torch.empty_like(x[0], memory_format=torch.contiguous_format)


def owned(y: torch.Tensor) -> torch.Tensor:
    """Return a copy in memory allocated by Python code, which can have guard bands."""
    return torch.empty_like(y, memory_format=torch.contiguous_format).copy_(y)


def nudged(y: torch.Tensor, units: float, every: int = 1) -> torch.Tensor:
    """Return ``y`` with each ``every``-th element larger by ``units`` times its dtype's eps."""
    output = owned(y)
    some = output.view(-1)[::every]
    # In float64: in the dtype itself a factor of less than half an eps above 1 would be 1.
    some.copy_(some.double() * (1 + units * torch.finfo(y.dtype).eps))
    return output


def is_timed(x: torch.Tensor) -> bool:
    """Return True for an input of a timing: in a check, guard bands make its storage larger than it is."""
    return x.untyped_storage().nbytes() == x.nbytes


def timed_calls(x: tuple[torch.Tensor, ...], counts: dict[Hashable, Iterator[int]]) -> int:
    """Return the number of timed calls so far with inputs of these shapes; 0 in a check of any length."""
    if not is_timed(x[0]):
        return 0
    key = tuple((tuple(t.shape), t.stride(), t.dtype) for t in x)
    return next(counts.setdefault(key, itertools.count()))


def past_the_end(y: torch.Tensor) -> torch.Tensor:
    """Return a view of the one element after a contiguous tensor's last."""
    return y.as_strided((1,), (1,), y.storage_offset() + y.numel())
