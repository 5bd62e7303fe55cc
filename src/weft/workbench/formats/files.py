"""Files as they are: what a file defines, read without running it, and a file run as a module."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType

from weft.core import WeftError

# What a candidate's imports and calls say of how it computes; the first that is found names it.
CUDA_MODULES = ("cuda", "cupy", "pycuda")
EXTENSIONS = ("torch.utils.cpp_extension",)
CUDA_SOURCES = re.compile(r"cuda_sources|CUDAExtension|\.cuh?[\"']")


@dataclass(frozen=True)
class Facts:
    """What can be said of a Python file without running it."""

    path: Path
    text: str
    tree: ast.Module = field(repr=False)

    @cached_property
    def names(self) -> frozenset[str]:
        """What the file defines at its top: classes, functions and variables."""
        return frozenset(_defined(self.tree.body))

    @cached_property
    def imports(self) -> frozenset[str]:
        """Every module that the file imports anywhere, by its full name."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {a.name for a in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
        return frozenset(found)

    @cached_property
    def backend(self) -> str:
        """The backend that the file's own code is in, by what it imports and calls."""
        extends = any(_within(m, EXTENSIONS) for m in self.imports)
        if extends and CUDA_SOURCES.search(self.text):
            return "cuda"
        if any(_within(m, CUDA_MODULES) for m in self.imports):
            return "cuda"
        if any(_within(m, ("triton",)) for m in self.imports):
            return "triton"
        if any(_within(m, ("numba.cuda",)) for m in self.imports):
            return "numba"
        return "compile" if "torch.compile" in self.text else "eager"

    @property
    def says_cuda(self) -> bool:
        return "cuda" in self.text


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (n for target in targets for n in ast.walk(target))
            yield from (n.id for n in names if isinstance(n, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (a.asname or a.name.partition(".")[0] for a in node.names)
        for field_name in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _defined(getattr(node, field_name, []))


def _within(module: str, roots: tuple[str, ...]) -> bool:
    return any(module == root or module.startswith(root + ".") for root in roots)


def facts(path: Path) -> Facts:
    """What a file says of itself; raises SyntaxError, OSError or UnicodeDecodeError."""
    text = path.read_text()
    return Facts(path, text, ast.parse(text, str(path)))


def reference_facts(path: Path) -> Facts:
    """:func:`facts` of a reference; raises :class:`WeftError` where it cannot be read."""
    if not path.is_file():
        raise WeftError("the reference", expected="a file or a folder", got=path)
    try:
        return facts(path)
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        raise WeftError("the reference cannot be read", got=f"{path}: {error}") from error


def execute(path: Path, name: str) -> ModuleType:
    """Run a file as the module ``name``; raises whatever it raises.

    It stands in ``sys.modules`` under that name, since Triton's and Numba's decorators read the
    source of the module that a function says it is from.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
