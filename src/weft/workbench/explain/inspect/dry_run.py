"""Dry run: run an implementation's host code on tensors without memory and record its launches.

A recorded launch has the kernel, its grid and block, and its dynamic shared memory. So the kernels of a
case and their compile-time arguments are known without a GPU. Tensors are on PyTorch's meta device.
Queries of the device are answered for the usual device of the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from weft.core import BACKWARD, Case, Implementation, Operator, WeftError
from weft.machine.capability import sm_limits
from weft.workbench.calls.bind import differentiable_outputs, split_gradients
from weft.workbench.calls.buffers import tensors_of
from weft.workbench.calls.inputs import allocate

TRITON_TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float64": "fp64",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "i1",
}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Launch of a case: the kernel's name, the AOT kernel it belongs to, and its launch parameters.

    ``block`` is threads a block and ``shared`` dynamic shared memory in bytes; both are None if the
    compiler chooses them, as Triton's does. ``elements`` are those of the call's outputs, which its
    ``launches`` kernels write together.
    """

    kernel: str
    aot_kernel: Any
    grid: tuple[int, ...]
    block: int | None
    shared: int | None
    elements: int = 0
    launches: int = 1

    @property
    def key(self) -> tuple[Any, str]:
        """Key that launches of one compiled kernel share."""
        return identity(self.aot_kernel), self.kernel


def identity(aot_kernel: Any) -> Any:
    """Return a key that AOT kernels share if they compile to the same code, whatever their labels."""
    # Only a CudaSource has defines and only a Triton kernel num_warps; the rest are numba's.
    if hasattr(aot_kernel, "defines"):
        return (aot_kernel.file, aot_kernel.defines, aot_kernel.options)
    kernel = getattr(aot_kernel.kernel, "__name__", str(aot_kernel.kernel))
    if hasattr(aot_kernel, "num_warps"):
        signature = tuple(aot_kernel.signature.items())
        return (kernel, signature, aot_kernel.num_warps, aot_kernel.num_stages)
    return (kernel, aot_kernel.signature.replace(" ", ""))


def dry_run(
    operator: Operator, implementation: Implementation, case: Case, direction: str, arch: int
) -> list[Launch]:
    """Return the launches of one call, in order; raises whatever the host code raises.

    Raises :class:`WeftError` for the backward of an implementation that leaves it to autograd.
    """
    if direction == BACKWARD and implementation.backward is None:
        raise WeftError(
            f"{operator.name} {implementation.name} has no backward of its own",
            hint="autograd differentiates its forward; look at --direction forward",
        )
    launches: list[Launch] = []
    with _recording(launches, implementation.backend, arch):
        inputs = [allocate(spec, "meta").tensor for spec in case.inputs]
        params: Mapping[str, Any] = case.params
        output = implementation.forward(*inputs, **params)
        if direction != BACKWARD:
            return _with_elements(launches, output)
        launches.clear()  # the forward ran only for the shape and dtype of its output
        saved = operator.saved(tuple(inputs), output, params)
        assert implementation.backward is not None
        gradients = implementation.backward(
            *split_gradients(operator, differentiable_outputs(operator, output)), *saved, **params
        )
    return _with_elements(launches, gradients)


def _with_elements(launches: list[Launch], outputs: Any) -> list[Launch]:
    """Return a call's launches with the number of elements of its outputs."""
    # An optimizer that updates its inputs in place returns nothing.
    tensors = [] if outputs is None else tensors_of(outputs)
    elements = sum(tensor.numel() for tensor in tensors if tensor is not None)
    return [replace(launch, elements=elements, launches=len(launches)) for launch in launches]


