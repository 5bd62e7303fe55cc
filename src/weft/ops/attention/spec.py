"""Attention: out = softmax(scale q k^T) v for each head, with the log-sum-exp of its scores.

Groups of query heads share a head of keys (arXiv:2305.13245). Which keys a query sees: mask.py. ``softcap``
limits the scores before the mask: softcap tanh(score / softcap). Sinks, ALiBi and an additive bias are
optional inputs behind the lengths (terms.py). A query that sees no key has an output of 0 and a log-sum-exp
of -inf, or of its head's sink, which the log-sum-exp includes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from weft.core import FORWARD, Case, Cost, Operator, Property, Tolerance, WeftError
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate
from weft.ops._common.gradient_scale import zero_nonfinite
from weft.ops._common.philox import check_dropout_arguments, keep_scale, philox, threshold
from weft.ops._common.placeholder import placeholder
from weft.ops.attention.cases import CASES, DTYPES
from weft.ops.attention.mask import BOTTOM_RIGHT, TOP_LEFT, Mask, alignment_of, check_mask
from weft.ops.attention.terms import Terms, check_terms, summed_to

MIN_HEAD_SIZE, MAX_HEAD_SIZE = 8, 256
# Of weft::attention.
SCALARS = (
    "bool causal, float? scale, float dropout_p, int seed, bool padded, int alignment, int? window, "
    "float? softcap"
)


class AttentionOptions(NamedTuple):
    """Scalars of a call. Implementations receive them as keywords: ``AttentionOptions(**params)``.

    ``terms`` names the optional tensors behind ``key_lengths``, joined by "+" (terms.py).
    """

    causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    seed: int = 0
    padded: bool = False
    alignment: int = TOP_LEFT
    window: int | None = None
    softcap: float | None = None
    terms: str = ""

    @staticmethod
    def of(case: Case) -> AttentionOptions:
        """Return the options of a case."""
        params: dict[str, Any] = dict(case.params)
        return AttentionOptions(**params)

    @property
    def mask(self) -> Mask:
        bottom_right = self.alignment == BOTTOM_RIGHT
        return Mask(causal=self.causal, bottom_right=bottom_right, window=self.window, padded=self.padded)

    def factor(self, head_size: int) -> float:
        """Return the factor of the scores; None is torch's default, 1 / sqrt(head size)."""
        return default_scale(head_size) if self.scale is None else float(self.scale)

    def inner_factor(self, head_size: int) -> float:
        """Return the factor of the scores inside the hyperbolic tangent; 1 without ``softcap``."""
        return self.factor(head_size) / self.softcap if self.softcap else 1.0

    def outer_factor(self, head_size: int) -> float:
        """Return the factor of what the kernels exponentiate: of the tangents, or else of the scores."""
        return float(self.softcap) if self.softcap else self.factor(head_size)


PARAMS = AttentionOptions._fields[:-1]  # scalars of weft::attention, which takes no terms
# The last two only in a call that has them.
DIFFERENTIABLE = ("q", "k", "v", "sinks", "bias")
LEAST_OUT = torch.finfo(torch.float16).smallest_normal  # below it an output in float16 has fewer bits
CHECKPOINT_SCORES = 1 << 22  # above this many the reference's gradient recomputes scores to save memory


