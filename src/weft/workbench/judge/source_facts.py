"""Facts about a Python file that are read without running it, and running a file as a module."""

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
from weft.core.json_files import read_text

# Imports and calls that show a candidate's backend; the first match decides.
CUDA_MODULES = ("cuda", "cupy", "pycuda")
EXTENSIONS = ("torch.utils.cpp_extension",)
CUDA_SOURCES = re.compile(r"cuda_sources|CUDAExtension|\.cuh?[\"']")


@dataclass(frozen=True)
class SourceFacts:
    """A parsed Python file: the names it defines, its imports and its backend."""

    path: Path
    text: str
    tree: ast.Module = field(repr=False)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the classes, functions and variables at the top level of the file."""
        return frozenset(_defined_names(self.tree.body))

    @cached_property
    def imports(self) -> frozenset[str]:
        """Full names of all modules that the file imports anywhere."""
        modules: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                modules |= {a.name for a in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
        return frozenset(modules)

    @cached_property
    def backend(self) -> str:
        """Backend of the file's own code, derived from its imports and calls."""
        builds_extension = any(_is_within(m, EXTENSIONS) for m in self.imports)
        if builds_extension and CUDA_SOURCES.search(self.text):
            return "cuda"
        if any(_is_within(m, CUDA_MODULES) for m in self.imports):
            return "cuda"
        if any(_is_within(m, ("triton",)) for m in self.imports):
            return "triton"
        if any(_is_within(m, ("numba.cuda",)) for m in self.imports):
            return "numba"
        return "compile" if "torch.compile" in self.text else "eager"

    @property
    def mentions_cuda(self) -> bool:
        return "cuda" in self.text


def _defined_names(body: list[ast.stmt]) -> Iterator[str]:
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
                yield from _defined_names(getattr(node, field_name, []))


def _is_within(module: str, roots: tuple[str, ...]) -> bool:
    return any(module == root or module.startswith(root + ".") for root in roots)


def source_facts(path: Path) -> SourceFacts:
    """Parse a file; raise SyntaxError, OSError, or ValueError for what is no source at all."""
    text = read_text(path)
    try:
        return SourceFacts(path, text, ast.parse(text, str(path)))
    except (RecursionError, MemoryError) as error:  # the parser's two ways to say so
        raise ValueError("the source nests too deeply") from error


KERNELBENCH, GPUMODE, TRACE = "kernelbench", "gpumode", "flashinfer-trace"


def format_of(path: Path) -> str:
    """Return the format of a reference file by the names that it defines; '' for any other file."""
    try:
        names = source_facts(path).names
    except (SyntaxError, ValueError, OSError):
        return ""
    if {"Model", "get_inputs"} <= names:
        return KERNELBENCH
    return GPUMODE if {"generate_input", "ref_kernel"} <= names else ""


def reference_facts(path: Path) -> SourceFacts:
    """Parse a reference; raise :class:`WeftError` if it cannot be read."""
    if not path.is_file():
        raise WeftError("the reference", expected="a file or a folder", got=path)
    try:
        return source_facts(path)
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        raise WeftError("the reference cannot be read", got=f"{path}: {error}") from error


def execute(path: Path, name: str) -> ModuleType:
    """Run a file as the module ``name``; raise whatever it raises.

    The module is in ``sys.modules`` under that name, because the decorators of Triton and Numba
    read the source of the module that a function names as its own.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    # Compiled here, not by the loader: its cache would run the old code of a file that was rewritten with
    # the same size within a second, and whatever a candidate has written into the cache of another file.
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        exec(code, vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module
