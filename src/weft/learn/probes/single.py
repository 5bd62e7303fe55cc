"""``Single``, a float32 number whose operations are counted and cannot leave float32."""

from __future__ import annotations

from typing import Any

import numpy

from weft.learn.grading import Refused


class Single:
    """A float32 number: each operation rounds to float32, as on a GPU.

    Plain ints and floats may be mixed in. ``float(x)`` and numpy's functions are refused, because they would
    leave float32. ``Single.operations`` counts the additions, products and quotients since it was last set.
    """

    operations = 0
    __slots__ = ("_value",)
    __array_ufunc__ = None  # numpy leaves the operation to this class

    def __init__(self, value: float | numpy.floating) -> None:
        self._value = numpy.float32(value)

    @staticmethod
    def exact(number: Any) -> float:
        """Return the value as a Python float, for the grader."""
        return float(number._value) if isinstance(number, Single) else float(number)

    def _result(self, other: Any, name: str, *, swapped: bool = False) -> Any:
        if not isinstance(other, Single | int | float):
            return NotImplemented
        right = other._value if isinstance(other, Single) else numpy.float32(other)
        left = self._value
        if swapped:
            left, right = right, left
        Single.operations += 1
        with numpy.errstate(all="ignore"):
            return Single(getattr(numpy, name)(left, right))

    def __add__(self, other: Any) -> Any:
        return self._result(other, "add")

    def __radd__(self, other: Any) -> Any:
        return self._result(other, "add", swapped=True)

    def __sub__(self, other: Any) -> Any:
        return self._result(other, "subtract")

    def __rsub__(self, other: Any) -> Any:
        return self._result(other, "subtract", swapped=True)

    def __mul__(self, other: Any) -> Any:
        return self._result(other, "multiply")

    def __rmul__(self, other: Any) -> Any:
        return self._result(other, "multiply", swapped=True)

    def __truediv__(self, other: Any) -> Any:
        return self._result(other, "divide")

    def __rtruediv__(self, other: Any) -> Any:
        return self._result(other, "divide", swapped=True)

    def __neg__(self) -> Single:
        return Single(-self._value)

    def __abs__(self) -> Single:
        return Single(abs(self._value))

    def _order(self, other: Any) -> float:
        return Single.exact(self) - Single.exact(other)

    def __lt__(self, other: Any) -> bool:
        return self._order(other) < 0

    def __le__(self, other: Any) -> bool:
        return self._order(other) <= 0

    def __gt__(self, other: Any) -> bool:
        return self._order(other) > 0

    def __ge__(self, other: Any) -> bool:
        return self._order(other) >= 0

    def __float__(self) -> float:
        raise Refused("float32 only", "float(x) leaves float32: use the numbers as they come")

    def __repr__(self) -> str:
        return f"Single({self._value})"
