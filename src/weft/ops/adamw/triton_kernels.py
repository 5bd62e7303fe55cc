"""Triton kernels of AdamW; ``with_triton.py`` launches them."""
# A kernel's parameters have no Python type: the compiler gives them theirs at launch.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any

import torch

from weft.backends.triton_jit import TritonAotKernel, tl, triton

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
ROW = tl.constexpr(6)  # numbers in a row of the table, see parameter_groups.py
UNSPECIALIZED = [
    "seed",
    "step_count",
    "group_index",
    "first",
]  # integers whose values must not cause a recompilation
CLIP_EPS = tl.constexpr(1e-6)


@triton.jit
def rounded(p, seed, step_count, row, start, BLOCK: tl.constexpr):
    """Round float32 to bfloat16 stochastically: add 16 random bits below the cut, then truncate.

    Eight elements share one Philox call: its arithmetic would otherwise show beside the memory traffic.
    """
    group = start // 8 + tl.arange(0, BLOCK // 8)
    # tl.philox takes 32-bit counters: 31 bits of the group's number go into each word, to stay positive.
    low = (group & 0x7FFFFFFF).to(tl.int32)
    high = (group >> 31).to(tl.int32)
    zeros = tl.zeros_like(low)
    a, b, c, d = tl.philox(seed, low, high, zeros + row, zeros + step_count)
    words = tl.join(tl.join(a, b), tl.join(c, d)).to(tl.uint32)
    noise = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BLOCK,)).to(tl.int32)
    bits = p.to(tl.int32, bitcast=True)
    # -65536 is 0xFFFF0000: the upper half of a float32 is its bfloat16 by truncation.
    cut = ((bits + noise) & -65536).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(p) < float("inf"), cut, p)


@triton.jit
def step_block(
    param, grad, exp_avg, exp_avg_sq, master, start, n, row,
    clip, decay, size, correction, eps, beta1, rest1, beta2, rest2, seed, step_count,
    MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    # Steps elements start to start + BLOCK of one parameter of n elements; WHOLE: all of them exist. Bytes of
    # an element, all float32: 16 read and 12 written.
    at = start + tl.arange(0, BLOCK)
    # A mask of None makes Triton emit unpredicated 16-byte accesses.
    inside = None
    if not WHOLE:
        inside = at < n
    g = tl.load(grad + at, mask=inside).to(tl.float32) * clip
    m = tl.load(exp_avg + at, mask=inside).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=inside).to(tl.float32)
    p = tl.load((master if MASTER else param) + at, mask=inside).to(tl.float32)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    p = p * decay - size * m / (tl.sqrt(v) * correction + eps)
    tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
    if MASTER:
        tl.store(master + at, p, mask=inside)
    if STOCHASTIC:
        p = rounded(p, seed, step_count, row, start, BLOCK)
    tl.store(param + at, p.to(param.dtype.element_ty), mask=inside)