@contextmanager
def _recording(launches: list[Launch], backend: str, arch: int) -> Iterator[None]:
    """Record launches instead of making them, and answer queries of the device for ``sm_<arch>``."""
    import torch

    sm = sm_limits(arch)
    properties = SimpleNamespace(
        multi_processor_count=sm.usual_num_sms,
        major=arch // 10,
        minor=arch % 10,
        max_threads_per_multi_processor=sm.threads,
        shared_memory_per_multiprocessor=sm.shared,
        shared_memory_per_block_optin=sm.shared_per_block,
        warp_size=sm.warp,
    )
    answers: dict[str, Callable[..., Any]] = {
        "get_device_capability": lambda *_: (arch // 10, arch % 10),
        "get_device_properties": lambda *_: properties,
        "current_stream": lambda *_: SimpleNamespace(cuda_stream=0, device_index=0),
        "is_current_stream_capturing": lambda: False,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        if backend == "cuda":
            stack.enter_context(_record_cuda(launches))
        elif backend == "triton":
            stack.enter_context(_record_triton(launches, sm.shared_per_block, sm.usual_num_sms))
        elif backend == "numba":
            stack.enter_context(_record_numba(launches))
        yield


@contextmanager
def _record_cuda(launches: list[Launch]) -> Iterator[None]:
    from weft.backends.nvrtc import CudaSource, check_arguments

    def kernel(source: CudaSource, name: str) -> Any:
        def launch(grid: Any, block: Any, *arguments: Any, shared: int = 0, overlap: bool = False) -> None:
            check_arguments(arguments)
            launches.append(
                Launch(
                    kernel=name,
                    aot_kernel=source,
                    grid=_dimensions(grid),
                    block=math.prod(_dimensions(block)),
                    shared=shared,
                )
            )

        return launch

    # Indexing a source compiles it and needs a driver, so the recording function replaces that step.
    with mock.patch.object(CudaSource, "__getitem__", kernel):
        yield


@contextmanager
def _record_triton(launches: list[Launch], shared: int, num_sms: int) -> Iterator[None]:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        aot_kernel, values = _triton_aot_kernel(kernel, arguments, options)
        shape = _dimensions(grid(values) if callable(grid) else grid)
        name = kernel.fn.__name__
        launches.append(Launch(kernel=name, aot_kernel=aot_kernel, grid=shape, block=None, shared=None))

    properties = {"max_shared_mem": shared, "multiprocessor_count": num_sms}
    utils = SimpleNamespace(get_device_properties=lambda *_: properties)
    # Without a GPU Triton has no active driver, and asking for one raises.
    active_driver = driver._active
    driver.set_active(SimpleNamespace(utils=utils, get_current_device=lambda: 0))
    try:
        with mock.patch.object(JITFunction, "run", run):
            yield
    finally:
        driver._active = active_driver


def _triton_aot_kernel(kernel: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return the AOT kernel that Triton compiles for a launch, with types specialised as at a launch."""
    from weft.backends.triton_jit import TritonAotKernel

    named = {n: v for n, v in options.items() if n in kernel.arg_names}
    bound = kernel.signature.bind(*arguments, **named)
    bound.apply_defaults()
    signature = {p.name: _triton_type(p, bound.arguments[p.name]) for p in kernel.params}
    aot_kernel = TritonAotKernel(
        label=kernel.fn.__name__,
        kernel=kernel,
        signature=signature,
        num_warps=options.get("num_warps", 4),
        num_stages=options.get("num_stages", 3),
        extra={n: options[n] for n in ("maxnreg",) if n in options},
    )
    return aot_kernel, dict(bound.arguments)


def _triton_type(parameter: Any, value: Any) -> Any:
    """Return a parameter's type in a signature, or its value if that is compiled in."""
    if parameter.is_constexpr or value is None or isinstance(value, str):
        return value
    if hasattr(value, "block_shape"):  # a tensor descriptor
        sizes = ", ".join(map(str, value.block_shape))
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""  # Gluon's descriptors have one
        return f"tensordesc<{_triton_dtype(value.base)}[{sizes}]{layout}>"
    if hasattr(value, "data_ptr"):
        return f"*{_triton_dtype(value)}" + ("" if value.data_ptr() % 16 == 0 else ":1")
    # Before the test for 1, which True would pass.
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, float):
        return "fp32"
    # Triton compiles an integer 1 in, and specialises multiples of 16, unless told not to.
    if value == 1 and not parameter.do_not_specialize:
        return 1
    integer = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    return integer + (":16" if value % 16 == 0 and not parameter.do_not_specialize else "")


def _triton_dtype(tensor: Any) -> str:
    return TRITON_TYPES[str(tensor.dtype).removeprefix("torch.")]


@contextmanager
def _record_numba(launches: list[Launch]) -> Iterator[None]:
    from weft.backends import numba_jit

    if numba_jit.SIMULATED:
        yield  # the simulator compiles nothing, so its launches are not recorded
        return

    def configured(kernel: Any, shape: tuple[Any, ...]) -> Any:
        # numba's configuration: grid, block, stream, bytes of dynamic shared memory.
        grid, block, *stream_and_shared = shape

        def launch(*arguments: Any) -> None:
            name = kernel.py_func.__name__
            aot_kernel = numba_jit.NumbaAotKernel(
                label=name, kernel=kernel, signature=", ".join(map(_numba_type, arguments))
            )
            launches.append(
                Launch(
                    kernel=name,
                    aot_kernel=aot_kernel,
                    grid=_dimensions(grid),
                    block=math.prod(_dimensions(block)),
                    shared=stream_and_shared[1] if len(stream_and_shared) > 1 else 0,
                )
            )

        return launch

    # numba has no public name for the dispatcher class whose indexing makes a launch.
    dispatcher = type(numba_jit.cuda.jit(lambda: None))
    with (
        mock.patch.object(dispatcher, "__getitem__", configured),
        # A meta tensor has no memory that numba could describe.
        mock.patch.object(numba_jit.cuda, "as_cuda_array", lambda tensor: tensor),
        mock.patch.object(numba_jit, "_stream", lambda *_: 0),
    ):
        yield


def _numba_type(value: Any) -> str:
    if not hasattr(value, "data_ptr"):
        return "float64" if isinstance(value, float) else "int64"
    dims = [":"] * value.dim()
    if dims and value.is_contiguous():
        dims[-1] = "::1"
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}[{', '.join(dims)}]" if dims else dtype


def _dimensions(grid: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in grid) if isinstance(grid, tuple | list) else (int(grid),)
