"""AdamW's Triton kernels; ``with_triton.py`` launches them."""
# A kernel's parameters have no Python type: the compiler gives them theirs at launch.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any

import torch

from weft.backends.triton_jit import TritonSpecimen, tl, triton

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
ROW = tl.constexpr(6)  # columns of a table's row: see tables.py
FREE = ["seed", "turn", "place", "first"]  # integers whose value must not compile anew
CLIP_EPS = tl.constexpr(1e-6)


@triton.jit
def rounded(p, seed, turn, row, start, BLOCK: tl.constexpr):
    """float32 to bfloat16 with 16 random bits below the cut: eight elements share one Philox."""
    group = start // 8 + tl.arange(0, BLOCK // 8)
    low = (group & 0x7FFFFFFF).to(tl.int32)
    high = (group >> 31).to(tl.int32)
    nothing = tl.zeros_like(low)
    a, b, c, d = tl.philox(seed, low, high, nothing + row, nothing + turn)
    words = tl.join(tl.join(a, b), tl.join(c, d)).to(tl.uint32)
    noise = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BLOCK,)).to(tl.int32)
    bits = p.to(tl.int32, bitcast=True)
    cut = ((bits + noise) & -65536).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(p) < float("inf"), cut, p)


@triton.jit
def step_block(
    param, grad, exp_avg, exp_avg_sq, master, start, n, row,
    clip, decay, size, widen, eps, beta1, rest1, beta2, rest2, seed, turn,
    MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    # Elements start to start + BLOCK of one parameter of n; all of them are there where WHOLE.
    # Bytes moved, all float32: 16 read and 12 written an element.
    at = start + tl.arange(0, BLOCK)
    inside = None
    if not WHOLE:
        inside = at < n
    g = tl.load(grad + at, mask=inside).to(tl.float32) * clip
    m = tl.load(exp_avg + at, mask=inside).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=inside).to(tl.float32)
    p = tl.load((master if MASTER else param) + at, mask=inside).to(tl.float32)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    p = p * decay - size * m / (tl.sqrt(v) * widen + eps)
    tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
    if MASTER:
        tl.store(master + at, p, mask=inside)
    if STOCHASTIC:
        p = rounded(p, seed, turn, row, start, BLOCK)
    tl.store(param + at, p.to(param.dtype.element_ty), mask=inside)


