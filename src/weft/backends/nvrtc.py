"""CUDA C++ through NVRTC: compile at first use (tenths of a second), cache, launch.

NVRTC comes with PyTorch's CUDA wheels: a user with a driver and pip needs no CUDA toolkit, and every ``.cu``
compiles on a machine without a GPU. Compilation uses ``cuda.bindings``, which needs no driver. Loading and
launching use ``cuda.core``, on the current device and PyTorch's current stream there. The dispatch makes the
tensors' device current (dispatch/devices.py); programs and kernels are loaded once for each device.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from weft.core import WeftError
from weft.machine.ceilings import cache_folder

OPS = Path(__file__).parent.parent / "ops"
SHARED = OPS / "_common"
MAX_CONFIGS = 1024  # launch configurations of a kernel; the grid follows from the shapes, which may never end
INCLUDES = (
    SHARED,
    SHARED / "hopper",
    *(OPS / family for family in ("norms", "linear", "losses", "gated", "activations")),
)


@dataclass(frozen=True)
class CudaSource:
    """A ``.cu`` file with the macros that select one program of it; ``kernels`` are ``extern "C"``.

    It is compiled once in a process and cached on disk by contents, flags, compiler version and target.
    """

    file: Path
    kernels: tuple[str, ...]
    defines: tuple[tuple[str, str], ...] = ()
    label: str = ""
    min_arch: int = 80
    max_arch: int | None = None  # the last architecture with all instructions of the program
    options: tuple[str, ...] = ()
    # Kernels by the index of the device they are loaded for.
    _kernels_by_device: dict[int, dict[str, Kernel]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def flags(self, arch: str) -> list[str]:
        """Return NVRTC's options for a target such as ``sm_90``."""
        return [
            f"-arch={arch}",
            "-std=c++17",
            # Functions without an annotation are device functions: the helpers of a .cu file need no
            # __device__.
            "-default-device",
            # Line numbers for profilers and `weft inspect`; they do not change the machine code.
            "-lineinfo",
            f"-I{self.file.parent}",
            *(f"-I{folder}" for folder in INCLUDES),
            *(f"-D{name}={value}" for name, value in self.defines),
            *self.options,
        ]

    def compile(self, arch: str) -> bytes:
        """Return the cubin for a target such as ``sm_90``, from the cache if possible.

        Raises :class:`WeftError` with the compiler's log if the source does not compile.
        """
        cached = cache_folder() / "cubin" / f"{self._key(arch)}.cubin"
        try:
            return cached.read_bytes()
        except FileNotFoundError:
            cubin = self._compile(arch)
        cached.parent.mkdir(parents=True, exist_ok=True)
        # Written to a temporary file and renamed: two processes at once both leave a complete file.
        descriptor, temporary = tempfile.mkstemp(dir=cached.parent)
        with os.fdopen(descriptor, "wb") as out:
            out.write(cubin)
        os.replace(temporary, cached)
        return cubin

    def _key(self, arch: str) -> str:
        parts = [self.file.read_text(), *map(str, self.flags(arch)), str(compiler_version())]
        # Every header that could be included: an edit of one must not leave an old cubin in the cache.
        for header in sorted({h for folder in (*INCLUDES, self.file.parent) for h in folder.glob("*.cuh")}):
            parts.append(header.read_text())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def _compile(self, arch: str) -> bytes:
        from cuda.bindings import nvrtc

        flags = [f.encode() for f in (*self.flags(arch), *(f"-I{p}" for p in include_paths()))]
        name = str(self.file).encode()
        # The file's real name is passed, so that errors and line numbers refer to it.
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

    def _load(self, device: int) -> dict[str, Kernel]:
        from cuda.core import ObjectCode

        # A cubin, not PTX: the driver then compiles nothing at load time.
        code = ObjectCode.from_cubin(self.compile(arch_of(device)))
        return {name: Kernel(name, code.get_kernel(name), device) for name in self.kernels}

    def __getitem__(self, kernel: str) -> Kernel:
        """Return a kernel of this program, loaded for the current device."""
        device = current_device()
        kernels = self._kernels_by_device.get(device)
        if kernels is None:
            # Two threads may both load at first use; either result is valid.
            kernels = self._kernels_by_device[device] = self._load(device)
        return kernels[kernel]


