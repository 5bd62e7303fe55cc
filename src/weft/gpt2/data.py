"""A step's batch as a pure function of (seed, step): the position in the data *is* the step.

Window w is the tokens w*T to w*T + T, the last of which is only a target. The samples of all steps
are numbered through; sample s is window P(s mod W) of epoch s div W, where P is a permutation of
the W windows keyed by (seed, epoch): a Feistel network (Luby and Rackoff, 1988) over the next power
of four, walked until it falls under W (Black and Rogaway's cycle walking, 2002). It takes no
memory, and nothing is kept between steps.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from types import TracebackType

import numpy as np
import torch

from weft.core import WeftError
from weft.gpt2.sequence import Tokens
from weft.gpt2.text import open_tokens
from weft.gpt2.tokens import tokeniser

__all__ = ["Batches", "Prefetch", "open_tokens", "permuted", "tokeniser"]

ROUNDS = 8  # four make it strong with an ideal round function; ours is a cheap one


@lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"weft windows {seed} {epoch}".encode(), digest_size=8 * ROUNDS)
    return tuple(np.frombuffer(digest.digest(), "<u8").tolist())


def permuted(index: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Where the epoch's permutation of ``range(count)`` sends each of ``index``.

    Args:
        index: (n,) int64, each from 0 to count - 1.
        count: 1 or more.

    Returns:
        (n,) int64 of the same range; over all of it each number comes once.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)  # bits of each half
    found = _feistel(index.astype(np.uint64), half, seed, epoch)
    while (outside := found >= count).any():  # ends: the cycle leads back to index, under count
        found[outside] = _feistel(found[outside], half, seed, epoch)
    return found.astype(np.int64)


def _feistel(value: np.ndarray, half: int, seed: int, epoch: int) -> np.ndarray:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> bits, value & mask
    for key in _keys(seed, epoch):
        left, right = right, left ^ (_mixed(right ^ np.uint64(key)) & mask)
    return left << bits | right


def _mixed(x: np.ndarray) -> np.ndarray:
    """Every bit of 64 depends on every other; Stafford's variant 13, the end of SplitMix64."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


class Batches:
    """Batches of windows.

    Args:
        tokens: what :func:`open_tokens` gave.
        batch: the windows of one step, over all processes and micro-batches together.
        length: the tokens of a window, T.
        seed: any integer; another seed is another order.
        vocab_size: every id must be under it.

    Attributes:
        windows: the windows of an epoch. The steps 0 to windows // batch - 1 hold no window twice.

    Raises:
        WeftError: sizes under 1, or fewer tokens than one window and the token after it.
    """

    def __init__(self, tokens: Tokens, batch: int, length: int, seed: int, vocab_size: int) -> None:
        for name, value in (("batch", batch), ("length", length), ("vocab_size", vocab_size)):
            if value < 1:
                raise WeftError(name, expected="1 or more", got=value)
        self.tokens, self.batch, self.length = tokens, batch, length
        self.seed, self.vocab_size = seed, vocab_size
        self.windows = max(len(tokens) - 1, 0) // length
        if not self.windows:
            expected = f"{length + 1} or more: one window and the token after it"
            hint = "a longer text, or a shorter --length"
            raise WeftError("tokens", expected=expected, got=len(tokens), hint=hint)

    def epoch(self, step: int) -> float:
        """How often the text has been seen when ``step`` begins."""
        return step * self.batch / self.windows

    def at(
        self, step: int, micro: int = 0, accumulate: int = 1, rank: int = 0, world: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs x and targets y of one micro-batch, both (batch / (accumulate * world), T) int64
        on the CPU; y is x one token on.

        The step's samples are cut first by micro-batch, then by rank, so that one after another
        they are the same samples for any ``accumulate`` and ``world``.

        Raises :class:`WeftError` where the batch cannot be cut so, and for an id outside the
        vocabulary, with the shard and its place.
        """
        shares = accumulate * world
        if self.batch % shares:
            expected = f"a multiple of {accumulate} micro-batches times {world} processes"
            raise WeftError("batch", expected=expected, got=self.batch)
        if step < 0 or not (0 <= micro < accumulate and 0 <= rank < world):
            got = f"step {step}, micro {micro} of {accumulate}, rank {rank} of {world}"
            raise WeftError("a micro-batch", expected="numbers from 0, under their counts", got=got)
        size = self.batch // shares
        first = step * self.batch + (micro * world + rank) * size
        rows = np.empty((size, self.length + 1), np.int64)
        for row, window in zip(rows, self._windows(first, size), strict=True):
            start = window * self.length
            row[:] = self.tokens[start : start + self.length + 1]
            if row.max() >= self.vocab_size:
                self._outside(row, start)
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def _windows(self, first: int, size: int) -> list[int]:
        epochs, places = np.divmod(np.arange(first, first + size), self.windows)
        found = np.empty(size, np.int64)
        for epoch in np.unique(epochs).tolist():
            mine = epochs == epoch
            found[mine] = permuted(places[mine], self.windows, self.seed, epoch)
        return [int(w) for w in found]

    def _outside(self, row: np.ndarray, start: int) -> None:
        place = int(np.argmax(row >= self.vocab_size))
        raise WeftError(
            f"{self.tokens.where(start + place)}",
            expected=f"an id under {self.vocab_size}, the vocabulary",
            got=int(row[place]),
            hint="the shard is another tokeniser's, or damaged: weft data show FILE --tokeniser",
        )


class Prefetch:
    """Batches on a device, the next one made ready by a thread once :meth:`ahead` is called.

    The thread and the host's own work hold Python in turns. So a loop calls it when it has launched
    all that it can, and will wait for the device.

    On a GPU the thread copies into pinned memory, and :meth:`at` starts a copy to the device that
    the current stream waits for, not the host.

    Args:
        batches: where they come from.
        device: where they go.
        accumulate, rank, world: as in :meth:`Batches.at`.
    """

    def __init__(
        self,
        batches: Batches,
        device: torch.device | str,
        *,
        accumulate: int = 1,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.batches, self.device = batches, torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.accumulate, self.rank, self.world = accumulate, rank, world
        self._pool = ThreadPoolExecutor(1, "weft-batches", initializer=self._begin)
        self._next: tuple[tuple[int, int], Future[tuple[torch.Tensor, torch.Tensor]]] | None = None
        self._after: tuple[int, int] | None = None

    def _begin(self) -> None:
        """Pinned memory belongs to the context of a device: to this one, not to the first."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def _make(self, step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.batches.at(step, micro, self.accumulate, self.rank, self.world)
        return (x.pin_memory(), y.pin_memory()) if self.device.type == "cuda" else (x, y)

    def at(self, step: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``batches.at`` gives, on the device. Any order is right; one after another is fast.

        Raises what :meth:`Batches.at` raises, here and not in the thread.
        """
        last = micro + 1 == self.accumulate
        self._after = (step + 1, 0) if last else (step, micro + 1)
        waiting, self._next = self._next, None
        if waiting is None or waiting[0] != (step, micro):
            waiting = ((step, micro), self._pool.submit(self._make, step, micro))
        x, y = waiting[1].result()
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def ahead(self) -> None:
        """Let the thread make what comes after the last that was asked for."""
        if self._next is None and self._after is not None:
            self._next = (self._after, self._pool.submit(self._make, *self._after))

    def close(self) -> None:
        """End the thread; what it was making is dropped."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
