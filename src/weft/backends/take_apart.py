"""A specimen compiled to a cubin, with no GPU, whatever its backend; and what can be targeted.

Triton and NVRTC end in a cubin of their own. numba ends in PTX, which ptxas assembles.
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
    """One compiled specimen: its cubin with the kernels in it, and the PTX it was assembled from.

    ``target`` is what was compiled for (``sm_90a``), ``by`` the compiler and its version.
    ``dynamic`` is the dynamic shared memory in bytes where the compiler settles it (Triton), and
    None where the launch does. ``file`` is where the source stands; ``note`` what a reader must
    know of how it was made.
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
    """The targets that a backend's toolchain here has and whose limits are known: 90 for sm_90."""
    able = _nvrtc_targets() if backend == "cuda" else _ptxas_targets()
    return [arch for arch in TABLE if arch in able]


def known_target(backend: str, arch: str) -> int:
    """The number of a target such as ``sm_90``; :class:`WeftError` naming those that there are."""
    wanted = re.fullmatch(r"(?:sm_)?(\d{2,3})a?", arch)
    able = targets(backend)
    if wanted is None or int(wanted[1]) not in able:
        raise WeftError(
            f"target for {backend}",
            expected=", ".join(f"sm_{a}" for a in able) or "a toolchain that has one",
            got=arch,
        )
    return int(wanted[1])


@cache
def _nvrtc_targets() -> frozenset[int]:
    from cuda.bindings import nvrtc

    _, count = nvrtc.nvrtcGetNumSupportedArchs()
    _, archs = nvrtc.nvrtcGetSupportedArchs()
    return frozenset(archs[:count])


@cache
def _ptxas_targets() -> frozenset[int]:
    found: set[int] = set()
    for tool in _assemblers():
        said = subprocess.run([tool, "--help"], capture_output=True, text=True).stdout
        found.update(int(a) for a in re.findall(r"'sm_(\d+)'", said))
    return frozenset(found)


def compile_for(backend: str, specimen: Any, arch: int) -> Program:
    """One specimen for ``sm_<arch>``; raises what its toolchain raises.

    A kernel that uses one chip's own instructions is compiled for that chip's ``a`` target, as
    ``compile_all`` does.
    """
    if backend == "triton":
        return _triton(specimen, arch)
    if backend == "cuda":
        from weft.backends.nvrtc import compiler_version

        target = f"sm_{arch}{'a' if specimen.min_arch == arch >= 90 else ''}"
        made = specimen.compile(target)
        version = ".".join(map(str, compiler_version()))
        return _program(specimen, target, f"NVRTC {version}", made, arch, specimen.file)
    if backend == "numba":
        return _numba(specimen, arch)
    raise WeftError("backend", expected=" or ".join(COMPILING), got=backend)


def suits(specimen: Any, arch: int) -> bool:
    """Whether ``sm_<arch>`` has the instructions of a specimen of any backend."""
    return specimen.min_arch <= arch <= (_last(specimen) or arch)


def needs(specimen: Any) -> str:
    """The architectures that a specimen is for, in words."""
    last = _last(specimen)
    return f"sm_{specimen.min_arch}" + (f", at most sm_{last}" if last else "")


def _last(specimen: Any) -> int | None:
    return getattr(specimen, "max_arch", None)


def _program(
    specimen: Any, target: str, by: str, cubin: bytes, arch: int, file: Path, **more: Any
) -> Program:
    kernels = elf.kernels(cubin, arch)
    more.setdefault("ptx", elf.ptx(cubin))
    return Program(
        label=specimen.label,
        target=target,
        by=by,
        cubin=cubin,
        kernels=kernels,
        file=file,
        **more,
    )


def _triton(specimen: Any, arch: int) -> Program:
    from weft.backends import triton_jit

    made = triton_jit.compile_specimen(specimen, arch)
    file = Path(specimen.kernel.fn.__code__.co_filename)
    return _program(
        specimen,
        f"sm_{arch}{'a' if arch >= 90 else ''}",
        f"Triton {triton_jit.triton.__version__}",
        made.asm["cubin"],
        arch,
        file,
        ptx=elf.ptx(made.asm["cubin"]) or made.asm["ptx"],
        dynamic=int(made.metadata.shared),
    )


def _numba(specimen: Any, arch: int) -> Program:
    from weft.backends import numba_jit

    ptx = numba_jit.compile_specimen(specimen, arch, lines=True)
    cubin, by, note = assemble(ptx, arch)
    function = getattr(specimen.kernel, "py_func", specimen.kernel)
    file = Path(function.__code__.co_filename)
    kept = elf.ptx(cubin) or ptx
    return _program(specimen, f"sm_{arch}", f"numba, {by}", cubin, arch, file, ptx=kept, note=note)


def assemble(ptx: str, arch: int) -> tuple[bytes, str, str]:
    """PTX to a cubin by the first ptxas that takes it: the cubin, which ptxas, and a note.

    PTX newer than every ptxas here is given to the last with the version in its header lowered,
    which the note says: ptxas refuses it then only if it uses what is new.
    """
    tools = _assemblers()
    if not tools:
        raise WeftError(
            "ptxas was not found",
            expected="Triton's wheel, which brings it, or a CUDA toolkit",
            got="neither",
            hint="pip install 'triton>=3.6', or set CUDA_HOME",
        )
    said, lowered = "", []
    for tool in tools:
        made, said = _assembled(tool, ptx, arch)
        if made is not None:
            return made, _version_of(tool), ""
        if takes := _TAKES.search(said):
            lowered.append((tool, takes[1]))
    written = _VERSION.search(ptx)
    for tool, takes_it in lowered:
        made, said = _assembled(tool, _VERSION.sub(f".version {takes_it}", ptx, count=1), arch)
        if made is not None and written:
            by = _version_of(tool)
            return made, by, f"the PTX's version, {written[1]}, was written as {takes_it} for {by}"
    raise WeftError(f"ptxas does not assemble this for sm_{arch}", got=said.strip()[-600:])


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
    said = subprocess.run([tool, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+\.\d+)", said)
    return f"ptxas {found[1] if found else 'of unknown version'}"
