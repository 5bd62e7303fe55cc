"""Header of a ``.cu`` file: comment lines ``// weft: ...`` that say how to launch its kernels.

    operator NAME                          operator that the file computes; the first line
    name NAME | idea TEXT                  name (default: the file's stem) and summary
    dtypes DTYPE...                        of the first input; scalar_t is its C++ type
    only PARAM = VALUE...                  values of a parameter that the kernels support
    deterministic no                       two runs may differ in the last bits
    require contiguous TENSOR...           a strided tensor is copied before it is used
    let NAME = NUMBER; ...                 define a number
    output NAME = ALLOCATION               allocate a returned tensor; outputs keep this order
    scratch NAME = ALLOCATION              allocate memory shared between launches
    launch KERNEL<<<GRID, BLOCK[, SHARED]>>>(ARGUMENT, ...)
    backward(NAME, ...)                    start the backward program: the gradient, saved tensors

ALLOCATION is ``empty_like(TENSOR)``, ``zeros_like(TENSOR)``, ``empty(NUMBER, ..., DTYPE)`` or
``zeros(NUMBER, ..., DTYPE)``, always contiguous; DTYPE may be ``TENSOR.dtype``. GRID and BLOCK are
a number, or two or three in parentheses. :mod:`weft.workbench.sources.cuda_expr` describes numbers.
A statement with an open parenthesis continues on the next line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from weft.core import Operator, WeftError, registry
from weft.core.cases import ITEMSIZE
from weft.core.operator import unknown_name
from weft.workbench.sources.cuda_expr import (
    ExpressionError,
    Value,
    non_negative_integer,
    parse_number,
)

HEADER_LINE = re.compile(r"^\s*//\s*weft\s*:\s*(.*?)\s*$")
NAME = r"[A-Za-z_]\w*"
ALLOCATION = re.compile(r"(empty|zeros)(_like)?\s*\((.*)\)$")
LAUNCH = re.compile(rf"({NAME})\s*<<<(.*)>>>\s*\((.*)\)$")
Names = dict[str, Any]
Step = Callable[[Names], None]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Kernel launch; its numbers are functions of the names defined before it."""

    line: int
    kernel: str
    grid: tuple[Value, ...]
    block: tuple[Value, ...]
    shared: Value
    arguments: tuple[Value | str, ...]  # a tensor's name, or a number


@dataclass(kw_only=True)
class Program:
    """Program of one direction: its arguments, its steps in order with their lines, and its outputs."""

    arguments: tuple[str, ...]
    steps: list[tuple[int, Launch | Step]] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    tensors: set[str] = field(default_factory=set)
    numbers: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tensors |= set(self.arguments)

    @property
    def launches(self) -> list[Launch]:
        return [step for _, step in self.steps if isinstance(step, Launch)]


@dataclass(kw_only=True)
class Header:
    """Contents of a header: one forward program and possibly one backward program."""

    file: str
    operator: Operator
    name: str
    idea: str = ""
    dtypes: tuple[str, ...] = ()
    only: dict[str, tuple[str, ...]] = field(default_factory=dict)
    deterministic: bool = True
    forward: Program
    backward: Program | None = None

    @property
    def launches(self) -> list[Launch]:
        programs = [self.forward, *([self.backward] if self.backward else [])]
        return [launch for p in programs for launch in p.launches]


def at_location(location: str, error: WeftError) -> WeftError:
    """Return the same error with ``file:line`` in front."""
    what = f"{location}: {error.what}"
    return WeftError(what, expected=error.expected, got=error.got, hint=error.hint)


def parse_header(file: str, stem: str, text: str) -> Header:
    """Parse the header of a ``.cu`` file; raise :class:`WeftError` with the file and the line."""
    statements = list(_statements(file, text))
    if not statements or statements[0][1] != "operator":
        raise WeftError(
            f"{file} does not name the operator that it computes",
            expected="a first comment line '// weft: operator NAME'",
            got=f"'// weft: {statements[0][1]} ...'" if statements else "no line '// weft: ...'",
            hint="weft new softmax --backend cuda writes a file to start from",
        )
    return _Parser(file, stem, statements).parse()


