"""Many tokens as one sequence: parts one after another, in memory or mapped from files.

A part is never copied whole: a slice touches only the pages that it reads, so that the sequence may
be larger than memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from weft.core import WeftError

# A hash reads so many tokens whole, of more a sample: so many in stretches spread evenly.
WHOLE, SAMPLE, STRETCHES = 1 << 25, 1 << 18, 64


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tokens that lie together.

    Attributes:
        name: what a message calls it, such as a shard's path.
        label: what it is called in an identity: without the folder, which may move.
        ids: (count,) unsigned integers of 8 or 16 bits.
        first: the place that the first of them has in what is named.
    """

    name: str
    label: str
    ids: np.ndarray
    first: int = 0


class Tokens:
    """Parts as one sequence of (count,) token ids."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = tuple(p for p in parts if len(p.ids))
        self._starts = np.cumsum([0, *(len(p.ids) for p in self.parts)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, key: int | slice) -> Any:
        """One id as an int, or a slice as an array in the parts' own dtype; a slice within one part
        is a view of it. Raises :class:`IndexError` as a list does."""
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                raise WeftError("a slice of tokens", expected="step 1", got=step)
            return self._between(start, max(start, stop))
        place = range(len(self))[key]
        return int(self._between(place, place + 1)[0])

    def _between(self, start: int, stop: int) -> np.ndarray:
        found = []
        part = self._part(start)
        while start < stop:
            base, ids = int(self._starts[part]), self.parts[part].ids
            end = min(stop, base + len(ids))
            found.append(ids[start - base : end - base])
            start, part = end, part + 1
        if not found:
            return np.empty(0, np.uint16)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _part(self, place: int) -> int:
        return int(np.searchsorted(self._starts, place, side="right")) - 1

    def where(self, place: int) -> str:
        """The part that a token stands in, and its place there, counted from 0."""
        index = range(len(self))[place]
        number = self._part(index)
        part = self.parts[number]
        return f"{part.name}, token {index - int(self._starts[number]) + part.first}"

    def split(self, at: int) -> tuple[Tokens, Tokens]:
        """The first ``at`` tokens, and the others; nothing is copied."""
        before, after = [], []
        for part, start in zip(self.parts, self._starts.tolist(), strict=False):
            cut = min(max(at - start, 0), len(part.ids))
            before.append(_cut(part, 0, cut))
            after.append(_cut(part, cut, len(part.ids)))
        return Tokens(before), Tokens(after)

    @cached_property
    def identity(self) -> str:
        """A SHA-256 of the parts' labels and sizes and of the tokens: of all of them up to
        2^25, of 2^18 in 64 stretches where there are more. A moved folder keeps it."""
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(f"{part.label}:{part.first}:{len(part.ids)}\n".encode())
        most = WHOLE if len(self) <= WHOLE else SAMPLE
        for i in range(STRETCHES):
            start = i * len(self) // STRETCHES
            stop = min((i + 1) * len(self) // STRETCHES, start + most // STRETCHES)
            digest.update(self[start:stop].astype("<u2").tobytes())
        return digest.hexdigest()


def _cut(part: Part, start: int, stop: int) -> Part:
    first = part.first + start
    return Part(name=part.name, label=part.label, ids=part.ids[start:stop], first=first)
