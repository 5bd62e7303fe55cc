"""Start a training run: a preset and settings become a plan, the plan a trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from weft import machine
from weft.core import WeftError
from weft.core.operator import unknown_name
from weft.gpt2.data.text import open_tokens, shards_of
from weft.gpt2.data.token_sequence import TokenSequence
from weft.gpt2.data.tokenisers import Tokeniser, tokeniser
from weft.gpt2.distributed.process_group import ProcessGroup, joined
from weft.gpt2.distributed.strategy import DataParallel, SingleProcess
from weft.gpt2.model import config, weights
from weft.gpt2.model.config import ModelConfig
from weft.gpt2.report import run_record, step_profile
from weft.gpt2.train import train_config
from weft.gpt2.train.checkpoint_files import list_checkpoints
from weft.gpt2.train.profiler import check_profile_steps
from weft.gpt2.train.run_directory import RunDirectory, RunPlan, read_plan, require_new
from weft.gpt2.train.train_config import TrainConfig
from weft.gpt2.train.training import Trainer, TrainResult

PlanAndData = tuple[RunPlan, tuple[TokenSequence, TokenSequence], Tokeniser]
SIZES = ("layers", "heads", "width")
MODEL_SETTINGS = (*SIZES, "dropout", "ops")  # length and tokeniser determine the other sizes
# Operators whose implementation a setting of their name switches; "dropout" is the probability.
SWITCHES = tuple(name for name in config.OPERATORS if name not in MODEL_SETTINGS)
DATA_SETTINGS = ("data", "tokeniser", "bpe_files", "start")


def train(
    preset: str,
    settings: Mapping[str, Any],
    *,
    out: Path | str | None = None,
    resume: bool = False,
    device: str | None = None,
    log: Callable[[str], None] = print,
    quiet: bool = False,
    profile: int | None = None,
    group: ProcessGroup | None = None,
) -> TrainResult:
    """Train a preset with other settings, or resume the run in ``out``.

    Args:
        preset: a name of ``weft.gpt2.model.config``; with ``resume`` only a default for ``out``.
        settings: values by name: of ``TrainConfig``, of ``ModelConfig`` (layers, heads, width, dropout,
            ops), an operator's name with one of its implementations (SWITCHES), and ``data``,
            ``tokeniser``, ``bpe_files`` and ``start``: a run, a checkpoint or a Hugging Face folder whose
            sizes and weights the run starts with. Default: the preset's, or with ``resume`` the run's own.
        out: the run's directory; default: ``runs/PRESET``.
        device: cuda or cpu; default: a GPU if there is one.
        log: receives lines for the user.
        quiet: do not report steps.
        profile: number of steps to profile, after some steps without the profiler.
        group: the processes that take part, if they have joined already (``process_group.joined``).

    Raises:
        WeftError: the settings are invalid, or training cannot continue; finished checkpoints are
            intact.
    """
    kind = machine.known_kind(device)
    out = Path(out or Path("runs", config.ALIASES.get(preset, preset)))
    with joined(kind) if group is None else nullcontext(group) as processes:
        _check_names(settings)
        if resume:
            stored = read_plan(out)
            defaults = {**stored["model"], **stored["train"], **{n: stored[n] for n in DATA_SETTINGS}}
        else:
            if processes.is_main:  # it creates the directory soon after
                require_new(out)
            defaults = _preset_settings(preset, kind, settings)
        plan, tokens, text_tokeniser = _plan(with_switches({**defaults, **settings}))
        if not processes.is_main:
            log, quiet = (lambda line: None), True
        # Everything that can be refused is checked before the directory is created.
        plan.train.micro_batch_size(processes.world)  # refused before anything is written
        if plan.train.sparse and processes.world > 1:
            raise WeftError("--sparse", expected="one process", got=f"{processes.world} processes")
        check_profile_steps(profile, plan.train.steps)
        _require_memory(plan, kind, processes.world)
        strategy = choose_strategy(processes, plan.train.strategy, plan.train.reshard)
        directory = RunDirectory(out, plan, resume=resume, log=log, writes=strategy.is_main)
        begins = not list_checkpoints(directory.checkpoints)
        if resume and begins:
            log(f"{out} has no checkpoint yet: the run starts from the beginning")
        start = weights.read(Path(plan.start), log)[2] if plan.start is not None and begins else None
        trainer = Trainer(plan, tokens, text_tokeniser, directory, strategy, quiet, start, profile)
        if trainer.done >= plan.train.steps:
            log(f"all {plan.train.steps} steps are done already")
        outcome = trainer.run()
        title = f"{out.name}: GPT-2 of {outcome.parameters / 1e6:.1f} M parameters"
        plots = strategy.is_main and plan.train.picture
        return TrainResult(
            outcome=outcome,
            sample="" if outcome.signal else trainer.sample(),
            directory=out,
            picture=run_record.plot_losses(out, title) if plots else None,
            checkpoint=list_checkpoints(directory.checkpoints)[0],
            profile=step_profile.of_run(trainer, log) if strategy.is_main else None,
            is_main=strategy.is_main,
        )


def _require_memory(plan: RunPlan, kind: str, world: int) -> None:
    """Raise :class:`WeftError` for a model that certainly does not fit, before it fills the memory.

    Counted is a lower bound: the weights in float32 once among all processes, and one activation.
    """
    here = machine.query(kind).memory_bytes
    tokens = plan.train.micro_batch_size(world) * plan.train.length
    needed = 4 * plan.model.parameters / world + 2 * tokens * plan.model.width
    if here is not None and needed > here:
        raise WeftError(
            "the model and a micro-batch",
            expected=f"at most {here / 2**30:.3g} GiB, the memory here",
            got=f"{needed / 2**30:.3g} GiB at least ({plan.model.parameters:.3g} parameters)",
            hint="fewer --layers or a smaller --width; a smaller --batch or a larger --accumulate",
        )


def choose_strategy(group: ProcessGroup, strategy: str, reshard: bool | None = None) -> SingleProcess:
    """Return the strategy of a group: ``ddp`` or ``fsdp`` for several processes."""
    if group.world == 1:
        return SingleProcess(group.device)
    if strategy == "ddp":
        return DataParallel(group)
    # Imported here because FSDP2 is slow to import and rarely used.
    from weft.gpt2.distributed.fsdp import FullySharded

    return FullySharded(group, reshard)


def _check_names(settings: Mapping[str, Any]) -> None:
    known = {*train_config.field_names(), *MODEL_SETTINGS, *SWITCHES, *DATA_SETTINGS}
    for name in settings:
        if name not in known:
            raise unknown_name("setting", name, sorted(known))


def with_switches(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which the implementations of single operators are part of ``ops``.

    The others are as the value of ``ops`` says; ``ModelConfig`` checks the names.
    """
    switches = {name: values[name] for name in SWITCHES if name in values}
    others = {name: value for name, value in values.items() if name not in SWITCHES}
    ops = others.get("ops", "weft")
    if not switches:
        return others
    if isinstance(ops, str):
        named = ModelConfig(ops=ops).implementations()[True]
        ops = {} if ops == "weft" else {name: impl for name, impl in named.items() if impl}
    return {**others, "ops": {**ops, **switches}}