def _statements(file: str, text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, first word, rest); a statement with an open parenthesis takes the next line too."""
    start, statement = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        header_line = HEADER_LINE.match(line)
        if not header_line:
            continue
        # An error names the first line of a statement.
        start = start if statement else number
        statement = f"{statement} {header_line[1]}".strip()
        if statement.count("(") > statement.count(")"):
            continue
        word = re.match(r"\w*", statement)
        assert word is not None
        yield start, word[0], statement[word.end() :].strip()
        statement = ""
    if statement:
        raise WeftError(f"{file}:{start}: a parenthesis is not closed", got=repr(statement))


class _Parser:
    """Parse the statements in order; ``self.line`` is the current one, for error messages."""

    def __init__(self, file: str, stem: str, statements: list[tuple[int, str, str]]) -> None:
        self.file, self.statements, self.line = file, statements, statements[0][0]
        operator = statements[0][2]
        if operator not in registry.operator_names():
            raise self._located(unknown_name("operator", operator, registry.operator_names()))
        spec = registry.operator(operator)
        self.program = Program(arguments=tuple(i.name for i in spec.cases[0].inputs))
        self.params = {p for c in spec.cases for p in c.params}
        self.header = Header(file=file, operator=spec, name=stem, forward=self.program)
        self.header.dtypes = spec.dtypes

    def parse(self) -> Header:
        for line, word, rest in self.statements[1:]:
            self.line = line
            statement = STATEMENTS.get(word)
            if statement is None:
                raise self._located(unknown_name("word in the header", word, list(STATEMENTS)))
            try:
                statement(self, rest)
            except ExpressionError as error:
                raise WeftError(f"{self.file}:{self.line}: {error}") from error
        self._check_complete(self.header.forward, "forward", 1)
        if self.header.backward is not None:
            operator = self.header.operator
            # Optional inputs, which the first case lacks, have no gradient in a header.
            n_gradients = sum(i.name in operator.differentiable for i in operator.cases[0].inputs)
            self._check_complete(self.header.backward, "backward", n_gradients)
        return self.header

    def _located(self, error: WeftError) -> WeftError:
        return at_location(f"{self.file}:{self.line}", error)

    def _check_complete(self, program: Program, direction: str, n_outputs: int) -> None:
        for word, least, got in (
            ("output", n_outputs, len(program.outputs)),
            ("launch", 1, len(program.launches)),
        ):
            if got < least:
                what = f"{self.file}: the {direction}"
                raise WeftError(what, expected=f"at least {least} line '{word} ...'", got=str(got))

    def _wrong(self, expected: str, got: str) -> WeftError:
        return WeftError(f"{self.file}:{self.line}", expected=expected, got=repr(got))

    def _operator(self, rest: str) -> None:
        raise self._wrong("one operator, in the first line", f"operator {rest}")

    def _name(self, rest: str) -> None:
        if not re.fullmatch(r"[\w./-]+", rest):
            raise self._wrong("a name of letters, digits, _ . / and -", rest)
        self.header.name = rest

    def _idea(self, rest: str) -> None:
        self.header.idea = rest

    def _dtypes(self, rest: str) -> None:
        known = self.header.operator.dtypes
        for dtype in rest.split():
            if dtype not in known:
                raise self._located(unknown_name("dtype", dtype, list(known)))
        if not rest:
            raise self._wrong("dtypes by torch's names", rest)
        self.header.dtypes = tuple(rest.split())

    def _only(self, rest: str) -> None:
        param, equals, values = (part.strip() for part in rest.partition("="))
        if param not in self.params:
            raise self._located(unknown_name("parameter", param, sorted(self.params)))
        if not equals or not values:
            raise self._wrong("PARAM = VALUE ...", rest)
        self.header.only[param] = tuple(values.split())

    def _deterministic(self, rest: str) -> None:
        if rest not in ("yes", "no"):
            raise self._wrong("yes or no", rest)
        self.header.deterministic = rest == "yes"

    def _backward(self, rest: str) -> None:
        inside = re.fullmatch(rf"\(\s*({NAME}(?:\s*,\s*{NAME})*)\s*\)", rest)
        if not inside or self.header.backward is not None:
            raise self._wrong("once, backward(GRADIENT, SAVED, ...)", rest)
        self.program = Program(arguments=tuple(n.strip() for n in inside[1].split(",")))
        self.header.backward = self.program

    def _require(self, rest: str) -> None:
        word, *names = re.split(r"[\s,]+", rest)
        if word != "contiguous" or not names:
            raise self._wrong("contiguous TENSOR ...", rest)
        for name in names:
            self._known_tensor(name)
            self._add_step(partial(_make_contiguous, name))

    def _known_tensor(self, name: str) -> str:
        if name not in self.program.tensors:
            raise self._located(unknown_name("tensor", name, sorted(self.program.tensors)))
        return name

    def _add_step(self, step: Launch | Step) -> None:
        self.program.steps.append((self.line, step))

    def _number(self, text: str) -> Value:
        # A parameter with an `only` line may hold anything, so it is not a number here.
        params = self.params - set(self.header.only)
        known = frozenset(self.program.numbers | params)
        return parse_number(text, frozenset(self.program.tensors), known)

    def _unused_name(self, name: str) -> str:
        taken = self.program.tensors | self.program.numbers | self.params
        if not re.fullmatch(NAME, name):
            raise self._wrong("NAME = ...", name)
        if name in taken:
            raise self._wrong("a name that is not taken yet", name)
        return name

    def _let(self, rest: str) -> None:
        for part in rest.split(";"):
            name, equals, text = (s.strip() for s in part.partition("="))
            if not equals:
                raise self._wrong("NAME = NUMBER; ...", rest)
            # Before the name is added: a number cannot be defined by itself.
            value = self._number(text)
            self._add_step(partial(_define, self._unused_name(name), value))
            self.program.numbers.add(name)

    def _output(self, rest: str) -> None:
        self.program.outputs.append(self._scratch(rest))

    def _scratch(self, rest: str) -> str:
        name, equals, text = (s.strip() for s in rest.partition("="))
        match = ALLOCATION.match(text)
        if not equals or not match:
            raise self._wrong("NAME = empty_like(TENSOR) or empty(NUMBER, ..., DTYPE)", rest)
        shape_and_dtype = self._like(match[3]) if match[2] else self._sized(match[3], text)
        factory = torch.zeros if match[1] == "zeros" else torch.empty
        first_argument = self.program.arguments[0]
        self._unused_name(name)

        def allocate(names: Names) -> None:
            shape, dtype = shape_and_dtype(names)
            names[name] = factory(shape, dtype=dtype, device=names[first_argument].device)

        self._add_step(allocate)
        self.program.tensors.add(name)
        return name

    def _like(self, text: str) -> Callable[[Names], tuple[Any, torch.dtype]]:
        name = self._known_tensor(text.strip())
        return lambda names: (names[name].shape, names[name].dtype)

    def _sized(self, text: str, allocation: str) -> Callable[[Names], tuple[Any, torch.dtype]]:
        *sizes, dtype = _split_arguments(text)
        values = [self._number(s) for s in sizes]
        like = re.fullmatch(rf"({NAME})\.dtype", dtype)
        if like:
            self._known_tensor(like[1])
        elif dtype not in ITEMSIZE:
            raise self._wrong("a dtype last: " + ", ".join(ITEMSIZE) + " or TENSOR.dtype", dtype)

        def shape_and_dtype(names: Names) -> tuple[Any, torch.dtype]:
            what = f"a size in {allocation!r}"
            shape = tuple(non_negative_integer(v(names), what) for v in values)
            return shape, names[like[1]].dtype if like else getattr(torch, dtype)

        return shape_and_dtype

    def _launch(self, rest: str) -> None:
        match = LAUNCH.match(rest)
        if not match:
            raise self._wrong("KERNEL<<<GRID, BLOCK[, SHARED]>>>(ARGUMENT, ...)", rest)
        kernel, configuration, arguments = match.groups()
        sizes = _split_arguments(configuration)
        if len(sizes) not in (2, 3):
            raise self._wrong("<<<GRID, BLOCK>>> or <<<GRID, BLOCK, SHARED>>>", configuration)
        self._add_step(
            Launch(
                line=self.line,
                kernel=kernel,
                grid=self._dim3(sizes[0]),
                block=self._dim3(sizes[1]),
                shared=self._number(sizes[2] if len(sizes) == 3 else "0"),
                arguments=tuple(
                    a if a in self.program.tensors else self._number(a) for a in _split_arguments(arguments)
                ),
            )
        )

    def _dim3(self, text: str) -> tuple[Value, ...]:
        inside = re.fullmatch(r"(?:dim3\s*)?\((.*)\)", text)
        sizes = _split_arguments(inside[1]) if inside else []
        if not 2 <= len(sizes) <= 3:  # one number, which may have parentheses of its own
            return (self._number(text.removeprefix("dim3")),)
        return tuple(self._number(size) for size in sizes)


def _define(name: str, value: Value, names: Names) -> None:
    names[name] = value(names)


def _make_contiguous(name: str, names: Names) -> None:
    names[name] = names[name].contiguous()


STATEMENTS: dict[str, Callable[[_Parser, str], Any]] = {
    "operator": _Parser._operator,
    "name": _Parser._name,
    "idea": _Parser._idea,
    "dtypes": _Parser._dtypes,
    "only": _Parser._only,
    "deterministic": _Parser._deterministic,
    "require": _Parser._require,
    "let": _Parser._let,
    "output": _Parser._output,
    "scratch": _Parser._scratch,
    "launch": _Parser._launch,
    "backward": _Parser._backward,
}


def _split_arguments(text: str) -> list[str]:
    """Split at the commas that are inside no parentheses or brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [p.strip() for p in parts] if text.strip() else []
