"""``weft generate``: text from a trained GPT-2, printed token by token as it is made."""

from __future__ import annotations

import json as jsonlib
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from weft.gpt2.model import GPT
    from weft.gpt2.tokens import Tokeniser

EPILOG = 'Example: weft generate runs/tiny --prompt "def " --tokens 200'

Name = Annotated[
    str | None,
    typer.Option(metavar="bytes|gpt2", help="By default the run's own; gpt2 for the others."),
]
Files = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="GPT-2's encoder.json and vocab.bpe, read from here."),
]


def generate(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A run's folder, one checkpoint, or a Hugging Face GPT-2."
        ),
    ],
    prompt: Annotated[
        str | None, typer.Option(help="The text to go on from; by default a new text begins.")
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="How many tokens.")] = 200,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Under 1 more sure, over 1 less; 0: the likeliest.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(metavar="K", help="Only the K likeliest tokens; by default all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws: the same seed, the same text.")] = 0,
    tokeniser: Name = None,
    bpe_files: Files = None,
    ops: Annotated[str, typer.Option(metavar="weft|torch|eager", help="Who computes.")] = "weft",
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; by default what is here.")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compute all tokens again for each; slower.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object, at the end.")] = False,
) -> None:
    """Sample text from a trained GPT-2, by temperature and top-k.

    Weights and arithmetic are float32. Keys and values of earlier tokens are kept; past the model's
    longest sequence the last tokens count, and each further one costs a whole forward.

    Text goes to stdout as it is made; what was loaded, and how fast it went, to stderr.
    """
    model, words = _open(checkpoint, ops, device, tokeniser, bpe_files)
    given = _ids(words, prompt)
    options = {"temperature": temperature, "top_k": top_k, "seed": seed, "cache": not no_cache}
    made, seconds = _made(model, words, given, tokens, options, echo=not json)
    if json:
        found: dict[str, Any] = {"prompt": prompt or "", "text": words.decode(made)}
        found |= {"prompt_tokens": given.shape[1], "tokens": made, "seconds": seconds, **options}
        typer.echo(jsonlib.dumps(found))
        return
    rate = f", {len(made) / seconds:.0f} a second" if made else ""
    typer.echo(f"{len(made)} tokens in {seconds:.1f} s{rate}", err=True)


def _made(
    model: GPT, words: Tokeniser, given: Any, count: int, options: dict[str, Any], *, echo: bool
) -> tuple[list[int], float]:
    """The new tokens, shown as they come, and the seconds that they took."""
    from weft.gpt2.sampling import stream

    made: list[int] = []
    shown = Shown(words, echo=echo)
    start = time.perf_counter()
    for token in stream(model, given, count, **options):
        made.append(int(token))
        shown.add(made)
    seconds = time.perf_counter() - start
    shown.end(made)
    return made, seconds


def _open(
    path: Path, ops: str, device: str | None, name: str | None, bpe_files: Path | None
) -> tuple[GPT, Tokeniser]:
    """The model in float32, and the tokeniser that it was trained with."""
    import torch

    from weft import machine
    from weft.core import WeftError
    from weft.gpt2 import tokens, weights

    where = machine.known_kind(device)
    config, own, tensors = weights.read(path, lambda line: typer.echo(line, err=True))
    config = replace(config, ops=ops)
    if bpe_files is None and own is None and (path / "merges.txt").is_file():
        bpe_files = path  # a Hugging Face folder may hold its tokeniser's files too
    words = tokens.tokeniser(name or own or "gpt2", bpe_files)
    if words.vocab_size > config.vocab_size:
        most = f"at most {config.vocab_size} tokens, as {path} has"
        raise WeftError(f"the tokeniser {words.name}", expected=most, got=words.vocab_size)
    words.ready()
    model = weights.build(config, tensors, device=where, dtype=torch.float32)
    millions = config.parameters / 1e6
    typer.echo(f"{path}: {millions:.3g} M parameters, {words.name}, on {where}", err=True)
    return model.eval(), words


def _ids(words: Tokeniser, prompt: str | None) -> Any:
    """(1, T) int64. No prompt: what stands before each text, or a line's end where nothing does."""
    import torch

    if prompt:
        return torch.tensor([[int(i) for i in words.encode(prompt)]])
    first = words.end_of_text
    return torch.tensor([[int(words.encode("\n")[0]) if first is None else first]])


class Shown:
    """Prints what of the text is settled: a character's first bytes alone are not yet one."""

    def __init__(self, words: Tokeniser, *, echo: bool) -> None:
        self.words, self.echo, self.printed = words, echo, 0

    def add(self, made: list[int]) -> None:
        if self.echo:
            self._print(self.words.decode(made).rstrip("\ufffd"))

    def end(self, made: list[int]) -> None:
        if self.echo:
            self._print(self.words.decode(made) + "\n")

    def _print(self, text: str) -> None:
        typer.echo(text[self.printed :], nl=False)
        self.printed = max(self.printed, len(text))
