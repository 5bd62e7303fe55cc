"""Repeated public calls that PyTorch computes: its own function, the same bits, and only for calls alike."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft import ops
from weft.core import WeftError
from weft.dispatch import plan_cache, public_calls, repeated_calls
from weft.dispatch.public_calls import Repeat, repeated
from weft.ops._common import cublas

CALLS = 6
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ids and targets are read in each call on a CPU, which repeats none of them but here."""
    monkeypatch.setattr(repeated_calls, "records_on_cpu", True)
    plan_cache.clear()
    yield
    plan_cache.clear()


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape).requires_grad_()


IDS = torch.tensor([[0, 5, 5, 3], [7, 1, 2, 3]])
TARGETS = torch.tensor([1, -100, 3, 15])
PUBLIC: dict[str, Callable[[], tuple[Tensors, dict[str, Any]]]] = {
    "gelu": lambda: ((leaf(4, 16),), {}),
    "relu": lambda: ((leaf(4, 16),), {}),
    "softmax": lambda: ((leaf(4, 16),), {}),
    "bias_gelu": lambda: ((leaf(4, 16), leaf(16)), {}),
    "swiglu": lambda: ((leaf(4, 16), leaf(4, 16)), {}),
    "geglu": lambda: ((leaf(4, 16), leaf(4, 16)), {}),
    "layer_norm": lambda: ((leaf(4, 16), leaf(16), leaf(16)), {}),
    "rms_norm": lambda: ((leaf(4, 16), leaf(16)), {"eps": 1e-3}),
    "add_layer_norm": lambda: ((leaf(4, 16), leaf(4, 16), leaf(16), leaf(16)), {}),
    "add_rms_norm": lambda: ((leaf(4, 16), leaf(4, 16), leaf(16)), {"eps": 1e-3}),
    "rope": lambda: ((leaf(1, 2, 4, 8), torch.rand(4, 4), torch.rand(4, 4)), {}),
    "attention": lambda: ((leaf(2, 4, 64, 64), leaf(2, 2, 64, 64), leaf(2, 2, 64, 64)), {"causal": True}),
    "matmul": lambda: ((leaf(4, 16), leaf(16, 8)), {}),
    "linear": lambda: ((leaf(4, 16), leaf(8, 16), leaf(8)), {}),
    "linear without a bias": lambda: ((leaf(4, 16), leaf(8, 16)), {}),
    "linear_gelu": lambda: ((leaf(4, 16), leaf(8, 16), leaf(8)), {}),
    "linear_gelu without a bias": lambda: ((leaf(4, 16), leaf(8, 16)), {}),
    "linear_residual": lambda: ((leaf(4, 16), leaf(8, 16), leaf(8), leaf(4, 8)), {}),
    "embedding": lambda: ((IDS, leaf(8, 16)), {}),
    "embedding of a row of ids": lambda: ((IDS[0], leaf(8, 16)), {}),
    "cross_entropy": lambda: ((leaf(4, 16), TARGETS), {"ignore_index": -100}),
    "cross_entropy of a sum": lambda: ((leaf(4, 16), TARGETS), {"reduction": "sum"}),
    "linear_cross_entropy": lambda: ((leaf(4, 8), leaf(16, 8), TARGETS), {}),
    "linear_cross_entropy of a sum": lambda: ((leaf(4, 8), leaf(16, 8), TARGETS), {"reduction": "sum"}),
}


