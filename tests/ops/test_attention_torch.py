"""Attention by PyTorch: public calls are SDPA itself, and no launch exceeds the limits of a grid."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from weft import WeftError, ops
from weft.core import Case, Input, registry
from weft.ops.attention import with_torch
from weft.ops.attention.spec import reference

SDPA: Any = torch.nn.functional.scaled_dot_product_attention
CALLS = 6  # the fourth one makes the function that repeats them
LAUNCHING = ("cuda", "triton")


def draw(heads: int, kv_heads: int, queries: int, keys: int, dtype: torch.dtype, grad: bool) -> list[Any]:
    shapes = [(2, heads, queries, 16), *2 * [(2, kv_heads, keys, 16)]]
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "keys", "causal"),
    [(4, 4, 7, 7, True), (4, 2, 7, 7, True), (4, 1, 1, 9, False), (3, 3, 1, 1, False), (4, 2, 70, 70, True)],
)
def test_each_call_is_the_one_of_pytorch(
    heads: int, kv_heads: int, queries: int, keys: int, causal: bool, dtype: torch.dtype, training: bool
) -> None:
    """The first call and later ones have the bits, strides and gradients of SDPA, and its node."""
    torch.manual_seed(0)
    for _ in range(CALLS):
        inputs = draw(heads, kv_heads, queries, keys, dtype, training)
        expected = SDPA(*inputs, is_causal=causal, enable_gqa=heads != kv_heads)
        for impl in (None, "torch"):
            out = ops.attention(*inputs, causal=causal, impl=impl)
            assert torch.equal(out, expected) and out.stride() == expected.stride()
            assert type(out.grad_fn) is type(expected.grad_fn)
            if training:
                grad = torch.randn_like(out)
                results = torch.autograd.grad(out, inputs, grad)
                gradients = torch.autograd.grad(expected, inputs, grad, retain_graph=True)
                assert all(torch.equal(a, b) for a, b in zip(results, gradients, strict=True))


def test_a_packed_call_is_the_one_of_pytorch_on_its_parts() -> None:
    qkv = torch.randn(2, 9, 8 * 16, requires_grad=True)
    parts = [x.transpose(1, 2) for x in qkv.unflatten(-1, (8, 16)).split((4, 2, 2), 2)]
    expected = SDPA(*parts, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    out = ops.attention_packed(qkv, 4, kv_heads=2, causal=True)
    assert torch.equal(out, expected)
    grad = torch.randn_like(out)
    one, two = (torch.autograd.grad(x, qkv, grad)[0] for x in (out, expected))
    assert torch.equal(one, two)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_traced_call_is_the_one_of_pytorch(dynamic: bool) -> None:
    torch._dynamo.reset()
    traced = torch.compile(ops.attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    inputs = draw(4, 2, 7, 7, torch.float32, True)
    out, expected = traced(*inputs, causal=True), SDPA(*inputs, is_causal=True, enable_gqa=True)
    assert torch.equal(out, expected) and out.stride() == expected.stride()


def test_a_call_off_the_cpu_is_traced_without_its_memory() -> None:
    torch._dynamo.reset()
    traced = torch.compile(with_torch.sdpa, fullgraph=True, backend="aot_eager")
    q, k, v = (x.to("meta") for x in draw(4, 2, 7, 7, torch.float32, False))
    assert traced(q, k, v, True, None).shape == q.shape


def test_rows_are_aligned_off_the_cpu() -> None:
    wide, narrow = (torch.empty(2, 4, 7, n, device="meta", dtype=torch.bfloat16) for n in (72, 68))
    x = wide[..., :64]
    assert with_torch._aligned(x) is x
    assert with_torch._aligned(narrow[..., :64]).stride(2) == 64
    # A mapped tensor has no memory to ask for.
    mapped = torch.func.vmap(with_torch._aligned)(torch.empty(3, *x.shape, device="meta"))
    assert mapped.shape == (3, *x.shape)


def test_arguments_are_checked_before_pytorch_sees_them() -> None:
    q, k, v = draw(4, 2, 7, 7, torch.float32, False)
    for _ in range(CALLS):
        with pytest.raises(WeftError, match="scale"):
            ops.attention(q, k, v, scale=-1.0)
        with pytest.raises(WeftError, match="heads"):
            ops.attention(q[:, :3], k, v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (1, 9), (9, 3)])
def test_the_unfused_path_has_the_output_of_sdpa_and_a_log_sum_exp(
    queries: int, keys: int, causal: bool
) -> None:
    q, k, v = draw(4, 2, queries, keys, torch.float32, False)
    out, lse = with_torch._with_scores(q, k, v, causal, 0.3)
    assert torch.equal(out, SDPA(q, k, v, is_causal=causal, scale=0.3, enable_gqa=True))
    exact = reference(*(x.double() for x in (q, k, v)), torch.zeros(2), causal=causal, scale=0.3)[1]
    torch.testing.assert_close(lse.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """Return a list of the PyTorch calls that are made: a name and the shape of q."""
    recorded: list[tuple[str, tuple[int, ...]]] = []

    def record(name: str) -> Any:
        def call(q: Any, k: Any, *rest: Any) -> Any:
            recorded.append((name, tuple(q.shape)))
            assert q.shape[0] == k.shape[0] and q.shape[1] % k.shape[1] == 0
            return torch.empty_like(q)

        return call

    monkeypatch.setattr(with_torch, "_sdpa", record("sdpa"))
    monkeypatch.setattr(with_torch, "_efficient_output", record("efficient"))
    return recorded


@pytest.mark.parametrize(
    ("q_shape", "kv_heads", "keys", "choice", "expected"),
    [
        # Few queries, or few keys: SDPA's unfused path, at any batch.
        ((9362, 8, 7, 256), 4, 7, with_torch.UNFUSED, [("sdpa", (9362, 8, 7, 256))]),
        ((70000, 8, 7, 256), 4, 7, with_torch.UNFUSED, [("sdpa", (70000, 8, 7, 256))]),
        ((2, 8, 128, 64), 4, 128, with_torch.UNFUSED, [("sdpa", (2, 8, 128, 64))]),
        ((2, 8, 4096, 64), 4, 7, with_torch.UNFUSED, [("sdpa", (2, 8, 4096, 64))]),
        # More of both: no scores are stored.
        ((2, 8, 129, 64), 4, 129, with_torch.UNFUSED, [("efficient", (2, 8, 129, 64))]),
        # A fused kernel: SDPA itself, in parts beyond the limits of a grid.
        ((2, 8, 129, 64), 4, 129, with_torch.FLASH, [("sdpa", (2, 8, 129, 64))]),
        ((65535, 2, 1, 64), 1, 1, with_torch.FLASH, [("sdpa", (65535, 2, 1, 64))]),
        (
            (65536, 32, 1, 64),
            8,
            1,
            with_torch.FLASH,
            [("sdpa", (65535, 32, 1, 64)), ("sdpa", (1, 32, 1, 64))],
        ),
        (
            (1, 65536, 1, 64),
            65536,
            1,
            with_torch.CUDNN,
            [("sdpa", (1, 65535, 1, 64)), ("sdpa", (1, 1, 1, 64))],
        ),
    ],
)
def test_calls_of_a_gpu_fit_a_grid_and_store_few_scores(
    q_shape: tuple[int, ...],
    kv_heads: int,
    keys: int,
    choice: int,
    expected: list[Any],
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(with_torch, "_choice", lambda *_: choice)
    monkeypatch.setattr(with_torch, "_aligned", lambda x: x)
    b, _, _, d = q_shape
    with FakeTensorMode():
        q = torch.empty(q_shape, device="cuda", dtype=torch.bfloat16)
        k = torch.empty((b, kv_heads, keys, d), device="cuda", dtype=torch.bfloat16)
        out = with_torch.sdpa(q, k, k, False, None)
    assert calls == expected and out.shape == q.shape


def test_a_mapped_call_of_a_gpu_is_not_asked_for_its_choice(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch has no rule for the choice under vmap; fake tensors of a GPU that is not here have no vmap."""
    with pytest.raises(RuntimeError, match="Batching rule"):
        torch.func.vmap(lambda x: x + with_torch._choice(x, x, x, False, None))(torch.ones(2, 1, 1, 4, 16))
    monkeypatch.setattr(with_torch, "_is_wrapped", lambda _: True)
    monkeypatch.setattr(with_torch, "_choice", lambda *_: pytest.fail("asked"))
    with FakeTensorMode():
        q = torch.empty((2, 4, 200, 64), device="cuda")
        for heads in (4, 1):
            k = torch.empty((2, heads, 200, 64), device="cuda")
            with_torch.sdpa(q, k, k, False, None)
    assert [name for name, _ in calls] == ["sdpa", "efficient"]


