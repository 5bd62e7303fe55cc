"""A new operator inside a checkout of Weft: its folder, its registry line and its public name.

The folder's files are templates beside this module, with SiLU as their mathematics. Everything is prepared
first: a failure leaves the checkout as it was.
"""

from __future__ import annotations

import ast
import keyword
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jinja2

from weft.core import WeftError

TEMPLATES = Path(__file__).parent
FILES = ("__init__.py", "spec.py", "with_eager.py", "with_torch.py", "with_triton.py", "README.md")
OPERATOR = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
REGISTRY = Path("src/weft/core/registry.py")
OPS = Path("src/weft/ops")
OPS_INIT = OPS / "__init__.py"
MARKS = (Path("pyproject.toml"), REGISTRY, OPS_INIT)
IMPLEMENTATIONS = ("eager", "torch", "triton")
LONGEST = 24  # characters of a name: the generated lines stay within the budget of columns


@dataclass(frozen=True)
class Edit:
    """New text of an existing file."""

    path: Path
    text: str


def find_checkout(start: Path) -> Path:
    """Return the root of the checkout of Weft that ``start`` lies in.

    Raises:
        WeftError: no parent folder is a checkout.
    """
    start = start.resolve()
    for folder in (start, *start.parents):
        if all((folder / mark).is_file() for mark in MARKS):
            return folder
    raise WeftError(
        "--in-tree: not in a checkout of Weft",
        expected=f"a working directory in a source tree with {REGISTRY}",
        got=str(start),
        hint="change to the root of the checkout, or leave --in-tree out for a file of your own",
    )


def add_operator(name: str, root: Path) -> list[Path]:
    """Write the operator ``name`` into the checkout at ``root``; return the new and changed files.

    Raises:
        WeftError: the name is invalid or taken, the registry or the list of operators has another form
            than expected, or a file cannot be written. The checkout is unchanged then.
    """
    check_name(name, root)
    edits = [
        Edit(root / REGISTRY, _with_registry_line((root / REGISTRY).read_text(encoding="utf-8"), name)),
        Edit(root / OPS_INIT, _with_public_name((root / OPS_INIT).read_text(encoding="utf-8"), name)),
    ]
    texts = {file: render(file, name) for file in FILES}
    folder = root / OPS / name
    try:
        with _staging_folder(folder.parent) as staging:
            _write_all(staging, folder, texts, edits)
    except OSError as error:
        what = f"--in-tree: {error.filename or folder} cannot be written"
        raise WeftError(what, got=error.strerror, hint="nothing was changed") from error
    return [*(folder / file for file in FILES), *(edit.path for edit in edits)]


def check_name(name: str, root: Path) -> None:
    """Raise :class:`WeftError` unless ``name`` is a free name for an operator of the checkout."""
    if not OPERATOR.fullmatch(name) or keyword.iskeyword(name) or len(name) > LONGEST:
        raise WeftError(
            "--operator: invalid name",
            expected=f"at most {LONGEST} lower-case letters, digits and single _, a letter first; no keyword",
            got=name,
            hint="it names the folder, the function weft.ops.NAME and the schema weft::NAME: silu",
        )
    names = _registered_names((root / REGISTRY).read_text(encoding="utf-8"))
    public = [element for element, _ in _public_names((root / OPS_INIT).read_text(encoding="utf-8"))]
    if name in names or name in public:
        raise WeftError(
            f"--operator: {name!r} exists already",
            expected="a name that weft.ops does not have",
            got=name,
            hint=f"weft ops {name} shows it; weft new {name} --backend triton writes an implementation of it",
        )
    if (root / OPS / name).exists():
        raise WeftError(
            f"--operator: {OPS / name} exists already",
            expected="a name without a folder",
            got=name,
            hint="choose another name, or remove the folder if it is left over",
        )


def render(file: str, name: str) -> str:
    """Return the text of one file of the new operator's folder."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # the output is source code, not HTML
    )
    title = "SiLU" if name == "silu" else name
    return environment.get_template(f"{file}.j2").render(name=name, title=title)


def _registry_dict(text: str) -> ast.Dict:
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "REGISTRY":
            assert isinstance(node.value, ast.Dict)
            return node.value
    raise WeftError(f"--in-tree: {REGISTRY}", expected="an annotated dict REGISTRY", got="none")


def _registered_names(text: str) -> list[str]:
    return [str(ast.literal_eval(key)) for key in _registry_dict(text).keys if key is not None]


def _with_registry_line(text: str, name: str) -> str:
    """Add the operator's line at the end of the registry."""
    lines = text.splitlines(keepends=True)
    last = _registry_dict(text).end_lineno
    assert last is not None
    names = ", ".join(f'"{i}"' for i in IMPLEMENTATIONS)
    lines.insert(last - 1, f'    "{name}": _single("{name}", ({names})),\n')
    return "".join(lines)


def _public_names(text: str) -> list[tuple[str, int]]:
    """Return the elements of ``__all__`` with the lines that they are on."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            assert isinstance(node.value, ast.List)
            return [(str(ast.literal_eval(e)), e.lineno) for e in node.value.elts]
    raise WeftError(f"--in-tree: {OPS_INIT}", expected="a list __all__", got="none")


def _with_public_name(text: str, name: str) -> str:
    """Add the import of the operator's function, and its name in ``__all__``, both in sorted order."""
    lines = text.splitlines(keepends=True)
    names = _public_names(text)
    at = next((line for element, line in names if element > name), names[-1][1] + 1)
    lines.insert(at - 1, f'    "{name}",\n')
    # The imports come before __all__: their line numbers still hold.
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]
    module = f"weft.ops.{name}"
    after = [node.lineno for node in imports if (node.module or "") > module]
    at = after[0] if after else (imports[-1].end_lineno or imports[-1].lineno) + 1
    lines.insert(at - 1, f"from {module} import {name}\n")
    return "".join(lines)


@contextmanager
def _staging_folder(parent: Path) -> Iterator[Path]:
    """Make a folder in ``parent``, on the file system of the checkout, and remove it at the end."""
    staging = Path(tempfile.mkdtemp(prefix=".new-operator-", dir=parent))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_all(staging: Path, folder: Path, texts: dict[str, str], edits: list[Edit]) -> None:
    """Write the folder and the edits beside their places, then rename them; undo all on a failure."""
    new_folder = staging / "folder"
    new_folder.mkdir()
    for file, text in texts.items():
        (new_folder / file).write_text(text, encoding="utf-8")
    prepared: list[tuple[Path, Path, bytes]] = []
    for number, edit in enumerate(edits):
        temporary = staging / str(number)
        temporary.write_text(edit.text, encoding="utf-8")
        shutil.copymode(edit.path, temporary)
        prepared.append((temporary, edit.path, edit.path.read_bytes()))
    # A rename fails or happens as a whole. The registry comes after the folder: it never names a missing one.
    os.rename(new_folder, folder)
    changed: list[tuple[Path, bytes]] = []
    try:
        for temporary, path, before in prepared:
            os.replace(temporary, path)
            changed.append((path, before))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        for path, before in changed:
            path.write_bytes(before)
        raise
