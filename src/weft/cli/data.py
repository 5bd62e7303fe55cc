"""``weft data``: download a text, encode texts as token shards, show shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import ending, output
from weft.cli.options import Json

if TYPE_CHECKING:
    from weft.gpt2.data.tokenisers import Tokeniser

EPILOG = """Examples:
  weft data shakespeare
  weft data encode book.txt --tokeniser gpt2 --output shards
  weft data show shards/train_000000.bin

Formats, and their use by weft train: weft help data"""
HEAD = 32  # tokens that show prints
LOG_SECONDS = 5  # between two progress lines of encode
VERDICTS = {"shakespeare": "ready", "encode": "encoded", "show": "good"}
# Options of each verb, besides --json.
VERBS = {
    "shakespeare": {"--output", "--tokeniser", "--bpe-files", "--force"},
    "encode": {"--output", "--tokeniser", "--bpe-files", "--force", "--name", "--shard-tokens"},
    "show": {"--tokeniser", "--bpe-files"},
}


def data(
    verb: Annotated[str, typer.Argument(metavar="VERB", help="shakespeare, encode or show")],
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="Texts to encode, or shards to show")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--output", metavar="FOLDER", help="Output folder [default: data]")
    ] = None,
    tokeniser: Annotated[
        str | None, typer.Option(metavar="bytes|gpt2", help="Tokeniser [default: bytes]")
    ] = None,
    bpe_files: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder with GPT-2's encoder.json and vocab.bpe"),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="encode: prefix of the shards, as in NAME_000000.bin [default: train]",
        ),
    ] = None,
    shard_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="encode: tokens per shard [default: 100000000]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing shards of that name")] = False,
    as_json: Json = False,
) -> None:
    """Download a text to train on, encode texts as token shards, or show shards.

    shakespeare: download tinyshakespeare and verify its hash; with --tokeniser, also encode it.

    encode FILE...: write texts as shards in llm.c's format; shards named val are for validation.

    show SHARD...: print size and first tokens; with --tokeniser, decode them and validate every ID.

    Exit 0: done; 1: show found an invalid ID; 2: invalid arguments.
    """
    options = {"--output": folder, "--tokeniser": tokeniser, "--bpe-files": bpe_files}
    _validate(verb, files, {**options, "--name": name, "--shard-tokens": shard_tokens}, force)
    watch = ending.Stopwatch()
    directory, coder = folder or Path("data"), _tokeniser(verb, tokeniser, bpe_files)
    if verb == "show":
        entries = [_describe(f, coder) for f in files or []]
    elif verb == "encode":
        sizes = {} if shard_tokens is None else {"shard_tokens": shard_tokens}
        entries = _encode(files or [], directory, name or "train", coder, force=force, **sizes)
    else:
        entries = _shakespeare(directory, coder, force)
    if as_json:
        print(json.dumps(entries))
    else:
        _print(entries)
        # A path alone on stdout is there to be used: $(weft data shakespeare).
        only_paths = all("tokens" not in entry for entry in entries)
        ending.print_verdict(_verdict_line(verb, entries, watch), to_stderr=only_paths)
    if any(entry.get("outside") for entry in entries):
        raise typer.Exit(1)


def _verdict_line(verb: str, entries: list[dict[str, Any]], watch: ending.Stopwatch) -> str:
    """Return the last line: what was done with how many files and tokens."""
    invalid = sum(bool(entry.get("outside")) for entry in entries)
    verdict = f"failed: {invalid} with an invalid ID" if invalid else VERDICTS[verb]
    tokens = [entry["tokens"] for entry in entries if "tokens" in entry]
    counts = [ending.count_text(len(entries), "file"), *([f"{sum(tokens):,} tokens"] if tokens else [])]
    return f"{verdict}: {', '.join(counts)} ({watch})"


def _validate(verb: str, files: list[Path] | None, options: dict[str, Any], force: bool) -> None:
    """Raise :class:`WeftError` for an option or a file that the verb would ignore, or lacks."""
    from weft.core import WeftError

    if verb not in VERBS:
        raise WeftError("weft data", expected=", ".join(VERBS), got=verb)
    present = [o for o, value in options.items() if value is not None] + ["--force"] * force
    for option in present:
        if option not in VERBS[verb]:
            expected = " or ".join(sorted(VERBS[verb]))
            raise WeftError(f"weft data {verb}: options", expected=expected, got=option)
    if bool(files) != (verb != "shakespeare"):
        expected = "no file" if files else "a file"
        raise WeftError(f"weft data {verb}", expected=expected, got=files[0] if files else "none")


def _tokeniser(verb: str, name: str | None, bpe_files: Path | None) -> Tokeniser | None:
    """Return the tokeniser, or None if nothing is encoded or decoded."""
    from weft.gpt2.data.tokenisers import tokeniser

    if name is None and bpe_files is None and verb != "encode":
        return None
    return tokeniser(name or ("bytes" if bpe_files is None else "gpt2"), bpe_files)


def _shakespeare(directory: Path, coder: Tokeniser | None, force: bool) -> list[dict[str, Any]]:
    from weft.gpt2.data.fetch import SHAKESPEARE, fetch

    if coder is not None:
        coder.ready()
    path, fetched = fetch(SHAKESPEARE, directory)
    output.log(f"{'downloaded' if fetched else 'there already'}: {path}")
    entries: list[dict[str, Any]] = [{"path": str(path), "bytes": path.stat().st_size}]
    if coder is not None:
        entries += _encode([path], directory, path.stem, coder, force=force)
    return entries


def _encode(
    files: list[Path], directory: Path, name: str, coder: Tokeniser | None, **options: Any
) -> list[dict[str, Any]]:
    from weft.core import WeftError
    from weft.gpt2.data.shards import write_shards

    assert coder is not None
    coder.ready()
    if not name or Path(name).name != name or name.startswith("."):
        raise WeftError("--name", expected="the prefix of a file's name", got=name or "nothing")
    for path in files:
        if not path.is_file():
            raise WeftError(f"{path}", expected="a text file", got="none")
        if not path.stat().st_size:
            raise WeftError(f"{path} is empty", expected="a text")
    return [_describe(path, None) for path in write_shards(directory, name, _ids(files, coder), **options)]


def _ids(files: list[Path], coder: Tokeniser) -> Iterator[Any]:
    """Yield the files' tokens in their order; log the progress every few seconds."""
    import time

    from weft.gpt2.data.text import encode_file

    count, last_log = 0, time.monotonic()
    for number, path in enumerate(files, 1):
        for ids in encode_file(path, coder):
            yield ids
            count += len(ids)
            if time.monotonic() - last_log > LOG_SECONDS:
                last_log = time.monotonic()
                output.log(f"{count:,} tokens; file {number} of {len(files)}, {path}")


