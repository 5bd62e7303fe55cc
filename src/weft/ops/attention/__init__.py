"""Attention; README.md in this folder describes the ladder and the kernels and has their figures."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from weft.dispatch.autocast import lowered
from weft.dispatch.operator import Schema, call, plan, register
from weft.dispatch.public_calls import count_public, generate_public, repeat_public
from weft.ops.attention.biased import attention_biased
from weft.ops.attention.layout import like
from weft.ops.attention.packed import attention_packed
from weft.ops.attention.spec import PARAMS, SCALARS, check_arguments, default_lengths_and_impl, parameters
from weft.ops.attention.terms import Terms

__all__ = ["attention", "attention_packed"]
TENSORS = "Tensor q, Tensor k, Tensor v, Tensor key_lengths"


def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return like(q), like(k), like(v)


CAUSAL_TYPES = (bool, str)  # of other types, 1 would be taken for an earlier call's True
DEFAULTS = (True, float, 0.0, int, 0)
PLAIN = "plain attention"  # the name of a call without options among recent calls

register(
    "attention",
    Schema(
        repeats=True,
        inputs=f"{TENSORS}, {SCALARS}",
        saved=f"{TENSORS}, Tensor out, Tensor lse, {SCALARS}",
        gradients=3,
        fake=_fake,
        fake_backward=_fake_backward,
        params=PARAMS,
        differentiable=("q", "k", "v"),
        outputs=2,
        differentiable_outputs=1,
    ),
)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | str = False,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    key_lengths: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Scaled dot-product attention, softmax(scale q k^T) v, for each head.

    Args:
        q: (B, H, Tq, D); float32, float16 or bfloat16; CPU or CUDA; any strides; fastest with
            adjacent columns. D is a multiple of 8 up to 256; powers of two are fastest.
        k, v: (B, Hkv, Tk, D) of the same dtype and device. H is a multiple of Hkv: H / Hkv neighbouring
            heads of q share one (grouped-query attention).
        causal: True: query i sees keys 0 to i: aligned at the top left for any two lengths, as
            PyTorch's scaled_dot_product_attention is. ``"bottom_right"``: the last query is at the last
            visible key, Tk - 1 or a batch's length - 1, and query i sees the keys up to
            i + Tk - Tq (or length - Tq). That is what chunked prefill and decoding need.
        window: with a causal mask: a query sees the last ``window`` of these keys only, its own
            position among them; 1 or more. None: all. Kernels skip tiles of keys outside the window.
        softcap: c above 0: scores become c tanh(score / c) after ``scale`` and before the masks.
        scale: a number above 0; None is 1 / sqrt(D).
        dropout_p: probability, below 1, that a weight is dropped; the others are scaled up.
        seed: 0 to 2^63 - 1; with the weight's index it determines which weights are dropped.
        key_lengths: (B,) int32 on the same device; batch b sees its first ``key_lengths[b]`` keys
            (clamped to 0 and Tk). None: all. The host never reads them.
        sinks: (H,), float32 or q's dtype: one more score of each head, without a value. It adds
            exp(sink) to the denominators, as in gpt-oss. Has a gradient.
        alibi_slopes: (H,) or (B, H) float32: -slope |i + shift - j| is added to the score of query i and
            key j. ``shift`` is the position of query 0, as for the masks: 0, or with
            ``causal="bottom_right"`` Tk - Tq (or length - Tq). FlashAttention always takes the latter;
            for Tq = Tk both are the same. A gradient is refused.
        bias: (B, H, Tq, Tk) with 1 in place of any size, float32 or q's dtype: added to the scores; -inf
            hides a key. Has a gradient, summed in a fixed order where it is broadcast. The order in a
            score: ``scale``, ``softcap``, then bias and ALiBi, then the masks.
        impl: an implementation's name (``weft ops`` lists them). None is torch's own; with
            ``key_lengths``, dropout, a window, a cap, the alignment at the bottom right, sinks, ALiBi or
            a bias, ``triton`` on a GPU and ``eager`` otherwise.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        (B, H, Tq, D) of q's dtype: contiguous, or (B, Tq, H, D) in memory if q is, or if the library
        computes it and writes it so. A query that sees no key gets 0. Sums and the softmax are in
        float32. Under ``torch.autocast`` the inputs are cast to its dtype. Only ``eager`` and
        ``compile``, and ``torch`` for up to 2 D queries of grouped heads, use memory that grows with Tq Tk.

    Raises:
        WeftError: shapes, dtypes or devices do not match, a head size, scale, window or cap is out
            of range, a window comes without a causal mask, or ``impl`` is unknown or does not run here.

    Source: Dao, "FlashAttention-2" (arXiv:2307.08691); Milakov and Gimelshein, "Online normalizer
    calculation for softmax" (arXiv:1805.02867).
    """
    is_usual = batch_invariant is False and window is softcap is None and type(causal) in CAUSAL_TYPES
    rest = (is_usual, type(dropout_p), dropout_p, type(seed), seed)
    is_plain = rest == DEFAULTS and key_lengths is sinks is alibi_slopes is bias is None
    if is_plain and (outputs := repeat_public(PLAIN, impl, (q, k, v), (causal, scale))) is not None:
        return outputs[0]  # type: ignore[no-any-return]
    q, k, v = lowered(q, k, v)
    params = parameters(causal, window, softcap, scale, dropout_p, seed, key_lengths is not None)
    if not (sinks is None and alibi_slopes is None and bias is None):
        terms = Terms(sinks, alibi_slopes, bias)
        return attention_biased((q, k, v, key_lengths), terms, params, impl, batch_invariant)
    lengths, impl = default_lengths_and_impl(q, key_lengths, params, impl)
    check = partial(check_arguments, q, k, v, key_lengths, **params)
    out = call("attention", (q, k, v, lengths), params, impl, check, batch_invariant)[0]
    if is_plain:
        _count_plain((q, k, v, lengths), params, {"causal": causal, "scale": scale}, impl)
    return out  # type: ignore[no-any-return]


def _count_plain(
    inputs: tuple[Any, ...], params: dict[str, Any], scalars: dict[str, Any], impl: str | None
) -> None:
    """Count a call without options, whose function takes q, k and v alone."""
    generate = partial(_plain_function, inputs, params, impl)
    count_public(PLAIN, impl, inputs[:3], scalars, generate)


def _plain_function(inputs: tuple[Any, ...], params: dict[str, Any], impl: str | None) -> Any:
    """Return a function of q, k and v that repeats a call and returns its outputs, or None."""
    if plan("attention", inputs, params, impl).impl != "torch":
        return generate_public("attention", impl, inputs, params, 3)
    from weft.ops.attention.with_torch import library_call

    # A call that needs no log-sum-exp: PyTorch's function runs the same kernel, and does less on the host.
    q, k, v = inputs[:3]
    library = library_call(q, k, v, params["causal"], params["scale"])
    if library is None:
        return None

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor] | None:
        is_aligned = not any(x.data_ptr() & 15 for x in tensors)
        return (library(*tensors),) if is_aligned else None

    return function
