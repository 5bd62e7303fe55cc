"""Validation of arguments: a clear error before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.core import WeftError
from weft.dispatch.devices import mixed_devices

MAX_EXPANDED = 1 << 36  # 128 GiB of the narrowest dtype: more than one GPU holds


def tensor(where: str, name: str, x: object, dtypes: Sequence[str], dims: range | None = None) -> None:
    """Raise :class:`WeftError` unless ``x`` is a strided tensor on a CPU or CUDA device.

    ``dtypes`` are torch's names; ``dims`` the numbers of dimensions that have an answer.
    """
    if not isinstance(x, torch.Tensor):
        hint = "wrap it: torch.as_tensor(...)"
        raise WeftError(f"{where}: {name}", expected="a tensor", got=type(x).__name__, hint=hint)
    if x.is_nested:
        hint = f"torch.nested.to_padded_tensor({name}, 0.0)"
        raise WeftError(f"{where}: {name}", expected="a dense tensor", got="a nested tensor", hint=hint)
    if x.layout != torch.strided:
        hint = f"{name}.to_dense()"
        raise WeftError(f"{where}: {name}", expected="a dense tensor", got=x.layout, hint=hint)
    if str(x.dtype).removeprefix("torch.") not in dtypes:
        raise WeftError(
            f"{where}: {name}.dtype",
            expected=" or ".join(dtypes),
            got=str(x.dtype).removeprefix("torch."),
            hint=f"{name}.to(torch.{dtypes[0]})",
        )
    if x.device.type not in ("cpu", "cuda"):
        raise WeftError(
            f"{where}: {name}.device",
            expected="cpu or cuda",
            got=x.device.type,
            hint=f"move it: {name}.to('cuda')",
        )
    # Only an expanded tensor can be so large; the call would take hours, or fail for want of memory.
    # A trace would add a guard on its sizes.
    if not torch.compiler.is_compiling() and x.numel() > MAX_EXPANDED and 0 in x.stride():
        hint = "work on the stored part: " + name + ".select(dim, 0)"
        expected = f"at most {MAX_EXPANDED} elements of an expanded tensor"
        raise WeftError(f"{where}: {name}", expected=expected, got=x.numel(), hint=hint)
    if dims is not None and x.dim() not in dims:
        if len(dims) == 1:
            expected = f"{dims.start} dimension{'s' * (dims.start != 1)}"
        else:
            expected = f"{dims.start} or more" if dims.stop > 64 else f"{dims.start} to {dims.stop - 1}"
        raise WeftError(f"{where}: {name}.dim()", expected=expected, got=f"{x.dim()}, {tuple(x.shape)}")


def one_of(where: str, value: object, supported: Sequence[str]) -> None:
    """Raise :class:`WeftError` unless ``value`` is one of these strings."""
    # An array is compared element by element, so that `in` alone would raise.
    if not isinstance(value, str) or value not in supported:
        raise WeftError(where, expected=" or ".join(supported), got=repr(value))


def flag(where: str, value: object) -> None:
    """Raise :class:`WeftError` unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise WeftError(where, expected="True or False", got=f"{value!r:.80}")


def same_device(where: str, names: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise :class:`WeftError` unless two tensors share a device; ``names`` are theirs: "x and weight"."""
    if a.device != b.device:
        first, second = names.split(" and ")
        raise mixed_devices(where, first, second, a.device, b.device)


def same(where: str, names: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise :class:`WeftError` unless two tensors share dtype and device."""
    same_device(where, names, a, b)
    if a.dtype != b.dtype:
        raise WeftError(f"{where}: {names} of one dtype", expected=a.dtype, got=b.dtype)
