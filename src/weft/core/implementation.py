"""An implementation is one way of computing an operator, in one backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.core.cases import Case
from weft.core.support import YES, Support

BACKENDS = ("eager", "torch", "compile", "triton", "cuda", "numba")


def anywhere(case: Case, device: str) -> Support:
    """The default of ``supports``: every case, on every device."""
    return YES


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way of computing an operator.

    ``forward(*inputs, **params)`` returns the output. ``backward(grad, *saved, **params)`` returns
    a tuple with one gradient for each differentiable input, ``saved`` being what the operator's
    ``save`` gives; None means that autograd through ``forward`` is the backward.
    ``supports(case, device)`` says what it takes ('cpu' or 'cuda'), apart from whether its backend
    works here. ``specimens`` are what its toolchain can compile and take apart with no GPU.
    ``idea`` is one line: the step's idea in a ladder. ``deterministic=False`` declares that two
    runs may differ in the last bits; ``directions`` that only the forward exists; ``around`` that
    a library's kernels are meant to stand among its own (``cublas``, for the products);
    ``outputs`` that of several it returns the first so many alone, as a library does that keeps a
    log-sum-exp to itself: what takes a gradient is always among them; ``handed`` the directions
    that are PyTorch's own call as a whole, and are recorded as that.
    """

    operator: str
    name: str
    backend: str
    forward: Callable[..., Any]
    backward: Callable[..., tuple[Any, ...]] | None = None
    supports: Callable[[Case, str], Support] = anywhere
    deterministic: bool = True
    directions: tuple[str, ...] = ("forward", "backward")
    idea: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    specimens: tuple[Any, ...] = ()
    around: str = ""
    outputs: int | None = None
    handed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"{self.name}: backend {self.backend!r} is none of {BACKENDS}")

    def backend_of(self, direction: str) -> str:
        """Whose kernels are to run in a direction."""
        return "torch" if direction in self.handed else self.backend

    @property
    def is_step(self) -> bool:
        """Whether this is a step of a ladder (``cuda/03-shared-tile``)."""
        return "/" in self.name and self.name.split("/", 1)[1][:2].isdigit()
