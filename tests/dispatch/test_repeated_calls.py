"""Repeated calls: the generated function launches what the implementation would, with its own tensors.

A simulated driver reads the parameters of each launch as a GPU's does. The kernels compute nothing, and their
tensors are the host's.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft import ops
from weft.backends import nvrtc, recorded_call
from weft.backends.nvrtc import CudaSource, Kernel
from weft.core import WeftError
from weft.dispatch import operator, plan_cache, repeated_calls
from weft.dispatch.repeated_calls import Implemented, repeated_call, repeated_call_with_gradient
from weft.ops._common.hopper import tensor_map
from weft.ops._common.prepared import LaunchCache
from weft.ops.norms.repeated import RepeatedNorms

from .test_fast_path import Quiet, QuietFunctions, Sub

CALLS = 8  # enough for forward and backward to be recorded, and to be repeated
CONFIG = struct.Struct("<7I4xQQI4x")  # as in tests/backends/test_launch.py
LIMITS = {
    "num_sms": 132,
    "smem_per_sm": 228 << 10,
    "smem_per_block": 227 << 10,
    "has_tma": True,
    "has_wgmma": True,
    "_has_clusters": True,
}
Launch = tuple[Any, ...]


class Driver:
    """Reads each launch: the kernel, the configuration, and 8 bytes of each parameter or a structure."""

    def __init__(self) -> None:
        self.kernels: dict[tuple[int, str], Kernel] = {}
        self.parameters: dict[int, int] = {}  # by function: how many; of a structure -(its bytes)
        self.names: dict[int, str] = {}
        self.launches: list[Launch] = []
        self.stream = 7
        self.status = 0
        self.during: Callable[[], None] | None = None

    def kernel(self, source: CudaSource, name: str) -> Kernel:
        kernel = self.kernels.get((id(source), name))
        if kernel is None:
            handle = len(self.kernels) + 1
            kernel = self.kernels[id(source), name] = SeenKernel(name, SimpleNamespace(handle=handle), 0)
            kernel.driver, kernel.source = self, source
            self.names[handle] = name
        return kernel

    def launch(self, config: int, function: int, parameters: int, extra: None) -> int:
        if self.during:
            again, self.during = self.during, None
            again()
        count = self.parameters[function]
        addresses = (ctypes.c_void_p * max(count, 1)).from_address(parameters)
        if count < 0:
            read: Any = struct.unpack(f"<{-count // 4}I", ctypes.string_at(addresses[0], -count))
        else:
            read = [struct.unpack("<Q", ctypes.string_at(a, 8))[0] for a in addresses[:count]]
        self.launches.append(
            (self.names[function], CONFIG.unpack(ctypes.string_at(config, CONFIG.size)), read)
        )
        return self.status


class SeenKernel(Kernel):
    driver: Driver
    source: CudaSource

    def __call__(self, grid: Any, block: Any, *arguments: Any, **options: Any) -> None:
        is_structure = arguments and isinstance(arguments[0], ctypes.Structure)
        count = -ctypes.sizeof(arguments[0]) if is_structure else len(arguments)
        self.driver.parameters[self.function] = count
        super().__call__(grid, block, *arguments, **options)

    def max_active_clusters(self, *_: Any, **__: Any) -> int:
        return 66

    def _allow(self, shared: int) -> None:
        self._shared = shared


def encode(pointer: int, dtype: torch.dtype, *layout: Any) -> tensor_map.TensorMap:
    """Stand in for a tensor map: the address, and what tells maps of other matrices apart."""
    words = [pointer, hash((str(dtype), *layout)) & ((1 << 32) - 1)]
    return tensor_map.TensorMap((ctypes.c_uint64 * 16)(*words))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    pytest.importorskip("cuda.bindings.driver")
    played = Driver()
    for family in ("activations", "softmax", "norms", "losses", "embedding", "linear", "attention"):
        import_module(f"weft.ops.{family}.with_cuda")
    for name, module in list(sys.modules.items()):
        if name.startswith("weft.ops."):
            for limit, value in LIMITS.items():
                if hasattr(module, limit):
                    monkeypatch.setattr(module, limit, lambda *_, value=value: value)
            for key, value in list(vars(module).items()):
                if isinstance(value, (LaunchCache, RepeatedNorms)):
                    monkeypatch.setattr(module, key, type(value)())
    monkeypatch.setattr(CudaSource, "__getitem__", lambda source, name: played.kernel(source, name))
    monkeypatch.setattr(nvrtc, "_launcher", lambda: played.launch)
    monkeypatch.setattr(nvrtc, "_current_stream", lambda: lambda device: played.stream)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(tensor_map, "_encode_tiled", encode)
    monkeypatch.setattr(operator, "refuse_unsupported", lambda *_: None)
    monkeypatch.setattr(repeated_calls, "records_on_cpu", True)
    tensor_map._encode.cache_clear()
    tensor_map._encode_heads.cache_clear()
    operator.clear_caches()
    yield played
    operator.clear_caches()
    tensor_map._encode.cache_clear()
    tensor_map._encode_heads.cache_clear()


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def leaf(*shape: int) -> torch.Tensor:
    return values(*shape).requires_grad_()


TARGETS = torch.arange(64)
IDS = torch.tensor([[0, 5, 5, 31], [7, 1, 2, 3]])
KINDS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]] = {
    "gelu": lambda: (ops.gelu, (leaf(64, 1024),)),
    "softmax": lambda: (ops.softmax, (leaf(64, 1024),)),
    "layer_norm": lambda: (ops.layer_norm, (leaf(64, 1024), leaf(1024), leaf(1024))),
    "rms_norm": lambda: (ops.rms_norm, (leaf(64, 1024), leaf(1024))),
    "add_rms_norm": lambda: (ops.add_rms_norm, (leaf(64, 1024), leaf(64, 1024), leaf(1024))),
    "bias_gelu": lambda: (ops.bias_gelu, (leaf(64, 1024), leaf(1024))),
    "swiglu": lambda: (ops.swiglu, (leaf(64, 1024), leaf(64, 1024))),
    "embedding": lambda: (
        lambda w, p, impl: ops.embedding(IDS, w, p, impl=impl),
        (leaf(32, 64), leaf(4, 64)),
    ),
    "linear": lambda: (ops.linear, (leaf(4, 128, 256), leaf(512, 256), leaf(512))),
    "linear_gelu": lambda: (ops.linear_gelu, (leaf(128, 256), leaf(512, 256), leaf(512))),
    "attention": lambda: (
        lambda q, k, v, impl: ops.attention(q, k, v, causal=True, impl=impl),
        tuple(leaf(1, 8, 128, 64) for _ in range(3)),
    ),
}


def named(launches: list[Launch], tensors: dict[str, torch.Tensor]) -> list[Launch]:
    """Return launches with each address replaced by a tensor's name, or by the number of a workspace.

    Structures are words of 4 bytes: two of them, at an even place, may be an address.
    """
    names = {x.data_ptr(): label for label, x in tensors.items() if x.numel()}

    def name(value: int) -> Any:
        if value < 1 << 40 or value >= 1 << 48:
            return value
        return names.setdefault(value, f"workspace {len(names)}")

    named_launches = []
    for kernel, config, read in launches:
        # Attributes of a configuration have an address of their own.
        *sizes, stream, attributes, count = config
        if isinstance(read, tuple):
            pairs = zip(read[::2], read[1::2], strict=False)
            read = [low | high << 32 for low, high in pairs]
        named_launches.append((kernel, (*sizes, stream, bool(attributes), count), tuple(map(name, read))))
    return named_launches


def tensors_of(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], driver: Driver) -> Any:
    """Call forward and backward; return the launches of both with the names of their tensors.

    None for a call that is recorded, which launches everything once more.
    """
    driver.launches.clear()
    recorded = Recorded.count
    outputs = function(*inputs, impl="cuda")
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    by_name = {f"input {i}": x for i, x in enumerate(inputs)}
    by_name |= {f"output {i}": x for i, x in enumerate(outputs)}
    forward = named(driver.launches, by_name)
    driver.launches.clear()
    grads = tuple(torch.ones_like(y) for y in outputs)
    gradients = torch.autograd.grad(outputs, inputs, grads)
    by_name |= {f"grad {i}": x for i, x in enumerate(grads)}
    by_name |= {f"gradient {i}": x for i, x in enumerate(gradients)}
    backward = named(driver.launches, by_name)
    layouts = [(x.shape, x.stride(), x.dtype) for x in (*outputs, *gradients)]
    return (forward, backward, layouts) if Recorded.count == recorded else None


@pytest.fixture
def nothing_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what implementations allocate: a workspace's address then tells it from every other tensor."""
    alive: list[torch.Tensor] = []
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        allocate = getattr(owner, name)

        def keep(*arguments: Any, allocate: Any = allocate, **options: Any) -> torch.Tensor:
            alive.append(allocate(*arguments, **options))
            return alive[-1]

        monkeypatch.setattr(owner, name, keep)


