"""``weft train``: a GPT-2 on Weft's own operators, from a text to a checkpoint and a sample."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from weft.gpt2.launch import Trained

EPILOG = "Every option, and what happens when something goes wrong: docs/train.md"
ASIDE = ("preset", "out", "resume", "device", "as_json", "settings", "profile")


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, show_default=False, **more)


Count = int | None
Number = float | None


Data = Annotated[
    Path | None, _option("A text, a .bin shard or a folder of them; else Python's library.")
]
Out = Annotated[Path | None, _option("The run's folder; runs/PRESET.", "--out", "-o")]
Compile = Annotated[bool | None, _option("Through torch.compile; with --ops torch on a GPU.")]
Settings = Annotated[
    list[str] | None, _option("Any other setting: NAME=VALUE (repeatable).", "--set")
]


def train(
    preset: Annotated[str, typer.Option(help="tiny, 124M, 350M, 774M or 1.5B.")] = "tiny",
    data: Data = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    steps: Annotated[Count, _option("Updates of the weights.")] = None,
    batch: Annotated[Count, _option("Sequences a step, all parts together.")] = None,
    length: Annotated[Count, _option("Tokens a sequence.")] = None,
    accumulate: Annotated[Count, _option("Parts of a batch, one after another.")] = None,
    lr: Annotated[Number, _option("The highest learning rate.")] = None,
    warmup: Annotated[Count, _option("Steps until it is reached.")] = None,
    seed: Annotated[Count, _option("Of weights, order and samples; 0.")] = None,
    layers: Annotated[Count, _option("Blocks of the model.")] = None,
    heads: Annotated[Count, _option("Heads of its attention.")] = None,
    width: Annotated[Count, _option("Of its residual stream.")] = None,
    start: Annotated[Path | None, _option("A trained model to begin with.")] = None,
    dropout: Annotated[Number, _option("The share left out in training; 0.")] = None,
    ops: Annotated[str | None, _option("Whose operators: weft, torch or eager; weft.")] = None,
    compile: Compile = None,
    dtype: Annotated[str | None, _option("bfloat16 or float32; by the device.")] = None,
    device: Annotated[str | None, _option("cuda or cpu; a GPU if there is one.")] = None,
    tokeniser: Annotated[str | None, _option("bytes or gpt2; by the preset.")] = None,
    bpe_files: Annotated[Path | None, _option("A folder with GPT-2's merges.")] = None,
    validate_every: Annotated[Count, _option("Steps between validations.")] = None,
    sample_every: Annotated[Count, _option("Steps between samples.")] = None,
    checkpoint_every: Annotated[Count, _option("Steps between checkpoints.")] = None,
    keep: Annotated[Count, _option("Checkpoints that are kept, the newest; 2.")] = None,
    strategy: Annotated[
        str | None, _option("Several GPUs by ddp or fsdp (--set reshard=true frees memory); ddp.")
    ] = None,
    settings: Settings = None,
    profile: Annotated[
        Count, _option("Steps whose time is told by operator, with its share and floor.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Train a GPT-2; with nothing named a tiny one, on Python's own library, in two minutes.

    Exit 0: trained to the end; 2: the call was wrong, or training cannot go on; 130, 143: stopped
    by a signal after a checkpoint.

    Example: weft train --preset 124M --data shards/ --out runs/first
    """
    given = {k: v for k, v in locals().items() if k not in ASIDE and v is not None}
    from weft.gpt2 import launch

    found = launch.train(
        preset,
        {**given, **_settings(settings)},
        out=out,
        resume=resume,
        device=device,
        say=_say,
        profile=profile,
    )
    if found.first:
        _print(found, as_json)
    if found.outcome.signal is not None:
        raise typer.Exit(128 + found.outcome.signal)


def _settings(given: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE pairs, values as JSON where they are that: null is none."""
    from weft.core import WeftError

    found = {}
    for pair in given or ():
        name, equals, value = pair.partition("=")
        if not equals:
            raise WeftError("--set", expected="NAME=VALUE", got=pair)
        try:
            found[name.replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            found[name.replace("-", "_")] = value
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print(found: Trained, as_json: bool) -> None:
    from weft.gpt2 import shares
    from weft.gpt2.curves import missing
    from weft.gpt2.figures import record
    from weft.gpt2.progress import clock

    done = found.outcome
    if as_json:
        print(json.dumps(record(found)))
    else:
        print(found.sample)
    if found.profile is not None:
        told = "\n".join(shares.lines(found.profile))
        if as_json:
            _say(told)
        else:
            print(told)
    loss = "-" if done.loss is None else f"{done.loss:.4f}"
    held = "" if done.validation is None else f", validation {done.validation:.4f}"
    speed = f", {done.tokens_a_second:,.0f} tokens/s" if done.tokens_a_second else ""
    mfu = f", MFU {100 * done.mfu:.1f} %" if done.mfu else ""
    _say(f"step {done.step}/{done.steps}: loss {loss}{held}{speed}{mfu}, {clock(done.seconds)}")
    if done.skipped:
        _say(f"{done.skipped} steps were skipped: see metrics.jsonl")
    _say(f"checkpoint: {found.checkpoint}")
    if found.picture:
        _say(f"curve: {found.picture}")
    elif missing():
        _say(missing())
    if done.signal is not None:
        _say(f"stopped; go on with: weft train --resume --out {found.folder}")
    else:
        _say(f"more text: weft generate {found.folder}")
