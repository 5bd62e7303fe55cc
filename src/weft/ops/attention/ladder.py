"""The steps to the flash kernel, forward only: online softmax, then tiles with one pass.

Both take scores a tile of keys at a time and never write them; what each leaves undone is the next
one's idea.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.backends.triton_jit import TritonSpecimen, tl, triton
from weft.core import YES, Case, Implementation, Support, no
from weft.ops.attention.layout import like, nothing, rowwise
from weft.ops.attention.tiles import keys_of, store_tile, tile

BM, BN = 64, 32  # queries and keys a tile, for every head size


@triton.jit
def merged(top, total, other_top, other_total):
    """Two running (maximum, sum of exponentials) made one: Milakov and Gimelshein's rule
    (arXiv:1805.02867), associative and free of order."""
    higher = tl.maximum(top, other_top)
    # Where neither has seen a score, -inf - -inf would be NaN.
    pivot = tl.where(higher == float("-inf"), 0.0, higher)
    sums = total * tl.exp(top - pivot) + other_total * tl.exp(other_top - pivot)
    return higher, sums


@triton.jit
def scores(q, k, start, rows, keys, scale, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """Scaled scores of a tile, float32, -inf where a key is not seen."""
    column = start + tl.arange(0, BN)
    seen = (column < keys)[None, :]
    if CAUSAL:
        seen = seen & (column[None, :] <= rows[:, None])
    return tl.where(seen, tl.dot(q, k.T, input_precision="ieee") * scale, float("-inf"))


@triton.jit
def attention_online(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths,
    out_ptr,
    lse_ptr,
    heads,
    group,
    tq,
    tk,
    scale,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    ONE_PASS: tl.constexpr,
):
    # q, out: (B, H, Tq, D); k, v: (B, H / group, Tk, D), all contiguous; lse: (B, H, Tq) float32.
    # BM queries of one head a program, every key, every tile masked. Two passes: the first finds
    # maximum and sum online, the second makes the scores again, divides and multiplies. ONE_PASS
    # multiplies at once by weights that are not yet divided, and rescales what has been summed.
    head, batch = tl.program_id(1), tl.program_id(2)
    start = tl.program_id(0) * BM
    rows = start + tl.arange(0, BM)
    keys = keys_of(lengths, batch, tk, PADDED)
    line = batch * heads + head
    few = head // group
    q_line, k_line = tq * D, tk * D
    shared = heads // group
    q = tile(q_ptr, batch, head, start, tq, heads * q_line, q_line, D, BM, D, DP, False)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, DP), tl.float32)
    for first in range(0, tk, BN):
        k = tile(k_ptr, batch, few, first, tk, shared * k_line, k_line, D, BN, D, DP, False)
        s = scores(q, k, first, rows, keys, scale, BN, CAUSAL)
        here = tl.max(s, 1)
        pivot = tl.where(here == float("-inf"), 0.0, here)
        before = top
        top, total = merged(top, total, here, tl.sum(tl.exp(s - pivot[:, None]), 1))
        if ONE_PASS:
            pivot = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp(s - pivot[:, None])
            v = tile(v_ptr, batch, few, first, tk, shared * k_line, k_line, D, BN, D, DP, False)
            acc = acc * tl.exp(before - pivot)[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    divisor = tl.where(total == 0.0, 1.0, total)
    lse = top + tl.log(divisor)
    if ONE_PASS:
        acc = acc / divisor[:, None]
    else:
        pivot = tl.where(total == 0.0, 0.0, lse)
        for first in range(0, tk, BN):
            k = tile(k_ptr, batch, few, first, tk, shared * k_line, k_line, D, BN, D, DP, False)
            s = scores(q, k, first, rows, keys, scale, BN, CAUSAL)
            p = tl.exp(s - pivot[:, None])
            v = tile(v_ptr, batch, few, first, tk, shared * k_line, k_line, D, BN, D, DP, False)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    store_tile(out_ptr, acc, batch, head, start, tq, heads * q_line, q_line, D, BM, D, DP)
    tl.store(lse_ptr + tl.cast(line, tl.int64) * tq + rows, lse, mask=rows < tq)


def _forward(one_pass: bool) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        key_lengths: torch.Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        padded: bool = False,
        **rest: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if q.numel() == 0 or k.numel() == 0:
            return nothing(q)
        q, k, v = (rowwise(x).contiguous() for x in (q, k, v))
        b, h, tq, d = q.shape
        out, lse = like(q), torch.empty((b, h, tq), dtype=torch.float32, device=q.device)
        attention_online[(triton.cdiv(tq, BM), h, b)](
            q,
            k,
            v,
            key_lengths,
            out,
            lse,
            h,
            h // k.shape[1],
            tq,
            k.shape[2],
            d**-0.5 if scale is None else scale,
            D=d,
            DP=max(16, 1 << (d - 1).bit_length()),
            BM=BM,
            BN=BN,
            CAUSAL=causal,
            PADDED=padded,
            ONE_PASS=one_pass,
            num_warps=8 if d > 64 or q.element_size() == 4 else 4,
        )
        return out, lse

    return forward


def supports(case: Case, device: str) -> Support:
    if case.params.get("dropout_p"):
        return no("the ladder's steps have no dropout; use impl='triton'")
    if case.dtype == "float32" and case.inputs[0].shape[3] > 128:
        return no("the ladder's tiles are too large for float32 heads above 128; use impl='triton'")
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
        specimens=(TritonSpecimen(label="bf16-64", kernel=attention_online, signature=signature),),
        idea=idea,
    )


ONLINE = _step("triton/01-online", False, "online softmax first, then the scores once more")
TILED = _step("triton/02-tiled", True, "one pass: sums rescaled as the maximum rises")
