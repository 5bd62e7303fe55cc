"""The operators as a user calls them: traced whole, differentiated, registered, refusing well."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from weft import WeftError, ops
from weft.core import registry

ROOT = Path(__file__).parent.parent
ARGUMENTS: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {
    "gelu": lambda: (torch.randn(5, 33),),
    "softmax": lambda: (torch.randn(5, 33),),
    "sum": lambda: (torch.randn(5, 33),),
    "matmul": lambda: (torch.randn(5, 33), torch.randn(33, 7)),
}
WAYS = ("torch", "triton", "numba/parallel")


def _leaves(name: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(x.requires_grad_() for x in ARGUMENTS[name]())


@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_traced_whole_and_differentiated(name: str, impl: str) -> None:
    function = getattr(ops, name)
    expected = function(*(leaves := _leaves(name)), impl="eager")
    wanted = torch.autograd.grad(expected.square().sum(), leaves)
    torch._dynamo.reset()  # the lambda's code is one for all cases, which would use up its limit
    traced = torch.compile(lambda *a: function(*a, impl=impl), fullgraph=True)
    again = _leaves(name)
    output = traced(*again)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(output.square().sum(), again)
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_registered_as_pytorch_asks(name: str) -> None:
    more = ("ieee",) if name == "matmul" else ()
    operator = getattr(torch.ops.weft, name).default
    found = torch.library.opcheck(operator, (*_leaves(name), *more, "triton"))
    assert set(found.values()) == {"SUCCESS"}


ONES = torch.ones(3, 4)
BAD: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    *((name, ("text",) * len(make()), {}) for name, make in ARGUMENTS.items()),
    *((name, (ONES.int(),) * len(make()), {}) for name, make in ARGUMENTS.items()),
    *((name, (ONES.to("meta"),) * len(make()), {}) for name, make in ARGUMENTS.items()),
    *((name, (ONES.to_sparse(),) * len(make()), {}) for name, make in ARGUMENTS.items()),
    *((name, make(), {"impl": "tritn"}) for name, make in ARGUMENTS.items()),
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
    with pytest.raises(WeftError, match=r"does not run here.*hint"):
        ops.gelu(torch.ones(3, device=device), impl=impl)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_empties_are_answered_as_torch_does(name: str) -> None:
    shapes = [(0, 4), (4, 3)] if name == "matmul" else [(0, 4)]
    empty = [torch.ones(s) for s in shapes]
    got = getattr(ops, name)(*empty, impl="triton")
    assert torch.equal(got, getattr(ops, name)(*empty, impl="torch"))


COMPILE = """
from weft.core import registry
source = registry.implementation("gelu", "cuda").specimens[0]
print(len(source.compile("sm_90")))
"""


def test_two_processes_compile_one_kernel_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "WEFT_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", COMPILE]
    both = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=120)[0] for process in both]
    assert [p.returncode for p in both] == [0, 0] and answers[0] == answers[1]
    assert len(list(tmp_path.rglob("*.cubin"))) == 1 and len(list(tmp_path.rglob("tmp*"))) == 0


def test_every_operator_is_tested_here() -> None:
    assert set(ARGUMENTS) == set(registry.operator_names()) == set(ops.__all__)


def test_a_tile_that_the_device_has_no_room_for_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from weft.ops.matmul import with_cuda

    a = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
    tiles = {}
    for kib in (163, 227):
        monkeypatch.setattr(with_cuda, "_room", lambda kind, kib=kib: kib << 10)
        tiles[kib] = with_cuda.choose(a, a, "ieee").tile
    assert tiles == {163: (128, 128), 227: (256, 128)}
