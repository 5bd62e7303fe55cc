"""Open training data: a text file, shards, or the source of Python's standard library.

``open_tokens`` returns a training part and a validation part: shards named so, else the last tenth.

A file is encoded in pieces, so that it need not be in memory twice. A piece ends before a space or a
line break that follows a non-space character. No match of GPT-2's pattern crosses such a position, so
the ids are those of the whole text.
"""

from __future__ import annotations

import codecs
import glob
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from weft.core import WeftError
from weft.core.json_files import regular_size
from weft.gpt2.data.shards import open_shards
from weft.gpt2.data.token_sequence import Segment, TokenSequence
from weft.gpt2.data.tokenisers import Tokeniser, not_utf8

PIECE = 1 << 20
LARGEST_TEXT = 256 << 20  # bytes of a text that is encoded in memory; a shard may be larger
LIBRARY_BYTES = 16 << 20
# Tests repeat themselves; encodings and topics are tables that a program wrote.
EXCLUDED = {"test", "tests", "idle_test", "encodings", "pydoc_data"}
EXCLUDED |= {"site-packages", "dist-packages"}
VALIDATION = re.compile(r"(?<![a-z])val(?:id|idation)?(?![a-z])", re.IGNORECASE)
SAFE_CUT = re.compile(r"\S(?=[ \n])")
ENCODE_HINT = "weft data encode FILE --output DIR writes shards, which may be larger than memory"


