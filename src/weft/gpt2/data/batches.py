"""Batches as a pure function of (seed, step): the step is the only position in the data.

Window w is the tokens w*T to w*T + T; the last of them is only a target. The samples of all steps are
numbered consecutively. Sample s is window P(s mod W) of epoch s div W, where P is a permutation of the
W windows keyed by (seed, epoch): a Feistel network (Luby and Rackoff, 1988) over the next power of
four, iterated until the result is below W (cycle walking; Black and Rogaway, 2002). It takes no memory
and has no state between steps.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch

from weft.core import WeftError
from weft.gpt2.data.token_sequence import TokenSequence

ROUNDS = 8  # four are enough with an ideal round function; this one is cheap


@lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    # A hash instead of Python's or numpy's generator: the order is the same in every version of both.
    digest = hashlib.blake2b(f"weft windows {seed} {epoch}".encode(), digest_size=8 * ROUNDS)
    return tuple(np.frombuffer(digest.digest(), "<u8").tolist())


def permuted(index: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Apply the epoch's permutation of ``range(count)`` to each element of ``index``.

    Args:
        index: (n,) int64, each from 0 to count - 1.
        count: 1 or more.

    Returns:
        (n,) int64 in the same range; over the whole range each number occurs once.
    """
    # Two halves of equal width, together at least the bits of count - 1.
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    values = _feistel(index.astype(np.uint64), half_bits, seed, epoch)
    # Terminates: the network is a permutation, so the cycle returns to index, which is below count.
    while (outside := values >= count).any():
        values[outside] = _feistel(values[outside], half_bits, seed, epoch)
    return values.astype(np.int64)


def _feistel(value: np.ndarray, half_bits: int, seed: int, epoch: int) -> np.ndarray:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> bits, value & mask
    for key in _keys(seed, epoch):
        # Invertible whatever _mix does, which is why the whole is a permutation.
        left, right = right, left ^ (_mix(right ^ np.uint64(key)) & mask)
    return left << bits | right


def _mix(x: np.ndarray) -> np.ndarray:
    """Mix 64 bits so that each depends on every other: Stafford's variant 13, used by SplitMix64."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


class Batches:
    """Batches of windows.

    Args:
        tokens: the tokens, as :func:`weft.gpt2.data.text.open_tokens` returns them.
        batch: windows per step, over all processes and micro-batches.
        length: tokens of a window, T.
        seed: any integer; it determines the order.
        vocab_size: every id must be below it.

    Attributes:
        windows: number of windows in an epoch. Steps 0 to windows // batch - 1 repeat no window.

    Raises:
        WeftError: sizes below 1, or fewer tokens than one window and the token after it.
    """

    def __init__(self, tokens: TokenSequence, batch: int, length: int, seed: int, vocab_size: int) -> None:
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
        """Number of passes over the text before ``step`` begins."""
        return step * self.batch / self.windows

    def at(
        self, step: int, micro: int = 0, accumulate: int = 1, rank: int = 0, world: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs x and targets y of one micro-batch, (batch / (accumulate * world), T) int64 on
        the CPU; y is x shifted by one token.

        A step's samples are split by micro-batch first and by rank second, so that their
        concatenation is the same for any ``accumulate`` and ``world``.

        Raises :class:`WeftError` if the batch cannot be split so, and for an id outside the vocabulary,
        with its shard and index.
        """
        shares = accumulate * world
        if self.batch % shares:
            expected = f"a multiple of {accumulate} micro-batches times {world} processes"
            raise WeftError("batch", expected=expected, got=self.batch)
        if step < 0 or not (0 <= micro < accumulate and 0 <= rank < world):
            got = f"step {step}, micro {micro} of {accumulate}, rank {rank} of {world}"
            raise WeftError("a micro-batch", expected="numbers from 0, under their counts", got=got)
        # Micro-batch first, rank second: gradient accumulation then sums over the same samples in the same
        # order, however many processes share the step.
        size = self.batch // shares
        first = step * self.batch + (micro * world + rank) * size
        # One array for inputs and targets: a target is the next element of the same row.
        rows = np.empty((size, self.length + 1), np.int64)
        for row, window in zip(rows, self._windows(first, size), strict=True):
            # Windows overlap by one token: the last target of one is the first input of the next.
            start = window * self.length
            row[:] = self.tokens[start : start + self.length + 1]
            # Checked here, on the host: on a GPU the embedding's own check would wait for the device, and
            # without it such an id gives NaN.
            if row.max() >= self.vocab_size:
                self._refuse_id(row, start)
        inputs_and_targets = torch.from_numpy(rows)
        return inputs_and_targets[:, :-1].contiguous(), inputs_and_targets[:, 1:].contiguous()

    def _windows(self, first: int, size: int) -> list[int]:
        """Return the windows of ``size`` samples from sample ``first`` on; they may cross an epoch."""
        # A batch at the end of an epoch takes its last samples from the next one: no sample is dropped.
        epochs, positions = np.divmod(np.arange(first, first + size), self.windows)
        windows = np.empty(size, np.int64)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            windows[in_epoch] = permuted(positions[in_epoch], self.windows, self.seed, epoch)
        return [int(w) for w in windows]

    def _refuse_id(self, row: np.ndarray, start: int) -> None:
        column = int(np.argmax(row >= self.vocab_size))
        raise WeftError(
            f"{self.tokens.location(start + column)}",
            expected=f"an id under {self.vocab_size}, the vocabulary",
            got=int(row[column]),
            hint="the shard is another tokeniser's, or damaged: weft data show FILE --tokeniser",
        )


class Prefetch:
    """Batches on a device; a thread prepares the next one once :meth:`prefetch_next` is called.

    The thread and the training loop share Python's lock. So the loop calls ``prefetch_next`` when it
    has launched all that it can and is about to wait for the device.

    On a GPU the thread copies into pinned memory, and :meth:`at` starts an asynchronous copy to the
    device: the current stream waits for it, the host does not.

    Args:
        batches: the source.
        device: the device of the tensors.
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
        # One thread: batches are ready in order, and reading is limited by the disk or by Python's lock.
        self._pool = ThreadPoolExecutor(1, "weft-batches", initializer=self._set_thread_device)
        # The batch that the thread prepares, by (step, micro-batch); any other request is computed at once.
        self._pending: tuple[tuple[int, int], Future[tuple[torch.Tensor, torch.Tensor]]] | None = None
        self._following: tuple[int, int] | None = None

    def _set_thread_device(self) -> None:
        """Select the device in the thread: pinned memory belongs to the current device's context."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def _prepare(self, step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.batches.at(step, micro, self.accumulate, self.rank, self.world)
        return (x.pin_memory(), y.pin_memory()) if self.device.type == "cuda" else (x, y)

    def at(self, step: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``batches.at(step, micro, ...)`` on the device. Any order works; consecutive
        micro-batches are fast.

        Raises the errors of :meth:`Batches.at`, in the caller's thread.
        """
        last = micro + 1 == self.accumulate
        self._following = (step + 1, 0) if last else (step, micro + 1)
        pending, self._pending = self._pending, None
        # A caller may jump, for instance on resume: the prepared batch is dropped.
        if pending is None or pending[0] != (step, micro):
            pending = ((step, micro), self._pool.submit(self._prepare, step, micro))
        x, y = pending[1].result()
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def prefetch_next(self) -> None:
        """Start the thread on the micro-batch that follows the last one returned."""
        if self._pending is None and self._following is not None:
            self._pending = (self._following, self._pool.submit(self._prepare, *self._following))

    def close(self) -> None:
        """Stop the thread and drop its batch."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
