"""The device of a call: it is current while kernels are launched, and all tensors must be on it.

Fake CUDA tensors, which PyTorch creates without a GPU, and a simulated current device stand for two GPUs. The
tests marked ``gpu`` need two real GPUs.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.operator_calls import differentiable_operators, example, example_case
from weft import WeftError, ops
from weft.backends import support
from weft.core import BACKWARD, FORWARD, registry
from weft.dispatch import operator as dispatch


class Current:
    """Simulated current device; records how often it was read and which devices were made current."""

    def __init__(self) -> None:
        self.index = 0
        self.reads = 0
        self.entered: list[int] = []

    def read(self) -> int:
        self.reads += 1
        return self.index

    def device(self, index: int) -> Any:
        return _Entered(self, index)


class _Entered:
    def __init__(self, current: Current, index: int) -> None:
        self.current, self.index = current, index

    def __enter__(self) -> None:
        self.before, self.current.index = self.current.index, self.index
        self.current.entered.append(self.index)

    def __exit__(self, *_: object) -> None:
        self.current.index = self.before


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Current:
    from weft.dispatch import devices

    now = Current()
    monkeypatch.setattr(devices, "current_index", now.read)
    monkeypatch.setattr(torch.cuda, "device", now.device)
    monkeypatch.setattr(dispatch, "refuse_unsupported", lambda *_: None)
    return now


def on_gpu(index: int) -> Any:
    """Stand-in for a plain GPU tensor, with the attributes that the fast path reads."""
    return SimpleNamespace(device=torch.device("cuda", index), requires_grad=False)


def softmax_that_records(current: Current, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make softmax's Triton implementation append the current device to the list that is returned."""
    seen: list[int] = []

    def forward(x: Any) -> Any:
        seen.append(current.index)
        return x

    def backward(grad: Any, y: Any) -> tuple[Any, ...]:
        seen.append(current.index)
        return (grad,)

    recording = replace(registry.implementation("softmax", "triton"), forward=forward, backward=backward)
    monkeypatch.setattr(registry, "implementation", lambda *_: recording)
    return seen


