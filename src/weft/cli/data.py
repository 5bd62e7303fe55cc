"""``weft data``: fetch a text, encode texts to shards of tokens, look into shards."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from weft.gpt2.tokens import Tokeniser

EPILOG = "The formats, and what weft train makes of them: docs/data.md"
HEAD = 32
# Which options each verb takes, beside --json.
VERBS = {
    "shakespeare": {"--output", "--tokeniser", "--bpe-files", "--force"},
    "encode": {"--output", "--tokeniser", "--bpe-files", "--force", "--name", "--shard-tokens"},
    "show": {"--tokeniser", "--bpe-files"},
}


def data(
    verb: Annotated[str, typer.Argument(metavar="VERB", help="shakespeare, encode or show.")],
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="Texts, or shards to show.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to; by default data.")
    ] = None,
    tokeniser: Annotated[
        str | None, typer.Option(metavar="bytes|gpt2", help="By default bytes.")
    ] = None,
    bpe_files: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="GPT-2's encoder.json and vocab.bpe, read from here."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="encode: shards are NAME_000000.bin and so on; by default train."),
    ] = None,
    shard_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="encode: tokens of a shard; default 100000000.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over shards of that name.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fetch a text to train on, encode texts to shards of tokens, or look into shards.

    shakespeare: fetch tinyshakespeare, and check its hash; with --tokeniser encode it too.

    encode FILE...: write texts as shards in llm.c's format; those named val are for validation.

    show SHARD...: size and first tokens; with --tokeniser their text, and that every id is its.

    Exit 0: done; 1: show found an id that is not the tokeniser's; 2: the call was wrong.

    Example: weft data encode book.txt --tokeniser gpt2 --output shards
    """
    options = {"--output": output, "--tokeniser": tokeniser, "--bpe-files": bpe_files}
    _validate(verb, files, {**options, "--name": name, "--shard-tokens": shard_tokens}, force)
    folder, coder = output or Path("data"), _tokeniser(verb, tokeniser, bpe_files)
    if verb == "show":
        said = [_shown(f, coder) for f in files or []]
    elif verb == "encode":
        most = {} if shard_tokens is None else {"shard_tokens": shard_tokens}
        said = _encode(files or [], folder, name or "train", coder, force=force, **most)
    else:
        said = _shakespeare(folder, coder, force)
    if as_json:
        print(json.dumps(said))
    else:
        _print(said)
    if any(found.get("outside") for found in said):
        raise typer.Exit(1)


def _validate(verb: str, files: list[Path] | None, options: dict[str, Any], force: bool) -> None:
    """What the verb does not take is refused, and not left unsaid."""
    from weft.core import WeftError

    if verb not in VERBS:
        raise WeftError("weft data", expected=", ".join(VERBS), got=verb)
    given = [o for o, value in options.items() if value is not None] + ["--force"] * force
    for option in given:
        if option not in VERBS[verb]:
            expected = " or ".join(sorted(VERBS[verb]))
            raise WeftError(f"weft data {verb}: options", expected=expected, got=option)
    if bool(files) != (verb != "shakespeare"):
        expected = "no file" if files else "a file"
        raise WeftError(f"weft data {verb}", expected=expected, got=files[0] if files else "none")


def _tokeniser(verb: str, name: str | None, bpe_files: Path | None) -> Tokeniser | None:
    """None where nothing is encoded or decoded."""
    from weft.gpt2.tokens import tokeniser

    if name is None and bpe_files is None and verb != "encode":
        return None
    return tokeniser(name or ("bytes" if bpe_files is None else "gpt2"), bpe_files)


def _shakespeare(folder: Path, coder: Tokeniser | None, force: bool) -> list[dict[str, Any]]:
    from weft.gpt2.fetch import SHAKESPEARE, fetch

    if coder is not None:
        coder.ready()
    path, fetched = fetch(SHAKESPEARE, folder)
    _say(f"{'fetched' if fetched else 'there already'}: {path}")
    said: list[dict[str, Any]] = [{"path": str(path), "bytes": path.stat().st_size}]
    if coder is not None:
        said += _encode([path], folder, path.stem, coder, force=force)
    return said


def _encode(
    files: list[Path], folder: Path, name: str, coder: Tokeniser | None, **options: Any
) -> list[dict[str, Any]]:
    from weft.core import WeftError
    from weft.gpt2.shards import write_shards

    assert coder is not None
    coder.ready()
    if not name or Path(name).name != name or name.startswith("."):
        raise WeftError("--name", expected="the beginning of a file's name", got=name or "nothing")
    for path in files:
        if not path.is_file():
            raise WeftError(f"{path}", expected="a text file", got="none")
        if not path.stat().st_size:
            raise WeftError(f"{path} is empty", expected="a text")
    written = write_shards(folder, name, _ids(files, coder), **options)
    return [_shown(path, None) for path in written]


def _ids(files: list[Path], coder: Tokeniser) -> Iterator[Any]:
    """Their tokens one after another; a line to stderr now and then says how far."""
    import time

    from weft.gpt2.text import encode_file

    count, told = 0, time.monotonic()
    for number, path in enumerate(files, 1):
        for ids in encode_file(path, coder):
            yield ids
            count += len(ids)
            if time.monotonic() - told > 5:
                told = time.monotonic()
                _say(f"{count:,} tokens; file {number} of {len(files)}, {path}")


def _shown(path: Path, coder: Tokeniser | None) -> dict[str, Any]:
    """What a shard is; with a tokeniser its first text, and the first id that is not one of it."""
    from weft.gpt2.shards import first_outside, open_shard

    ids = open_shard(path)
    head = ids[:HEAD].tolist()
    size = path.stat().st_size
    said: dict[str, Any] = {"path": str(path), "bytes": size, "tokens": len(ids), "head": head}
    if coder is not None:
        place = first_outside(ids, coder.vocab_size)
        said["tokeniser"], said["vocab_size"] = coder.name, coder.vocab_size
        said["outside"] = None if place is None else {"place": place, "id": int(ids[place])}
        if max(head) < coder.vocab_size:
            said["text"] = coder.decode(head)
    return said


def _print(said: list[dict[str, Any]]) -> None:
    for found in said:
        if "tokens" not in found:
            print(found["path"])
            continue
        print(f"{found['path']}: {found['tokens']:,} tokens, {found['bytes']:,} bytes")
        print(f"  begins {' '.join(map(str, found['head']))}")
        if "text" in found:
            print(f"  that is {found['text']!r}")
        if outside := found.get("outside"):
            among = f"under {found['vocab_size']}, as {found['tokeniser']}'s are"
            print(f"  token {outside['place']}: expected an id {among}, got {outside['id']}")
        elif "outside" in found:
            print(f"  every id is one of {found['tokeniser']}'s {found['vocab_size']}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
