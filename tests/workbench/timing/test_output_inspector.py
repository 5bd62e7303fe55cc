"""Every output of a timed call is a plain tensor of the expected form with memory of its own."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weft.workbench.calls.buffers import InputBuffers
from weft.workbench.calls.staging import TensorForm
from weft.workbench.selftest.mutants.cheats_samples import LazyTensor, LazyTuple
from weft.workbench.timing.output_inspector import OutputInspector

FORM = TensorForm((6, 4), torch.float32, (1, 6))  # the baseline returns a transposed output
X = torch.randn(6, 4)


def inspect(*outputs: object, grad: torch.Tensor | None = None, forms: Any = (FORM,)) -> str:
    inspector = OutputInspector([InputBuffers([X], grad)], forms)
    inspector.inspect(outputs)
    return inspector.violation


class Wrapper(torch.Tensor):
    """Tensor without memory, every operator of which is a Python function."""

    @staticmethod
    def __new__(cls) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, (6, 4), dtype=torch.float32)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return X


def renamed_wrapper() -> torch.Tensor:
    wrapper = Wrapper()
    wrapper.__class__ = torch.Tensor  # type: ignore[assignment]
    return wrapper


def batched() -> str:
    seen: list[str] = []
    torch.vmap(lambda t: (seen.append(inspect(t)), t)[1])(torch.randn(2, 6, 4))
    return seen[0]


LAZY: dict[str, Callable[[], object]] = {
    "subclass": lambda: torch.randn(6, 4).as_subclass(LazyTensor),
    "wrapper": Wrapper,
    "renamed wrapper": renamed_wrapper,
    "lazy copy": lambda: torch._lazy_clone(torch.randn(6, 4)),  # type: ignore[attr-defined]
    "lazy copy of the input": lambda: torch._lazy_clone(X),  # type: ignore[attr-defined]
    "lazy negation": lambda: torch._neg_view(torch.randn(6, 4)),
    "zero tensor": lambda: torch._efficientzerotensor((6, 4)),
    "sparse": lambda: torch.randn(6, 4).to_sparse(),
    "meta": lambda: torch.empty(6, 4, device="meta"),
    "a tuple that computes": lambda: LazyTuple((torch.randn(6, 4),)),
    "a list": lambda: [torch.randn(6, 4)],
    "nothing": lambda: None,
}


@pytest.mark.parametrize("kind", LAZY)
def test_what_is_no_plain_tensor_is_found(kind: str) -> None:
    assert inspect(torch.randn(6, 4)) == "" != inspect(LAZY[kind]())


def test_a_tensor_of_a_function_transform_is_found() -> None:
    assert "computed when it is read" in batched()


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (lambda: torch.randn(6), "shape (6,)"),
        (lambda: torch.randn(6, 4).double(), "torch.float64"),
        (lambda: torch.randn(6, 8)[:, ::2], "strides (8, 2)"),
        (lambda: torch.randn(4).expand(6, 4), "strides (0, 1)"),
        (lambda: X, "memory of its inputs"),
        (lambda: X.view(4, 6).t(), "memory of its inputs"),
        (lambda: (X.clone(), X.clone()), "2 tensors"),
    ],
)
def test_another_form_and_memory_of_the_inputs_are_found(output: Callable[[], object], words: str) -> None:
    assert words in inspect(output())


def test_the_first_violation_is_kept_with_its_call() -> None:
    assert inspect(X.clone(), X.clone(), X).startswith("timed call 3:")


def test_honest_outputs_pass() -> None:
    transposed = torch.randn(4, 6).t()
    offset = torch.randn(7, 4)[1:]
    pair = namedtuple("pair", ["y"])
    assert inspect(transposed, offset, pair(X.clone()), (X.clone(),), X.clone().requires_grad_()) == ""
    largest = torch.randn(6, 4, 3).max(-1)  # a named tuple of torch's
    both = (FORM, TensorForm((6, 4), torch.int64, (4, 1)))
    assert inspect(largest, forms=both) == ""
    assert inspect(torch.empty(0, 4), forms=[TensorForm((0, 4), torch.float32, (4, 1))]) == ""


def test_without_forms_all_calls_have_the_form_of_the_first() -> None:
    assert inspect(torch.randn(3), torch.randn(3), forms=None) == ""
    assert "shape (2,)" in inspect(torch.randn(3), torch.randn(2), forms=None)


def test_a_gradient_may_repeat_one_element_of_the_incoming_one() -> None:
    grad = torch.randn(())
    assert inspect((grad.expand(6, 4),), grad=grad) == ""
    one = TensorForm((1, 1), torch.float32, (1, 1))
    assert inspect((grad.expand(1, 1),), grad=grad, forms=(one,)) == "", (
        "the gradient of a sum of one element"
    )
    dense = torch.randn(6, 4)
    assert "memory of its inputs" in inspect((dense,), grad=dense)
