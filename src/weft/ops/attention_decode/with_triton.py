"""Attention for decoding in Triton: one program a split of 512 keys and head of keys, then a merge in order.

A sequence is cut at fixed keys. Which program adds up what does therefore not depend on the batch, and
neither do the bits. Pages may have any size.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from weft.backends.triton_jit import TritonAotKernel, launch_and_prepare, tl, triton
from weft.core import YES, Case, Implementation, Support, no
from weft.core.implementation import with_invariant
from weft.ops._common.prepared import are_repeatable
from weft.ops.attention_decode.launches import DecodeLaunches
from weft.ops.attention_decode.spec import SPLIT, capacity, factor_of
from weft.ops.attention_decode.with_eager import has_no_keys

LOG2E = 1.4426950408889634
MAX_GRID = 65535
MIN_DOT = 16  # of the dimension that tl.dot sums over, once compiled; an interpreter takes any
LAUNCHES = DecodeLaunches()
COUNTS = ["tokens", "kv_heads", "group", "most", "pages", "page_size", "max_pages", "splits"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """A program has ``bm`` packed queries and reads ``bn`` keys at a time, with ``warps`` warps."""

    bm: int
    bn: int
    warps: int = 4
    stages: int = 3


@triton.jit
def key_count(lengths, batch, most):
    """Return the number of keys of a sequence: its length, clamped to the capacity."""
    return tl.minimum(tl.maximum(tl.load(lengths + batch), 0), most)


@triton.jit(do_not_specialize=["tokens", "kv_heads", "group", "most", "pages", "max_pages", "splits"])
def decode_split(
    q_ptr, k_ptr, v_ptr, lengths, table, out_ptr, partials,
    tokens, kv_heads, group, most, pages, page_size, max_pages, splits,
    k_batch, k_head, k_row, v_batch, v_head, v_row, scale,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
    PAGED: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    # q, out: (B, tokens, kv_heads group, D), contiguous; k, v: (B, kv_heads, most, D), or pages (pages,
    # kv_heads, page_size, D) if PAGED, by strides, with adjacent columns; lengths: (B,) int32; table: (B,
    # max_pages) int32; partials: (B, kv_heads, splits, tokens group, D + 2) float32, unless ALONE. `scale`
    # includes log2(e). Bytes: the visible keys and values once for BM rows.
    split, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    kv_head, tile = tl.program_id(1) % kv_heads, tl.program_id(1) // kv_heads
    keys = key_count(lengths, batch, most)
    begin = split * SPLIT
    end = tl.minimum(keys, begin + SPLIT)
    row = tile * BM + tl.arange(0, BM)
    rows = tokens * group
    columns = tl.arange(0, DP)
    # Queries of one token and group are adjacent: packed row r is head r % group of token r / group.
    token = row // group
    line = (batch * tokens + token) * (kv_heads * group) + kv_head * group + row % group
    # Nothing is read or written for a split without keys, unless it is alone and writes 0.
    exists = (row < rows) & ((begin < keys) | ALONE)
    is_query = exists[:, None] & (columns < D)[None, :]
    q = tl.load(q_ptr + line[:, None] * D + columns[None, :], mask=is_query, other=0.0)
    limit = keys - (tokens - 1 - token)
    acc = tl.zeros((BM, DP), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    broken = tl.zeros((BN,), tl.int32)
    for start in tl.range(begin, end, BN):
        column = start + tl.arange(0, BN)
        is_key = column < end
        if PAGED:
            page = tl.load(table + batch * max_pages + column // page_size, mask=is_key, other=0)
            is_page = (page >= 0) & (page < pages)
            broken = tl.maximum(broken, (is_key & (is_page == 0)).to(tl.int32))
            is_key = is_key & is_page
            at_k = page.to(tl.int64) * k_batch + (column % page_size).to(tl.int64) * k_row
            at_v = page.to(tl.int64) * v_batch + (column % page_size).to(tl.int64) * v_row
        else:
            at_k = batch * k_batch + column.to(tl.int64) * k_row
            at_v = batch * v_batch + column.to(tl.int64) * v_row
        # Rows past the end are 0 and are not read: 0 times NaN would be NaN.
        inside = is_key[:, None] & (columns < D)[None, :]
        k = tl.load(k_ptr + kv_head * k_head + at_k[:, None] + columns[None, :], mask=inside, other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee") * scale
        s = tl.where(column[None, :] < limit[:, None], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        # A row that sees no key so far: -inf - -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(v_ptr + kv_head * v_head + at_v[:, None] + columns[None, :], mask=inside, other=0.0)
        if v.dtype == tl.float32:
            # Added one after another, 512 products would use up nine tenths of the tolerance.
            acc = acc * shrink[:, None] + tl.dot(p, v, input_precision="ieee")
        else:
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = higher
    total = tl.where(tl.max(broken, 0) > 0, float("nan"), total)
    if ALONE:
        sees = limit > 0
        out = tl.where(sees[:, None], acc / tl.where(sees, total, 1.0)[:, None], 0.0)
        at = out_ptr + line[:, None] * D + columns[None, :]
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=is_query)
    else:
        to = partials + (((batch * kv_heads + kv_head) * splits + split) * rows + row) * (D + 2)
        tl.store(to[:, None] + columns[None, :], acc, mask=is_query)
        tl.store(to + D, top, mask=exists)
        tl.store(to + D + 1, total, mask=exists)


@triton.jit(do_not_specialize=["tokens", "kv_heads", "group", "most", "splits"])
def decode_merge(
    partials, lengths, out_ptr, tokens, kv_heads, group, most, splits,
    D: tl.constexpr, DP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    # As above. A program has one row of (B, tokens, kv_heads group) and adds its splits in their order.
    heads = kv_heads * group
    line = tl.program_id(0).to(tl.int64)
    head, token, batch = line % heads, line // heads % tokens, line // heads // tokens
    keys = key_count(lengths, batch, most)
    rows = tokens * group
    row = token * group + head % group
    first = partials + ((batch * kv_heads + head // group) * splits * rows + row) * (D + 2)
    columns = tl.arange(0, DP)
    count = tl.cdiv(keys, SPLIT)
    top = float("-inf")
    for i in tl.range(0, count):
        top = tl.maximum(top, tl.load(first + tl.cast(i, tl.int64) * rows * (D + 2) + D))
    base = tl.where(top == float("-inf"), 0.0, top)
    acc = tl.zeros((DP,), tl.float32)
    total = 0.0
    for i in tl.range(0, count):
        at = first + tl.cast(i, tl.int64) * rows * (D + 2)
        factor = tl.exp2(tl.load(at + D) - base)
        acc += tl.load(at + columns, mask=columns < D, other=0.0) * factor
        total += tl.load(at + D + 1) * factor
    sees = keys > tokens - 1 - token
    out = tl.where(sees, acc / tl.where(sees, total, 1.0), 0.0)
    tl.store(out_ptr + line * D + columns, out.to(out_ptr.dtype.element_ty), mask=columns < D)


@cache
def configure(rows: int, d: int, itemsize: int) -> Config:
    """Return the shipped configuration, which depends on neither the batch nor the lengths."""
    bm = min(64, max(16, triton.next_power_of_2(rows)))
    if itemsize == 4:  # multiplied without tensor cores
        return Config(bm=16, bn=32, stages=2)
    if d > 128:
        return Config(bm=min(bm, 32), bn=32)
    return Config(bm=bm, bn=64)


def rowwise(x: Tensor) -> Tensor:
    """Return a cache with adjacent columns, copied only if they are not."""
    return x if x.stride(3) == 1 else x.contiguous()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    *,
    scale: float | None = None,
    paged: bool = False,
) -> Tensor:
    inputs = (q, k, v, lengths, block_table)
    key = LAUNCHES.key(inputs, scale, paged)
    repeated = LAUNCHES.repeat(key, inputs)
    if repeated is not None:
        return repeated
    if has_no_keys(q, k, block_table, paged):
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    config = configure(q.shape[1] * q.shape[2] // k.shape[1], q.shape[3], q.element_size())
    return forward_with(config, q, k, v, lengths, block_table, scale=scale, paged=paged, key=key)


def forward_with(
    config: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    *,
    scale: float | None = None,
    paged: bool = False,
    key: Hashable = None,
) -> Tensor:
    """Compute the forward with one configuration; ``key`` stores the launches for calls like this one."""
    repeatable = are_repeatable(q, k, v, lengths, block_table)
    q, k, v = q.contiguous(), rowwise(k), rowwise(v)
    lengths, block_table = lengths.contiguous(), block_table.contiguous()
    (b, t, h, d), kv_heads, most = q.shape, k.shape[1], capacity(k, block_table, paged)
    rows, splits = t * h // kv_heads, triton.cdiv(most, SPLIT)
    out = torch.empty_like(q)
    size = b * kv_heads * splits * rows * (d + 2) if splits > 1 else 0
    partials = torch.empty(size, dtype=torch.float32, device=q.device)
    sizes = (t, kv_heads, h // kv_heads, most)
    constants = {"D": d, "DP": max(MIN_DOT, triton.next_power_of_2(d)), "SPLIT": SPLIT}
    split = launch_and_prepare(
        decode_split,
        (splits, kv_heads * triton.cdiv(rows, config.bm), b),
        *(q, k, v, lengths, block_table, out, partials),
        *sizes,
        *(k.shape[0], k.shape[2], block_table.shape[1], splits),
        *(*k.stride()[:3], *v.stride()[:3]),
        factor_of(scale, d) * LOG2E,
        **constants,
        BM=config.bm,
        BN=config.bn,
        PAGED=paged,
        ALONE=splits == 1,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    merge = None
    if splits > 1:
        merge = launch_and_prepare(
            decode_merge, (b * t * h,), partials, lengths, out, *sizes, splits, **constants, num_warps=4
        )
    if repeatable:
        LAUNCHES.store(key, split, merge, size, splits)
    return out


def supports(case: Case, device: str) -> Support:
    (b, t, h, _) = case.inputs[0].shape
    if b > MAX_GRID or t * h > MAX_GRID:
        return no(f"a grid has {MAX_GRID} sequences and rows at most; split the batch")
    return YES


def _aot_kernel(dtype: str, itemsize: int, d: int, rows: int, paged: bool) -> TritonAotKernel:
    config = configure(rows, d, itemsize)
    signature: dict[str, Any] = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{dtype}")
    signature |= {"lengths": "*i32", "table": "*i32", "out_ptr": f"*{dtype}", "partials": "*fp32"}
    signature |= {name: "i32:16" if name == "page_size" else "i32" for name in COUNTS}
    strides = (f"{x}_{dimension}" for x in "kv" for dimension in ("batch", "head", "row"))
    signature |= {**dict.fromkeys(strides, "i32:16"), "scale": "fp32"}
    signature |= {"D": d, "DP": d, "BM": config.bm, "BN": config.bn, "SPLIT": SPLIT}
    return TritonAotKernel(
        label="-".join(["decode_split", dtype, str(d), f"{config.bm}x{config.bn}", *["paged"] * paged]),
        kernel=decode_split,
        signature={**signature, "PAGED": paged, "ALONE": False},
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _aot_merge(dtype: str, d: int) -> TritonAotKernel:
    signature: dict[str, Any] = {"partials": "*fp32", "lengths": "*i32", "out_ptr": f"*{dtype}"}
    signature |= dict.fromkeys(("tokens", "kv_heads", "group", "most", "splits"), "i32")
    return TritonAotKernel(
        label=f"decode_merge-{dtype}-{d}",
        kernel=decode_merge,
        signature={**signature, "D": d, "DP": d, "SPLIT": SPLIT},
    )


IMPLEMENTATION = with_invariant(
    Implementation(
        operator="attention_decode",
        backend="triton",
        forward=forward,
        supports=supports,
        directions=("forward",),
        aot_kernels=(
            _aot_kernel("bf16", 2, 128, 4, False),
            _aot_kernel("bf16", 2, 128, 4, True),
            _aot_kernel("bf16", 2, 64, 64, False),
            _aot_kernel("fp32", 4, 64, 1, False),
            _aot_merge("bf16", 128),
        ),
        idea="512 keys a program, any page size; partial results merged in order",
    )
)
