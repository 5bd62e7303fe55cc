"""Checked access to the fields of a JSON file: every error names the file and the field."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core import WeftError, json_files

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_UNARY: dict[type, Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
_MISSING = object()


@dataclass(frozen=True)
class Field:
    """A value of a JSON file with its path in it: ``axes.M.value``."""

    file: str
    path: str
    value: Any

    def error(self, expected: object, got: object = _MISSING, hint: str | None = None) -> WeftError:
        """Return the error that this field is wrong."""
        shown = _shown(self.value) if got is _MISSING else got
        return WeftError(f"{self.file}: {self.path or 'the file'}", expected=expected, got=shown, hint=hint)

    def object(self) -> Field:
        """Return the field; raise :class:`WeftError` unless it is a JSON object."""
        if not isinstance(self.value, dict):
            raise self.error("a JSON object")
        return self

    def get(self, name: str, default: Any = _MISSING) -> Field:
        """Return a member of the object; raise :class:`WeftError` if it is missing without a default."""
        self.object()
        value = self.value.get(name, default)
        path = f"{self.path}.{name}" if self.path else name
        if value is _MISSING:
            raise WeftError(f"{self.file}: {path}", expected="this field", got="none")
        return Field(self.file, path, value)

    def members(self) -> Iterator[tuple[str, Field]]:
        """Yield the members of the object, in the order of the file."""
        for name in self.object().value:
            yield name, self.get(name)

    def items(self) -> list[Field]:
        """Return the items of a list; raise :class:`WeftError` unless it is one."""
        if not isinstance(self.value, list):
            raise self.error("a list")
        return [Field(self.file, f"{self.path}[{n}]", v) for n, v in enumerate(self.value)]

    def string(self) -> str:
        """Return a string that is not empty."""
        if not isinstance(self.value, str) or not self.value.strip():
            raise self.error("a string that is not empty")
        return self.value

    def strings(self) -> tuple[str, ...]:
        return tuple(item.string() for item in self.items())

    def integer(self, least: int = 0) -> int:
        # `type`, not `isinstance`: JSON's true is an int in Python.
        if type(self.value) is not int or self.value < least:
            raise self.error(f"an integer of at least {least}")
        return self.value

    def number(self) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self.error("a number")
        return float(self.value)

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.error("true or false")
        return self.value

    def choice(self, names: Sequence[str], hint: str | None = None) -> str:
        """Return one of these strings."""
        if self.value not in names:
            raise self.error(
                " or ".join(names) if len(names) < 6 else "one of " + ", ".join(names), hint=hint
            )
        return str(self.value)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_json(path: Path) -> Field:
    """Read a JSON file that holds one object; raise :class:`WeftError` if it does not."""
    return _parse(_text_of(path), path.name).object()


def read_json_lines(path: Path) -> list[Field]:
    """Read a file with one JSON object on each line; empty lines do not count."""
    lines = _text_of(path).splitlines()
    return [_parse(t, f"{path.name}, line {n}").object() for n, t in enumerate(lines, 1) if t.strip()]


def _text_of(path: Path) -> str:
    try:
        return json_files.read_text(path)
    except (OSError, ValueError) as error:
        raise WeftError(f"{path} cannot be read", got=error) from error


def _parse(text: str, file: str) -> Field:
    try:
        return Field(file, "", json_files.loads(text))
    except ValueError as error:
        # A JSONDecodeError names line and column; other errors are of nesting and of huge integers.
        raise WeftError(f"{file} is no JSON", expected="one JSON object", got=error) from error


# -- expressions on axes -------------------------------------------------------------------------


class NotAnAxisExpression(ValueError):
    """An expression with a call, an attribute or a name that is no axis: it is not evaluated."""


def parse_expression(field: Field) -> ast.expr:
    """Return the syntax tree of an expression; raise :class:`WeftError` if it is none."""
    try:
        return ast.parse(field.string(), mode="eval").body
    except SyntaxError as error:
        raise field.error("a Python expression of axes, such as M % 16 == 0") from error


def evaluate(node: ast.expr, axes: Mapping[str, int]) -> Any:
    """Evaluate arithmetic, comparisons and ``and``, ``or``, ``not`` on axes and numbers, and nothing else.

    Raises :class:`NotAnAxisExpression` for anything else, and ZeroDivisionError.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.Name) and node.id in axes:
        return axes[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = evaluate(node.left, axes), evaluate(node.right, axes)
        # A few characters of a file could ask for a number that fills the memory.
        if isinstance(node.op, ast.Pow) and abs(right) > 64:
            raise NotAnAxisExpression("an exponent above 64")
        return _BINARY[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](evaluate(node.operand, axes))
    if isinstance(node, ast.BoolOp):
        values = [evaluate(v, axes) for v in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if isinstance(node, ast.Compare) and all(type(op) in _COMPARE for op in node.ops):
        values = [evaluate(v, axes) for v in (node.left, *node.comparators)]
        pairs = zip(node.ops, values, values[1:], strict=False)
        return all(_COMPARE[type(op)](a, b) for op, a, b in pairs)
    raise NotAnAxisExpression(ast.unparse(node))