def results(
    function: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]
) -> list[torch.Tensor]:
    """Return outputs, and gradients where they are wanted."""
    outputs = function(*inputs, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if not outputs[0].requires_grad:
        return list(outputs)
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    grads = [torch.linspace(-1, 1, y.numel()).view(y.shape).to(y) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]


def entries_with_function() -> list[plan_cache.Entry]:
    """Return the entries of public calls that have a function."""
    groups: list[tuple[plan_cache.Entry, ...]] = []
    for table in plan_cache._tables:
        for kinds in table.values():
            groups += kinds.values() if isinstance(kinds, dict) else [kinds]
    return [entry for entries in groups for entry in entries if entry.direct]


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("kind", PUBLIC)
def test_a_repeated_call_by_torch_gives_the_bits_of_the_first(kind: str, training: bool) -> None:
    function = getattr(ops, kind.split()[0])
    with torch.set_grad_enabled(training):
        for call in range(CALLS):
            inputs, options = PUBLIC[kind]()
            seen = results(function, inputs, options)
            tables = {id(t): dict(t) for t in plan_cache._tables}
            plan_cache.clear()
            first = results(function, inputs, options)
            for table in plan_cache._tables:
                table.clear()
                table.update(tables[id(table)])
            assert all(torch.equal(a, b) for a, b in zip(seen, first, strict=True)), call
            assert [y.stride() for y in seen] == [y.stride() for y in first]
            assert all((a.grad_fn is None) == (b.grad_fn is None) for a, b in zip(seen, first, strict=True))
    assert entries_with_function() and all(e.by_torch for e in entries_with_function())


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", PUBLIC)
def test_a_repeated_call_by_torch_gives_the_bits_of_the_first_on_a_gpu(
    kind: str, dtype: torch.dtype, training: bool, autocast: bool, device: str = "cuda"
) -> None:
    function = getattr(ops, kind.split()[0])
    inputs, options = PUBLIC[kind]()
    tensors: list[torch.Tensor] = []
    for x in inputs:
        keeps_dtype = not x.is_floating_point() or (kind == "rope" and tensors)
        y = x.detach().to(device) if keeps_dtype else x.detach().to(device, dtype)
        tensors.append(y.requires_grad_(x.requires_grad))
    with torch.set_grad_enabled(training), torch.autocast(device, torch.bfloat16, enabled=autocast):
        calls = [results(function, tuple(tensors), options | {"impl": "torch"}) for _ in range(CALLS)]
    for later in calls[1:]:
        assert [(y.dtype, y.stride()) for y in later] == [(y.dtype, y.stride()) for y in calls[0]]
        assert all(torch.equal(a, b) for a, b in zip(later, calls[0], strict=True))
    assert autocast or entries_with_function()


@pytest.mark.parametrize("kind", PUBLIC)
def test_a_call_under_autocast_gives_what_its_first_one_gave(kind: str) -> None:
    function, (inputs, options) = getattr(ops, kind.split()[0]), PUBLIC[kind]()
    for dtype in (torch.float32, torch.bfloat16):
        tensors = tuple(x.detach().to(dtype) if x.is_floating_point() else x for x in inputs)
        if kind == "rope":
            tensors = (tensors[0], *inputs[1:])
        outside = [results(function, tensors, options) for _ in range(CALLS)]
        with torch.autocast("cpu", torch.bfloat16):
            inside = [results(function, tensors, options) for _ in range(CALLS)]
        for calls in (outside, inside):
            for later in calls[1:]:
                assert [y.dtype for y in later] == [y.dtype for y in calls[0]]
                assert all(torch.equal(a, b) for a, b in zip(later, calls[0], strict=True))


def calls_of(name: str, draw: random.Random) -> list[tuple[Any, ...]]:
    """Return calls with tensors of various layouts, dtypes and sizes; many positions have one tensor or None.

    Some of the calls are wrong.
    """

    def pool(*shape: int) -> list[Any]:
        x, half = torch.randn(shape), torch.randn(shape).bfloat16()
        strided, wrong = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2], torch.randn(*shape[:-1], 5)
        return [x, torch.randn(shape), leaf(*shape), half, half.clone().requires_grad_(), strided, wrong]

    pools: dict[tuple[int, ...], list[Any]] = {}
    calls = []
    for _ in range(24):
        rows, dtype = draw.choice((2, 5, 8)), draw.choice((torch.float32, torch.bfloat16))
        first, shapes = {
            "swiglu": ((rows, 8), [(rows, 8)]),
            "attention": ((rows, 2, 8, 8), [(rows, 2, 8, 8)] * 2),
            "linear_residual": ((rows, 8), [(8, 8), (8,), (rows, 8)]),
        }[name]
        is_wrong = draw.random() < 0.15
        inputs: list[Any] = []
        for shape in (first, *shapes):
            tensors = pools.setdefault(shape, pool(*shape))
            if not is_wrong:
                tensors = [y for y in tensors if y.dtype == dtype and y.shape == shape]
            repeats = [y for y in inputs if y.shape == shape]
            inputs.append(draw.choice(repeats if repeats and draw.random() < 0.5 else tensors))
        if name == "linear_residual" and draw.random() < 0.5:
            inputs[2] = None
        calls.append(tuple(inputs))
    return calls


