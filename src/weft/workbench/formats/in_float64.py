"""A reference run wholly in float64, whatever dtypes its code names: the oracle of a foreign file.

While the mode is on, every floating dtype that the code asks for (``.half()``, ``.to(dtype)``,
``dtype=`` of a factory) becomes float64, and every floating tensor that meets an operation is
float64 first. Random numbers are drawn in the dtype that was asked for and widened afterwards, so
that they are the ones that the reference's own run draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]

# Methods that name a dtype in themselves, and what takes their place.
_NAMED: dict[Function, Function] = {
    getattr(torch.Tensor, name): torch.Tensor.double for name in ("half", "bfloat16", "float")
}
# Drawn as asked for, then widened: the bits that a generator gives depend on the dtype.
_RANDOM = frozenset(
    getattr(torch, name)
    for name in ("rand", "randn", "rand_like", "randn_like", "normal", "bernoulli", "dropout")
)


def _shorter(dtype: object) -> bool:
    floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    return floating and dtype is not torch.float64


def _widened(value: Any) -> Any:
    """A value with every floating dtype and tensor in it made float64."""
    if isinstance(value, torch.Tensor):
        return value.double() if _shorter(value.dtype) else value
    if _shorter(value):
        return torch.float64
    if type(value) in (tuple, list):
        return type(value)(_widened(v) for v in value)
    return value


class _InFloat64(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Function,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RANDOM:
            dtype = kwargs.get("dtype") or (None if args and _tensor(args[0]) else torch.float32)
            return _widened(func(*args, **(kwargs | ({"dtype": dtype} if dtype else {}))))
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__") or (args and name.endswith("_") and name[:2] != "__"):
            # A property, or an operation in place: the tensor itself must stay the one it is.
            rest = tuple(_widened(a) for a in args[1:])
            return func(args[0], *rest, **{k: _widened(v) for k, v in kwargs.items()})
        func = _NAMED.get(func, func)
        wide = {k: v if k == "out" else _widened(v) for k, v in kwargs.items()}
        return _widened(func(*(_widened(a) for a in args), **wide))


def _tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


class in_float64:
    """While entered, torch computes in float64 only; integers and booleans stay what they are."""

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        self.mode = _InFloat64()
        self.mode.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.mode.__exit__(*raised)
        torch.set_default_dtype(self.before)
