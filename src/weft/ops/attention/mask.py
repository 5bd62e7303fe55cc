"""Mask of attention: which keys a query sees.

    position i + shift, where shift = 0 (top left) or keys - Tq (bottom right)
    query i sees key j  if  j < keys,  j <= position (causal),  j > position - window

``keys`` is the number of visible keys: Tk, or a batch's length. With ``bottom_right`` the last query is at
the last visible key, as in chunked prefill and decoding. A query sees at most ``window`` keys, its own among
them. Positions below 0, and windows that begin past the last key, leave queries without keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.core import WeftError

TOP_LEFT, BOTTOM_RIGHT = 0, 1  # values of the operator's argument ``alignment``
MAX_WINDOW = 2**31 - 1  # kernels count keys in 32 bits


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Causal mask, its alignment, its window in keys (None: unlimited), and the length of each batch."""

    causal: bool = False
    bottom_right: bool = False
    window: int | None = None
    padded: bool = False

    @property
    def is_band(self) -> bool:
        """True for more than a causal mask at the top left: a query may then see no key."""
        return self.causal and (self.bottom_right or self.window is not None)

    def shift(self, tq: int, keys: Any) -> Any:
        """Return the position of query 0; ``keys`` is a number or a tensor of numbers."""
        return keys - tq if self.bottom_right else 0

    def window_of(self, tq: int, tk: int) -> int:
        """Return the window, or where it hides nothing a number that the kernels can add to positions."""
        return tq + tk if self.window is None else min(self.window, tq + tk)

    def hides(self, query: Tensor, key: Tensor, keys: Any, tq: int) -> Tensor:
        """Return True where ``query`` does not see ``key`` by the causal mask; they are broadcast."""
        position = query + self.shift(tq, keys)
        hidden = key > position
        return hidden if self.window is None else hidden | (key <= position - self.window)

    def hidden(self, tq: int, keys: int, device: torch.device) -> Tensor | None:
        """Return (Tq, keys), True where a query does not see a key; None for no mask."""
        if not self.causal:
            return None
        query, key = (torch.arange(n, device=device) for n in (tq, keys))
        return self.hides(query[:, None], key, keys, tq)

    def visible_pairs(self, tq: int, tk: int) -> float:
        """Return the number of pairs of a query and a key that it sees, without lengths.

        A causal mask at the top left counts as one half, as usual, for any two lengths.
        """
        if not self.is_band:
            return tq * tk * (0.5 if self.causal else 1.0)
        first, window = self.shift(tq, tk), self.window_of(tq, tk)
        last = first + tq - 1
        # Keys at or before each position, without those before its window.
        return float(_at_or_before(first, last, tk) - _at_or_before(first - window, last - window, tk))

    def leaves_queries_without_keys(self, tq: int, tk: int) -> bool:
        """True if a query sees no key, without lengths."""
        if not self.is_band:
            return tk == 0 and tq > 0
        shift = self.shift(tq, tk)
        return tq > 0 and (shift < 0 or tq - 1 + shift - self.window_of(tq, tk) >= tk - 1)


def _at_or_before(first: int, last: int, tk: int) -> int:
    """Return the sum over positions from ``first`` to ``last`` of the number of keys at or before each."""
    first, whole = max(first, 0), max(0, last - max(first, tk) + 1)  # positions that have all keys before
    stop = min(last, tk - 1)
    rising = (first + stop + 2) * (stop - first + 1) // 2 if stop >= first else 0
    return rising + whole * tk


def alignment_of(causal: Any) -> tuple[bool, int]:
    """Return the operator's ``causal`` and ``alignment`` for the public argument ``causal``.

    Raise :class:`WeftError` for anything but a bool and the known text.
    """
    expected = "True, False or 'bottom_right'"
    if isinstance(causal, torch.Tensor):
        raise WeftError("attention: causal", expected=expected, got="a tensor")
    if isinstance(causal, bool):
        return causal, TOP_LEFT
    if not isinstance(causal, str) or causal != "bottom_right":
        hint = "True is the mask at the top left: query i sees keys 0 to i"
        raise WeftError("attention: causal", expected=expected, got=f"{causal!r:.80}", hint=hint)
    return True, BOTTOM_RIGHT


def check_mask(causal: Any, alignment: Any, window: Any, softcap: Any) -> None:
    """Raise :class:`WeftError` for an invalid window, alignment or cap of the scores."""
    if window is not None:
        expected = f"None, or an integer from 1 to {MAX_WINDOW}"
        if type(window) is not int or not 1 <= window <= MAX_WINDOW:
            raise WeftError("attention: window", expected=expected, got=repr(window))
        if not causal:
            hint = "pass causal=True: a window reaches back from each query's own position"
            raise WeftError("attention: window", expected="a causal mask", got="causal=False", hint=hint)
    if alignment not in (TOP_LEFT, BOTTOM_RIGHT) or (alignment and not causal):
        expected = f"{TOP_LEFT} (top left), or with a causal mask {BOTTOM_RIGHT} (bottom right)"
        raise WeftError("attention: alignment", expected=expected, got=repr(alignment))
    if softcap is None:
        return
    is_number = isinstance(softcap, int | float) and not isinstance(softcap, bool)
    if not (is_number and 0 < softcap < float("inf")):
        hint = "softcap=None leaves the scores as they are"
        raise WeftError(
            "attention: softcap", expected="a finite number above 0", got=repr(softcap), hint=hint
        )
