"""What is this machine? One frozen ``Device`` for a GPU or a CPU; what is not known is None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from weft.core import WeftError
from weft.machine import driver

KINDS = ("cuda", "cpu")
ASSUMED_CACHE = 64 << 20  # bytes, where the last-level cache cannot be found: too large is safe


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU or a CPU. Sizes in bytes, clocks in MHz, power in watts; None where not known.

    ``units`` are SMs of a GPU and physical cores of a CPU; ``threads`` is how many a process may
    run at once on a CPU. ``l2_bytes`` is the last-level cache, all its parts together. The limits
    from ``warp`` down are a GPU's.
    """

    kind: str
    name: str
    arch: str
    units: int | None = None
    threads: int | None = None
    clock_mhz: float | None = None
    clock_max_mhz: float | None = None
    memory_bytes: int | None = None
    memory_clock_mhz: float | None = None
    memory_clock_max_mhz: float | None = None
    bus_width_bits: int | None = None
    l2_bytes: int | None = None
    caches: Mapping[str, int] = field(default_factory=dict)
    vectors: tuple[str, ...] = ()
    warp: int | None = None
    threads_per_sm: int | None = None
    threads_per_block: int | None = None
    blocks_per_sm: int | None = None
    registers_per_sm: int | None = None
    registers_per_block: int | None = None
    shared_per_sm: int | None = None
    shared_per_block: int | None = None
    shared_per_block_optin: int | None = None
    ecc: bool | None = None
    power_limit_w: float | None = None
    driver: str | None = None
    driver_cuda: str | None = None
    count: int = 1

    def to_json(self) -> dict[str, Any]:
        """Plain data, every field by its name."""
        data = asdict(self)
        data["vectors"] = list(self.vectors)
        return data


@cache
def gpu_reason() -> str:
    """Why no GPU can be used here, as a user can act on it; empty where one can."""
    found = driver.find()
    if found.reason:
        return found.reason
    if driver.torch_cuda() is None:
        return (
            f"there is a GPU ({found.name}), but the PyTorch installed here is not built for CUDA; "
            "install one that is: https://pytorch.org/get-started/locally"
        )
    return ""


def has_gpu() -> bool:
    """Whether an NVIDIA GPU can be used here: driver, card, and a PyTorch built for CUDA.

    Imports no torch, waits at most ``driver.TIMEOUT`` seconds, and is answered once a process.
    """
    return not gpu_reason()


def default_device() -> str:
    """``"cuda"`` where a GPU can be used, else ``"cpu"``."""
    return "cuda" if has_gpu() else "cpu"


def known_kind(kind: str | None) -> str:
    """``kind`` or the default; raises :class:`WeftError` for another word or a GPU not there."""
    kind = kind or default_device()
    if kind not in KINDS:
        raise WeftError("device", expected="cuda or cpu", got=kind)
    if kind == "cuda" and not has_gpu():
        raise WeftError("device cuda", expected="a GPU", got="none", hint=gpu_reason())
    return kind


def query(kind: str | None = None) -> Device:
    """The device of this kind (``"cuda"``: CUDA's device 0), by default :func:`default_device`.

    Clocks are those of this moment. Raises :class:`WeftError` for ``"cuda"`` where there is none.
    """
    if known_kind(kind) == "cuda":
        from weft.machine import gpu

        return gpu.describe()
    from weft.machine import cpu

    return cpu.describe()


@cache
def l2_bytes(kind: str | None = None) -> int:
    """The last-level cache in bytes: what inputs must exceed to be cold.

    Where it cannot be found, ``ASSUMED_CACHE``: a cache taken too large only costs memory.
    """
    return query(kind).l2_bytes or ASSUMED_CACHE