@triton.jit
def step_any(
    param, grad, exp_avg, exp_avg_sq, master, start, n, row,
    clip, decay, size, correction, eps, beta1, rest1, beta2, rest2, seed, step_count,
    MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Only the last block of a parameter is masked: where n is no multiple of 16, a mask makes Triton split
    # the 16-byte loads.
    if start + BLOCK <= n:
        step_block(
            param, grad, exp_avg, exp_avg_sq, master, start, n, row,
            clip, decay, size, correction, eps, beta1, rest1, beta2, rest2, seed, step_count,
            MASTER, STOCHASTIC, BLOCK, True,
        )  # fmt: skip
    elif start < n:
        step_block(
            param, grad, exp_avg, exp_avg_sq, master, start, n, row,
            clip, decay, size, correction, eps, beta1, rest1, beta2, rest2, seed, step_count,
            MASTER, STOCHASTIC, BLOCK, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def adamw_one(
    param, grad, exp_avg, exp_avg_sq, master, factors, n,
    decay, size, correction, eps, beta1, rest1, beta2, rest2, seed, step_count, group_index,
    MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, FACTORS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # All (n,). factors: (4,) float32 [clip, size, correction, step_count], read if FACTORS. Either this
    # step_count or the argument is 0: the former if the step is a number, the latter if it is a tensor.
    clip = 1.0
    if FACTORS:
        clip = tl.load(factors)
        size = tl.load(factors + 1)
        correction = tl.load(factors + 2)
        step_count += tl.load(factors + 3).to(tl.int32)
    step_any(
        param, grad, exp_avg, exp_avg_sq, master, tl.program_id(0).to(tl.int64) * BLOCK, n,
        group_index << 20, clip, decay, size, correction, eps, beta1, rest1, beta2, rest2, seed, step_count,
        MASTER, STOCHASTIC, BLOCK,
    )  # fmt: skip


@triton.jit
def pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    p = address.to(tl.pointer_type(TYPE))
    # An address from the table carries no divisibility for Triton: without the hint each access would be
    # split.
    if ALIGNED:
        p = tl.multiple_of(p, 16)
    return p


@triton.jit(do_not_specialize=UNSPECIALIZED)
def adamw_many(
    table, factors, rows,
    decay, size, correction, eps, beta1, rest1, beta2, rest2, seed, step_count, group_index,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, ALIGNED: tl.constexpr,
    MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, FACTORS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # table: (6 rows + 2 chunks,) int64, see parameter_groups.py; a program steps one chunk.
    clip = 1.0
    if FACTORS:
        clip = tl.load(factors)
        size = tl.load(factors + 1)
        correction = tl.load(factors + 2)
        step_count += tl.load(factors + 3).to(tl.int32)
    chunk = table + rows * ROW + tl.program_id(0) * 2
    row = tl.load(chunk)
    # Chunks start at multiples of CHUNK, which is a multiple of 1024: this keeps the accesses at 16 bytes.
    first = tl.multiple_of(tl.load(chunk + 1), 1024)
    entry = table + row * ROW
    param = pointer(tl.load(entry), P, ALIGNED)
    grad = pointer(tl.load(entry + 1), G, ALIGNED)
    exp_avg = pointer(tl.load(entry + 2), M, ALIGNED)
    exp_avg_sq = pointer(tl.load(entry + 3), M, ALIGNED)
    master = pointer(tl.load(entry + 4), tl.float32, ALIGNED)
    n = tl.load(entry + 5)
    rng_row = (group_index << 20) + row.to(tl.int32)
    for start in range(0, CHUNK, BLOCK):
        step_any(
            param, grad, exp_avg, exp_avg_sq, master, first + start, n, rng_row,
            clip, decay, size, correction, eps, beta1, rest1, beta2, rest2, seed, step_count,
            MASTER, STOCHASTIC, BLOCK,
        )  # fmt: skip


@triton.jit
def squares(grad, first, n, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of squares of a chunk, summed by each lane and then in a tree, always in this order."""
    total = tl.zeros((BLOCK,), tl.float32)
    lanes = first + tl.arange(0, BLOCK)
    if first + CHUNK <= n:
        for start in range(0, CHUNK, BLOCK):
            g = tl.load(grad + lanes + start).to(tl.float32)
            total += g * g
    else:
        for start in range(0, CHUNK, BLOCK):
            g = tl.load(grad + lanes + start, mask=lanes + start < n, other=0.0).to(tl.float32)
            total += g * g
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def adamw_norm(grad, partials, n, first, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    # grad: (n,); partials: one float32 for each program, from `first` on.
    # Each program writes its own partial sum, so that the norm has the same bits in each run.
    at = tl.program_id(0)
    total = squares(grad, at.to(tl.int64) * CHUNK, n, CHUNK, BLOCK)
    tl.store(partials + first + at, total)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def adamw_norm_many(
    table, partials, rows, first,
    G: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    chunk = table + rows * ROW + at * 2
    entry = table + tl.load(chunk) * ROW
    grad = pointer(tl.load(entry + 1), G, ALIGNED)
    start = tl.multiple_of(tl.load(chunk + 1), 1024)
    total = squares(grad, start, tl.load(entry + 5), CHUNK, BLOCK)
    tl.store(partials + first + at, total)


@triton.jit(do_not_specialize=["count"])
def adamw_factors(
    partials, step, factors, count, lr, log1, log2, size, correction, max_norm,
    CLIPS: tl.constexpr, MOVING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program. partials: (count,) float32, summed in float64; step: one number of any dtype;
    # factors: (4,) float32 [clip, size, correction, step_count]. 1 - beta^t is in float64 because it cancels.
    clip = 1.0
    if CLIPS:
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total += tl.load(partials + at, mask=at < count, other=0.0).to(tl.float64)
        norm = tl.sqrt(tl.sum(total, 0)).to(tl.float32)
        # A NaN norm makes every gradient NaN, as torch's clipping does.
        scale = max_norm / (norm + CLIP_EPS)
        clip = tl.where(scale > 1.0, 1.0, scale)
    step_count = 0.0
    if MOVING:
        step_count = tl.load(step).to(tl.float32)
        t = step_count.to(tl.float64)
        size = (lr / (1.0 - tl.exp(t * log1))).to(tl.float32)
        correction = (1.0 / tl.sqrt(1.0 - tl.exp(t * log2))).to(tl.float32)
    tl.store(factors, clip)
    tl.store(factors + 1, size)
    tl.store(factors + 2, correction)
    tl.store(factors + 3, step_count)


NUMBERS = ("decay", "size", "correction", "eps", "beta1", "rest1", "beta2", "rest2")


def _aot_step(kind: tuple[str, str], warps: int, more: dict[str, Any], many: bool = False) -> TritonAotKernel:
    p, m = kind
    master = bool(more.get("MASTER"))
    signature: dict[str, Any] = {"table": "*i64"}
    if not many:
        dtypes = (p, p, m, m, "fp32" if master else p)
        names = ("param", "grad", "exp_avg", "exp_avg_sq", "master")
        signature = {n: f"*{k}" for n, k in zip(names, dtypes, strict=True)}
    # The launcher passes the parameter where there are no factors.
    signature |= {"factors": "*fp32", "rows" if many else "n": "i32" if many else "i32:16"}
    signature |= dict.fromkeys(NUMBERS, "fp32")
    signature |= dict.fromkeys(("seed", "step_count", "group_index"), "i32")
    if many:
        of = {"fp32": tl.float32, "bf16": tl.bfloat16}
        signature |= {"P": of[p], "G": of[p], "M": of[m], "ALIGNED": True}
    signature |= {"MASTER": False, "STOCHASTIC": False, "FACTORS": False} | more
    suffix = "-master" if master else "-stochastic" if more.get("STOCHASTIC") else ""
    kernel = adamw_many if many else adamw_one
    return TritonAotKernel(
        label=f"{kernel.__name__}-{p}{suffix}", kernel=kernel, signature=signature, num_warps=warps
    )


def aot_kernels(block: int, warps: int, chunk: int) -> tuple[TritonAotKernel, ...]:
    """Return the shipped kernels, which a machine without a GPU can compile."""
    one, many = {"BLOCK": block}, {"CHUNK": chunk, "BLOCK": block}
    norm = {"grad": "*fp32", "partials": "*fp32", "n": "i32:16", "first": "i32"}
    return (
        _aot_step(("fp32", "fp32"), warps, one),
        _aot_step(("bf16", "fp32"), warps, one | {"MASTER": True}),
        _aot_step(("bf16", "fp32"), warps, one | {"STOCHASTIC": True}),
        _aot_step(("fp32", "fp32"), warps, many | {"FACTORS": True}, many=True),
        TritonAotKernel(
            label="adamw_norm-fp32",
            kernel=adamw_norm,
            signature={**norm, "CHUNK": 32768, "BLOCK": 2048},
            num_warps=8,
        ),
    )
