"""Torch function modes that run a problem's unmodified code in float64, or on the CPU.

:class:`Float64Mode` makes the code an oracle: every floating dtype that it names (``.half()``,
``.to(dtype)``, ``dtype=`` of a factory) becomes float64, and every floating tensor is widened
before an operation. Random numbers are generated in the requested dtype and widened afterwards, so
that they equal those of the reference's own run.

:func:`cuda_on_cpu` runs files that name ``cuda`` on a machine without a GPU: the named device
becomes the CPU. A verdict reached this way carries :data:`CPU_NOTE`. Code that needs a real GPU (a
launch, a stream, a driver call) still fails and reports that it needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]

CPU_NOTE = "judged on the CPU: cuda in the files was read as cpu"

# Methods whose name contains a dtype, and their replacement.
_CASTS: dict[Function, Function] = {
    getattr(torch.Tensor, name): torch.Tensor.double for name in ("half", "bfloat16", "float")
}
# Generated as requested, then widened: the bits that a generator returns depend on the dtype.
_RANDOM = frozenset(
    getattr(torch, name)
    for name in ("rand", "randn", "rand_like", "randn_like", "normal", "bernoulli", "dropout")
)
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


def _is_short_float(dtype: object) -> bool:
    floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    return floating and dtype is not torch.float64


def _widen(value: Any) -> Any:
    """Convert every floating dtype and tensor in a value to float64."""
    if isinstance(value, torch.Tensor):
        return value.double() if _is_short_float(value.dtype) else value
    if _is_short_float(value):
        return torch.float64
    # Not subclasses: a torch.Size or a named tuple cannot be built from a generator.
    if type(value) in (tuple, list):
        return type(value)(_widen(v) for v in value)
    return value


class _Float64Functions(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Function,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RANDOM:
            like_tensor = bool(args) and isinstance(args[0], torch.Tensor)
            # The default dtype is float64 in this mode, but the reference's own run drew float32.
            dtype = kwargs.get("dtype") or (None if like_tensor else torch.float32)
            return _widen(func(*args, **(kwargs | ({"dtype": dtype} if dtype else {}))))
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__") or (args and name.endswith("_") and name[:2] != "__"):
            # A property or an in-place operation: it must act on this tensor, not on a widened copy.
            rest = tuple(_widen(a) for a in args[1:])
            return func(args[0], *rest, **{k: _widen(v) for k, v in kwargs.items()})
        func = _CASTS.get(func, func)
        # `out` must be written itself, not a widened copy of it.
        wide = {k: v if k == "out" else _widen(v) for k, v in kwargs.items()}
        return _widen(func(*(_widen(a) for a in args), **wide))


class Float64Mode:
    """Context in which torch computes in float64 only; integers and booleans are unchanged."""

    def __enter__(self) -> None:
        self.default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        self.mode = _Float64Functions()
        self.mode.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self.mode.__exit__(*exc_info)
        torch.set_default_dtype(self.default_dtype)


def _cpu_for_cuda(value: Any) -> Any:
    """Return ``cpu`` for a value that names a CUDA device, else the value."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return value


class _CpuFunctions(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        # Not `is`: each access to a property's __get__ makes another object.
        if func == _IS_CUDA:
            return True  # the tensor replaces one on a GPU: `assert x.is_cuda` must hold
        kwargs = {k: _cpu_for_cuda(v) for k, v in (kwargs or {}).items()}
        return func(*(_cpu_for_cuda(a) for a in args), **kwargs)


class _CpuGenerator(torch.Generator):
    """Random generator on the CPU, regardless of the requested device."""

    def __new__(cls, device: object = "cpu") -> _CpuGenerator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Within the context, a named CUDA device means the CPU."""
    with _CpuFunctions():
        yield


@contextmanager
def cuda_generators_on_cpu() -> Iterator[None]:
    """Like :func:`cuda_on_cpu`, for an input generator: its random generators are on the CPU too.

    ``torch.Generator`` is a type, which a function mode does not intercept, so it is replaced. The
    replacement lasts only while inputs are generated.
    """
    original = torch.Generator
    torch.Generator = _CpuGenerator  # type: ignore[misc]
    try:
        with _CpuFunctions():
            yield
    finally:
        torch.Generator = original  # type: ignore[misc]
