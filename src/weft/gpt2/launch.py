"""From what a user asks for to a run: preset and options to a plan, the plan to a trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from weft import machine
from weft.core.operator import unknown_name
from weft.gpt2 import checkpoint, config, curves, distributed, folder, settings
from weft.gpt2.config import ModelConfig
from weft.gpt2.folder import Folder, Plan
from weft.gpt2.group import Group, joined
from weft.gpt2.sequence import Tokens
from weft.gpt2.settings import TrainConfig
from weft.gpt2.text import open_tokens, shards_of
from weft.gpt2.tokens import Tokeniser, tokeniser
from weft.gpt2.training import Outcome, Run

Say = Callable[[str], None]
Planned = tuple[Plan, tuple[Tokens, Tokens], Tokeniser]
MODEL = ("layers", "heads", "width", "dropout", "ops")  # length and tokeniser decide the others
SOURCES = ("data", "tokeniser", "bpe_files")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run left: its outcome, a sample of its text ("" where a signal ended it, or where the
    tokeniser has not its files here), its folder, picture and checkpoint; and whether this process
    is the one to say so."""

    outcome: Outcome
    sample: str
    folder: Path
    picture: Path | None
    checkpoint: Path
    first: bool


def train(
    preset: str,
    given: Mapping[str, Any],
    *,
    out: Path | str | None = None,
    resume: bool = False,
    device: str | None = None,
    say: Say = print,
    quiet: bool = False,
    group: Group | None = None,
) -> Trained:
    """Train by a preset and what is given beside it, or go on with the run that is in ``out``.

    Args:
        preset: a name of ``weft.gpt2.config``; with ``resume`` it only names the folder.
        given: values by name, of ``TrainConfig``, of ``ModelConfig`` (layers, heads, width,
            dropout, ops), and ``data``, ``tokeniser`` and ``bpe_files``; what is missing is the
            preset's, or with ``resume`` the run's own.
        out: the run's folder, by default ``runs/PRESET``.
        device: cuda or cpu; a GPU if there is one.
        say: takes lines for the user.
        quiet: report nothing of the steps.
        group: the processes that take part, where they have joined already (``group.joined``);
            else they join for this run.

    Raises:
        WeftError: the call cannot be answered as it was made, or training cannot go on; what was
            kept before stands.
    """
    kind = machine.known_kind(device)
    out = Path(out or Path("runs", config.ALIASES.get(preset, preset)))
    with joined(kind) if group is None else nullcontext(group) as ours:
        if resume:
            words = _stored(out)
        else:
            if ours.first:  # who makes it in a moment
                folder.refuse_taken(out)
            words = _recipe(preset, kind)
        given = _known(given)
        if "steps" in given and not resume:  # of a short run a preset's warm-up would be the most
            words["warmup"] = min(words["warmup"], given["steps"] // 10)
        planned = _plan({**words, **given})
        if not ours.first:
            say, quiet = _nothing, True
        return _run(ours, planned, out, resume, say, quiet)


def _nothing(line: str) -> None:
    """What processes after the first say."""


def _run(group: Group, planned: Planned, out: Path, resume: bool, say: Say, quiet: bool) -> Trained:
    plan, tokens, reader = planned
    ranks = distributed.ranks(group, plan.train.strategy)
    place = Folder(out, plan, resume=resume, say=say, writes=ranks.first)
    if resume and not checkpoint.steps(place.checkpoints):
        say(f"{out} has no checkpoint yet: the run begins anew")
    run = Run(plan, tokens, reader, place, ranks, quiet)
    if run.done >= plan.train.steps:
        say(f"all {plan.train.steps} steps are done already")
    outcome = run.go()
    drawn = plan.train.picture
    title = f"{out.name}: GPT-2 of {outcome.parameters / 1e6:.1f} M parameters"
    return Trained(
        outcome=outcome,
        sample="" if outcome.signal else run.sample(),
        folder=out,
        picture=curves.picture(out, title) if ranks.first and drawn else None,
        checkpoint=checkpoint.steps(place.checkpoints)[0],
        first=ranks.first,
    )


def _known(given: Mapping[str, Any]) -> dict[str, Any]:
    known = {*settings.names(), *MODEL, *SOURCES}
    for name in given:
        if name not in known:
            raise unknown_name("setting", name, sorted(known))
    return dict(given)


def _recipe(preset: str, kind: str) -> dict[str, Any]:
    """A preset as values by name."""
    model = config.preset(preset)
    name = config.ALIASES.get(preset, preset)
    gpu = kind == "cuda"
    return {
        **{f.name: getattr(model, f.name) for f in fields(model)},
        **settings.RECIPES[name],
        "dtype": "bfloat16" if gpu else "float32",
        "tokeniser": "bytes" if name == "tiny" else "gpt2",
        "compile": None,
        "gpu": gpu,
    }


def _stored(out: Path) -> dict[str, Any]:
    """A run's own plan as values by name."""
    found = folder.read(out)
    return {**found["model"], **found["train"], **{name: found[name] for name in SOURCES}}


def _plan(words: dict[str, Any]) -> Planned:
    data, files = words.get("data"), words.get("bpe_files")
    if words.get("compile") is None:  # torch's own operators are slow one by one
        words["compile"] = bool(words.get("gpu")) and words["ops"] == "torch"
    train = TrainConfig(**{k: v for k, v in words.items() if k in settings.names()})
    reader = tokeniser(words["tokeniser"], None if files is None else Path(files))
    if shards_of(None if data is None else Path(data)) is None:
        reader.ready()
    tokens = open_tokens(
        None if data is None else Path(data), tokeniser=reader, window=train.length + 1
    )
    # As many places as are trained: those behind a sequence's end would stay random.
    sizes = {name: words[name] for name in MODEL}
    model = ModelConfig(vocab_size=reader.vocab_size, block_size=train.length, **sizes)
    plan = Plan(
        model=model,
        train=train,
        tokeniser=reader.name,
        data=None if data is None else str(Path(data).resolve()),
        bpe_files=None if files is None else str(Path(files).resolve()),
        identity=dict(zip(("train", "validation"), (t.identity for t in tokens), strict=True)),
    )
    return plan, tokens, reader
