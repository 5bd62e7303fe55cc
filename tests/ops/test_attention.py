"""Attention beyond conformance: the merge rule, layouts, refusals, extreme scores, packed tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import WeftError, ops
from weft.backends.triton_jit import INTERPRETED, tl, triton
from weft.core import registry
from weft.ops.attention import attention_packed, packed
from weft.ops.attention.ladder import merged
from weft.ops.attention.spec import dropout_mask, reference
from weft.ops.attention.triton_configs import KINDS, WIDE, candidates

DEVICE = "cpu" if INTERPRETED else "cuda"
SCORES = st.lists(st.floats(-200, 200, width=32) | st.just(-math.inf), min_size=3, max_size=24).filter(
    lambda s: max(s) > -math.inf
)


@triton.jit
def merge_states(states_ptr, out_ptr):  # type: ignore[no-untyped-def]
    # states: (2, 2) float32, rows of (maximum, sum); out: (2,)
    top, total = merged(
        tl.load(states_ptr),
        tl.load(states_ptr + 1),
        tl.load(states_ptr + 2),
        tl.load(states_ptr + 3),
    )
    tl.store(out_ptr, top)
    tl.store(out_ptr + 1, total)


def _state(scores: list[float]) -> torch.Tensor:
    x = torch.tensor(scores or [-math.inf], dtype=torch.float64)
    top = x.max()
    total = torch.exp(x - top).sum() if top > -math.inf else torch.zeros(())
    return torch.stack([top, total]).float()


def _merge(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.empty(2, device=DEVICE)
    merge_states[(1,)](torch.stack([a, b]).to(DEVICE), out)
    return out.cpu()


def _lse(state: torch.Tensor) -> float:
    return float(state[0].double() + state[1].double().log())


@settings(max_examples=12, deadline=None)
@given(scores=SCORES, data=st.data())
def test_merge_rule_is_associative_and_commutative(scores: list[float], data: Any) -> None:
    cuts = sorted(data.draw(st.integers(0, len(scores))) for _ in range(2))
    a, b, c = (_state(p) for p in (scores[: cuts[0]], scores[cuts[0] : cuts[1]], scores[cuts[1] :]))
    exact = float(torch.tensor(scores, dtype=torch.float64).logsumexp(0))
    for result in (_merge(_merge(a, b), c), _merge(a, _merge(b, c)), _merge(_merge(c, a), b)):
        assert _lse(result) == pytest.approx(exact, rel=1e-6, abs=2e-6)
    assert torch.equal(_merge(a, b), _merge(b, a))


@pytest.mark.parametrize("impl", ["triton", "triton/01-online", "triton/02-tiled"])
def test_row_maximum_rises_with_each_tile(impl: str) -> None:
    """Each tile's scores exceed the previous tile's by hundreds: the earlier sums must vanish."""
    torch.manual_seed(0)
    q, v, k = (torch.randn(1, 1, t, 16, device=DEVICE) for t in (20, 70, 70))
    q = torch.ones_like(q)
    k += torch.linspace(-300, 300, 70, device=DEVICE)[:, None]
    lengths = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    one = registry.implementation("attention", impl)
    out, lse = one.forward(q, k, v, lengths, scale=0.25)
    expected = reference(q.double(), k.double(), v.double(), lengths, scale=0.25)
    torch.testing.assert_close(out.double(), expected[0], rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-6, atol=1e-6)


def test_strided_heads_are_read_and_written_without_copies() -> None:
    x = torch.randn(2, 5, 3, 2, 16, device=DEVICE)
    q, k, v = x.transpose(1, 3).unbind(2)
    assert not q.is_contiguous()
    out = ops.attention(q, k, v, causal=True, impl="triton")
    assert out.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(out, ops.attention(q, k, v, causal=True, impl="eager"))


@pytest.mark.parametrize("impl", ["eager", "torch", "triton", "triton/02-tiled"])
@pytest.mark.parametrize("keys", [0, 5])
def test_no_queries_or_no_keys_give_zeros(impl: str, keys: int) -> None:
    q = torch.randn(2, 2, 3 if keys == 0 else 0, 16, device=DEVICE)
    k = torch.randn(2, 1, keys, 16, device=DEVICE)
    out = ops.attention(q, k, k, impl=impl)
    assert out.shape == q.shape and torch.equal(out, torch.zeros_like(q))


def test_keys_past_a_length_may_hold_nan() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1, 20, 16, device=DEVICE) for _ in range(3))
    lengths = torch.tensor([7, 0], dtype=torch.int32, device=DEVICE)
    clean = ops.attention(q, k, v, key_lengths=lengths, impl="triton")
    k[0, :, 7:], v[0, :, 7:] = math.nan, math.inf
    k[1], v[1] = math.nan, math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = ops.attention(*leaves, key_lengths=lengths, impl="triton")
    assert torch.equal(out, clean) and torch.equal(out[1], torch.zeros_like(out[1]))
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    assert all(bool(g.isfinite().all()) for g in gradients)
    assert not gradients[1][0, :, 7:].any() and not gradients[2][1].any()


def test_dropout_depends_on_index_and_seed_only() -> None:
    whole = dropout_mask(0.3, 9, 0, (4, 5, 7), torch.device("cpu"))
    apart = torch.cat([dropout_mask(0.3, 9, h, (1, 5, 7), torch.device("cpu")) for h in range(4)])
    assert torch.equal(whole, apart)
    many = dropout_mask(0.3, 9, 0, (8, 100, 100), torch.device("cpu")).double().mean()
    assert abs(float(many) - 0.7) < 5 * math.sqrt(0.21 / 80000)


@pytest.mark.parametrize("keys", [48, 46])
def test_dropout_by_blocks_of_four_keys_or_of_one_is_the_same(keys: int) -> None:
    """Kernels share a block of random words where rows have whole blocks; the oracle numbers each weight."""
    generator = torch.Generator().manual_seed(keys)
    inputs = [
        torch.randn(2, 2, n, 32, generator=generator).to(DEVICE).requires_grad_() for n in (37, keys, keys)
    ]
    results = []
    for impl in ("eager", "triton"):
        out = ops.attention(*inputs, causal=True, dropout_p=0.3, seed=2**40 + 7, impl=impl)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for expected, got in zip(*results, strict=True):
        assert torch.allclose(got, expected, atol=1e-4, rtol=1e-4)


def _split(qkv: torch.Tensor, heads: int, kv_heads: int, **options: Any) -> torch.Tensor:
    """Attention on three separate parts of the product."""
    d = qkv.shape[2] // (heads + 2 * kv_heads)
    three = qkv.split([heads * d, kv_heads * d, kv_heads * d], dim=-1)
    q, k, v = (x.unflatten(-1, (-1, d)).transpose(1, 2) for x in three)
    return ops.attention(q, k, v, **options).transpose(1, 2).flatten(2)


PACKED: list[tuple[str, int, int, bool, dict[str, Any]]] = [
    ("triton", 2, 2, False, {"causal": True}),
    ("triton", 2, 1, True, {"dropout_p": 0.3, "seed": 7}),
    ("triton", 1, 1, True, {"scale": 0.5, "key_lengths": torch.tensor([3], dtype=torch.int32)}),
    ("torch", 4, 2, False, {"causal": True}),
]


@pytest.mark.parametrize(("impl", "heads", "kv_heads", "strided", "options"), PACKED)
def test_packed_equals_separate_parts(
    impl: str, heads: int, kv_heads: int, strided: bool, options: dict[str, Any]
) -> None:
    """Bits are equal forward and backward, also if the product is used twice."""
    torch.manual_seed(0)
    options = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    x = torch.randn(1, (heads + 2 * kv_heads) * 16, 5, device=DEVICE).transpose(1, 2)
    x = x.detach().requires_grad_() if strided else x.contiguous().requires_grad_()
    grad = torch.randn(1, 5, heads * 16, device=DEVICE)
    plain = _split(x, heads, kv_heads, impl=impl, **options)
    ours = attention_packed(x, heads, kv_heads=kv_heads, impl=impl, **options)
    assert torch.equal(ours, plain)
    (expected,) = torch.autograd.grad(plain, x, grad)
    (result,) = torch.autograd.grad(ours, x, grad, retain_graph=True)
    assert torch.equal(result, expected) and result.is_contiguous()
    before = result.clone()
    twice = ours * 2 + ours + x.sum(-1, keepdim=True)
    (summed,) = torch.autograd.grad(twice, x, grad)
    torch.testing.assert_close(summed, 3 * expected + grad.sum(-1, keepdim=True))
    assert torch.equal(result, before)  # a returned gradient is not accumulated into


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "cuda"])
@pytest.mark.parametrize("d", [64, 128])
def test_packed_equals_separate_parts_on_a_gpu(impl: str, d: int) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(2, 300, 8 * d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(2, 300, 4 * d, device="cuda", dtype=torch.bfloat16)
    outs = [f(qkv, 4, 2, impl) for f in (_plain, _packed)]
    one, two = (torch.autograd.grad(out, qkv, grad)[0] for out in outs)
    assert torch.equal(outs[0], outs[1]) and torch.equal(one, two)


def _plain(qkv: torch.Tensor, heads: int, kv_heads: int, impl: str) -> torch.Tensor:
    return _split(qkv, heads, kv_heads, causal=True, impl=impl)


def _packed(qkv: torch.Tensor, heads: int, kv_heads: int, impl: str) -> torch.Tensor:
    return attention_packed(qkv, heads, kv_heads=kv_heads, causal=True, impl=impl)


@pytest.mark.slow
def test_packed_passes_opcheck() -> None:
    qkv = torch.randn(1, 5, 4 * 16, device=DEVICE, requires_grad=True)
    lengths = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    rest: tuple[Any, ...] = (True, None, 0.0, 0, False, 0, 3, 2.0, "triton")
    packet = torch.ops.weft.attention_packed.default
    result = torch.library.opcheck(packet, (qkv, lengths, 2, 1, *rest))
    assert set(result.values()) == {"SUCCESS"}
    out, lse = packet(qkv.detach(), lengths, 2, 1, *rest)
    saved = (out, qkv.detach(), lengths, out, lse, 2, 1, *rest)
    result = torch.library.opcheck(torch.ops.weft.attention_packed_backward.default, saved)
    assert set(result.values()) == {"SUCCESS"}


def test_packed_is_traced_and_works_without_gradient_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    qkv = torch.randn(1, 5, 6 * 16, device=DEVICE, requires_grad=True)
    traced = torch.compile(attention_packed, fullgraph=True, backend="aot_eager")
    outs = [f(qkv, 2, causal=True, impl="triton") for f in (attention_packed, traced)]
    one, two = (torch.autograd.grad(o.square().sum(), qkv)[0] for o in outs)
    assert torch.equal(outs[0], outs[1]) and torch.equal(one, two)
    monkeypatch.setattr(packed, "_accepts_gradient_buffer", lambda impl: False)
    out = attention_packed(qkv, 2, causal=True, impl="triton")
    assert torch.equal(torch.autograd.grad(out.square().sum(), qkv)[0], one)
    assert attention_packed(qkv[:, :0], 2, impl="triton").shape == (1, 0, 32)
    for heads, message in ((4, "a multiple"), (0, "1 or more"), (2.0, "1 or more")):
        with pytest.raises(WeftError, match=message):
            attention_packed(qkv[..., :90], heads)  # type: ignore[arg-type]


Q = torch.ones(2, 4, 5, 16)
BAD: list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = [
    ((Q, Q[:, :3], Q[:, :3]), {}),
    ((Q, Q, Q[:, :, :4]), {}),
    ((Q, Q[..., :8], Q[..., :8]), {}),
    ((Q[..., :12], Q[..., :12], Q[..., :12]), {}),
    ((torch.ones(1, 1, 2, 264),) * 3, {}),
    ((Q, Q.half(), Q), {}),
    ((Q, Q, Q), {"scale": 0.0}),
    ((Q, Q, Q), {"dropout_p": 1.0}),
    ((Q, Q, Q), {"dropout_p": 0.1, "seed": -1}),
    ((Q, Q, Q), {"key_lengths": torch.ones(2)}),
    ((Q, Q, Q), {"key_lengths": torch.ones(3, dtype=torch.int32)}),
    ((Q, Q, Q), {"dropout_p": 0.1, "impl": "torch"}),
]


@pytest.mark.parametrize(("arguments", "options"), BAD, ids=lambda v: None)
def test_invalid_arguments_raise(arguments: tuple[torch.Tensor, ...], options: dict[str, Any]) -> None:
    with pytest.raises(WeftError) as caught:
        ops.attention(*arguments, **options)
    assert caught.value.got


@pytest.mark.parametrize("kind", KINDS)
def test_shipped_configurations_are_candidates(kind: str) -> None:
    assert all(config in candidates(kind, size) for size, config in WIDE[kind].items())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("sizes", "kv_heads", "causal"),
    [((2, 4, 65, 64), 2, True), ((7, 8, 1, 256), 4, False), ((1, 2, 1500, 80), 2, True)],
)
def test_later_calls_of_the_library_are_as_exact_as_the_first(
    sizes: tuple[int, ...], kv_heads: int, causal: bool, dtype: torch.dtype
) -> None:
    """The second call with tensors alike takes PyTorch's function, also for tensors that begin elsewhere."""
    q_shape, k_shape = sizes, (sizes[0], kv_heads, *sizes[2:])
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for call in range(4):
        shift = 1 if call == 3 else 0  # the fourth call's tensors are not aligned to 16 bytes

        def draw(shape: tuple[int, ...], call: int = call, shift: int = shift) -> torch.Tensor:
            flat = torch.randn(math.prod(shape) + shift, device="cuda", dtype=dtype)
            return flat[shift:].view(shape).detach().requires_grad_(call > 0)

        inputs = draw(q_shape), draw(k_shape), draw(k_shape)
        out = ops.attention(*inputs, causal=causal)
        exact_inputs = [x.detach().double().requires_grad_(call > 0) for x in inputs]
        q, k, v = exact_inputs
        k, v = (x.repeat_interleave(sizes[1] // kv_heads, 1) for x in (k, v))
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        pairs = [(out, exact)]
        if call:
            grad = torch.randn_like(out)
            gradients = torch.autograd.grad(out, inputs, grad)
            pairs += zip(gradients, torch.autograd.grad(exact, exact_inputs, grad.double()), strict=True)
        # With one key the gradients of q and k are 0; their errors are as large as terms that cancel.
        largest = max(float(b.detach().norm()) for _, b in pairs)
        for a, b in pairs:
            assert float((a.detach().double() - b.detach()).norm()) < limit * largest, call
