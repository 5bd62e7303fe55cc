"""A project to ship kernels as a PyTorch extension: one .cu, one binding, four ways of building it.

The files stand in ``project/`` as templates, with the extension's name left open.
"""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path

from weft.core import WeftError

TEMPLATES = Path(__file__).parent / "project"
# Template -> where it stands in the project.
FILES = {
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "pyproject.toml": "pyproject.toml",
    "setup.py": "setup.py",
    "CMakeLists.txt": "CMakeLists.txt",
    "toolchain.py": "toolchain.py",
    "ways.py": "ways.py",
    "build_all.py": "build_all.py",
    "kernels.cu": "csrc/{name}.cu",
    "binding.cpp": "csrc/binding.cpp",
    "__init__.py": "src/{name}/__init__.py",
    "operators.py": "src/{name}/operators.py",
    "test_project.py": "tests/test_{name}.py",
}
NAME = re.compile(r"[a-z][a-z0-9_]*")
# What these import or are: a package of the same name would hide them, or be hidden. `aten`, `prim`
# and the like are namespaces of PyTorch's own operators; gcc knows `linux` and `unix` as macros.
TAKEN = {"torch", "numpy", "pytest", "setuptools", "pip", "triton", "weft", "toolchain", "ways"}
TAKEN |= {"build_all", "aten", "prim", "prims", "quantized", "inductor", "linux", "unix"}


def project(name: str) -> dict[str, str]:
    """The project's files, path -> text. Raises :class:`WeftError` for a name it cannot have."""
    check_name(name)
    import jinja2

    rules = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # it is source code and not a page
    )
    return {
        path.format(name=name): rules.get_template(f"{template}.j2").render(name=name)
        for template, path in FILES.items()
    }


def check_name(name: str) -> None:
    """Raises :class:`WeftError` unless it can name a package, a namespace and a pip project."""
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise WeftError(
            "--extension",
            expected="a Python identifier of small letters, digits and _, a letter first",
            got=name,
            hint="it names the package, the namespace in torch.ops and the folder: tiles",
        )
    if name in TAKEN or name in sys.stdlib_module_names:
        raise WeftError(f"--extension: {name} is the name of something else", hint="choose another")


def write(name: str, folder: Path, *, force: bool = False) -> list[Path]:
    """Write the project into ``folder``, and say which files.

    Raises :class:`WeftError` where something of that name is there already and ``force`` is not
    given, or where it cannot be written. With ``force`` files of the project are written over, and
    others are left alone.
    """
    made = project(name)
    if not force and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        hint = "--force writes over the project's files in it, --out names another"
        raise WeftError(f"{folder} is there already", hint=hint)
    written = []
    try:
        for path, text in made.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            written.append(target)
    except OSError as error:
        raise WeftError(f"{folder} cannot be written", got=error.strerror) from error
    return written
