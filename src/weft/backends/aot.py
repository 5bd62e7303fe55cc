"""Ahead-of-time compilation of a kernel of any backend to a cubin, without a GPU; possible targets.

Triton and NVRTC produce a cubin. numba produces PTX, which ptxas assembles.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from weft.backends import cubin as elf
from weft.backends import disassemble
from weft.core import WeftError
from weft.machine.capability import TABLE

COMPILING = ("triton", "cuda", "numba")
_VERSION = re.compile(r"^\.version (\d+\.\d+)", re.MULTILINE)
_TAKES = re.compile(r"current version is '(\d+\.\d+)'")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled kernel: its cubin with the kernels in it, and the PTX it was assembled from.

    ``target`` is the architecture (``sm_90a``), ``by`` the compiler and its version. ``dynamic`` is the
    dynamic shared memory in bytes if the compiler decides it (Triton), None if the launch does. ``file`` is
    the source file; ``note`` says what is unusual about the compilation.
    """

    label: str
    target: str
    by: str
    cubin: bytes
    kernels: tuple[elf.Code, ...]
    ptx: str
    file: Path
    dynamic: int | None = None
    note: str = ""


def targets(backend: str) -> list[int]:
    """Return the targets of a backend's toolchain whose limits are known: 90 for sm_90."""
    able = _nvrtc_targets() if backend == "cuda" else _ptxas_targets()
    return [arch for arch in TABLE if arch in able]


def known_target(backend: str, arch: str) -> int:
    """Return the number of a target such as ``sm_90``. Raise :class:`WeftError` with the known ones."""
    match = re.fullmatch(r"(?:sm_)?(\d{2,3})a?", arch)
    able = targets(backend)
    if match is None or int(match[1]) not in able:
        raise WeftError(
            f"target for {backend}",
            expected=", ".join(f"sm_{a}" for a in able) or "a toolchain that has one",
            got=arch,
        )
    return int(match[1])


@cache
def _nvrtc_targets() -> frozenset[int]:
    from cuda.bindings import nvrtc

    _, count = nvrtc.nvrtcGetNumSupportedArchs()
    _, archs = nvrtc.nvrtcGetSupportedArchs()
    return frozenset(archs[:count])


@cache
def _ptxas_targets() -> frozenset[int]:
    archs: set[int] = set()
    for tool in _assemblers():
        text = subprocess.run([tool, "--help"], capture_output=True, text=True).stdout
        archs.update(int(a) for a in re.findall(r"'sm_(\d+)'", text))
    return frozenset(archs)


def compile_for(backend: str, aot_kernel: Any, arch: int) -> Program:
    """Compile one kernel for ``sm_<arch>``. The toolchain's own exceptions pass through.

    A kernel with instructions of one chip alone is compiled for that chip's ``a`` target, as in
    ``compile_all``.
    """
    if backend == "triton":
        return _triton(aot_kernel, arch)
    if backend == "cuda":
        from weft.backends.nvrtc import compiler_version

        target = f"sm_{arch}{'a' if aot_kernel.min_arch == arch >= 90 else ''}"
        cubin = aot_kernel.compile(target)
        version = ".".join(map(str, compiler_version()))
        return _program(aot_kernel, target, f"NVRTC {version}", cubin, arch, aot_kernel.file)
    if backend == "numba":
        return _numba(aot_kernel, arch)
    raise WeftError("backend", expected=" or ".join(COMPILING), got=backend)


def suits(aot_kernel: Any, arch: int) -> bool:
    """True if ``sm_<arch>`` has the instructions that a kernel needs."""
    return aot_kernel.min_arch <= arch <= (_last(aot_kernel) or arch)


def needs(aot_kernel: Any) -> str:
    """Return the architectures that a kernel is for, as text."""
    last = _last(aot_kernel)
    return f"sm_{aot_kernel.min_arch}" + (f", at most sm_{last}" if last else "")


def _last(aot_kernel: Any) -> int | None:
    return getattr(aot_kernel, "max_arch", None)


def _program(
    aot_kernel: Any, target: str, by: str, cubin: bytes, arch: int, file: Path, **more: Any
) -> Program:
    kernels = elf.kernels(cubin, arch)
    more.setdefault("ptx", elf.ptx(cubin))
    return Program(
        label=aot_kernel.label,
        target=target,
        by=by,
        cubin=cubin,
        kernels=kernels,
        file=file,
        **more,
    )


def _triton(aot_kernel: Any, arch: int) -> Program:
    from weft.backends import triton_jit

    compiled = triton_jit.compile_aot_kernel(aot_kernel, arch)
    file = Path(aot_kernel.kernel.fn.__code__.co_filename)
    return _program(
        aot_kernel,
        f"sm_{arch}{'a' if arch >= 90 else ''}",
        f"Triton {triton_jit.triton.__version__}",
        compiled.asm["cubin"],
        arch,
        file,
        ptx=elf.ptx(compiled.asm["cubin"]) or compiled.asm["ptx"],
        dynamic=int(compiled.metadata.shared),
    )


def _numba(aot_kernel: Any, arch: int) -> Program:
    from weft.backends import numba_jit

    ptx = numba_jit.compile_aot_kernel(aot_kernel, arch, lines=True)
    cubin, by, note = assemble(ptx, arch)
    function = getattr(aot_kernel.kernel, "py_func", aot_kernel.kernel)
    file = Path(function.__code__.co_filename)
    ptx = elf.ptx(cubin) or ptx
    return _program(aot_kernel, f"sm_{arch}", f"numba, {by}", cubin, arch, file, ptx=ptx, note=note)


def assemble(ptx: str, arch: int) -> tuple[bytes, str, str]:
    """Assemble PTX with the first ptxas that accepts it; return the cubin, that ptxas, and a note.

    PTX that is newer than every ptxas here is given to the last one with a lowered version in its header,
    and the note says so. ptxas then refuses it only if it uses a new feature.
    """
    tools = _assemblers()
    if not tools:
        raise WeftError(
            "ptxas was not found",
            expected="Triton's wheel, which brings it, or a CUDA toolkit",
            got="neither",
            hint="pip install 'triton>=3.6', or set CUDA_HOME",
        )
    message, lowered = "", []
    # Each ptxas knows the PTX of its own CUDA release and older ones.
    for tool in tools:
        cubin, message = _assembled(tool, ptx, arch)
        if cubin is not None:
            return cubin, _version_of(tool), ""
        if takes := _TAKES.search(message):
            lowered.append((tool, takes[1]))
    written = _VERSION.search(ptx)
    # Only the header is changed: instructions that the assembler does not know are still an error.
    for tool, takes_it in lowered:
        cubin, message = _assembled(tool, _VERSION.sub(f".version {takes_it}", ptx, count=1), arch)
        if cubin is not None and written:
            by = _version_of(tool)
            return cubin, by, f"the PTX's version, {written[1]}, was written as {takes_it} for {by}"
    raise WeftError(f"ptxas does not assemble this for sm_{arch}", got=message.strip()[-600:])


def _assemblers() -> list[str]:
    return [*disassemble.tools("ptxas"), *disassemble.tools("ptxas-blackwell")]


def _assembled(tool: str, ptx: str, arch: int) -> tuple[bytes | None, str]:
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [tool, f"-arch=sm_{arch}", "-lineinfo", str(source), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        return (out.read_bytes() if done.returncode == 0 else None), done.stderr


@cache
def _version_of(tool: str) -> str:
    text = subprocess.run([tool, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    return f"ptxas {match[1] if match else 'of unknown version'}"
