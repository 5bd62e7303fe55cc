"""Functions of a learner's file whose result has the expected type, or becomes a reason.

A function without a ``return`` gives None, a frequent mistake of beginners. A grader that computes with None
would fail itself, and the learner would read its traceback.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from weft.learn.candidate import Candidate
from weft.learn.grading import require
from weft.learn.probes.single import Single


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(v, Real) for v in value)


KINDS: dict[str, Callable[[Any], bool]] = {
    "a number": lambda value: isinstance(value, Real),
    "an integer": lambda value: isinstance(value, Integral),
    "a float32 number": lambda value: isinstance(value, Real | Single),
    "a pair of numbers": _is_pair,
}


def function_returning(kind: str, candidate: Candidate, name: str) -> Callable[..., Any]:
    """Return the function ``name`` of the file; it raises ``Refused`` if its result is not ``kind``."""
    function, fits = candidate.function(name), KINDS[kind]

    def call(*arguments: Any) -> Any:
        result = function(*arguments)
        reason = f"expected {kind}, got {result!r}"
        if result is None:
            reason += ". Does the function return its result?"
        require(fits(result), f"result of {name}", reason)
        return result

    return call
