"""CUDA kernels of the norms and of softmax, compiled by g++ and run on float32 CPU tensors.

norm_emulator.hpp has the emulated device: threads, barriers, clusters, shared memory and bulk copies.
"""

from __future__ import annotations

import ctypes
import re
import struct
from pathlib import Path
from typing import Any

from helpers.cxx import COMPILER, compile_library
from weft.backends.nvrtc import SHARED, CudaSource

HEADER = Path(__file__).with_suffix(".hpp")
__all__ = ["COMPILER", "Emulated", "build"]
# Headers of types and inline assembly; norm_emulator.hpp defines their functions itself.
LEFT_OUT = ("numeric.cuh", "hopper.cuh")


def source_text(folder: Path, name: str, seen: set[str]) -> str:
    """Return a kernel's text with headers; shared memory and named barriers become the emulator's."""
    if name in seen or name in LEFT_OUT:
        return ""
    seen.add(name)
    file = folder / name if (folder / name).exists() else SHARED / name
    text = file.read_text().replace("#pragma once", "")
    if name == "row_statistics.cuh":
        named = "named_barrier(1 + (int)threadIdx.x / TEAM, TEAM);"
        text = re.sub(r'asm volatile\("bar.sync.*?"memory"\);', named, text)
    if name.startswith("softmax"):
        halves = r"template <>[^{]*code<__(?:half|nv_bfloat16)>.*?\n}\n"
        text = re.sub(halves, "", text, flags=re.S)
        text = re.sub(r'asm\("ex2[^"]*" : "=f"\((\w+)\) : "f"\((.*)\)\);', r"\1 = exp2f(\2);", text)
    text = re.sub(r"extern __shared__.*\n", "", text)
    text = re.sub(
        r"__shared__ ([\w<> ]+?) (\w+)((?:\[[^\]]+\])+);",
        r"typedef \1 \2_t\3; \2_t& \2 = *(\2_t*)declared(__COUNTER__, sizeof(\2_t));",
        text,
    )
    return re.sub(r'#include "([^"]+)"', lambda m: source_text(folder, m[1], seen), text)


def build(source: CudaSource, kernel: str) -> ctypes.CDLL:
    """Compile one float32 kernel to a library with a function ``run``."""
    text = source_text(source.file.parent, source.file.name, set())
    signature = re.search(rf"\b{kernel}\(([^)]*)\) \{{", text)
    assert signature and COMPILER
    dropout = ", index_t seed, index_t rule" if dict(source.defines).get("WITH_DROPOUT") else ""
    casts = []
    for n, parameter in enumerate(signature[1].replace(" DROPOUT_PARAMETERS", dropout).split(",")):
        type_name = parameter.split()[0 if "const" not in parameter else 1]
        scalars = {"index_t": f"a[{n}]", "double": f"*(double*)&a[{n}]"}
        casts.append(scalars.get(type_name, f"({type_name})a[{n}]"))
    lines = [f"#define {key} {value}" for key, value in source.defines]
    lines += [f'#include "{HEADER}"', text, "static long long* a;"]
    lines += ["#ifndef CLUSTER", "#define CLUSTER 1", "#endif"]
    lines += [f"static void call() {{ {kernel}({', '.join(casts)}); }}"]
    lines += ['extern "C" void run(int grid, int threads, int bytes, long long seed, long long* b)']
    lines += ["{ a = b, body = call, launch(grid, CLUSTER, threads, bytes, seed); }"]
    return ctypes.CDLL(str(compile_library("\n".join(lines))))


class Emulated:
    """Emulated kernel with the interface of a loaded one; each call switches threads in another order."""

    calls = 0

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def __call__(self, grid: int, block: int, *arguments: Any, shared: int = 0) -> None:
        bits = [_bits(a) for a in arguments]
        Emulated.calls += 1
        seed = ctypes.c_longlong(Emulated.calls)
        self.library.run(grid, block, shared, seed, (ctypes.c_longlong * len(bits))(*bits))


def _bits(argument: Any) -> int:
    if isinstance(argument, float):
        return int(struct.unpack("<q", struct.pack("<d", argument))[0])
    return int(argument) if isinstance(argument, int) else int(argument.data_ptr())
