"""Tokenisers: text to ids and back. ``bytes`` has 256 ids and needs nothing; ``gpt2`` is the
byte-pair encoding of GPT-2 (Sennrich et al., arXiv:1508.07909), as tiktoken does it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from weft.core import WeftError

NAMES = ("bytes", "gpt2")
GPT2_IDS, END_OF_TEXT = 50257, "<|endoftext|>"


class Tokeniser(Protocol):
    """What a tokeniser is.

    Attributes:
        name: ``bytes`` or ``gpt2``.
        vocab_size: ids are under it.
        end_of_text: the id that stands before each document, or None where there is none.
    """

    name: str

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_text(self) -> int | None: ...

    def ready(self) -> None:
        """Raise :class:`WeftError` now if encoding or decoding would: before a run, not in it."""

    def encode(self, text: str | bytes) -> np.ndarray:
        """(n,) uint16. Text is UTF-8; raises :class:`WeftError` where bytes must be and are not."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text; what is no UTF-8 becomes U+FFFD. Raises :class:`WeftError` for an id outside."""


def tokeniser(name: str, bpe_files: Path | None = None) -> Tokeniser:
    """The tokeniser of that name, one of :data:`NAMES`.

    ``bpe_files`` is a folder with GPT-2's ``encoder.json`` and ``vocab.bpe`` (Hugging Face calls
    them ``vocab.json`` and ``merges.txt``), or with others of the same form; without it
    tiktoken fetches them at the first use. Nothing is fetched for ``vocab_size``.

    Raises :class:`WeftError` for another name, and for files that are not there or not so.
    """
    if name not in NAMES:
        raise WeftError("tokeniser", expected=" or ".join(NAMES), got=name)
    if name == "gpt2":
        return GPT2(bpe_files)
    if bpe_files is not None:
        raise WeftError("--bpe-files", expected="the tokeniser gpt2", got=name)
    return Bytes()


class Bytes:
    """A byte is a token."""

    name = "bytes"
    vocab_size = 256
    end_of_text = None

    def ready(self) -> None:
        """Always."""

    def encode(self, text: str | bytes) -> np.ndarray:
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(_inside(ids, self.vocab_size)).decode(errors="replace")


class GPT2:
    """GPT-2's byte-pair encoding; the merges are loaded at the first use."""

    name = "gpt2"

    def __init__(self, bpe_files: Path | None = None) -> None:
        from weft.gpt2 import bpe

        self._files = None if bpe_files is None else bpe.read(bpe_files)

    @property
    def vocab_size(self) -> int:
        return GPT2_IDS if self._files is None else self._files.vocab_size

    @property
    def end_of_text(self) -> int | None:
        return GPT2_IDS - 1 if self._files is None else self._files.special.get(END_OF_TEXT)

    @cached_property
    def _encoding(self) -> Any:
        from weft.gpt2 import bpe

        return bpe.published() if self._files is None else self._files.encoding()

    def ready(self) -> None:
        assert self._encoding

    def encode(self, text: str | bytes) -> np.ndarray:
        if isinstance(text, bytes):
            try:
                text = text.decode()
            except UnicodeDecodeError as error:
                raise not_utf8("the text", error) from error
        return np.array(self._encoding.encode_ordinary(text), np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._encoding.decode(_inside(ids, self.vocab_size), errors="replace"))


def not_utf8(what: str, error: UnicodeDecodeError, before: int = 0) -> WeftError:
    """``what`` is not text; ``before`` counts the bytes that had been read."""
    got = f"byte {error.object[error.start]:#04x} at place {before + error.start}"
    hint = "--tokeniser bytes takes any file"
    return WeftError(f"{what} for the tokeniser gpt2", expected="UTF-8", got=got, hint=hint)


def _inside(ids: Iterable[int], vocab_size: int) -> list[int]:
    found = [int(i) for i in ids]
    outside = [i for i in found if not 0 <= i < vocab_size]
    if outside:
        raise WeftError("a token id", expected=f"0 to {vocab_size - 1}", got=outside[0])
    return found
