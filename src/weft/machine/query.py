"""Queries of this machine: whether there is a GPU, and the ``Device`` that describes it or the CPU."""

from __future__ import annotations

from functools import cache

from weft.core import WeftError
from weft.machine import cpu, driver, gpu
from weft.machine.device import Device

KINDS = ("cuda", "cpu")
ASSUMED_CACHE = 64 << 20  # bytes, where the last-level cache cannot be found: too large is safe


@cache
def gpu_reason() -> str:
    """Return why no GPU can be used here, as a user can act on it; empty if one can."""
    first = driver.find()
    if first.reason:
        return first.reason
    if driver.torch_cuda() is None:
        return (
            f"there is a GPU ({first.name}), but the PyTorch installed here is not built for CUDA; "
            "install one that is: https://pytorch.org/get-started/locally"
        )
    return ""


def has_gpu() -> bool:
    """True if an NVIDIA GPU can be used here: driver, card, and a PyTorch built for CUDA.

    The query imports no torch, waits at most ``driver.TIMEOUT`` seconds, and runs once in a process.
    """
    return not gpu_reason()


def default_device() -> str:
    """Return ``"cuda"`` if a GPU can be used, else ``"cpu"``."""
    return "cuda" if has_gpu() else "cpu"


def known_kind(kind: str | None) -> str:
    """Return ``kind`` or the default. Raise :class:`WeftError` for another word or a missing GPU."""
    kind = kind or default_device()
    if kind not in KINDS:
        raise WeftError("device", expected="cuda or cpu", got=kind)
    if kind == "cuda" and not has_gpu():
        raise WeftError("device cuda", expected="a GPU", got="none", hint=gpu_reason())
    return kind


def query(kind: str | None = None) -> Device:
    """Return the device of this kind (``"cuda"``: CUDA's device 0); by default :func:`default_device`.

    Clocks are those of this moment. Raises :class:`WeftError` for ``"cuda"`` without a GPU.
    """
    return gpu.describe() if known_kind(kind) == "cuda" else cpu.describe()


@cache
def l2_bytes(kind: str | None = None) -> int:
    """Return the size of the last-level cache in bytes, which inputs must exceed to be cold.

    If it cannot be found it is taken as ``ASSUMED_CACHE``: too large a value only costs memory.
    """
    return query(kind).l2_bytes or ASSUMED_CACHE
