"""Attention; README.md in this folder describes the ladder and the kernels and has their figures."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from weft.dispatch.autocast import lowered
from weft.dispatch.invariance import wants
from weft.dispatch.operator import Schema, call, register
from weft.dispatch.plan_cache import recent
from weft.dispatch.public_calls import Repeat, repeat_of, repeated
from weft.ops.attention.biased import attention_biased
from weft.ops.attention.layout import like
from weft.ops.attention.packed import attention_packed
from weft.ops.attention.spec import PARAMS, SCALARS, check_arguments, lengths_and_impl, parameters
from weft.ops.attention.terms import Terms
from weft.ops.attention.with_torch import is_by_sdpa, repeated_sdpa, sdpa

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


DEFAULTS = {"dropout_p": 0.0, "seed": 0}  # of options that a repeated call may name; of all others it is None

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


def _repeat(
    *inputs: torch.Tensor,
    causal: bool | str = False,
    scale: float | None = None,
    impl: str | None = None,
    **options: Any,
) -> Repeat | None:
    """Return what repeats a call without options: a function of q, k and v that returns the output."""
    if len(inputs) != 3 or any(value != DEFAULTS.get(name) for name, value in options.items()):
        return None
    params = parameters(causal, None, None, scale, 0.0, 0, False)
    lengths, impl = lengths_and_impl(inputs[0], None, params, impl, invariant=False)
    known = recent("attention", impl, (*inputs, lengths), params)
    if known is not None and known.impl == "torch":
        function = repeated_sdpa(*inputs, params["causal"], scale)
        return None if function is None else Repeat(function, by_torch=True)
    repeat = repeat_of("attention", impl, (*inputs, lengths), params, 3)
    return repeat and repeat.first_result()


@repeated(_repeat)
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
        batch_invariant: True for queries whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        (B, H, Tq, D) of q's dtype: contiguous, or (B, Tq, H, D) in memory if q is, or if the library
        computes it and writes it so. A query that sees no key gets 0. Sums and the softmax are in
        float32. Under ``torch.autocast`` the inputs are cast to its dtype. Only ``eager`` and
        ``compile`` use memory that grows with Tq Tk, and ``torch`` for up to 2 D queries or keys where
        PyTorch has no fused kernel, as for grouped heads in float32.

    Raises:
        WeftError: shapes, dtypes or devices do not match, a head size, scale, window or cap is out
            of range, a window comes without a causal mask, or ``impl`` is unknown or does not run here.

    Source: Dao, "FlashAttention-2" (arXiv:2307.08691); Milakov and Gimelshein, "Online normalizer
    calculation for softmax" (arXiv:1805.02867).
    """
    q, k, v = lowered(q, k, v)
    params = parameters(causal, window, softcap, scale, dropout_p, seed, key_lengths is not None)
    if not (sinks is None and alibi_slopes is None and bias is None):
        terms = Terms(sinks, alibi_slopes, bias)
        return attention_biased((q, k, v, key_lengths), terms, params, impl, batch_invariant)
    invariant = wants("attention", batch_invariant)
    lengths, impl = lengths_and_impl(q, key_lengths, params, impl, invariant)
    check = partial(check_arguments, q, k, v, key_lengths, **params)
    inputs = (q, k, v, lengths)
    if not invariant and is_by_sdpa(inputs, params, impl, check):
        return sdpa(q, k, v, params["causal"], scale)
    return call("attention", inputs, params, impl, check, batch_invariant)[0]  # type: ignore[no-any-return]
