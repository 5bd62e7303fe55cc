"""Queries of this machine: whether there is a GPU, and the ``Device`` that describes it or the CPU."""

from __future__ import annotations

import os
from functools import cache

from weft.core import WeftError
from weft.machine import cpu, driver, gpu, nvml
from weft.machine.device import Device

KINDS = ("cuda", "cpu")
VISIBLE = "CUDA_VISIBLE_DEVICES"
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


def select_gpu(device: str) -> str:
    """Return the kind of ``device``. ``cuda:1`` makes that GPU the only one that this process sees.

    The variable ``CUDA_VISIBLE_DEVICES`` does so. CUDA then numbers this GPU 0, here and in processes that
    are started later, and everything that asks for the first GPU gets it. CUDA reads the variable when it
    starts, so this comes first in a process.

    Raises:
        WeftError: ``cuda:`` is not followed by a number, there is no such GPU, or CUDA has started.
    """
    kind, colon, number = device.partition(":")
    if kind != "cuda" or not colon:
        return device
    if not (number.isascii() and number.isdecimal()):
        raise WeftError("device", expected="cpu, cuda, or cuda:N with N from 0", got=device)
    before = os.environ.get(VISIBLE)
    visible = None if before is None else [entry.strip() for entry in before.split(",") if entry.strip()]
    if visible is not None and int(number) >= len(visible):
        expected = f"cuda:0 to cuda:{len(visible) - 1}" if visible else "a visible GPU"
        raise WeftError(
            f"device {device}",
            expected=expected,
            got=f"{VISIBLE}={before}",
            hint=f"change or unset {VISIBLE}",
        )
    if driver.find.cache_info().currsize and not driver.find().reason:
        hint = f"set {VISIBLE}={number} for the whole process"
        raise WeftError(
            f"device {device}", expected="a choice before CUDA starts", got="CUDA started", hint=hint
        )
    os.environ[VISIBLE] = number if visible is None else visible[int(number)]
    first = driver.find()
    if first.reason:
        _restore(before)
        count = nvml.count()
        expected = f"cuda:0 to cuda:{count - 1}" if count else "a GPU of this number"
        hint = "weft device lists the GPUs" if count else first.reason
        raise WeftError(f"device {device}", expected=expected, got="none", hint=hint)
    return kind


def _restore(visible: str | None) -> None:
    if visible is None:
        del os.environ[VISIBLE]
    else:
        os.environ[VISIBLE] = visible


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
