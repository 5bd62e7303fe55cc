"""Programs, kernels and streams belong to one device each; fake drivers stand for two devices."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.backends import nvrtc
from weft.backends.nvrtc import CudaSource, Kernel

CAPABILITIES = {0: (8, 0), 1: (9, 0)}
STREAM_OFFSET = 32  # of the stream in CUlaunchConfig


class TwoDevices:
    """Two GPUs of different architectures. ``launches`` has (device of the kernel, its stream)."""

    def __init__(self) -> None:
        self.current = 0
        self.compiled: list[str] = []
        self.opted_in: list[tuple[int, int]] = []
        self.wide_clusters: list[tuple[int, int]] = []
        self.launches: list[tuple[int, tuple[int, int]]] = []

    def stream(self) -> Any:
        # The default stream has the same handle on every device.
        return SimpleNamespace(cuda_stream=0, device_index=self.current)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoDevices]:
    core = pytest.importorskip("cuda.core")
    driver = pytest.importorskip("cuda.bindings.driver")
    two = TwoDevices()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: two.current, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: two.current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: two.stream())

    def capability(device: int | None = None) -> tuple[int, int]:
        return CAPABILITIES[two.current if device is None else device]

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)

    def compiled(source: CudaSource, arch: str) -> bytes:
        two.compiled.append(arch)
        return arch.encode()

    def from_cubin(cubin: bytes) -> Any:
        return SimpleNamespace(get_kernel=lambda name: SimpleNamespace(handle=two.current))

    def launch(config: int, function: int, parameters: int, extra: None) -> int:
        (stream,) = struct.unpack("<Q", ctypes.string_at(config + STREAM_OFFSET, 8))
        two.launches.append((function, (stream, two.current)))
        return 0

    def opt_in(attribute: Any, value: int, handle: Any, device: int) -> tuple[int]:
        if attribute == driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            two.opted_in.append((device, value))
        if attribute == driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
            two.wide_clusters.append((device, value))
        return (0,)

    monkeypatch.setattr(CudaSource, "compile", compiled)
    monkeypatch.setattr(core, "ObjectCode", SimpleNamespace(from_cubin=from_cubin))
    monkeypatch.setattr(nvrtc, "_launcher", lambda: launch)
    # The default stream has the same handle on every device.
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(driver, "cuKernelSetAttribute", opt_in)
    monkeypatch.setattr(driver, "cuCtxGetDevice", lambda: (0, two.current))
    monkeypatch.setattr(driver, "cuDeviceGet", lambda index: (0, index))
    monkeypatch.setattr(driver, "cuDeviceGetAttribute", lambda _, device: (0, CAPABILITIES[device][0]))
    caches = [c for c in vars(nvrtc).values() if hasattr(c, "cache_clear")]
    for cached in caches:
        cached.cache_clear()
    yield two
    for cached in caches:
        cached.cache_clear()


SOURCE = {"file": Path("k.cu"), "kernels": ("k",)}


def test_a_program_is_loaded_once_for_each_device_and_for_its_architecture(devices: TwoDevices) -> None:
    source = CudaSource(**SOURCE)  # type: ignore[arg-type]
    for current in (0, 1, 0, 1):
        devices.current = current
        source["k"](1, 32)
    assert devices.compiled == ["sm_80", "sm_90a"]
    # Each kernel and each stream is of the device that is current at the launch.
    assert devices.launches == [(0, (0, 0)), (1, (0, 1))] * 2
    assert source == CudaSource(**SOURCE)  # type: ignore[arg-type]  # loaded or not


def test_more_shared_memory_is_opted_in_on_each_device(devices: TwoDevices) -> None:
    source = CudaSource(**SOURCE)  # type: ignore[arg-type]
    for current in (0, 1, 1):
        devices.current = current
        source["k"](1, 32, shared=100 << 10)
    assert devices.opted_in == [(0, 100 << 10), (1, 100 << 10)]
    assert devices.wide_clusters == [(1, 1)]  # an sm_80 has no clusters


def test_launch_configurations_are_bounded_and_rebuilt(
    devices: TwoDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "MAX_CONFIGS", 4, raising=False)
    kernel: Kernel = CudaSource(**SOURCE)["k"]  # type: ignore[arg-type]
    for grid in (*range(1, 11), 1):
        kernel(grid, 32)
    assert 1 <= len(kernel._configs) <= 4
    assert len(devices.launches) == 11


def test_numba_has_a_stream_for_each_device(devices: TwoDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba.cuda")
    from weft.backends import numba_jit

    launches = []

    class NumbaKernel:
        def __getitem__(self, shape: Any) -> Any:
            launches.append(shape[2])
            return lambda *arguments: None

    monkeypatch.setattr(numba_jit, "SIMULATED", False)
    bound = SimpleNamespace(external_stream=lambda handle: (handle, devices.current))
    monkeypatch.setattr(numba_jit, "cuda", bound)
    for current in (0, 1, 0):
        devices.current = current
        numba_jit.launch(NumbaKernel(), 1, 32)
    assert launches == [(0, 0), (0, 1), (0, 0)]


def test_a_product_is_configured_for_the_shared_memory_of_its_own_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from weft.machine import device_limits
    from weft.ops.matmul import with_cuda

    limits = {0: 163 << 10, 1: 227 << 10}
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(shared_memory_per_block_optin=limits[device.index]),
    )
    device_limits._cached_properties.cache_clear()
    tiles = []
    for index in (0, 1):
        a: Any = SimpleNamespace(shape=(8192, 8192), dtype=torch.bfloat16, device=torch.device("cuda", index))
        tiles.append(with_cuda.choose(a, a, "ieee").tile)
    device_limits._cached_properties.cache_clear()
    assert tiles == [(128, 128), (256, 128)]
