"""Disassembly of cubins to SASS, the GPU's own instructions, with NVIDIA's ``nvdisasm``.

Triton's wheel and a CUDA toolkit contain it. It needs no GPU and no driver.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from weft.core import WeftError

TIMEOUT = 120.0  # seconds; a second is usual


def folders() -> list[Path]:
    """Return the folders that may hold CUDA's tools. A toolkit comes first: it matches its own NVRTC."""
    # CUDA_PATH is the name on Windows.
    toolkits = [os.environ.get(v) for v in ("CUDA_HOME", "CUDA_PATH")]
    paths = [Path(p) / "bin" for p in toolkits if p]
    paths += [Path(p) for p in os.environ.get("PATH", "").split(os.pathsep) if p]
    paths.append(Path("/usr/local/cuda/bin"))
    triton = find_spec("triton")
    if triton is not None and triton.origin:
        paths.append(Path(triton.origin).parent / "backends/nvidia/bin")
    return paths


@cache
def tools(name: str) -> tuple[str, ...]:
    """Return every copy of one of CUDA's tools, the preferred one first."""
    paths = [shutil.which(name, path=str(folder)) for folder in folders()]
    return tuple(dict.fromkeys(p for p in paths if p))


def nvdisasm() -> str:
    """Return the path of the disassembler. Raise :class:`WeftError` if there is none."""
    copies = tools("nvdisasm")
    if not copies:
        raise WeftError(
            "nvdisasm was not found",
            expected="Triton's wheel, which brings it, or a CUDA toolkit",
            got="neither",
            hint="pip install 'triton>=3.6', or set CUDA_HOME",
        )
    return copies[0]


def run(command: Sequence[str], what: str) -> str:
    """Run a tool and return its stdout. Raise :class:`WeftError` with the end of its output if it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WeftError(f"{what} could not be run", got=str(error)) from error
    if done.returncode:
        output = (done.stderr or done.stdout).strip()[-600:]
        raise WeftError(f"{what} failed", got=output or f"exit code {done.returncode}")
    return done.stdout


def sass(cubin: bytes) -> str:
    """Return a cubin's SASS with source lines, inlining and PTX lines, as nvdisasm prints it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Dataflow analysis serves chips before Volta and takes half the time; -ndf leaves it out.
        return run([nvdisasm(), "-c", "-gi", "-gp", "-ndf", file.name], "nvdisasm")


def sass_of_all(texts: Sequence[bytes], arch: int) -> list[str]:
    """Return the SASS of many kernels' code with one start of the tool, without names and source lines.

    The tool takes half a second to start. Hundreds of kernels are therefore read as one raw sequence of
    instructions (16 bytes each) and separated by their addresses.
    """
    if not texts:
        return []
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(texts))
        file.flush()
        printed = run([nvdisasm(), "-ndf", "-b", f"SM{arch}", file.name], "nvdisasm")
    ends, total = [], 0
    for text in texts:
        total += len(text)
        ends.append(total)
    # An instruction's address is its offset in the joined code, so that it tells the kernel.
    by_kernel: list[list[str]] = [[] for _ in texts]
    number = 0
    for line in printed.splitlines():
        if address := re.match(r"\s*/\*([0-9a-f]{4,})\*/", line):
            while number < len(ends) and int(address[1], 16) >= ends[number]:
                number += 1
            if number < len(ends):
                by_kernel[number].append(line)
    return ["\n".join(lines) for lines in by_kernel]
