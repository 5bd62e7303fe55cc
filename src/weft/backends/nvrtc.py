"""CUDA C++ through NVRTC: compile at first use (tenths of a second), cache, launch.

NVRTC comes with PyTorch's CUDA wheels: a user with a driver and pip needs no CUDA toolkit, and every ``.cu``
compiles on a machine without a GPU. Compilation uses ``cuda.bindings``, which needs no driver. Loading uses
``cuda.core``. Launching calls the driver itself, on the current device and PyTorch's current stream there.
The dispatch makes the tensors' device current (dispatch/devices.py); programs and kernels are loaded once for
each device.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from weft.core import WeftError
from weft.machine.ceilings import cache_folder

OPS = Path(__file__).parent.parent / "ops"
SHARED = OPS / "_common"
MAX_CONFIGS = 1024  # launch configurations of a kernel; the grid follows from the shapes, which may never end
SCALARS = (int, float)
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
MAX_STREAMS = 64  # configurations of a prepared launch, one for each stream
# By thread, what notes its launches (recorded_call.py). It is empty in nearly all calls: one cheap test.
recorders: dict[int, Any] = {}
INCLUDES = (
    SHARED,
    SHARED / "hopper",
    SHARED / "products",
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
        folders = [*INCLUDES, self.file.parent]
        if '#include "../' in parts[0]:  # a ladder's step, with a header of its operator
            folders.append(self.file.parent.parent)
        for header in sorted({h for folder in folders for h in folder.glob("*.cuh")}):
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

    It is launched on PyTorch's current stream, while ``device``, the index of that device, is current.

    Tensors and Python integers are passed as 64 bits (``T*``, ``long long``), Python floats as C++
    ``double``, a :class:`Float32` as C++ ``float``. Each parameter has 8 bytes of its own, of which the
    driver reads as many as the kernel declares. A kernel whose only argument is a structure by value takes
    one ``ctypes.Structure``.

    With ``overlap`` the kernel may start before the preceding kernel on the stream has ended (programmatic
    dependent launch, compute capability 9.0 on). It must then wait before it reads what that kernel wrote
    (ops/_common/overlap.cuh), and before it writes. All of its blocks wait: what follows a kernel follows
    what was before it too.
    """

    def __init__(self, name: str, handle: Any, device: int) -> None:
        self.name = name
        self.handle = handle
        self.function = int(handle.handle)  # a CUkernel, which the driver takes for a CUfunction
        self.device = device
        self._configs: dict[tuple[Any, ...], Any] = {}
        self._pool = ParameterPool("")
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
        if recorders and (recorder := recorders.get(threading.get_ident())) is not None:
            recorder.launch(self, (grid, block, shared, overlap), arguments)
        # Looked up in each call: the user may have changed the stream.
        key = (grid, block, shared, overlap, _current_stream()(self.device))
        config = self._configs.get(key) or self._configure(key)
        if arguments and isinstance(arguments[0], ctypes.Structure):
            # The driver copies the structure before it returns.
            addresses = (ctypes.c_void_p * 1)(ctypes.addressof(arguments[0]))
            _launch(self, config.getPtr(), ctypes.addressof(addresses))
            return
        values = [a if type(a) in SCALARS or not _is_tensor(a) else a.data_ptr() for a in arguments]
        pool = self._pool
        try:
            parameters = pool.take(values)
        except struct.error:  # the first launch, or values of other types than before
            pool = self._pool = ParameterPool("".join(map(_format, values)))
            parameters = pool.take(values)
        _launch(self, config.getPtr(), parameters.addresses)
        pool.free.append(parameters)

    def prepare(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        *arguments: Any,
        shared: int = 0,
        overlap: bool = False,
    ) -> Callable[..., None]:
        """Return a launch for which all but the tensors' addresses is fixed.

        ``prepare(grid, block, *arguments)(*addresses)`` is ``kernel(grid, block, *arguments)`` with
        ``addresses`` in place of the tensors, in their order.
        """
        return _prepared_launch(self, (grid, block, shared, overlap), arguments)

    def prepare_structure(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        *,
        shared: int = 0,
        overlap: bool = False,
    ) -> Callable[[int], None]:
        """Return a launch of a kernel with one parameter, a structure.

        The launch takes the address of a pointer to the structure, which the driver copies before it returns.
        """
        configs: dict[int, tuple[int, Any]] = {}  # by stream: its address, and what lives there
        launcher, stream_of, device, function = _launcher(), _current_stream(), self.device, self.function

        def launch(pointer: int) -> None:
            if recorders:
                refuse_recording()
            stream = stream_of(device)
            entry = configs.get(stream)
            if entry is None:
                config = self._configure((grid, block, shared, overlap, stream))
                if len(configs) >= MAX_STREAMS:
                    configs.clear()
                entry = configs[stream] = (config.getPtr(), config)
            if status := launcher(entry[0], function, pointer, None):
                _launch_again(self, status, entry[0], pointer)

        return launch

    def max_active_clusters(self, block: int, *, shared: int, cluster: int) -> int:
        """Return how many clusters of ``cluster`` blocks the kernel's device runs at once; 0 if none.

        It may be less than the number of SMs divided by ``cluster``: the blocks of a cluster run in one GPC
        (a group of SMs), and what does not divide evenly there stays idle.
        """
        from cuda.bindings import driver

        _bind_context(self.device)  # nothing may have run on the device so far
        if shared > self._shared:
            self._allow(shared)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = shared
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimensions = attribute.value.clusterDim
        dimensions.x, dimensions.y, dimensions.z = cluster, 1, 1
        config.attrs = [attribute]
        config.numAttrs = 1
        function = driver.CUfunction(self.function)
        return int(_ok(driver.cuOccupancyMaxActiveClusters(function, config)))

    def _configure(self, key: tuple[Any, ...]) -> Any:
        """Return the configuration of a launch, which is cached for each grid, block and stream."""
        grid, block, shared, overlap, stream = key
        if shared > self._shared:
            self._allow(shared)
        # Cleared as a whole: an eviction order would cost each hit more than a rare rebuild costs.
        if len(self._configs) >= MAX_CONFIGS:
            self._configs.clear()
        config = self._configs[key] = _launch_config(grid, block, shared, overlap, stream)
        return config

    def _allow(self, shared: int) -> None:
        """Opt in to more than 48 KiB of shared memory, static and dynamic together, on the kernel's device.

        The carve-out of 100 % takes as much as possible from the L1 cache: shared memory limits how many
        blocks of such a kernel are resident. Clusters of more than 8 blocks are allowed where there are any.
        """
        from cuda.bindings import driver

        known = driver.CUfunction_attribute
        device = _ok(driver.cuDeviceGet(self.device))
        settings = [
            (known.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
            (known.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
        ]
        major = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        if _ok(driver.cuDeviceGetAttribute(major, device)) >= 9:
            # Clusters of 16 blocks, which need so much shared memory that nothing smaller would do.
            settings.append((known.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
        for attribute, value in settings:
            _ok(driver.cuKernelSetAttribute(attribute, value, self.handle.handle, device))
        self._shared = shared


def _prepared_launch(kernel: Kernel, shape: tuple[Any, ...], arguments: Sequence[Any]) -> Callable[..., None]:
    """Return a launch of ``kernel`` that differs from call to call in the addresses of its tensors alone.

    ``shape`` is grid, block, shared memory and overlap.
    """
    tensors = [i for i, a in enumerate(arguments) if _is_tensor(a)]
    scalars = [i for i, a in enumerate(arguments) if not _is_tensor(a)]
    # Addresses come first in a buffer, so that a call writes one stretch of it.
    fixed = tuple(arguments[i] for i in scalars)
    pool = ParameterPool("Q" * len(tensors), fixed, (*tensors, *scalars))
    configs: dict[int, tuple[int, Any]] = {}  # by stream: its address, and what lives there
    # One function with everything bound: between two steps of a training loop the host's caches are cold, and
    # each further function, object or dictionary of a call costs 0.5 to 1 us (docs/use/dispatch.md).
    launcher, stream_of, device, function = _launcher(), _current_stream(), kernel.device, kernel.function
    take, give_back, pack = pool.free.pop, pool.free.append, pool.pack_into

    def configure(stream: int) -> tuple[int, Any]:
        config = kernel._configure((*shape, stream))
        if len(configs) >= MAX_STREAMS:
            configs.clear()
        entry = configs[stream] = (config.getPtr(), config)
        return entry

    def launch(*addresses: int) -> None:
        if recorders:
            refuse_recording()
        stream = stream_of(device)
        config, _ = configs.get(stream) or configure(stream)
        try:
            parameters = take()
        except IndexError:
            parameters = pool.new()
        buffer, _, pointers = parameters
        pack(buffer, 0, *addresses)
        if status := launcher(config, function, pointers, None):
            _launch_again(kernel, status, config, pointers)
        give_back(parameters)

    return launch


def is_recording() -> bool:
    """True if the launches of this thread are noted: then no prepared launch may be repeated."""
    return bool(recorders) and threading.get_ident() in recorders


def refuse_recording() -> None:
    """Let a call of this thread that is being recorded not be repeated: it launches what is not noted."""
    if (recorder := recorders.get(threading.get_ident())) is not None:
        recorder.fail("it repeats a prepared launch")


def launch_and_prepare(kernel: Any, *arguments: Any, **options: Any) -> Callable[..., None] | None:
    """Launch ``kernel(*arguments, **options)``, and return the same launch with other addresses.

    None is returned in a dry run, whose kernels only record their launches.
    """
    kernel(*arguments, **options)
    return kernel.prepare(*arguments, **options) if isinstance(kernel, Kernel) else None


def _launch(kernel: Kernel, config: int, parameters: int) -> None:
    if status := _launcher()(config, kernel.function, parameters, None):
        _launch_again(kernel, status, config, parameters)


def _launch_again(kernel: Kernel, status: int, config: int, parameters: int) -> None:
    """Launch once more after an error that a context mends; raise RuntimeError for any other."""
    if status == INVALID_CONTEXT:
        # A thread of autograd's that has called no function of the CUDA runtime so far: PyTorch sets its
        # device only where that differs from 0.
        _bind_context(kernel.device)
        status = _launcher()(config, kernel.function, parameters, None)
    if status:
        from cuda.bindings import driver

        raise RuntimeError(f"CUDA call failed: {driver.CUresult(status)!r} at the launch of {kernel.name}")


def _bind_context(device: int) -> None:
    """Make a device's primary context, which PyTorch uses, the current one of this thread."""
    from cuda.bindings import driver

    # Retained once more and never released: PyTorch keeps it until the process ends anyway.
    context = _ok(driver.cuDevicePrimaryCtxRetain(_ok(driver.cuDeviceGet(device))))
    _ok(driver.cuCtxSetCurrent(context))


class ParameterPool:
    """Buffers for the parameters of a launch, taken by one thread at a time.

    ``formats`` has a letter of ``struct`` for each value that is written in each launch; ``fixed`` values
    follow them, and are written once for each buffer. ``positions`` are the positions of all these values
    among the kernel's parameters, if they differ from their order here.

    The driver reads the parameters before the launch returns: the buffer is then free for another.
    """

    def __init__(
        self, formats: str, fixed: tuple[Any, ...] = (), positions: tuple[int, ...] | None = None
    ) -> None:
        packer = struct.Struct("<" + formats)
        self._written = packer.size
        self.pack_into = packer.pack_into
        self._fixed, self._fixed_packer = fixed, struct.Struct("<" + "".join(map(_format, fixed)))
        self._positions = positions
        # Appending to a list and popping from it are atomic in CPython: no lock is needed.
        self.free: list[Parameters] = []

    def take(self, values: Sequence[Any]) -> Parameters:
        """Return a buffer with these values; raise ``struct.error`` if they are not of the formats."""
        try:
            parameters = self.free.pop()
        except IndexError:
            parameters = self.new()
        self.pack_into(parameters.buffer, 0, *values)
        return parameters

    def new(self) -> Parameters:
        """Return a buffer with the fixed values."""
        written = self._written
        size = written + self._fixed_packer.size
        buffer = ctypes.create_string_buffer(max(size, 8))
        self._fixed_packer.pack_into(buffer, written, *self._fixed)
        count, start = size // 8, ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * max(count, 1))()
        for index, position in enumerate(self._positions or range(count)):
            pointers[position] = start + 8 * index
        return Parameters(buffer, pointers, ctypes.addressof(pointers))


class Float32(float):
    """An argument for a kernel's parameter of type ``float``; any other Python float is a ``double``."""


class Parameters(NamedTuple):
    """The parameters of one launch: their values, pointers to them, and the address of these pointers."""

    buffer: Any
    pointers: Any
    addresses: int


def _format(value: Any) -> str:
    """Return the format of ``struct`` for a parameter; every one has 8 bytes."""
    if isinstance(value, Float32):
        return "f4x"
    if isinstance(value, float):
        return "d"
    if hasattr(value, "__index__"):
        return "q"
    raise TypeError(
        f"a kernel's parameter is a tensor, an int, a float or a Float32, not {type(value).__name__}"
    )


def check_arguments(arguments: Sequence[Any]) -> None:
    """Raise TypeError for an argument that no kernel's parameter takes. A dry run launches nothing else."""
    if arguments and isinstance(arguments[0], ctypes.Structure):
        return
    for argument in arguments:
        if not _is_tensor(argument):
            _format(argument)


@cache
def _launcher() -> Any:
    """Return the driver's ``cuLaunchKernelEx``, which takes the addresses of a configuration and parameters.

    It is called through ctypes: cuda.core and cuda.bindings convert each argument of each launch, which takes
    longer than the driver itself.
    """
    from cuda.bindings import driver

    # 11.6: the version of CUDA that has the function. 0: the legacy default stream, as PyTorch has it.
    address, _ = _ok_all(driver.cuGetProcAddress(b"cuLaunchKernelEx", 11060, 0))
    pointer = ctypes.c_void_p
    # A call of a CFUNCTYPE releases the interpreter's lock: a full queue of launches blocks no other thread.
    return ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer)(int(address))


@cache
def _current_stream() -> Callable[[int], int]:
    """Return the function that returns the handle of PyTorch's current stream on a device."""
    import torch

    return torch._C._cuda_getCurrentRawStream  # type: ignore[no-any-return]


def _is_tensor(argument: Any) -> bool:
    # No isinstance: this module does not import torch.
    return hasattr(argument, "data_ptr")


def _launch_config(grid: Any, block: Any, shared: int, overlap: bool, stream: int) -> Any:
    """Return the driver's launch configuration. Before 9.0 no kernel starts early: ``overlap`` is ignored."""
    import torch
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = _three(grid)
    config.blockDimX, config.blockDimY, config.blockDimZ = _three(block)
    config.sharedMemBytes = shared
    config.hStream = driver.CUstream(stream)
    if overlap and torch.cuda.get_device_capability() >= (9, 0):
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
        config.numAttrs = 1
    return config


def _three(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    """Return the three dimensions of a grid or a block."""
    sizes = (size,) if isinstance(size, int) else size
    return (*sizes, 1, 1)[:3]  # type: ignore[return-value]


def _ok_all(answer: Sequence[Any]) -> list[Any]:
    status, *values = answer
    # cuda.bindings returns (status, values...) and raises nothing itself.
    if int(status) != 0:
        raise RuntimeError(f"CUDA call failed: {status!r}")
    return values


def _ok(answer: Sequence[Any]) -> Any:
    """Return the first value of a driver's answer, or None if it has none."""
    values = _ok_all(answer)
    return values[0] if values else None


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