def reference(
    q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor, *extras: Tensor, **params: Any
) -> tuple[Tensor, Tensor]:
    """Compute one head of keys at a time, so that a case needs no memory for all scores at once."""
    options = AttentionOptions(**params)
    terms = Terms.of(extras, options.terms)
    # Query heads that share one head of keys; max() for a tensor without heads.
    group = q.shape[1] // max(k.shape[1], 1)
    results = []
    for batch in range(q.shape[0]):
        keys = k.shape[2]
        if options.padded:
            # The kernels clamp as well: a length out of range is not an error.
            keys = min(max(int(key_lengths[batch]), 0), keys)
        for head in range(k.shape[1]):
            queries = q[batch, head * group : (head + 1) * group]
            # Dropout depends on the head's number over all batches, so that every implementation drops the
            # same weights.
            first = batch * q.shape[1] + head * group
            added = _terms_of(terms, batch, q.shape[:2], slice(head * group, (head + 1) * group))
            arguments = (queries, k[batch, head], v[batch, head], keys, first, options, added)
            # The scores of all heads would not fit: they are computed again in the backward, head by head.
            if queries.requires_grad and group * q.shape[2] * k.shape[2] > CHECKPOINT_SCORES:
                result = checkpoint(_group, *arguments, use_reentrant=False)
            else:
                result = _group(*arguments)
            results.append(result)
    # q * 0 instead of zeros: the result then depends on q, and autograd returns gradients of the right shape.
    if not results:
        return q * 0, q.new_zeros(q.shape[:3])
    out = torch.stack([o for o, _ in results]).view(q.shape)
    return out, torch.stack([lse for _, lse in results]).view(q.shape[:3])


def _group(
    q: Tensor, k: Tensor, v: Tensor, keys: int, first_head: int, options: AttentionOptions, terms: Terms
) -> tuple[Tensor, Tensor]:
    """Return out and log-sum-exp of queries (G, Tq, D) over the first ``keys`` of the keys (Tk, D)."""
    if keys == 0:
        lse = torch.full_like(q[..., 0], -math.inf)
        return q * 0, lse if terms.sinks is None else lse.copy_(terms.sinks.detach()[:, None].expand_as(lse))
    weights = _weights(q, k, keys, first_head, options, terms)
    return (weights.p * weights.keep_factor) @ v[:keys], weights.lse


class _Weights(NamedTuple):
    """Weights (G, Tq, keys), dropout's factor of each, the log-sum-exp (G, Tq), and the slope of each capped
    score (1 without a cap)."""

    p: Tensor
    keep_factor: Tensor | float
    lse: Tensor
    slope: Tensor | float


def _terms_of(terms: Terms, batch: int, sizes: Sequence[int], heads: slice) -> Terms:
    """Return the terms of some heads of one batch: sinks (G,), slopes (G,) and bias (G, Tq, Tk)."""
    bias, slopes = terms.bias, terms.slopes(*sizes)
    if bias is not None:
        bias = bias.expand(*sizes, -1, -1)[batch, heads]
    return Terms(
        sinks=None if terms.sinks is None else terms.sinks[heads],
        alibi_slopes=None if slopes is None else slopes[batch, heads],
        bias=bias,
    )


def _weights(
    q: Tensor, k: Tensor, keys: int, first_head: int, options: AttentionOptions, terms: Terms
) -> _Weights:
    """Return the weights of the queries (G, Tq, D) of the heads from number ``first_head`` on."""
    s = q @ k[:keys].T * options.factor(q.shape[-1])
    slope: Tensor | float = 1.0
    if cap := options.softcap:
        t = torch.tanh(s / cap)
        s, slope = cap * t, 1 - t.square()
    if terms.bias is not None and terms.bias.shape[-1] > 1:
        terms = terms._replace(bias=terms.bias[..., :keys])
    added = terms.added(s.shape[1], keys, options.mask.shift(s.shape[1], keys))
    if added is not None:
        s = s + added
    hidden = options.mask.hidden(s.shape[1], keys, s.device)
    if hidden is not None:
        s = s.masked_fill(hidden, -math.inf)
    top = s.amax(-1, keepdim=True).detach()
    sink = None if terms.sinks is None else terms.sinks[:, None, None]
    if sink is not None:
        top = torch.maximum(top, sink.detach())
    top = top.masked_fill(top == -math.inf, 0.0)  # a query without keys: -inf - -inf would be NaN
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    keep_factor: Tensor | float = 1.0
    if options.dropout_p:
        shape = (*s.shape[:2], k.shape[0])
        mask = dropout_mask(options.dropout_p, options.seed, first_head, shape, s.device)
        keep_factor = mask[..., :keys] * keep_scale(options.dropout_p)
    p = e / total.masked_fill(total == 0, 1.0)
    return _Weights(p, keep_factor, (top + total.log())[..., 0], slope)


