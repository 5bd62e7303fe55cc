"""llm.c's shards of tokens: 256 int32 (magic, version, count), then the ids as uint16.

Read by a memory map and written in a stream, so that neither needs a shard in memory. Integers are
little-endian. The format does not tell which tokeniser wrote it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from weft.core import WeftError
from weft.gpt2.sequence import Part, Tokens

MAGIC, VERSION = 20240520, 1
HEADER_INTS, ID_BYTES = 256, 2
HEADER_BYTES = 4 * HEADER_INTS
MOST = 2**31 - 1  # the count is an int32
SHARD_TOKENS = 100_000_000  # 200 MB a shard, as llm.c cuts them
FOREIGN = {20240801: "llm.c's for Llama 3, whose ids are uint32"}


def open_shard(path: Path) -> np.ndarray:
    """The ids of one shard, (count,) uint16, mapped and not read.

    Raises :class:`WeftError`, which names the file, where it cannot be read, is no shard, is of
    another version, or has more or fewer bytes than its header tells.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
    except OSError as error:
        raise WeftError(f"{path} cannot be read", got=error.strerror or str(error)) from error
    hint = "it is not a shard, or was not written to its end; weft data encode writes one"
    if len(head) < HEADER_BYTES:
        raise WeftError(f"{path}", expected=f"{HEADER_BYTES} bytes of header", got=size, hint=hint)
    magic, version, count = (int(n) for n in np.frombuffer(head, "<i4", 3))
    if magic != MAGIC:
        said = FOREIGN.get(magic)
        got = f"{magic} ({said})" if said else magic
        raise WeftError(f"{path}: magic number", expected=MAGIC, got=got, hint=hint)
    if version != VERSION:
        raise WeftError(f"{path}: version", expected=VERSION, got=version)
    if count < 1:
        raise WeftError(f"{path}: tokens", expected="at least one", got=count)
    told = HEADER_BYTES + ID_BYTES * count
    if size != told:
        expected = f"{told} bytes ({count} tokens)"
        raise WeftError(f"{path}", expected=expected, got=f"{size} bytes", hint=hint)
    return np.memmap(path, "<u2", "r", offset=HEADER_BYTES, shape=(count,))


def open_shards(paths: Sequence[Path]) -> Tokens:
    """Shards as one sequence, in the order given; raises what :func:`open_shard` raises."""
    return Tokens(Part(name=str(p), label=p.name, ids=open_shard(p)) for p in paths)


def first_outside(ids: np.ndarray, vocab_size: int) -> int | None:
    """The place of the first id that is not under ``vocab_size``; a piece in memory at a time."""
    for start in range(0, len(ids), 1 << 22):
        outside = np.flatnonzero(ids[start : start + (1 << 22)] >= vocab_size)
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
    """Write chunks of ids, each (n,) integers under 65536, as ``folder/name_000000.bin`` and so on.

    The shards get their names only when the last is whole and on the disk: a set that was
    interrupted is not there at all. ``force`` writes over a set of the same name, and removes what
    is left of it.

    Raises :class:`WeftError` where there are such shards and not ``force``, where there are no
    tokens, where an id has no place in 16 bits, or where the disk is full or read-only.
    """
    if not 1 <= shard_tokens <= MOST:
        raise WeftError("tokens of a shard", expected=f"1 to {MOST}", got=shard_tokens)
    before = sorted(folder.glob(f"{name}_[0-9][0-9][0-9][0-9][0-9][0-9].bin"))
    if before and not force:
        hint = "--force writes over them; --name or --output names others"
        raise WeftError(f"{before[0]} is there already", hint=hint)
    writer = _Writer(folder, name, shard_tokens)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chunk in chunks:
            writer.add(chunk)
        written = writer.finish()
        for old in set(before) - set(written):
            old.unlink()
        _flush_folder(folder)
    except OSError as error:
        writer.drop()
        got = error.strerror or str(error)
        raise WeftError(f"shards cannot be written to {folder}", got=got) from error
    except BaseException:
        writer.drop()
        raise
    return written


class _Writer:
    """Shards under names of their own until :meth:`finish` gives them theirs."""

    def __init__(self, folder: Path, name: str, most: int) -> None:
        self.folder, self.name, self.most = folder, name, most
        self.parts: list[Path] = []
        self.file: BinaryIO | None = None
        self.count = 0

    def add(self, ids: np.ndarray) -> None:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 1 << 8 * ID_BYTES:
            outside = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise WeftError("a token id in a shard", expected="0 to 65535", got=outside)
        while len(ids):
            if self.file is None:
                part = self.folder / f".{self.name}_{len(self.parts):06d}.bin.part"
                self.file, self.count = part.open("wb"), 0
                self.parts.append(part)
                self.file.write(bytes(HEADER_BYTES))
            taken, ids = np.split(ids, [self.most - self.count])
            self.file.write(taken.astype("<u2").tobytes())
            self.count += len(taken)
            if self.count == self.most:
                self._close()

    def _close(self) -> None:
        """The header, which tells the count, goes in last."""
        assert self.file is not None
        head = np.zeros(HEADER_INTS, "<i4")
        head[:3] = MAGIC, VERSION, self.count
        self.file.seek(0)
        self.file.write(head.tobytes())
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.file = None

    def finish(self) -> list[Path]:
        if self.file is not None:
            self._close()
        if not self.parts:
            raise WeftError("a text to be encoded", expected="at least one token", got="none")
        whole = [p.with_name(p.name[1:].removesuffix(".part")) for p in self.parts]
        for part, path in zip(self.parts, whole, strict=True):
            os.replace(part, path)
        self.parts = []
        return whole

    def drop(self) -> None:
        if self.file is not None:
            with suppress(OSError):  # the disk may be full; the file goes anyway
                self.file.close()
        for part in self.parts:
            part.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """A name is on the disk when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
