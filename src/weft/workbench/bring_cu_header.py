"""The header of a ``.cu`` file: comment lines ``// weft: ...`` that say how it is launched.

    operator NAME                          what it computes; the first line
    name NAME | idea TEXT                  what it is called (default: the file's name)
    dtypes DTYPE...                        of the first input; scalar_t is its C++ type
    only PARAM = VALUE...                  the values of a parameter that it is written for
    deterministic no                       two runs may differ in the last bits
    require contiguous TENSOR...           a strided tensor is copied before it is used
    let NAME = NUMBER; ...                 a number by name
    output NAME = ALLOCATION               what is returned, in this order
    scratch NAME = ALLOCATION              memory between launches
    launch KERNEL<<<GRID, BLOCK[, SHARED]>>>(ARGUMENT, ...)
    backward(NAME, ...)                    from here on the backward: the gradient, what is saved

ALLOCATION is ``empty_like(TENSOR)``, ``zeros_like(TENSOR)``, ``empty(NUMBER, ..., DTYPE)`` or
``zeros(NUMBER, ..., DTYPE)``, always contiguous; DTYPE may be ``TENSOR.dtype``. GRID and BLOCK are
a number, or two or three in parentheses. Numbers: :mod:`weft.workbench.bring_cu_numbers`. A line
whose parentheses are open goes on in the next.
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
from weft.workbench.bring_cu_numbers import Refused, Value, number, whole

MARK = re.compile(r"^\s*//\s*weft\s*:\s*(.*?)\s*$")
NAME = r"[A-Za-z_]\w*"
ALLOCATION = re.compile(r"(empty|zeros)(_like)?\s*\((.*)\)$")
LAUNCH = re.compile(rf"({NAME})\s*<<<(.*)>>>\s*\((.*)\)$")
Names = dict[str, Any]
Step = Callable[[Names], None]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch: its kernel, and functions of the names that stand when it is reached."""

    line: int
    kernel: str
    grid: tuple[Value, ...]
    block: tuple[Value, ...]
    shared: Value
    arguments: tuple[Value | str, ...]  # a tensor's name, or a number


@dataclass(kw_only=True)
class Program:
    """One direction: what it is given, its steps in order, what it returns."""

    arguments: tuple[str, ...]
    steps: list[tuple[int, Launch | Step]] = field(default_factory=list)  # each with its line
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
    """Everything that a header says."""

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


def placed(where: str, error: WeftError) -> WeftError:
    """The same error, with its place before it."""
    what = f"{where}: {error.what}"
    return WeftError(what, expected=error.expected, got=error.got, hint=error.hint)


def read(file: str, stem: str, text: str) -> Header:
    """The header of a ``.cu`` file's text; raises :class:`WeftError` with the file and the line."""
    lines = list(_statements(file, text))
    if not lines or lines[0][1] != "operator":
        raise WeftError(
            f"{file} does not say what it computes",
            expected="a first comment line '// weft: operator NAME'",
            got=f"'// weft: {lines[0][1]} ...'" if lines else "no line '// weft: ...'",
            hint="weft new softmax --backend cuda writes a file to start from",
        )
    return _Reader(file, stem, lines).header()


def _statements(file: str, text: str) -> Iterator[tuple[int, str, str]]:
    """(line, first word, rest) of each line; an open parenthesis takes in the next line."""
    start, kept = 0, ""
    for at, line in enumerate(text.splitlines(), 1):
        marked = MARK.match(line)
        if not marked:
            continue
        start = start if kept else at
        kept = f"{kept} {marked[1]}".strip()
        if kept.count("(") > kept.count(")"):
            continue
        word = re.match(r"\w*", kept)
        assert word is not None
        yield start, word[0], kept[word.end() :].strip()
        kept = ""
    if kept:
        raise WeftError(f"{file}:{start}: a parenthesis is not closed", got=repr(kept))


