"""Repeated products: a launch of a kind that was seen before has the addresses of its own tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from weft.backends.nvrtc import CudaSource, Kernel
from weft.ops._common.hopper import tensor_map
from weft.ops._common.hopper.tensor_map import TensorMap
from weft.ops._common.products import wgmma
from weft.ops._common.products.wgmma import Epilogue

TYPE = wgmma.MatmulArguments


def fields_of(structure: Any) -> tuple[str, ...]:
    return tuple(field[0] for field in structure._fields_)


class RecordedKernel(Kernel):
    """A kernel that keeps the structures of its launches: those of calls, and those of repeated calls."""

    def __init__(self) -> None:
        self.called: list[Any] = []
        self.repeated: list[Any] = []

    def __call__(self, grid: Any, block: Any, *arguments: Any, **options: Any) -> None:
        if fields_of(arguments[0]) == fields_of(TYPE()):  # and not the kernel that adds partial products
            self.called.append(TYPE.from_buffer_copy(arguments[0]))

    def prepare_structure(
        self, grid: Any, block: Any, *, shared: int = 0, overlap: bool = False
    ) -> Callable[[int], None]:
        def launch(pointer: int) -> None:
            address = ctypes.c_void_p.from_address(pointer).value
            assert address is not None
            self.repeated.append(TYPE.from_buffer_copy(TYPE.from_address(address)))

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedKernel]:
    recorded = RecordedKernel()
    monkeypatch.setattr(CudaSource, "__getitem__", lambda self, name: recorded)
    monkeypatch.setattr(wgmma, "num_sms", lambda device: 132)
    monkeypatch.setattr(wgmma, "max_clusters", lambda kernel, config, device: 132 // config.cluster)
    # Maps without a driver: the words are the address, the rows and the rows of a box.
    monkeypatch.setattr(
        tensor_map,
        "_encode",
        lambda pointer, dtype, columns, rows, row_bytes, box: TensorMap(
            (ctypes.c_uint64 * 16)(pointer, columns, rows, row_bytes, box)
        ),
    )
    monkeypatch.setattr(wgmma, "_REPEATED", wgmma.LaunchCache())
    yield recorded


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def call(epilogue: Epilogue, m: int = 256) -> tuple[dict[str, int], Any]:
    """Multiply new tensors; return the addresses that the kernel must get, and the product."""
    a, b = half(m, 128), half(192, 128)
    bias = None if epilogue == Epilogue.PLAIN else half(192)
    residual = half(m, 192) if epilogue == Epilogue.RESIDUAL else None
    out = wgmma.forward(a, b.t(), epilogue, bias, residual)
    c, extra = out if epilogue == Epilogue.GELU_PRE else (out, residual)
    tensors = {"a": a, "b": b, "c": c, "extra": extra, "bias": bias}
    call.alive.append(tensors)  # type: ignore[attr-defined]  # so that no address comes twice
    return {name: 0 if x is None else x.data_ptr() for name, x in tensors.items()}, c


call.alive = []  # type: ignore[attr-defined]


def addresses(structure: Any) -> dict[str, int]:
    maps = {name: int(getattr(structure, name).opaque[0]) for name in ("a", "b", "c", "extra")}
    return {**maps, "bias": int(structure.bias or 0)}


@pytest.mark.parametrize("epilogue", [Epilogue.PLAIN, Epilogue.BIAS, Epilogue.GELU_PRE, Epilogue.RESIDUAL])
def test_a_repeated_call_has_its_own_addresses_and_nothing_else_changed(
    kernel: RecordedKernel, epilogue: Epilogue
) -> None:
    first, _ = call(epilogue)
    assert addresses(kernel.called[0]) == first
    for _ in range(3):
        expected, c = call(epilogue)
        assert addresses(kernel.repeated[-1]) == expected and expected != first
        assert c.shape == (256, 192) and c.dtype == torch.bfloat16
    assert len(kernel.called) == 1 and len(kernel.repeated) == 3
    again = kernel.repeated[-1]
    for name in ("row_tiles", "column_tiles", "k_steps", "splits", "rows", "columns"):
        assert getattr(again, name) == getattr(kernel.called[0], name)
    for name in ("a", "b", "c"):  # but for the address the same map
        assert list(getattr(again, name).opaque)[1:] == list(getattr(kernel.called[0], name).opaque)[1:]


def test_another_kind_of_call_is_not_repeated(kernel: RecordedKernel) -> None:
    call(Epilogue.BIAS)
    call(Epilogue.BIAS, m=384)
    call(Epilogue.PLAIN)
    wgmma.forward(half(256, 136)[:, 8:], half(192, 128).t(), Epilogue.BIAS, half(192))  # another stride
    assert len(kernel.called) == 4 and not kernel.repeated


def test_a_bias_between_two_multiples_of_16_bytes_is_not_repeated(kernel: RecordedKernel) -> None:
    call(Epilogue.BIAS)
    wgmma.forward(half(256, 128), half(192, 128).t(), Epilogue.BIAS, half(200)[1:193])
    assert len(kernel.called) == 2 and not kernel.repeated
    assert addresses(kernel.called[1])["bias"] % 16 == 0  # of a copy


def test_a_product_with_a_divided_k_is_not_repeated(kernel: RecordedKernel) -> None:
    for _ in range(2):
        wgmma.forward(half(128, 16384), half(128, 16384).t())
    assert kernel.called[0].splits > 1 and not kernel.repeated
