"""``weft generate``: sample text from a trained GPT-2 and print it token by token."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import output
from weft.cli.options import MAX_SEED, Device, Json

if TYPE_CHECKING:
    from weft.gpt2.data.tokenisers import Tokeniser
    from weft.gpt2.model.model import GPT

EPILOG = """Examples:
  weft generate runs/tiny
  weft generate runs/tiny --prompt "def " --tokens 200
  weft generate runs/tiny --batch-invariant --prefill-chunk 64

Training, checkpoints and samples: weft help training"""


def generate(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="Run folder, checkpoint, or Hugging Face GPT-2 folder"),
    ],
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Text to continue [default: start a new text]")
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="Number of tokens to generate")] = 200,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Sampling temperature; 0 picks the most likely token")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(metavar="K", help="Sample from the K most likely tokens [default: all]")
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=MAX_SEED, help="Random seed of the sampling")
    ] = 0,
    tokeniser: Annotated[
        str | None,
        typer.Option(metavar="bytes|gpt2", help="Tokeniser [default: the run's own, or gpt2]"),
    ] = None,
    bpe_files: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder with GPT-2's encoder.json and vocab.bpe"),
    ] = None,
    ops: Annotated[str, typer.Option(metavar="weft|torch|eager", help="Operators to use")] = "weft",
    device: Device = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Recompute all earlier tokens for each new one (slower)")
    ] = False,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Process the prompt in pieces of N tokens, to save memory [default: at once]"
        ),
    ] = None,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="Compute logits bit for bit as one forward in training does (slower; bfloat16 on a GPU)",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Sample text from a trained GPT-2, by temperature and top-k.

    Weights and arithmetic are float32, or with --batch-invariant on a GPU bfloat16. Keys and values
    of earlier tokens are cached. Beyond the model's maximum length only the last tokens count, and each
    further one costs a whole forward.

    The text goes to stdout as it is generated; the model and the speed go to stderr.
    """
    _require_utf8(prompt or "")
    model, coder = _load(checkpoint, ops, device, tokeniser, bpe_files, halves_on_gpu=batch_invariant)
    prompt_ids = _prompt_ids(coder, prompt)
    options = {"temperature": temperature, "top_k": top_k, "seed": seed, "cache": not no_cache}
    options |= {"prefill_chunk": prefill_chunk, "batch_invariant": batch_invariant}
    ids, seconds = _generate(model, coder, prompt_ids, tokens, options, echo=not as_json)
    if as_json:
        report: dict[str, Any] = {"prompt": prompt or "", "text": coder.decode(ids)}
        report |= {"prompt_tokens": prompt_ids.shape[1], "tokens": ids, "seconds": seconds, **options}
        print(json.dumps(report))
        return
    rate = f", {len(ids) / seconds:.0f} tokens/s" if ids else ""
    output.log(f"{len(ids)} tokens in {seconds:.1f} s{rate}")


def _require_utf8(prompt: str) -> None:
    """Raise :class:`WeftError` for bytes of an argument that were no UTF-8, before a model is loaded."""
    from weft.core import WeftError

    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        got = f"other bytes at character {error.start + 1}"
        raise WeftError("--prompt", expected="text in UTF-8", got=got) from error


def _generate(
    model: GPT, coder: Tokeniser, prompt_ids: Any, count: int, options: dict[str, Any], *, echo: bool
) -> tuple[list[int], float]:
    """Generate tokens, printing them with ``echo``; return them and the seconds that it took."""
    from weft.gpt2.model.sampling import stream

    ids: list[int] = []
    printer = StreamPrinter(coder, echo=echo)
    start = time.perf_counter()
    for token in stream(model, prompt_ids, count, **options):
        ids.append(int(token))
        printer.update(ids)
    seconds = time.perf_counter() - start
    printer.end(ids)
    return ids, seconds


def _load(
    path: Path,
    ops: str,
    device: str | None,
    name: str | None,
    bpe_files: Path | None,
    *,
    halves_on_gpu: bool,
) -> tuple[GPT, Tokeniser]:
    """Load the model in float32, or ``halves_on_gpu`` in bfloat16, and the tokeniser of its training."""
    import torch

    from weft import machine
    from weft.core import WeftError
    from weft.gpt2.data import tokenisers
    from weft.gpt2.model import weights

    kind = machine.known_kind(device)
    config, own_tokeniser, tensors = weights.read(path, output.log)
    config = replace(config, ops=ops)
    if bpe_files is None and own_tokeniser is None and (path / "merges.txt").is_file():
        bpe_files = path  # a Hugging Face folder may contain its tokeniser's files too
    coder = tokenisers.tokeniser(name or own_tokeniser or "gpt2", bpe_files)
    if coder.vocab_size > config.vocab_size:
        most = f"at most {config.vocab_size} tokens, as {path} has"
        raise WeftError(f"the tokeniser {coder.name}", expected=most, got=coder.vocab_size)
    coder.ready()
    # Batch-invariant products on a GPU multiply half types.
    dtype = torch.bfloat16 if halves_on_gpu and kind == "cuda" else torch.float32
    model = weights.build(config, tensors, device=kind, dtype=dtype)
    output.log(f"{path}: {config.parameters / 1e6:.3g} M parameters, {coder.name}, on {kind}")
    return model.eval(), coder


def _prompt_ids(coder: Tokeniser, prompt: str | None) -> Any:
    """Return the prompt's tokens, (1, T) int64.

    Without a prompt: the token that separates texts, or a newline if the tokeniser has none.
    """
    import torch

    if prompt:
        return torch.tensor([[int(i) for i in coder.encode(prompt)]])
    first = coder.end_of_text
    return torch.tensor([[int(coder.encode("\n")[0]) if first is None else first]])


class StreamPrinter:
    """Prints a growing text without its last character while that is incomplete in UTF-8."""

    def __init__(self, coder: Tokeniser, *, echo: bool) -> None:
        self.coder, self.echo, self.n_printed = coder, echo, 0

    def update(self, ids: list[int]) -> None:
        if self.echo:
            # The decoder marks a character whose last bytes are missing by U+FFFD.
            self._print(self.coder.decode(ids).rstrip("\ufffd"))

    def end(self, ids: list[int]) -> None:
        if self.echo:
            self._print(self.coder.decode(ids) + "\n")

    def _print(self, text: str) -> None:
        output.show_text(text[self.n_printed :], end="")
        # The text can get shorter for a while, when an incomplete character at its end is cut off.
        self.n_printed = max(self.n_printed, len(text))
