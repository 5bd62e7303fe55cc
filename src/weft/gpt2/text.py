"""Where the tokens come from: a text file, shards, or the source of Python's standard library.

``open_tokens`` gives a training part and a validation part: what is named so among shards, else
the last tenth. A file is encoded in pieces that end before a space or a line end that follows
neither: no piece of GPT-2's pattern crosses such a place, so the ids are those of the whole text.
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
from weft.gpt2.sequence import Part, Tokens
from weft.gpt2.shards import open_shards
from weft.gpt2.tokens import Tokeniser, not_utf8

PIECE = 1 << 20
LARGEST_TEXT = 256 << 20  # bytes of a text that is encoded in memory; a shard may be larger
LIBRARY_BYTES = 16 << 20
# Tests repeat themselves; encodings and topics are tables that a program wrote.
LEFT_OUT = {"test", "tests", "idle_test", "encodings", "pydoc_data"}
LEFT_OUT |= {"site-packages", "dist-packages"}
VALIDATION = re.compile(r"(?<![a-z])val(?:id|idation)?(?![a-z])", re.IGNORECASE)
EDGE = re.compile(r"\S(?=[ \n])")
ENCODE = "weft data encode FILE --output DIR writes shards, which may be larger than memory"


def open_tokens(
    path: Path | None, *, tokeniser: Tokeniser, window: int = 1
) -> tuple[Tokens, Tokens]:
    """The tokens to train on and those to validate with.

    Args:
        path: a text file, one shard (``.bin``), a folder of shards, a glob of shards, or None for
            the source of the standard library of this Python.
        tokeniser: what a text is encoded with; shards hold ids already.
        window: the fewest tokens that each of the two must have, a batch's length and one.

    Shards with ``val``, ``valid`` or ``validation`` as a word of their name (``x_val_000000.bin``)
    validate; where none has it, the last tenth of all tokens does.

    Raises :class:`WeftError` where nothing is there, a shard is damaged, a text is empty, too large
    for memory, or no UTF-8 where it must be, and where there are too few tokens.
    """
    shards = shards_of(path)
    if shards is not None:
        held = [p for p in shards if VALIDATION.search(p.name)]
        if held and len(held) < len(shards):
            pair = open_shards([p for p in shards if p not in held]), open_shards(held)
            return _enough(str(path), pair, window)
        tokens = open_shards(shards)
    else:
        tokens = _text(path, tokeniser)
    last = max(len(tokens) // 10, window)
    pair = tokens.split(max(len(tokens) - last, 0))
    return _enough("the standard library" if path is None else str(path), pair, window)


def _enough(what: str, pair: tuple[Tokens, Tokens], window: int) -> tuple[Tokens, Tokens]:
    for use, tokens in zip(("train", "validate"), pair, strict=True):
        if len(tokens) < window:
            expected = f"{window} or more to {use} with: one window and the token after it"
            hint = "a longer text, or a shorter --length"
            raise WeftError(f"{what}: tokens", expected=expected, got=len(tokens), hint=hint)
    return pair


def shards_of(path: Path | None) -> list[Path] | None:
    """The shards that ``path`` means, in the order of their names; None where it is a text, which a
    tokeniser must encode. Raises :class:`WeftError` where nothing is there."""
    if path is None:
        return None
    if path.is_dir():
        found = sorted(path.glob("*.bin"))
        if not found:
            raise WeftError(f"{path}", expected="a folder of .bin shards", got="none", hint=ENCODE)
        return found
    if path.is_file():
        return [path] if path.suffix == ".bin" else None
    if glob.has_magic(str(path)):
        found = [Path(p) for p in sorted(glob.glob(str(path)))]
        others = [p for p in found if p.suffix != ".bin"]
        if not found or others:
            got = others[0] if others else "none"
            raise WeftError(f"{path}", expected=".bin shards", got=got, hint=ENCODE)
        return found
    hint = "left out: the source of Python's standard library; weft data shakespeare fetches a text"
    raise WeftError(f"{path} is not there", expected="a text, a shard or a folder", hint=hint)


def _text(path: Path | None, tokeniser: Tokeniser) -> Tokens:
    if path is None:
        name = f"the standard library of Python {platform.python_version()}"
        pieces = encode(name, [library_source()], tokeniser)
    else:
        size = path.stat().st_size
        if size > LARGEST_TEXT:
            expected = f"at most {LARGEST_TEXT >> 20} MiB of text in memory"
            got = f"{size >> 20} MiB"
            raise WeftError(f"{path}", expected=expected, got=got, hint=ENCODE)
        name, pieces = str(path), encode_file(path, tokeniser)
    ids = np.concatenate([np.empty(0, np.uint16), *pieces])
    if not len(ids) or (len(ids) == 1 and ids[0] == tokeniser.end_of_text):
        raise WeftError(f"{name} is empty", expected="a text")
    return Tokens([Part(name=name, label=name if path is None else path.name, ids=ids)])


def library_source() -> bytes:
    """The ``.py`` files of the standard library, by name one after another, up to 16 MiB: the same
    bytes wherever the same Python is. Tests, tables and installed packages are left out.

    Raises :class:`WeftError` where this Python came without them.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, inner, names in os.walk(root):
        inner[:] = [n for n in inner if n not in LEFT_OUT]
        files += [Path(folder, n) for n in names if n.endswith(".py")]
    taken, size = [], 0
    for path in sorted(files):
        source = path.read_bytes()
        size += len(source)
        if size > LIBRARY_BYTES:
            break
        taken.append(source)
    if not taken:
        hint = "--data names a text file"
        raise WeftError(f"{root}", expected="the standard library's source", got="none", hint=hint)
    return b"".join(taken)


def encode_file(path: Path, tokeniser: Tokeniser, piece: int = PIECE) -> Iterator[np.ndarray]:
    """The ids of a file, some (n,) uint16 at a time, after the tokeniser's end of text if it has
    one: it stands before each document, as in llm.c's shards."""
    try:
        with path.open("rb") as file:
            yield from encode(str(path), iter(lambda: file.read(piece), b""), tokeniser)
    except OSError as error:
        raise WeftError(f"{path} cannot be read", got=error.strerror or str(error)) from error


def encode(name: str, blocks: Iterable[bytes], tokeniser: Tokeniser) -> Iterator[np.ndarray]:
    """The ids of a text that comes in blocks of bytes, cut anywhere; ``name`` is for messages."""
    if tokeniser.end_of_text is not None:
        yield np.array([tokeniser.end_of_text], np.uint16)
    if tokeniser.name == "bytes":
        yield from map(tokeniser.encode, blocks)
        return
    held, place = "", 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    for block in chain(blocks, (None,)):
        waiting = len(decoder.getstate()[0])
        try:
            held += decoder.decode(block or b"", final=block is None)
        except UnicodeDecodeError as error:
            raise not_utf8(name, error, place - waiting) from error
        place += len(block or b"")
        cut = len(held) if block is None else _safe(held)
        if cut:
            yield tokeniser.encode(held[:cut])
            held = held[cut:]


def _safe(text: str) -> int:
    """The last place between what is no white space and a space or line end; 0 where there is
    none. Python's white space has all of Unicode's, which is the pattern's, and a little more."""
    reach = 1 << 12
    while True:
        start = max(0, len(text) - reach)
        last = max((found.end() for found in EDGE.finditer(text, start)), default=0)
        if last or not start:
            return last
        reach <<= 4
