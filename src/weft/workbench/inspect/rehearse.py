"""A rehearsal: an implementation's host code runs, on tensors with no memory, and launches nothing.

What it would have launched is written down: the kernel, its grid and block, its dynamic shared
memory. So a case is known to run these kernels, compiled so, with no GPU. Tensors are on PyTorch's
meta device; what the host code asks of the GPU is answered for the target's usual device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from weft.core import BACKWARD, Case, Implementation, Operator, WeftError
from weft.machine.capability import multiprocessor
from weft.workbench.bind import apart, graded
from weft.workbench.inputs import place

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
    """One launch that a case makes: a kernel's name, of which specimen, and how it was launched.

    ``block`` is threads a block, or None where the compiler settles it (Triton's warps); ``shared``
    the dynamic shared memory in bytes, likewise.
    """

    kernel: str
    specimen: Any
    grid: tuple[int, ...]
    block: int | None
    shared: int | None

    @property
    def key(self) -> tuple[Any, str]:
        """The same for launches of one compiled kernel."""
        return identity(self.specimen), self.kernel


def identity(specimen: Any) -> Any:
    """Equal for specimens that compile to the same code, whatever their labels."""
    if hasattr(specimen, "defines"):
        return (specimen.file, specimen.defines, specimen.options)
    kernel = getattr(specimen.kernel, "__name__", str(specimen.kernel))
    if hasattr(specimen, "num_warps"):
        typed = tuple(specimen.signature.items())
        return (kernel, typed, specimen.num_warps, specimen.num_stages)
    return (kernel, specimen.signature.replace(" ", ""))


def rehearse(
    operator: Operator, implementation: Implementation, case: Case, direction: str, arch: int
) -> list[Launch]:
    """The launches of one call, in their order; raises what the host code raises.

    An implementation whose backward is left to autograd has none to rehearse: :class:`WeftError`.
    """

    if direction == BACKWARD and implementation.backward is None:
        raise WeftError(
            f"{operator.name} {implementation.name} has no backward of its own",
            hint="autograd goes through its forward; look at --direction forward",
        )
    launches: list[Launch] = []
    with _no_device(launches, implementation.backend, arch):
        inputs = [place(spec, "meta").tensor for spec in case.inputs]
        params: Mapping[str, Any] = case.params
        if direction != BACKWARD:
            implementation.forward(*inputs, **params)
            return launches
        # The shape and dtype of the output are the function's, whoever computes it.
        output = implementation.forward(*inputs, **params)
        launches.clear()
        saved = operator.save(tuple(inputs), output)
        assert implementation.backward is not None
        implementation.backward(*apart(operator, graded(operator, output)), *saved, **params)
    return launches


@contextmanager
def _no_device(launches: list[Launch], backend: str, arch: int) -> Iterator[None]:
    """Launches are written down, and questions to the device answered for ``sm_<arch>``."""
    import torch

    sm = multiprocessor(arch)
    properties = SimpleNamespace(
        multi_processor_count=sm.usual_units,
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
        "current_stream": lambda *_: SimpleNamespace(cuda_stream=0),
        "is_current_stream_capturing": lambda: False,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        if backend == "cuda":
            stack.enter_context(_cuda(launches))
        elif backend == "triton":
            stack.enter_context(_triton(launches, sm.shared_per_block, sm.usual_units))
        elif backend == "numba":
            stack.enter_context(_numba(launches))
        yield


@contextmanager
def _cuda(launches: list[Launch]) -> Iterator[None]:
    from weft.backends.nvrtc import CudaSource

    def kernel(source: CudaSource, name: str) -> Any:
        def launch(
            grid: Any, block: Any, *arguments: Any, shared: int = 0, overlap: bool = False
        ) -> None:
            made = Launch(
                kernel=name, specimen=source, grid=_tuple(grid), block=_all(block), shared=shared
            )
            launches.append(made)

        return launch

    with mock.patch.object(CudaSource, "__getitem__", kernel):
        yield


@contextmanager
def _triton(launches: list[Launch], shared: int, units: int) -> Iterator[None]:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        specimen, values = _specimen(kernel, arguments, named)
        shape = _tuple(grid(values) if callable(grid) else grid)
        name = kernel.fn.__name__
        launches.append(Launch(kernel=name, specimen=specimen, grid=shape, block=None, shared=None))

    told = {"max_shared_mem": shared, "multiprocessor_count": units}
    utils = SimpleNamespace(get_device_properties=lambda *_: told)
    before = driver._active
    driver.set_active(SimpleNamespace(utils=utils, get_current_device=lambda: 0))
    try:
        with mock.patch.object(JITFunction, "run", run):
            yield
    finally:
        driver._active = before


def _specimen(kernel: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """What Triton compiles for a call: its arguments' types, specialised as at a launch."""
    from weft.backends.triton_jit import TritonSpecimen

    own = {n: v for n, v in named.items() if n in kernel.arg_names}
    bound = kernel.signature.bind(*arguments, **own)
    bound.apply_defaults()
    signature = {p.name: _kind(p, bound.arguments[p.name]) for p in kernel.params}
    made = TritonSpecimen(
        label=kernel.fn.__name__,
        kernel=kernel,
        signature=signature,
        num_warps=named.get("num_warps", 4),
        num_stages=named.get("num_stages", 3),
        extra={n: named[n] for n in ("maxnreg",) if n in named},
    )
    return made, dict(bound.arguments)


def _kind(parameter: Any, value: Any) -> Any:
    """A parameter's type in a specimen's signature, or its value where that is compiled in."""
    if parameter.is_constexpr or value is None or isinstance(value, str):
        return value
    if hasattr(value, "block_shape"):  # a tensor descriptor
        sizes = ", ".join(map(str, value.block_shape))
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""  # Gluon's have one
        return f"tensordesc<{_dtype(value.base)}[{sizes}]{layout}>"
    if hasattr(value, "data_ptr"):
        return f"*{_dtype(value)}" + ("" if value.data_ptr() % 16 == 0 else ":1")
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, float):
        return "fp32"
    if value == 1 and not parameter.do_not_specialize:
        return 1
    wide = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    return wide + (":16" if value % 16 == 0 and not parameter.do_not_specialize else "")


def _dtype(tensor: Any) -> str:
    return TRITON_TYPES[str(tensor.dtype).removeprefix("torch.")]


@contextmanager
def _numba(launches: list[Launch]) -> Iterator[None]:
    from weft.backends import numba_jit

    if numba_jit.SIMULATED:
        yield  # launches in the simulator are no launches of compiled code
        return

    def configured(kernel: Any, shape: tuple[Any, ...]) -> Any:
        grid, block, *rest = shape

        def launch(*arguments: Any) -> None:
            name = kernel.py_func.__name__
            specimen = numba_jit.NumbaSpecimen(
                label=name, kernel=kernel, signature=", ".join(map(_numba_type, arguments))
            )
            shared = rest[1] if len(rest) > 1 else 0
            launches.append(
                Launch(
                    kernel=name,
                    specimen=specimen,
                    grid=_tuple(grid),
                    block=_all(block),
                    shared=shared,
                )
            )

        return launch

    dispatcher = type(numba_jit.cuda.jit(lambda: None))
    with (
        mock.patch.object(dispatcher, "__getitem__", configured),
        mock.patch.object(numba_jit.cuda, "as_cuda_array", lambda tensor: tensor),
        mock.patch.object(numba_jit, "_stream", lambda handle: 0),
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


def _tuple(grid: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in grid) if isinstance(grid, tuple | list) else (int(grid),)


def _all(block: Any) -> int:
    total = 1
    for size in _tuple(block):
        total *= size
    return total
