"""Attention's CUDA kernels compiled by g++ and run on CPU tensors; see warp_emulator.hpp."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

from weft.backends.nvrtc import SHARED, CudaSource

HEADER = Path(__file__).with_suffix(".hpp")
COMPILER = shutil.which("g++")


def build(source: CudaSource, kernel: str, folder: Path) -> Path:
    """One kernel of a program as a library with a function ``launch``; built once a folder."""
    name = hashlib.sha256(repr((source.file, source.defines, kernel)).encode()).hexdigest()[:16]
    library = folder / f"{name}.so"
    if library.exists():
        return library
    for header in ("cuda_bf16.h", "cuda_fp16.h"):  # their types are the emulator's
        (folder / header).touch()
    text = f'#include "{HEADER}"\n#include "{source.file}"\nstatic void all() {{ call({kernel}); }}'
    text += "\nstatic const bool ready = (body = all, true);\n"
    (folder / f"{name}.cpp").write_text(text)
    assert COMPILER is not None
    options = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-U_FORTIFY_SOURCE"]
    options += ["-Wl,-Bsymbolic", f"-I{folder}", f"-I{SHARED}"]
    options += [f"-D{key}={value}" for key, value in source.defines]
    subprocess.run([COMPILER, *options, f"{folder}/{name}.cpp", "-o", str(library)], check=True)
    return library


class Emulated:
    """Stands where a loaded kernel does."""

    def __init__(self, library: Path) -> None:
        self.function = ctypes.CDLL(str(library)).launch

    def __call__(self, grid: Any, block: int, *arguments: Any, shared: int = 0) -> None:
        sizes = (ctypes.c_uint * 3)(*grid)
        bits = [_bits(a) for a in arguments]
        self.function(sizes, block, shared, (ctypes.c_longlong * len(bits))(*bits))


def _bits(argument: Any) -> int:
    if isinstance(argument, float):
        return int(struct.unpack("<q", struct.pack("<d", argument))[0])
    if isinstance(argument, ctypes.Structure):
        return ctypes.addressof(argument)
    return int(argument) if isinstance(argument, int) else int(argument.data_ptr())


def emulate(patch: Any, folder: Path) -> None:
    """Until the patch is undone, every source's kernels are emulated ones."""
    patch.setattr(CudaSource, "__getitem__", lambda self, name: Emulated(build(self, name, folder)))
