"""Contents of the package, and when `make` creates, keeps, repairs or recreates its environment."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", ROOT / "tools/environment.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_environment(tool: ModuleType, folder: Path, **changes: object) -> object:
    """Return an environment of the test's Python whose stamp is correct except for ``changes``."""
    environment = tool.Environment(folder, "run")
    (folder / "bin").mkdir(parents=True)
    environment.python.symlink_to(sys.executable)
    environment.runs = lambda: True
    stamp = {"want": {**environment.want, **changes}, "stages": ["run"]}
    environment.stamp.write_text(json.dumps(stamp))
    environment.has_modules = lambda stages: True
    return environment


def test_a_complete_environment_is_not_changed(tool: ModuleType, tmp_path: Path) -> None:
    environment = make_environment(tool, tmp_path / "venv")
    assert environment.is_whole()
    assert environment.must_start_anew() == ""


def test_an_environment_to_run_in_is_not_one_to_test_in(tool: ModuleType, tmp_path: Path) -> None:
    environment = make_environment(tool, tmp_path / "venv")
    environment.stage = "dev"
    assert not environment.is_whole()
    assert environment.must_start_anew() == ""  # the missing packages are added


def test_changed_requirements_are_installed_into_it(tool: ModuleType, tmp_path: Path) -> None:
    environment = make_environment(tool, tmp_path / "venv", sources="of another day")
    assert not environment.is_whole()
    assert environment.must_start_anew() == ""


def test_a_missing_module_is_noticed(tool: ModuleType, tmp_path: Path) -> None:
    environment = make_environment(tool, tmp_path / "venv")
    del environment.has_modules
    tool.MODULES["run"] = ("json", "no_such_module_anywhere")
    assert not environment.is_whole()
    assert "is gone" in environment.must_start_anew()


def test_a_broken_environment_is_created_again(tool: ModuleType, tmp_path: Path) -> None:
    moved = make_environment(tool, tmp_path / "moved", root="/somewhere/else")
    assert "/somewhere/else" in moved.must_start_anew()
    gpu_came = make_environment(tool, tmp_path / "gpu", gpu=not tool.has_gpu())
    assert "a GPU" in gpu_came.must_start_anew()
    cut_off = make_environment(tool, tmp_path / "cut")
    cut_off.unfinished.touch()
    assert "half-way" in cut_off.must_start_anew()
    dead = make_environment(tool, tmp_path / "dead")
    del dead.runs
    dead.python.unlink()
    assert "does not start" in dead.must_start_anew()


def test_an_existing_torch_is_pinned_instead_of_the_default(tool: ModuleType, tmp_path: Path) -> None:
    environment = make_environment(tool, tmp_path / "venv")
    environment.gpu = False
    environment.ask_torch = lambda what: "12.8"
    kept_torch = {"pins": {"torch": "2.12.0", "triton": "3.7.0"}, "cuda": "12.8", "outer": []}
    pins = environment.constraints(kept_torch).read_text().splitlines()
    assert "torch==2.12.0" in pins and "triton==3.7.0" in pins
    assert not any(p.startswith(("torch==2.13", "triton==3.6")) for p in pins)
    assert "numpy<2.4" in pins and "cuda-bindings<13" in pins


def test_an_unknown_accelerator_is_refused(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_ACCELERATOR", "tpu")
    with pytest.raises(SystemExit, match="expected cpu or cuda, got 'tpu'"):
        tool.has_gpu()


@pytest.mark.slow
def test_the_wheel_holds_all_that_runs(tmp_path: Path) -> None:
    """Every file of the package that is not Python goes into the wheel too: kernels, templates."""
    # Not find_spec("pip"): setuptools would mistake that for pip's start and restore the standard distutils;
    # later imports of setuptools in this process, for example by torch's compiler, would fail.
    there = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    if not {"pip", "setuptools"} <= there:
        pytest.skip("needs pip and setuptools in this Python")
    source = tmp_path / "source"  # a build creates files beside the source
    source.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "src", "docs", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("needs a git checkout")
    names = [n for n in listed.stdout.split("\0") if n and (ROOT / n).is_file()]
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("weft-*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    required = {n.removeprefix("src/") for n in names if n.startswith("src/")}
    assert required <= packed, f"left out of the wheel: {sorted(required - packed)}"
    assert any(n.endswith("licenses/LICENSE") for n in packed)
    # `weft help` finds every page of an installation: no folder of docs/ is missing.
    pages = {n for n in names if n.startswith("docs/") and n.endswith(".md")}
    data = {n.partition("/data/share/weft/")[2] for n in packed if "/data/share/weft/" in n}
    assert data == pages
