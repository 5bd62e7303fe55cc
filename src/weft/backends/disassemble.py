"""From a cubin to SASS, the instructions that the GPU executes, by NVIDIA's ``nvdisasm``.

Triton's wheel brings it, and a CUDA toolkit does. It needs no GPU and no driver.
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
    """Where CUDA's tools may lie: a toolkit first, which is as new as its own NVRTC."""
    named = [os.environ.get(v) for v in ("CUDA_HOME", "CUDA_PATH")]
    found = [Path(p) / "bin" for p in named if p]
    found += [Path(p) for p in os.environ.get("PATH", "").split(os.pathsep) if p]
    found.append(Path("/usr/local/cuda/bin"))
    triton = find_spec("triton")
    if triton is not None and triton.origin:
        found.append(Path(triton.origin).parent / "backends/nvidia/bin")
    return found


@cache
def tools(name: str) -> tuple[str, ...]:
    """Every copy of one of CUDA's tools, the likeliest first."""
    found = [shutil.which(name, path=str(folder)) for folder in folders()]
    return tuple(dict.fromkeys(t for t in found if t))


def nvdisasm() -> str:
    """The disassembler; raises :class:`WeftError` where there is none."""
    found = tools("nvdisasm")
    if not found:
        raise WeftError(
            "nvdisasm was not found",
            expected="Triton's wheel, which brings it, or a CUDA toolkit",
            got="neither",
            hint="pip install 'triton>=3.6', or set CUDA_HOME",
        )
    return found[0]


def run(command: Sequence[str], what: str) -> str:
    """The tool's stdout; raises :class:`WeftError` with its last words where it failed."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WeftError(f"{what} could not be run", got=str(error)) from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-600:]
        raise WeftError(f"{what} failed", got=said or f"exit code {done.returncode}")
    return done.stdout


def sass(cubin: bytes) -> str:
    """A cubin's SASS with source lines, inlining and PTX lines between, as nvdisasm prints it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Dataflow analysis (-ndf leaves it out) serves chips before Volta, and takes half the time.
        return run([nvdisasm(), "-c", "-gi", "-gp", "-ndf", file.name], "nvdisasm")


def sass_of_all(texts: Sequence[bytes], arch: int) -> list[str]:
    """The SASS of many kernels' code at once, without names and lines: one start of the tool.

    It takes half a second to start, so that kernels by the hundred are read as one raw stretch of
    instructions (16 bytes each) and told apart by their addresses.
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
    found: list[list[str]] = [[] for _ in texts]
    number = 0
    for line in printed.splitlines():
        if address := re.match(r"\s*/\*([0-9a-f]{4,})\*/", line):
            while number < len(ends) and int(address[1], 16) >= ends[number]:
                number += 1
            if number < len(ends):
                found[number].append(line)
    return ["\n".join(lines) for lines in found]
