"""The operators as a user calls them: tracing, gradients, registration, and errors."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.operator_calls import differentiable_operators, example
from helpers.paths import ROOT
from weft import WeftError, ops
from weft.core import registry
from weft.ops.attention.mask import TOP_LEFT
from weft.workbench.calls import inputs as drawing

NAMES = differentiable_operators()
# Inductor takes ten seconds for the code around a kernel of Weft's, which is the same for all operators.
INDUCTOR = {("softmax", "triton"), ("matmul", "torch")}


def _implementations() -> list[tuple[str, str]]:
    shown = {name: registry.implementation_names(name) for name in NAMES}
    pairs = [(n, impl) for n, known in shown.items() for impl in ("torch", "triton") if impl in known]
    return [*pairs, ("sum", "numba/parallel")]


def _tensors(output: Any) -> list[torch.Tensor]:
    tensors = [output] if isinstance(output, torch.Tensor) else list(output)
    return [x for x in tensors if x.requires_grad]


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("name", "impl"), _implementations())
def test_traced_whole_and_differentiated(name: str, impl: str) -> None:
    function = getattr(ops, name)
    call = example(name)
    expected = _tensors(function(**call.inputs, **call.params, impl="eager"))
    expected_gradients = torch.autograd.grad(sum(x.square().sum() for x in expected), call.leaves)
    torch._dynamo.reset()  # the cases share the lambda's code object, and would exceed its recompile limit
    backend = "inductor" if (name, impl) in INDUCTOR else "aot_eager"
    params = call.params
    traced = torch.compile(lambda **a: function(**a, **params, impl=impl), fullgraph=True, backend=backend)
    again = example(name)
    outputs = _tensors(traced(**again.inputs))
    gradients = torch.autograd.grad(sum(x.square().sum() for x in outputs), again.leaves)
    for got, want in zip((*outputs, *gradients), (*expected, *expected_gradients), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", NAMES)
def test_registered_as_pytorch_asks(name: str) -> None:
    """Check the schema, the fake kernels, the registered gradient and tracing with opcheck."""
    operator, packet = registry.operator(name), getattr(torch.ops.weft, name).default
    case = next(c for c in operator.select("check", "cpu") if c.dtype == "float32")
    inputs = drawing.make(case, "cpu", 0)
    for spec, x in zip(case.inputs, inputs, strict=True):
        x.requires_grad_(spec.name in operator.differentiable)
    public = inspect.signature(getattr(ops, name)).parameters
    scalars = [a.name for a in packet._schema.arguments[len(inputs) : -1]]
    defaults = {name: p.default for name, p in public.items()} | {"alignment": TOP_LEFT}
    params = [case.params[a] if a in case.params else defaults[a] for a in scalars]
    impl = "triton" if "triton" in registry.implementation_names(name) else "torch"
    results = torch.library.opcheck(packet, (*inputs, *params, impl))
    assert set(results.values()) == {"SUCCESS"}


ONES = torch.ones(3, 4)
WRONG = ("text", ONES.int(), ONES.to("meta"), ONES.to_sparse())


def _takes(name: str, x: Any) -> bool:
    """Return True for integers where an operator takes them: what moves elements computes with none."""
    is_integer = isinstance(x, torch.Tensor) and x.dtype == torch.int32
    return is_integer and "int32" in registry.operator(name).dtypes


BAD: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    *(
        (n, (), dict.fromkeys(example(n).inputs, x) | example(n).params)
        for n in NAMES
        for x in WRONG
        if not _takes(n, x)
    ),
    *((n, (), example(n).inputs | example(n).params | {"impl": "tritn"}) for n in NAMES),
    ("softmax", (torch.tensor(1.0),), {}),
    ("matmul", (ONES, ONES), {}),
    ("matmul", (ONES, ONES[0]), {}),
    ("matmul", (ONES, ONES.T.half()), {}),
    ("matmul", (ONES, ONES.T), {"precision": "tf16"}),
    ("matmul", (ONES.half(), ONES.T.half()), {"precision": "tf32"}),
]


@pytest.mark.parametrize(("name", "arguments", "more"), BAD, ids=lambda v: None)
def test_a_call_without_an_answer_gets_one_clear_error(
    name: str, arguments: tuple[Any, ...], more: dict[str, Any]
) -> None:
    with pytest.raises(WeftError) as caught:
        getattr(ops, name)(*arguments, **more)
    assert caught.value.expected and caught.value.got


def test_an_implementation_that_does_not_run_here_says_why() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    impl = "numba/parallel" if device == "cuda" else "cuda"
    with pytest.raises(WeftError, match=r"is not available.*hint"):
        ops.gelu(torch.ones(3, device=device), impl=impl)


@pytest.mark.parametrize("name", ["gelu", "softmax", "sum", "matmul"])
def test_empties_are_answered_as_torch_does(name: str) -> None:
    shapes = [(0, 4), (4, 3)] if name == "matmul" else [(0, 4)]
    empty = [torch.ones(s) for s in shapes]
    got = getattr(ops, name)(*empty, impl="triton")
    assert torch.equal(got, getattr(ops, name)(*empty, impl="torch"))


COMPILE = """
from weft.core import registry
source = registry.implementation("gelu", "cuda").aot_kernels[0]
print(len(source.compile("sm_90")))
"""


def test_two_processes_compile_one_kernel_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "WEFT_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", COMPILE]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=120)[0] for process in both]
    assert [p.returncode for p in both] == [0, 0] and answers[0] == answers[1]
    assert len(list(tmp_path.rglob("*.cubin"))) == 1 and len(list(tmp_path.rglob("tmp*"))) == 0


def test_every_operator_is_public() -> None:
    # attention_packed: the same numbers, from another layout; quantize_fp8: prepares scaled_matmul's inputs
    forms = {"attention_packed", "quantize_fp8"}
    assert set(registry.operator_names()) == set(ops.__all__) - forms


def test_a_tile_that_the_device_has_no_room_for_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from weft.ops.matmul import with_cuda

    a = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
    tiles = {}
    for kib in (163, 227):
        monkeypatch.setattr(with_cuda, "smem_per_block", lambda device, kib=kib: kib << 10)
        tiles[kib] = with_cuda.choose(a, a, "ieee").tile
    assert tiles == {163: (128, 128), 227: (256, 128)}


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_importing_the_operators_starts_no_thread() -> None:
    """A process forked after torch.s threads have started waits for them in its first parallel loop."""
    script = """
