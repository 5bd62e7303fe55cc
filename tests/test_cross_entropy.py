"""Cross entropy and the LM head's: reductions, the gradient over the logits, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from weft import WeftError, ops
from weft.core import FORWARD, registry
from weft.core.record import FAIL, PASS
from weft.ops._shared.cross_entropy import eager_gradient, eager_losses, gradient_like
from weft.ops._shared.cross_entropy_triton import Config
from weft.ops.linear_cross_entropy import chunks
from weft.ops.linear_cross_entropy.with_triton import forward_with
from weft.workbench.check import check
from weft.workbench.judge import judge
from weft.workbench.local_rig import _copy
from weft.workbench.slots import Leading, deal

TARGETS = torch.tensor([3, -100, 0])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_reduced_as_torch_reduces(reduction: str, smoothing: float) -> None:
    both = [torch.randn(3, 7, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    mine, theirs = (x.requires_grad_() for x in both)
    more: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction}
    got = ops.cross_entropy(mine, TARGETS, **more)
    want = torch.nn.functional.cross_entropy(theirs, TARGETS, **more)
    torch.testing.assert_close(got, want)
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_the_mean_over_nothing_is_nan_as_torch_has_it() -> None:
    assert ops.cross_entropy(torch.randn(2, 5), torch.tensor([-100, -100])).isnan()


def test_the_gradient_takes_the_logits_memory_and_says_so() -> None:
    start = torch.randn(3, 9, requires_grad=True)
    logits = start * 2.0
    ops.cross_entropy(logits, TARGETS).backward(retain_graph=True)
    wanted, start.grad = start.grad, None
    over = start * 2.0
    loss = ops.cross_entropy(over, TARGETS, overwrite=True, impl="triton")
    loss.backward(retain_graph=True)
    assert wanted is not None
    torch.testing.assert_close(start.grad, wanted)
    torch.testing.assert_close(over.detach() * 2.0, wanted)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_columns_of_a_padded_vocabulary_are_read_where_they_lie() -> None:
    padded = torch.randn(3, 40, generator=torch.Generator().manual_seed(5))
    padded[:, 37:] = torch.nan  # nobody's, and not to be read
    wide = padded[:, :37]
    assert gradient_like(wide).stride() == (40, 1)
    dense = wide.contiguous()
    for x in (wide, dense):
        x.requires_grad_()
    losses = [ops.cross_entropy(x, TARGETS, impl="triton") for x in (wide, dense)]
    found = [torch.autograd.grad(one, x)[0] for one, x in zip(losses, (wide, dense), strict=True)]
    # Rows that begin elsewhere off 16 bytes are added up in another order.
    for one, other in (losses, found):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=0.0)


def test_a_target_out_of_range_is_refused_where_it_can_be_seen() -> None:
    for wrong in (7, -1):
        targets = torch.tensor([3, wrong, 0])
        with pytest.raises(WeftError, match=rf"targets\[1\].*expected.*got.*{wrong}"):
            ops.cross_entropy(torch.randn(3, 7), targets)
        with pytest.raises(WeftError, match=r"targets\[1\]"):
            ops.linear_cross_entropy(torch.randn(3, 4), torch.randn(7, 4), targets)


def test_a_target_out_of_range_answers_nan_where_it_cannot() -> None:
    x, targets = torch.randn(3, 7), torch.tensor([3, 7, -1])
    operator = torch.ops.weft.cross_entropy
    for found in (
        eager_losses(x, targets, -100, 0.0, 0.0),
        operator(x, targets, -100, 0, 0, "triton"),
    ):
        losses, lse = found
        assert losses.isnan().tolist() == lse.isnan().tolist() == [False, True, True]
    back = torch.ops.weft.cross_entropy_backward
    ways = (
        eager_gradient(torch.ones(3), x, targets, lse, -100, 0.0, 0.0),
        back(torch.ones(3), x, targets, lse, -100, 0.0, 0.0, "triton"),
    )
    for dx in ways:
        assert dx[0].isfinite().all() and dx[1:].isnan().all()


def test_any_chunks_give_one_answer() -> None:
    x, weight = torch.randn(3, 6), torch.randn(11, 6)
    config = Config(warps=1, accesses=2)
    whole, parts = (
        forward_with(chunks.Plan(rows=r, at_once=a), config, x, weight, TARGETS)
        for r, a in ((3, 3), (2, 1))
    )
    for got, want in zip(parts, whole, strict=True):
        torch.testing.assert_close(got, want)


def test_a_chunk_stays_within_its_budget() -> None:
    plan = chunks.plan(16384, 768, 50304, 2)
    assert plan.rows * 50304 * 2 <= chunks.BUDGET and -(-16384 // plan.rows) == 5
    assert chunks.plan(3, 8, 11, 4) == chunks.Plan(rows=3, at_once=3)


X, WEIGHT, IDS = torch.randn(3, 4), torch.randn(7, 4), torch.tensor([3, 1, 0])
BAD: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("cross_entropy", (X, IDS.int()), {}),
    ("cross_entropy", (X, IDS[:2]), {}),
    ("cross_entropy", (X[0], IDS), {}),
    ("cross_entropy", (X[:, :0], IDS), {}),
    ("cross_entropy", (X, IDS), {"reduction": "max"}),
    ("cross_entropy", (X, IDS), {"label_smoothing": 1.5}),
    ("cross_entropy", (X, IDS), {"z_loss": -1.0}),
    ("cross_entropy", (X, IDS), {"ignore_index": 1.5}),
    ("linear_cross_entropy", (X, WEIGHT.T, IDS), {}),
    ("linear_cross_entropy", (X, WEIGHT.half(), IDS), {}),
    ("linear_cross_entropy", (X, WEIGHT, IDS), {"reduction": "none"}),
]


@pytest.mark.parametrize(("name", "arguments", "more"), BAD, ids=lambda v: None)
def test_a_call_without_an_answer_gets_one_clear_error(
    name: str, arguments: tuple[Any, ...], more: dict[str, Any]
) -> None:
    with pytest.raises(WeftError) as caught:
        getattr(ops, name)(*arguments, **more)
    assert caught.value.expected and caught.value.got


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_without_gradients_the_head_computes_the_loss_alone(impl: str) -> None:
    targets = torch.tensor([3, -100, 0])
    with_grad = ops.linear_cross_entropy(X.clone().requires_grad_(), WEIGHT, targets, impl=impl)
    alone = ops.linear_cross_entropy(X, WEIGHT, targets, impl=impl)
    torch.testing.assert_close(alone, with_grad.detach())
    assert with_grad.requires_grad and not alone.requires_grad


def test_only_who_says_so_may_return_the_losses_alone() -> None:
    operator = registry.operator("cross_entropy")
    case = operator.case("fp32-3x263-3")
    slot = deal(case, "cpu", None, 5)
    decide = judge(operator, case, FORWARD, "cpu", None, slot)
    losses, lse = registry.implementation("cross_entropy", "eager").forward(*slot.inputs)
    assert decide((losses, lse)) is None and decide(Leading((losses,))) is None
    assert decide((losses,)) == "1 tensors where 2 are due"
    assert decide(Leading(())) == "0 tensors where 1 are due"
    assert "times what is allowed" in (decide(Leading((losses + 1,))) or "")
    library = registry.implementation("cross_entropy", "torch")
    assert check(operator, library, case, FORWARD, "cpu", seeds=(5,)).status == PASS
    whole = replace(library, outputs=None)
    verdict = check(operator, whole, case, FORWARD, "cpu", seeds=(5,))
    assert verdict.status == FAIL and "returned 1 tensors, expected 2" in verdict.reason


def test_a_timed_answer_s_copy_lacks_no_more_than_the_answer() -> None:
    assert isinstance(_copy(Leading((torch.ones(1),))), Leading)
    assert not isinstance(_copy((torch.ones(1),)), Leading)