def outcome(
    function: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any], autocast: bool
) -> Any:
    """Return the results, or the text of an error."""
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return results(function, inputs, options)
    except (WeftError, RuntimeError) as error:
        return str(error)


def same_outcome(seen: Any, expected: Any) -> bool:
    if isinstance(seen, str) or isinstance(expected, str):
        return bool(seen == expected)
    return all(
        a.dtype == b.dtype
        and a.stride() == b.stride()
        and (a.grad_fn is None) == (b.grad_fn is None)
        and torch.equal(a, b)
        for a, b in zip(seen, expected, strict=True)
    )


def first_differences(name: str, seed: int) -> tuple[int, int]:
    """Make random calls of an operator, each as it comes and as a first call.

    Return how many of them differ, and how many functions of repeated calls there are.
    """
    torch.manual_seed(seed)
    draw = random.Random(seed)
    public, calls = getattr(ops, name), calls_of(name, draw)
    differences = 0
    for _ in range(20 * len(calls)):
        inputs, options = draw.choice(calls), draw.choice([{}, {}, {"impl": "eager"}])
        autocast = draw.random() < 0.2
        seen = outcome(public, inputs, options, autocast)
        tables = {id(t): dict(t) for t in plan_cache._tables}
        plan_cache.clear()
        differences += not same_outcome(seen, outcome(public.__wrapped__, inputs, options, autocast))
        for table in plan_cache._tables:
            table.clear()
            table.update(tables[id(table)])
    return differences, len(entries_with_function())


REPEATED = ("swiglu", "attention", "linear_residual")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", REPEATED)
def test_calls_that_alternate_give_what_first_calls_give(name: str, seed: int) -> None:
    """Tensors in several places, absent ones, and more than MAX_RECENT kinds; results and errors."""
    differences, functions = first_differences(name, seed)
    assert not differences and functions > plan_cache.MAX_RECENT


def test_a_comparison_that_overlooks_an_absent_tensor_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = plan_cache._comparison

    def wrong(*tensors: Any) -> Callable[..., bool]:
        present = [i for i, x in enumerate(tensors) if x is not None]
        is_alike = right(*[tensors[i] for i in present])
        return lambda *others: is_alike(*[others[i] for i in present])

    monkeypatch.setattr(plan_cache, "_comparison", wrong)
    assert any(first_differences("linear_residual", seed)[0] for seed in range(3))


@pytest.mark.parametrize(
    "name, kinds",
    {
        "swiglu": lambda x, y: [(x, x), (x, y)],
        "attention": lambda q, k: [(q, k, k), (q, q, q), (q, k, q), (q, k, k.clone())],
        "linear_residual": lambda x, y: [(x, y, None, x), (x, y, None, y), (x, y, x[0], x), (x, x, None, x)],
    }.items(),
)
def test_a_tensor_in_two_places_and_an_absent_one_take_the_function(name: str, kinds: Any) -> None:
    x, y = (torch.randn(2, 2, 8, 8) if name == "attention" else torch.randn(8, 8) for _ in range(2))
    public, calls = getattr(ops, name), kinds(x, y)
    for _ in range(CALLS):
        expected = [public(*inputs) for inputs in calls]
    entries = entries_with_function()
    assert len(entries) == len(calls)
    for entry in entries:
        direct = entry.direct
        entry.direct = lambda *tensors, direct=direct: (direct(*tensors), "by the function")
    seen = [public(*inputs) for inputs in calls]
    assert all(text == "by the function" for _, text in seen)
    assert all(torch.equal(a, b) for (a, _), b in zip(seen, expected, strict=True))


