"""Declaring one's own: decorators that tag a function, and change nothing anywhere else.

A tagged function is returned as it was, with what it declares as its attribute ``__weft__``; who
reads the file (``weft check --with mine.py``) collects the tags. Nothing is registered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from weft.core.cases import Case
from weft.core.cost import Cost
from weft.core.errors import WeftError
from weft.core.implementation import BACKENDS, Implementation, anywhere
from weft.core.operator import DIRECTIONS, FORWARD, Operator, unknown_name
from weft.core.support import Support

TAG = "__weft__"
THROUGH_AUTOGRAD = ("eager", "torch", "compile")  # whose backward autograd can work out

F = TypeVar("F", bound=Callable[..., Any])


def implementation(
    operator: str,
    *,
    backend: str,
    name: str | None = None,
    backward: Callable[..., tuple[Any, ...]] | None = None,
    deterministic: bool = True,
    directions: Sequence[str] | None = None,
    supports: Callable[[Case, str], Support] | None = None,
    devices: Sequence[str] = ("cpu", "cuda"),
    idea: str = "",
) -> Callable[[F], F]:
    """Declare the decorated function as one way of computing ``operator``.

    The function is the forward: it gets the operator's inputs as tensors and its parameters by
    name, and returns the output. ``backward(grad, *saved, **params)`` returns a tuple with one
    gradient for each differentiable input (``weft ops OPERATOR`` says what is saved). Without it
    torch code is differentiated by autograd, and a kernel (triton, cuda, numba) is forward only.
    ``name`` is the function's own unless given. ``deterministic=False`` declares that two runs may
    differ in the last bits. ``supports(case, device)`` says where it cannot run, with the reason;
    ``devices=("cpu",)`` is for compiled CPU code (``numba.njit``), which runs there and is timed.

    Raises :class:`WeftError` for a backend that there is not.
    """
    if backend not in BACKENDS:
        raise unknown_name("backend", str(backend), list(BACKENDS))
    if directions is None:
        both = backward is not None or backend in THROUGH_AUTOGRAD
        directions = DIRECTIONS if both else (FORWARD,)

    def tag(function: F) -> F:
        _taggable(function, "@weft.implementation")
        found = Implementation(
            operator=operator,
            name=name or function.__name__,
            backend=backend,
            forward=function,
            backward=backward,
            supports=supports or anywhere,
            deterministic=deterministic,
            directions=tuple(directions),
            idea=idea,
            devices=tuple(devices),
        )
        setattr(function, TAG, found)
        return function

    return tag


def operator(
    name: str, *, cases: Sequence[Case], cost: Callable[[Case, str], Cost], **more: Any
) -> Callable[[F], F]:
    """Declare the decorated function as the float64 reference of an operator of one's own.

    It gets float64 tensors and returns a float64 tensor (or a tuple of them). ``cases`` are where
    the operator is checked (tags ``check``, ``edge``) and timed (``bench``), ``cost(case,
    direction)`` is the compulsory work there, and ``more`` are the other fields of
    :class:`~weft.core.operator.Operator`: ``differentiable``, ``properties``, ``tolerance``, ...

    Raises :class:`WeftError` where there is no case, or for a field that an operator has not.
    """
    if not cases:
        raise WeftError(f"operator {name!r}: cases", expected="at least one", got="none")
    known = [f for f in Operator.__dataclass_fields__ if f not in ("name", "reference")]
    for field in more:
        if field not in known:
            raise unknown_name(f"field of operator {name!r}", field, known)

    def tag(function: F) -> F:
        _taggable(function, "@weft.operator")
        fields = {"summary": (function.__doc__ or "").strip().partition("\n")[0], **more}
        found = Operator(name=name, reference=function, cases=tuple(cases), cost=cost, **fields)
        setattr(function, TAG, found)
        return function

    return tag


def _taggable(function: object, what: str) -> None:
    if not callable(function):
        kind = type(function).__name__
        raise WeftError(f"{what} decorates a function", expected="a function", got=kind)
    if hasattr(function, TAG):
        raise WeftError(
            f"{what} decorates a function that is declared already",
            got=getattr(function, "__name__", "a function"),
            hint="one decorator a function; for a second name write a second function",
        )
