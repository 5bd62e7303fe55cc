"""The project keeps its rules, and each rule catches a planted violation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers import policy

ROOT = Path(__file__).resolve().parent.parent
Rule = Callable[[Path], Iterator[str]]

PYPROJECT = """
[build-system]
requires = ["setuptools>=77"] # builds the package
[project]
dependencies = [
  "numpy>=1.26", # arrays are numpy's
]
"""
EXTRAS = """
[project.optional-dependencies]
test = ["pytest>=8"] # runs the tests
curves = ["scipy>=1"] # fits the curves
"""
SOUND = {
    "pyproject.toml": PYPROJECT + EXTRAS,
    "src/weft/core/fit.py": "def f():\n    import scipy.optimize\n    return scipy\n",
    "README.md": "See https://pytorch.org/docs and /usr/bin/python3.\n",
    "src/weft/__init__.py": "from weft.core.errors import WeftError\n",
    "src/weft/core/__init__.py": "from weft.core.errors import WeftError\n",
    "src/weft/core/errors.py": "import numpy\n\n\nclass WeftError(ValueError):\n    pass\n",
    "src/weft/machine/__init__.py": "KNOWN = {'H100': 3350}\n",
    "src/weft/ops/__init__.py": "from weft.ops.a import a\n",
    "src/weft/ops/_common/__init__.py": "",
    "src/weft/ops/a/__init__.py": (
        "from weft.ops import _common\n\n\ndef a(x):\n"
        '    """A of any shape, float32. Raises WeftError."""\n    return x  # 3 us on an H100\n'
    ),
    "src/weft/ops/a/a.cu": "// on an H100\n__global__ void a(float* x) { if (x) { x[0] = 1; } }\n",
    "src/weft/ops/b/__init__.py": "",
    "src/weft/workbench/__init__.py": "def later():\n    from weft.ops.a import a\n    return a\n",
}


def lines(count: int, text: str = "    x = 1\n") -> str:
    return text * count


CHECK = {"src/weft/workbench/check/__init__.py": ""}
LATE_IMPORT = "def f():\n    import weft.workbench.check\n"
# rule -> files that break it, added to the sound tree
PLANTED: list[tuple[Rule, dict[str, str]]] = [
    (policy.file_lengths, {"src/weft/core/long.py": lines(601, "x = 1\n")}),
    (
        policy.small_modules,
        {"src/weft/core/one.py": "X = 1\n", "src/weft/core/two.py": "import weft.core.one\n"},
    ),
    (policy.line_lengths, {"src/weft/ops/a/a.cu": "//" + "x" * 109 + "\n"}),
    (policy.function_lengths, {"src/weft/core/f.py": "def f():\n" + lines(80)}),
    (policy.function_lengths, {"src/weft/core/f.py": "@triton.jit\ndef f():\n" + lines(150)}),
    (
        policy.function_lengths,
        {"src/weft/core/f.py": "@cuda.jit(lineinfo=1)\ndef f():\n" + lines(150)},
    ),
    (
        policy.function_lengths,
        {"src/weft/ops/a/a.cu": "__global__ void f() {\n" + lines(150, "  if (x) { y(); }\n") + "}"},
    ),
    (policy.layering, {"src/weft/core/up.py": "from weft.machine import query\n"}),
    (policy.layering, {"src/weft/core/up.py": "def f():\n    import weft.ops.a\n"}),
    (policy.layering, {"src/weft/ops/a/up.py": "from ... import workbench\n"}),
    (policy.layering, {"src/weft/ops/b/__init__.py": "from weft.ops.a import a\n"}),
    (policy.layering, {"src/weft/ops/b/__init__.py": "from weft.ops import a\n"}),
    (policy.layering, {"src/weft/attic/__init__.py": "import weft.core\n"}),
    (policy.layering, {"src/weft/workbench/calls/a.py": "from weft.workbench import check\n"} | CHECK),
    (
        policy.layering,
        {"src/weft/workbench/calls/a.py": LATE_IMPORT} | CHECK,
    ),
    (policy.cycles, {"src/weft/core/errors.py": "from weft.core import WeftError\n"}),
    (
        policy.cycles,
        {"src/weft/core/p.py": "import weft.core.q\n", "src/weft/core/q.py": "from . import p\n"},
    ),
    (
        policy.cycles,
        {
            "src/weft/core/p.py": "import weft.core.q\n",
            "src/weft/core/q.py": "def f():\n    from . import p\n",
        },
    ),
    (policy.device_names, {"src/weft/ops/a/tuned.py": "FAST = name == 'NVIDIA H100 80GB'\n"}),
    (policy.device_names, {"src/weft/ops/a/tuned.py": "H200 = 1\n"}),
    (policy.device_names, {"src/weft/ops/a/a.cu": "#define A100 1\n"}),
    (policy.swallowed_errors, {"src/weft/core/e.py": "try:\n    f()\nexcept:\n    g()\n"}),
    (policy.swallowed_errors, {"src/weft/core/e.py": "try:\n    f()\nexcept E:\n    pass\n"}),
    (policy.swallowed_errors, {"src/weft/core/e.py": "with suppress(Exception):\n    f()\n"}),
    (policy.unfinished, {"README.md": "TO" + "DO: write this\n"}),
    (policy.unfinished, {"src/weft/core/e.py": "def f():\n    raise NotImplementedError\n"}),
    (policy.operator_docstrings, {"src/weft/ops/b/__init__.py": "def b(x):\n    return x\n"}),
    (
        policy.operator_docstrings,
        {"src/weft/ops/b/__init__.py": 'def b(x):\n    """Any shape, float32."""\n'},
    ),
    (policy.dependency_reasons, {"pyproject.toml": PYPROJECT.replace("# arrays are numpy's", "")}),
    (policy.dependency_reasons, {"pyproject.toml": PYPROJECT.replace("# builds the package", "#")}),
    (policy.dependency_use, {"src/weft/core/e.py": "import numpy, scipy.linalg\n"}),
    (
        policy.dependency_use,
        {"src/weft/core/e.py": "import scipy\n", "pyproject.toml": PYPROJECT + EXTRAS},
    ),
    (
        policy.dependency_use,
        {
            "src/weft/core/e.py": "def f():\n    import pytest\n",
            "pyproject.toml": PYPROJECT + EXTRAS,
        },
    ),
    (policy.dependency_use, {"src/weft/core/errors.py": "WeftError = ValueError\n"}),
    (policy.private_places, {"README.md": "cd /" + "work/main\n"}),
    (policy.private_places, {"README.md": "see '/" + "home/jo/notes'\n"}),
    (policy.private_places, {"README.md": "https:" + "//wiki.corp.internal/x\n"}),
    (policy.vague_names, {"src/weft/core/e.py": "def f(x):\n    found = x\n    return found\n"}),
    (policy.vague_names, {"src/weft/core/e.py": "class Kept:\n    pass\n"}),
    (policy.vague_names, {"src/weft/core/e.py": "def f(given):\n    return given\n"}),
    (policy.vague_names, {"tests/test_e.py": "def test_e():\n    wanted = 1\n"}),
    (policy.vague_names, {"tests/helpers/e.py": "def f(told):\n    return told\n"}),
    (policy.docstring_openings, {"src/weft/core/e.py": 'def f():\n    """What this returns."""\n'}),
    (policy.docstring_openings, {"tests/test_e.py": '"""Of a file without a kernel."""\n'}),
    (policy.json_files, {"src/weft/core/e.py": "import json\nX = json.loads(FILE.read_text())\n"}),
    (policy.json_files, {"src/weft/core/e.py": "import json\nX = json.load(open('x'))\n"}),
]


def plant(root: Path, tree: dict[str, str]) -> Path:
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize("rule", policy.RULES, ids=lambda r: r.__name__)
def test_the_project_keeps_its_rules(rule: Rule) -> None:
    broken = list(rule(ROOT))
    assert not broken, f"{rule.__doc__}\n" + "\n".join(broken)


@pytest.mark.parametrize("rule", policy.RULES, ids=lambda r: r.__name__)
def test_a_sound_tree_passes(rule: Rule, tmp_path: Path) -> None:
    assert list(rule(plant(tmp_path, SOUND))) == []


@pytest.mark.parametrize(
    ("rule", "tree"), PLANTED, ids=[f"{r.__name__}-{i}" for i, (r, _) in enumerate(PLANTED)]
)
def test_a_planted_violation_is_caught(rule: Rule, tree: dict[str, str], tmp_path: Path) -> None:
    assert list(rule(plant(tmp_path, {**SOUND, **tree})))


def test_every_rule_has_a_planted_violation() -> None:
    assert {r for r, _ in PLANTED} == set(policy.RULES)


# The start of a command is quick because it imports little. Seconds differ from machine to machine, and
# the number of modules does not: `weft --help` loads 185, and takes 0.2 s on a core of 2.5 GHz.
MAX_MODULES = 250
LIGHT = """
import sys
{action}
heavy = [m for m in ("torch", "triton", "numpy", "numba", "jinja2") if m in sys.modules]
assert not heavy, f"imported {{heavy}}"
print(len(sys.modules), file=sys.stderr)
"""
HELP = """
import contextlib, io
sys.argv = ["weft", "--help"]
from weft.cli import main
with contextlib.redirect_stdout(io.StringIO()) as out:
    try:
        main()
    except SystemExit as stopped:
        assert not stopped.code, stopped.code
