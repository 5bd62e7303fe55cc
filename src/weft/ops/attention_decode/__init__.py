"""Attention for decoding with a cache of keys and values; README.md has the design and the times."""

from __future__ import annotations

import torch

from weft.core import WeftError
from weft.dispatch.operator import Schema, call, register
from weft.ops._common.placeholder import placeholder
from weft.ops.attention_decode.spec import check_arguments

register(
    "attention_decode",
    Schema(
        inputs="Tensor q, Tensor k, Tensor v, Tensor lengths, Tensor block_table, float? scale, bool paged",
        gradients=0,
        fake=lambda q, k, v, lengths, block_table: torch.empty_like(q, memory_format=torch.contiguous_format),
        params=("scale", "paged"),
    ),
)


def attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    scale: float | None = None,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return the attention of the newest tokens of each sequence to its cached keys, their own included.

    Args:
        q: (B, H, D) for one new token a sequence, or (B, T, H, D) for its last T tokens, T up to 16;
            float32, float16 or bfloat16; CPU or CUDA. D is a multiple of 8 up to 256.
        k, v: the cache, of q's dtype and device: (B, Hkv, Tmax, D), or pages (P, Hkv, page_size, D) with
            ``block_table``. H is a multiple of Hkv: H / Hkv neighbouring heads of q share one. Strides may
            be any, but rows that are not contiguous and 16-byte aligned may be copied as a whole.
        lengths: (B,) int32: keys of each sequence, with those of the T new tokens; clamped to 0 and the
            capacity. Query t sees the first ``length - (T - 1 - t)`` keys. The host never reads them.
        block_table: (B, max_pages) int32: the page of each ``page_size`` keys. Entries past a length are
            never read. A page below 0 or from P on within a length makes that sequence's output NaN.
        scale: a number above 0; None is 1 / sqrt(D).
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True for rows whose bits do not depend on the batch (``weft.batch_invariant``).

    Returns:
        The shape and dtype of q, contiguous. A query that sees no key gets 0. Keys and values past a length
        have no effect, NaN included. With T above 1 a NaN among the new tokens' keys or values may also
        reach the earlier new tokens. Sums and the softmax are in float32. It has no gradient.

    Raises:
        WeftError: shapes, dtypes or devices that do not fit; an input requires a gradient; ``impl`` is
            unknown or does not run here.

    Source: "Flash-Decoding for long-context inference" (Dao, Haziza, Massa, Sizov, 2023); pages:
    arXiv:2309.06180.
    """
    if not isinstance(q, torch.Tensor) or q.dim() not in (3, 4):
        got = f"{q.dim()} dimensions" if isinstance(q, torch.Tensor) else type(q).__name__
        raise WeftError("attention_decode: q", expected="a tensor (B, H, D) or (B, T, H, D)", got=got)
    wide = q.unsqueeze(1) if q.dim() == 3 else q

    def check() -> None:
        check_arguments(wide, k, v, lengths, block_table, scale=scale)

    table = placeholder(q, (q.shape[0], 1), torch.int32) if block_table is None else block_table
    params = {"scale": scale, "paged": block_table is not None}
    out = call("attention_decode", (wide, k, v, lengths, table), params, impl, check, batch_invariant)
    return out.squeeze(1) if q.dim() == 3 else out  # type: ignore[no-any-return]
