"""An extension's kernels on a CPU under gcc's sanitizers: correct as written, detected with a fault.

extension_on_cpu.cpp emulates the GPU. These tests cannot show fences or speed, which need a GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from helpers.paths import HELPERS
from weft.scaffold import extension

MAIN = HELPERS / "extension_on_cpu.cpp"
FAULTS = {  # name of the fault -> text of the .cu file, and its replacement
    "as_written": ("", ""),
    "grid_not_rounded_up": ("across = blocks_for(columns, ADD_COLUMNS)", "across = columns / 32"),
    "always_float4": ("takes_float4(x) && takes_float4(y) ? n / 4 : 0", "n / 4"),
    "no_tail": ("i = 4 * vectors + first; i < n", "i = 4 * vectors + first; i < 4 * vectors"),
    "nan_lost": ("value <= 0.0f ? 0.0f : value", "value > 0.0f ? value : 0.0f"),
    "writes_past_the_edge": ("if (r < rows && at < columns) ", ""),
    "reads_past_the_edge": ("row + r < rows && k < depth", "k < depth"),
    "memory_not_asked_for": ("status =\n", "status = true ? cudaSuccess :\n"),
}


def variant(source: str, name: str) -> str:
    """Return the kernels in the form that extension_on_cpu.cpp needs, with one fault and small grids, so
    that loops over the grid repeat. A launch becomes a call."""
    small = {"GRID_Y = 65535": "GRID_Y = 5", "RELU_BLOCKS = 1 << 20": "RELU_BLOCKS = 3"}
    shared = {"extern __shared__ float shared[];": "float* const shared = on_cpu::shared;"}
    for old, new_text in [FAULTS[name], *small.items(), *shared.items()]:
        assert not old or source.count(old) == 1, f"{name}: {old}"
        source = source.replace(old, new_text) if old else source
    launch = re.compile(r"(\w+)<<<(\w+), (\w+), (\w+), stream>>>\(")
    source, launches = launch.subn(r"on_cpu::launch(\2, \3, \4, \1, ", source)
    assert launches == 3
    return f"namespace {name} {{\n{re.sub(r'#include.*', '', source)}\n}}\n"


def compiled(folder: Path) -> Path:
    """Compile the program and return its path; skip the test without g++ and its sanitizers."""
    if not shutil.which("g++"):
        pytest.skip("needs g++: apt-get install g++")
    source = extension.project("tiles")["csrc/tiles.cu"]
    rows = []
    for name in FAULTS:
        calls = ", ".join(f"{name}::tiles_kernels::{f}" for f in ("relu", "add", "matmul"))
        rows.append(f'{{"{name}", {calls}}}')
    text = "".join(variant(source, name) for name in FAULTS)
    text += f"const Variant VARIANTS[] = {{{', '.join(rows)}}};\n"
    (folder / "variants.inc").write_text(text)
    command = ["g++", "-std=c++20", "-O1", "-pthread", "-Wno-unknown-pragmas", f"-I{folder}"]
    command += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command += [str(MAIN), "-o", str(folder / "on_cpu")]
    compiler = subprocess.run(command, capture_output=True, text=True)
    if "libasan" in compiler.stderr or "libubsan" in compiler.stderr:
        pytest.skip("needs gcc's sanitizers: apt-get install libasan8 libubsan1")
    assert compiler.returncode == 0, compiler.stderr[:3000]
    return folder / "on_cpu"


@pytest.mark.slow
def test_kernels_on_a_cpu(tmp_path: Path) -> None:
    """The correct kernels pass at every size; with any planted fault they fail."""
    program = compiled(tmp_path)
    for name in FAULTS:
        done = subprocess.run([str(program), name], capture_output=True, text=True, timeout=120)
        output = f"{name}: {done.stdout}{done.stderr[:3000]}"
        if name == "as_written":
            assert done.returncode == 0 and "right: 53 cases" in done.stdout, output
        else:
            assert done.returncode == 1, output
            assert re.search(r"wrong: |runtime error|AddressSanitizer", output), output