def open_tokens(
    path: Path | None, *, tokeniser: Tokeniser, window: int = 1
) -> tuple[TokenSequence, TokenSequence]:
    """Return the tokens to train on and those to validate with.

    Args:
        path: a text file, one shard (``.bin``), a folder of shards, a glob of shards, or None for the
            source of this Python's standard library.
        tokeniser: encodes a text; shards have ids already.
        window: fewest tokens of either result: a batch's length and one.

    Shards with ``val``, ``valid`` or ``validation`` as a word of their name (``x_val_000000.bin``)
    validate; if none has it, the last tenth of all tokens does.

    Raises :class:`WeftError` if there is no such data, a shard is damaged, a text is empty, too large
    for memory or not UTF-8 where it must be, or if there are too few tokens.
    """
    shards = shards_of(path)
    if shards is not None:
        # If all names say so, the last tenth validates.
        validation = [p for p in shards if VALIDATION.search(p.name)]
        # At least one shard must be left to train on.
        if validation and len(validation) < len(shards):
            pair = open_shards([p for p in shards if p not in validation]), open_shards(validation)
            return _check_sizes(str(path), pair, window)
        tokens = open_shards(shards)
    else:
        tokens = _encode_text(path, tokeniser)
    # From the end, so that training and validation share no document except the one that is cut.
    count = max(len(tokens) // 10, window)
    pair = tokens.split(max(len(tokens) - count, 0))
    return _check_sizes("the standard library" if path is None else str(path), pair, window)


def _check_sizes(
    name: str, pair: tuple[TokenSequence, TokenSequence], window: int
) -> tuple[TokenSequence, TokenSequence]:
    for use, tokens in zip(("train", "validate"), pair, strict=True):
        if len(tokens) < window:
            expected = f"{window} or more to {use} with: one window and the token after it"
            hint = "a longer text, or a shorter --length"
            raise WeftError(f"{name}: tokens", expected=expected, got=len(tokens), hint=hint)
    return pair


def shards_of(path: Path | None) -> list[Path] | None:
    """Return the shards that ``path`` names, sorted by name; None if it is a text, which a tokeniser
    must encode. Raises :class:`WeftError` if there is no such file."""
    if path is None:
        return None
    if path.is_dir():
        paths = sorted(path.glob("*.bin"))
        if not paths:
            raise WeftError(f"{path}", expected="a folder of .bin shards", got="none", hint=ENCODE_HINT)
        return paths
    if path.is_file():
        return [path] if path.suffix == ".bin" else None
    if glob.has_magic(str(path)):
        paths = [Path(p) for p in sorted(glob.glob(str(path)))]
        others = [p for p in paths if p.suffix != ".bin"]
        if not paths or others:
            got = others[0] if others else "none"
            raise WeftError(f"{path}", expected=".bin shards", got=got, hint=ENCODE_HINT)
        return paths
    hint = "left out: the source of Python's standard library; weft data shakespeare fetches a text"
    raise WeftError(f"{path} is not there", expected="a text, a shard or a folder", hint=hint)


def _encode_text(path: Path | None, tokeniser: Tokeniser) -> TokenSequence:
    if path is None:
        name = f"the standard library of Python {platform.python_version()}"
        pieces = encode(name, [library_source()], tokeniser)
    else:
        size = path.stat().st_size
        if size > LARGEST_TEXT:
            expected = f"at most {LARGEST_TEXT >> 20} MiB of text in memory"
            got = f"{size >> 20} MiB"
            raise WeftError(f"{path}", expected=expected, got=got, hint=ENCODE_HINT)
        name, pieces = str(path), encode_file(path, tokeniser)
    ids = np.concatenate([np.empty(0, np.uint16), *pieces])
    if not len(ids) or (len(ids) == 1 and ids[0] == tokeniser.end_of_text):
        raise WeftError(f"{name} is empty", expected="a text")
    return TokenSequence([Segment(name=name, label=name if path is None else path.name, ids=ids)])


def library_source() -> bytes:
    """Return the ``.py`` files of the standard library, concatenated by name, up to 16 MiB: the same
    bytes for the same version of Python. Tests, tables and installed packages are left out.

    Raises :class:`WeftError` if this Python was installed without its source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        # os.walk descends into what remains in this list.
        # In place: a new list would be ignored.
        subfolders[:] = [n for n in subfolders if n not in EXCLUDED]
        files += [Path(folder, n) for n in names if n.endswith(".py")]
    sources, size = [], 0
    # Sorted: os.walk's order depends on the file system.
    for path in sorted(files):
        source = path.read_bytes()
        size += len(source)
        if size > LIBRARY_BYTES:
            break
        sources.append(source)
    if not sources:
        hint = "--data names a text file"
        raise WeftError(f"{root}", expected="the standard library's source", got="none", hint=hint)
    return b"".join(sources)


def _require_regular(path: Path) -> None:
    try:
        regular_size(path)
    except ValueError as error:
        raise WeftError(f"{path} cannot be read", expected="a file", got=error) from error


def encode_file(path: Path, tokeniser: Tokeniser, piece: int = PIECE) -> Iterator[np.ndarray]:
    """Yield the ids of a file in (n,) uint16 arrays, after the tokeniser's end of text if it has one:
    it comes before each document, as in llm.c's shards."""
    try:
        _require_regular(path)
        with path.open("rb") as file:
            yield from encode(str(path), iter(lambda: file.read(piece), b""), tokeniser)
    except OSError as error:
        raise WeftError(f"{path} cannot be read", got=error.strerror or str(error)) from error


def encode(name: str, blocks: Iterable[bytes], tokeniser: Tokeniser) -> Iterator[np.ndarray]:
    """Yield the ids of a text that comes in blocks of bytes, split anywhere; ``name`` is for messages."""
    if tokeniser.end_of_text is not None:
        # The document separator comes first, so that the first token has a context as well.
        yield np.array([tokeniser.end_of_text], np.uint16)
    if tokeniser.name == "bytes":
        yield from map(tokeniser.encode, blocks)
        return
    buffered, bytes_read = "", 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    for block in chain(blocks, (None,)):
        # Needed for the offset in the error message alone.
        incomplete = len(decoder.getstate()[0])  # bytes of a character that the last block cut
        try:
            # The decoder buffers the bytes of an incomplete character until the next block.
            buffered += decoder.decode(block or b"", final=block is None)
        except UnicodeDecodeError as error:
            raise not_utf8(name, error, bytes_read - incomplete) from error
        bytes_read += len(block or b"")
        cut = len(buffered) if block is None else _last_safe_cut(buffered)
        if cut:
            yield tokeniser.encode(buffered[:cut])
            buffered = buffered[cut:]


def _last_safe_cut(text: str) -> int:
    """Return the last position between a non-space and a space or line break; 0 if there is none.

    Python's white space includes all of Unicode's, which the pattern uses, and a few characters more.
    """
    # Search a short tail first: a text almost always has a space near its end.
    tail = 1 << 12
    while True:
        start = max(0, len(text) - tail)
        last = max((match.end() for match in SAFE_CUT.finditer(text, start)), default=0)
        if last or not start:
            return last
        tail <<= 4
