"""Attention: out = softmax(scale q k^T) v, each head by itself, with the log-sum-exp of its scores.

Heads of queries share heads of keys in groups (arXiv:2305.13245). ``causal`` counts from the top
left, as PyTorch's scaled_dot_product_attention does: query i sees keys 0 to i, whatever the two
lengths. A query that sees no key has an answer of 0, and -inf for its log-sum-exp.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from weft.core import FORWARD, Case, Cost, Operator, Property, Tolerance, WeftError
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._shared import validate
from weft.ops._shared.philox import check_chance, philox, threshold
from weft.ops._shared.philox import scale as kept_scale
from weft.ops._shared.terms import finite
from weft.ops.attention.cases import CASES, DTYPES

LEAST, MOST = 8, 256  # of a head's size
Drop = tuple[float, int, int] | None  # its chance, the seed, and the first head's number
PIECE = 1 << 22  # scores, from where a gradient's reference makes them again and keeps none


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_lengths: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    padded: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Head of keys by head of keys, so that a case needs no memory for all scores at once."""
    group = q.shape[1] // max(k.shape[1], 1)
    factor = default_scale(q.shape[-1]) if scale is None else scale
    found = []
    for batch in range(q.shape[0]):
        keys = k.shape[2]
        if padded:
            keys = min(max(int(key_lengths[batch]), 0), keys)
        for head in range(k.shape[1]):
            queries = q[batch, head * group : (head + 1) * group]
            first = batch * q.shape[1] + head * group
            arguments = (queries, k[batch, head], v[batch, head])
            drop = (dropout_p, seed, first) if dropout_p else None
            if queries.requires_grad and group * q.shape[2] * k.shape[2] > PIECE:
                one = checkpoint(_one, *arguments, keys, causal, factor, drop, use_reentrant=False)
            else:
                one = _one(*arguments, keys, causal, factor, drop)
            found.append(one)
    if not found:
        return q * 0, q.new_zeros(q.shape[:3])
    out = torch.stack([o for o, _ in found]).view(q.shape)
    return out, torch.stack([lse for _, lse in found]).view(q.shape[:3])


def _one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: int,
    causal: bool,
    scale: float,
    drop: Drop,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The answers for queries (G, Tq, D) of the first ``keys`` of the keys (Tk, D)."""
    if keys == 0:
        return q * 0, torch.full_like(q[..., 0], -math.inf)
    p, kept, lse = _weights(q, k, keys, causal, scale, drop)
    return (p * kept) @ v[:keys], lse


def _weights(
    q: torch.Tensor, k: torch.Tensor, keys: int, causal: bool, scale: float, drop: Drop
) -> tuple[torch.Tensor, torch.Tensor | float, torch.Tensor]:
    """The weights (G, Tq, keys), what dropout multiplies each by, and the log-sum-exp (G, Tq)."""
    s = q @ k[:keys].T * scale
    if causal:
        hidden = torch.ones(s.shape[1:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(hidden, -math.inf)
    top = s.amax(-1, keepdim=True).detach()
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    kept: torch.Tensor | float = 1.0
    if drop is not None:
        chance, seed, first = drop
        every = keeps(chance, seed, first, (*s.shape[:2], k.shape[0]), s.device)
        kept = every[..., :keys] * kept_scale(chance)
    return e / total, kept, (top + total.log())[..., 0]


def gradient_scale(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_lengths: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    padded: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """For q and k: what ds = p (dp - sum of p dp) is of before it cancels, which it does in a row
    with few keys, carried through the last product. A sum's size is the root of its terms' squares:
    so do their roundings add up. v's gradient, a sum of p do, has its own size."""
    group = q.shape[1] // max(k.shape[1], 1)
    factor = default_scale(q.shape[-1]) if scale is None else scale
    of_q, of_k = torch.zeros_like(q), torch.zeros_like(k)
    for batch in range(q.shape[0]):
        keys = min(max(int(key_lengths[batch]), 0), k.shape[2]) if padded else k.shape[2]
        for head in range(k.shape[1] if keys else 0):
            mine = slice(head * group, (head + 1) * group)
            drop = (dropout_p, seed, batch * q.shape[1] + mine.start) if dropout_p else None
            queries, values = q[batch, mine], v[batch, head, :keys]
            p, kept, _ = _weights(queries, k[batch, head], keys, causal, factor, drop)
            squares = grad[batch, mine].square()
            dp = (squares @ values.square().T).sqrt() * kept
            summed = (squares * ((p * kept) @ values).square()).sum(-1, keepdim=True).sqrt()
            ds = (factor * p * (dp + summed)).square()
            of_q[batch, mine] = (ds @ k[batch, head, :keys].square()).sqrt()
            of_k[batch, head, :keys] = (ds.transpose(1, 2) @ queries.square()).sum(0).sqrt()
    return finite(of_q), finite(of_k), None