import os, torch
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
import weft.ops
from weft.core import registry
for name in registry.operator_names():
    registry.operator(name)
print(count() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 0


# Calls of the operators that the registry's example does not describe, or that take a flag besides.
CALLS_WITH_FLAGS: dict[str, tuple[Any, ...]] = {
    "argreduce": (torch.randn(4, 8), "argmax", 1),
    "attention": (torch.randn(1, 2, 4, 8),) * 3,
    "attention_packed": (torch.randn(1, 4, 48), 2),
    "cross_entropy": (torch.randn(4, 8), torch.tensor([0, 3, 1, 7])),
    "cumsum": (torch.randn(4, 8),),
    "linear_gelu": (torch.randn(4, 8), torch.randn(6, 8), torch.randn(6)),
    "reduce": (torch.randn(4, 8), "sum", 1),
    "rope": (torch.randn(1, 2, 4, 8), torch.randn(4, 4), torch.randn(4, 4)),
    "segmented_cumsum": (torch.randn(4, 8), torch.tensor([0, 3, 8])),
    "sort": (torch.randn(4, 8),),
    "sort_keys": (torch.randn(4, 8),),
    "topk": (torch.randn(4, 8), 2),
}


def _flags() -> list[tuple[str, str]]:
    """Return each public function with each of its options that are True or False."""
    functions = [(n, f) for n, f in vars(ops).items() if inspect.isfunction(f)]
    flags = [
        (name, option)
        for name, function in functions
        for option, parameter in inspect.signature(function).parameters.items()
        if str(parameter.annotation).startswith("bool") and option != "batch_invariant"
    ]
    assert len(flags) > 10
    return flags


@pytest.mark.parametrize(("name", "option"), _flags())
def test_a_number_is_no_flag(name: str, option: str) -> None:
    """Not after calls with True either, to which one with 1 is equal in a dictionary."""
    function = getattr(ops, name)
    for _ in range(5):
        function(*CALLS_WITH_FLAGS[name], **{option: True})
    for value in (1, 1.0, torch.tensor(True)):
        with pytest.raises(WeftError, match=option) as caught:
            function(*CALLS_WITH_FLAGS[name], **{option: value})
        assert "True" in caught.value.expected and caught.value.got
