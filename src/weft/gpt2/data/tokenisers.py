"""Tokenisers: text to token ids and back.

``bytes`` has 256 ids and no dependency. ``gpt2`` is GPT-2's byte-pair encoding (Sennrich et al.,
arXiv:1508.07909), computed by tiktoken with the published merges or with those of a local folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from weft.core import WeftError
from weft.core.json_files import read_json

NAMES = ("bytes", "gpt2")
GPT2_VOCAB, END_OF_TEXT = 50257, "<|endoftext|>"
# GPT-2's regular expression, which splits text before it merges; part of the encoding.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Names of the two files: OpenAI's, and Hugging Face's.
BPE_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
OFFLINE_HINT = (
    "with a network it is fetched once; without one, set TIKTOKEN_CACHE_DIR to tiktoken's cache "
    "from a machine that has it, or give --bpe-files a folder with encoder.json and vocab.bpe; "
    "--tokeniser bytes needs neither"
)


class Tokeniser(Protocol):
    """Interface of a tokeniser.

    Attributes:
        name: ``bytes`` or ``gpt2``.
        vocab_size: number of ids.
        end_of_text: id that is put before each document, or None.
    """

    name: str

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_text(self) -> int | None: ...

    def ready(self) -> None:
        """Raise :class:`WeftError` now if encoding or decoding would: before a run, not during it."""

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return (n,) uint16 ids. Bytes must be UTF-8 for ``gpt2``, else :class:`WeftError`."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return text; invalid UTF-8 becomes U+FFFD. :class:`WeftError` for an id out of range."""


def tokeniser(name: str, bpe_files: Path | None = None) -> Tokeniser:
    """Return the tokeniser of this name, one of :data:`NAMES`.

    ``bpe_files`` is a folder with GPT-2's ``encoder.json`` and ``vocab.bpe`` (Hugging Face's names are
    ``vocab.json`` and ``merges.txt``) or with other files of this format. Without it tiktoken
    downloads them at the first encoding; ``vocab_size`` needs no download.

    Raises :class:`WeftError` for an unknown name, and for files that are missing or malformed.
    """
    if name not in NAMES:
        raise WeftError("tokeniser", expected=" or ".join(NAMES), got=name)
    if name == "gpt2":
        return GPT2Tokeniser(bpe_files)
    if bpe_files is not None:
        raise WeftError("--bpe-files", expected="the tokeniser gpt2", got=name)
    return ByteTokeniser()


class ByteTokeniser:
    """Each byte is a token."""

    name = "bytes"
    vocab_size = 256
    end_of_text = None

    def ready(self) -> None:
        """Return at once: there is nothing to load."""

    def encode(self, text: str | bytes) -> np.ndarray:
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(_checked_ids(ids, self.vocab_size)).decode(errors="replace")


class GPT2Tokeniser:
    """GPT-2's byte-pair encoding; the merges are loaded at the first use."""

    name = "gpt2"

    def __init__(self, bpe_files: Path | None = None) -> None:
        self._vocabulary = None if bpe_files is None else read_bpe_files(bpe_files)

    @property
    def vocab_size(self) -> int:
        return GPT2_VOCAB if self._vocabulary is None else self._vocabulary.vocab_size

    @property
    def end_of_text(self) -> int | None:
        return GPT2_VOCAB - 1 if self._vocabulary is None else self._vocabulary.special.get(END_OF_TEXT)

    @cached_property
    def _encoding(self) -> Any:
        if self._vocabulary is None:
            return _published_encoding()
        return _tiktoken().Encoding(
            "gpt2",
            pat_str=PATTERN,
            mergeable_ranks=self._vocabulary.ranks,
            special_tokens=self._vocabulary.special,
        )

    def ready(self) -> None:
        assert self._encoding

    def encode(self, text: str | bytes) -> np.ndarray:
        if isinstance(text, bytes):
            try:
                text = text.decode()
            except UnicodeDecodeError as error:
                raise not_utf8("the text", error) from error
        # encode_ordinary: "<|endoftext|>" in a text is text, not the separator.
        return np.array(self._encoding.encode_ordinary(text), np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._encoding.decode(_checked_ids(ids, self.vocab_size), errors="replace"))


def not_utf8(name: str, error: UnicodeDecodeError, offset: int = 0) -> WeftError:
    """Return the error for bytes that are no UTF-8; ``offset`` counts the bytes read before them."""
    got = f"byte {error.object[error.start]:#04x} at place {offset + error.start}"
    hint = "--tokeniser bytes takes any file"
    return WeftError(f"{name} for the tokeniser gpt2", expected="UTF-8", got=got, hint=hint)


