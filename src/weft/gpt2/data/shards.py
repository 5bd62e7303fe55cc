"""llm.c's shards of tokens: 256 int32 (magic, version, count), then the ids as uint16.

Shards are read through a memory map and written in a stream, so neither needs a whole shard in memory.
Integers are little-endian. The format does not say which tokeniser wrote it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from weft.core import WeftError
from weft.core.json_files import regular_size
from weft.core.output_files import sync
from weft.gpt2.data.token_sequence import Segment, TokenSequence

MAGIC, VERSION = 20240520, 1
HEADER_INTS, ID_BYTES = 256, 2
HEADER_BYTES = 4 * HEADER_INTS
MAX_TOKENS = 2**31 - 1  # the count is an int32
SHARD_TOKENS = 100_000_000  # 200 MB per shard, as in llm.c
OTHER_MAGIC = {20240801: "llm.c's for Llama 3, whose ids are uint32"}
SCAN_TOKENS = 1 << 22  # ids checked at once: 8 MiB


def open_shard(path: Path) -> np.ndarray:
    """Map the ids of one shard, (count,) uint16, without reading them.

    Raises :class:`WeftError` with the file's name if it cannot be read, is no shard, has another
    version, or is longer or shorter than its header says.
    """
    try:
        # The size is compared with the header's count: a copy that was cut off is found before the training
        # starts.
        size = regular_size(path)
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
    except (OSError, ValueError) as error:
        got = getattr(error, "strerror", None) or str(error)
        raise WeftError(f"{path} cannot be read", got=got) from error
    hint = "it is not a shard, or was not written to its end; weft data encode writes one"
    if len(header) < HEADER_BYTES:
        raise WeftError(f"{path}", expected=f"{HEADER_BYTES} bytes of header", got=size, hint=hint)
    magic, version, count = (int(n) for n in np.frombuffer(header, "<i4", 3))
    if magic != MAGIC:
        other = OTHER_MAGIC.get(magic)
        got = f"{magic} ({other})" if other else magic
        raise WeftError(f"{path}: magic number", expected=MAGIC, got=got, hint=hint)
    if version != VERSION:
        raise WeftError(f"{path}: version", expected=VERSION, got=version)
    if count < 1:
        raise WeftError(f"{path}: tokens", expected="at least one", got=count)
    expected_size = HEADER_BYTES + ID_BYTES * count
    if size != expected_size:
        expected = f"{expected_size} bytes ({count} tokens)"
        raise WeftError(f"{path}", expected=expected, got=f"{size} bytes", hint=hint)
    # Read only: a write through the map would change the shard on the disk.
    return np.memmap(path, "<u2", "r", offset=HEADER_BYTES, shape=(count,))


def open_shards(paths: Sequence[Path]) -> TokenSequence:
    """Map shards as one sequence, in this order; raises the errors of :func:`open_shard`."""
    return TokenSequence(Segment(name=str(p), label=p.name, ids=open_shard(p)) for p in paths)


def first_outside(ids: np.ndarray, vocab_size: int) -> int | None:
    """Return the index of the first id that is not below ``vocab_size``, or None."""
    for start in range(0, len(ids), SCAN_TOKENS):
        outside = np.flatnonzero(ids[start : start + SCAN_TOKENS] >= vocab_size)
        if len(outside):
            return start + int(outside[0])
    return None


def write_shards(
    folder: Path,
    name: str,
    chunks: Iterable[np.ndarray],
    *,
    shard_tokens: int = SHARD_TOKENS,
    force: bool = False,
) -> list[Path]:
    """Write chunks of ids, each (n,) integers below 65536, as ``folder/name_000000.bin`` and so on.

    The shards get their names once the last one is complete and on the disk: an interrupted write
    leaves none. ``force`` replaces an existing set of this name, including shards beyond the new count.

    Raises :class:`WeftError` if there are such shards and not ``force``, if there are no tokens, if an
    id does not fit into 16 bits, or if the disk is full or read-only.
    """
    if not 1 <= shard_tokens <= MAX_TOKENS:
        raise WeftError("tokens of a shard", expected=f"1 to {MAX_TOKENS}", got=shard_tokens)
    # Six digits exactly: `train_000000.bin` belongs to the set, `train_extra_000000.bin` does not.
    existing = sorted(folder.glob(f"{name}_[0-9][0-9][0-9][0-9][0-9][0-9].bin"))
    if existing and not force:
        hint = "--force writes over them; --name or --output names others"
        raise WeftError(f"{existing[0]} is there already", hint=hint)
    writer = _ShardWriter(folder, name, shard_tokens)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chunk in chunks:
            writer.add(chunk)
        written = writer.finish()
        # A shorter new set must not leave shards of the old one behind it.
        for old in set(existing) - set(written):
            old.unlink()
        sync(folder)  # a renamed file is durable only with its folder
    except OSError as error:
        writer.discard()
        got = error.strerror or str(error)
        raise WeftError(f"shards cannot be written to {folder}", got=got) from error
    except BaseException:
        writer.discard()
        raise
    return written


class _ShardWriter:
    """Writes shards to hidden temporary files, which :meth:`finish` renames."""

    def __init__(self, folder: Path, name: str, max_tokens: int) -> None:
        self.folder, self.name, self.max_tokens = folder, name, max_tokens
        self.temporary: list[Path] = []
        self.file: BinaryIO | None = None
        self.count = 0

    def add(self, ids: np.ndarray) -> None:
        # astype("<u2") would wrap a larger id silently.
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 1 << 8 * ID_BYTES:
            outside = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise WeftError("a token id in a shard", expected="0 to 65535", got=outside)
        while len(ids):
            if self.file is None:
                path = self.folder / f".{self.name}_{len(self.temporary):06d}.bin.part"
                self.file, self.count = path.open("wb"), 0
                self.temporary.append(path)
                self.file.write(bytes(HEADER_BYTES))
            head, ids = np.split(ids, [self.max_tokens - self.count])
            self.file.write(head.astype("<u2").tobytes())
            self.count += len(head)
            if self.count == self.max_tokens:
                self._close()

    def _close(self) -> None:
        """Write the header, which has the count, and put the file onto the disk."""
        assert self.file is not None
        # At the end, because the count is known only now; a file that was cut off has no valid magic number.
        header = np.zeros(HEADER_INTS, "<i4")
        header[:3] = MAGIC, VERSION, self.count
        self.file.seek(0)
        self.file.write(header.tobytes())
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.file = None

    def finish(self) -> list[Path]:
        if self.file is not None:
            self._close()
        if not self.temporary:
            raise WeftError("a text to be encoded", expected="at least one token", got="none")
        paths = [p.with_name(p.name[1:].removesuffix(".part")) for p in self.temporary]
        for temporary, path in zip(self.temporary, paths, strict=True):
            # Atomic on one file system: a reader sees the old shard or the new one, never a part.
            os.replace(temporary, path)
        self.temporary = []
        return paths

    def discard(self) -> None:
        if self.file is not None:
            with suppress(OSError):  # closing flushes, which a full disk refuses; the file goes anyway
                self.file.close()
        for path in self.temporary:
            path.unlink(missing_ok=True)
