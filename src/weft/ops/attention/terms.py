"""Optional terms of attention's scores: sinks, ALiBi and an additive bias.

    score = softcap(scale q k^T) + bias - slope |i + shift - j|, and -inf where a query sees no key
    p_ij  = exp(score_ij) / (exp(sink_h) + sum over j of exp(score_ij))

A *sink* is one more score of each head, without a value (gpt-oss). *ALiBi* (arXiv:2108.12409) subtracts
``slope`` times the distance between the positions of query and key; ``shift`` is the position of query 0 as
in mask.py: 0, or with a causal mask at the bottom right the number of visible keys minus Tq. ``bias`` is
broadcast to (B, H, Tq, Tk).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core import WeftError
from weft.ops._common import validate

NAMES = ("sinks", "alibi_slopes", "bias")  # order of the tensors behind key_lengths


class Terms(NamedTuple):
    """Tensors of the terms that a call has; None for the others.

    Shapes: sinks (H,), alibi_slopes (H,) or (B, H) float32, bias (B, H, Tq, Tk) with any dimension 1.
    """

    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None

    @staticmethod
    def of(tensors: tuple[Tensor, ...], names: str) -> Terms:
        """Return the terms whose names, joined by "+", are ``names``, in the order of ``NAMES``."""
        return Terms(**dict(zip(names.split("+") if names else (), tensors, strict=True)))

    @property
    def present(self) -> dict[str, Tensor]:
        """Tensors by name, in the order of ``NAMES``."""
        return {name: x for name, x in zip(NAMES, self, strict=True) if x is not None}

    def slopes(self, b: int, h: int) -> Tensor | None:
        """Return ALiBi's slopes as (B, H)."""
        return None if self.alibi_slopes is None else self.alibi_slopes.expand(b, h)

    def added(self, tq: int, keys: int, shift: Any) -> Tensor | None:
        """Return what is added to the scores, broadcastable to (B, H, Tq, keys), in at least float32.

        ``shift`` is the position of query 0: a number, or a tensor that is broadcast to the scores. The
        bias has ``keys`` columns, or one.
        """
        total = None
        if (slopes := self.alibi_slopes) is not None:
            query, key = (torch.arange(n, device=slopes.device) for n in (tq, keys))
            distance = (query[:, None] + shift - key).abs()
            total = -slopes[..., None, None] * distance
        if self.bias is not None:
            bias = self.bias.to(torch.promote_types(self.bias.dtype, torch.float32))
            total = bias if total is None else total + bias
        return total


def check_terms(terms: Terms, q: Tensor, k: Tensor) -> None:
    """Raise :class:`WeftError` for a term of a wrong shape, dtype or device."""
    (b, h, tq, _), tk = q.shape, k.shape[2]
    own = str(q.dtype).removeprefix("torch.")
    dtypes = ("float32",) if own == "float32" else ("float32", own)
    sizes = {"sinks": range(1, 2), "alibi_slopes": range(1, 3), "bias": range(4, 5)}
    for name, x in terms.present.items():
        validate.tensor("attention", name, x, ("float32",) if name == "alibi_slopes" else dtypes, sizes[name])
        validate.same_device("attention", f"q and {name}", q, x)
    if (sinks := terms.sinks) is not None and sinks.shape != (h,):
        raise WeftError("attention: sinks", expected=f"one sink a head, ({h},)", got=tuple(sinks.shape))
    if (slopes := terms.alibi_slopes) is not None and slopes.shape not in ((h,), (b, h)):
        expected = f"one slope a head, ({h},), or ({b}, {h})"
        raise WeftError("attention: alibi_slopes", expected=expected, got=tuple(slopes.shape))
    if (bias := terms.bias) is not None:
        full = (b, h, tq, tk)
        if any(size not in (1, whole) for size, whole in zip(bias.shape, full, strict=True)):
            expected = f"{full}, or 1 in place of any of the four sizes"
            raise WeftError("attention: bias", expected=expected, got=tuple(bias.shape))


def refuse_slopes_gradient(terms: Terms) -> None:
    """Raise :class:`WeftError` if a gradient of ALiBi's slopes is wanted, which no implementation has."""
    slopes = terms.alibi_slopes
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        hint = "pass alibi_slopes.detach(), or the terms as bias, which has a gradient"
        raise WeftError("attention: alibi_slopes", expected="constants", got="requires_grad=True", hint=hint)


def summed_to(x: Tensor, like: Tensor) -> Tensor:
    """Return the sum of ``x`` over the dimensions where ``like`` is 1 and ``x`` is not, in the dtype of
    ``like``."""
    dims = [i for i, (n, m) in enumerate(zip(x.shape, like.shape, strict=True)) if m == 1 and n != 1]
    return (x.sum(dims, keepdim=True) if dims else x).to(like.dtype)