class _Reader:
    """Line by line; ``self.line`` is where it stands, for what goes wrong there."""

    def __init__(self, file: str, stem: str, lines: list[tuple[int, str, str]]) -> None:
        self.file, self.lines, self.line = file, lines, lines[0][0]
        operator = lines[0][2]
        if operator not in registry.operator_names():
            raise self._placed(unknown_name("operator", operator, registry.operator_names()))
        spec = registry.operator(operator)
        self.inputs = tuple(i.name for i in spec.cases[0].inputs)
        self.program = Program(arguments=self.inputs)
        self.params = {p for c in spec.cases for p in c.params}
        self.found = Header(file=file, operator=spec, name=stem, forward=self.program)
        self.found.dtypes = spec.dtypes

    def header(self) -> Header:
        for line, word, rest in self.lines[1:]:
            self.line = line
            read = WORDS.get(word)
            if read is None:
                raise self._placed(unknown_name("word in the header", word, list(WORDS)))
            try:
                read(self, rest)
            except Refused as error:
                raise WeftError(f"{self.file}:{self.line}: {error}") from error
        self._whole(self.found.forward, "forward", 1)
        if self.found.backward is not None:
            wanted = len(self.found.operator.differentiable)
            self._whole(self.found.backward, "backward", wanted)
        return self.found

    def _placed(self, error: WeftError) -> WeftError:
        return placed(f"{self.file}:{self.line}", error)

    def _whole(self, program: Program, what: str, least: int) -> None:
        for word, got in (("output", len(program.outputs)), ("launch", len(program.launches))):
            due = least if word == "output" else 1
            if got < due:
                where = f"{self.file}: the {what}"
                raise WeftError(where, expected=f"at least {due} line '{word} ...'", got=str(got))

    def _wrong(self, expected: str, got: str) -> WeftError:
        return WeftError(f"{self.file}:{self.line}", expected=expected, got=repr(got))

    def _operator(self, rest: str) -> None:
        raise self._wrong("one operator, in the first line", f"operator {rest}")

    def _name(self, rest: str) -> None:
        if not re.fullmatch(r"[\w./-]+", rest):
            raise self._wrong("a name of letters, digits, _ . / and -", rest)
        self.found.name = rest

    def _idea(self, rest: str) -> None:
        self.found.idea = rest

    def _dtypes(self, rest: str) -> None:
        known = self.found.operator.dtypes
        for dtype in rest.split():
            if dtype not in known:
                raise self._placed(unknown_name("dtype", dtype, list(known)))
        if not rest:
            raise self._wrong("dtypes by torch's names", rest)
        self.found.dtypes = tuple(rest.split())

    def _only(self, rest: str) -> None:
        param, equals, values = (part.strip() for part in rest.partition("="))
        if param not in self.params:
            raise self._placed(unknown_name("parameter", param, sorted(self.params)))
        if not equals or not values:
            raise self._wrong("PARAM = VALUE ...", rest)
        self.found.only[param] = tuple(values.split())

    def _deterministic(self, rest: str) -> None:
        if rest not in ("yes", "no"):
            raise self._wrong("yes or no", rest)
        self.found.deterministic = rest == "yes"

    def _backward(self, rest: str) -> None:
        inside = re.fullmatch(rf"\(\s*({NAME}(?:\s*,\s*{NAME})*)\s*\)", rest)
        if not inside or self.found.backward is not None:
            raise self._wrong("once, backward(GRADIENT, SAVED, ...)", rest)
        self.program = Program(arguments=tuple(n.strip() for n in inside[1].split(",")))
        self.found.backward = self.program

    def _require(self, rest: str) -> None:
        word, *names = re.split(r"[\s,]+", rest)
        if word != "contiguous" or not names:
            raise self._wrong("contiguous TENSOR ...", rest)
        for name in names:
            self._known(name)
            self._step(partial(_densify, name))

    def _known(self, name: str) -> str:
        if name not in self.program.tensors:
            raise self._placed(unknown_name("tensor", name, sorted(self.program.tensors)))
        return name

    def _step(self, step: Launch | Step) -> None:
        self.program.steps.append((self.line, step))

    def _number(self, text: str) -> Value:
        params = self.params - set(self.found.only)
        known = frozenset(self.program.numbers | params)
        return number(text, frozenset(self.program.tensors), known)

    def _fresh(self, name: str) -> str:
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
            value = self._number(text)
            self._step(partial(_set, self._fresh(name), value))
            self.program.numbers.add(name)

    def _output(self, rest: str) -> None:
        self.program.outputs.append(self._scratch(rest))

    def _scratch(self, rest: str) -> str:
        name, equals, text = (s.strip() for s in rest.partition("="))
        form = ALLOCATION.match(text)
        if not equals or not form:
            raise self._wrong("NAME = empty_like(TENSOR) or empty(NUMBER, ..., DTYPE)", rest)
        make = self._like(form[3]) if form[2] else self._sized(form[3], text)
        filled = form[1] == "zeros"
        first = self.program.arguments[0]
        self._fresh(name)

        def allocate(names: Names) -> None:
            shape, dtype = make(names)
            put = torch.zeros if filled else torch.empty
            names[name] = put(shape, dtype=dtype, device=names[first].device)

        self._step(allocate)
        self.program.tensors.add(name)
        return name

    def _like(self, text: str) -> Callable[[Names], tuple[Any, torch.dtype]]:
        name = self._known(text.strip())
        return lambda names: (names[name].shape, names[name].dtype)

    def _sized(self, text: str, whole_text: str) -> Callable[[Names], tuple[Any, torch.dtype]]:
        *sizes, dtype = _split(text)
        values = [self._number(s) for s in sizes]
        like = re.fullmatch(rf"({NAME})\.dtype", dtype)
        if like:
            self._known(like[1])
        elif dtype not in ITEMSIZE:
            raise self._wrong("a dtype last: " + ", ".join(ITEMSIZE) + " or TENSOR.dtype", dtype)

        def make(names: Names) -> tuple[Any, torch.dtype]:
            shape = tuple(whole(v(names), f"a size in {whole_text!r}") for v in values)
            return shape, names[like[1]].dtype if like else getattr(torch, dtype)

        return make

    def _launch(self, rest: str) -> None:
        form = LAUNCH.match(rest)
        if not form:
            raise self._wrong("KERNEL<<<GRID, BLOCK[, SHARED]>>>(ARGUMENT, ...)", rest)
        kernel, configuration, arguments = form.groups()
        parts = _split(configuration)
        if len(parts) not in (2, 3):
            raise self._wrong("<<<GRID, BLOCK>>> or <<<GRID, BLOCK, SHARED>>>", configuration)
        launch = Launch(
            line=self.line,
            kernel=kernel,
            grid=self._sizes(parts[0]),
            block=self._sizes(parts[1]),
            shared=self._number(parts[2] if len(parts) == 3 else "0"),
            arguments=tuple(self._argument(a) for a in _split(arguments)),
        )
        self._step(launch)

    def _sizes(self, text: str) -> tuple[Value, ...]:
        inside = re.fullmatch(r"(?:dim3\s*)?\((.*)\)", text)
        parts = _split(inside[1]) if inside else []
        if not 2 <= len(parts) <= 3:  # one number, which may stand in parentheses of its own
            return (self._number(text.removeprefix("dim3")),)
        return tuple(self._number(part) for part in parts)

    def _argument(self, text: str) -> Value | str:
        return text if text in self.program.tensors else self._number(text)


def _set(name: str, value: Value, names: Names) -> None:
    names[name] = value(names)


def _densify(name: str, names: Names) -> None:
    names[name] = names[name].contiguous()


WORDS: dict[str, Callable[[_Reader, str], Any]] = {
    "operator": _Reader._operator,
    "name": _Reader._name,
    "idea": _Reader._idea,
    "dtypes": _Reader._dtypes,
    "only": _Reader._only,
    "deterministic": _Reader._deterministic,
    "require": _Reader._require,
    "let": _Reader._let,
    "output": _Reader._output,
    "scratch": _Reader._scratch,
    "launch": _Reader._launch,
    "backward": _Reader._backward,
}


def _split(text: str) -> list[str]:
    """The parts between commas that stand in no parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [p.strip() for p in parts] if text.strip() else []