@pytest.mark.parametrize("runner", ["run", "run_plain"])
def test_the_fast_path_makes_the_tensors_device_current(
    current: Current, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    seen = softmax_that_records(current, monkeypatch)
    x = on_gpu(1)
    run = getattr(dispatch._kernel_plan("softmax", "triton", (x,), {}), runner)
    assert run((x,), {}) is x
    assert seen == [1] and current.entered == [1] and current.index == 0


@pytest.mark.parametrize("runner", ["run", "run_plain"])
def test_a_call_on_the_current_device_reads_it_once_and_enters_nothing(
    current: Current, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    seen = softmax_that_records(current, monkeypatch)
    current.index = 1
    x = on_gpu(1)
    run = getattr(dispatch._kernel_plan("softmax", "triton", (x,), {}), runner)
    for _ in range(3):
        run((x,), {})
    assert seen == [1, 1, 1] and current.entered == [] and current.reads == 3


@pytest.mark.parametrize("name", ["softmax", "softmax_backward"])
def test_a_registered_kernel_makes_the_tensors_device_current(
    current: Current, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen = softmax_that_records(current, monkeypatch)
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    operator = getattr(torch.ops.weft, name).default
    with FakeTensorMode():
        x = torch.empty(4, 8, device="cuda:1")
    tensors = (x,) if name == "softmax" else (x, x)
    # Call the CUDA kernel directly, since PyTorch would dispatch fake tensors elsewhere.
    operator.redispatch(cuda, *tensors, "triton")
    assert seen == [1] and current.entered == [1] and current.index == 0


@pytest.mark.parametrize("prepared", [False, True], ids=["step", "begin"])
def test_adamw_steps_on_the_device_of_its_lists(
    current: Current, monkeypatch: pytest.MonkeyPatch, prepared: bool
) -> None:
    module = sys.modules["weft.ops.adamw"]  # the package's attribute of this name is the function
    seen: list[int] = []
    monkeypatch.setattr(module, "_refuse_unsupported", lambda *_: None)
    monkeypatch.setitem(module._RUNS, "triton", lambda lists, numbers: seen.append(current.index))
    with FakeTensorMode():
        # Transposed, since launch tables are cached by address, which a fake tensor does not have.
        lists = [[torch.empty(8, 4, device="cuda:1").t()] for _ in range(4)]
        if prepared:
            numbers = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "step": 1}
            module.begin(*lists, impl="triton")(**numbers)
        else:
            ops.adamw(*lists, step=1, impl="triton")
    assert seen == [1] and current.index == 0


# ---- Several devices in one call


MIXTURES = [
    (name, argument)
    for name in differentiable_operators()
    for inputs in [example(name).inputs]
    if len(inputs) > 1
    for argument in inputs
]


@pytest.mark.parametrize(("name", "argument"), MIXTURES)
def test_tensors_of_two_devices_are_refused_by_name_with_a_hint(name: str, argument: str) -> None:
    call = example(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = {
            key: torch.empty_like(x, device="cuda:1" if key == argument else "cuda:0")
            for key, x in call.inputs.items()
        }
        with pytest.raises(WeftError) as refused:
            getattr(ops, name)(**inputs, **call.params)
    error = refused.value
    assert "on one device" in error.what, error
    assert error.expected in ("cuda:0", "cuda:1") and "on cuda:" in str(error.got)
    assert str(error.hint).startswith("move one of them: ")


def test_a_registered_kernel_refuses_a_mixture_too(current: Current, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = softmax_that_records(current, monkeypatch)
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with FakeTensorMode():
        grad, y = torch.empty(4, 8, device="cuda:0"), torch.empty(4, 8, device="cuda:1")
    with pytest.raises(WeftError, match=r"grad and y on one device.*cuda:0.*y on cuda:1.*y\.to\('cuda:0'\)"):
        torch.ops.weft.softmax_backward.default.redispatch(cuda, grad, y, "triton")
    assert seen == []


@pytest.mark.parametrize("argument", ["params[1]", "grads[0]", "exp_avgs[1]", "exp_avg_sqs[0]"])
def test_adamw_refuses_a_tensor_on_another_device(argument: str) -> None:
    with FakeTensorMode():
        lists = {
            name: [
                torch.empty(4, 4, device="cuda:1" if argument == f"{name}[{i}]" else "cuda:0").t()
                for i in range(2)
            ]
            for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")
        }
        with pytest.raises(WeftError, match=r"on one device: expected cuda:.*got .* on cuda:.*hint"):
            ops.adamw(**lists, step=1)


def test_packed_attention_refuses_lengths_on_another_device() -> None:
    with FakeTensorMode():
        qkv = torch.empty(2, 4, 3 * 2 * 8, device="cuda:0")
        lengths = torch.ones(2, dtype=torch.int32, device="cuda:1")
        with pytest.raises(WeftError, match=r"key_lengths on one device.*cuda:0.*cuda:1.*hint"):
            ops.attention_packed(qkv, 2, key_lengths=lengths)


# ---- On two GPUs


def outputs_and_gradients(name: str, device: str, impl: str) -> list[torch.Tensor]:
    """Return the outputs and gradients of an operator's example call on a device."""
    call = example(name)
    inputs = {key: x.detach().to(device).requires_grad_(x.requires_grad) for key, x in call.inputs.items()}
    outputs = getattr(ops, name)(**inputs, **call.params, impl=impl)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    smooth = [x for x in outputs if x.requires_grad]  # indices have no gradient
    grads = [torch.linspace(1, 2, x.numel(), device=device, dtype=x.dtype).view(x.shape) for x in smooth]
    leaves = [x for x in inputs.values() if x.requires_grad]
    return [x.detach().cpu() for x in (*outputs, *torch.autograd.grad(smooth, leaves, grads))]


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("impl", ["triton", "cuda", "numba"])
@pytest.mark.parametrize("name", differentiable_operators())
def test_a_call_on_the_second_gpu_gives_the_bits_of_the_first(name: str, impl: str) -> None:
    if impl not in registry.implementation_names(name):
        pytest.skip(f"{name} has no implementation {impl}")
    implementation = registry.implementation(name, impl)
    for direction in (FORWARD, BACKWARD):
        if not (answer := support(implementation, example_case(name), "cuda", direction)):
            pytest.skip(f"{name} by {impl}: {answer.reason}")
    assert torch.cuda.current_device() == 0
    first, second = (outputs_and_gradients(name, device, impl) for device in ("cuda:0", "cuda:1"))
    if not implementation.deterministic:
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b)
    else:
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("impl", ["triton", "cuda"])
def test_a_call_on_the_second_gpu_runs_on_that_gpus_current_stream(impl: str) -> None:
    x = torch.randn(512, 4096, device="cuda:1")
    expected = torch.softmax(2 * x, -1)
    side = torch.cuda.Stream("cuda:1")
    side.wait_stream(torch.cuda.current_stream("cuda:1"))
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # a launch on another stream reads x before it is doubled
        x.mul_(2)
        torch.cuda.set_device(0)  # the stream stays the current one of cuda:1
        y = ops.softmax(x, impl=impl)
    side.synchronize()
    torch.testing.assert_close(y, expected)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("impl", ["triton", "cuda"])
def test_attention_with_much_shared_memory_runs_on_both_gpus_in_turn(impl: str) -> None:
    """Its blocks take more than 48 KiB of shared memory, which must be enabled on each device."""
    shape = (2, 2, 256, 128)
    cpu_inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(4)]
    results = []
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        *qkv, grad = (x.to(device) for x in cpu_inputs)
        leaves = [x.requires_grad_() for x in qkv]
        out = ops.attention(*leaves, causal=True, impl=impl)
        results.append([x.detach().cpu() for x in (out, *torch.autograd.grad(out, leaves, grad))])
    for first, *others in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(other, first)


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("impl", ["triton", "cuda"])
def test_adamw_on_the_second_gpu_gives_the_bits_of_the_first(impl: str) -> None:
    cpu_tensors = [[torch.linspace(-1, 1, n) for n in (7, 4096)] for _ in range(2)]
    results = []
    for device in ("cuda:0", "cuda:1"):
        params, grads = ([x.to(device) for x in tensors] for tensors in cpu_tensors)
        averages = [[torch.zeros_like(x) for x in params] for _ in range(2)]
        ops.adamw(params, grads, *averages, step=1, max_norm=1.0, impl=impl)
        results.append([x.cpu() for x in (*params, *averages[0], *averages[1])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.cuda.current_device() == 0
