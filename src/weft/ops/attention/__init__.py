"""Attention; see README.md beside this for the ladder, the kernels and their figures."""

from __future__ import annotations

import torch

from weft.ops._shared.autocast import lowered
from weft.ops._shared.public import Schema, call, register
from weft.ops.attention.arguments import completed
from weft.ops.attention.layout import like
from weft.ops.attention.packed import PARAMS, SCALARS, attention_packed
from weft.ops.attention.spec import check_arguments

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


register(
    "attention",
    Schema(
        inputs=f"{TENSORS}, {SCALARS}",
        saved=f"{TENSORS}, Tensor out, Tensor lse, {SCALARS}",
        gradients=3,
        fake=_fake,
        fake_backward=_fake_backward,
        params=PARAMS,
        outputs=2,
        graded=1,
    ),
)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    key_lengths: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Scaled dot-product attention, softmax(scale q k^T) v, each head by itself.

    Args:
        q: (B, H, Tq, D); float32, float16 or bfloat16; CPU or CUDA; any strides, best with the D
            columns side by side. D is a multiple of 8 up to 256, best a power of two.
        k, v: (B, Hkv, Tk, D) of the same dtype and device; H is a multiple of Hkv, and H / Hkv
            neighbouring heads of q share one (grouped-query attention).
        causal: query i sees keys 0 to i: aligned at the top left whatever the two lengths, as
            PyTorch's scaled_dot_product_attention does it, and not at the bottom right.
        scale: a number above 0; None is 1 / sqrt(D).
        dropout_p: the chance, below 1, that a weight is dropped; the others are scaled up.
        seed: what is dropped is a function of it (0 to 2^63 - 1) and of the weight's place alone.
        key_lengths: (B,) int32 on the same device; batch b sees its keys up to ``key_lengths[b]``
            only (clamped to 0 and Tk). None: all. They are never read on the host.
        impl: an implementation's name (``weft ops`` lists them). None is torch's own; with
            ``key_lengths`` or dropout, which that has not, ``triton`` on a GPU and ``eager`` else.

    Returns:
        (B, H, Tq, D) of q's dtype: contiguous, or laid out as (B, Tq, H, D) where q is. A query
        that sees no key gets 0. Sums and the softmax are in float32. Under
        ``torch.autocast`` the inputs are of its dtype. No memory grows with Tq Tk
        but in ``eager`` and ``compile``.

    Raises:
        WeftError: shapes, dtypes or devices that do not fit, a head size or scale out of range;
            ``impl`` is unknown or does not run here.

    Source: Dao, "FlashAttention-2" (arXiv:2307.08691); Milakov and Gimelshein, "Online normalizer
    calculation for softmax" (arXiv:1805.02867).
    """
    q, k, v = lowered(q, k, v)
    lengths, impl = completed(q, key_lengths, dropout_p, impl)
    numbers = {"causal": bool(causal), "scale": scale, "dropout_p": dropout_p, "seed": seed}
    params = {**numbers, "padded": key_lengths is not None}

    def check() -> None:
        check_arguments(q, k, v, key_lengths, **numbers)

    return call("attention", (q, k, v, lengths), params, impl, check)[0]  # type: ignore[no-any-return]