def keeps(
    p: float, seed: int, first: int, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Which weights dropout keeps: booleans of ``shape`` (heads, Tq, Tk), from head ``first`` on.

    By the row-major place in the tensor (B, H, Tq, Tk) of all of them.
    """
    count = math.prod(shape)
    start = first * shape[1] * shape[2]
    blocks = torch.arange(start // 4, (start + count + 3) // 4, device=device)
    words = torch.stack(philox(seed, blocks), -1).view(-1)
    return (words[start % 4 :][:count] >= threshold(p)).view(shape)


def default_scale(d: int) -> float:
    """1 / sqrt(D), the scale where none is given."""
    return d**-0.5


def check_arguments(
    q: Any,
    k: Any,
    v: Any,
    key_lengths: Any = None,
    *,
    causal: Any = False,
    scale: Any = None,
    dropout_p: Any = 0.0,
    seed: Any = 0,
    padded: Any = False,
) -> None:
    """Raise :class:`WeftError` on a call that has no answer."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        validate.tensor("attention", name, x, DTYPES, dims=range(4, 5))
    validate.same("attention", "q and k", q, k)
    validate.same("attention", "q and v", q, v)
    _check_shapes(q, k, v)
    check_chance("attention", dropout_p, seed)
    if threshold(dropout_p) >> 32:  # so near to 1 that every weight is dropped
        hint = "multiply the values by 0"
        raise WeftError("attention: dropout_p", expected="below 1", got=1.0, hint=hint)
    if scale is not None and not (isinstance(scale, int | float) and 0 < scale < math.inf):
        hint = "a negative scale is that of -q"
        raise WeftError(
            "attention: scale", expected="a finite number above 0", got=repr(scale), hint=hint
        )
    if key_lengths is not None:
        validate.tensor("attention", "key_lengths", key_lengths, ("int32",), dims=range(1, 2))
        if key_lengths.shape != q.shape[:1] or key_lengths.device != q.device:
            raise WeftError(
                "attention: key_lengths",
                expected=f"one length a batch, ({q.shape[0]},), on {q.device}",
                got=f"{tuple(key_lengths.shape)} on {key_lengths.device}",
            )


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise WeftError(
            "attention: the shapes",
            expected="q (B, H, Tq, D), k and v both (B, Hkv, Tk, D)",
            got=", ".join(str(tuple(x.shape)) for x in (q, k, v)),
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise WeftError(
            "attention: heads",
            expected="as many of q as of k and v, or a multiple",
            got=f"{q.shape[1]} of q, {k.shape[1]} of k",
        )
    if not LEAST <= q.shape[3] <= MOST or q.shape[3] % 8:
        raise WeftError(
            "attention: the head size D",
            expected=f"a multiple of 8 from {LEAST} to {MOST}",
            got=q.shape[3],
            hint="pad q, k and v with columns of 0, and give scale=D**-0.5 of the true D",
        )


def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """The backward makes the weights again from the scores and their log-sum-exp."""
    return (*inputs, *output)


def cost(c: Case, direction: str) -> Cost:
    """Forward: two products of 2 B H Tq Tk D FLOPs, a causal mask half of them; backward 2.5 times.

    That is the usual count: an implementation that makes its scores twice gets no credit for it.
    """
    q, k, _, lengths = c.inputs
    item = ITEMSIZE[q.dtype]
    flops = 4.0 * q.numel * k.shape[2] * (0.5 if c.params.get("causal") else 1.0)
    inputs = q.nbytes + 2 * k.nbytes + (lengths.nbytes if c.params.get("padded") else 0)
    out, lse = q.numel * item, q.numel // q.shape[3] * 4
    rate = SHORT[q.dtype]
    if direction == FORWARD:
        return Cost(read=inputs, written=out + lse, flops=flops, rate=rate)
    written = (q.numel + 2 * k.numel) * item
    return Cost(read=inputs + 2 * out + lse, written=written, flops=2.5 * flops, rate=rate)


def _within_the_values(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_lengths: torch.Tensor,
    **params: Any,
) -> float:
    """Weights are at least 0 and sum to 1: no answer is above the largest value nor below the
    least, but for its own rounding and that of the weights."""
    if 0 in (*out.shape, *v.shape):
        return 0.0
    group = q.shape[1] // k.shape[1]
    most = v.amax(2).repeat_interleave(group, 1)[:, :, None].float()
    least = v.amin(2).repeat_interleave(group, 1)[:, :, None].float()
    over = torch.maximum(out.float() - most, least - out.float()).amax()
    size = float(torch.maximum(most.abs(), least.abs()).amax())
    return max(0.0, float(over)) / (8 * torch.finfo(out.dtype).eps * size)


OPERATOR = Operator(
    name="attention",
    summary="scaled dot-product attention, with its log-sum-exp",
    formula="out = softmax(scale q k^T) v",
    signature="attention(q, k, v, causal=False)",
    reference=reference,
    cases=CASES,
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("q", "k", "v"),
    graded=1,
    save=save,
    tolerance=Tolerance(
        chain=16.0,
        reason="a gradient stands behind three sums, over D, keys and queries, each free in its "
        "order; with 8 units the library's float32 on a CPU would be refused in one draw of 150",
    ),
    gradient_scale=gradient_scale,
    scale_reason="p (dp - sum of p dp) cancels in a row with few keys: eager's, from the very same "
    "p, wholly; one that takes the sum from the output, rounded, does not",
    properties=(
        Property(
            name="within the values' range",
            holds=_within_the_values,
            applies=lambda c: not (c.params.get("dropout_p") or c.params.get("padded")),
        ),
    ),
    backward_note="scores made again from q, k and the log-sum-exp: none are kept",
)
