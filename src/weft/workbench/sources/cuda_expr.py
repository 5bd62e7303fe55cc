"""Integer and float arithmetic in the header of a ``.cu`` file.

The grammar is a small subset of Python's:

    expression  number | NAME | TENSOR.shape[i] | TENSOR.stride(i) | TENSOR.numel() | TENSOR.dim()
                | TENSOR.element_size() | -e | e + e | e - e | e * e | e / e | e % e | (e)
                | min(e, ...) | max(e, ...) | cdiv(e, e) | next_power_of_2(e)

``/`` of two integers is floor division; 0 / 0 is 0, so that an empty tensor has no rows. Python
parses the text; a reader accepts only the nodes above and turns them into closures. Nothing is
passed to ``eval``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

Number = int | float
Names = Mapping[str, Any]  # the value of each name: a tensor or a number
Value = Callable[[Names], Number]

MAX_INTEGER = 1 << 62  # kernels receive integers as 64 bits
GRAMMAR = (
    "numbers, names, + - * / %, .shape[i], .stride(i), .numel(), .dim(), .element_size(), "
    "min, max, cdiv, next_power_of_2"
)


def _divide(a: Number, b: Number) -> Number:
    if isinstance(a, float) or isinstance(b, float):
        return a / b
    return 0 if a == 0 and b == 0 else a // b


def _next_power_of_2(n: Number) -> int:
    return 1 << max(int(n) - 1, 0).bit_length()


OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: _divide,
    ast.FloorDiv: _divide,
    ast.Mod: lambda a, b: a % b,
}
# Each function with the least and the most number of arguments.
FUNCTIONS: dict[str, tuple[Callable[..., Number], int, int]] = {
    "min": (min, 2, 8),
    "max": (max, 2, 8),
    # -(-a // b) rounds up for integers, without the error of a float division.
    "cdiv": (lambda a, b: -_divide(-a, b), 2, 2),
    "next_power_of_2": (_next_power_of_2, 1, 1),
}
METHODS: dict[str, int] = {"numel": 0, "dim": 0, "element_size": 0, "stride": 1}  # argument counts


class ExpressionError(Exception):
    """Describes what is wrong with an expression; the caller adds the file and the line."""


def parse_number(text: str, tensors: frozenset[str], numbers: frozenset[str]) -> Value:
    """Compile an expression to a function of the values of its names.

    The expression may use the names in ``tensors`` and ``numbers``. Raises
    :class:`ExpressionError`.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    # Deeply nested text makes Python's parser raise one of the last two.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"{text.strip()!r} is not an expression") from error
    value = _Reader(text.strip(), tensors, numbers).read(tree)
    # The range is checked at each evaluation: it depends on the shapes of the call.
    return lambda names: _check_range(value(names), text)


def _check_range(value: Number, text: str) -> Number:
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise ExpressionError(f"{text.strip()!r} is {value}, which does not fit in 64 bits")
    return value


class _Reader:
    """Translate an ``ast`` tree to closures."""

    def __init__(self, text: str, tensors: frozenset[str], numbers: frozenset[str]) -> None:
        self.text, self.tensors, self.numbers = text, tensors, numbers

    def read(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant(value=bool()):  # bool is an int: this case must come first
                raise self._unsupported(node)
            case ast.Constant(value=int() | float() as constant):
                return lambda names: constant
            case ast.Name(id=name):
                return self._name(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self.read(operand)
                return lambda names: -inner(names)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return self._apply(OPERATORS[type(op)], [left, right], node)
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="shape")):
                return self._shape(self._tensor(name), node.slice)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method), keywords=[]):
                return self._method(self._tensor(name), method, node)
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
                function, least, most = FUNCTIONS[name]
                if not least <= len(node.args) <= most:
                    raise ExpressionError(f"{ast.unparse(node)!r}: {name} takes {least} arguments")
                return self._apply(function, node.args, node)
        raise self._unsupported(node)

    def _unsupported(self, node: ast.expr) -> ExpressionError:
        return ExpressionError(f"{ast.unparse(node)!r} in {self.text!r} is not one of: {GRAMMAR}")

    def _name(self, name: str) -> Value:
        if name in self.numbers:
            return lambda names: _number_value(names, name)
        if name in self.tensors:
            raise ExpressionError(
                f"{name!r} is a tensor, not a number; {name}.numel() is its number of elements"
            )
        raise ExpressionError(f"{name!r} in {self.text!r} is not known before this line")

    def _tensor(self, name: str) -> str:
        if name not in self.tensors:
            raise ExpressionError(f"{name!r} in {self.text!r} is not a tensor known before this line")
        return name

    def _apply(self, function: Callable[..., Number], arguments: list[ast.expr], node: ast.expr) -> Value:
        values = [self.read(a) for a in arguments]

        def value(names: Names) -> Number:
            try:
                return function(*(v(names) for v in values))
            except (ArithmeticError, ValueError) as error:
                raise ExpressionError(f"{ast.unparse(node)!r} has no value: {error}") from error

        return value

    def _shape(self, name: str, index: ast.expr) -> Value:
        dim = self._dimension(index)
        return lambda names: _dimension_value(name, "shape", names[name].shape, dim)

    def _method(self, name: str, method: str, node: ast.Call) -> Value:
        if METHODS.get(method) != len(node.args):
            raise self._unsupported(node)
        if method == "stride":
            dim = self._dimension(node.args[0])
            return lambda names: _dimension_value(name, "stride", names[name].stride(), dim)
        return lambda names: getattr(names[name], method)()

    def _dimension(self, node: ast.expr) -> int:
        """Return a dimension that is written as a literal integer, possibly negative."""
        sign, inner = 1, node
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            sign, inner = -1, node.operand
        # `type`, not `isinstance`: True is an int and no dimension.
        if isinstance(inner, ast.Constant) and type(inner.value) is int:
            return sign * inner.value
        raise ExpressionError(f"a dimension is an integer, not {ast.unparse(node)!r}")


def _number_value(names: Names, name: str) -> Number:
    value = names.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ExpressionError(f"{name!r} is {value!r} here, not a number")
    return value


def _dimension_value(name: str, what: str, sizes: tuple[int, ...], dim: int) -> int:
    if not -len(sizes) <= dim < len(sizes):
        raise ExpressionError(f"{name}.{what} of dimension {dim}, but {name} has {len(sizes)} dimensions")
    return sizes[dim]


def non_negative_integer(value: Number, what: str) -> int:
    """Return the number if it is an integer of 0 or more; raise :class:`ExpressionError` if not."""
    if not isinstance(value, int) or value < 0:
        raise ExpressionError(f"{what} is {value}, expected an integer of 0 or more")
    return value
