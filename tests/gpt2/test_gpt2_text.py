"""Tokenisers, sources of tokens, and their errors, with a small set of merges."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.gpt2_toys import bpe, weft
from weft.core import WeftError
from weft.gpt2.data import text
from weft.gpt2.data.text import encode, encode_file, library_source, open_tokens
from weft.gpt2.data.token_sequence import Segment, TokenSequence
from weft.gpt2.data.tokenisers import tokeniser

BYTES = tokeniser("bytes")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokeniser("gpt2", bpe(tmp_path_factory.mktemp("bpe")))


# --- tokenisers


def test_bytes_are_tokens() -> None:
    ids = BYTES.encode("né\n")
    assert (BYTES.name, BYTES.vocab_size, BYTES.end_of_text) == ("bytes", 256, None)
    assert ids.tolist() == [0x6E, 0xC3, 0xA9, 0x0A] and ids.dtype == np.uint16
    assert BYTES.encode(b"\xff\0").tolist() == [255, 0]
    assert BYTES.decode(ids) == "né\n" and BYTES.decode([0x6E, 0xC3]) == "n\ufffd"
    with pytest.raises(WeftError, match="a token id: expected 0 to 255, got 256"):
        BYTES.decode([1, 256])
    with pytest.raises(WeftError, match="tokeniser: expected bytes or gpt2, got words"):
        tokeniser("words")
    with pytest.raises(WeftError, match="--bpe-files: expected the tokeniser gpt2, got bytes"):
        tokeniser("bytes", Path())


def test_merges_go_in_their_order(small: Any, tmp_path: Path) -> None:
    assert (small.name, small.vocab_size, small.end_of_text) == ("gpt2", 271, 270)
    # Single bytes stand in GPT-2's order: "!" is 0, so "h" is 71, and the merges begin at 256.
    expected = [259, 264, 0]  # hello, " world", !
    assert small.encode("hello world!").tolist() == expected
    assert small.encode(b"hell or \n\n").tolist() == [258, 220, 261, 220, 266]
    assert small.encode("<|endoftext|>").tolist()[0] == small.encode("<").tolist()[0]
    assert small.decode([*expected, 270]) == "hello world!<|endoftext|>"
    assert small.decode(small.encode("né")[:2]) == "n\ufffd"
    renamed = tokeniser("gpt2", bpe(tmp_path, ("vocab.json", "merges.txt")))
    assert renamed.encode("hello world!").tolist() == expected
    with pytest.raises(WeftError, match="a token id: expected 0 to 270, got 271"):
        small.decode([271])


WORDS = st.lists(
    st.sampled_from(["hello", " world", "\n\n", "  ", "\u00a0", "\u3000", "é", "\x1c", "'s", "1234"])
    | st.characters(),
    max_size=40,
).map("".join)


@settings(max_examples=60)
@given(text=WORDS, piece=st.integers(1, 30))
def test_a_text_in_pieces_has_the_ids_of_the_whole(text: str, piece: int, small: Any) -> None:
    data = text.encode("utf-8", "replace")
    whole = small.encode(data).tolist()
    assert small.decode(whole) == data.decode()
    blocks = [data[i : i + piece] for i in range(0, len(data), piece)]
    cut = np.concatenate(list(encode("here", blocks, small))).tolist()
    assert cut == [270, *whole]
    assert [int(i) for ids in encode("here", blocks, BYTES) for i in ids] == list(data)


def test_a_long_text_is_encoded_in_many_pieces(small: Any) -> None:
    """Pieces are encoded before the end of the text, also if the text has no line ends."""
    for between in (b"\n", b" "):
        blocks = [b"hello" + between + b"world"] * 20
        assert len(list(encode("here", blocks, small))) == 22  # an end of text, and the last bit


@settings(max_examples=40)
@given(text=WORDS)
def test_pieces_do_not_change_the_ids(text: str, small: Any) -> None:
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = small._vocabulary.ranks
    peer = tiktoken.Encoding("peer", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})
    text = text.encode("utf-8", "replace").decode()
    assert small.encode(text).tolist() == peer.encode_ordinary(text)


def test_invalid_utf8_is_reported_with_its_offset(small: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    for before in range(7):
        path.write_bytes(b"a" * before + b"\xc3(" + b"b" * 9)
        with pytest.raises(WeftError, match=rf"x\.txt .*UTF-8, got byte 0xc3 at place {before};"):
            list(encode_file(path, small, piece=3))
    path.write_bytes(b"ab\xc3")  # cut off in a character
    with pytest.raises(WeftError, match="at place 2; hint: --tokeniser bytes takes any file"):
        open_tokens(path, tokeniser=small)
    with pytest.raises(WeftError, match="the text for the tokeniser gpt2: expected UTF-8"):
        small.encode(b"\xff")


def replace(path: Path, old: str, new: str) -> None:
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "vocab.bpe").unlink(), "expected encoder.json and vocab.bpe"),
        (lambda f: (f / "encoder.json").write_text("{"), "no byte-pair encoding.*JSONDecodeError"),
        (lambda f: (f / "encoder.json").write_text("[1]"), "no byte-pair encoding"),
        (lambda f: replace(f / "vocab.bpe", "l d\n", ""), "b'ld' in one of them alone"),
        (lambda f: replace(f / "vocab.bpe", "h e\nl l\n", "l l\nh e\n"), "rise with the merges"),
        (lambda f: replace(f / "encoder.json", ": 270", ": 300"), "ids 0, 1, 2 and so on"),
        (lambda f: replace(f / "encoder.json", '"!": 0, ', ""), "256 bytes and the merges"),
    ],
    ids=["missing", "json", "list", "merge", "order", "gap", "byte"],
)
def test_inconsistent_bpe_files_are_refused(damage: Any, message: str, tmp_path: Path) -> None:
    damage(bpe(tmp_path))
    with pytest.raises(WeftError, match=message):
        tokeniser("gpt2", tmp_path)


def test_gpt2_tokeniser_without_network_gives_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import requests
    import tiktoken

    def offline(url: str, **_: Any) -> None:
        raise requests.ConnectionError("Name or service not known")

    monkeypatch.setattr(requests, "get", offline)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    coder = tokeniser("gpt2")
    assert (coder.vocab_size, coder.end_of_text) == (50257, 50256)  # known without the merges
    for wants in (coder.ready, lambda: coder.encode("a"), lambda: coder.decode([0])):
        with pytest.raises(WeftError, match=r"TIKTOKEN_CACHE_DIR.*--bpe-files.*encoder.json"):
            wants()
    monkeypatch.setattr(requests, "get", lambda url, **_: type("A", (), answer(b"no merges"))())
    with pytest.raises(WeftError, match="merges could not be had: got ValueError"):
        coder.ready()
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(WeftError, match=r"needs tiktoken.*pip install 'weft\[gpt2\]'"):
        tokeniser("gpt2").ready()


def answer(content: bytes) -> dict[str, Any]:
    return {"content": content, "raise_for_status": lambda self: None}


# --- where the tokens come from


def test_standard_library_is_the_default_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, validation = open_tokens(None, tokeniser=BYTES, window=129)
    both = train[:].astype(np.uint8).tobytes() + validation[:].astype(np.uint8).tobytes()
    assert both == library_source() and len(both) > 1 << 20
    assert len(validation) == len(both) // 10
    assert both.count(b"\ndef ") > 1000 and validation[:].max() < 256
    again = open_tokens(None, tokeniser=BYTES, window=129)
    assert (again[0].identity, again[1].identity) == (train.identity, validation.identity)

    for name in ("b.py", "a.py", "sub/c.py", "test/x.py", "sub/tests/y.py", "site-packages/z.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    (tmp_path / "notes.txt").write_text("no source")
    monkeypatch.setattr(text.sysconfig, "get_path", lambda _: str(tmp_path))
    assert library_source() == b"a.py\nb.py\nsub/c.py\n"
    monkeypatch.setattr(text, "LIBRARY_BYTES", 11)
    assert library_source() == b"a.py\nb.py\n"
    monkeypatch.setattr(text.sysconfig, "get_path", lambda _: str(tmp_path / "none"))
    with pytest.raises(WeftError, match="standard library's source, got none; hint: --data"):
        library_source()


def test_validation_part(tmp_path: Path, small: Any) -> None:
    book = tmp_path / "book.txt"
    book.write_bytes(bytes(range(200)))
    train, validation = open_tokens(book, tokeniser=BYTES)
    assert [*train[:], *validation[:]] == list(range(200)) and len(validation) == 20
    assert validation.location(0) == f"{book}, token 180"
    assert [len(t) for t in open_tokens(book, tokeniser=BYTES, window=50)] == [150, 50]
    book.write_text("hello world" * 10)
    assert open_tokens(book, tokeniser=small)[0][:3].tolist() == [270, 259, 264]

    shards = tmp_path / "shards"
    assert weft("encode", book, "--output", shards, "--shard-tokens", 40) == 0
    first = open_tokens(shards, tokeniser=BYTES)
    assert [len(t) for t in first] == [99, 11]
    assert [len(t) for t in open_tokens(shards / "train_000001.bin", tokeniser=BYTES)] == [36, 4]
    assert weft("encode", book, "--output", shards, "--name", "interval") == 0
    assert [len(t) for t in open_tokens(shards, tokeniser=BYTES)] == [198, 22]
    assert weft("encode", book, "--output", shards, "--name", "x_val") == 0
    for path in (shards, shards / "*.bin"):
        train, validation = open_tokens(path, tokeniser=BYTES)
        assert (len(train), len(validation)) == (220, 110)
        assert validation.location(3) == f"{shards}/x_val_000000.bin, token 3"
    assert [len(t) for t in open_tokens(shards / "x_val*.bin", tokeniser=BYTES)] == [99, 11]


def test_identity_depends_on_tokens_not_on_the_folder(tmp_path: Path) -> None:
    def identity(folder: str, name: str, content: str) -> str:
        path = tmp_path / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        return open_tokens(path, tokeniser=BYTES)[0].identity

    first = identity("a", "x.txt", "hello" * 20)
    assert first == identity("b", "x.txt", "hello" * 20)
    assert first != identity("a", "y.txt", "hello" * 20)
    ids = np.arange(90, dtype=np.uint16)  # a training text; a change of any one token changes the identity
    sequences = {
        TokenSequence([Segment(name="x", label="x", ids=ids ^ (np.arange(90) == i))]) for i in range(91)
    }
    assert len({tokens.identity for tokens in sequences}) == 91


def test_unusable_texts_are_refused(tmp_path: Path, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, message: str, coder: Any = BYTES, window: int = 1) -> None:
        with pytest.raises(WeftError, match=message):
            open_tokens(path, tokeniser=coder, window=window)

    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_text("")
    short.write_text("x" * 17)
    for coder in (BYTES, small):
        refused(empty, r"empty\.txt is empty: expected a text", coder)
    refused(short, r"short\.txt: tokens: expected 9 or more to train with.*got 8.*--length", window=9)
    refused(short, "expected 18 or more to train", window=18)
    refused(tmp_path / "gone.txt", r"gone\.txt is not there.*hint: left out")
    refused(tmp_path, "folder of .bin shards, got none; hint: weft data encode")
    refused(tmp_path / "*.bin", "expected .bin shards, got none")
    refused(tmp_path / "*.txt", r"expected .bin shards, got .*empty\.txt")
    monkeypatch.setattr(text, "LARGEST_TEXT", 16)
    refused(short, r"short\.txt: expected at most .* MiB of text in memory.*weft data encode FILE")
