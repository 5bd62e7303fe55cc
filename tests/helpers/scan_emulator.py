"""CUDA kernels whose blocks run at the same time, compiled by g++ and run on CPU tensors.

scan_emulator.hpp has the emulated device. Each launch uses another random schedule.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers import warp_emulator
from helpers.warp_emulator import COMPILER, EmulatorError
from weft.backends.nvrtc import SHARED, CudaSource

HEADER = Path(__file__).with_suffix(".hpp")
__all__ = ["COMPILER", "EmulatorError", "emulate"]


def _edited(text: str, fault: tuple[str, str]) -> str:
    right, wrong = fault
    assert text.count(right) == 1, "the text of the fault is not in the file once"
    return text.replace(right, wrong)


def _library(source: CudaSource, kernel: str, folder: Path, fault: tuple[str, str] | None) -> Path:
    text, parent = source.file.read_text(), source.file.parent
    names = re.findall(r'#include "([^"]+)"', text)
    # Included files lie beside the original, or in the folder that families share. The fault may be in one.
    headers = {
        name: next((f / name for f in (parent, SHARED) if (f / name).exists()), None) for name in names
    }
    paths = {path: path for path in headers.values() if path is not None}
    if fault is not None:
        in_headers = [path for path in paths if fault[0] in path.read_text()]
        for path in in_headers:
            paths[path] = folder / path.name
            paths[path].write_text(_edited(path.read_text(), fault))
        if not in_headers:
            text = _edited(text, fault)
    # Each running block has its own shared memory.
    text = re.sub(
        r"__shared__ ([\w<> ]+?) (\w+)((?:\[[^\]]+\])+);",
        r"typedef \1 \2_t\3; \2_t& \2 = *(\2_t*)declared(__COUNTER__, sizeof(\2_t));",
        text,
    )
    text = re.sub(r"extern __shared__ (\w+) (\w+)\[\];", r"\1* \2 = dynamic_shared<\1>();", text)
    text = re.sub(r'#include "([^"]+)"', lambda m: f'#include "{paths.get(headers.get(m[1]), m[1])}"', text)
    copy = folder / source.file.name
    copy.write_text(text)
    return warp_emulator.build(replace(source, file=copy), kernel, folder, HEADER)


def emulate(patch: Any, folder: Path, fault: tuple[str, str] | None = None) -> None:
    """Run every kernel in the emulator until the patch is undone, with one text replaced by a ``fault``."""

    def kernel(source: CudaSource, name: str) -> warp_emulator.Emulated:
        return warp_emulator.Emulated(_library(source, name, folder, fault))

    patch.setattr(CudaSource, "__getitem__", kernel)
