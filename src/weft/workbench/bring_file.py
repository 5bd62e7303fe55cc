"""A file of one's own: run once as a module of its own, and searched for what it declares.

What a file declares hangs on its functions (:mod:`weft.core.declare`); whatever stands in the
file's namespace with a tag is taken, once, in the order of definition. A mistake in the file is one
:class:`WeftError` that names the file and the line.
"""

from __future__ import annotations

import ast
import importlib.util
import linecache
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import weft.backends  # noqa: F401 - decides, before the file imports triton, if it interprets
from weft.core import Implementation, Operator, WeftError, registry
from weft.core.declare import TAG
from weft.core.operator import unknown_name
from weft.workbench.bring import Brought, Source

EXPECTED = '@weft.implementation("OPERATOR", backend=...) or @weft.operator(...) on a function'
DECORATORS = ("implementation", "operator")
_loads = count(1)
_neighbours: set[str] = set()  # modules that loaded files have imported from beside themselves


def load(source: Source) -> Brought:
    """What the ``.py`` or ``.cu`` file at ``source.path`` declares.

    Raises :class:`WeftError` for a file that is not there, that cannot be run, that declares
    nothing, or that declares what cannot be: an implementation of no known operator, a name twice,
    a name that Weft's own has.
    """
    path = Path(source.path)
    if not path.is_file():
        raise WeftError(f"no file {path}", expected="a .py or .cu file")
    if path.suffix == ".cu":
        from weft.workbench.bring_cu import load as load_cu

        return load_cu(source)
    if path.suffix != ".py":
        raise WeftError(
            f"{path.name}", expected="a .py or .cu file", got=path.suffix or "no ending"
        )
    return brought(path.name, _declared(run(path)))