class Kernel:
    """A kernel loaded for one device: ``kernel(grid, block, *arguments, shared=bytes)``.

    It is launched while ``device``, the index of that device, is the current one.

    Tensors and Python integers are passed as 64 bits (``T*``, ``long long``), Python floats as C++
    ``double``, and other values as ctypes or numpy scalars of their exact type. A kernel whose
    only argument is a structure by value takes one ``ctypes.Structure``.

    With ``overlap`` the kernel may start before the preceding kernel on the stream has ended (programmatic
    dependent launch, compute capability 9.0 on). It must then wait before it reads what that kernel wrote
    (ops/_common/overlap.cuh), and the preceding kernel must belong to the same call.
    """

    def __init__(self, name: str, handle: Any, device: int) -> None:
        self.name = name
        self.handle = handle
        self.device = device
        self._configs: dict[tuple[Any, ...], Any] = {}
        # Below the default limit of 48 KiB, which static shared memory counts towards.
        self._shared = 40 * 1024

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

        # Cached for each shape of launch, since building a LaunchConfig costs host time in every call.
        key = (grid, block, shared, overlap)
        config = self._configs.get(key)
        if config is None:
            if shared > self._shared:
                self._allow(shared)
            # Cleared as a whole: an eviction order would cost each hit more than a rare rebuild costs.
            if len(self._configs) >= MAX_CONFIGS:
                self._configs.clear()
            config = self._configs[key] = _launch_config(grid, block, shared, overlap)
        if arguments and isinstance(arguments[0], ctypes.Structure):
            self._launch_structure(config, torch.cuda.current_stream().cuda_stream, *arguments)
            return
        # Looked up in each call: the user may have changed the stream.
        stream = _stream(torch.cuda.current_stream().cuda_stream, self.device)
        pointers = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        launch(stream, config, self.handle, *pointers)

    def _launch_structure(self, config: Any, stream: int, structure: ctypes.Structure) -> None:
        """Launch with one structure by value, which ``cuda.core`` cannot pass; the driver copies it."""
        from cuda.bindings import driver

        addresses = (ctypes.c_void_p * 1)(ctypes.addressof(structure))
        function = driver.CUfunction(int(self.handle.handle))
        sizes = (*config.grid, *config.block, config.shmem_size)
        _ok(driver.cuLaunchKernel(function, *sizes, stream, ctypes.addressof(addresses), 0))

    def _allow(self, shared: int) -> None:
        """Opt in to more than 48 KiB of shared memory, static and dynamic together, on the kernel's device.

        The carve-out of 100 % takes as much as possible from the L1 cache: shared memory limits how many
        blocks of such a kernel are resident.
        """
        from cuda.bindings import driver

        known = driver.CUfunction_attribute
        device = _ok(driver.cuDeviceGet(self.device))
        for attribute, value in (
            (known.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
            (known.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
        ):
            _ok(driver.cuKernelSetAttribute(attribute, value, self.handle.handle, device))
        self._shared = shared


def _launch_config(grid: Any, block: Any, shared: int, overlap: bool) -> Any:
    """Return the launch configuration. Before 9.0 no kernel can start early, and ``overlap`` is ignored."""
    import torch
    from cuda.core import LaunchConfig

    sizes = {"grid": grid, "block": block, "shmem_size": shared}
    if overlap and torch.cuda.get_device_capability() >= (9, 0):
        return LaunchConfig(**sizes, programmatic_stream_serialization=True)
    return LaunchConfig(**sizes)


@lru_cache(maxsize=1024)
def _stream(handle: int, device: int) -> Any:
    """Return cuda.core's object for a stream. Handle 0 is the default stream of every ``device``."""
    from cuda.core import Stream

    return Stream.from_handle(handle)


def _ok(answer: Sequence[Any]) -> Any:
    status, *rest = answer
    # cuda.bindings returns (status, values...) and raises nothing itself.
    if int(status) != 0:
        raise RuntimeError(f"CUDA call failed: {status!r}")
    return rest[0] if rest else None


def current_device() -> int:
    """Return the index of the current device."""
    import torch

    # torch.cuda.current_device also makes sure that CUDA is initialised, in each call: a launch has tensors.
    return torch._C._cuda_getDevice()


def current_arch() -> str:
    """Return the current device's target; CUDA is initialised if it is not."""
    import torch

    return arch_of(torch.cuda.current_device())


@cache
def arch_of(device: int) -> str:
    """Return a device's target, e.g. ``sm_90a``; ``a`` enables instructions of this chip alone."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@cache
def compiler_version() -> tuple[int, int]:
    """Return NVRTC's version (major, minor)."""
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    assert int(status) == 0
    return major, minor


@cache
def include_paths() -> tuple[str, ...]:
    """Return the folders of CUDA's headers, from wheels or a toolkit. Raise :class:`WeftError` if none."""
    from cuda.pathfinder import find_nvidia_header_directory

    folders = [find_nvidia_header_directory(n) for n in ("cudart", "cccl")]
    if folders[0] is None:
        raise WeftError(
            "CUDA's headers were not found",
            expected="the wheels nvidia-cuda-runtime and nvidia-cuda-crt, or a CUDA toolkit",
            got="neither",
            hint="pip install 'weft[nvrtc]', or set CUDA_HOME",
        )
    return tuple(p for p in folders if p)
