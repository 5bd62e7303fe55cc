"""Attention's window, alignment and cap of the scores: definition, sizes, refusals, mutants."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.sampling import sample
from weft import WeftError, ops
from weft.backends.triton_jit import INTERPRETED, tl, triton
from weft.core import FORWARD, Case, Implementation, registry
from weft.ops.attention import attention_packed, with_cuda
from weft.ops.attention.mask import BOTTOM_RIGHT, Mask
from weft.ops.attention.spec import AttentionOptions, reference
from weft.ops.attention.triton_tiles import tanh
from weft.ops.attention.with_eager import IMPLEMENTATION as EAGER
from weft.workbench.check.check import check
from weft.workbench.selftest.mutants.planting import plant

DEVICE = "cpu" if INTERPRETED else "cuda"
LATE = {"causal": True, "alignment": BOTTOM_RIGHT}


def visible(tq: int, tk: int, bottom_right: bool, window: int | None) -> list[list[bool]]:
    """Return the definition of the mask, pair by pair."""
    seen = []
    for i in range(tq):
        position = i + (tk - tq if bottom_right else 0)
        oldest = -math.inf if window is None else position - window + 1
        seen.append([oldest <= j <= position for j in range(tk)])
    return seen


def test_the_mask_and_its_counts_follow_the_definition() -> None:
    for tq, tk, bottom_right, window in itertools.product(
        (1, 2, 5), (1, 3, 5, 9), (False, True), (None, 1, 2, 4, 50)
    ):
        mask = Mask(causal=True, bottom_right=bottom_right, window=window)
        expected = torch.tensor(visible(tq, tk, bottom_right, window))
        hidden = mask.hidden(tq, tk, torch.device("cpu"))
        assert hidden is not None and torch.equal(~hidden, expected), (tq, tk, mask)
        if mask.is_band:
            assert mask.visible_pairs(tq, tk) == int(expected.sum()), (tq, tk, mask)
            assert mask.leaves_queries_without_keys(tq, tk) == bool((expected.sum(1) == 0).any())
    assert Mask(causal=True).visible_pairs(3, 5) == 7.5  # the usual half


def test_the_cost_counts_visible_pairs() -> None:
    operator = registry.operator("attention")
    by_name = {c.name: c for c in operator.cases}
    whole, cut = (
        operator.cost(by_name[f"bf16-1x16x16384x128-causal{end}"], FORWARD).flops
        for end in ("", "-window1024")
    )
    assert whole == 2 * 16 * 128 * 16384**2
    assert cut == 4 * 16 * 128 * sum(min(i + 1, 1024) for i in range(16384))


# (Tq, Tk), key lengths, options; the interpreter's tiles are 32 by 16 and 16 by 32.
SIZES = [(1, 1), (1, 50), (33, 33), (40, 75), (70, 31), (64, 64), (31, 100)]
WINDOWS = (None, 1, 2, 15, 16, 17, 33, 200)
POINTS = [
    (sizes, padded, {"causal": True, "alignment": alignment, "window": window, "softcap": cap})
    for sizes in SIZES
    for padded in (False, True)
    for alignment in (0, BOTTOM_RIGHT)
    for window in WINDOWS
    for cap in (None, 1.5)
    if (alignment, window, cap) != (0, None, None)
]


def test_triton_matches_the_reference_at_any_size() -> None:
    """Tiles before, at and behind both edges of the band, both directions; keys past a length are NaN."""
    implementation = registry.implementation("attention", "triton")
    assert implementation.backward is not None
    for (tq, tk), padded, options in sample(POINTS, 4, "sizes of attention's masks"):
        generator = torch.Generator().manual_seed(0)
        b = 3 if padded else 1
        shapes = ((b, 2, tq, 16), (b, 1, tk, 16), (b, 1, tk, 16), (b, 2, tq, 16))
        q, k, v, grad = (torch.randn(s, generator=generator).to(DEVICE) for s in shapes)
        lengths = torch.tensor([tk // 2, tk, 0][:b], dtype=torch.int32, device=DEVICE)
        params = {**options, "padded": padded}
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        expected, expected_lse = reference(exact[0], exact[1], exact[2], lengths, **params)
        exact_gradients = torch.autograd.grad(expected, exact, grad.double())
        for batch in range(b if padded else 0):
            k[batch, :, int(lengths[batch]) :], v[batch, :, int(lengths[batch]) :] = math.nan, math.inf
        out, lse = implementation.forward(q, k, v, lengths, **params)
        gradients = implementation.backward(grad, q, k, v, lengths, out, lse, **params)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-6, atol=2e-6)
        for ours, right in zip((out, *gradients), (expected, *exact_gradients), strict=True):
            torch.testing.assert_close(ours.double(), right.detach(), rtol=2e-5, atol=2e-5)


@triton.jit
def tangents(x_ptr, y_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    # x, y: (N,) float32
    index = tl.arange(0, N)
    tl.store(y_ptr + index, tanh(tl.load(x_ptr + index)))


def test_tanh_in_triton_has_the_accuracy_that_it_states() -> None:
    ends = torch.tensor([0.0, math.inf, -math.inf, 0.5, -0.5, 1e-30, 88.0, -200.0])
    x = torch.cat([torch.linspace(-12, 12, 4096 - 520), torch.logspace(-6, 0, 512), ends]).to(DEVICE)
    y = torch.empty_like(x)
    tangents[(1,)](x, y, N=4096)
    exact = torch.tanh(x.double())
    assert float(((y.double() - exact) / exact.abs().clamp(min=1e-38)).abs().amax()) <= 3 * 2**-23
    assert y[-7] == 1 and y[-6] == -1
    tangents[(1,)](torch.full_like(x, math.nan), y, N=4096)
    assert bool(y.isnan().all())


def test_public_options_reach_the_kernels() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, t, 16, device=DEVICE) for t in (9, 21, 21))
    options: dict[str, Any] = {"causal": "bottom_right", "window": 5, "softcap": 1.0}
    lengths = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    expected, _ = reference(q.double(), k.double(), v.double(), lengths, **LATE, window=5, softcap=1.0)
    for impl in (None, "eager", "triton"):
        out = ops.attention(q, k, v, impl=impl, **options)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    traced = torch.compile(ops.attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(
        traced(q, k, v, impl="triton", **options), ops.attention(q, k, v, impl="triton", **options)
    )
    # At the bottom right the last rows are those of the whole sequence's mask: a chunk of a prefill.
    whole = torch.cat([torch.randn(1, 2, 12, 16, device=DEVICE), q], 2)
    both = ops.attention(whole, k, v, causal=True, window=5, softcap=1.0)
    torch.testing.assert_close(both[:, :, 12:], ops.attention(q, k, v, **options))


def test_packed_takes_the_options() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(1, 20, 4 * 16, device=DEVICE, requires_grad=True)
    options: dict[str, Any] = {"causal": True, "window": 3, "softcap": 2.0, "impl": "triton"}
    q, k, v = qkv.unflatten(-1, (4, 16)).transpose(1, 2).split((2, 1, 1), 1)
    plain = ops.attention(q, k, v, **options).transpose(1, 2).flatten(2)
    packed = attention_packed(qkv, 2, kv_heads=1, **options)
    assert torch.equal(packed, plain)
    grad = torch.randn_like(plain)
    one, two = (torch.autograd.grad(y, qkv, grad)[0] for y in (plain, packed))
    assert torch.equal(one, two)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"window": 4}, "a causal mask"),
    ({"causal": True, "window": 0}, "from 1"),
    ({"causal": True, "window": 2.0}, "from 1"),
    ({"causal": True, "window": True}, "from 1"),
    ({"causal": True, "window": 2**31}, "from 1"),
    ({"causal": "top_left"}, "bottom_right"),
    ({"causal": torch.ones(1)}, "bottom_right"),
    ({"softcap": 0.0}, "above 0"),
    ({"softcap": -1}, "above 0"),
    ({"softcap": math.inf}, "above 0"),
    ({"softcap": math.nan}, "above 0"),
    ({"softcap": True}, "above 0"),
    ({"softcap": 30.0, "impl": "torch"}, "cap of the scores"),
    ({"causal": True, "window": 3, "impl": "triton/02-tiled"}, "use impl='triton'"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda v: None)
def test_invalid_options_raise(options: dict[str, Any], message: str) -> None:
    q = torch.ones(1, 2, 5, 16, device=DEVICE)
    with pytest.raises(WeftError, match=message):
        ops.attention(q, q, q, **options)


def test_cuda_refuses_what_only_other_kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {c.name: c for c in registry.operator("attention").cases}
    window = cases["bf16-1x4x777x128-causal-window129"]
    refusals = {
        "dropout": cases["bf16-2x2x300x64-causal-window70-dropout"],
        "above 128": cases["bf16-1x2x300x256-causal-window100-softcap50"],
    }
    assert with_cuda.supports(window, "cpu")
    for reason, case in refusals.items():
        answer = with_cuda.supports(case, "cuda")
        assert not answer and reason in answer.reason and "triton" in answer.reason
    monkeypatch.setattr(with_cuda.machine, "has_gpu", lambda: True)
    monkeypatch.setattr(with_cuda, "has_wgmma", lambda device: False)
    answer = with_cuda.supports(window, "cuda")
    assert not answer and "9.0" in answer.reason
    q, lengths = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(WeftError, match="triton"):
        with_cuda.forward(q, q, q, lengths, causal=True, window=3)
    with pytest.raises(WeftError, match="triton"):
        with_cuda.backward(q, q, q, q, lengths, q, lengths, softcap=3.0)


# ---- Mutants: eager with one fault, judged as the selftest judges its own

Change = Callable[[dict[str, Any]], dict[str, Any]]


def changed(change: Change) -> Callable[[], Callable[..., Any]]:
    """Return a maker of eager's forward with other options than the call's."""

    def forward(*inputs: torch.Tensor, **params: Any) -> Any:
        return EAGER.forward(*inputs, **{**params, **change(params)})

    return lambda: forward


def without_lengths(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, **params: Any
) -> Any:
    """Align every batch at the end of its memory instead of its length."""
    return EAGER.forward(q, k, v, torch.full_like(lengths, k.shape[2]), **params)


def straight_through(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, **params: Any
) -> Any:
    """Cap the scores, but let their gradient pass as if they were not."""
    options = AttentionOptions(**params)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = (q @ k.transpose(-1, -2)).float() * options.factor(q.shape[-1])
    assert options.softcap is not None
    s = s + (options.softcap * torch.tanh(s / options.softcap) - s).detach()
    hidden = options.mask.hidden(s.shape[2], s.shape[3], s.device)
    s = s if hidden is None else s.masked_fill(hidden, -math.inf)
    return (torch.softmax(s, -1).to(v.dtype) @ v).contiguous(), s.detach().logsumexp(-1)


WINDOW_CASE, RIGHT_CASE = "fp32-1x2x70x32-1x75-causal-window20", "fp16-1x1x20x32-1x61-bottom-right-window17"
CAP_CASE = "fp32-1x2x37x32-1x50-causal-softcap2"
LENGTHS_CASE = "fp32-3x1x35x32-1x45-bottom-right-window9-softcap5-padded"
# fault: the case and the direction that show it, and the forward
MUTANTS: dict[str, tuple[str, str, Callable[[], Callable[..., Any]]]] = {
    "one key too many": (WINDOW_CASE, "forward", changed(lambda p: {"window": p["window"] + 1})),
    "one key too few": (WINDOW_CASE, "forward", changed(lambda p: {"window": p["window"] - 1})),
    "no window": (WINDOW_CASE, "forward", changed(lambda p: {"window": None})),
    "a window that reaches 16 keys further": (
        WINDOW_CASE,
        "forward",
        changed(lambda p: {"window": -(-p["window"] // 16) * 16}),
    ),
    "aligned at the top left": (RIGHT_CASE, "forward", changed(lambda p: {"alignment": 0})),
    "aligned without regard to lengths": (LENGTHS_CASE, "forward", lambda: without_lengths),
    "no cap": (CAP_CASE, "forward", changed(lambda p: {"softcap": None})),
    "a cap of the scaled scores only": (
        CAP_CASE,
        "forward",
        changed(lambda p: {"softcap": p["softcap"] * 2}),
    ),
    "the cap's slope is missing": (CAP_CASE, "backward", lambda: straight_through),
}


def _mutants() -> Iterator[Any]:
    for fault, (case, direction, forward) in MUTANTS.items():
        identity = f"W01/attention/eager/{fault.replace(' ', '-')}"
        mutant = plant(identity, fault, "error", forward)
        yield pytest.param(
            replace(mutant.make(), directions=(FORWARD, "backward")), case, direction, id=fault
        )


def _case(name: str) -> Case:
    return next(c for c in registry.operator("attention").cases if c.name == name)


@pytest.mark.parametrize(("mutant", "case", "direction"), list(_mutants()))
def test_the_check_refuses_a_wrong_mask_or_cap(mutant: Implementation, case: str, direction: str) -> None:
    # plant()'s implementations support what torch supports; these compute what eager computes.
    mutant = replace(mutant, supports=EAGER.supports)
    verdict = check(registry.operator("attention"), mutant, _case(case), direction, "cpu", n_seeds=1)
    # Either numbers beyond the tolerance, or rows without keys where the reference has some.
    assert verdict.status == "fail" and re.search("times what is allowed|NaN or Inf", verdict.reason)


def test_the_check_accepts_the_forward_that_the_last_mutant_starts_from() -> None:
    mutant = plant("W01/attention/eager/forward", "-", "error", lambda: straight_through)
    honest = replace(mutant.make(), supports=EAGER.supports)
    verdict = check(registry.operator("attention"), honest, _case(CAP_CASE), FORWARD, "cpu", n_seeds=1)
    assert verdict.status == "pass", verdict.reason