@triton.jit
def step_any(
    param, grad, exp_avg, exp_avg_sq, master, start, n, row,
    clip, decay, size, widen, eps, beta1, rest1, beta2, rest2, seed, turn,
    MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Only the last block of a parameter is masked: a mask that n is no multiple of 16 for would
    # cost every block its 16-byte loads.
    if start + BLOCK <= n:
        step_block(
            param, grad, exp_avg, exp_avg_sq, master, start, n, row,
            clip, decay, size, widen, eps, beta1, rest1, beta2, rest2, seed, turn,
            MASTER, STOCHASTIC, BLOCK, True,
        )  # fmt: skip
    elif start < n:
        step_block(
            param, grad, exp_avg, exp_avg_sq, master, start, n, row,
            clip, decay, size, widen, eps, beta1, rest1, beta2, rest2, seed, turn,
            MASTER, STOCHASTIC, BLOCK, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=FREE)
def adamw_one(
    param, grad, exp_avg, exp_avg_sq, master, factors, n,
    decay, size, widen, eps, beta1, rest1, beta2, rest2, seed, turn, place,
    MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, FACTORS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # All (n,). factors: (4,) float32 [clip, size, widen, turn], read where FACTORS; its turn is 0
    # where the step is a number, and the argument's where it is a tensor.
    clip = 1.0
    if FACTORS:
        clip = tl.load(factors)
        size = tl.load(factors + 1)
        widen = tl.load(factors + 2)
        turn += tl.load(factors + 3).to(tl.int32)
    step_any(
        param, grad, exp_avg, exp_avg_sq, master, tl.program_id(0).to(tl.int64) * BLOCK, n,
        place << 20, clip, decay, size, widen, eps, beta1, rest1, beta2, rest2, seed, turn,
        MASTER, STOCHASTIC, BLOCK,
    )  # fmt: skip


@triton.jit
def pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    found = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit(do_not_specialize=FREE)
def adamw_many(
    table, factors, rows,
    decay, size, widen, eps, beta1, rest1, beta2, rest2, seed, turn, place,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, ALIGNED: tl.constexpr,
    MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, FACTORS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # table: (6 rows + 2 chunks,) int64, see tables.py; a chunk a program.
    clip = 1.0
    if FACTORS:
        clip = tl.load(factors)
        size = tl.load(factors + 1)
        widen = tl.load(factors + 2)
        turn += tl.load(factors + 3).to(tl.int32)
    chunk = table + rows * ROW + tl.program_id(0) * 2
    row = tl.load(chunk)
    first = tl.multiple_of(tl.load(chunk + 1), 1024)
    entry = table + row * ROW
    param = pointer(tl.load(entry), P, ALIGNED)
    grad = pointer(tl.load(entry + 1), G, ALIGNED)
    exp_avg = pointer(tl.load(entry + 2), M, ALIGNED)
    exp_avg_sq = pointer(tl.load(entry + 3), M, ALIGNED)
    master = pointer(tl.load(entry + 4), tl.float32, ALIGNED)
    n = tl.load(entry + 5)
    which = (place << 20) + row.to(tl.int32)
    for start in range(0, CHUNK, BLOCK):
        step_any(
            param, grad, exp_avg, exp_avg_sq, master, first + start, n, which,
            clip, decay, size, widen, eps, beta1, rest1, beta2, rest2, seed, turn,
            MASTER, STOCHASTIC, BLOCK,
        )  # fmt: skip


@triton.jit
def squares(grad, first, n, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of squares of a chunk: a lane its own, then a tree; always in this order."""
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


@triton.jit(do_not_specialize=FREE)
def adamw_norm(grad, partials, n, first, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    # grad: (n,); partials: one float32 a program, from `first` on.
    at = tl.program_id(0)
    found = squares(grad, at.to(tl.int64) * CHUNK, n, CHUNK, BLOCK)
    tl.store(partials + first + at, found)


@triton.jit(do_not_specialize=FREE)
def adamw_norm_many(
    table, partials, rows, first,
    G: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    chunk = table + rows * ROW + at * 2
    entry = table + tl.load(chunk) * ROW
    grad = pointer(tl.load(entry + 1), G, ALIGNED)
    start = tl.multiple_of(tl.load(chunk + 1), 1024)
    found = squares(grad, start, tl.load(entry + 5), CHUNK, BLOCK)
    tl.store(partials + first + at, found)


@triton.jit(do_not_specialize=["count"])
def adamw_factors(
    partials, step, factors, count, lr, log1, log2, size, widen, max_norm,
    CLIPS: tl.constexpr, MOVING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program. partials: (count,) float32, added in float64; step: one number of any dtype;
    # factors: (4,) float32 [clip, size, widen, turn]. 1 - beta^t in float64: it cancels.
    clip = 1.0
    if CLIPS:
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total += tl.load(partials + at, mask=at < count, other=0.0).to(tl.float64)
        norm = tl.sqrt(tl.sum(total, 0)).to(tl.float32)
        # A norm that is NaN makes every gradient NaN, as torch's clipping does.
        scale = max_norm / (norm + CLIP_EPS)
        clip = tl.where(scale > 1.0, 1.0, scale)
    turn = 0.0
    if MOVING:
        turn = tl.load(step).to(tl.float32)
        t = turn.to(tl.float64)
        size = (lr / (1.0 - tl.exp(t * log1))).to(tl.float32)
        widen = (1.0 / tl.sqrt(1.0 - tl.exp(t * log2))).to(tl.float32)
    tl.store(factors, clip)
    tl.store(factors + 1, size)
    tl.store(factors + 2, widen)
    tl.store(factors + 3, turn)


NUMBERS = ("decay", "size", "widen", "eps", "beta1", "rest1", "beta2", "rest2")


def _step_specimen(
    kind: tuple[str, str], warps: int, more: dict[str, Any], many: bool = False
) -> TritonSpecimen:
    p, m = kind
    master = bool(more.get("MASTER"))
    signature: dict[str, Any] = {"table": "*i64"}
    if not many:
        kinds = (p, p, m, m, "fp32" if master else p)
        names = ("param", "grad", "exp_avg", "exp_avg_sq", "master")
        signature = {n: f"*{k}" for n, k in zip(names, kinds, strict=True)}
    # Whatever stands in for absent factors has the parameter's type.
    signature |= {"factors": "*fp32", "rows" if many else "n": "i32" if many else "i32:16"}
    signature |= dict.fromkeys(NUMBERS, "fp32")
    signature |= dict.fromkeys(("seed", "turn", "place"), "i32")
    if many:
        of = {"fp32": tl.float32, "bf16": tl.bfloat16}
        signature |= {"P": of[p], "G": of[p], "M": of[m], "ALIGNED": True}
    signature |= {"MASTER": False, "STOCHASTIC": False, "FACTORS": False} | more
    told = "-master" if master else "-stochastic" if more.get("STOCHASTIC") else ""
    kernel = adamw_many if many else adamw_one
    return TritonSpecimen(
        label=f"{kernel.__name__}-{p}{told}", kernel=kernel, signature=signature, num_warps=warps
    )


def specimens(block: int, warps: int, chunk: int) -> tuple[TritonSpecimen, ...]:
    """What ships, for a machine with no GPU to compile."""
    one, many = {"BLOCK": block}, {"CHUNK": chunk, "BLOCK": block}
    norm = {"grad": "*fp32", "partials": "*fp32", "n": "i32:16", "first": "i32"}
    return (
        _step_specimen(("fp32", "fp32"), warps, one),
        _step_specimen(("bf16", "fp32"), warps, one | {"MASTER": True}),
        _step_specimen(("bf16", "fp32"), warps, one | {"STOCHASTIC": True}),
        _step_specimen(("fp32", "fp32"), warps, many | {"FACTORS": True}, many=True),
        TritonSpecimen(
            label="adamw_norm-fp32",
            kernel=adamw_norm,
            signature={**norm, "CHUNK": 32768, "BLOCK": 2048},
            num_warps=8,
        ),
    )