def gradient_scale(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor, *extras: Tensor, **params: Any
) -> tuple[Tensor | None, ...]:
    """Return the magnitudes that the tolerances of dq, dk and the terms refer to; None: dv's own magnitude.

    ds = p (dp - sum of p dp) cancels in a row with few keys. Its magnitude before the difference is carried
    through the last product. The magnitude of a sum is the root of its terms' squares, as roundings add up.
    The gradient of a sink is a sum over queries of p sum(grad out), which cancels as well. Here ``out`` is at
    least float16's smallest normal number: below it, float16 rounds to multiples of a fixed step.
    """
    options = AttentionOptions(**params)
    terms = Terms.of(extras, options.terms)
    group, factor = q.shape[1] // max(k.shape[1], 1), options.factor(q.shape[-1])
    of_q, of_k = torch.zeros_like(q), torch.zeros_like(k)
    of_sinks = q.new_zeros(q.shape[1])
    has_bias = terms.bias is not None
    of_bias = q.new_zeros((*q.shape[:3], k.shape[2]) if has_bias else (0,))
    for batch in range(q.shape[0]):
        keys = min(max(int(key_lengths[batch]), 0), k.shape[2]) if options.padded else k.shape[2]
        for head in range(k.shape[1] if keys else 0):
            members = slice(head * group, (head + 1) * group)
            first = batch * q.shape[1] + members.start
            queries, values = q[batch, members], v[batch, head, :keys]
            added = _terms_of(terms, batch, q.shape[:2], members)
            p, keep_factor, lse, slope = _weights(queries, k[batch, head], keys, first, options, added)
            squares = grad[batch, members].square()
            dp = (squares @ values.square().T).sqrt() * keep_factor
            out = ((p * keep_factor) @ values).square()
            summed = (squares * out).sum(-1, keepdim=True).sqrt()
            if added.sinks is not None:
                share = torch.exp(added.sinks[:, None] - lse).nan_to_num(0.0)
                rounded = (squares * out.clamp(min=LEAST_OUT**2)).sum(-1)
                of_sinks[members] += (share.square() * rounded).sum(1)
            if has_bias:
                of_bias[batch, members, :, :keys] = (p * (dp + summed)).square()
            ds = (factor * slope * p * (dp + summed)).square()
            of_q[batch, members] = (ds @ k[batch, head, :keys].square()).sqrt()
            of_k[batch, head, :keys] = (ds.transpose(1, 2) @ queries.square()).sum(0).sqrt()
    sizes: dict[str, Tensor] = {}
    if terms.sinks is not None:
        sizes["sinks"] = zero_nonfinite(of_sinks.sqrt())
    if terms.bias is not None:
        sizes["bias"] = zero_nonfinite(summed_to(of_bias, terms.bias).sqrt())
    return zero_nonfinite(of_q), zero_nonfinite(of_k), None, *sizes.values()


