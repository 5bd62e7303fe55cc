"""``TokenSequence``: several arrays of token ids as one sequence, in memory or mapped from files.

No array is copied whole: a slice reads the pages that it needs, so a sequence may be larger than
memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from weft.core import WeftError

# The identity hashes all tokens of a sequence of up to FULL_HASH tokens. Of a longer one it hashes
# HASH_SAMPLE tokens, in HASH_CHUNKS evenly spaced chunks, so that opening 20 GB of shards is quick.
FULL_HASH, HASH_SAMPLE, HASH_CHUNKS = 1 << 25, 1 << 18, 64


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Contiguous token ids.

    Attributes:
        name: name in messages, such as a shard's path.
        label: name in the identity: without the folder, which may change.
        ids: (count,) unsigned integers of 8 or 16 bits.
        first: index of ``ids[0]`` within the file or text of that name.
    """

    name: str
    label: str
    ids: np.ndarray
    first: int = 0


class TokenSequence:
    """Segments as one sequence of token ids."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self.segments = tuple(s for s in segments if len(s.ids))
        self._starts = np.cumsum([0, *(len(s.ids) for s in self.segments)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, key: int | slice) -> Any:
        """Return one id as an int, or a slice as an array in the segments' dtype; a slice within one
        segment is a view. Raises :class:`IndexError` as a list does."""
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                raise WeftError("a slice of tokens", expected="step 1", got=step)
            return self._between(start, max(start, stop))
        index = range(len(self))[key]
        return int(self._between(index, index + 1)[0])

    def _between(self, start: int, stop: int) -> np.ndarray:
        pieces = []
        number = self._segment_of(start)
        while start < stop:
            base, ids = int(self._starts[number]), self.segments[number].ids
            end = min(stop, base + len(ids))
            pieces.append(ids[start - base : end - base])
            start, number = end, number + 1
        if not pieces:
            return np.empty(0, np.uint16)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _segment_of(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def location(self, index: int) -> str:
        """Return the segment's name of a token and its index there, counted from 0."""
        index = range(len(self))[index]
        number = self._segment_of(index)
        segment = self.segments[number]
        return f"{segment.name}, token {index - int(self._starts[number]) + segment.first}"

    def split(self, at: int) -> tuple[TokenSequence, TokenSequence]:
        """Return the first ``at`` tokens and the others, without copying."""
        before: list[Segment] = []
        after: list[Segment] = []
        for segment, start in zip(self.segments, self._starts.tolist(), strict=False):
            cut = min(max(at - start, 0), len(segment.ids))
            for side, ids, first in ((before, segment.ids[:cut], 0), (after, segment.ids[cut:], cut)):
                side.append(
                    Segment(name=segment.name, label=segment.label, ids=ids, first=segment.first + first)
                )
        return TokenSequence(before), TokenSequence(after)

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the segments' labels and sizes and of the tokens: of all of them up to 2^25, of
        2^18 of them in 64 chunks where there are more. It does not change when a folder is moved."""
        digest = hashlib.sha256()
        for segment in self.segments:
            # Labels and sizes too: the same tokens in another order of files are another sequence.
            digest.update(f"{segment.label}:{segment.first}:{len(segment.ids)}\n".encode())
        hashed = FULL_HASH if len(self) <= FULL_HASH else HASH_SAMPLE
        for i in range(HASH_CHUNKS):
            start = i * len(self) // HASH_CHUNKS
            stop = min((i + 1) * len(self) // HASH_CHUNKS, start + hashed // HASH_CHUNKS)
            digest.update(self[start:stop].astype("<u2").tobytes())
        return digest.hexdigest()
