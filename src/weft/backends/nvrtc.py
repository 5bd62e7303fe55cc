"""CUDA C++ through NVRTC: compiled at first use in tenths of a second, cached, launched.

NVRTC comes with PyTorch's CUDA wheels, so a user with a driver and pip needs no CUDA toolkit, and
every ``.cu`` compiles on a machine with no GPU. Compilation goes through ``cuda.bindings``, which
needs no driver; loading and launching through ``cuda.core``, on PyTorch's current stream.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from weft.core import WeftError
from weft.machine.ceilings import cache_folder

SHARED = Path(__file__).parent.parent / "ops" / "_shared"


@dataclass(frozen=True)
class CudaSource:
    """One ``.cu`` file with the macros that make it one program; ``kernels`` are ``extern "C"``.

    Compiled once a process and cached on disk by contents, flags, compiler version and target.
    """

    file: Path
    kernels: tuple[str, ...]
    defines: tuple[tuple[str, str], ...] = ()
    label: str = ""
    min_arch: int = 80
    options: tuple[str, ...] = ()

    def flags(self, arch: str) -> list[str]:
        """The options NVRTC is given for a target such as ``sm_90``."""
        return [
            f"-arch={arch}",
            "-std=c++17",
            "-default-device",
            "-lineinfo",
            f"-I{self.file.parent}",
            f"-I{SHARED}",
            *(f"-D{name}={value}" for name, value in self.defines),
            *self.options,
        ]

    def compile(self, arch: str) -> bytes:
        """The cubin for a target such as ``sm_90``, from the cache where it is there.

        Raises :class:`WeftError` with the compiler's own log where the source does not compile.
        """
        kept = cache_folder() / "cubin" / f"{self._key(arch)}.cubin"
        try:
            return kept.read_bytes()
        except FileNotFoundError:
            cubin = self._compile(arch)
        kept.parent.mkdir(parents=True, exist_ok=True)
        # Written beside and renamed, so that two processes at once both end with a whole file.
        descriptor, beside = tempfile.mkstemp(dir=kept.parent)
        with os.fdopen(descriptor, "wb") as out:
            out.write(cubin)
        os.replace(beside, kept)
        return cubin

    def _key(self, arch: str) -> str:
        parts = [self.file.read_text(), *map(str, self.flags(arch)), str(compiler_version())]
        for header in sorted((*SHARED.glob("*.cuh"), *self.file.parent.glob("*.cuh"))):
            parts.append(header.read_text())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def _compile(self, arch: str) -> bytes:
        from cuda.bindings import nvrtc

        flags = [f.encode() for f in (*self.flags(arch), *(f"-I{p}" for p in include_paths()))]
        name = str(self.file).encode()
        program = _ok(nvrtc.nvrtcCreateProgram(self.file.read_bytes(), name, 0, [], []))
        try:
            (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                log = b" " * _ok(nvrtc.nvrtcGetProgramLogSize(program))
                _ok(nvrtc.nvrtcGetProgramLog(program, log))
                raise WeftError(
                    f"{self.file.name} does not compile for {arch}",
                    got=log.decode(errors="replace").strip("\0 \n"),
                )
            cubin = b" " * _ok(nvrtc.nvrtcGetCUBINSize(program))
            _ok(nvrtc.nvrtcGetCUBIN(program, cubin))
            return cubin
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    @cached_property
    def _loaded(self) -> dict[str, Kernel]:
        from cuda.core import ObjectCode

        code = ObjectCode.from_cubin(self.compile(current_arch()))
        return {name: Kernel(name, code.get_kernel(name)) for name in self.kernels}

    def __getitem__(self, kernel: str) -> Kernel:
        """A kernel of this program, loaded for the current device."""
        return self._loaded[kernel]


class Kernel:
    """A loaded kernel: ``kernel(grid, block, *arguments, shared=bytes)``.

    Arguments: tensors and Python integers both go as 64 bits (``T*``, ``long long``), Python
    floats as C++ ``double``; anything else as a ctypes or numpy scalar of its exact type.

    ``overlap``: it may begin before the kernel in front of it on the stream has ended, from compute
    capability 9.0 on (programmatic dependent launch). It then says itself when it needs what that
    one wrote (ops/_shared/overlap.cuh); one that is no part of the same call must not be in front.
    """

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self.handle = handle
        self._configs: dict[tuple[Any, ...], Any] = {}
        self._shared = 40 * 1024  # of 48 KiB, which a kernel's own declared memory takes from

    def __call__(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        *arguments: Any,
        shared: int = 0,
        overlap: bool = False,
    ) -> None:
        import torch
        from cuda.core import launch

        key = (grid, block, shared, overlap)
        config = self._configs.get(key)
        if config is None:
            if shared > self._shared:
                self._allow(shared)
            config = self._configs[key] = _launch_config(grid, block, shared, overlap)
        stream = _stream(torch.cuda.current_stream().cuda_stream)
        pointers = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        launch(stream, config, self.handle, *pointers)

    def _allow(self, shared: int) -> None:
        """More than 48 KiB of shared memory, declared and dynamic, must be asked for.

        Such a kernel lives on shared memory: the L1 gives it all it can, so that as many blocks as
        possible are resident.
        """
        from cuda.bindings import driver

        known = driver.CUfunction_attribute
        device = _ok(driver.cuCtxGetDevice())
        for attribute, value in (
            (known.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
            (known.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
        ):
            _ok(driver.cuKernelSetAttribute(attribute, value, self.handle.handle, device))
        self._shared = shared


def _launch_config(grid: Any, block: Any, shared: int, overlap: bool) -> Any:
    """``overlap`` changes nothing before 9.0, where no kernel can begin early."""
    import torch
    from cuda.core import LaunchConfig

    sizes = {"grid": grid, "block": block, "shmem_size": shared}
    if overlap and torch.cuda.get_device_capability() >= (9, 0):
        return LaunchConfig(**sizes, programmatic_stream_serialization=True)
    return LaunchConfig(**sizes)


@cache
def _stream(handle: int) -> Any:
    from cuda.core import Stream

    return Stream.from_handle(handle)


def _ok(answer: Sequence[Any]) -> Any:
    status, *rest = answer
    if int(status) != 0:
        raise RuntimeError(f"CUDA call failed: {status!r}")
    return rest[0] if rest else None


@cache
def current_arch() -> str:
    """The current device's target, e.g. ``sm_90a``: the ``a`` has the chip's own instructions."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@cache
def compiler_version() -> tuple[int, int]:
    """NVRTC's (major, minor)."""
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    assert int(status) == 0
    return major, minor


@cache
def include_paths() -> tuple[str, ...]:
    """CUDA's headers as pip's wheels or a toolkit bring them; raises :class:`WeftError` if none."""
    from cuda.pathfinder import find_nvidia_header_directory

    found = [find_nvidia_header_directory(n) for n in ("cudart", "cccl")]
    if found[0] is None:
        raise WeftError(
            "CUDA's headers were not found",
            expected="the wheels nvidia-cuda-runtime and nvidia-cuda-crt, or a CUDA toolkit",
            got="neither",
            hint="pip install 'weft[cuda]', or set CUDA_HOME",
        )
    return tuple(p for p in found if p)
