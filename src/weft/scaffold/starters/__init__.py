"""Starter files: for each operator and backend a small correct kernel, to be made fast.

Each is a template of this folder, ``softmax_triton.py.j2``, with the names of the implementation
and of the file left open; ``operator.py.j2`` declares a whole operator of one's own.
"""

from __future__ import annotations

import re
from pathlib import Path

from weft.core import WeftError, registry
from weft.core.operator import unknown_name

HERE = Path(__file__).parent
BACKENDS = ("triton", "cuda", "numba", "eager")
OPERATORS = ("gelu", "softmax", "sum", "matmul")  # of which there are templates
NAME = re.compile(r"[A-Za-z_]\w*(?:[./-]\w+)*")
OPERATOR = re.compile(r"[a-z][a-z0-9_]*")


def ending(backend: str) -> str:
    """Return the file suffix of a backend."""
    return ".cu" if backend == "cuda" else ".py"


def file_name(operator: str, backend: str | None) -> str:
    """Return the default name of a starter file: ``softmax_cuda.cu``, ``twist.py``."""
    return f"{operator}_{backend}{ending(backend)}" if backend else f"{operator}.py"


def starter(operator: str, backend: str, *, name: str, file: str) -> str:
    """A file with one implementation of one of Weft's operators, called ``name``.

    Raises :class:`WeftError` for an operator or a backend that there is not, and for a name that
    is taken or cannot be one.
    """
    if operator not in registry.operator_names():
        error = unknown_name("operator", operator, registry.operator_names())
        hint = f"{error.hint or ''} weft new --operator {operator} writes one of your own".strip()
        raise WeftError(error.what, expected=error.expected, got=error.got, hint=hint)
    if operator not in OPERATORS:
        raise WeftError(
            f"no starting file for {operator}",
            expected="one of " + ", ".join(OPERATORS),
            got=operator,
            hint=f"start from what Weft ships: weft inspect {operator} --impl triton shows it",
        )
    if backend not in BACKENDS:
        raise unknown_name("backend", backend, list(BACKENDS))
    _usable(name)
    if name in registry.implementation_names(operator):
        raise WeftError(f"Weft has a {operator} {name!r} of its own", expected="another --name")
    return _render(f"{operator}_{backend}{ending(backend)}.j2", name=name, file=file)


def own_operator(operator: str, *, name: str, file: str) -> str:
    """A file with a whole operator, its eager and its Triton implementation, the latter ``name``.

    Raises :class:`WeftError` for a name that Weft's own operators have, or that cannot be one.
    """
    if operator in registry.operator_names():
        raise WeftError(
            f"operator {operator!r} is Weft's own",
            expected="another name",
            hint=f"weft new {operator} --backend triton writes an implementation of it",
        )
    if not OPERATOR.fullmatch(operator):
        expected = "small letters, digits and _, a letter first"
        raise WeftError("the operator's name", expected=expected, got=operator)
    _usable(name)
    if name == "eager":
        raise WeftError("the file has an 'eager' of its own", expected="another --name")
    return _render("operator.py.j2", operator=operator, name=name, file=file)


def _usable(name: str) -> None:
    if not NAME.fullmatch(name):
        raise WeftError("--name", expected="a name such as mine or triton/wide", got=name)


def _render(template: str, **names: str) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # the output is source code, not HTML
    )
    return environment.get_template(template).render(names)
