"""GPT-2's merges for tiktoken: the published ones, or those of a local folder, checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core import WeftError

# How GPT-2 cuts text into pieces before it merges; part of the encoding, as are the merges.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
OFFLINE = (
    "with a network it is fetched once; without one, set TIKTOKEN_CACHE_DIR to tiktoken's cache "
    "from a machine that has it, or give --bpe-files a folder with encoder.json and vocab.bpe; "
    "--tokeniser bytes needs neither"
)


@dataclass(frozen=True, kw_only=True)
class Files:
    """What two files say: the ids of the tokens, each a string of bytes, and the special ones'."""

    ranks: dict[bytes, int]
    special: dict[str, int]

    @property
    def vocab_size(self) -> int:
        return max([*self.ranks.values(), *self.special.values()]) + 1

    def encoding(self) -> Any:
        """tiktoken's encoding of them; raises :class:`WeftError` where it is not installed."""
        return _tiktoken().Encoding(
            "gpt2", pat_str=PATTERN, mergeable_ranks=self.ranks, special_tokens=self.special
        )


def published() -> Any:
    """tiktoken's own ``gpt2``: from its cache, or fetched, its hash checked either way.

    Raises :class:`WeftError` where tiktoken is not installed, or has not the files and cannot
    fetch them.
    """
    tiktoken = _tiktoken()
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a wrong hash is neither
        got = type(error).__name__
        raise WeftError("GPT-2's merges could not be had", got=got, hint=OFFLINE) from error


def _tiktoken() -> Any:
    try:
        import tiktoken
    except ImportError as error:
        hint = "pip install 'weft[gpt2]', or --tokeniser bytes"
        raise WeftError("the tokeniser gpt2 needs tiktoken", got=str(error), hint=hint) from error
    return tiktoken


def read(folder: Path) -> Files:
    """``encoder.json`` (token to id) and ``vocab.bpe`` (merges, a line each, under a line of
    version), in the alphabet in which GPT-2 writes bytes.

    tiktoken merges by id, so the ids must rise in the order of the merges.

    Raises :class:`WeftError` where a file is missing or not so, or the two disagree.
    """
    pair = next((p for p in PAIRS if all((folder / n).is_file() for n in p)), None)
    if pair is None:
        hint = "Hugging Face's names vocab.json and merges.txt will do too"
        raise WeftError("--bpe-files", expected=" and ".join(PAIRS[0]), got=folder, hint=hint)
    encoder, merges = (folder / name for name in pair)
    letters = {letter: byte for byte, letter in alphabet().items()}
    try:
        ids = json.loads(encoder.read_text("utf-8"))
        lines = merges.read_text("utf-8").split("\n")
        special = {t: int(i) for t, i in ids.items() if t.startswith("<|") and t.endswith("|>")}
        ranks = {_bytes(t, letters): int(i) for t, i in ids.items() if t not in special}
        wanted = [_bytes("".join(line.split()), letters) for line in lines[1:] if line.strip()]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise WeftError(f"{folder}: no byte-pair encoding of GPT-2's form", got=got) from error
    _agree(folder, ranks, special, wanted)
    return Files(ranks=ranks, special=special)


def _bytes(token: str, letters: dict[str, int]) -> bytes:
    return bytes(letters[letter] for letter in token)


def _agree(
    folder: Path, ranks: dict[bytes, int], special: dict[str, int], merges: list[bytes]
) -> None:
    whole = {bytes([b]) for b in range(256)} | set(merges)
    if whole != set(ranks):
        odd = min(whole ^ set(ranks))
        got = f"{odd!r} in one of them alone"
        raise WeftError(f"{folder}", expected="256 bytes and the merges as tokens", got=got)
    order = [ranks[token] for token in merges]
    if order != sorted(set(order)):
        raise WeftError(f"{folder}", expected="ids that rise with the merges", got="others")
    ids = sorted([*ranks.values(), *special.values()])
    if ids != list(range(len(ids))) or len(ids) > 1 << 16:
        expected = "ids 0, 1, 2 and so on, at most 65536, each once"
        raise WeftError(
            f"{folder}", expected=expected, got=f"{len(ids)} from {ids[0]} to {ids[-1]}"
        )


def alphabet() -> dict[int, str]:
    """The letter that GPT-2's files write a byte as: itself where Latin-1 prints it, else the next
    one from U+0100 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [b for b in range(256) if b not in shown]
    return {b: chr(b) for b in shown} | {b: chr(0x100 + i) for i, b in enumerate(hidden)}
