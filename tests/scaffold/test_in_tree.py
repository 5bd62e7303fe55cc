"""``weft new --operator NAME --in-tree``: the operator passes every test that reads the registry."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from helpers.paths import ROOT
from weft.cli.new import new
from weft.core import WeftError
from weft.scaffold import in_tree

REGISTRY_TESTS = (
    "tests/ops/test_ops.py",
    "tests/ops/test_conformance.py",
    "tests/dispatch/test_dispatch.py::test_on_a_cpu_torch_s_own",
    "tests/workbench/kernels/test_provenance.py::test_no_kernel_of_weft_is_mistaken_for_a_library_s",
)
BESIDE = "test_every_operator_is_public or test_the_sample_meets or torch_s_own or of_the_house"


def checkout(folder: Path) -> Path:
    """Write the files that make a checkout, and a README beside them."""
    for path in in_tree.MARKS:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_a_new_operator_passes_check_and_tests_with_nothing_typed(tmp_path: Path) -> None:
    skipped = shutil.ignore_patterns("__pycache__")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "WEFT_SAMPLE_SEED": "1"}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    written = run("weft", "new", "--operator", "silu", "--in-tree").split()
    assert "src/weft/ops/silu/spec.py" in written and "src/weft/core/registry.py" in written
    # One case: conformance below checks the others.
    one = ("--case", "fp32-7x129", "--device", "cpu", "--json")
    verdicts = json.loads(run("weft", "check", "silu", *one))["verdicts"]
    passed = {(v["implementation"], v["direction"]) for v in verdicts if v["status"] == "pass"}
    assert passed == {(i, d) for i in in_tree.IMPLEMENTATIONS for d in ("forward", "backward")}
    shown = run("weft", "ops", "silu")
    assert all(implementation in shown for implementation in in_tree.IMPLEMENTATIONS)
    # -n 0: this test may already run in one of several workers.
    few = ("-q", "-n", "0", "-p", "no:cacheprovider", "-k", f"silu or {BESIDE}")
    summary = run("pytest", *few, *REGISTRY_TESTS).splitlines()[-1]
    # Two tests of tracing, one of registration, five of wrong calls, four of the registry; then conformance.
    assert "failed" not in summary and int(summary.split(" passed")[0].split()[-1]) > 12 + 10, summary


def test_the_checkout_gets_a_folder_and_two_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = checkout(tmp_path)
    before = contents(root)
    (root / "docs").mkdir()
    monkeypatch.chdir(root / "docs")
    out, err, error = command("--operator", "zig_zag2", "--in-tree")
    assert error is None and len(out.split()) == len(in_tree.FILES) + 2
    assert "weft check zig_zag2" in err and "make docs" in err
    after = contents(root)
    new_files = {f"src/weft/ops/zig_zag2/{file}" for file in in_tree.FILES}
    assert after.keys() - before.keys() == new_files
    for path, line in (
        ("src/weft/core/registry.py", '    "zig_zag2": _single("zig_zag2", ("eager", "torch", "triton")),'),
        ("src/weft/ops/__init__.py", "from weft.ops.zig_zag2 import zig_zag2"),
        ("src/weft/ops/__init__.py", '    "zig_zag2",'),
    ):
        assert line in after[path].decode().splitlines() and line not in before[path].decode()
    for path in new_files:
        assert "{{" not in after[path].decode()
        if path.endswith(".py"):
            compile(after[path], path, "exec")


@pytest.mark.skipif(find_spec("ruff") is None, reason="needs ruff: pip install ruff")
def test_generated_files_are_formatted_at_any_length_of_the_name(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    files = [*in_tree.add_operator("x" * in_tree.LONGEST, root), *in_tree.add_operator("a", root)]
    for package in ("weft", "weft/core", "weft/backends", "weft/dispatch", "weft/ops/_common"):
        # ruff sorts imports by which packages exist.
        (root / "src" / package).mkdir(exist_ok=True)
        (root / "src" / package / "__init__.py").touch()
    sources = [str(path) for path in files if path.suffix == ".py"]
    assert len(sources) == 2 * 7
    for action in (("format", "--check", "--diff"), ("check",)):
        ruff = [sys.executable, "-m", "ruff", *action, "--no-cache", *sources]
        done = subprocess.run(ruff, capture_output=True, text=True, cwd=root)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["a", "abc", "silu", "zz", "x" * in_tree.LONGEST])
def test_the_public_names_stay_sorted(name: str, tmp_path: Path) -> None:
    root = checkout(tmp_path)
    in_tree.add_operator(name, root)
    text = (root / in_tree.OPS_INIT).read_text()
    names: dict[str, list[str]] = {}
    exec(text[text.index("__all__") :], names)
    assert names["__all__"] == sorted(names["__all__"]) and name in names["__all__"]
    modules = [line.split()[1] for line in text.splitlines() if line.startswith("from weft.ops.")]
    assert modules == sorted(modules) and f"weft.ops.{name}" in modules


def command(*arguments: str) -> tuple[str, str, BaseException | None]:
    app = typer.Typer()
    app.command()(new)
    done = CliRunner().invoke(app, list(arguments))
    return done.stdout, done.stderr, done.exception


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--operator", "softmax"), "'softmax' exists already"),
        (("--operator", "attention_packed"), "'attention_packed' exists already"),
        (("--operator", "norms"), "src/weft/ops/norms exists already"),
        (("--operator", "My-Op"), "invalid name"),
        (("--operator", "lambda"), "invalid name"),
        (("--operator", "_silu"), "invalid name"),
        (("--operator", "x" * (in_tree.LONGEST + 1)), "invalid name"),
        (("softmax",), "got no --operator"),
        (("--operator", "silu", "--force"), "got --force"),
        (("--operator", "silu", "--out", "x.py"), "got --out"),
    ],
)
def test_a_wrong_call_changes_nothing(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = checkout(tmp_path)
    (root / in_tree.OPS / "norms").mkdir()
    before = contents(root)
    monkeypatch.chdir(root)
    out, _, error = command(*arguments, "--in-tree")
    assert isinstance(error, WeftError) and message in str(error) and "hint" in str(error)
    assert out == "" and contents(root) == before


def test_outside_a_checkout_it_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, _, error = command("--operator", "silu", "--in-tree")
    assert isinstance(error, WeftError) and "not in a checkout" in str(error) and "hint" in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_write_leaves_the_checkout_as_it_was(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = checkout(tmp_path)
    before = contents(root)
    replace: Callable[[Path, Path], None] = os.replace
    calls = []

    def refuse(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == failing:
            raise OSError(28, "No space left on device", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(WeftError, match=r"No space left.*nothing was changed"):
        in_tree.add_operator("silu", root)
    assert len(calls) == failing and contents(root) == before
    assert {p.name for p in (root / in_tree.OPS).iterdir()} == {"__init__.py"}
