"""The losses beyond conformance: reductions, the gradient written over the logits, chunks, bad arguments."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from helpers.operator_calls import Call, assert_refused
from weft import WeftError, ops
from weft.core import FORWARD, registry
from weft.core.record import FAIL, PASS
from weft.dispatch import choice
from weft.dispatch.operator import clear_caches
from weft.ops.losses import chunks
from weft.ops.losses.spec import LossOptions, gradient_like
from weft.ops.losses.with_eager import eager_gradient, eager_losses
from weft.ops.losses.with_triton import Config, linear_cross_entropy_forward, mean_of_rows
from weft.workbench.calls.buffers import LeadingOutputs, allocate_buffers
from weft.workbench.check.check import check
from weft.workbench.check.output_judge import OutputJudges

TARGETS = torch.tensor([3, -100, 0])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_reductions_match_torch(reduction: str, smoothing: float) -> None:
    logits = [torch.randn(3, 7, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    ours, torchs = (x.requires_grad_() for x in logits)
    options: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction}
    got = ops.cross_entropy(ours, TARGETS, **options)
    expected = torch.nn.functional.cross_entropy(torchs, TARGETS, **options)
    torch.testing.assert_close(got, expected)
    got.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, torchs.grad)


def test_mean_over_no_rows_is_nan() -> None:
    assert ops.cross_entropy(torch.randn(2, 5), torch.tensor([-100, -100])).isnan()


def test_overwrite_writes_the_gradient_over_the_logits_and_refuses_a_second_backward() -> None:
    start = torch.randn(3, 9, requires_grad=True)
    logits = start * 2.0
    ops.cross_entropy(logits, TARGETS).backward(retain_graph=True)
    expected, start.grad = start.grad, None
    overwritten = start * 2.0
    loss = ops.cross_entropy(overwritten, TARGETS, overwrite=True, impl="triton")
    loss.backward(retain_graph=True)
    assert expected is not None
    torch.testing.assert_close(start.grad, expected)
    torch.testing.assert_close(overwritten.detach() * 2.0, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_columns_of_a_padded_vocabulary_are_read_in_place() -> None:
    padded = torch.randn(3, 40, generator=torch.Generator().manual_seed(5))
    padded[:, 37:] = torch.nan  # padding, which must not be read
    wide = padded[:, :37]
    assert gradient_like(wide).stride() == (40, 1)
    dense = wide.contiguous()
    for x in (wide, dense):
        x.requires_grad_()
    losses = [ops.cross_entropy(x, TARGETS, impl="triton") for x in (wide, dense)]
    gradients = [torch.autograd.grad(loss, x)[0] for loss, x in zip(losses, (wide, dense), strict=True)]
    # Rows with another alignment to 16 bytes are summed in another order.
    for from_wide, from_dense in (losses, gradients):
        torch.testing.assert_close(from_wide, from_dense, rtol=2e-6, atol=0.0)


def test_a_target_out_of_range_raises_on_a_cpu() -> None:
    for bad_target in (7, -1):
        targets = torch.tensor([3, bad_target, 0])
        with pytest.raises(WeftError, match=rf"targets\[1\].*expected.*got.*{bad_target}"):
            ops.cross_entropy(torch.randn(3, 7), targets)
        with pytest.raises(WeftError, match=r"targets\[1\]"):
            ops.linear_cross_entropy(torch.randn(3, 4), torch.randn(7, 4), targets)


def test_a_target_out_of_range_gives_nan_below_the_check() -> None:
    x, targets = torch.randn(3, 7), torch.tensor([3, 7, -1])
    operator = torch.ops.weft.cross_entropy
    for losses, lse in (
        eager_losses(x, targets, LossOptions()),
        operator(x, targets, -100, 0, 0, "triton"),
    ):
        assert losses.isnan().tolist() == lse.isnan().tolist() == [False, True, True]
    backward = torch.ops.weft.cross_entropy_backward
    gradients = (
        eager_gradient(torch.ones(3), x, targets, lse, LossOptions()),
        backward(torch.ones(3), x, targets, lse, -100, 0.0, 0.0, "triton"),
    )
    for dx in gradients:
        assert dx[0].isfinite().all() and dx[1:].isnan().all()


def test_results_do_not_depend_on_the_chunks() -> None:
    x, weight = torch.randn(3, 6), torch.randn(11, 6)
    config = Config(warps=1, unroll=2)
    one_chunk, small_chunks = (
        linear_cross_entropy_forward(
            x, weight, TARGETS, plan=chunks.ChunkPlan(rows=r, step_rows=s), config=config
        )
        for r, s in ((3, 3), (2, 1))
    )
    for got, expected in zip(small_chunks, one_chunk, strict=True):
        torch.testing.assert_close(got, expected)


def test_a_chunk_stays_within_its_budget() -> None:
    plan = chunks.plan_chunks(16384, 768, 50304, 2)
    assert plan.rows * 50304 * 2 <= chunks.LOGITS_BUDGET and -(-16384 // plan.rows) == 5
    assert chunks.plan_chunks(3, 8, 11, 4) == chunks.ChunkPlan(rows=3, step_rows=3)


X, WEIGHT, IDS = torch.randn(3, 4), torch.randn(7, 4), torch.tensor([3, 1, 0])
BAD_CALLS: list[Call] = [
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


@pytest.mark.parametrize("call", BAD_CALLS, ids=lambda v: None)
def test_bad_arguments_raise_one_clear_error(call: Call) -> None:
    assert_refused(call)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_without_gradients_the_head_computes_only_the_loss(impl: str) -> None:
    targets = torch.tensor([3, -100, 0])
    with_grad = ops.linear_cross_entropy(X.clone().requires_grad_(), WEIGHT, targets, impl=impl)
    alone = ops.linear_cross_entropy(X, WEIGHT, targets, impl=impl)
    torch.testing.assert_close(alone, with_grad.detach())
    assert with_grad.requires_grad and not alone.requires_grad


def test_only_an_implementation_that_declares_it_may_return_the_losses_alone() -> None:
    operator = registry.operator("cross_entropy")
    case = operator.case("fp32-3x263-3")
    buffers = allocate_buffers(case, "cpu", None, 5)
    decide = OutputJudges(operator, case, FORWARD, "cpu", None)(buffers)
    losses, lse = registry.implementation("cross_entropy", "eager").forward(*buffers.inputs)
    assert decide((losses, lse)) is None and decide(LeadingOutputs((losses,))) is None
    assert decide((losses,)) == "1 tensors where 2 are due"
    assert decide(LeadingOutputs(())) == "0 tensors where 1 are due"
    assert "times what is allowed" in (decide(LeadingOutputs((losses + 1,))) or "")
    library = registry.implementation("cross_entropy", "torch")
    assert check(operator, library, case, FORWARD, "cpu", seeds=(5,)).status == PASS
    whole = replace(library, outputs=None)
    verdict = check(operator, whole, case, FORWARD, "cpu", seeds=(5,))
    assert verdict.status == FAIL and "returned 1 tensors, expected 2" in verdict.reason


def mean_and_gradient(x: torch.Tensor, targets: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    x = x.clone().requires_grad_()
    loss = ops.cross_entropy(x, targets, **options)
    assert loss.shape == () and loss.dtype == torch.float32
    return loss.detach(), *torch.autograd.grad(loss, x, torch.tensor(3.0, device=x.device))


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}, {"ignore_index": 2}])
def test_the_mean_by_one_launch_is_that_of_the_rows(options: dict[str, Any]) -> None:
    x, targets = torch.randn(6, 7), torch.arange(6) % 5
    loss, gradient = mean_and_gradient(x, targets, impl="triton", **options)
    expected, expected_gradient = mean_and_gradient(x, targets, impl="eager", **options)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    with torch.no_grad():  # the same launches
        assert torch.equal(ops.cross_entropy(x, targets, impl="triton", **options), loss)


@pytest.mark.parametrize("rows", [1, 1024, 2049])
def test_the_mean_of_rows_counts_those_that_are_not_ignored(rows: int) -> None:
    losses, targets = torch.rand(rows), torch.arange(rows) % 5
    losses[targets == 4] = 0.0  # as the forward returns them
    mean, count = mean_of_rows(losses, targets, 4)
    counted = targets != 4
    assert count == counted.sum()
    assert float(mean) == pytest.approx(float(losses.double()[counted].mean()), rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "cuda"])
@pytest.mark.parametrize("rows", [1, 1023, 4096, 65536])
def test_the_mean_on_a_gpu_counts_the_rows_that_are_not_ignored(rows: int, impl: str) -> None:
    targets = torch.arange(rows, device="cuda") % 5
    for _ in range(2):  # the second call repeats the launch of the first
        losses = torch.rand(rows, device="cuda")
        losses[targets == 4] = 0.0
        mean, count = import_module(f"weft.ops.losses.with_{impl}").mean_of_rows(losses, targets, 4)
        counted = targets != 4
        assert count == counted.sum()
        assert float(mean) == pytest.approx(float(losses.double()[counted].mean()), rel=1e-6)
    x = torch.randn(rows, 7, device="cuda")
    loss, gradient = mean_and_gradient(x, targets, impl=impl, ignore_index=4)
    expected, expected_gradient = mean_and_gradient(x, targets, impl="eager", ignore_index=4)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)


def test_a_mean_over_no_row_is_nan_and_its_gradient_is_zero_as_in_torch() -> None:
    targets = torch.full((3,), -100)
    loss, gradient = mean_and_gradient(torch.randn(3, 7), targets, impl="triton")
    assert loss.isnan() and torch.equal(gradient, torch.zeros(3, 7))


def test_the_mean_of_more_rows_than_a_block_takes_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    x, targets = torch.randn(9, 7), torch.arange(9) % 7
    fused = mean_and_gradient(x, targets, impl="triton")
    monkeypatch.setattr("weft.ops.losses.mean.MAX_ROWS", 8)
    monkeypatch.setattr("weft.ops.losses.mean_cross_entropy", None)  # is not called
    apart = mean_and_gradient(x, targets, impl="triton")
    for a, b in zip(fused, apart, strict=True):
        torch.testing.assert_close(a, b)


def test_a_gradient_of_the_means_gradient_is_refused() -> None:
    x = torch.randn(3, 7, requires_grad=True)
    loss = ops.cross_entropy(x, torch.arange(3), impl="triton")
    with pytest.raises(WeftError, match=r"cross_entropy's gradient.*impl='torch'"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("options", [{}, {"reduction": "sum", "z_loss": 1e-2, "label_smoothing": 0.1}])
def test_a_heads_loss_by_torchs_products_takes_the_cross_entropy_that_dispatch_chooses(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clear_caches()
    chosen: list[str] = []

    def choose(name: str, *call: Any) -> str:
        chosen.append(name)
        return "triton"

    monkeypatch.setattr(choice, "choose", choose)
    losses = import_module("weft.ops.losses")
    assert losses._function_of_library(options, "cuda", may_compose=True) is None
    function = losses._function_of_library(options, "torch", may_compose=True)
    targets = torch.tensor([1, -100, 3, 15, 0])
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    for _ in range(6):  # the first calls, and repeated ones
        loss = function(x, weight, targets)
        gradients = torch.autograd.grad(loss, (x, weight), retain_graph=True)
        again = torch.autograd.grad(loss, (x, weight))
        assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
    assert chosen == ["cross_entropy"]  # its plan is made once
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = ops.cross_entropy(wide[0].float() @ wide[1].float().t(), targets, **options, impl="eager")
    torch.testing.assert_close(loss, expected.float())
    for a, b in zip(gradients, torch.autograd.grad(expected, wide), strict=True):
        torch.testing.assert_close(a, b.float())
    clear_caches()