def dropout_mask(p: float, seed: int, first: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return True for the weights that dropout keeps: booleans of ``shape`` (heads, Tq, Tk).

    Weights are numbered row-major in the whole (B, H, Tq, Tk) tensor; ``first`` is the first head's number.
    """
    count = math.prod(shape)
    start = first * shape[1] * shape[2]
    blocks = torch.arange(start // 4, (start + count + 3) // 4, device=device)
    words = torch.stack(philox(seed, blocks), -1).view(-1)
    return (words[start % 4 :][:count] >= threshold(p)).view(shape)


def default_scale(d: int) -> float:
    """Return 1 / sqrt(D)."""
    return d**-0.5


def parameters(
    causal: Any, window: Any, softcap: Any, scale: Any, dropout_p: Any, seed: Any, padded: bool
) -> dict[str, Any]:
    """Return the operator's scalars for the arguments of a public function, in the order of ``PARAMS``."""
    causal, alignment = (causal, TOP_LEFT) if isinstance(causal, bool) else alignment_of(causal)
    return {
        "causal": causal,
        "scale": scale,
        "dropout_p": dropout_p,
        "seed": seed,
        "padded": padded,
        "alignment": alignment,
        "window": window,
        "softcap": softcap,
    }


def lengths_and_impl(
    x: Any, key_lengths: Tensor | None, params: Mapping[str, Any], impl: str | None, invariant: bool
) -> tuple[Tensor | None, str | None]:
    """Return the operator's ``key_lengths`` and ``impl`` for a call whose queries are (in) ``x``.

    torch's fused kernels lack key lengths, dropout by Philox, and the options after ``padded``, or read a
    mask of Tq x Tk elements: such calls take our own kernels. An ``invariant`` call has a choice of its own.
    """
    lengths = key_lengths
    if isinstance(x, Tensor):
        if lengths is None:  # the operator needs a tensor; without ``padded`` no implementation reads it
            try:
                lengths = placeholder(x, x.shape[:1], torch.int32)
            except RuntimeError:  # a nested tensor, which the check refuses
                lengths = None
        dropout_p = params["dropout_p"]
        # What is no number has no truth, and is refused by the check.
        drops = isinstance(dropout_p, int | float) and dropout_p != 0
        is_plain = params["window"] is None and params["softcap"] is None and not params["alignment"]
        if impl is None and not invariant and (key_lengths is not None or drops or not is_plain):
            impl = "triton" if x.is_cuda else "eager"
    return lengths, impl


def check_arguments(
    q: Any,
    k: Any,
    v: Any,
    key_lengths: Any = None,
    *extras: Any,
    causal: Any = False,
    scale: Any = None,
    dropout_p: Any = 0.0,
    seed: Any = 0,
    padded: Any = False,
    alignment: Any = TOP_LEFT,
    window: Any = None,
    softcap: Any = None,
    terms: str = "",
) -> None:
    """Raise :class:`WeftError` if the arguments of a call are invalid."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        validate.tensor("attention", name, x, DTYPES, dims=range(4, 5))
    validate.same("attention", "q and k", q, k)
    validate.same("attention", "q and v", q, v)
    _check_shapes(q, k, v)
    check_dropout_arguments("attention", dropout_p, seed)
    if threshold(dropout_p) >> 32:  # p rounds to 1: every weight would be dropped
        hint = "multiply the values by 0"
        raise WeftError("attention: dropout_p", expected="below 1", got=1.0, hint=hint)
    if scale is not None and not (isinstance(scale, int | float) and 0 < scale < math.inf):
        hint = "a negative scale is that of -q"
        raise WeftError("attention: scale", expected="a finite number above 0", got=repr(scale), hint=hint)
    check_mask(causal, alignment, window, softcap)
    if key_lengths is not None:
        validate.tensor("attention", "key_lengths", key_lengths, ("int32",), dims=range(1, 2))
        validate.same_device("attention", "q and key_lengths", q, key_lengths)
        if key_lengths.shape != q.shape[:1]:
            expected = f"one length a batch, ({q.shape[0]},)"
            raise WeftError("attention: key_lengths", expected=expected, got=tuple(key_lengths.shape))
    check_terms(Terms.of(extras, terms), q, k)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
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
    if not MIN_HEAD_SIZE <= q.shape[3] <= MAX_HEAD_SIZE or q.shape[3] % 8:
        raise WeftError(
            "attention: the head size D",
            expected=f"a multiple of 8 from {MIN_HEAD_SIZE} to {MAX_HEAD_SIZE}",
            got=q.shape[3],
            hint="pad q, k and v with columns of 0, and give scale=D**-0.5 of the true D",
        )


def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """Save inputs and outputs: the backward recomputes the weights from scores and log-sum-exp."""
    return (*inputs, *output)


def cost(c: Case, direction: str) -> Cost:
    """Count two products of 2 B H Tq Tk D FLOPs, half of that with a causal mask; the backward 2.5 times.

    This is the usual count: recomputing scores earns no credit. With a window or at the bottom right the
    visible pairs of queries and keys are counted. Terms of the scores are read once, and their gradients
    written once.
    """
    q, k, _, lengths, *extras = c.inputs
    item = ITEMSIZE[q.dtype]
    (b, h, tq, d), tk = q.shape, k.shape[2]
    flops = 4.0 * b * h * d * AttentionOptions.of(c).mask.visible_pairs(tq, tk)
    inputs = q.nbytes + 2 * k.nbytes + (lengths.nbytes if c.params.get("padded") else 0)
    inputs += sum(x.nbytes for x in extras)
    out, lse = q.numel * item, q.numel // q.shape[3] * 4
    rate = SHORT[q.dtype]
    if direction == FORWARD:
        return Cost(read=inputs, written=out + lse, flops=flops, rate=rate)
    written = (q.numel + 2 * k.numel) * item
    written += sum(x.numel * ITEMSIZE[x.dtype] for x in extras if x.name in DIFFERENTIABLE)
    return Cost(read=inputs + 2 * out + lse, written=written, flops=2.5 * flops, rate=rate)


def _within_the_values(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor,
    *extras: Tensor,
    **params: Any,
) -> float:
    """Return by how much the output leaves the range of the values, as a share of the rounding error.

    Weights are at least 0 and sum to 1, so that each output lies between the least and the largest value.
    """
    if 0 in (*out.shape, *v.shape):
        return 0.0
    group = q.shape[1] // k.shape[1]
    largest = v.amax(2).repeat_interleave(group, 1)[:, :, None].float()
    least = v.amin(2).repeat_interleave(group, 1)[:, :, None].float()
    over = torch.maximum(out.float() - largest, least - out.float()).amax()
    size = float(torch.maximum(largest.abs(), least.abs()).amax())
    return max(0.0, float(over)) / (8 * torch.finfo(out.dtype).eps * size)


def _every_query_sees_a_key(c: Case) -> bool:
    options = AttentionOptions.of(c)
    tq, tk = c.inputs[0].shape[2], c.inputs[1].shape[2]
    has_empty_rows = options.mask.is_band and options.mask.leaves_queries_without_keys(tq, tk)
    has_sinks = "sinks" in options.terms  # its weights sum to less than 1
    return not (options.dropout_p or options.padded or has_empty_rows or has_sinks)


def public_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``weft.ops.attention``, where lengths stand for ``padded``, and ``causal``
    names the alignment."""
    hidden = {"padded", "alignment", "terms"} | (set() if arguments.get("padded") else {"key_lengths"})
    public = {name: value for name, value in arguments.items() if name not in hidden}
    return public | {"causal": "bottom_right"} if arguments.get("alignment") else public


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
    differentiable=DIFFERENTIABLE,
    rows=("q", "k", "v", "key_lengths"),
    differentiable_outputs=1,
    save=save,
    tolerance=Tolerance(
        chain=16.0,
        reason="a gradient depends on three sums, over D, keys and queries, each in any order; with 8 units "
        "torch's own float32 on a CPU would fail for one set of inputs in 150",
    ),
    gradient_scale=gradient_scale,
    gradient_units=(("sinks", "q"),),
    scale_reason="p (dp - sum of p dp) cancels in a row with few keys: completely in eager, which uses the "
    "same p twice, but not in a kernel that computes the sum from the rounded output",
    properties=(
        Property(
            name="within the values' range",
            holds=_within_the_values,
            applies=_every_query_sees_a_key,
        ),
    ),
    backward_note="scores are recomputed from q, k and the log-sum-exp; none are stored",
    public_arguments=public_arguments,
)
