"""A project to ship kernels as a PyTorch extension: one .cu, one binding, four build methods.

The files are templates in ``project/``; the extension's name is their only parameter.
"""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path

from weft.core import WeftError
from weft.core.json_files import read_json
from weft.workbench.report.markdown import RESULTS, table

TEMPLATES = Path(__file__).parent / "project"
# Template -> path in the project.
FILES = {
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "pyproject.toml": "pyproject.toml",
    "setup.py": "setup.py",
    "CMakeLists.txt": "CMakeLists.txt",
    "toolchain.py": "toolchain.py",
    "build_methods.py": "build_methods.py",
    "build_all.py": "build_all.py",
    "kernels.cu": "csrc/{name}.cu",
    "binding.cpp": "csrc/binding.cpp",
    "__init__.py": "src/{name}/__init__.py",
    "operators.py": "src/{name}/operators.py",
    "test_project.py": "tests/test_{name}.py",
}
NAME = re.compile(r"[a-z][a-z0-9_]*")
# Names that the extension cannot have. A package of the same name as an import or a script would hide it,
# or be hidden. `aten`, `prim` and similar are namespaces of PyTorch's own operators. gcc defines `linux`
# and `unix` as macros.
RESERVED = {"torch", "numpy", "pytest", "setuptools", "pip", "triton", "weft", "toolchain"}
RESERVED |= {"build_all", "build_methods", "aten", "prim", "prims", "quantized", "inductor", "linux", "unix"}


def project(name: str) -> dict[str, str]:
    """Return the project's files, path -> text. Raises :class:`WeftError` for an invalid name."""
    check_name(name)
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # the output is source code, not HTML
    )
    return {
        path.format(name=name): environment.get_template(f"{template}.j2").render(name=name)
        for template, path in FILES.items()
    }


def check_name(name: str) -> None:
    """Raise :class:`WeftError` unless the name can be a package, a namespace and a pip project."""
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise WeftError(
            "--extension",
            expected="a Python identifier of lower-case letters, digits and _, starting with a letter",
            got=name,
            hint="it names the package, the namespace in torch.ops and the folder: tiles",
        )
    if name in RESERVED or name in sys.stdlib_module_names:
        raise WeftError(f"--extension: {name} is already the name of something else", hint="choose another")


def write(name: str, folder: Path, *, force: bool = False) -> list[Path]:
    """Write the project into ``folder`` and return the paths of its files.

    Raises :class:`WeftError` if the folder is not empty and ``force`` is false, or if it cannot be
    written. With ``force`` the project's files are overwritten, and others are left alone.
    """
    files = project(name)
    if not force and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        hint = "--force overwrites the project's files in it, --out names another"
        raise WeftError(f"{folder} is there already", hint=hint)
    written = []
    try:
        for path, text in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            written.append(target)
    except OSError as error:
        raise WeftError(f"{folder} cannot be written", got=error.strerror) from error
    return written


def build_report(folder: Path = RESULTS) -> str:
    """Return the committed runs of ``build_all.py`` for docs/bring/extension.md, one table a device."""
    reports = [_device_report(file) for file in sorted(folder.glob("*/extension.json"))]
    command = "`python build_all.py --json > extension.json`, committed under `results/<device>/`"
    return "\n\n".join(reports) or f"Not measured yet: {command}."


def _device_report(file: Path) -> str:
    record = read_json(file)
    rows, device = [], ""
    for method, result in record["ways"].items():
        seconds = f"{result['seconds']:.1f} s" if "seconds" in result else "-"
        device = f"{result['device']}, PyTorch {result['torch']}" if "device" in result else device
        answers = result.get("answers")
        if isinstance(answers, dict):
            bits = " ".join(f"`{digest[:6]}`" for digest in answers.values())
        else:
            bits = str(result.get("reason", "not called"))
        rows.append([f"`{method}`", seconds, bits])
    machine = record["machine"]
    versions = f"nvcc {machine['nvcc']}, {machine['cores']} cores, {machine['date'][:10]}"
    verdict = "All are correct, with the same bits." if record["good"] else "**Not all agree.**"
    head = ["build method", "build, from nothing", "bits of relu, add, matmul"]
    return f"{device or 'No GPU'}, {versions}:\n\n{table(head, rows)}\n\n{verdict}"
