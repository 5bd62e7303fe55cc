"""Common settings of all build methods: flags, the CUDA toolkit's folder, the GPUs to compile for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

# Use only the stable ABI of libtorch 2.11, so that the library works with 2.11 and later.
TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"
CXX_FLAGS = [TARGET, "-O2"]
NVCC_FLAGS = ["-O3", "-lineinfo"]  # line numbers for ncu and compute-sanitizer; no slower
# Libraries in link order. libstdc++ is first because PyTorch's libraries accidentally export some of its
# functions too. It has its full file name because a compiler without the link `libstdc++.so` would take
# the static one: a second copy in the process, whose exceptions are not caught.
LIBRARIES = [":libstdc++.so.6", "torch_cpu", "cudart_static", "rt", "dl", "pthread"]
WITHOUT_GPU = "8.0 9.0 10.0+PTX"  # compile for these if there is no GPU


class Missing(RuntimeError):
    """A tool of a build method is missing; the message says how to get it."""


def prepare() -> Path:
    """Set the CUDA toolkit's folder and the GPUs to compile for in PyTorch; return the folder.

    PyTorch does not find them itself: a CPU build looks for no toolkit, and any build mistakes an nvcc
    that is a link or a script for the toolkit's own. Raises Missing.
    """
    toolkit = cuda_home()
    os.environ["CUDA_HOME"] = str(toolkit)
    from torch.utils import cpp_extension

    cpp_extension.CUDA_HOME = str(toolkit)
    os.environ["TORCH_CUDA_ARCH_LIST"] = " ".join(architectures())
    return toolkit


def cuda_home() -> Path:
    """Return CUDA_HOME or CUDA_PATH if set, otherwise the folder that nvcc itself reports."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if folder := os.environ.get(name):
            return _with_headers(Path(folder), f"{name}={folder}")
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        raise Missing(
            "nvcc was not found: install the CUDA toolkit, from "
            "https://developer.nvidia.com/cuda-downloads, or set CUDA_HOME to its folder"
        )
    output = subprocess.run([nvcc, "--dryrun", "none.cu"], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", output, re.MULTILINE)
    folder = top.group(1).strip() if top else str(Path(nvcc).resolve().parent.parent)
    return _with_headers(Path(folder).resolve(), nvcc)


def _with_headers(folder: Path, source: str) -> Path:
    if not (folder / "include" / "cuda_runtime.h").is_file():
        raise Missing(f"{source}: no toolkit with include/cuda_runtime.h there; set CUDA_HOME to its folder")
    return folder


def cuda_libraries(toolkit: Path) -> Path:
    """Return the toolkit's folder with the static runtime. Raises Missing."""
    for inner in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        if (toolkit / inner / "libcudart_static.a").is_file():
            return toolkit / inner
    raise Missing(f"{toolkit} has no libcudart_static.a: is the toolkit complete?")


def architectures() -> list[str]:
    """Return TORCH_CUDA_ARCH_LIST if set, such as `8.0 9.0+PTX`; else the GPUs here, else a default."""
    if named := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return re.split(r"[;\s]+", named.strip())
    import torch

    capabilities = sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})
    if not capabilities:
        return WITHOUT_GPU.split()
    names = [f"{major}.{minor}" for major, minor in capabilities]
    return [*names[:-1], f"{names[-1]}+PTX"]


def for_cmake(names: list[str]) -> str:
    """Convert to CMAKE_CUDA_ARCHITECTURES: 8.0 is 80-real, and 9.0+PTX is 90."""
    converted = []
    for name in names:
        parts = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", name)
        if parts is None:
            raise Missing(f"TORCH_CUDA_ARCH_LIST: CMake needs numbers such as 9.0, not {name!r}")
        converted.append("".join(parts.group(1, 2, 3)) + ("" if parts.group(4) else "-real"))
    return ";".join(converted)


def need(*tools: str) -> None:
    """Raise Missing for a tool that is not on PATH, with the command that installs it."""
    for tool in tools:
        if shutil.which(tool) is None:
            raise Missing(f"{tool} was not found: pip install {tool}")
