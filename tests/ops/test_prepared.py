"""Repeated launches: each call passes its own tensors, and another kind of call makes a new decision."""

from __future__ import annotations

import ctypes
import inspect
import struct
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.operator_calls import example
from weft import ops
from weft.backends import nvrtc, triton_jit
from weft.backends.nvrtc import CudaSource, Kernel
from weft.core import registry
from weft.ops._common.prepared import MAX_LAUNCHES, LaunchCache, LaunchSequence, MemoryPart, are_repeatable
from weft.ops.norms.repeated import RepeatedNorms

Launch = tuple[str, tuple[int, ...], tuple[Any, ...]]


class RecordedKernel(Kernel):
    """Kernel that records its launches with all their arguments; ``prepare`` is a real kernel's."""

    def __init__(self, name: str, launches: list[Launch]) -> None:
        super().__init__(name, SimpleNamespace(handle=1), 0)
        self.launches = launches

    def __call__(
        self, grid: Any, block: Any, *arguments: Any, shared: int = 0, overlap: bool = False
    ) -> None:
        values = tuple(a.data_ptr() if hasattr(a, "data_ptr") else a for a in arguments)
        self.launches.append((self.name, (grid, block, shared, overlap), values))

    def prepare(self, *shape_and_arguments: Any, **options: Any) -> Any:
        arguments = list(shape_and_arguments)
        positions = [i for i, a in enumerate(arguments) if hasattr(a, "data_ptr")]

        def again(*addresses: int) -> None:
            for position, address in zip(positions, addresses, strict=True):
                arguments[position] = address
            self(*arguments, **options)

        return again


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Record launches of CUDA implementations, which get CPU tensors and compute nothing."""
    recorded: list[Launch] = []
    families = ("activations", "softmax", "norms", "losses", "embedding", "linear")
    modules = {family: import_module(f"weft.ops.{family}.with_cuda") for family in families}
    limits = {"num_sms": 132, "smem_per_sm": 228 << 10, "has_tma": True, "_has_clusters": True}
    for module in modules.values():
        for limit, value in limits.items():
            if hasattr(module, limit):
                monkeypatch.setattr(module, limit, lambda *_, value=value: value)
    monkeypatch.setattr(CudaSource, "__getitem__", lambda source, name: RecordedKernel(name, recorded))
    monkeypatch.setattr(modules["activations"], "GELU_LAUNCHES", LaunchCache())
    for family in ("softmax", "losses", "embedding", "linear"):
        monkeypatch.setattr(modules[family], "LAUNCHES", LaunchCache())
    monkeypatch.setattr(modules["norms"], "REPEATED", RepeatedNorms())
    yield recorded
    recorded.clear()


LOSS = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def calls() -> dict[str, tuple[str, Callable[[], tuple[Any, ...]], dict[str, Any]]]:
    """Return for each kind of call the operator, its arguments and its parameters; grads come first."""
    rows = (64, 1024)
    ids = torch.tensor([[0, 5, 5, 31], [7, 1, 2, 3]])
    targets = torch.arange(64)
    lse = torch.zeros(64)
    one_number = torch.ones(()).expand(64)

    def norm(*row_tensors: int, vectors: int) -> Callable[[], tuple[Any, ...]]:
        return lambda: (*(random(*rows) for _ in row_tensors), *(random(1024) for _ in range(vectors)))

    table = lambda: (random(32, 64), ids)  # noqa: E731
    return {
        "gelu": ("gelu", lambda: (random(*rows),), {}),
        "gelu backward": ("gelu", lambda: (random(*rows), random(*rows)), {}),
        "softmax": ("softmax", lambda: (random(*rows),), {}),
        "softmax backward": ("softmax", lambda: (random(*rows), random(*rows)), {}),
        "layer_norm": ("layer_norm", norm(1, vectors=2), {"eps": 1e-5}),
        "layer_norm backward": ("layer_norm", norm(1, 2, vectors=1), {"eps": 1e-5}),
        "rms_norm": ("rms_norm", norm(1, vectors=1), {"eps": 1e-6}),
        "rms_norm backward": ("rms_norm", norm(1, 2, vectors=1), {"eps": 1e-6}),
        "add_rms_norm": ("add_rms_norm", norm(1, 2, vectors=1), {"eps": 1e-6}),
        "add_layer_norm backward": ("add_layer_norm", norm(1, 2, 3, vectors=1), {"eps": 1e-5}),
        "cross_entropy": ("cross_entropy", lambda: (random(*rows), targets), LOSS),
        "cross_entropy backward": (
            "cross_entropy",
            lambda: (one_number, random(*rows), targets, lse),
            LOSS,
        ),
        "linear backward": ("linear", lambda: (random(64, 32), random(64, 16), random(32, 16)), {}),
        "linear_gelu": ("linear_gelu", lambda: (random(64, 16), random(32, 16), random(32)), {}),
        "linear_gelu backward": (
            "linear_gelu",
            lambda: (random(64, 32), random(64, 16), random(32, 16), random(64, 32)),
            {},
        ),
        "linear_residual": (
            "linear_residual",
            lambda: (random(64, 16), random(32, 16), random(32), random(64, 32)),
            {},
        ),
        "embedding": ("embedding", lambda: (*table(), random(4, 64)), {}),
        "embedding without positions": ("embedding", lambda: (*table(), random(0, 64)), {}),
        "embedding backward": ("embedding", lambda: (random(2, 4, 64), ids, 32, 4), {}),
        "embedding without positions backward": ("embedding", lambda: (random(2, 4, 64), ids, 32, 0), {}),
    }


def function_of(kind: str, name: str) -> Callable[..., Any]:
    implementation = registry.implementation(name, "cuda")
    function = implementation.backward if kind.endswith("backward") else implementation.forward
    assert function is not None
    return function


def by_tensor(launches: list[Launch], inputs: tuple[Any, ...], outputs: Any) -> list[Any]:
    """Return launches with each address replaced by its tensor's name, or a workspace's number."""
    names: dict[int, str] = {}
    for label, group in (
        ("input", inputs),
        ("output", outputs if isinstance(outputs, tuple) else (outputs,)),
    ):
        for i, x in enumerate(group):
            if isinstance(x, torch.Tensor) and x.numel():
                names.setdefault(x.data_ptr(), f"{label} {i}")

    def name(value: Any) -> Any:
        if isinstance(value, float) or value < 1 << 32:  # a scalar, or the address of an empty tensor
            return value
        return names.setdefault(value, f"workspace {len(names)}")

    return [(kernel, shape, tuple(map(name, values))) for kernel, shape, values in launches]


@pytest.mark.parametrize("kind", list(calls()))
def test_a_repeated_launch_is_the_first_one_with_the_tensors_of_its_call(
    launches: list[Launch], kind: str
) -> None:
    name, arguments, params = calls()[kind]
    function = function_of(kind, name)
    seen = []
    for _ in range(3):
        inputs = arguments()
        launches.clear()
        outputs = function(*inputs, **params)
        seen.append(by_tensor(launches, inputs, outputs))
        assert launches
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("kind", list(calls()))
def test_a_call_of_another_kind_decides_anew(
    launches: list[Launch], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, arguments, params = calls()[kind]
    function = function_of(kind, name)
    function(*arguments(), **params)
    look_ups: list[str] = []

    def look_up(source: CudaSource, kernel: str) -> Kernel:
        look_ups.append(kernel)
        return RecordedKernel(kernel, launches)

    monkeypatch.setattr(CudaSource, "__getitem__", look_up)
    function(*arguments(), **params)
    assert look_ups == []  # repeated
    first, *others = arguments()
    shifted = torch.empty(first.numel() + 1, dtype=first.dtype)[1:].view(first.shape)
    wide = torch.empty(first.numel() * 2, dtype=first.dtype)
    gaps = wide.as_strided(first.shape, tuple(2 * s for s in first.contiguous().stride()))
    for x in (shifted, gaps) if first.numel() > 1 and first.dtype == torch.bfloat16 else ():
        look_ups.clear()
        function(x, *others, **params)
        # gelu and the linear family copy a tensor with gaps, and then repeat a launch. The forward of a
        # linear operator launches over the library's output alone.
        is_copied = name == "gelu" or name.startswith("linear")
        assert look_ups or (is_copied and x is gaps) or (kind in ("linear_gelu", "linear_residual"))


def test_a_mean_cross_entropy_repeats_its_two_launches(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    mean = import_module("weft.ops.losses.mean")
    expected = []
    for call in range(4):
        logits, targets = random(64, 1024), torch.arange(64)
        if call == 3:  # rows at other addresses need a new decision
            logits = random(64 * 1024 + 1)[1:].view(64, 1024)
        launches.clear()
        loss, lse, count = mean._mean_of_losses(logits, targets, dict(LOSS), "cuda")
        assert loss.shape == count.shape == () and lse.shape == (64,)
        assert {x.dtype for x in (loss, lse, count)} == {torch.float32}
        tensors = by_tensor(launches, (logits, targets), (loss, lse, count))
        assert [kernel for kernel, _, _ in tensors] == ["cross_entropy_forward", "mean_of_rows"]
        if call < 3:
            expected.append(tensors)
    assert expected[0] == expected[1] == expected[2]
    module = import_module("weft.ops.losses.with_cuda")
    assert len(module.LAUNCHES) == 3  # the losses, the mean, and both


def test_launches_are_bounded_and_none_is_stored_without_a_key() -> None:
    cache = LaunchCache()
    cache.store(None, print)
    cache.store("none", None)
    cache.store("a part is missing", (print, None))
    assert len(cache) == 0 and cache.get(None) is None
    for key in range(MAX_LAUNCHES + 3):
        cache.store(key, print)
    assert len(cache) == 3 and cache.get(MAX_LAUNCHES) is print


def test_tensors_with_gaps_or_off_a_boundary_are_not_repeatable() -> None:
    x = torch.zeros(64, 8)
    assert are_repeatable(x, None, x[2:]) and are_repeatable()
    assert not are_repeatable(x.t()) and not are_repeatable(x, x[:, :4])
    assert not are_repeatable(x.view(-1)[1:]) and are_repeatable(x.view(-1)[4:])
    assert not are_repeatable(x.view(-1)[4:], alignment=32)


def test_a_sequence_repeats_offsets_in_other_buffers() -> None:
    launches: list[Launch] = []
    kernel = RecordedKernel("k", launches)

    def start(kernel: Any, *arguments: Any) -> Any:
        kernel(*arguments)
        return kernel.prepare(*arguments)

    first, second = [(torch.zeros(8), torch.zeros(4), torch.zeros(0, 4)) for _ in range(2)]
    sequence = LaunchSequence(*first, records=True)
    sequence.launch(start, kernel, 1, 32, first[1], 5, MemoryPart(first[0], 8), first[2])
    sequence.launch(start, kernel, 2, 64, first[0])
    launches.clear()
    sequence.repeat(*second)
    assert [one[2] for one in launches] == [
        (second[1].data_ptr(), 5, second[0].data_ptr() + 8, second[2].data_ptr()),
        (second[0].data_ptr(),),
    ]
    assert sequence.is_complete
    with pytest.raises(ValueError, match="none of the buffers"):
        sequence.launch(start, kernel, 1, 32, torch.zeros(3))
    # A backend that prepares no launch ends the sequence.
    sequence.launch(lambda *_: None)
    assert not sequence.is_complete and not LaunchSequence(records=False).is_complete


def test_arguments_have_the_bytes_of_their_parameters() -> None:
    pool = nvrtc.ParameterPool("".join(map(nvrtc._format, (nvrtc.Float32(), 0.0, 0))))
    buffer = pool.take((nvrtc.Float32(0.1), 0.1, -2)).buffer.raw
    assert struct.unpack("<f", buffer[:4])[0] == float(torch.tensor(0.1, dtype=torch.float32))
    assert struct.unpack("<dq", buffer[8:]) == (0.1, -2)
    # A dry run has no driver that would refuse an argument.
    for wrong in (ctypes.c_float(1.0), None, "1"):
        with pytest.raises(TypeError, match="an int, a float or a Float32"):
            nvrtc.check_arguments((1, wrong))


def test_a_dry_run_prepares_nothing() -> None:
    seen: list[Any] = []
    assert nvrtc.launch_and_prepare(lambda *a, **k: seen.append((a, k)), 1, 32, shared=4) is None
    assert seen == [((1, 32), {"shared": 4})]


# ---- Triton's launches, with a fake driver


class PlayedKernel:
    """Fake compiled Triton kernel and the JIT function that returns it; ``launches`` records its launcher."""

    arg_names = ("x_ptr", "y_ptr", "n", "BLOCK")

    def __init__(self, scratch: int = 0) -> None:
        self.signature = inspect.signature(lambda x_ptr, y_ptr, n, BLOCK=64: None)
        self.function, self.packed_metadata = 17, ("packed",)
        self.launches: list[tuple[Any, ...]] = []
        self.run = SimpleNamespace(
            global_scratch_size=scratch,
            profile_scratch_size=0,
            launch_cooperative_grid=False,
            launch_pdl=True,
            launch=lambda *arguments: self.launches.append(arguments),
        )

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *arguments, **options: self

    def launch_metadata(self, grid: Any, stream: int, *arguments: Any) -> Any:
        return ("metadata", grid, stream, arguments)


@pytest.fixture
def played_triton(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    played = SimpleNamespace(stream=7)
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: played.stream)
    monkeypatch.setattr(triton_jit, "_PREPARES", True)
    monkeypatch.setattr(triton_jit, "CompiledKernel", PlayedKernel)
    monkeypatch.setattr(triton_jit, "driver", SimpleNamespace(active=active))
    return played


def test_a_triton_launch_is_repeated_with_other_addresses(played_triton: SimpleNamespace) -> None:
    kernel = PlayedKernel()
    x, y = torch.zeros(3), torch.zeros(3)
    again = triton_jit.launch_and_prepare(kernel, (5, 2), x, y, 3, BLOCK=128, num_warps=4)
    assert again is not None and kernel.launches == []  # Triton itself makes the first launch
    again(100, 200)
    played_triton.stream = 8
    again(200, 100)
    head = ((5, 2, 1), 17, (False, True, None, None, ("packed",)), (None, None, None))
    for launched, stream, addresses in zip(kernel.launches, (7, 8), ((100, 200), (200, 100)), strict=True):
        sizes, function, flags, hooks = head
        assert launched == (*sizes, stream, function, *flags, *hooks, *addresses, 3, 128)
    # A default replaces a missing argument.
    again = triton_jit.launch_and_prepare(kernel, (1,), x, y, 3)
    assert again is not None
    again(1, 2)
    assert kernel.launches[-1][-4:] == (1, 2, 3, 64)


def test_a_profilers_hooks_see_a_repeated_launch(
    played_triton: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = PlayedKernel()
    again = triton_jit.launch_and_prepare(kernel, (5,), torch.zeros(3), torch.zeros(3), 3)
    assert again is not None
    enter, leave = triton_jit.triton.knobs.HookChain(), triton_jit.triton.knobs.HookChain()
    monkeypatch.setattr(triton_jit.triton.knobs.runtime, "launch_enter_hook", enter)
    monkeypatch.setattr(triton_jit.triton.knobs.runtime, "launch_exit_hook", leave)
    enter.add(print)
    again(1, 2)
    metadata = ("metadata", (5,), 7, (1, 2, 3, 64))
    assert kernel.launches[-1][-7:] == (metadata, enter, leave, 1, 2, 3, 64)


def test_a_triton_launch_that_cannot_be_repeated_is_not_prepared(
    played_triton: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = torch.zeros(3), torch.zeros(3)
    assert triton_jit.launch_and_prepare(PlayedKernel(scratch=64), (1,), x, y, 3) is None
    assert triton_jit.launch_and_prepare(PlayedKernel(), (1,), x, 3, y) is None  # a scalar between tensors
    monkeypatch.setattr(triton_jit, "_PREPARES", False)
    assert triton_jit.launch_and_prepare(PlayedKernel(), (1,), x, y, 3) is None


# ---- On a GPU


def call_with_gradients(name: str, impl: str, seed: int) -> list[torch.Tensor]:
    """Return outputs and gradients of a call on the GPU, with inputs that follow from ``seed``."""
    call = example(name)
    draw = torch.Generator("cuda").manual_seed(seed)
    inputs = {}
    for key, x in call.inputs.items():
        values = x.detach().to("cuda")
        if x.requires_grad:
            noise = torch.randn(x.shape, generator=draw, device="cuda")
            values = (values + noise.to(x.dtype)).requires_grad_()
        inputs[key] = values
    outputs = getattr(ops, name)(**inputs, **call.params, impl=impl)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.linspace(1, 2, x.numel(), device="cuda").view(x.shape).to(x.dtype) for x in outputs]
    leaves = [x for x in inputs.values() if x.requires_grad]
    return [x.detach() for x in (*outputs, *torch.autograd.grad(outputs, leaves, grads))]


REPEATED_ON_GPU = (
    "gelu",
    "softmax",
    "layer_norm",
    "rms_norm",
    "add_layer_norm",
    "cross_entropy",
    "embedding",
)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "cuda"])
@pytest.mark.parametrize("name", REPEATED_ON_GPU)
def test_repeated_launches_give_the_bits_of_the_first_ones(name: str, impl: str) -> None:
    """Repeat launches in order, from two threads at once, on another stream, and in a graph."""
    first = [call_with_gradients(name, impl, seed) for seed in (0, 1, 2)]

    def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    assert all(same(call_with_gradients(name, impl, seed), first[seed]) for seed in (0, 1, 2))
    results: dict[int, list[list[torch.Tensor]]] = {}

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results[seed] = [call_with_gradients(name, impl, seed) for _ in range(50)]
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(one, first[seed]) for seed in (0, 1) for one in results[seed])


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "cuda"])
def test_a_repeated_launch_is_captured_in_a_graph(impl: str) -> None:
    x = torch.randn(64, 1024, device="cuda")
    for _ in range(2):
        ops.softmax(x, impl=impl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.softmax(x, impl=impl)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(y, torch.softmax(x, -1))