def _checked_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    integers = [int(i) for i in ids]
    outside = [i for i in integers if not 0 <= i < vocab_size]
    if outside:
        raise WeftError("a token id", expected=f"0 to {vocab_size - 1}", got=outside[0])
    return integers


# --- GPT-2's merges


@dataclass(frozen=True, kw_only=True)
class BpeVocabulary:
    """Token ids by their bytes, and those of the special tokens by their text."""

    ranks: dict[bytes, int]
    special: dict[str, int]

    @property
    def vocab_size(self) -> int:
        return max([*self.ranks.values(), *self.special.values()]) + 1


def read_bpe_files(folder: Path) -> BpeVocabulary:
    """Read ``encoder.json`` (token to id) and ``vocab.bpe`` (a version line, then a merge per line).

    Both are written in GPT-2's alphabet for bytes. tiktoken merges in the order of the ids, so the ids
    must increase in the order of the merges.

    Raises :class:`WeftError` if a file is missing or malformed, or the two disagree.
    """
    names = next((p for p in BPE_FILES if all((folder / n).is_file() for n in p)), None)
    if names is None:
        hint = "Hugging Face's names vocab.json and merges.txt will do too"
        raise WeftError("--bpe-files", expected=" and ".join(BPE_FILES[0]), got=folder, hint=hint)
    encoder, merges_file = (folder / name for name in names)
    byte_of = {letter: byte for byte, letter in byte_alphabet().items()}

    def to_bytes(token: str) -> bytes:
        return bytes(byte_of[letter] for letter in token)

    try:
        ids = read_json(encoder)
        lines = merges_file.read_text("utf-8").split("\n")
        special = {t: int(i) for t, i in ids.items() if t.startswith("<|") and t.endswith("|>")}
        # Special tokens are text, not bytes in GPT-2's alphabet.
        ranks = {to_bytes(t): int(i) for t, i in ids.items() if t not in special}
        merges = [to_bytes("".join(line.split())) for line in lines[1:] if line.strip()]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, OverflowError) as error:
        got = f"{type(error).__name__}: {error}"
        raise WeftError(f"{folder}: no byte-pair encoding of GPT-2's form", got=got) from error
    _check_consistent(folder, ranks, special, merges)
    return BpeVocabulary(ranks=ranks, special=special)


def _check_consistent(
    folder: Path, ranks: dict[bytes, int], special: dict[str, int], merges: list[bytes]
) -> None:
    tokens = {bytes([b]) for b in range(256)} | set(merges)
    # Files of two different models would decode to garbage without an error.
    if tokens != set(ranks):
        difference = min(tokens ^ set(ranks))
        got = f"{difference!r} in one of them alone"
        raise WeftError(f"{folder}", expected="256 bytes and the merges as tokens", got=got)
    # tiktoken merges the pair with the lowest id first, GPT-2 in the file's order: they must agree.
    order = [ranks[token] for token in merges]
    if order != sorted(set(order)):
        raise WeftError(f"{folder}", expected="ids that rise with the merges", got="others")
    ids = sorted([*ranks.values(), *special.values()])
    # Shards store ids in 16 bits.
    if ids != list(range(len(ids))) or len(ids) > 1 << 16:
        expected = "ids 0, 1, 2 and so on, at most 65536, each once"
        raise WeftError(f"{folder}", expected=expected, got=f"{len(ids)} from {ids[0]} to {ids[-1]}")


def byte_alphabet() -> dict[int, str]:
    """Return the letter that GPT-2's files write for each byte: the byte's own where Latin-1 prints
    it, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}


def _published_encoding() -> Any:
    """Return tiktoken's own ``gpt2``, cached or downloaded; tiktoken checks its hash.

    Raises :class:`WeftError` if tiktoken is not installed, or has no files and cannot download them.
    """
    tiktoken = _tiktoken()
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # requests raises OSErrors, a wrong hash a ValueError
        got = type(error).__name__
        raise WeftError("GPT-2's merges could not be had", got=got, hint=OFFLINE_HINT) from error


def _tiktoken() -> Any:
    try:
        import tiktoken
    except ImportError as error:
        hint = "pip install 'weft[gpt2]', or --tokeniser bytes"
        raise WeftError("the tokeniser gpt2 needs tiktoken", got=str(error), hint=hint) from error
    return tiktoken