def _preset_settings(preset: str, kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset's values by name, adapted to the settings that the user chose."""
    model, name = config.preset(preset), config.ALIASES.get(preset, preset)
    ops = settings.get("ops", model.ops)
    values: dict[str, Any] = {
        **{f.name: getattr(model, f.name) for f in fields(model)},
        **train_config.RECIPES[name],
        "dtype": "bfloat16" if kind == "cuda" else "float32",
        "tokeniser": "bytes" if name == "tiny" else "gpt2",
        # torch's own operators are slow without fusion.
        "compile": kind == "cuda" and ops == "torch" and not settings.get("dropout"),
        "vocab_size": None,
    }
    if "accumulate" in values and "batch" in settings:  # a setting of accumulate itself comes later
        values["accumulate"] = _micro_batches(settings["batch"], values["batch"] // values["accumulate"])
    # Positions beyond the sequence would never be trained.
    values["block_size"] = settings.get("length", values["length"])
    if "steps" in settings:  # a preset's warm-up would be most of a short run
        values["warmup"] = min(values["warmup"], settings["steps"] // 10)
    if "start" in settings:
        values |= _start_settings(settings)
    return values


def _micro_batches(batch: Any, most: int) -> int:
    """Return the fewest micro-batches of equal size, at most ``most`` sequences each.

    The preset's own number of micro-batches would cut a smaller batch into micro-batches too small to fill
    a GPU: with 8, a batch of 64 lost 15 % of the tokens/s (docs/log.md, 2026-11-26). An invalid ``batch``
    gives 1; ``TrainConfig`` refuses it.
    """
    if not isinstance(batch, int) or batch < 1:
        return 1
    return next(a for a in range(-(-batch // most), batch + 1) if batch % a == 0)


def _start_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes and the tokeniser of the model that a run starts with."""
    if sizes := [train_config.option_name(name) for name in SIZES if name in settings]:
        raise WeftError(f"{sizes[0]} with --start", expected="the sizes of what it starts with")
    model, own_tokeniser, _ = weights.read(Path(settings["start"]))
    values = {name: getattr(model, name) for name in (*SIZES, "block_size", "vocab_size")}
    length = settings.get("length", model.block_size)
    if length > model.block_size:
        expected = f"at most {model.block_size}, the positions of {settings['start']}"
        raise WeftError("--length", expected=expected, got=length)
    return {**values, "length": length, "tokeniser": own_tokeniser or "gpt2"}


def _plan(values: dict[str, Any]) -> PlanAndData:
    data, bpe_files, start = (
        None if values.get(name) is None else Path(values[name]) for name in ("data", "bpe_files", "start")
    )
    train = TrainConfig(**{k: v for k, v in values.items() if k in train_config.field_names()})
    text_tokeniser = tokeniser(values["tokeniser"], bpe_files)
    # Shards need a tokeniser for samples only, so its files may be missing.
    if shards_of(data) is None:  # a text, which must be encoded now
        text_tokeniser.ready()
    tokens = open_tokens(data, tokeniser=text_tokeniser, window=train.length + 1)
    if train.compile and values["dropout"]:
        # Inductor inlines Philox's rounds into each kernel that needs them: on a CPU nine minutes were
        # not enough for one layer, which compiles in one without dropout.
        summary = "--compile: torch.compile does not get through dropout's random numbers"
        got, hint = f"--dropout {values['dropout']}", "--no-compile, or no dropout"
        raise WeftError(summary, expected="no dropout", got=got, hint=hint)
    # A new model has the tokeniser's vocabulary; one that starts from another keeps that one's.
    sizes = {f.name: values[f.name] for f in fields(ModelConfig)}
    model = ModelConfig(**{**sizes, "vocab_size": sizes["vocab_size"] or text_tokeniser.vocab_size})
    if model.vocab_size < text_tokeniser.vocab_size:
        expected = f"one of at most {model.vocab_size} ids, as the model has"
        raise WeftError("--tokeniser", expected=expected, got=text_tokeniser.name)
    plan = RunPlan(
        model=model,
        train=train,
        tokeniser=text_tokeniser.name,
        data=None if data is None else str(data.resolve()),
        bpe_files=None if bpe_files is None else str(bpe_files.resolve()),
        start=None if start is None else str(start.resolve()),
        identity=dict(zip(("train", "validation"), (t.identity for t in tokens), strict=True)),
    )
    return plan, tokens, text_tokeniser
