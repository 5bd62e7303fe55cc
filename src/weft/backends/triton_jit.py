"""Triton: runs on a GPU, is interpreted without one, and compiles for any target anywhere.

The first import of triton decides whether kernels are interpreted: see environment.py.
Import ``triton`` and ``tl`` from here.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from weft.backends import nvrtc, recorded_call

INTERPRETED = bool(triton.knobs.runtime.interpret)
if INTERPRETED:
    # The interpreter computes with numpy. Edge cases with infinities, NaN and large magnitudes overflow
    # there on purpose, as they do silently on a GPU, and the check judges the results.
    warnings.filterwarnings(
        "ignore",
        message="(overflow|underflow|invalid value|divide by zero) encountered",
        category=RuntimeWarning,
        module=r"triton\.runtime\.interpreter",
    )

__all__ = ["INTERPRETED", "TritonAotKernel", "compile_aot_kernel", "launch_and_prepare", "tl", "triton"]

# The versions whose launcher is known to take what a prepared launch passes it.
_PREPARES = triton.__version__.split(".")[:2] == ["3", "6"] and not INTERPRETED


def launch_and_prepare(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any
) -> Callable[..., None] | None:
    """Launch ``kernel[grid](*arguments, **options)``, and return the same launch with other addresses.

    The returned function takes the addresses of the tensors among ``arguments``, in their order. They must be
    of the same dtypes and device, and 16-byte aligned where these tensors are: Triton compiled the kernel for
    that. It passes by Triton's own look-up of the compiled kernel, which takes most of the time of a launch.

    None is returned where that look-up cannot be passed by: in the interpreter, and for other versions of
    Triton than were tested.
    """
    compiled = kernel[grid](*arguments, **options)
    if not _PREPARES or not isinstance(compiled, CompiledKernel):
        return None
    bound = kernel.signature.bind(*arguments, **{k: v for k, v in options.items() if k in kernel.arg_names})
    bound.apply_defaults()
    values = list(bound.arguments.values())
    positions = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
    first, last = (positions[0], positions[-1] + 1) if positions else (0, 0)
    launcher: Any = compiled.run
    # Kernels that ask Triton for scratch memory go through its launcher as a whole.
    if positions != list(range(first, last)) or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    before, after = tuple(values[:first]), tuple(values[last:])
    sizes = (*grid, 1, 1)[:3]
    flags = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, compiled.packed_metadata)
    function, launch, runtime = compiled.function, launcher.launch, triton.knobs.runtime
    device = driver.active.get_current_device()
    stream_of = driver.active.get_current_stream

    def run(*addresses: int) -> None:
        if nvrtc.recorders:
            nvrtc.refuse_recording()
        stream = stream_of(device)
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        metadata = None
        if enter.calls or leave.calls:  # a profiler
            metadata = compiled.launch_metadata(grid, stream, *before, *addresses, *after)
        else:
            enter = leave = None
        launch(*sizes, stream, function, *flags, metadata, enter, leave, *before, *addresses, *after)

    return run


def _note_launch(recorder: Any, launcher: Any, arguments: tuple[Any, ...]) -> None:
    """Note one call of Triton's launcher for a recorded call (recorded_call.py)."""
    *sizes, _, function, packed_metadata, _, _, _ = arguments[:9]
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        recorder.fail("its kernel asks Triton for scratch memory")
        return
    flags = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
    head = (function, *flags, packed_metadata, None, None, None)
    launch, values = launcher.launch, arguments[9:]
    expanded: list[Any] = list(values)
    if inspect.isfunction(launch):
        # It makes a tensor map of each descriptor, and calls the compiled function.
        known = inspect.getclosurevars(launch).nonlocals
        launch, maps, expanded = known["launcher"], iter(known["tensordesc_meta"]), []
        for i, value in enumerate(values):
            if i in known["tensordesc_indices"]:
                expanded += _descriptor(value, next(maps))
            else:
                expanded.append(value)
    device = driver.active.get_current_device()
    recorder.triton_launch(launch, device, sizes, head, expanded)


def _descriptor(value: Any, metadata: Any) -> list[Any]:
    """Return what Triton passes for a tensor descriptor; its map, or its base, follows from the address."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    if metadata is None:
        return list(make_tensordesc_arg(value, None))

    # Not the descriptor itself, which would keep its tensor.
    shape, strides, padding = value.shape, value.strides, value.padding

    def make(pointer: int) -> Any:
        base = SimpleNamespace(data_ptr=lambda: pointer)
        like = SimpleNamespace(base=base, shape=shape, strides=strides, padding=padding)
        return make_tensordesc_arg(like, metadata)[0]

    return [recorded_call.Pending(value.base.data_ptr(), make), *shape, *strides]


_noting_lock = threading.Lock()
_noting_calls = 0


@contextmanager
def _noting_launches() -> Iterator[None]:
    """Let Triton's launchers note their launches meanwhile, in threads that record a call."""
    from triton.backends.nvidia.driver import CudaLauncher

    global _noting_calls
    with _noting_lock:
        _noting_calls += 1
        CudaLauncher.__call__ = _noting_launcher
    try:
        yield
    finally:
        with _noting_lock:
            _noting_calls -= 1
            if not _noting_calls:
                CudaLauncher.__call__ = _launch


def _noting_launcher(launcher: Any, *arguments: Any) -> None:
    recorder = nvrtc.recorders.get(threading.get_ident())
    if recorder is not None:
        _note_launch(recorder, launcher, arguments)
    _launch(launcher, *arguments)


def _is_hooked() -> bool:
    """True if a profiler wants to be told of launches."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


if _PREPARES:
    from triton.backends.nvidia.driver import CudaLauncher

    _launch = CudaLauncher.__call__
    recorded_call.noting.append(_noting_launches)
    recorded_call.launch_hooks.append(_is_hooked)


@dataclass(frozen=True, kw_only=True)
class TritonAotKernel:
    """A kernel with everything needed to compile it without a GPU, as a launch would compile it.

    ``signature`` maps every argument to its type (``*bf16``, ``i32``, ``fp32``) or, for a constexpr, to its
    value. A pointer counts as 16-byte aligned unless its type ends in ``:1``. An integer counts as divisible
    by 16 if its type ends in ``:16``, which Triton specialises at launch. ``max_arch`` is the last
    architecture with the kernel's instructions; None means that later ones have them too.
    """

    label: str
    kernel: Any
    signature: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    min_arch: int = 80
    max_arch: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def compile_aot_kernel(aot_kernel: TritonAotKernel, arch: int) -> Any:
    """Compile for ``sm_<arch>``; returns Triton's CompiledKernel (``.asm`` holds ptx, cubin, sass).

    Raises RuntimeError in a process that interprets kernels: use a fresh one with
    TRITON_INTERPRET=0.
    """
    if INTERPRETED:
        raise RuntimeError("this process interprets Triton kernels; set TRITON_INTERPRET=0")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for position, (name, kind) in enumerate(aot_kernel.signature.items()):
        if not isinstance(kind, str):
            signature[name] = "constexpr"
            constants[name] = kind
            continue
        signature[name] = kind.removesuffix(":16").removesuffix(":1")
        if (kind.startswith("*") and not kind.endswith(":1")) or kind.endswith(":16"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    if aot_kernel.kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source = GluonASTSource(aot_kernel.kernel, signature, constants, attributes)
    else:
        source = ASTSource(aot_kernel.kernel, signature, constants, attributes)
    options = {"num_warps": aot_kernel.num_warps, "num_stages": aot_kernel.num_stages, **aot_kernel.extra}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
