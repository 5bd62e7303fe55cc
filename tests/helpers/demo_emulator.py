"""Compile the demonstrations' kernels with g++ and run them on CPU tensors."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

from weft.backends.nvrtc import CudaSource
from weft.lab.demos import all_demos

HEADER = Path(__file__).with_name("demo_emulator.hpp")
COMPILER = shutil.which("g++")
# Parameters of each kernel that differ from "PP": P is a pointer, L a long long.
PARAMETERS = {"rolled": "PPL", "unrolled": "PPL", "shares": "PPLL", "straight": "PPL"}
PARAMETERS |= {"staged": "PPL", "step": "P"}
TYPES = {"bytewise": "unsigned char", "sixteen": "uint4"}


def build(folder: Path) -> ctypes.CDLL:
    """Compile all kernels into one library of functions ``run_NAME(grid, block, arguments)``."""
    parts = [f'#include "{HEADER}"', "using Long = long long;"]
    sources = [d.source for d in all_demos() if d.source is not None]
    for n, file in enumerate(sorted({s.file for s in sources})):
        parts.append(f'namespace demo{n} {{\n#include "{file}"\n}}\nusing namespace demo{n};')
    for name in sorted({k for s in sources for k in s.kernels}):
        kind = TYPES.get(name, "float")
        parameters = PARAMETERS.get(name, "PP")
        cast = {"P": f"({kind}*)", "L": ""}
        arguments = ", ".join(f"{cast[p]}a[{i}]" for i, p in enumerate(parameters))
        parts.append(
            f'extern "C" void run_{name}(const unsigned* grid, const unsigned* block, Long* a) '
            f"{{ launch(grid, block, [=] {{ {name}({arguments}); }}); }}"
        )
    source, library = folder / "demos.cpp", folder / "demos.so"
    source.write_text("\n".join(parts))
    assert COMPILER is not None
    options = ["-std=c++20", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-w"]
    options += ["-Wl,-Bsymbolic"]  # glibc also has a function named step
    subprocess.run([COMPILER, *options, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


class EmulatedKernel:
    """Replacement of a loaded kernel; called with the same launch arguments."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.function = getattr(library, f"run_{name}")
        self.expected = len(PARAMETERS.get(name, "PP"))

    def __call__(self, grid: Any, block: Any, *arguments: Any, shared: int = 0) -> None:
        assert len(arguments) == self.expected
        sizes = [(ctypes.c_uint * 2)(*_two(size)) for size in (grid, block)]
        plain = [a if isinstance(a, int) else a.data_ptr() for a in arguments]
        self.function(*sizes, (ctypes.c_longlong * len(plain))(*plain))


def _two(size: Any) -> tuple[int, int]:
    return (size, 1) if isinstance(size, int) else (size[0], size[1])


def emulate(library: ctypes.CDLL, patch: Any) -> None:
    """Replace every source's kernels by the emulated ones until the patch is undone."""
    patch.setattr(CudaSource, "__getitem__", lambda self, name: EmulatedKernel(library, name))
