"""Two steps towards the flash kernel, forward only: online softmax, then tiles in one pass.

Both compute scores one tile of keys at a time and never write them.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.backends.triton_jit import TritonAotKernel, tl, triton
from weft.core import YES, Case, Implementation, Support, no
from weft.ops.attention.layout import empty_output, like, rowwise
from weft.ops.attention.spec import AttentionOptions
from weft.ops.attention.triton_tiles import load_tile, store_tile, visible_keys

BM, BN = 64, 32  # queries and keys of a tile, for every head size


@triton.jit
def merged(top, total, other_top, other_total):
    """Merge two running (maximum, sum of exponentials) by the rule of Milakov and Gimelshein
    (arXiv:1805.02867), which is associative and commutative."""
    higher = tl.maximum(top, other_top)
    # If neither has seen a score, -inf - -inf would be NaN.
    pivot = tl.where(higher == float("-inf"), 0.0, higher)
    sums = total * tl.exp(top - pivot) + other_total * tl.exp(other_top - pivot)
    return higher, sums


@triton.jit
def scores(q, k, start, rows, keys, scale, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the scaled scores of a tile in float32, -inf where the query does not see the key."""
    column = start + tl.arange(0, BN)
    seen = (column < keys)[None, :]
    if CAUSAL:
        seen = seen & (column[None, :] <= rows[:, None])
    return tl.where(seen, tl.dot(q, k.T, input_precision="ieee") * scale, float("-inf"))


@triton.jit
def attention_online(
    q_ptr, k_ptr, v_ptr, lengths, out_ptr, lse_ptr, heads, group, tq, tk, scale,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, ONE_PASS: tl.constexpr,
):  # fmt: skip
    # q, out: (B, H, Tq, D); k, v: (B, H / group, Tk, D), all contiguous; lse: (B, H, Tq) float32. A program
    # computes BM queries of one head over all keys and masks every tile. Two passes: the first finds maximum
    # and sum online, the second computes the scores again, divides and multiplies by v. ONE_PASS multiplies
    # by weights that are not yet divided, and rescales the sums as the maximum rises.
    head, batch = tl.program_id(1), tl.program_id(2)
    start = tl.program_id(0) * BM
    rows = start + tl.arange(0, BM)
    keys = visible_keys(lengths, batch, tk, PADDED)
    line = batch * heads + head
    kv_head = head // group
    q_line, k_line = tq * D, tk * D
    kv_heads = heads // group
    q = load_tile(q_ptr, batch, head, start, tq, heads * q_line, q_line, D, BM, D, DP, False)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, DP), tl.float32)
    for first in range(0, tk, BN):
        k = load_tile(k_ptr, batch, kv_head, first, tk, kv_heads * k_line, k_line, D, BN, D, DP, False)
        s = scores(q, k, first, rows, keys, scale, BN, CAUSAL)
        tile_top = tl.max(s, 1)
        pivot = tl.where(tile_top == float("-inf"), 0.0, tile_top)
        before = top
        top, total = merged(top, total, tile_top, tl.sum(tl.exp(s - pivot[:, None]), 1))
        if ONE_PASS:
            pivot = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp(s - pivot[:, None])
            v = load_tile(v_ptr, batch, kv_head, first, tk, kv_heads * k_line, k_line, D, BN, D, DP, False)
            acc = acc * tl.exp(before - pivot)[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    divisor = tl.where(total == 0.0, 1.0, total)
    lse = top + tl.log(divisor)
    if ONE_PASS:
        acc = acc / divisor[:, None]
    else:
        pivot = tl.where(total == 0.0, 0.0, lse)
        for first in range(0, tk, BN):
            k = load_tile(k_ptr, batch, kv_head, first, tk, kv_heads * k_line, k_line, D, BN, D, DP, False)
            s = scores(q, k, first, rows, keys, scale, BN, CAUSAL)
            p = tl.exp(s - pivot[:, None])
            v = load_tile(v_ptr, batch, kv_head, first, tk, kv_heads * k_line, k_line, D, BN, D, DP, False)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    store_tile(out_ptr, acc, batch, head, start, tq, heads * q_line, q_line, D, BM, D, DP)
    tl.store(lse_ptr + tl.cast(line, tl.int64) * tq + rows, lse, mask=rows < tq)


def _forward(one_pass: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    def forward(q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor, **params: Any) -> tuple[Tensor, Tensor]:
        if q.numel() == 0 or k.numel() == 0:
            return empty_output(q)
        q, k, v = (rowwise(x).contiguous() for x in (q, k, v))
        b, h, tq, d = q.shape
        options = AttentionOptions(**params)
        out, lse = like(q), torch.empty((b, h, tq), dtype=torch.float32, device=q.device)
        attention_online[(triton.cdiv(tq, BM), h, b)](
            *(q, k, v, key_lengths, out, lse, h, h // k.shape[1], tq, k.shape[2]),
            options.factor(d),
            D=d,
            DP=max(16, 1 << (d - 1).bit_length()),
            BM=BM,
            BN=BN,
            CAUSAL=options.causal,
            PADDED=options.padded,
            ONE_PASS=one_pass,
            num_warps=8 if d > 64 or q.element_size() == 4 else 4,
        )
        return out, lse

    return forward


def supports(case: Case, device: str) -> Support:
    if terms := AttentionOptions.of(case).terms:
        return no(f"the ladder's steps have no {terms}; use impl='triton'")
    if case.params.get("dropout_p"):
        return no("the ladder's steps have no dropout; use impl='triton'")
    if AttentionOptions.of(case).mask.is_band or case.params.get("softcap"):
        return no("the ladder's steps have the causal mask at the top left only; use impl='triton'")
    if case.dtype == "float32" and case.inputs[0].shape[3] > 128:
        return no("the ladder's tiles are too large for float32 heads above 128; use impl='triton'")
    if max(case.inputs[0].shape[:2]) > 65535:
        return no("a grid has 65535 batches and heads at most; split the batch")
    return YES


def _step(name: str, one_pass: bool, idea: str) -> Implementation:
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16")
    signature: dict[str, Any] = {**pointers, "lengths": "*i32", "out_ptr": "*bf16"}
    signature |= {"lse_ptr": "*fp32", "heads": "i32", "group": "i32", "tq": "i32:16"}
    signature |= {"tk": "i32:16", "scale": "fp32", "D": 64, "DP": 64, "BM": BM, "BN": BN}
    signature |= {"CAUSAL": True, "PADDED": False, "ONE_PASS": one_pass}
    return Implementation(
        operator="attention",
        name=name,
        backend="triton",
        forward=_forward(one_pass),
        supports=supports,
        directions=("forward",),
        aot_kernels=(TritonAotKernel(label="bf16-64", kernel=attention_online, signature=signature),),
        idea=idea,
    )


ONLINE = _step("triton/01-online", False, "online softmax first, then the scores once more")
TILED = _step("triton/02-tiled", True, "one pass: sums rescaled as the maximum rises")
