"""Launches by Triton that are repeated with other addresses, by a launcher that needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.backends import generated_call, nvrtc, recorded_call, triton_jit
from weft.dispatch import repeated_calls
from weft.dispatch.repeated_calls import repeated_call


def values(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Let Triton's launchers, which no compiler made, record what they pass to the compiled function."""
    nvidia = pytest.importorskip("triton.backends.nvidia.driver")
    seen: list[Any] = []
    active = SimpleNamespace(
        get_current_device=lambda: 0,
        utils=SimpleNamespace(fill_tma_descriptor=lambda pointer, *layout: ("map", pointer, *layout)),
    )
    monkeypatch.setattr(triton_jit, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(nvidia.triton.runtime.driver, "_active", active, raising=False)
    monkeypatch.setattr(triton_jit, "_launch", nvidia.CudaLauncher.__call__, raising=False)
    monkeypatch.setattr(recorded_call, "noting", [triton_jit._noting_launches])
    monkeypatch.setattr(recorded_call, "launch_hooks", [triton_jit._is_hooked])
    monkeypatch.setattr(generated_call, "launch_hooks", [triton_jit._is_hooked])
    monkeypatch.setattr(nvrtc, "_current_stream", lambda: lambda device: 7)
    monkeypatch.setattr(repeated_calls, "records_on_cpu", True)

    def launcher(signature: dict[int, str], metadata: Any) -> Any:
        cuda_launcher = object.__new__(nvidia.CudaLauncher)
        cuda_launcher.num_ctas, cuda_launcher.launch_cooperative_grid, cuda_launcher.launch_pdl = (
            1,
            False,
            True,
        )
        cuda_launcher.global_scratch_size = cuda_launcher.profile_scratch_size = 0
        cuda_launcher.global_scratch_align = cuda_launcher.profile_scratch_align = 1
        cuda_launcher.launch = nvidia.wrap_handle_tensordesc(_Compiled(seen), signature, metadata)
        return cuda_launcher

    yield [launcher, seen]


class _Compiled:
    """Stand in for the function that Triton compiles to launch a kernel, which is not written in Python."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def __call__(self, *arguments: Any) -> None:
        self.seen.append(arguments)


def addresses(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with tensors as the addresses that Triton reads from them."""
    return tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)


def test_a_launch_by_triton_is_repeated_with_other_addresses_and_maps(launchers: list[Any]) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    new, seen = launchers
    plain = new({0: "*bf16", 1: "*bf16", 2: "i32", 3: "constexpr"}, None)
    layout = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [16, 64], "fp4_padded": False}
    described = new({0: "tensordesc<bf16[16, 64]>", 1: "*bf16"}, [layout])
    head = (5, 2, 1, 7, 99, ("packed",), None, None, None)

    def forward(x: torch.Tensor) -> torch.Tensor:
        scratch, y = torch.empty_like(x), torch.empty_like(x)
        plain(*head, x, scratch, 64, torch.bfloat16)
        described(*head, TensorDescriptor(scratch, [64, 64], [64, 1], [16, 64]), y)
        return y

    fallbacks: list[Any] = []
    again = repeated_call(forward, (values(64, 64),), lambda *x: fallbacks.append(x))
    assert again is not None
    for _ in range(3):
        x = values(64, 64)
        seen.clear()
        y = again(x)
        repeated_launches = [addresses(one) for one in seen]
        seen.clear()
        expected_y = forward(x)
        scratch = repeated_launches[0][-3]
        expected_launches = [addresses(one) for one in seen]
        swapped = {expected_launches[0][-3]: scratch, expected_y.data_ptr(): y.data_ptr()}

        def renamed(value: Any, swapped: dict[int, int] = swapped) -> Any:
            if isinstance(value, tuple) and value[:1] == ("map",):
                return (value[0], swapped[value[1]], *value[2:])
            return swapped.get(value, value) if isinstance(value, int) else value

        assert repeated_launches == [tuple(map(renamed, one)) for one in expected_launches]
    hooks = triton_jit.triton.knobs.runtime.launch_enter_hook
    hooks.add(print)
    try:
        again(x)
    finally:
        hooks.remove(print)
    assert fallbacks == [(x,)]
