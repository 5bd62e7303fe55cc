"""``weft train``: train a GPT-2 on Weft's own operators, from a text to a checkpoint and a sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import ending, output
from weft.cli.options import Device, Json

if TYPE_CHECKING:
    from weft.gpt2.train.training import TrainResult

EPILOG = """Examples:
  weft train
  weft train --preset 124M --data shards/ --out runs/first
  weft train --preset 124M --out runs/first --resume

All options, and errors with their recovery: weft help training"""
# Parameters of the command that are no settings of the run.
NOT_SETTINGS = ("preset", "out", "resume", "device", "as_json", "settings", "profile")


def _option(text: str, *names: str, metavar: str) -> Any:
    return typer.Option(*names, help=text, show_default=False, metavar=metavar)


def _count(text: str) -> Any:
    return _option(text, metavar="N")


def _number(text: str) -> Any:
    return _option(text, metavar="X")


Ops = Annotated[
    str | None,
    _option("Operators to use: weft, torch or eager [default: weft]", metavar="weft|torch|eager"),
]
Compile = Annotated[
    bool | None,
    typer.Option(help="Use torch.compile [default: with --ops torch on a GPU]", show_default=False),
]
Strategy = Annotated[
    str | None,
    _option(
        "Parallelism over GPUs; --set reshard=true reduces fsdp's memory [default: ddp]", metavar="ddp|fsdp"
    ),
]
Settings = Annotated[
    list[str] | None,
    _option("Any other setting, or OPERATOR=IMPLEMENTATION (repeatable)", "--set", metavar="NAME=VALUE"),
]


def train(
    preset: Annotated[
        str, typer.Option(metavar="NAME", help="Model preset: tiny, 124M, 350M, 774M or 1.5B")
    ] = "tiny",
    data: Annotated[
        Path | None,
        _option("Text, .bin shard or folder of shards [default: Python's own library]", metavar="PATH"),
    ] = None,
    out: Annotated[
        Path | None, _option("Run folder [default: runs/PRESET]", "--out", "-o", metavar="FOLDER")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out")] = False,
    steps: Annotated[int | None, _count("Number of optimizer steps")] = None,
    batch: Annotated[int | None, _count("Sequences per step, over all micro-batches")] = None,
    length: Annotated[int | None, _count("Tokens per sequence")] = None,
    accumulate: Annotated[int | None, _count("Micro-batches per step, for gradient accumulation")] = None,
    lr: Annotated[float | None, _number("Peak learning rate")] = None,
    warmup: Annotated[int | None, _count("Steps of learning rate warm-up")] = None,
    seed: Annotated[
        int | None, _count("Random seed for weights, data order and sampling [default: 0]")
    ] = None,
    layers: Annotated[int | None, _count("Transformer blocks")] = None,
    heads: Annotated[int | None, _count("Attention heads")] = None,
    width: Annotated[int | None, _count("Embedding dimension (residual stream)")] = None,
    start: Annotated[
        Path | None, _option("Trained model to start from, with its sizes and weights", metavar="PATH")
    ] = None,
    dropout: Annotated[float | None, _number("Dropout probability [default: 0]")] = None,
    ops: Ops = None,
    compile: Compile = None,
    sparse: Annotated[
        str | None, _option("2:4 sparse weights: those of the MLPs [default: none]", metavar="mlp")
    ] = None,
    sparse_refresh: Annotated[
        int | None, _count("Steps between choices of the sparse weights' places [default: never]")
    ] = None,
    dtype: Annotated[
        str | None, _option("Data type [default: by the device]", metavar="bfloat16|float32")
    ] = None,
    device: Device = None,
    tokeniser: Annotated[str | None, _option("Tokeniser", metavar="bytes|gpt2")] = None,
    bpe_files: Annotated[
        Path | None, _option("Folder with GPT-2's encoder.json and vocab.bpe", metavar="FOLDER")
    ] = None,
    validate_every: Annotated[int | None, _count("Steps between validations")] = None,
    sample_every: Annotated[int | None, _count("Steps between samples")] = None,
    checkpoint_every: Annotated[int | None, _count("Steps between checkpoints")] = None,
    keep: Annotated[int | None, _count("Number of newest checkpoints to keep [default: 2]")] = None,
    strategy: Strategy = None,
    settings: Settings = None,
    profile: Annotated[
        int | None,
        _count("Number of steps to profile: time by operator, its share and its roofline limit"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a GPT-2. Without arguments: a tiny one on Python's own library, in two minutes.

    An option without a default takes the preset's value.

    Exit 0: training finished; 2: invalid arguments, or training cannot continue; 130, 143: stopped
    by a signal, after a checkpoint.
    """
    options = {k: v for k, v in locals().items() if k not in NOT_SETTINGS and v is not None}
    from weft.gpt2 import launch

    result = launch.train(
        preset,
        {**options, **_parse_settings(settings)},
        out=out,
        resume=resume,
        device=device,
        log=output.log,
        profile=profile,
    )
    if result.is_main:
        _print(result, as_json)
    if result.outcome.signal is not None:
        raise typer.Exit(128 + result.outcome.signal)


def _parse_settings(pairs: list[str] | None) -> dict[str, Any]:
    """Parse NAME=VALUE pairs. A value that is valid JSON is read as such (null is None)."""
    from weft.core import WeftError, json_files

    settings = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals:
            raise WeftError("--set", expected="NAME=VALUE", got=pair)
        try:
            settings[name.replace("-", "_")] = json_files.loads(value)
        except ValueError:
            settings[name.replace("-", "_")] = value
    return settings


def _print(result: TrainResult, as_json: bool) -> None:
    """Print the sample or the JSON, and the profile; log the losses and the next command."""
    from weft.gpt2.report import step_profile
    from weft.gpt2.report.run_record import matplotlib_hint, to_json
    from weft.gpt2.train.progress import format_duration

    outcome = result.outcome
    if as_json:
        print(json.dumps(to_json(result)))
    else:
        output.show_text(result.sample)
    if result.profile is not None:
        profile = "\n".join(step_profile.text_lines(result.profile))
        if as_json:
            output.log(profile)
        else:
            print(profile)
    loss = "-" if outcome.loss is None else f"{outcome.loss:.4f}"
    validation = "" if outcome.validation is None else f", validation {outcome.validation:.4f}"
    speed = f", {outcome.tokens_a_second:,.0f} tokens/s" if outcome.tokens_a_second else ""
    mfu = f", MFU {100 * outcome.mfu:.1f} %" if outcome.mfu else ""
    step = f"step {outcome.step}/{outcome.steps}"
    output.log(f"{step}: loss {loss}{validation}{speed}{mfu}, {format_duration(outcome.seconds)}")
    if outcome.skipped:
        output.log(f"{outcome.skipped} steps were skipped: see metrics.jsonl")
    output.log(f"checkpoint: {result.checkpoint}")
    if result.picture:
        output.log(f"curve: {result.picture}")
    elif matplotlib_hint():
        output.log(matplotlib_hint())
    if outcome.signal is not None:
        output.log(f"stopped; resume with: weft train --resume --out {result.directory}")
        verdict = f"stopped after {outcome.step} of {outcome.steps} steps"
    else:
        output.log(f"generate more text with: weft generate {result.directory}")
        verdict = f"trained: {outcome.step} of {outcome.steps} steps"
    line = f"{verdict}, loss {loss}{validation} ({ending.elapsed_text(outcome.seconds)})"
    ending.print_verdict(line, to_stderr=as_json)