def test_layers_with_and_without_a_bias_take_functions_of_their_own() -> None:
    x, weight, bias = torch.randn(4, 16), torch.randn(8, 16), torch.randn(8)
    for _ in range(CALLS):
        ops.linear(x, weight, bias)
        ops.linear(x, weight)
    assert len(entries_with_function()) == 2


def test_each_of_sixty_four_kinds_takes_a_function_of_its_own() -> None:
    tensors = [torch.randn(1 + i % 8, 16) for i in range(64)]
    weights = [torch.randn(1 + i // 8, 16) for i in range(64)]
    for _ in range(CALLS):
        outputs = [ops.linear(x, w) for x, w in zip(tensors, weights, strict=True)]
    assert len(entries_with_function()) == 64
    for x, w, y in zip(tensors, weights, outputs, strict=True):
        assert torch.equal(y, ops.linear.__wrapped__(x, w))  # type: ignore[attr-defined]


def test_only_outside_of_autocast_a_call_takes_the_shorter_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU autocast lets PyTorch's norms return float32, which the implementation casts back."""
    module = import_module("weft.ops.activations.with_torch")
    monkeypatch.setattr(module.forward_gelu, "like", lambda *_: torch.zeros_like)
    x = torch.ones(4, 16)
    assert [bool(ops.gelu(x).any()) for _ in range(CALLS)] == [True] * 4 + [False] * (CALLS - 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(ops.gelu(x).any() for _ in range(CALLS))
    assert not ops.gelu(x).any()


def test_what_torch_computes_has_no_node_of_ours() -> None:
    x = leaf(4, 16)
    for _ in range(CALLS):
        y = ops.gelu(x)
    assert type(y.grad_fn).__name__ == "GeluBackward0"
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)  # a second derivative is torch's too
    assert torch.autograd.grad(first.sum(), x)[0].shape == x.shape


def test_options_of_another_type_are_validated_again() -> None:
    x = leaf(4, 16)
    for _ in range(CALLS):
        ops.gelu(x, batch_invariant=False)
    assert entries_with_function()
    with pytest.raises(WeftError, match="impl"):
        ops.gelu(x, impl=["torch"])  # type: ignore[arg-type]
    with pytest.raises(WeftError, match="batch_invariant"):
        ops.gelu(x, batch_invariant=0)  # type: ignore[arg-type]


def test_each_call_gets_the_function_of_its_tensors_and_options() -> None:
    names: list[str] = []

    def make(x: torch.Tensor, *, factor: float = 1.0, **options: Any) -> Repeat:
        name = f"{tuple(x.shape)} {factor} {torch.is_grad_enabled()}"

        def function(x: torch.Tensor) -> torch.Tensor:
            names.append(name)
            return x

        return Repeat(function, by_torch=True)

    @repeated(make)
    def public(x: Any, extra: Any = None, *, factor: float = 1.0, seed: int = 0, flag: Any = None) -> Any:
        return x

    calls: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (torch.zeros(3), {}),
        (torch.zeros(4), {}),
        (torch.zeros(4), {"factor": 2.0}),
        (torch.zeros(4), {"factor": 2}),
    ]
    for x, options in calls * CALLS:
        public(x, **options)
    names.clear()
    for x, options in calls:
        public(x, **options)
    assert names == ["(3,) 1.0 True", "(4,) 1.0 True", "(4,) 2.0 True", "(4,) 2 True"]
    names.clear()
    public(torch.nested.nested_tensor([torch.zeros(3)]))
    public(torch.zeros(3, dtype=torch.int32))
    for seed in range(1, 20):
        public(torch.zeros(3), seed=seed)
        public(torch.zeros(3), flag=torch.zeros(1))
    assert names == []
    public(torch.zeros(3), None)
    assert names == ["(3,) 1.0 True"]


def test_the_gradient_mode_matters_where_a_tensor_requires_a_gradient() -> None:
    calls: list[bool] = []

    def make(x: torch.Tensor) -> Repeat:
        mode = torch.is_grad_enabled()

        def function(x: torch.Tensor) -> torch.Tensor:
            calls.append(mode)
            return x

        return Repeat(function, by_torch=True)

    public = repeated(make)(lambda x: x)
    plain, weight = torch.zeros(3), leaf(3)
    for _ in range(CALLS):
        public(plain)
        public(weight)
        with torch.no_grad():
            public(weight)
    calls.clear()
    for x in (plain, weight):
        public(x)
        with torch.no_grad():
            public(x)
    assert calls == [True, True, True, False] and len(entries_with_function()) == 3


def test_a_function_may_leave_a_call_to_the_public_one() -> None:
    public = repeated(lambda x: Repeat(lambda x: None, by_torch=True))(lambda x: x + 1)
    assert [public(torch.zeros(())).item() for _ in range(CALLS)] == [1.0] * CALLS
    assert len(entries_with_function()) == 1


def test_a_trace_and_a_block_of_batch_invariance_see_the_public_function() -> None:
    import weft

    x, calls = torch.zeros(3), []
    public = repeated(lambda x: Repeat(lambda x: calls.append("direct"), by_torch=True))(lambda x: x + 1)
    for _ in range(CALLS):
        public(x)
    calls.clear()
    with weft.batch_invariant():
        public(x)
    torch.compile(public, fullgraph=True, backend="eager")(x)
    assert calls == []
    public(x)
    assert calls == ["direct"]


def test_threads_share_the_functions_of_public_calls() -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(300):
                x = torch.full((1 + (i * seed) % 12, 4), float(seed))
                assert torch.equal(ops.relu(x), x)
        except BaseException as error:  # noqa: BLE001 - reported by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(entries_with_function()) <= 12


def test_a_switch_is_asked_for_only_where_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a difference PyTorch's own gradient is a product of the same precision."""
    values, written = {"value": "none"}, []
    switch = cublas._Switch(lambda: values["value"], lambda value: written.append(value))
    x: Any = SimpleNamespace(is_cuda=True, dtype=torch.float32)
    monkeypatch.setattr(cublas, "FP32_SWITCH", switch)
    assert cublas.is_always_at(x, "ieee") and not cublas.is_always_at(x, "tf32")
    assert cublas.held_at_precision(lambda: 5, x)() == 5 and written == []
    assert cublas.held_at_precision(lambda: 6, x, "tf32")() == 6 and written == ["tf32", "none"]
    assert not cublas.is_always_at(x, "ieee")  # another thread may be at tf32
    with pytest.raises(ZeroDivisionError):
        cublas.held_at_precision(lambda: 1 // 0, x)()
    assert switch._users == 0


def test_the_defaults_of_a_decorated_function_are_those_of_its_operator() -> None:
    """``of_operator`` repeats the defaults of the public functions' parameters."""
    import inspect

    for name in ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "rope", "matmul"):
        function = getattr(ops, name)
        defaults = {n: p.default for n, p in inspect.signature(function).parameters.items()}
        make = inspect.getclosurevars(function).nonlocals["make"]
        for option, value in inspect.getclosurevars(make).nonlocals["defaults"].items():
            assert defaults[option] == value, (name, option)
    assert public_calls.PLAIN_OPTIONS