@pytest.mark.parametrize(("b", "h", "kv_heads"), [(7, 4, 2), (2, 8, 4), (2, 8, 1), (5, 12, 2), (3, 3, 3)])
def test_parts_give_the_whole(b: int, h: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a grid is 3 here; 12 heads in 2 groups have more heads a group than that."""
    monkeypatch.setattr(with_torch, "MAX_GRID", 3)
    q = torch.randn(b, h, 5, 16)
    k, v = torch.randn(b, kv_heads, 6, 16), torch.randn(b, kv_heads, 6, 16)
    sizes: list[int] = []

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
        sizes.extend(q.shape[:2])
        return with_torch._cpu(q, k, v, *rest)

    results = with_torch._in_pieces(call, q, k, v, True, None)
    assert max(sizes) <= 3
    whole = with_torch._cpu(q, k, v, True, None)
    torch.testing.assert_close(tuple(results), tuple(whole))


def test_decoding_in_parts_gives_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(7, 1, 4, 16), torch.randn(7, 2, 9, 16), torch.randn(7, 2, 9, 16)
    lengths = torch.tensor([3, 0, 9, 1, 2, 8, 9], dtype=torch.int32)
    whole = ops.attention_decode(q, k, v, lengths, impl="torch")
    batches: list[int] = []

    def call(q: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        batches.append(q.shape[0])
        return SDPA(q, *rest, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", call)
    monkeypatch.setattr(import_module("weft.ops.attention_decode.with_torch"), "MAX_BATCH", 3)
    # Not the same bits: on a CPU the library's products of a batch depend on its size and the threads.
    torch.testing.assert_close(ops.attention_decode(q, k, v, lengths, impl="torch"), whole)
    assert batches == [3, 3, 1]


@pytest.mark.parametrize("operator", ["attention", "attention_decode"])
@pytest.mark.parametrize("sizes", [(65536, 2), (1, 65536)], ids=["batches", "heads"])
def test_kernels_refuse_more_batches_or_heads_than_a_grid_holds(
    operator: str, sizes: tuple[int, int]
) -> None:
    b, h = sizes
    decodes = operator == "attention_decode"
    shapes: list[tuple[int, ...]] = [(b, 1, h, 64) if decodes else (b, h, 1, 64), *2 * [(b, 1, 16, 64)], (b,)]
    shapes += [(b, 1)] if decodes else []
    inputs = tuple(
        Input(name=f"x{i}", shape=s, dtype="bfloat16" if len(s) == 4 else "int32")
        for i, s in enumerate(shapes)
    )
    case = Case(name="large", inputs=inputs, params={})
    launching = [i for i in registry.implementations(operator) if i.backend in LAUNCHING]
    assert launching
    for implementation in launching:
        assert not implementation.supports(case, "cuda"), implementation.name
    if not decodes:
        by_name = [registry.implementation(operator, f"torch/{n}") for n in ("flash", "cudnn", "efficient")]
        assert not any(i.supports(case, "cuda") for i in by_name)
        assert registry.implementation(operator, "torch").supports(case, "cuda")
