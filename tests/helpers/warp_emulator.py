"""CUDA kernels compiled by g++ and run on CPU tensors by an emulator: warp_emulator.hpp or another header."""

from __future__ import annotations

import ctypes
import hashlib
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers.cxx import COMPILER, compile_library
from helpers.paths import SRC
from weft.backends.nvrtc import SHARED, CudaSource

HEADER = Path(__file__).with_suffix(".hpp")
HOPPER = SRC / "weft/ops/_common/hopper"
__all__ = ["COMPILER", "Emulated", "EmulatorError", "build", "copy_with_fault", "emulate", "emulate_edited"]


def build(source: CudaSource, kernel: str, folder: Path, header: Path = HEADER) -> Path:
    """Return a library with a function ``launch`` of one kernel of a program; ``folder`` has a link to it."""
    name = hashlib.sha256(repr((source.file, source.defines, kernel)).encode()).hexdigest()[:16]
    link = folder / f"{name}.so"
    if link.exists():
        return link.resolve()
    for name_of_types in ("cuda_bf16.h", "cuda_fp16.h"):  # the emulator defines their types
        (folder / name_of_types).touch()
    # Blocks run one after another, so that an array in shared memory is a static one of the library.
    program = re.sub(r"^(\s*)__shared__ ", r"\1static ", source.file.read_text(), flags=re.M)
    text = f'#include "{header}"\n{program}\nstatic void all() {{ call({kernel}); }}'
    text += "\nstatic const bool ready = (body = all, true);\n"
    include = (folder, source.file.parent, SHARED)
    options = ["-Wl,-Bsymbolic", *(f"-D{key}={value}" for key, value in source.defines)]
    library = compile_library(text, include, options)
    link.symlink_to(library)
    return library


def emulate_edited(
    patch: Any, folder: Path, file: str, right: str, wrong: str, header: Path = HEADER
) -> None:
    """Emulate kernels from a copy of a program's folder in which one text of ``file`` is replaced."""

    def load(source: CudaSource, kernel: str) -> Emulated:
        for path in source.file.parent.glob("*.cu*"):
            text = path.read_text()
            if path.name == file:
                assert text.count(right) == 1, "the text of the fault is not in the file once"
                text = text.replace(right, wrong)
            (folder / path.name).write_text(text)
        copied = replace(source, file=folder / source.file.name)
        return Emulated(build(copied, kernel, folder, header))

    patch.setattr(CudaSource, "__getitem__", load)


def copy_with_fault(
    folder: Path, kernels: Path, file: str, right: str, wrong: str, times: int | None = 1
) -> None:
    """Copy a folder of kernels, and the Hopper library as its subfolder, with one text of ``file`` replaced.

    The text is there so many ``times``; None: at least once.
    """
    (folder / HOPPER.name).mkdir()
    counts = []
    for path in (*kernels.glob("*.cu*"), *HOPPER.glob("*.cuh")):
        text = path.read_text()
        if path.name == file:
            counts.append(text.count(right))
            text = text.replace(right, wrong)
        (folder / (HOPPER.name if path.parent == HOPPER else "") / path.name).write_text(text)
    assert sum(counts) == times or (times is None and sum(counts)), f"{right!r} is in {file} {counts} times"


class EmulatorError(Exception):
    """Raised for a kernel that does something that the hardware forbids, or that never ends."""


class Emulated:
    """Emulated kernel with the interface of a loaded one."""

    def __init__(self, library: Path) -> None:
        self.function = ctypes.CDLL(str(library)).launch
        self.function.restype = ctypes.c_char_p

    def __call__(
        self, grid: Any, block: int, *arguments: Any, shared: int = 0, overlap: bool = False
    ) -> None:
        """Run a kernel to its end; ``overlap`` has no meaning where kernels run one after the other."""
        sizes = (ctypes.c_uint * 3)(*(grid if isinstance(grid, tuple) else (grid, 1, 1)))
        bits = [_bits(a) for a in arguments]
        fault = self.function(sizes, block, shared, (ctypes.c_longlong * len(bits))(*bits))
        if fault is not None:
            raise EmulatorError(fault.decode())


def _bits(argument: Any) -> int:
    if isinstance(argument, float):
        return int(struct.unpack("<q", struct.pack("<d", argument))[0])
    if isinstance(argument, ctypes.Structure):
        return ctypes.addressof(argument)
    return int(argument) if isinstance(argument, int) else int(argument.data_ptr())


def emulate(patch: Any, folder: Path, header: Path = HEADER) -> None:
    """Replace every source's kernels by emulated ones until the patch is undone."""
    patch.setattr(CudaSource, "__getitem__", lambda self, name: Emulated(build(self, name, folder, header)))
