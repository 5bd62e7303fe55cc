"""The demonstrations' kernels compiled by g++ and run on CPU tensors."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

from weft.backends.nvrtc import CudaSource
from weft.workbench.demos import all_demos

HEADER = Path(__file__).with_name("demo_emulator.hpp")
COMPILER = shutil.which("g++")
# Parameters of each kernel, as its .cu has them: P a pointer, L a long long.
PARAMETERS = {"rolled": "PPL", "unrolled": "PPL", "shares": "PPLL", "straight": "PPL"}
PARAMETERS |= {"staged": "PPL", "step": "P"}
TYPES = {"bytewise": "unsigned char", "sixteen": "uint4"}


def build(folder: Path) -> ctypes.CDLL:
    """All kernels as one library of functions ``run_NAME(grid, block, arguments)``."""
    parts = [f'#include "{HEADER}"', "using Long = long long;"]
    for n, file in enumerate(sorted({d.source.file for d in all_demos()})):
        parts.append(f'namespace demo{n} {{\n#include "{file}"\n}}\nusing namespace demo{n};')
    for name in sorted({k for d in all_demos() for k in d.source.kernels}):
        kind = TYPES.get(name, "float")
        given = PARAMETERS.get(name, "PP")
        cast = {"P": f"({kind}*)", "L": ""}
        passed = ", ".join(f"{cast[g]}a[{i}]" for i, g in enumerate(given))
        parts.append(
            f'extern "C" void run_{name}(const unsigned* grid, const unsigned* block, Long* a) '
            f"{{ launch(grid, block, [=] {{ {name}({passed}); }}); }}"
        )
    source, library = folder / "demos.cpp", folder / "demos.so"
    source.write_text("\n".join(parts))
    assert COMPILER is not None
    options = ["-std=c++20", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-w"]
    options += ["-Wl,-Bsymbolic"]  # glibc has a function step, too
    subprocess.run([COMPILER, *options, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


class Emulated:
    """Stands where a loaded kernel does."""

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
    """Until the patch is undone, every source's kernels are the emulated ones."""
    patch.setattr(CudaSource, "__getitem__", lambda self, name: Emulated(library, name))