class Recorded:
    """Number of calls that were recorded."""

    count = 0


@pytest.fixture(autouse=True)
def recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    record = recorded_call.record

    def counted(*arguments: Any) -> Any:
        Recorded.count += 1
        return record(*arguments)

    monkeypatch.setattr(repeated_calls, "record", counted)


def is_repeated(y: Any) -> bool:
    """True if a generated function computed ``y``, which takes a gradient."""
    y = y[0] if isinstance(y, tuple) else y
    return y.grad_fn._forward_cls.forward.__name__ == "repeated_forward"  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("nothing_is_freed")
def test_a_repeated_call_launches_what_the_first_one_did(driver: Driver, kind: str) -> None:
    first: Any = None
    alive = []  # so that calls have other addresses
    for _ in range(CALLS):
        function, inputs = KINDS[kind]()
        alive.append((inputs, function(*inputs, impl="cuda")))
        seen = tensors_of(function, inputs, driver)
        assert seen is None or (seen[0] and seen[1]), "both directions launch kernels"
        assert seen is None or first is None or seen == first
        first = first or seen
    assert is_repeated(function(*inputs, impl="cuda"))


def test_a_call_without_a_gradient_is_repeated_with_its_own_tensors(driver: Driver) -> None:
    weights = [(values(64, 1024), values(1024), values(1024)) for _ in range(CALLS)]
    outputs = []
    for inputs in weights:
        driver.launches.clear()
        outputs.append(ops.layer_norm(*inputs, impl="cuda"))
        x, weight, bias, y, s = driver.launches[-1][2][0], *driver.launches[-1][2][2:6]
        assert (x, weight, bias) == tuple(t.data_ptr() for t in inputs) and (y, s) == (
            outputs[-1].data_ptr(),
            x,
        )
    assert len({y.data_ptr() for y in outputs}) == CALLS and Recorded.count