def run(path: Path) -> ModuleType:
    """The file as a module, made anew; raises :class:`WeftError` with its own file and line."""
    name = f"weft_brought_{path.stem}_{next(_loads)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    source = path.read_bytes()
    linecache.checkcache(str(path))  # what a Triton kernel reads of itself is today's file
    try:
        tree = ast.parse(source, str(path))
        _no_function_twice(path, tree)
        code = compile(tree, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise _unparsable(path, error) from error
    sys.modules[name] = module  # dataclasses and pickles ask for it by name
    try:
        with _beside(path.resolve().parent):
            exec(code, vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(path, error) from error
    return module


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """The folder's own modules can be imported, as they are now, and nothing is written there."""
    for name in _neighbours:
        sys.modules.pop(name, None)
    before, wrote = set(sys.modules), sys.dont_write_bytecode
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = wrote
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and folder in Path(file).parents and "site-packages" not in Path(file).parts:
                _neighbours.add(name)


def _no_function_twice(path: Path, tree: ast.Module) -> None:
    """No two decorated functions of one name: the second would replace the first, unseen."""
    lines: dict[str, int] = {}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or not any(map(_declares, node.decorator_list)):
            continue
        if node.name in lines:
            raise WeftError(
                f"{path.name}:{node.lineno}: function {node.name!r} replaces the one in line "
                f"{lines[node.name]}, and with it what that declares",
                hint="give each function a name of its own",
            )
        lines[node.name] = node.lineno


def _declares(decorator: ast.expr) -> bool:
    if not isinstance(decorator, ast.Call):
        return False
    return ast.unparse(decorator.func).rpartition(".")[2] in DECORATORS


def _unparsable(path: Path, error: SyntaxError | ValueError) -> WeftError:
    if isinstance(error, WeftError):
        return error
    if not isinstance(error, SyntaxError):
        return WeftError(f"{path.name}: not Python source", got=str(error))
    text = (error.text or "").strip()
    where = f"{Path(error.filename or path).name}:{error.lineno}"
    return WeftError(f"{where}: syntax error: {error.msg}", got=repr(text) if text else None)


def _failed(path: Path, error: BaseException) -> WeftError:
    """What was raised while the file was run, at the last line of it that was reached."""
    if isinstance(error, SyntaxError) and error.filename:
        return _unparsable(path, error)
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if _is(f.filename, path)]
    where = f"{path.name}:{lines[-1]}" if lines else path.name
    if isinstance(error, WeftError):
        return WeftError(
            f"{where}: {error.what}", expected=error.expected, got=error.got, hint=error.hint
        )
    last = traceback.format_exception_only(error)[-1]
    return WeftError(f"{where}: running the file raised {' '.join(last.split())}")


def _is(filename: str, path: Path) -> bool:
    return Path(filename) == path


def _declared(module: ModuleType) -> list[Operator | Implementation]:
    """Everything tagged in a module's namespace, each once, in order."""
    found: dict[int, Operator | Implementation] = {}
    for value in vars(module).values():
        held = getattr(value, "__dict__", None)
        tag = held.get(TAG) if hasattr(held, "get") else None  # type: ignore[union-attr]
        if isinstance(tag, Operator | Implementation):
            found.setdefault(id(tag), tag)
    return list(found.values())


def brought(file: str, declared: list[Operator | Implementation]) -> Brought:
    """What a file declares, once it is known to fit together and with Weft's own."""
    operators = [d for d in declared if isinstance(d, Operator)]
    implementations = [d for d in declared if isinstance(d, Implementation)]
    if not declared:
        raise WeftError(
            f"{file} declares nothing",
            expected=EXPECTED,
            hint="weft new OPERATOR --backend triton writes a file to start from",
        )
    _once(file, "operator", [o.name for o in operators])
    for one in operators:
        if one.name in registry.operator_names():
            raise WeftError(
                f"{file}: operator {one.name!r} is Weft's own",
                expected="another name",
                hint=f'@weft.implementation("{one.name}", ...) adds a way of computing it',
            )
    known = [*registry.operator_names(), *(o.name for o in operators)]
    for way in implementations:
        if way.operator not in known:
            error = unknown_name("operator", way.operator, known)
            what = f"{file}: {way.name!r} implements an {error.what}"
            raise WeftError(what, expected=error.expected, got=error.got, hint=error.hint)
        if way.operator in registry.operator_names():
            _not_ours(file, way)
    _once(file, "implementation", [f"{i.operator} {i.name}" for i in implementations])
    for one in operators:
        implementations += _yardstick(file, one, implementations)
    return Brought(operators=tuple(operators), implementations=tuple(implementations))


def _once(file: str, what: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise WeftError(f"{file} declares {what} {name!r} {names.count(name)} times")


def _not_ours(file: str, way: Implementation) -> None:
    if way.name in registry.implementation_names(way.operator):
        raise WeftError(
            f"{file}: Weft has a {way.operator} implementation {way.name!r} of its own",
            expected="another name",
            hint=f'@weft.implementation("{way.operator}", ..., name="{way.name}/mine")',
        )


def _yardstick(file: str, one: Operator, ways: list[Implementation]) -> list[Implementation]:
    """The implementation whose error sets the tolerance, where the file does not declare it."""
    names = [w.name for w in ways if w.operator == one.name]
    if one.tolerance.baseline in names:
        return []
    if one.tolerance.baseline != "eager":
        missing = unknown_name("implementation", one.tolerance.baseline, [*names, "eager"])
        raise WeftError(
            f"{file}: the tolerance of {one.name!r} rests on an {missing.what}",
            expected=missing.expected,
            got=missing.got,
        )
    return [eager_of(one)]


def eager_of(one: Operator) -> Implementation:
    """An operator's reference as an implementation: run in the case's own dtype.

    What it returns takes the dtype of the first input where the reference widened it, and memory
    of its own where the reference returned (a view of) an input.
    """

    def eager(*inputs: Any, **params: Any) -> Any:
        made = one.reference(*inputs, **params)
        if isinstance(made, tuple):
            return tuple(_own(t, inputs) for t in made)
        return _own(made, inputs)

    return Implementation(
        operator=one.name,
        name="eager",
        backend="eager",
        forward=eager,
        directions=one.directions,
        idea="the reference, in the case's dtype",
    )


def _own(made: Any, inputs: tuple[Any, ...]) -> Any:
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    if not isinstance(made, torch.Tensor) or not tensors:
        return made
    if made.is_floating_point() and tensors[0].is_floating_point():
        made = made.to(tensors[0].dtype)
    memory = made.untyped_storage().data_ptr()
    if any(x.untyped_storage().data_ptr() == memory for x in tensors):
        made = made.clone(memory_format=torch.contiguous_format)
    return made
