"""What is packaged, and when the environment of `make` is made, kept, mended or made anew."""

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


def made(tool: ModuleType, folder: Path, **changes: object) -> object:
    """An environment whose stamp is right but for ``changes``, on the Python that runs the test."""
    environment = tool.Environment(folder, "run")
    (folder / "bin").mkdir(parents=True)
    environment.python.symlink_to(sys.executable)
    environment.runs = lambda: True
    stamp = {"want": {**environment.want, **changes}, "stages": ["run"]}
    environment.stamp.write_text(json.dumps(stamp))
    environment.has_modules = lambda stages: True
    return environment


def test_a_whole_environment_is_left_alone(tool: ModuleType, tmp_path: Path) -> None:
    environment = made(tool, tmp_path / "venv")
    assert environment.is_whole()
    assert environment.must_start_anew() == ""


def test_an_environment_to_run_in_is_not_one_to_test_in(tool: ModuleType, tmp_path: Path) -> None:
    environment = made(tool, tmp_path / "venv")
    environment.stage = "dev"
    assert not environment.is_whole()
    assert environment.must_start_anew() == ""  # it is added to


def test_changed_requirements_are_installed_into_it(tool: ModuleType, tmp_path: Path) -> None:
    environment = made(tool, tmp_path / "venv", sources="of another day")
    assert not environment.is_whole()
    assert environment.must_start_anew() == ""


def test_a_missing_module_is_noticed(tool: ModuleType, tmp_path: Path) -> None:
    environment = made(tool, tmp_path / "venv")
    del environment.has_modules
    tool.MODULES["run"] = ("json", "no_such_module_anywhere")
    assert not environment.is_whole()
    assert "is gone" in environment.must_start_anew()


def test_what_cannot_be_mended_is_made_anew(tool: ModuleType, tmp_path: Path) -> None:
    moved = made(tool, tmp_path / "moved", root="/somewhere/else")
    assert "/somewhere/else" in moved.must_start_anew()
    gpu_came = made(tool, tmp_path / "gpu", gpu=not tool.has_gpu())
    assert "a GPU" in gpu_came.must_start_anew()
    cut_off = made(tool, tmp_path / "cut")
    cut_off.unfinished.touch()
    assert "half-way" in cut_off.must_start_anew()
    dead = made(tool, tmp_path / "dead")
    del dead.runs
    dead.python.unlink()
    assert "does not start" in dead.must_start_anew()


def test_the_kept_torch_is_pinned_and_ours_are_not(tool: ModuleType, tmp_path: Path) -> None:
    environment = made(tool, tmp_path / "venv")
    environment.gpu = False
    environment.ask_torch = lambda what: "12.8"
    kept = {"pins": {"torch": "2.12.0", "triton": "3.7.0"}, "cuda": "12.8", "outer": []}
    pins = environment.constraints(kept).read_text().splitlines()
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
    # Not find_spec("pip"): setuptools takes that for pip's start and steps back from distutils, and
    # whatever imports setuptools later in this process, torch's compiler for one, fails.
    there = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    if not {"pip", "setuptools"} <= there:
        pytest.skip("needs pip and setuptools in this Python")
    source = tmp_path / "source"  # a build leaves files beside the source
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
    wanted = {n.removeprefix("src/") for n in names if n.startswith("src/")}
    assert wanted <= packed, f"left out of the wheel: {sorted(wanted - packed)}"
    assert any(n.endswith("licenses/LICENSE") for n in packed)
    # `weft help` finds every page of an installation: no shelf of docs/ is left out.
    pages = {n for n in names if n.startswith("docs/") and n.endswith(".md")}
    data = {n.partition("/data/share/weft/")[2] for n in packed if "/data/share/weft/" in n}
    assert data == pages
