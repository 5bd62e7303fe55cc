"""From what a user asks for to a run: preset and options to a plan, the plan to a trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from weft import machine
from weft.core import WeftError
from weft.core.operator import unknown_name
from weft.gpt2 import (
    checkpoint,
    config,
    curves,
    distributed,
    folder,
    profiling,
    settings,
    shares,
    weights,
)
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
SIZES = ("layers", "heads", "width")
MODEL = (*SIZES, "dropout", "ops")  # length and tokeniser decide the others
SOURCES = ("data", "tokeniser", "bpe_files", "start")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run left: its outcome, a sample of its text ("" where a signal ended it, or where the
    tokeniser has not its files here), its folder, picture and checkpoint; where its time went, as
    ``shares.to_json`` has it, if that was asked for; and whether this process is the one to say so.
    """

    outcome: Outcome
    sample: str
    folder: Path
    picture: Path | None
    checkpoint: Path
    profile: dict[str, Any] | None
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
    profile: int | None = None,
    group: Group | None = None,
) -> Trained:
    """Train by a preset and what is given beside it, or go on with the run that is in ``out``.

    Args:
        preset: a name of ``weft.gpt2.config``; with ``resume`` it only names the folder.
        given: values by name, of ``TrainConfig``, of ``ModelConfig`` (layers, heads, width,
            dropout, ops), and ``data``, ``tokeniser``, ``bpe_files`` and ``start``, a run, a
            checkpoint or a Hugging Face folder whose sizes and weights it begins with; what is
            missing is the preset's, or with ``resume`` the run's own.
        out: the run's folder, by default ``runs/PRESET``.
        device: cuda or cpu; a GPU if there is one.
        say: takes lines for the user.
        quiet: report nothing of the steps.
        profile: how many steps are put under the profiler, once the run goes at its pace.
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
            words = _recipe(preset, kind, _known(given))
        planned = _plan({**words, **_known(given)})
        if not ours.first:
            say, quiet = _nothing, True
        return _run(ours, planned, out, resume, say, quiet, profile)


def _nothing(line: str) -> None:
    """What processes after the first say."""


def _run(
    group: Group,
    planned: Planned,
    out: Path,
    resume: bool,
    say: Say,
    quiet: bool,
    profile: int | None,
) -> Trained:
    plan, tokens, reader = planned
    plan.train.micro(group.world)  # refused before anything is written
    profiling.check(profile, plan.train.steps)
    ranks = distributed.ranks(group, plan.train.strategy, plan.train.reshard)
    place = Folder(out, plan, resume=resume, say=say, writes=ranks.first)
    if resume and not checkpoint.steps(place.checkpoints):
        say(f"{out} has no checkpoint yet: the run begins anew")
    run = Run(plan, tokens, reader, place, ranks, quiet, _first(plan, place, say), profile)
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
        profile=shares.of(run, say) if ranks.first else None,
        first=ranks.first,
    )


def _known(given: Mapping[str, Any]) -> dict[str, Any]:
    known = {*settings.names(), *MODEL, *SOURCES}
    for name in given:
        if name not in known:
            raise unknown_name("setting", name, sorted(known))
    return dict(given)


def _recipe(preset: str, kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A preset as values by name, where they follow from what is given the right ones for it."""
    model, name = config.preset(preset), config.ALIASES.get(preset, preset)
    words: dict[str, Any] = {
        **{f.name: getattr(model, f.name) for f in fields(model)},
        **settings.RECIPES[name],
        "dtype": "bfloat16" if kind == "cuda" else "float32",
        "tokeniser": "bytes" if name == "tiny" else "gpt2",
        # torch's own operators are slow one by one
        "compile": kind == "cuda"
        and given.get("ops", model.ops) == "torch"
        and not given.get("dropout"),
        "vocab_size": None,
    }
    # As many places as are trained: those behind a sequence's end would stay random.
    words["block_size"] = given.get("length", words["length"])
    if "steps" in given:  # of a short run a preset's warm-up would be the most
        words["warmup"] = min(words["warmup"], given["steps"] // 10)
    if "start" in given:
        words |= _begun(given)
    return words


def _begun(given: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes and the tokeniser of the model that a run begins with."""
    if named := [settings.option(name) for name in SIZES if name in given]:
        raise WeftError(f"{named[0]} with --start", expected="the sizes of what it starts with")
    model, own, _ = weights.read(Path(given["start"]))
    sizes = {name: getattr(model, name) for name in (*SIZES, "block_size", "vocab_size")}
    length = given.get("length", model.block_size)
    if length > model.block_size:
        expected = f"at most {model.block_size}, the positions of {given['start']}"
        raise WeftError("--length", expected=expected, got=length)
    return {**sizes, "length": length, "tokeniser": own or "gpt2"}


def _first(plan: Plan, place: Folder, say: Say) -> dict[str, torch.Tensor] | None:
    """The weights that a run begins with, if it begins with some and not with a checkpoint."""
    if plan.start is None or checkpoint.steps(place.checkpoints):
        return None
    return weights.read(Path(plan.start), say)[2]


def _stored(out: Path) -> dict[str, Any]:
    """A run's own plan as values by name."""
    found = folder.read(out)
    return {**found["model"], **found["train"], **{name: found[name] for name in SOURCES}}


def _plan(words: dict[str, Any]) -> Planned:
    data, files, start = (words.get(name) for name in ("data", "bpe_files", "start"))
    train = TrainConfig(**{k: v for k, v in words.items() if k in settings.names()})
    reader = tokeniser(words["tokeniser"], None if files is None else Path(files))
    if shards_of(None if data is None else Path(data)) is None:
        reader.ready()
    tokens = open_tokens(
        None if data is None else Path(data), tokeniser=reader, window=train.length + 1
    )
    if train.compile and words["dropout"]:
        got, hint = f"--dropout {words['dropout']}", "--no-compile, or no dropout"
        # Inductor writes Philox's rounds into each kernel that needs them: nine minutes on a CPU
        # were not enough for one layer, which takes one without dropout.
        what = "--compile: torch.compile does not get through dropout's random numbers"
        raise WeftError(what, expected="no dropout", got=got, hint=hint)
    sizes = {f.name: words[f.name] for f in fields(ModelConfig)}
    model = ModelConfig(**{**sizes, "vocab_size": sizes["vocab_size"] or reader.vocab_size})
    if model.vocab_size < reader.vocab_size:
        expected = f"one of at most {model.vocab_size} ids, as the model has"
        raise WeftError("--tokeniser", expected=expected, got=reader.name)
    plan = Plan(
        model=model,
        train=train,
        tokeniser=reader.name,
        data=None if data is None else str(Path(data).resolve()),
        bpe_files=None if files is None else str(Path(files).resolve()),
        start=None if start is None else str(Path(start).resolve()),
        identity=dict(zip(("train", "validation"), (t.identity for t in tokens), strict=True)),
    )
    return plan, tokens, reader