def _describe(path: Path, coder: Tokeniser | None) -> dict[str, Any]:
    """Describe a shard; with a tokeniser also its first text and its first invalid ID."""
    from weft.gpt2.data.shards import first_outside, open_shard

    ids = open_shard(path)
    head = ids[:HEAD].tolist()
    size = path.stat().st_size
    entry: dict[str, Any] = {"path": str(path), "bytes": size, "tokens": len(ids), "head": head}
    if coder is not None:
        index = first_outside(ids, coder.vocab_size)
        entry["tokeniser"], entry["vocab_size"] = coder.name, coder.vocab_size
        entry["outside"] = None if index is None else {"place": index, "id": int(ids[index])}
        if max(head) < coder.vocab_size:
            entry["text"] = coder.decode(head)
    return entry


def _print(entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        if "tokens" not in entry:
            print(entry["path"])
            continue
        print(f"{entry['path']}: {entry['tokens']:,} tokens, {entry['bytes']:,} bytes")
        print(f"  first tokens: {' '.join(map(str, entry['head']))}")
        if "text" in entry:
            print(f"  decoded: {entry['text']!r}")
        if outside := entry.get("outside"):
            bound = f"under {entry['vocab_size']}, the vocabulary of {entry['tokeniser']}"
            print(f"  token {outside['place']}: expected an ID {bound}, got {outside['id']}")
        elif "outside" in entry:
            print(f"  all IDs are valid for {entry['tokeniser']} ({entry['vocab_size']} tokens)")
