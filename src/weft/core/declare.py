"""Decorators for your own implementations and operators.

A decorator stores its declaration in the function's attribute ``__weft__`` and returns the function
unchanged. Nothing is registered: a command that reads the file (``weft check --with mine.py``) collects the
declarations.
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
THROUGH_AUTOGRAD = ("eager", "torch", "compile")  # autograd differentiates these

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
    """Declare the decorated function as an implementation of ``operator``.

    The function is the forward: it gets the operator's inputs as tensors and its parameters by name, and
    returns the output.

    Args:
        operator: name of the operator.
        backend: one of ``eager``, ``torch``, ``compile``, ``triton``, ``cuda``, ``numba``.
        name: name of the implementation; the function's own by default.
        backward: ``backward(grad, *saved, **params)`` returns a tuple with one gradient for each
            differentiable input. Without it torch code is differentiated by autograd, and a kernel
            (triton, cuda, numba) is forward only.
        deterministic: False declares that two runs may differ in the last bits.
        directions: the directions that exist, if not those that follow from ``backward``.
        supports: ``supports(case, device)`` returns whether the case can run, with the reason if not.
        devices: ``("cpu",)`` is for compiled CPU code (``numba.njit``), which runs there and is timed.
        idea: one line that says how the implementation works.

    Raises:
        WeftError: ``backend`` is unknown, or the function is already declared.
    """
    if backend not in BACKENDS:
        raise unknown_name("backend", str(backend), list(BACKENDS))
    # A kernel without a backward is forward only. Code of torch calls has one through autograd.
    if directions is None:
        has_backward = backward is not None or backend in THROUGH_AUTOGRAD
        directions = DIRECTIONS if has_backward else (FORWARD,)

    def tag(function: F) -> F:
        _taggable(function, "@weft.implementation")
        declared = Implementation(
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
        # A tag instead of a registration: importing the file does not change the registry of this process.
        setattr(function, TAG, declared)
        return function

    return tag


def operator(
    name: str, *, cases: Sequence[Case], cost: Callable[[Case, str], Cost], **fields: Any
) -> Callable[[F], F]:
    """Declare the decorated function as the float64 reference of an operator of your own.

    The function gets float64 tensors and returns a float64 tensor (or a tuple of them).

    Args:
        name: name of the operator.
        cases: the points to check (tags ``check``, ``edge``) and to time (``bench``).
        cost: ``cost(case, direction)`` returns the compulsory work.
        fields: the other fields of :class:`~weft.core.operator.Operator`: ``differentiable``,
            ``properties``, ``tolerance``, ...

    Raises:
        WeftError: ``cases`` is empty, or a field is unknown.
    """
    if not cases:
        raise WeftError(f"operator {name!r}: cases", expected="at least one", got="none")
    # `name` is the decorator's own argument, and `reference` the decorated function.
    known = [f for f in Operator.__dataclass_fields__ if f not in ("name", "reference")]
    for field in fields:
        if field not in known:
            raise unknown_name(f"field of operator {name!r}", field, known)

    def tag(function: F) -> F:
        _taggable(function, "@weft.operator")
        # The first line of the docstring describes the operator in lists, unless `summary` is given.
        summary = (function.__doc__ or "").strip().partition("\n")[0]
        values = {"summary": summary, **fields}
        declared = Operator(name=name, reference=function, cases=tuple(cases), cost=cost, **values)
        setattr(function, TAG, declared)
        return function

    return tag


def _taggable(function: object, what: str) -> None:
    if not callable(function):
        kind = type(function).__name__
        raise WeftError(f"{what} decorates a function", expected="a function", got=kind)
    if hasattr(function, TAG):
        raise WeftError(
            f"{what} decorates a function that is already declared",
            got=getattr(function, "__name__", "a function"),
            hint="use one decorator for each function; write a second function for a second name",
        )
