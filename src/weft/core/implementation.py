"""``Implementation``: how one backend computes an operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from weft.core.cases import Case
from weft.core.errors import check_name
from weft.core.support import YES, Support

OF_BACKEND = "(the backend's)"  # the default of a name; an empty name is an error
INVARIANT = "/invariant"  # ends the name of a batch-invariant variant
BACKENDS = ("eager", "torch", "compile", "triton", "cuda", "numba")


def anywhere(case: Case, device: str) -> Support:
    """Default of ``supports``: every case on every device."""
    return YES


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """Description of how one backend computes an operator.

    ``name`` is the backend's unless it is given, as for a second implementation of a backend
    (``cuda/03-shared-tile``).

    ``forward(*inputs, **params)`` returns the output. ``backward(grad, *saved, **params)`` returns a tuple
    with one gradient for each differentiable input, where ``saved`` is what the operator's ``save`` returns.
    None means that autograd differentiates ``forward``.

    ``supports(case, device)`` says whether the implementation takes a case ('cpu' or 'cuda'); whether its
    backend works on this machine is asked separately. ``devices`` are the kinds of device it is made for.
    ``directions`` are the directions that exist. ``deterministic=False`` declares that two runs may differ
    in the last bits. ``idea`` is one line that says how it works; in a ladder, what the step adds.

    ``aot_kernels`` are the kernels that its toolchain can compile ahead of time, without a GPU.
    ``wraps_library`` names a library (``cublas``) whose kernels are expected among its own.
    ``delegates_to_torch`` are the directions that are PyTorch's own call as a whole and are recorded as
    such. ``outputs`` limits the outputs it returns to the first so many, for a library that does not return
    a log-sum-exp, say; every output that takes a gradient is among them.

    ``invariant`` is the variant for calls that ask for batch invariance (:func:`with_invariant`): the bits of
    a row do not depend on the rows beside it, on its place, or on how the batch is cut. Its name is this
    one's and ``/invariant``, and the registry finds it by that name. None: there is no such variant.
    """

    operator: str
    backend: str
    name: str = OF_BACKEND
    forward: Callable[..., Any]
    backward: Callable[..., tuple[Any, ...]] | None = None
    supports: Callable[[Case, str], Support] = anywhere
    deterministic: bool = True
    directions: tuple[str, ...] = ("forward", "backward")
    idea: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    aot_kernels: tuple[Any, ...] = ()
    wraps_library: str = ""
    outputs: int | None = None
    delegates_to_torch: tuple[str, ...] = ()
    invariant: Implementation | None = None

    def __post_init__(self) -> None:
        if self.name == OF_BACKEND:
            object.__setattr__(self, "name", self.backend)
        check_name("implementation", self.name)
        if self.backend not in BACKENDS:
            raise ValueError(f"{self.name}: backend {self.backend!r} is none of {BACKENDS}")

    def backend_of(self, direction: str) -> str:
        """Return the backend whose kernels run in a direction."""
        return "torch" if direction in self.delegates_to_torch else self.backend

    @property
    def is_variant(self) -> bool:
        """True for a batch-invariant variant (``cuda/invariant``)."""
        return self.name.endswith(INVARIANT)

    @property
    def is_step(self) -> bool:
        """True for a step of a ladder (``cuda/03-shared-tile``)."""
        return "/" in self.name and self.name.split("/", 1)[1][:2].isdigit()


def with_invariant(implementation: Implementation, **changes: Any) -> Implementation:
    """Return the implementation with a batch-invariant variant, which differs from it by ``changes``.

    Without changes the implementation is batch invariant as it is.
    """
    changes = {"aot_kernels": (), **changes, "name": implementation.name + INVARIANT}
    return replace(implementation, invariant=replace(implementation, **changes))


def without_suffix(name: str) -> str:
    """Return the name of the implementation of which ``name`` is or has a batch-invariant variant."""
    return name.removesuffix(INVARIANT) if isinstance(name, str) else name
