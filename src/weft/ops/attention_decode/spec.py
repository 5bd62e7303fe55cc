"""Attention for decoding: the queries of a few new tokens over the cached keys of their sequences.

Queries are (B, T, H, D), for the last T tokens of each sequence: query t of T sees the first
length - (T - 1 - t) keys, aligned at the bottom right. The cache is contiguous, (B, Hkv, Tmax, D), or paged,
(P, Hkv, page_size, D) with a block table (B, max_pages): key j of sequence b is row j % page_size of page
block_table[b, j / page_size], as in PagedAttention (arXiv:2309.06180). H / Hkv neighbouring query heads share
a head of keys (arXiv:2305.13245). A query that sees no key has an output of 0.

There is no gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.core import Case, Cost, Operator, Property, Tolerance, WeftError
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate
from weft.ops.attention_decode.cases import CASES, DTYPES, capacity_of, draw, lengths_of

MIN_HEAD_SIZE, MAX_HEAD_SIZE = 8, 256
MAX_TOKENS = 16  # new tokens of a sequence in one call
# Keys of one sequence that are added up by one block, wherever the sequence stands and however long it is.
SPLIT = 512


def factor_of(scale: float | None, head_size: int) -> float:
    """Return the factor of the scores; None is 1 / sqrt(head size)."""
    return head_size**-0.5 if scale is None else float(scale)


def capacity(k: Tensor, block_table: Tensor, paged: bool) -> int:
    """Return the number of keys that a sequence has room for."""
    return k.shape[2] * block_table.shape[1] if paged else k.shape[2]


def visible_keys(lengths: Tensor, tokens: int, most: int) -> Tensor:
    """Return how many keys each query sees, (B, T), of lengths that are clamped to 0 and ``most``."""
    before_last = torch.arange(tokens - 1, -1, -1, device=lengths.device)
    return (lengths.clamp(0, most)[:, None] - before_last).clamp(min=0)


def sequence(cache: Tensor, block_table: Tensor, index: int, keys: int, paged: bool) -> Tensor:
    """Return the first ``keys`` keys, or values, of one sequence: (Hkv, keys, D)."""
    if not paged:
        return cache[index, :, :keys]
    pages = block_table[index, : -(-keys // max(cache.shape[2], 1))].long()
    return cache[pages].transpose(0, 1).flatten(1, 2)[:, :keys]


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    *,
    scale: float | None = None,
    paged: bool = False,
) -> Tensor:
    """Compute each query of each sequence over the keys that it sees, and over nothing else."""
    (batch, tokens, heads, d), kv_heads = q.shape, k.shape[1]
    out, most = torch.zeros_like(q), capacity(k, block_table, paged)
    for b in range(batch):
        keys = min(max(int(lengths[b]), 0), most)
        for t in range(tokens):
            visible = keys - (tokens - 1 - t)
            if visible <= 0:
                continue
            own_k, own_v = (sequence(x, block_table, b, visible, paged) for x in (k, v))
            queries = q[b, t].view(kv_heads, heads // kv_heads, d)
            scores = queries @ own_k.transpose(1, 2) * factor_of(scale, d)
            out[b, t] = (torch.softmax(scores, -1) @ own_v).reshape(heads, d)
    return out


def check_arguments(
    q: Any, k: Any, v: Any, lengths: Any, block_table: Any = None, *, scale: Any = None
) -> None:
    """Raise :class:`WeftError` if the arguments of a call are invalid; ``block_table`` None: not paged."""
    where = "attention_decode"
    for name, x in (("q", q), ("k", k), ("v", v)):
        validate.tensor(where, name, x, DTYPES, dims=range(4, 5))
    validate.same(where, "q and k", q, k)
    validate.same(where, "q and v", q, v)
    integers = {"lengths": lengths} | ({} if block_table is None else {"block_table": block_table})
    for (name, x), dims in zip(integers.items(), (range(1, 2), range(2, 3)), strict=False):
        validate.tensor(where, name, x, ("int32",), dims=dims)
        validate.same_device(where, f"q and {name}", q, x)
        if x.shape[0] != q.shape[0]:
            raise WeftError(f"{where}: {name}", expected=f"{q.shape[0]} rows, as q has", got=tuple(x.shape))
    _check_shapes(where, q, k, v, block_table is not None)
    if scale is not None and not (isinstance(scale, int | float) and 0 < scale < math.inf):
        hint = "a negative scale is that of -q"
        raise WeftError(f"{where}: scale", expected="a finite number above 0", got=repr(scale), hint=hint)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise WeftError(
            f"{where} has no gradient",
            expected="inputs without requires_grad, or torch.no_grad()",
            got="an input that requires a gradient",
            hint="weft.ops.attention has one; here x.detach()",
        )


def _check_shapes(where: str, q: Tensor, k: Tensor, v: Tensor, paged: bool) -> None:
    if k.shape != v.shape or q.shape[3] != k.shape[3] or not (paged or q.shape[0] == k.shape[0]):
        cache = "(P, Hkv, page_size, D), with a block table (B, max_pages)" if paged else "(B, Hkv, Tmax, D)"
        raise WeftError(
            f"{where}: the shapes",
            expected=f"q (B, H, D) or (B, T, H, D), k and v both {cache}",
            got=", ".join(str(tuple(x.shape)) for x in (q, k, v)),
        )
    if k.shape[1] == 0 or q.shape[2] % k.shape[1]:
        raise WeftError(
            f"{where}: heads",
            expected="as many of q as of k and v, or a multiple",
            got=f"{q.shape[2]} of q, {k.shape[1]} of k",
        )
    if not MIN_HEAD_SIZE <= q.shape[3] <= MAX_HEAD_SIZE or q.shape[3] % 8:
        raise WeftError(
            f"{where}: the head size D",
            expected=f"a multiple of 8 from {MIN_HEAD_SIZE} to {MAX_HEAD_SIZE}",
            got=q.shape[3],
            hint="pad q, k and v with columns of 0, and give scale=D**-0.5 of the true D",
        )
    if q.shape[1] > MAX_TOKENS:
        raise WeftError(
            f"{where}: new tokens T",
            expected=f"at most {MAX_TOKENS}",
            got=q.shape[1],
            hint="weft.ops.attention is made for prompts",
        )


def cost(c: Case, direction: str) -> Cost:
    """Count each visible key and value once, and two products of 2 H T D FLOPs for each key."""
    q, k, _, lengths, block_table = c.inputs
    item, capacity_ = ITEMSIZE[q.dtype], capacity_of(c)
    keys = sum(min(n, capacity_) for n in lengths_of(c))
    read = q.nbytes + 2 * keys * k.shape[1] * k.shape[3] * item + lengths.nbytes
    if c.params.get("paged"):
        pages = sum(-(-min(n, capacity_) // max(k.shape[2], 1)) for n in lengths_of(c))
        read += pages * ITEMSIZE[block_table.dtype]
    flops = 4.0 * keys * q.shape[1] * q.shape[2] * q.shape[3]
    return Cost(read=read, written=q.numel * item, flops=flops, rate=SHORT[q.dtype])


def _within_the_values(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, block_table: Tensor, **params: Any
) -> float:
    """Return by how much outputs leave the range of the values that they see, as a share of rounding.

    Weights are at least 0 and sum to 1. A query that sees no key must have exactly 0.
    """
    paged, worst = bool(params.get("paged")), 0.0
    (batch, tokens, heads, _), kv_heads = q.shape, k.shape[1]
    seen = visible_keys(lengths, tokens, capacity(k, block_table, paged)).tolist()
    for b in range(batch):
        for t in range(tokens):
            if seen[b][t] == 0:
                worst = max(worst, math.inf if bool((out[b, t] != 0).any()) else 0.0)
                continue
            values = sequence(v, block_table, b, seen[b][t], paged).float()
            result = out[b, t].float().view(kv_heads, heads // kv_heads, -1)
            largest, least = values.amax(1)[:, None], values.amin(1)[:, None]
            over = float(torch.maximum(result - largest, least - result).amax())
            worst = max(worst, over / (8 * torch.finfo(out.dtype).eps * float(values.abs().amax())))
    return worst


def public_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``weft.ops.attention_decode``, where a block table stands for ``paged``."""
    hidden = {"paged"} if arguments.get("paged") else {"paged", "block_table"}
    return {name: value for name, value in arguments.items() if name not in hidden}


OPERATOR = Operator(
    name="attention_decode",
    summary="attention of a few new tokens to cached keys, contiguous or paged",
    formula="out = softmax(scale q k^T) v over the first keys of each sequence",
    signature="attention_decode(q, k, v, lengths, block_table=None)",
    reference=reference,
    cases=CASES,
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    tolerance=Tolerance(
        chain=16.0,
        reason="an output depends on sums over D and over keys, each in any order; with 8 units torch's own "
        "float32 on a GPU exceeds the bound by a fifth",
    ),
    rows=("q", "k", "v", "lengths", "block_table"),
    draw=draw,
    properties=(Property(name="within the values' range", holds=_within_the_values),),
    public_arguments=public_arguments,
)
