"""Kernel launches, as far as they can be tested without a GPU: parameters and overlapping launches."""

from __future__ import annotations

import ctypes
import inspect
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft import ops
from weft.backends import cubin, nvrtc
from weft.backends.nvrtc import CudaSource, Kernel
from weft.ops.activations import with_cuda as activations
from weft.ops.embedding import with_cuda as embedding
from weft.ops.embedding.plan import FUSED

# CUlaunchConfig and the start of CUlaunchAttribute in cuda.h: grid, block, shared memory, stream, attributes.
CONFIG = struct.Struct("<7I4xQQI4x")
ATTRIBUTE = struct.Struct("<I4xI")
PROGRAMMATIC_STREAM_SERIALIZATION = 6


@pytest.mark.parametrize(("capability", "able"), [((8, 0), False), ((9, 0), True)])
def test_a_configuration_is_what_the_driver_reads(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], able: bool
) -> None:
    pytest.importorskip("cuda.bindings.driver")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for overlap in (False, True):
        config = nvrtc._launch_config((3, 2), 64, 16, overlap, 0x1234)
        *sizes, stream, attributes, count = CONFIG.unpack(ctypes.string_at(config.getPtr(), CONFIG.size))
        assert (sizes, stream) == ([3, 2, 1, 64, 1, 1, 16], 0x1234)
        assert count == (overlap and able)
        if count:
            attribute = ATTRIBUTE.unpack(ctypes.string_at(attributes, ATTRIBUTE.size))
            assert attribute == (PROGRAMMATIC_STREAM_SERIALIZATION, 1)


class Driver:
    """A driver that reads the parameters of each launch as the kernel declares them (formats of struct)."""

    def __init__(self, declared: str) -> None:
        self.declared = declared
        self.launches: list[tuple[Any, ...]] = []
        self.stream = 7
        self.status = 0
        self.during: Callable[[], None] | None = None

    def launch(self, config: int, function: int, parameters: int, extra: None) -> int:
        if self.during:
            again, self.during = self.during, None
            again()
        addresses = (ctypes.c_void_p * len(self.declared)).from_address(parameters)
        read = [
            struct.unpack(f"<{kind}", ctypes.string_at(address, struct.calcsize(kind)))[0]
            for kind, address in zip(self.declared, addresses, strict=True)
        ]
        fields = CONFIG.unpack(ctypes.string_at(config, CONFIG.size))
        self.launches.append((function, fields[0], fields[3], fields[6], fields[7], *read))
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    pytest.importorskip("cuda.bindings.driver")
    played = Driver("QQqdi")
    monkeypatch.setattr(nvrtc, "_launcher", lambda: played.launch)
    monkeypatch.setattr(nvrtc, "_current_stream", lambda: lambda device: played.stream)
    return played


def new_kernel() -> Kernel:
    return Kernel("k", SimpleNamespace(handle=42), 0)


def test_a_launch_passes_each_argument_as_the_kernel_declares_it(driver: Driver) -> None:
    x, y = torch.zeros(3), torch.zeros(3)
    kernel = new_kernel()
    expected = (42, 5, 64, 256, 7, x.data_ptr(), y.data_ptr(), -(1 << 62), 0.1, 12)
    for _ in range(3):
        kernel(5, 64, x, y, -(1 << 62), 0.1, 12, shared=256)
    prepared = kernel.prepare(5, 64, x, y, -(1 << 62), 0.1, 12, shared=256)
    prepared(x.data_ptr(), y.data_ptr())
    prepared(y.data_ptr(), x.data_ptr())
    swapped = (*expected[:5], y.data_ptr(), x.data_ptr(), *expected[7:])
    assert driver.launches == [*[expected] * 4, swapped]
    kernel(5, 64, x, 0, 3, 2.5, True)  # addresses and flags may be integers
    assert driver.launches[-1] == (42, 5, 64, 0, 7, x.data_ptr(), 0, 3, 2.5, 1)


def test_addresses_that_come_after_scalars_are_put_where_they_belong(driver: Driver) -> None:
    driver.declared = "qQdQ"
    x, y = torch.zeros(3), torch.zeros(3)
    kernel = new_kernel()
    kernel(1, 32, 8, x, 0.5, y)
    kernel.prepare(1, 32, 8, x, 0.5, y)(x.data_ptr(), y.data_ptr())
    assert driver.launches == [(42, 1, 32, 0, 7, 8, x.data_ptr(), 0.5, y.data_ptr())] * 2


def test_a_launch_takes_the_stream_that_is_current_then(driver: Driver) -> None:
    driver.declared = "Q"
    x = torch.zeros(3)
    kernel = new_kernel()
    prepared = kernel.prepare(1, 32, x)
    for driver.stream in (7, 8, 7):
        kernel(1, 32, x)
        prepared(x.data_ptr())
    assert [one[4] for one in driver.launches] == [7, 7, 8, 8, 7, 7]


def test_a_launch_within_another_has_parameters_of_its_own(driver: Driver) -> None:
    """Simulate a launch by another thread while the driver reads the parameters."""
    driver.declared = "Qq"
    x = torch.zeros(3)
    kernel = new_kernel()
    prepared = kernel.prepare(1, 32, x, 5)
    for launch, inner in (
        (lambda: kernel(1, 32, x, 1), lambda: kernel(1, 32, x, 2)),
        (lambda: prepared(1), lambda: prepared(2)),
    ):
        driver.during = inner
        launch()
    assert [one[5:] for one in driver.launches] == [(x.data_ptr(), 2), (x.data_ptr(), 1), (2, 5), (1, 5)]
    # Each pool has two buffers, free for the next launch.
    pool = inspect.getclosurevars(prepared).nonlocals["pool"]
    assert len(kernel._pool.free) == 2 and len(pool.free) == 2


