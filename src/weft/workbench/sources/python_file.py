"""Load a user's ``.py`` file: run it once as a fresh module and collect what it declares.

The decorators of :mod:`weft.core.declare` tag functions; every tagged object in the module's
namespace is taken once, in the order of definition. A mistake in the file is one
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

# Imported first: it decides whether Triton interprets, before the user's file imports Triton.
import weft.backends  # noqa: F401
from weft.core import Implementation, Operator, WeftError, registry
from weft.core.declare import TAG
from weft.core.operator import unknown_name
from weft.workbench.sources.source import LoadedFile, Source

EXPECTED = '@weft.implementation("OPERATOR", backend=...) or @weft.operator(...) on a function'
DECORATORS = ("implementation", "operator")
_load_numbers = count(1)
_sibling_modules: set[str] = set()  # modules that loaded files imported from their own folders


def load(source: Source) -> LoadedFile:
    """Load what the ``.py`` or ``.cu`` file at ``source.path`` declares.

    Raises :class:`WeftError` for a file that does not exist or cannot be run, that declares
    nothing, or whose declarations are invalid: an implementation of an unknown operator, a name
    declared twice, a name that Weft uses.
    """
    path = Path(source.path)
    if not path.is_file():
        raise WeftError(f"no file {path}", expected="a .py or .cu file")
    if path.suffix == ".cu":
        # Imported late: a .py file needs no NVRTC.
        from weft.workbench.sources.cuda_file import load as load_cu

        return load_cu(source)
    if path.suffix != ".py":
        raise WeftError(f"{path.name}", expected="a .py or .cu file", got=path.suffix or "no ending")
    return check_declarations(path.name, _declarations(run(path)))


def run(path: Path) -> ModuleType:
    """Run the file as a new module; raise :class:`WeftError` with its own file and line."""
    # A new name for each load: a file that was changed must not find its old module.
    name = f"weft_user_{path.stem}_{next(_load_numbers)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    source = path.read_bytes()
    linecache.checkcache(str(path))  # Triton reads a kernel's source through this cache
    try:
        tree = ast.parse(source, str(path))
        _check_unique_functions(path, tree)
        # dont_inherit: this module's own `from __future__ import annotations` must not apply to it.
        code = compile(tree, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise _syntax_error(path, error) from error
    sys.modules[name] = module  # dataclasses and pickle look the module up by its name
    try:
        with _importing_siblings(path.resolve().parent):
            exec(code, vars(module))
    # A script's sys.exit() must not end Weft without a message; Ctrl-C may.
    except (Exception, SystemExit) as error:
        del sys.modules[name]  # half a module must not be importable
        raise _run_error(path, error) from error
    return module


@contextmanager
def _importing_siblings(folder: Path) -> Iterator[None]:
    """Let the file import modules of its folder in their current state; write nothing there."""
    for name in _sibling_modules:  # an earlier load may have imported an older version
        sys.modules.pop(name, None)
    before, dont_write = set(sys.modules), sys.dont_write_bytecode
    # First in the path, as for a script: the user's `utils` wins over an installed one.
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = dont_write
        if str(folder) in sys.path:  # the file itself may have changed the path
            sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and folder in Path(file).parents and "site-packages" not in Path(file).parts:
                _sibling_modules.add(name)


def _check_unique_functions(path: Path, tree: ast.Module) -> None:
    """Refuse two decorated functions of one name: the second would silently replace the first."""
    lines: dict[str, int] = {}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or not any(map(_declares, node.decorator_list)):
            continue
        if node.name in lines:
            raise WeftError(
                f"{path.name}:{node.lineno}: function {node.name!r} replaces the one in line "
                f"{lines[node.name]} and what that one declares",
                hint="give each function a different name",
            )
        lines[node.name] = node.lineno


def _declares(decorator: ast.expr) -> bool:
    if not isinstance(decorator, ast.Call):
        return False
    # By the last name only: the module may be imported under any name.
    return ast.unparse(decorator.func).rpartition(".")[2] in DECORATORS


def _syntax_error(path: Path, error: SyntaxError | ValueError) -> WeftError:
    if isinstance(error, WeftError):
        return error
    if not isinstance(error, SyntaxError):
        return WeftError(f"{path.name}: not Python source", got=str(error))
    text = (error.text or "").strip()
    location = f"{Path(error.filename or path).name}:{error.lineno}"
    return WeftError(f"{location}: syntax error: {error.msg}", got=repr(text) if text else None)


def _run_error(path: Path, error: BaseException) -> WeftError:
    """Describe an exception of the running file, with the last line of the file that was reached."""
    if isinstance(error, SyntaxError) and error.filename:
        return _syntax_error(path, error)
    frames = traceback.extract_tb(error.__traceback__)
    # The last frame in the file itself: the deepest one is often inside a library.
    lines = [f.lineno for f in frames if Path(f.filename) == path]
    location = f"{path.name}:{lines[-1]}" if lines else path.name
    if isinstance(error, WeftError):
        return WeftError(f"{location}: {error.what}", expected=error.expected, got=error.got, hint=error.hint)
    last = traceback.format_exception_only(error)[-1]
    return WeftError(f"{location}: running the file raised {' '.join(last.split())}")


def _declarations(module: ModuleType) -> list[Operator | Implementation]:
    """Collect every tagged object of a module's namespace once, in order."""
    declarations: dict[int, Operator | Implementation] = {}
    # An object may have two names, and a module-like object any attributes: take each tag once, by id.
    for value in vars(module).values():
        attributes = getattr(value, "__dict__", None)
        tag = attributes.get(TAG) if hasattr(attributes, "get") else None  # type: ignore[union-attr]
        if isinstance(tag, Operator | Implementation):
            declarations.setdefault(id(tag), tag)
    return list(declarations.values())


