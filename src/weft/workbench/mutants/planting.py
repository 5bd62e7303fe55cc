"""How a mutant is planted: from what makes its forward to an implementation that is like any other.

``honest(operator)`` is the right way that most mutants start from, the library's call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from weft.core import BACKWARD, FORWARD, Implementation, registry
from weft.workbench.mutants.mutant import Mutant

Forward = Callable[..., Any]
Change = Callable[[torch.Tensor], Any]

OPERATORS = ("softmax", "gelu", "sum", "matmul")
NEEDS_GPU: Mapping[str, Any] = {"devices": ("cuda",)}


def honest(operator: str) -> Forward:
    """The library's forward of an operator; eager's where the library's returns not all of it."""
    library = registry.implementation(operator, "torch")
    whole = library.outputs is None
    return (library if whole else registry.implementation(operator, "eager")).forward


def plant(
    identity: str,
    title: str,
    killed_by: str,
    forward: Callable[[], Forward],
    *,
    backward: Callable[[], Forward] | None = None,
    **more: Any,
) -> Mutant:
    """A mutant whose ``forward()`` gives its forward, anew for each judgement.

    ``identity`` is row/operator/backend/what, ``killed_by`` the checks, the first one first, with
    blanks between. Without ``backward`` it is forward only.
    """
    _, operator, backend, _ = identity.split("/", 3)
    checks = killed_by.split()
    if "error" in checks and "special" not in checks:
        checks.append("special")  # values wrong everywhere: it hangs on which case comes first

    def make() -> Implementation:
        base = registry.implementation(operator, "torch" if backend == "eager" else backend)
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
    """The right answer, changed by ``change``."""
    return lambda: lambda *x, **params: change(honest(operator)(*x, **params))


def blank(operator: str, *x: torch.Tensor) -> torch.Tensor:
    """Memory for the answer, not written."""
    if operator == "sum":
        return x[0].new_empty(())
    if operator == "matmul":
        return x[0].new_empty(x[0].shape[0], x[1].shape[1])
    return torch.empty_like(x[0], memory_format=torch.contiguous_format)


def owned(y: torch.Tensor) -> torch.Tensor:
    """A copy in memory that Python code allocated, which is where guards can be put."""
    return torch.empty_like(y, memory_format=torch.contiguous_format).copy_(y)


def nudged(y: torch.Tensor, units: float, every: int = 1) -> torch.Tensor:
    """``y`` with each ``every``-th element ``units`` of its dtype's eps larger in size."""
    made = owned(y)
    some = made.view(-1)[::every]
    some.copy_(some.double() * (1 + units * torch.finfo(y.dtype).eps))
    return made


def past_the_end(y: torch.Tensor) -> torch.Tensor:
    """The one element behind a contiguous tensor's last."""
    return y.as_strided((1,), (1,), y.storage_offset() + y.numel())