assert "bench" in out.getvalue(), out.getvalue()
"""


def modules_loaded(action: str) -> int:
    """Run ``action`` in a fresh Python; return how many modules it has loaded. Raise if one is heavy."""
    done = subprocess.run(
        [sys.executable, "-c", LIGHT.format(action=action)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise AssertionError(done.stderr)
    return int(done.stderr.split()[-1])


@pytest.mark.parametrize("action", ["import weft", HELP], ids=["import", "help"])
def test_the_start_is_light(action: str) -> None:
    assert modules_loaded(action) <= MAX_MODULES


def test_a_start_with_many_modules_is_caught() -> None:
    action = "import asyncio, unittest.mock, multiprocessing.pool, typer, pip._internal.cli.main"
    assert modules_loaded(action) > MAX_MODULES


def test_heavy_import_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"imported \['numpy'\]"):
        modules_loaded("import numpy")


def test_every_command_has_an_example_and_a_page() -> None:
    from typer.main import get_command

    from weft.cli import app

    group = get_command(app)
    commands = getattr(group, "commands", {})
    assert commands, "the command line has no commands"
    helps = {}
    for name, command in commands.items():
        helps[name] = " ".join(f"{command.help or ''} {command.epilog or ''}".split())
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    broken = list(policy.commands_documented(helps, "\n".join(p.read_text() for p in pages)))
    assert not broken, "\n".join(broken)


def test_an_undocumented_command_is_caught() -> None:
    helps = {"bench": "For example: weft bench gelu", "ops": "Lists operators."}
    assert list(policy.commands_documented(helps, "weft ops and weft bench")) == [
        "weft ops: its help shows no example"
    ]
    assert list(policy.commands_documented(helps, "weft ops")) == [
        "weft bench: no page of docs speaks of it",
        "weft ops: its help shows no example",
    ]
