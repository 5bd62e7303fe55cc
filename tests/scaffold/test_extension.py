"""`weft new --extension`: the project compiles, links and loads with all four build methods, without a GPU.

test_extension_kernels.py tests the kernels' arithmetic.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.paths import EXAMPLES
from weft.backends import disassemble
from weft.cli.new import new
from weft.core import WeftError
from weft.scaffold import extension

EXAMPLE = EXAMPLES / "extension"
BUILD_OUTPUTS = {"build", "dist", "__pycache__"}  # build outputs that git ignores


def folder_files(folder: Path) -> dict[str, str]:
    files = (p for p in folder.rglob("*") if p.is_file() and p.suffix not in (".so", ".pyc"))
    parts = ((p, p.relative_to(folder).parts) for p in files)
    ours = (p for p, names in parts if not any(n in BUILD_OUTPUTS or ".egg-info" in n for n in names))
    return {str(p.relative_to(folder)): p.read_text() for p in ours}


def module(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import one of the project's scripts, with its folder on Python's path."""
    monkeypatch.syspath_prepend(str(folder))
    for script in ("toolchain", "build_methods", "build_all"):
        monkeypatch.delitem(sys.modules, script, raising=False)
    return importlib.import_module(name)


def command(*arguments: str) -> tuple[str, str, BaseException | None]:
    import typer

    app = typer.Typer()
    app.command()(new)
    done = CliRunner().invoke(app, list(arguments))
    return done.stdout, done.stderr, done.exception


# ---- files written


def test_the_example_is_what_the_command_writes() -> None:
    """Regenerate by: weft new --extension tiles --out examples/extension --force."""
    assert folder_files(EXAMPLE) == extension.project("tiles")


def test_two_projects_differ_only_in_their_name() -> None:
    other = extension.project("my_ops2")
    back = {
        path.replace("my_ops2", "tiles"): text.replace("my_ops2", "tiles").replace("MY_OPS2", "TILES")
        for path, text in other.items()
    }
    assert back == extension.project("tiles")
    assert tomllib.loads(other["pyproject.toml"])["project"]["name"] == "my_ops2"
    for path, text in other.items():
        if path.endswith(".py"):
            ast.parse(text, path)


@pytest.mark.parametrize("name", ["", "2fast", "my-ops", "class", "Tiles", "a b", "../up", "é"])
def test_an_invalid_identifier_is_refused(name: str) -> None:
    with pytest.raises(WeftError, match="Python identifier"):
        extension.check_name(name)


@pytest.mark.parametrize("name", ["torch", "json", "aten", "linux", "build_methods"])
def test_a_name_already_in_use_is_refused(name: str) -> None:
    with pytest.raises(WeftError, match="something else"):
        extension.check_name(name)