def repeated(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    """Call until a generated function does the work; return the last output."""
    for _ in range(CALLS):
        output = function(*inputs)
    return output


def gelu(x: torch.Tensor) -> torch.Tensor:
    return ops.gelu(x, impl="cuda")


@pytest.mark.parametrize("name", ["cross_entropy", "embedding", "attention"])
def test_a_public_call_is_repeated_with_its_own_arguments(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Contents of ids and targets are checked on a CPU in each call; here they stand for those of a GPU."""
    losses, embedding = (sys.modules[f"weft.ops.{n}"] for n in ("losses", "embedding"))
    monkeypatch.setattr(losses, "check_target_range", lambda *_: None)
    monkeypatch.setattr(embedding, "check_ids", lambda *_: None)
    heads = [leaf(1, 8, 128, 64) for _ in range(3)]
    call: Callable[[], torch.Tensor] = {
        "cross_entropy": lambda: ops.cross_entropy(logits, TARGETS, impl="cuda"),
        "embedding": lambda: ops.embedding(IDS, logits, impl="cuda"),
        "attention": lambda: ops.attention(*heads, causal=True, impl="cuda"),
    }[name]
    logits, seen = leaf(64, 1024), []
    for _ in range(2 * CALLS):
        driver.launches.clear()
        recorded = Recorded.count
        y = call()
        grad = torch.ones_like(y)
        leaves = heads if name == "attention" else [logits]
        gradients = torch.autograd.grad(y, leaves, grad)
        if Recorded.count == recorded:
            tensors = dict(zip("abc", leaves, strict=False)) | {"y": y, "ids": IDS, "targets": TARGETS}
            tensors |= {f"d{i}": g for i, g in enumerate(gradients)}
            seen.append([(kernel, config) for kernel, config, _ in named(driver.launches, tensors)])
            first = driver.launches[0][2]
            starts = list(first[:2]) if isinstance(first, list) else [first[0] | first[1] << 32]
            assert leaves[0].data_ptr() in starts
    for one in seen:
        assert one == seen[0]
    assert is_repeated(y)
    assert ops.cross_entropy(logits, TARGETS, impl="cuda").shape == ()


def test_a_mean_divides_its_gradient_by_the_count(driver: Driver) -> None:
    mean = import_module("weft.ops.losses.mean")
    logits, params = leaf(64, 1024), {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0}
    apply = mean.generate_mean((logits, TARGETS), params, "cuda")
    divided: list[int] = []

    class Divisions(Quiet):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            divided.extend([len(driver.launches)] if func is torch.ops.aten.div.Tensor else [])
            return func(*args, **(kwargs or {}))

    for _ in range(CALLS):
        loss, _, count = apply(logits, TARGETS)
        loss.backward(torch.ones(()))
    assert loss.shape == count.shape == () and not count.requires_grad
    # Recorded and repeated: the operation of PyTorch's is the same, and comes before the launch.
    backward = loss.grad_fn._forward_cls.backward
    (entry,) = [e for e in backward.__closure__ if isinstance(e.cell_contents, tuple) and e.cell_contents][:1]
    (backward_entry,) = entry.cell_contents
    driver.launches.clear()
    with Divisions():
        backward_entry.direct(torch.ones(()), logits, TARGETS, torch.zeros(64), count)
    assert divided == [0] and [one[0] for one in driver.launches] == ["cross_entropy_backward"]
    alone = logits.detach()
    assert mean.generate_mean((alone, TARGETS), params, "cuda")(alone, TARGETS).shape == ()
    (_, _, losses), (_, _, reduction) = driver.launches[-2:]
    assert reduction[0] == losses[2] == losses[3] - 512 == reduction[3] - 1024  # parts of one buffer


def test_tensors_off_a_boundary_and_other_layouts_run_the_implementation(driver: Driver) -> None:
    x = leaf(64, 1024)
    repeated(gelu, x)
    count = Recorded.count
    memory = values(64 * 1024 + 8)
    shifted = memory[1:-7].view(64, 1024).requires_grad_()
    y = gelu(shifted)
    assert is_repeated(y) and driver.launches[-1][0] == "gelu_forward_any"
    (dx,) = torch.autograd.grad(y, shifted, values(64, 1024))
    assert dx.shape == (64, 1024) and driver.launches[-1][0] == "gelu_backward_any"
    assert not is_repeated(gelu(leaf(1024, 64).t()))
    assert Recorded.count == count


@pytest.mark.parametrize("mode", [Quiet, QuietFunctions, lambda: torch.device("cpu")])
def test_a_mode_disables_a_generated_function(driver: Driver, mode: Any) -> None:
    x = leaf(64, 1024)
    y = repeated(gelu, x)
    repeated(lambda t: torch.autograd.grad(gelu(t), t, torch.ones_like(t)), x)
    assert is_repeated(y)
    with mode():
        assert type(gelu(x).grad_fn).__name__ != "weft_geluBackward"  # by the dispatcher
        driver.launches.clear()
        torch.autograd.grad(y, x, torch.ones_like(y))
        assert [one[0] for one in driver.launches] == ["gelu_backward_wide"]


def test_a_subclass_and_a_transform_take_no_generated_function(driver: Driver) -> None:
    x = values(64, 1024)
    repeated(gelu, x)
    seen: list[str] = []
    entries = [e for table in plan_cache._tables for known in table.values() for e in known if e.direct]
    assert len(entries) == 2  # of the operator's call, and of the public one
    for entry in entries:
        entry.direct = lambda x: (seen.append("direct"), x)[1]
    gelu(x)
    assert seen == ["direct"]
    gelu(x.as_subclass(Sub))
    torch.func.vmap(lambda row: row * 1)(x)
    with torch.inference_mode():
        gelu(x)
    assert seen == ["direct"]


def test_each_launch_takes_the_current_stream_and_parameters_of_its_own(driver: Driver) -> None:
    x, y = values(64, 1024), values(64, 1024)
    repeated(gelu, x)
    driver.launches.clear()
    for driver.stream in (7, 8, 7):
        gelu(x)
    assert [config[7] for _, config, _ in driver.launches] == [7, 8, 7]
    driver.launches.clear()
    driver.during = lambda: (gelu(y), None)[1]  # another thread's launch, while the driver reads
    gelu(x)
    assert [read[0] for _, _, read in driver.launches] == [y.data_ptr(), x.data_ptr()]


def test_an_error_of_the_driver_names_the_kernel(driver: Driver) -> None:
    x = values(64, 1024)
    repeated(gelu, x)
    driver.status = 1
    with pytest.raises(RuntimeError, match="at the launch of gelu_forward_wide"):
        gelu(x)


def test_autograd_keeps_its_promises(driver: Driver) -> None:
    x = leaf(64, 1024)
    repeated(lambda t: torch.autograd.grad(gelu(t), t, torch.ones_like(t)), x)
    with pytest.raises(WeftError, match=r"create_graph=True"):
        torch.autograd.grad(gelu(x), x, torch.ones_like(x), create_graph=True)
    y = gelu(product := x * 1)
    with torch.no_grad():
        product.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = gelu(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (packed.append(t), t)[1], lambda t: t.as_subclass(Sub)
    ):
        y = gelu(x)
    assert is_repeated(y) and len(packed) == 1
    driver.launches.clear()
    torch.autograd.grad(y, x, torch.ones_like(y))  # by the dispatcher, as the saved tensor is a subclass
    assert [one[0] for one in driver.launches] == ["gelu_backward_wide"]


def test_outputs_that_nothing_used_get_zeros_and_inputs_that_need_no_gradient_get_none(
    driver: Driver,
) -> None:
    def total(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ops.add_rms_norm(x, residual, weight, impl="cuda")[1]

    inputs = (leaf(64, 1024), values(64, 1024), leaf(1024))
    for _ in range(CALLS):
        y = total(*inputs)
        driver.launches.clear()
        dx, dweight = torch.autograd.grad(y, (inputs[0], inputs[2]), torch.ones_like(y))
        assert dx.shape == (64, 1024) and dweight.shape == (1024,)
        assert driver.launches
    assert is_repeated(y)


# ---- What cannot be recorded


def kernels_with(forward: Callable[..., Any]) -> Implemented:
    return Implemented(
        name="made",
        impl="cuda",
        params={},
        forward=forward,
        backward=lambda grad, x: (grad,),
        dispatched_backward=lambda grad, x: (grad,),
        saved=lambda inputs, output: inputs,
        can_skip_dispatcher=lambda tensors: True,
        positions=(0,),
        num_inputs=1,
    )


def test_a_call_that_does_anything_else_is_not_recorded(driver: Driver) -> None:
    source: Any = SimpleNamespace()
    kernel = driver.kernel(source, "k")
    elsewhere = values(16)

    def launching(before: Callable[[torch.Tensor, torch.Tensor], Any] = lambda x, y: None) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            y = torch.empty_like(x)
            extra = before(x, y)
            kernel(1, 32, x, y, *(extra if isinstance(extra, tuple) else ()))
            return y

        return forward

    prepared = kernel.prepare(1, 32, elsewhere)
    driver.parameters[kernel.function] = 2
    refused: dict[str, Callable[[torch.Tensor], Any]] = {
        "it adds": launching(lambda x, y: x.add(1)),
        "it reads a number": launching(lambda x, y: (int(x[0]),)),
        "it takes memory that outlives it": launching(lambda x, y: (elsewhere,)),
        "it takes such an address": launching(lambda x, y: (elsewhere.data_ptr(),)),
        "it takes an unknown address in a structure": lambda x: (
            kernel(1, 32, _Pointer(elsewhere.data_ptr())),
            torch.empty_like(x),
        )[1],
        "a launch was not seen": lambda x: torch.empty_like(x),
        "it repeats a prepared launch": launching(lambda x, y: prepared(elsewhere.data_ptr())),
        "its output is elsewhere": lambda x: (launching()(x), elsewhere)[1],
    }
    x = values(64)
    for reason, forward in refused.items():
        assert repeated_call(forward, (x,), forward) is None, reason
        assert repeated_call_with_gradient(kernels_with(forward), (x.clone().requires_grad_(),)) is None, (
            reason
        )
    assert repeated_call(launching(), (x,), print) is not None
    assert repeated_call(launching(), (values(65)[1:],), print) is None, "an input off a boundary"
    assert not nvrtc.recorders
    with pytest.raises(ZeroDivisionError):
        repeated_call(lambda x: 1 // 0, (x,), print)
    assert not nvrtc.recorders


class _Pointer(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p),)


def attention_reads(driver: Driver, *heads: torch.Tensor) -> bool:
    """Return True if the last launch, of attention's forward, reads these queries, keys and values."""
    words = driver.launches[-1][2]
    starts = [words[i] | words[i + 1] << 32 for i in (0, 32, 64)]
    return starts == [x.data_ptr() for x in heads]


def mixed_calls_read_their_tensors(driver: Driver, leaf: Callable[..., torch.Tensor]) -> bool:
    """Return True if calls with tensors in one or in two places read the right ones, and are repeated."""
    right = True
    for _ in range(2 * CALLS):
        x, y, weight = leaf(64, 1024), leaf(64, 1024), leaf(1024)
        for pair in ((x, x), (x, y)):
            ops.add_rms_norm(*pair, weight, impl="cuda")
            right &= driver.launches[-1][2][:2] == [one.data_ptr() for one in pair]
        q, k, v = (leaf(1, 8, 128, 64) for _ in range(3))
        for heads in ((q, k, k), (q, q, q), (q, k, v), (q, k, q)):
            output = ops.attention(*heads, causal=True, impl="cuda")
            right &= attention_reads(driver, *heads)
    for inputs in ((x, x, weight), (x, y, weight)):
        entry = plan_cache.find_recent("add_rms_norm", "cuda", inputs, {"eps": 1e-6})
        right &= entry is not None and entry.direct is not None
    return right and (not output.requires_grad or is_repeated(output))


@pytest.mark.parametrize("leaf", [values, leaf], ids=["forward", "training"])
def test_one_tensor_in_two_places_is_recorded(driver: Driver, leaf: Callable[..., torch.Tensor]) -> None:
    assert mixed_calls_read_their_tensors(driver, leaf)


def test_a_comparison_that_overlooks_a_repeated_tensor_is_seen(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = plan_cache._comparison

    def wrong(*tensors: torch.Tensor) -> Callable[..., bool]:
        """Compare the first place of each tensor alone."""
        distinct = [i for i, x in enumerate(tensors) if not any(x is y for y in tensors[:i])]
        is_alike = right(*[tensors[i] for i in distinct])
        return lambda *others: is_alike(*[others[i] for i in distinct])

    monkeypatch.setattr(plan_cache, "_comparison", wrong)
    assert not mixed_calls_read_their_tensors(driver, values)


def test_gradients_of_one_tensor_in_two_places_are_repeated(driver: Driver) -> None:
    """The kernels compute nothing: the sum of two gradients is told by what the backward's launch writes."""
    counts = []
    for _ in range(CALLS):
        x, weight = leaf(64, 1024), leaf(1024)
        outputs = ops.add_rms_norm(x, x, weight, impl="cuda")
        driver.launches.clear()
        torch.autograd.grad(outputs, [x, weight], [torch.ones_like(y) for y in outputs])
        counts.append([kernel for kernel, *_ in driver.launches])
    assert is_repeated(outputs) and counts[-1] and counts[-1] == counts[0]


def test_interleaved_tensors_are_recorded_and_two_views_of_one_memory_are_not(driver: Driver) -> None:
    x, weight = values(64, 1024), values(1024)
    for _ in range(CALLS):
        view = x.view(64, 1024)
        ops.add_rms_norm(x, view, weight, impl="cuda")
        assert driver.launches[-1][2][:2] == [x.data_ptr()] * 2
    entry = plan_cache.find_recent("add_rms_norm", "cuda", (x, view, weight), {"eps": 1e-6})
    assert entry is not None and entry.direct is None
    for _ in range(CALLS):
        qkv = values(1, 128, 3, 8, 64)
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
        driver.launches.clear()
        ops.attention(q, k, v, causal=True, impl="cuda")
        assert attention_reads(driver, q, k, v)
    lengths = import_module("weft.ops.attention.spec").placeholder(q, (1,), torch.int32)
    params = import_module("weft.ops.attention.spec").parameters(True, None, None, None, 0.0, 0, False)
    entry = plan_cache.find_recent("attention", "cuda", (q, k, v, lengths), params)
    assert entry is not None and entry.direct is not None