def check_declarations(file: str, declared: list[Operator | Implementation]) -> LoadedFile:
    """Return a file's declarations after checking them against each other and Weft's registry."""
    operators = [d for d in declared if isinstance(d, Operator)]
    implementations = [d for d in declared if isinstance(d, Implementation)]
    if not declared:
        raise WeftError(
            f"{file} declares nothing",
            expected=EXPECTED,
            hint="weft new OPERATOR --backend triton writes a file to start from",
        )
    _check_unique(file, "operator", [o.name for o in operators])
    for operator in operators:
        if operator.name in registry.operator_names():
            raise WeftError(
                f"{file}: Weft already has an operator {operator.name!r}",
                expected="another name",
                hint=f'@weft.implementation("{operator.name}", ...) adds an implementation of it',
            )
    known = [*registry.operator_names(), *(o.name for o in operators)]
    for implementation in implementations:
        _check_implementation(file, implementation, known)
    _check_unique(file, "implementation", [f"{i.operator} {i.name}" for i in implementations])
    for operator in operators:
        names = [i.name for i in implementations if i.operator == operator.name]
        if _needs_reference_baseline(file, operator, names):
            implementations.append(reference_implementation(operator))
    return LoadedFile(operators=tuple(operators), implementations=tuple(implementations))


def _check_unique(file: str, what: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise WeftError(f"{file} declares {what} {name!r} {names.count(name)} times")


def _check_implementation(file: str, implementation: Implementation, operators: list[str]) -> None:
    operator, name = implementation.operator, implementation.name
    if operator not in operators:
        error = unknown_name("operator", operator, operators)
        what = f"{file}: {name!r} implements an {error.what}"
        raise WeftError(what, expected=error.expected, got=error.got, hint=error.hint)
    if operator in registry.operator_names() and name in registry.implementation_names(operator):
        raise WeftError(
            f"{file}: Weft already has a {operator} implementation {name!r}",
            expected="another name",
            hint=f'@weft.implementation("{operator}", ..., name="{name}/mine")',
        )


def _needs_reference_baseline(file: str, operator: Operator, names: list[str]) -> bool:
    """Return True if the file does not declare the implementation whose error sets the tolerance."""
    if operator.tolerance.baseline in names:
        return False
    if operator.tolerance.baseline != "eager":
        missing = unknown_name("implementation", operator.tolerance.baseline, [*names, "eager"])
        raise WeftError(
            f"{file}: the tolerance of {operator.name!r} depends on an {missing.what}",
            expected=missing.expected,
            got=missing.got,
        )
    return True


def reference_implementation(operator: Operator) -> Implementation:
    """Return an operator's reference as an implementation that runs in the case's dtype.

    An output has the dtype of the first input even if the reference widened it, and memory of its
    own even if the reference returned (a view of) an input.
    """

    def eager(*inputs: Any, **params: Any) -> Any:
        outputs = operator.reference(*inputs, **params)
        if isinstance(outputs, tuple):
            return tuple(_in_own_memory(t, inputs) for t in outputs)
        return _in_own_memory(outputs, inputs)

    eager.computes_reference = True  # type: ignore[attr-defined]  # the check does not compare it with itself
    return Implementation(
        operator=operator.name,
        backend="eager",
        forward=eager,
        directions=operator.directions,
        idea="the reference, in the case's dtype",
    )


def _in_own_memory(output: Any, inputs: tuple[Any, ...]) -> Any:
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    if not isinstance(output, torch.Tensor) or not tensors:
        return output
    if output.is_floating_point() and tensors[0].is_floating_point():
        output = output.to(tensors[0].dtype)
    # A baseline that returned an input would break the rule that outputs share no memory with one.
    pointer = output.untyped_storage().data_ptr()
    if any(x.untyped_storage().data_ptr() == pointer for x in tensors):
        output = output.clone(memory_format=torch.contiguous_format)
    return output
