"""Queries of NVIDIA's driver through ctypes: presence, limits and links of GPUs. No torch.

``import torch`` takes seconds, and a driver's first answer may never come (in a container with half a
driver). The query therefore runs in a thread that is abandoned after ``TIMEOUT`` seconds.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

TIMEOUT = 20.0  # seconds; eight GPUs without persistence mode were seen to take some ten

# cuDeviceGetAttribute's numbers, which NVIDIA keeps stable (cuda.h, enum CUdevice_attribute).
ATTRIBUTES = {
    "threads_per_block": 1,
    "shared_per_block": 8,
    "warp": 10,
    "registers_per_block": 12,
    "clock_khz": 13,
    "sms": 16,
    "ecc": 32,
    "memory_clock_khz": 36,
    "bus_width_bits": 37,
    "l2_bytes": 38,
    "threads_per_sm": 39,
    "major": 75,
    "minor": 76,
    "shared_per_sm": 81,
    "registers_per_sm": 82,
    "shared_per_block_optin": 97,
    "blocks_per_sm": 106,
}

# What cuInit's errors mean to a user (cuda.h, enum CUresult).
ERRORS = {
    3: "this process was forked after CUDA had started; start it with 'spawn'",
    100: "it sees no GPU; look at CUDA_VISIBLE_DEVICES and at what the container was given",
    802: "the system is not ready; is the fabric manager running?",
    803: "its library and its kernel module are of two versions; restart the machine",
    804: "its compatibility package does not take this card; remove cuda-compat",
}


@dataclass(frozen=True, kw_only=True)
class DriverInfo:
    """Answer of the driver: the number of visible GPUs and one GPU's attributes, or why there is none."""

    count: int = 0
    reason: str = ""
    name: str | None = None
    pci: str | None = None
    memory_bytes: int | None = None
    cuda: str | None = None
    attributes: dict[str, int] = field(default_factory=dict)

    @property
    def arch(self) -> str | None:
        """The architecture, e.g. ``sm_90``; None if it is unknown."""
        major, minor = (self.attributes.get(part) for part in ("major", "minor"))
        return None if major is None or minor is None else f"sm_{major}{minor}"


def library() -> ctypes.CDLL | None:
    """Return the driver's library, or None if no driver is installed."""
    # libcuda.so alone may be the toolkit's stub, so that the driver's own name comes first.
    for name in ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _ask(lib: ctypes.CDLL) -> DriverInfo:
    # Only queries follow: no context is created, so that the GPU's memory and a later fork are not affected.
    status = lib.cuInit(0)
    if status:
        why = ERRORS.get(status, "see whether nvidia-smi works")
        return DriverInfo(reason=f"the NVIDIA driver does not start (error {status}): {why}")
    count = ctypes.c_int()
    if lib.cuDeviceGetCount(ctypes.byref(count)) or count.value < 1:
        return DriverInfo(reason="the NVIDIA driver sees no GPU")
    first = _describe(lib, 0)
    if first is None:
        return DriverInfo(reason="the NVIDIA driver cannot open its first GPU")
    version, cuda = ctypes.c_int(), None
    if not lib.cuDriverGetVersion(ctypes.byref(version)):
        cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return replace(first, count=count.value, cuda=cuda)


def _describe(lib: ctypes.CDLL, index: int) -> DriverInfo | None:
    """Return name, address, memory and attributes of one GPU; None if the driver cannot open it."""
    device = ctypes.c_int()
    if lib.cuDeviceGet(ctypes.byref(device), index):
        return None
    text = ctypes.create_string_buffer(256)
    name = pci = memory = None
    if not lib.cuDeviceGetName(text, 256, device):
        name = text.value.decode(errors="replace")
    if not lib.cuDeviceGetPCIBusId(text, 256, device):
        pci = text.value.decode(errors="replace")
    size = ctypes.c_size_t()
    if not lib.cuDeviceTotalMem_v2(ctypes.byref(size), device):
        memory = size.value
    attributes = {}
    value = ctypes.c_int()
    for word, number in ATTRIBUTES.items():
        if not lib.cuDeviceGetAttribute(ctypes.byref(value), number, device):
            attributes[word] = value.value
    return DriverInfo(name=name, pci=pci, memory_bytes=memory, attributes=attributes)


def identify(index: int) -> DriverInfo:
    """Return name, address, memory and attributes of a GPU that :func:`find` counted."""
    lib = library()
    return (lib and _describe(lib, index)) or DriverInfo(reason="the NVIDIA driver cannot open this GPU")


def can_access_peer(index: int, other: int) -> bool | None:
    """True if kernels on one GPU can access the memory of another; None if the driver gives no answer."""
    lib = library()
    if lib is None:
        return None
    device, peer, answer = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    failed = lib.cuDeviceGet(ctypes.byref(device), index) or lib.cuDeviceGet(ctypes.byref(peer), other)
    if failed or lib.cuDeviceCanAccessPeer(ctypes.byref(answer), device, peer):
        return None
    return bool(answer.value)


_assumed: list[DriverInfo] = []


@contextmanager
def assume(info: DriverInfo) -> Iterator[None]:
    """Let :func:`find` return ``info``, in a process that must not open the driver; it forks others."""
    _assumed.append(info)
    find.cache_clear()
    try:
        yield
    finally:
        _assumed.pop()
        find.cache_clear()


@cache
def find() -> DriverInfo:
    """Query the driver, once in a process and for at most ``TIMEOUT`` seconds."""
    if _assumed:
        return _assumed[-1]
    # Answered without asking the driver.
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles"):
        return DriverInfo(reason="CUDA_VISIBLE_DEVICES hides every GPU; unset it to use one")
    lib = library()
    if lib is None:
        return DriverInfo(reason="no NVIDIA driver is installed here")
    answer: list[DriverInfo] = []

    def ask() -> None:
        try:
            answer.append(_ask(lib))
        except AttributeError as error:  # a stub library, as CUDA toolkits ship for linking
            answer.append(DriverInfo(reason=f"the NVIDIA driver's library is incomplete: {error}"))

    # A daemon: a driver call that never returns must not keep the process from exiting.
    thread = threading.Thread(target=ask, daemon=True, name="weft-driver")
    thread.start()
    thread.join(TIMEOUT)
    if not answer:
        return DriverInfo(reason=f"the NVIDIA driver gave no answer within {TIMEOUT:.0f} s")
    return answer[0]


def open_in_background() -> threading.Thread | None:
    """Create the first GPU's context in a thread, while this process imports torch, which uses the same one.

    It is the device's primary context, and stays until the process ends. Return the thread; None without a
    GPU. A failure is left for torch to report.
    """
    lib = library()
    if lib is None or find().reason:
        return None

    def retain() -> None:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if not lib.cuDeviceGet(ctypes.byref(device), 0):
            lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

    thread = threading.Thread(target=retain, daemon=True, name="weft-context")
    thread.start()
    return thread


@cache
def torch_cuda() -> str | None:
    """Return the CUDA version that the installed torch is built for, without importing torch.

    None means a build without CUDA, or no torch.
    """
    # version.py is read as text: importing torch takes seconds, and `weft --help` may take 0.3 s.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else None
