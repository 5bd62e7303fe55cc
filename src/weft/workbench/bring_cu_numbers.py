"""The arithmetic of a ``.cu`` file's header: a small part of Python's own, and nothing beside it.

    expression  number | NAME | TENSOR.shape[i] | TENSOR.stride(i) | TENSOR.numel() | TENSOR.dim()
                | TENSOR.element_size() | -e | e + e | e - e | e * e | e / e | e % e | (e)
                | min(e, ...) | max(e, ...) | cdiv(e, e) | next_power_of_2(e)

``/`` of two integers is their whole quotient, as in C; and 0 / 0 is 0, so that an empty tensor has
no rows. The text is parsed by Python, but only these nodes of its tree are taken, and they are
turned into closures: nothing is evaluated that is not in the list above.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

Number = int | float
Names = Mapping[str, Any]  # what each name stands for: a tensor or a number
Value = Callable[[Names], Number]

LARGEST = 1 << 62  # of an integer: all are passed as 64 bits
GRAMMAR = (
    "numbers, names, + - * / %, .shape[i], .stride(i), .numel(), .dim(), .element_size(), "
    "min, max, cdiv, next_power_of_2"
)


def _divide(a: Number, b: Number) -> Number:
    if isinstance(a, float) or isinstance(b, float):
        return a / b
    return 0 if a == 0 and b == 0 else a // b


def _power_of_2(n: Number) -> int:
    return 1 << max(int(n) - 1, 0).bit_length()


OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: _divide,
    ast.FloorDiv: _divide,
    ast.Mod: lambda a, b: a % b,
}
FUNCTIONS: dict[str, tuple[Callable[..., Number], int, int]] = {  # with how many arguments
    "min": (min, 2, 8),
    "max": (max, 2, 8),
    "cdiv": (lambda a, b: -_divide(-a, b), 2, 2),
    "next_power_of_2": (_power_of_2, 1, 1),
}
METHODS: dict[str, int] = {"numel": 0, "dim": 0, "element_size": 0, "stride": 1}


class Refused(Exception):
    """What is wrong with an expression, in words; its caller knows the line."""


def number(text: str, tensors: frozenset[str], numbers: frozenset[str]) -> Value:
    """The expression as a function of what its names stand for.

    ``tensors`` and ``numbers`` are the names that may be used. Raises :class:`Refused`.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Refused(f"{text.strip()!r} is no expression") from error
    value = _Reader(text.strip(), tensors, numbers).read(tree)
    return lambda names: _bounded(value(names), text)


def _bounded(value: Number, text: str) -> Number:
    if isinstance(value, int) and abs(value) > LARGEST:
        raise Refused(f"{text.strip()!r} is {value}, more than 64 bits hold")
    return value


class _Reader:
    """From Python's tree to closures."""

    def __init__(self, text: str, tensors: frozenset[str], numbers: frozenset[str]) -> None:
        self.text, self.tensors, self.numbers = text, tensors, numbers

    def read(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant(value=bool()):
                raise self._refused(node)
            case ast.Constant(value=int() | float() as constant):
                return lambda names: constant
            case ast.Name(id=name):
                return self._name(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self.read(operand)
                return lambda names: -inner(names)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return self._operator(OPERATORS[type(op)], left, right, node)
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="shape")):
                return self._shape(self._tensor(name), node.slice)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method), keywords=[]):
                return self._method(self._tensor(name), method, node)
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
                return self._function(name, node)
        raise self._refused(node)

    def _refused(self, node: ast.expr) -> Refused:
        return Refused(f"{ast.unparse(node)!r} in {self.text!r} is not one of: {GRAMMAR}")

    def _name(self, name: str) -> Value:
        if name in self.numbers:
            return lambda names: _given(names, name)
        if name in self.tensors:
            raise Refused(f"{name!r} is a tensor, not a number; {name}.numel() is its elements")
        raise Refused(f"{name!r} in {self.text!r} is not known before this line")

    def _tensor(self, name: str) -> str:
        if name not in self.tensors:
            raise Refused(f"{name!r} in {self.text!r} is not a tensor known before this line")
        return name

    def _operator(
        self, apply: Callable[[Any, Any], Number], left: ast.expr, right: ast.expr, node: ast.expr
    ) -> Value:
        a, b = self.read(left), self.read(right)

        def value(names: Names) -> Number:
            try:
                return apply(a(names), b(names))
            except (ArithmeticError, ValueError) as error:
                raise Refused(f"{ast.unparse(node)!r} has no answer: {error}") from error

        return value

    def _shape(self, name: str, index: ast.expr) -> Value:
        at = self._index(index)
        return lambda names: _of(name, "shape", names[name].shape, at)

    def _method(self, name: str, method: str, node: ast.Call) -> Value:
        if METHODS.get(method) != len(node.args):
            raise self._refused(node)
        if method == "stride":
            at = self._index(node.args[0])
            return lambda names: _of(name, "stride", names[name].stride(), at)
        return lambda names: getattr(names[name], method)()

    def _index(self, node: ast.expr) -> int:
        """A dimension, as a whole number written out."""
        sign, inner = 1, node
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            sign, inner = -1, node.operand
        if isinstance(inner, ast.Constant) and type(inner.value) is int:
            return sign * inner.value
        raise Refused(f"a dimension is a whole number, not {ast.unparse(node)!r}")

    def _function(self, name: str, node: ast.Call) -> Value:
        apply, least, most = FUNCTIONS[name]
        if not least <= len(node.args) <= most:
            raise Refused(f"{ast.unparse(node)!r}: {name} takes {least} arguments")
        values = [self.read(a) for a in node.args]

        def value(names: Names) -> Number:
            try:
                return apply(*(v(names) for v in values))
            except (ArithmeticError, ValueError) as error:
                raise Refused(f"{ast.unparse(node)!r} has no answer: {error}") from error

        return value


def _given(names: Names, name: str) -> Number:
    value = names.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Refused(f"{name!r} is {value!r} here, not a number")
    return value


def _of(name: str, what: str, sizes: tuple[int, ...], at: int) -> int:
    if not -len(sizes) <= at < len(sizes):
        raise Refused(f"{name}.{what} of dimension {at}, but {name} has {len(sizes)} dimensions")
    return sizes[at]


def whole(value: Number, what: str) -> int:
    """The number where it must be whole and not negative; raises :class:`Refused`."""
    if not isinstance(value, int) or value < 0:
        raise Refused(f"{what} is {value}, expected a whole number of 0 or more")
    return value