def test_values_of_other_types_get_other_buffers_and_unknown_types_are_refused(driver: Driver) -> None:
    driver.declared = "q"
    kernel = new_kernel()
    kernel(1, 32, 3)
    driver.declared = "d"
    kernel(1, 32, 0.5)
    driver.declared = "qq"
    kernel(1, 32, 3, 4)
    assert [one[5:] for one in driver.launches] == [(3,), (0.5,), (3, 4)]
    with pytest.raises(TypeError, match="a tensor, an int, a float or a Float32, not str"):
        kernel(1, 32, "3")


def test_an_error_of_the_driver_names_the_kernel(driver: Driver) -> None:
    driver.declared, driver.status = "q", 1
    kernel = new_kernel()
    for launch in (lambda: kernel(1, 32, 3), kernel.prepare(1, 32, 3)):
        with pytest.raises(RuntimeError, match=r"CUDA_ERROR_INVALID_VALUE.* at the launch of k"):
            launch()


def test_a_thread_without_a_context_gets_the_devices(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward may be the first work of an autograd thread: the context is bound before the launch."""
    driver.declared, driver.status = "q", nvrtc.INVALID_CONTEXT
    bound: list[int] = []

    def bind(device: int) -> None:
        bound.append(device)
        driver.status = 0

    monkeypatch.setattr(nvrtc, "_bind_context", bind)
    new_kernel()(1, 32, 3)
    assert bound == [0] and len(driver.launches) == 2


@pytest.mark.gpu
def test_the_first_work_of_a_thread_may_be_a_launch() -> None:
    x = torch.randn(64, 1024, device="cuda")
    expected = ops.softmax(x, impl="cuda")
    torch.cuda.synchronize()
    outputs: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: outputs.append(ops.softmax(x, impl="cuda")))
    thread.start()
    thread.join()
    assert torch.equal(outputs[0], expected)


def chains(overlap: bool) -> Iterator[list[tuple[CudaSource, str]]]:
    """Yield chains of shipped kernels that one call launches one after the other."""
    sums = activations.bias_gelu_backward_source(
        torch.bfloat16, replace(activations.BACKWARD_CONFIG, overlap=overlap)
    )
    yield [(sums, "bias_gelu_backward_wide"), (sums, "bias_gelu_sum_partials")]
    plan = replace(FUSED, overlap=overlap)
    yield [
        (embedding.partition_source(plan), "embedding_buckets"),
        (embedding.sort_source(torch.bfloat16, 8, plan), "embedding_order"),
        (embedding.backward_source(torch.bfloat16, 8, plan), "embedding_together"),
    ]


def entry(source: CudaSource, name: str, arch: str) -> str:
    every = cubin.ptx(source.compile(arch)).split(".entry ")
    return next(text for text in every if text.startswith(name))


def test_a_kernel_that_overlaps_waits_before_it_reads() -> None:
    """Only inputs of the call are loaded as constant (``nc``): the gradient, and the ids.

    The preceding kernel may still be writing everything else."""
    pytest.importorskip("cuda.bindings")
    assert activations.BACKWARD_CONFIG.overlap and FUSED.overlap
    constant_loads = {"embedding_order": {".v4.u32"}, "embedding_together": {".u64"}}
    for first, *others in chains(True):
        assert "griddepcontrol.wait" not in entry(*first, "sm_90")
        for before in (first, *others[:-1]):
            assert "griddepcontrol.launch_dependents" in entry(*before, "sm_90")
        for source, name in others:
            text = entry(source, name, "sm_90")
            assert text.index("griddepcontrol.wait") < text.index("ld.global")
            constant = {width.split()[0] for width in text.split("ld.global.nc")[1:]}
            assert constant == constant_loads.get(name, set())
        # The last kernel signals nothing: the first kernel of the next call might not wait.
        assert "griddepcontrol.launch_dependents" not in entry(*others[-1], "sm_90")


@pytest.mark.parametrize(("overlap", "arch"), [(True, "sm_80"), (False, "sm_90")])
def test_a_kernel_without_overlap_has_no_dependency_instructions(overlap: bool, arch: str) -> None:
    pytest.importorskip("cuda.bindings")
    for source, name in next(chains(overlap)):
        assert "griddepcontrol" not in entry(source, name, arch)


@pytest.mark.parametrize("header", ["near.cuh", "../far.cuh"])
def test_an_edited_header_is_compiled_anew(
    header: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "ladder").mkdir()
    file = tmp_path / "ladder" / "kernel.cu"
    file.write_text(f'#include "{header}"\nextern "C" __global__ void write(float* y) {{ *y = VALUE; }}\n')
    source = nvrtc.CudaSource(file=file, kernels=("write",), defines=())
    programs = []
    for value in ("1.0f", "2.0f", "1.0f"):
        (file.parent / header).write_text(f"#define VALUE {value}\n")
        programs.append(source.compile("sm_90"))
    assert programs[0] == programs[2] != programs[1]