def test_the_command_writes_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out, err, error = command("--extension", "tiles")
    assert error is None and out == "tiles\n"
    assert "python build_all.py" in err
    assert folder_files(tmp_path / "tiles") == extension.project("tiles")
    mine, readme = tmp_path / "tiles/mine.txt", tmp_path / "tiles/README.md"
    mine.write_text("kept")
    readme.write_text("changed")
    _, _, error = command("--extension", "tiles")
    assert isinstance(error, WeftError) and "there already" in str(error)
    assert readme.read_text() == "changed"
    _, _, error = command("--extension", "tiles", "--force")
    assert error is None and mine.read_text() == "kept" and readme.read_text() != "changed"


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (("softmax", "--extension", "tiles"), "got OPERATOR and --extension"),
        (("--extension", "tiles", "--name", "triton/mine"), "names an implementation"),
        (("--extension", "tiles", "--out", "file/in"), "cannot be written"),
        (("--extension", "tiles", "--out", "file"), "there already"),
    ],
)
def test_a_wrong_call(
    arguments: tuple[str, ...], output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no folder")
    _, _, error = command(*arguments)
    assert isinstance(error, WeftError) and output in str(error)


# ---- the scripts


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toolchain = module(EXAMPLE, "toolchain", monkeypatch)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(toolchain.Missing, match=f"CUDA_HOME={tmp_path}: no toolkit"):
        toolchain.cuda_home()
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(toolchain.Missing, match="nvcc was not found: install the CUDA toolkit"):
        toolchain.cuda_home()
    with pytest.raises(toolchain.Missing, match="pip install ninja"):
        toolchain.need("ninja")


def test_each_tool_gets_architectures_in_its_own_format(monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain = module(EXAMPLE, "toolchain", monkeypatch)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a 10.0+PTX")
    assert toolchain.for_cmake(toolchain.architectures()) == "80-real;90a-real;100"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(toolchain.Missing, match="not 'Hopper'"):
        toolchain.for_cmake(toolchain.architectures())


def build_results(**changed: Any) -> dict[str, Any]:
    bits = {"relu": "a" * 64, "add": "b" * 64, "matmul": "c" * 64}
    right = dict.fromkeys(bits, True)
    return {"seconds": 1.0, "answers": bits, "right": right, "device": "GPU", "torch": "2.11"} | {
        key: {**{"answers": bits, "right": right}.get(key, {}), **value} if isinstance(value, dict) else value
        for key, value in changed.items()
    }


@pytest.mark.parametrize(
    ("other", "good"),
    [
        (build_results(), True),
        (build_results(answers={"matmul": "d" * 64}), False),
        (build_results(right={"add": False}), False),
        (build_results(reason="cmake was not found: pip install cmake"), False),
    ],
)
def test_build_all_accepts_only_correct_and_equal_results(
    other: dict[str, Any],
    good: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Different bits, a wrong result and a method that was not built each make ``good`` false."""
    build_all = module(EXAMPLE, "build_all", monkeypatch)
    results = {"load": build_results(), "cmake": other}
    assert build_all.judge(results, build_only=False) is good
    build_all.show(results)
    output = capsys.readouterr().out
    assert ("aaaaaa bbbbbb cccccc correct" in output) and other.get("reason", "") in output
    (tmp_path / "gpu").mkdir()
    here = {"nvcc": "13.0", "cores": 2, "date": "2026-01-01T00:00:00Z"}
    record = {"good": good, "machine": here, "ways": results}
    (tmp_path / "gpu/extension.json").write_text(json.dumps(record))
    assert ("with the same bits." in extension.build_report(tmp_path)) is good
    assert "| `load` | 1.0 s | `aaaaaa` `bbbbbb` `cccccc` |" in extension.build_report(tmp_path)


@pytest.mark.parametrize("tail", [0, 8])
def test_build_all_names_the_wrong_result(tail: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the comparison with PyTorch on a CPU: it names an add that leaves out the last columns."""
    import torch

    def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = a + b
        out[:, out.shape[1] - tail :] = 0
        return out

    fake = SimpleNamespace(relu=torch.relu, add=add, matmul=torch.matmul)
    monkeypatch.setitem(sys.modules, "tiles", fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    output = module(EXAMPLE, "build_all", monkeypatch).answers(build_only=False)
    assert output["right"] == {"relu": True, "add": tail == 0, "matmul": True}
    assert [len(bits) for bits in output["answers"].values()] == [64, 64, 64]


def test_the_report_without_measurements_says_so(tmp_path: Path) -> None:
    assert extension.build_report(tmp_path).startswith("Not measured yet: `python build_all.py --json")


# ---- builds

CALL = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import tiles
ops = torch.ops.tiles
print([str(getattr(ops, n).default._schema) for n in ("relu", "add", "matmul")])
for call in (lambda: tiles.relu(torch.ones(17)), lambda: tiles.matmul(*2 * [torch.ones(3, 3)])):
    try:
        call()
    except RuntimeError as error:
        print("refused:", str(error).rpartition(", ")[2])
def tensor(*shape, device="meta"): return torch.empty(shape, device=device)
print(tiles.add(tensor(4, 3).t(), tensor(3, 4)).stride(), tiles.matmul(tensor(3, 0), tensor(0, 9)).shape)
try:
    tiles.matmul(tensor(3, 4), tensor(3, 4))
except RuntimeError as error:
    print("refused:", error)
with torch._subclasses.FakeTensorMode():
    print(tiles.matmul(tiles.relu(tensor(17, 5, device="cuda")), tensor(5, 9, device="cuda")))
x, y, w = (tensor(*s).requires_grad_() for s in ((17, 5), (17, 5), (5, 9)))
for name, inputs in (("relu", (x,)), ("add", (x, y)), ("matmul", (x, w))):
    print(name, set(torch.library.opcheck(getattr(ops, name).default, inputs).values()))
def chain(x, y, w): return tiles.matmul(tiles.relu(tiles.add(x, y)), w)
chain(x, y, w).sum().backward()
print([tuple(t.grad.shape) for t in (x, y, w)])
"""
EXPECTED_OUTPUT = """['tiles::relu(Tensor x) -> Tensor', 'tiles::add(Tensor a, Tensor b) -> Tensor', \
'tiles::matmul(Tensor a, Tensor b) -> Tensor']
refused: x must be on a CUDA device; move it with x.cuda()
refused: a must be on a CUDA device; move it with a.cuda()
(4, 1) torch.Size([3, 9])
refused: a's columns must be as many as b's rows
FakeTensor(..., device='cuda:0', size=(17, 9))
relu {'SUCCESS'}
add {'SUCCESS'}
matmul {'SUCCESS'}
[(17, 5), (17, 5), (5, 9)]
"""


@pytest.fixture(scope="module")
def nvcc() -> Path:
    """Return the CUDA toolkit; skip the test if there is none."""
    spec = importlib.util.spec_from_file_location("toolchain", EXAMPLE / "toolchain.py")
    assert spec is not None and spec.loader is not None
    toolchain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toolchain)
    try:
        return toolchain.cuda_home()
    except toolchain.Missing as error:
        pytest.skip(f"needs nvcc: {error}")


def build(folder: Path, gpus: str, *methods: str) -> dict[str, Path]:
    """Run `build_all.py --build-only` for these GPUs; return the library of each method. Skip if a tool is
    missing, with the project's own message."""
    extension.write("tiles", folder / "tiles")
    command = [sys.executable, str(folder / "tiles/build_all.py"), *methods, "--build-only", "--json"]
    environment = {**os.environ, "TORCH_CUDA_ARCH_LIST": gpus}
    environment.pop("TILES_LIBRARY", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    output = json.loads(done.stdout)
    reasons = [one["reason"] for one in output["ways"].values() if "reason" in one]
    if missing := [reason for reason in reasons if "pip install" in reason]:
        pytest.skip(f"needs {missing[0]}")
    assert done.returncode == 0 and output["good"], reasons
    assert re.fullmatch(r"\d+\.\d+", output["machine"]["nvcc"])
    return {method: Path(one["library"]) for method, one in output["ways"].items()}


def assert_uses_only_the_stable_abi(library: Path) -> None:
    """Assert that the library uses libtorch_cpu only, through C functions of the stable ABI, and no other
    library of PyTorch, Python or CUDA."""
    output = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", output))
    assert {n for n in needed if re.search("torch|c10|cuda|python", n)} == {"libtorch_cpu.so"}
    assert "libstdc++.so.6" in needed  # a static copy would crash when an error is thrown
    assert not re.search("RPATH|RUNPATH", output)
    output = subprocess.run(["nm", "-D", "-u", str(library)], capture_output=True, text=True).stdout
    undefined = [w[-1] for w in map(str.split, output.splitlines()) if w[0] == "U" and "@" not in w[-1]]
    assert [n for n in undefined if not re.match(r"(aoti_)?torch_", n)] == []
    assert "torch_library_impl" in undefined


def instructions(library: Path, arch: str) -> dict[str, list[str]]:
    """Return the SASS of each kernel by name, for one architecture."""
    tools = disassemble.tools("cuobjdump")
    assert tools, "neither Triton's wheel nor the toolkit has cuobjdump"
    output = disassemble.run([tools[0], "-sass", "-arch", arch, str(library)], "cuobjdump")
    parts = re.split(r"Function : \w*?\d+(relu_float4|add_2d|matmul_tiled)\w*", output)
    text = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {n: re.findall(r"/\*[0-9a-f]{4}\*/\s+([^;]+);", sass) for n, sass in text.items()}


def assert_machine_code(library: Path, arch: str) -> None:
    """16-byte loads and stores in relu, shared memory and barriers in matmul, no spills."""
    text = {name: "\n".join(lines) for name, lines in instructions(library, arch).items()}
    assert set(text) == {"relu_float4", "add_2d", "matmul_tiled"}
    assert re.search(r"LDG\.E\.128", text["relu_float4"])
    assert re.search(r"STG\.E\.128", text["relu_float4"])
    assert "BAR.SYNC" in text["matmul_tiled"] and text["matmul_tiled"].count("FFMA") >= 16
    assert not any(re.search(r"\b(STL|LDL)\b", each) for each in text.values())


# One test per build method: several tests could run in different processes, and each would build again.
@pytest.mark.slow
@pytest.mark.pooled(1, "builds of an extension")
def test_cmake_for_three_architectures(nvcc: Path, tmp_path: Path) -> None:
    library = build(tmp_path, "8.0 9.0 10.0+PTX", "cmake")["cmake"]
    assert_uses_only_the_stable_abi(library)
    for arch in ("sm_80", "sm_90", "sm_100"):
        assert_machine_code(library, arch)
    command = [sys.executable, "-c", CALL, str(tmp_path / "tiles/src")]
    environment = {**os.environ, "TILES_LIBRARY": str(library)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.stdout == EXPECTED_OUTPUT, done.stdout + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.pooled(1, "builds of an extension")
def test_pip_installs_a_library_that_loads(nvcc: Path, tmp_path: Path) -> None:
    library = build(tmp_path, "9.0", "pip")["pip"]
    assert library.name == "_C.abi3.so"
    assert_uses_only_the_stable_abi(library)
    assert (library.parent.parent / "tiles-0.1.0.dist-info").is_dir()
    assert not (tmp_path / "tiles/src/tiles.egg-info").exists()


@pytest.mark.exhaustive
def test_all_build_methods_produce_the_same_machine_code(nvcc: Path, tmp_path: Path) -> None:
    """The instructions and their order are equal, so that the results have the same bits on any GPU."""
    libraries = build(tmp_path, "9.0", "load", "load_inline", "pip", "cmake")
    codes = [instructions(one, "sm_90") for one in libraries.values()]
    assert len(codes) == 4 and all(codes[0].values())
    assert all(code == codes[0] for code in codes)
    for one in libraries.values():
        assert_uses_only_the_stable_abi(one)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.slow
def test_all_build_methods_agree_on_a_gpu(nvcc: Path, tmp_path: Path) -> None:
    """All four methods give the same bits; then the project's own tests run with CMake's library."""
    extension.write("tiles", tmp_path / "tiles")
    command = [sys.executable, "build_all.py", "--json"]
    where = tmp_path / "tiles"
    done = subprocess.run(command, capture_output=True, text=True, cwd=where, timeout=900)
    output = json.loads(done.stdout)
    assert done.returncode == 0 and output["good"], done.stdout + done.stderr[-3000:]
    library = output["ways"]["cmake"]["library"]
    known = {**os.environ, "TILES_LIBRARY": library, "PYTHONPATH": str(where / "src")}
    known.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=where, env=known, timeout=600)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-5000:]
