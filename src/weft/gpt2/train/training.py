"""``Trainer``: the training loop, and the validations, samples and checkpoints between its steps.

    for step in range(done, steps):
        forward and backward of the micro-batches      launched, not waited for
        write metrics and progress of the last step    while the device works
        read loss and norms                            the only wait of a step
        guard                                          NaN or an outlier: the weights stay unchanged
        one AdamW update of all parameters             with fused clipping

Between the wait and the next step's first kernels the device idles, so only the decision and the
launches happen there. The inputs of AdamW, the next batch and all output are prepared while the device
is busy. If something is due after a step, its metrics are written at once.

A step's batch and its dropout are functions of (seed, step), so a resumed run computes what it would
have computed without the interruption.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.core import WeftError
from weft.gpt2.data.batches import Batches, Prefetch
from weft.gpt2.data.token_sequence import TokenSequence
from weft.gpt2.data.tokenisers import Tokeniser
from weft.gpt2.distributed.strategy import SingleProcess, StepNumbers
from weft.gpt2.model.model import GPT
from weft.gpt2.model.sampling import sample_text
from weft.gpt2.train import checkpoint
from weft.gpt2.train.checkpoint_files import OPTIMIZER
from weft.gpt2.train.durable_io import WriteError
from weft.gpt2.train.guards import StepGuard, StopSignals, out_of_memory_advice
from weft.gpt2.train.metrics import Metrics, tensorboard_hint
from weft.gpt2.train.micro_batch import MicroBatch
from weft.gpt2.train.optimizer import Optimizer
from weft.gpt2.train.profiler import StepProfiler, check_profile_steps
from weft.gpt2.train.progress import Progress, peak_flops
from weft.gpt2.train.run_directory import RunDirectory, RunPlan
from weft.gpt2.train.sparse_mlp import SparseMlp
from weft.gpt2.train.train_config import cosine_schedule
from weft.machine.nvtx import active_backend, annotate

RECENT_STEPS = 100  # the outcome's speed is the median of their times
SIGTERM = 15  # reported where another process was asked to stop


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """State of a run at its end; ``signal`` is the signal that stopped it, or None.

    ``loss`` is the mean of the last ten steps, ``validation`` the last one, in nats per token; None if
    there is none. ``seconds`` is the time of this process.
    """

    step: int
    steps: int
    loss: float | None
    validation: float | None
    skipped: int
    tokens_a_second: float | None
    mfu: float | None
    memory_bytes: int | None
    seconds: float
    parameters: int
    signal: int | None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Result of a run.

    Attributes:
        outcome: the run's state at its end.
        sample: generated text; "" after a signal, or without the tokeniser's files.
        directory, picture, checkpoint: paths of the run, of the plot of its losses, of the newest
            checkpoint.
        profile: where the time of a step goes, as ``step_profile.to_json`` returns it, or None.
        is_main: True in the process that reports the result.
    """

    outcome: Outcome
    sample: str
    directory: Path
    picture: Path | None
    checkpoint: Path
    profile: dict[str, Any] | None
    is_main: bool


class Trainer:
    """A run: model, optimizer, data and guards, from its plan and its newest checkpoint.

    Args:
        plan: model, settings and data.
        tokens: the training and the validation tokens.
        tokeniser: decodes samples.
        directory: the run's directory, opened for this plan.
        strategy: the processes that take part.
        quiet: report only problems.
        start: initial weights by name, used if there is no checkpoint; default: random ones.
        profile_steps: number of steps to profile, or None.
    """

    def __init__(
        self,
        plan: RunPlan,
        tokens: tuple[TokenSequence, TokenSequence],
        tokeniser: Tokeniser,
        directory: RunDirectory,
        strategy: SingleProcess,
        quiet: bool = False,
        start: Mapping[str, torch.Tensor] | None = None,
        profile_steps: int | None = None,
    ) -> None:
        config = plan.train
        config.micro_batch_size(strategy.world)
        active_backend()  # a wrong WEFT_NVTX is refused before the model is built
        self.plan, self.config, self.directory, self.strategy = plan, config, directory, strategy
        self.tokeniser, self.quiet = tokeniser, quiet
        self.train_batches, self.validation_batches = (
            Batches(t, config.batch, config.length, config.seed, plan.model.vocab_size) for t in tokens
        )
        # Nothing here draws from the global generators, but a checkpoint holds their states, which would be
        # other ones in each process: those of two equal runs must be equal. Restored in a resumed run.
        torch.manual_seed(config.seed)
        # The model starts in float32 on the device: the optimizer's masters are copied from it before
        # ``prepare_model`` rounds or shards it.
        self.model = GPT(plan.model, seed=config.seed, device=strategy.device)
        if start is not None:
            self.model.load_state_dict(start)
        self.module, masters = strategy.prepare_model(self.model, getattr(torch, config.dtype))
        self.optimizer = Optimizer(
            self.model.named_parameters(),
            masters=masters,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            local_part=strategy.local_part,
        )
        self.sparse = None
        if config.sparse:
            self.sparse = SparseMlp(self.model, self.optimizer, config.sparse_refresh)
        self.forward: Any = torch.compile(self.module) if config.compile else self.module
        # A replayed graph's kernels have no operator names, so a profiled run launches them one by one.
        # torch.compile manages graphs of its own.
        can_capture = not config.compile and profile_steps is None and strategy.can_capture_graph
        self.micro_batch = MicroBatch(
            self.forward,
            list(self.model.parameters()),
            config.accumulate,
            use_graph=config.graph and can_capture,
        )
        self.guard = StepGuard(config.outlier_z, config.outlier_window, config.patience)
        self.done = self.updates = self.skipped = 0
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.seconds_are_warmup = True  # until a step has been timed that compiled and captured nothing
        self.step_began = time.perf_counter()
        self.validation: float | None = None
        self.weights_consistent = True  # False during an update
        # A step is reported one step late, while the device computes the next one.
        self._unwritten: Callable[[], None] | None = None  # writes the metrics of the last step
        saved = strategy.load_newest(directory.checkpoints, directory.log) if directory.resumed else None
        if saved is not None:
            self._restore(saved)
        if self.sparse is not None and strategy.is_main:
            for line in self.sparse.summary():
                directory.log(line)
        # -1: also a new run that fails in its first step has something to save.
        self.saved_step = self.done if saved else -1
        self.saved_at = time.monotonic()
        # A resumed run has fewer steps left than the plan, which launch.py has checked already.
        check_profile_steps(profile_steps, config.steps - self.done)
        self.profiler = StepProfiler(steps=profile_steps, device=strategy.device)

    def _restore(self, saved: checkpoint.Checkpoint) -> None:
        self.directory.check_same_plan(saved.state["plan"])
        if self.sparse is not None:
            self.sparse.restore(saved.tensors)
        self.strategy.restore(self.optimizer, saved)
        self.guard.load(saved.state["guard"])
        self.done, self.updates = saved.step, saved.state["updates"]
        self.skipped = saved.state["skipped"]
        checkpoint.restore_rng(saved.tensors[OPTIMIZER])
        if self.strategy.is_main:
            for path in checkpoint.set_aside_newer(self.directory.checkpoints, self.done):
                self.directory.log(f"set aside: {path}")

    def run(self) -> Outcome:
        """Train to the end, or until a signal; then the last step's checkpoint is on the disk.

        Raises:
            WeftError: a step is impossible (no memory, a token outside the vocabulary, losses that stay
                NaN), after a checkpoint of the last good one; or a checkpoint cannot be written.
        """
        config, began = self.config, time.perf_counter()
        is_main, tensorboard = self.strategy.is_main, config.tensorboard
        self.metrics = None
        if is_main:
            self.metrics = Metrics(self.directory.path, after=self.done, tensorboard=tensorboard)
            if tensorboard and (hint := tensorboard_hint()):
                self.directory.log(hint)
        self.progress = self._make_progress()
        # Each process reads its own samples: no batch is sent between processes.
        split = {"rank": self.strategy.rank, "world": self.strategy.world}
        stop_signal = None
        try:
            with (
                StopSignals() as signals,
                Prefetch(
                    self.train_batches, self.strategy.device, accumulate=config.accumulate, **split
                ) as batches,
            ):
                # The loss of the untrained model is the curve's first point.
                if self.done == 0 and config.validate_every:
                    with self._out_of_memory_advice():
                        self._validate()
                self.step_began = time.perf_counter()
                while self.done < config.steps and stop_signal is None:
                    with self._out_of_memory_advice():
                        if self._step_and_due_work(batches, signals):
                            # A process that was not signalled itself has no number.
                            stop_signal = signals.caught or SIGTERM
        except WriteError:
            raise  # the disk is full: another checkpoint would fail too
        except WeftError:
            # The last good step belongs to the checkpoint, so its metrics must be in the file before it.
            self._write_last_step()
            self.optimizer.drop_gradients()
            # A checkpoint is a collective operation: all processes must have failed in the same way.
            unsaved = self.done > self.saved_step and self.weights_consistent
            if unsaved and self.strategy.all_failed_together():
                self._save()
            raise
        finally:
            try:
                self.profiler.close()
                self._write_last_step()
            finally:
                self.progress.close()
                if self.metrics:
                    self.metrics.close()
        return self._outcome(time.perf_counter() - began, stop_signal)

    def _out_of_memory_advice(self) -> AbstractContextManager[None]:
        accumulate = self.config.accumulate
        batch = self.config.micro_batch_size(self.strategy.world) * accumulate
        return out_of_memory_advice(self.done + 1, batch, accumulate)

    def _step_and_due_work(self, batches: Prefetch, signals: StopSignals) -> bool:
        """Do one step and what is due after it; return True if the run was asked to stop."""
        config = self.config
        undisturbed = self._nothing_due_within(self.profiler.steps or 0)
        is_warm = self.micro_batch.is_warm  # before the step, which may be the last to compile or capture
        with self.profiler.step(self.seconds, undisturbed), annotate("step"):
            numbers = self._step(batches, signals)
        last = self.done == config.steps
        validate = config.validate_every is not None and (last or self._is_due(config.validate_every))
        sample = self._is_due(config.sample_every) and not last
        save = self._is_due(config.checkpoint_every) or last or numbers.save or numbers.stop
        # Output of the work below must come after the step's own lines.
        if validate or sample or save:
            self._write_last_step()
        paused_at = self.progress.pause()
        if is_warm and self.seconds_are_warmup:
            self.seconds, self.seconds_are_warmup = [], False
        self.seconds = [*self.seconds[1 - RECENT_STEPS :], paused_at - self.step_began]
        if validate:
            self._validate()
        if sample:
            self.progress.print(self.sample())
        if save:
            self._save()
        self.step_began = self.progress.resume(paused_at)
        return numbers.stop

    def _is_due(self, every: int | None, ahead: int = 0) -> bool:
        return every is not None and (self.done + ahead) % every == 0

    def _nothing_due_within(self, steps: int) -> bool:
        """Return True if no validation, sample or checkpoint is due between the next ``steps`` steps."""
        config = self.config
        intervals = (config.validate_every, config.sample_every, config.checkpoint_every)
        return not any(self._is_due(every, ahead) for every in intervals for ahead in range(1, steps))

    def _step(self, batches: Prefetch, signals: StopSignals) -> StepNumbers:
        config, optimizer, accumulate = self.config, self.optimizer, self.config.accumulate
        is_warmup = not self.micro_batch.is_warm
        if self.sparse is not None:
            self.sparse.refresh(self.done)
        # The sum stays on the device: reading each micro-batch's loss would wait for it.
        loss = torch.zeros((), device=self.strategy.device)
        # All micro-batches are launched before the host waits for the first number.
        for micro in range(accumulate):
            x, y = batches.at(self.done, micro)
            with self.strategy.micro_batch_context(accumulate):
                loss += self.micro_batch(x, y, self._dropout_seed(micro))
            if accumulate > 1:
                optimizer.accumulate(first=micro == 0)
            # After the launches: the thread needs the GIL, which the launches would wait for.
            batches.prefetch_next()
        self.strategy.reduce_gradients(optimizer.gradients(), accumulate)
        with annotate("gradient norms"):
            norms = optimizer.norms()
        # Everything up to ``step_numbers`` runs on the host while the device computes the backward.
        optimizer.prepare(may_clip=config.clip is not None)
        self._write_last_step()
        # monotonic: a change of the system's clock must not trigger or suppress a checkpoint.
        since_save = time.monotonic() - self.saved_at
        save = config.checkpoint_seconds is not None and since_save > config.checkpoint_seconds
        stop = signals.caught is not None
        numbers = self.strategy.step_numbers(loss, norms, stop=stop, save=save)
        self._update_or_skip(numbers, is_warmup)
        return numbers

    def _update_or_skip(self, numbers: StepNumbers, is_warmup: bool) -> None:
        config, step = self.config, self.done
        lr = cosine_schedule(
            step, steps=config.steps, lr=config.lr, warmup=config.warmup, floor=config.lr_floor
        )
        skip_reason = self.guard.reason_to_skip(numbers.loss, numbers.norm)
        values: dict[str, Any] = {"loss": numbers.loss, "norm": numbers.norm, "lr": lr}
        if skip_reason is None:
            self.updates += 1
            self.weights_consistent = False  # an error during the update must not lead to a checkpoint
            with annotate("optimizer"):
                self.optimizer.step(self.updates, lr, numbers.group_norms, numbers.norm, config.clip)
            self.weights_consistent = True
            self.strategy.after_update()
        else:
            self.optimizer.drop_gradients()
            self.skipped += 1
            values["skipped"] = skip_reason
            self.progress.print(f"step {step + 1} is skipped, the weights stay as they are: {skip_reason}")
        now = time.perf_counter()
        # All processes together, since `batch` counts the windows of all of them.
        values["tokens_a_second"] = config.batch * config.length / (now - self.step_began)
        self._unwritten = partial(self._write_step, step + 1, values, now, is_warmup)
        if skip_reason is not None:
            self._write_last_step()
            self.guard.check_patience(step + 1, skip_reason)
        self.done += 1

    def _write_last_step(self) -> None:
        """Write the metrics of the last step, if they are not written; called while the device works."""
        write, self._unwritten = self._unwritten, None
        if write is not None:
            write()

    def _write_step(self, step: int, values: dict[str, Any], now: float, is_warmup: bool) -> None:
        # The outcome's loss is the mean of the last ten.
        self.losses = [*self.losses[-9:], values["loss"]]
        self._log(step, **values)
        self.progress.step(step, values["loss"], now, is_warmup)

    def _dropout_seed(self, micro: int) -> dict[str, int]:
        """Return dropout's seed as an argument: a hash of the run's seed, step, micro-batch and rank."""
        # No argument at all: a captured graph then needs no host number.
        if not self.plan.model.dropout:
            return {}
        # Each rank and micro-batch has other sequences and must get other masks. A resumed run with the same
        # split repeats them.
        text = f"dropout {self.config.seed} {self.done} {micro} {self.strategy.rank}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        # 63 bits: the operators take a non-negative int64.
        return {"seed": int.from_bytes(digest, "little") >> 1}

    @torch.no_grad()
    def _validate(self) -> None:
        """Compute and log the mean loss over the same validation batches each time."""
        config, strategy = self.config, self.strategy
        # One number for all batches: it is read once, at the end.
        total = torch.zeros((), device=strategy.device)
        self.forward.eval()
        for step in range(config.validate_batches):
            for micro in range(config.accumulate):
                # Every process takes its part of the same batches; ``strategy.mean`` combines the parts.
                x, y = self.validation_batches.at(
                    step, micro, config.accumulate, strategy.rank, strategy.world
                )
                total += self.forward(x.to(strategy.device), y.to(strategy.device)).float()
        self.forward.train()
        self.validation = strategy.mean(total.item() / (config.validate_batches * config.accumulate))
        self._log(self.done, validation=self.validation)
        self.progress.print(f"step {self.done}/{config.steps}  validation {self.validation:.4f}")

    def sample(self) -> str:
        """Generate text with the current weights and the run's seed; "" if a process has no tokeniser.

        Training on shards needs no tokeniser, so its files may be missing.
        """
        error = None
        try:
            self.tokeniser.ready()
        except WeftError as missing:
            error = missing
        if self.strategy.mean(float(error is not None)):  # sampling is a collective operation
            self.directory.log(f"no sample: {error or 'a process has no tokeniser'}")
            return ""
        with self.strategy.sampling():
            return sample_text(self.model, self.tokeniser, self.config.sample_tokens, self.config.seed)

    def _save(self) -> None:
        # The metrics first: lines beyond a checkpoint are dropped on resume, but missing ones cannot be
        # restored.
        if self.metrics:
            self.metrics.sync()
        state = {
            "plan": self.plan.to_json(), "guard": self.guard.state(), "updates": self.updates,
            "skipped": self.skipped,
        }  # fmt: skip
        root = self.directory.checkpoints
        if self.sparse is None:
            self.strategy.save(root, self.done, self.optimizer, checkpoint.rng_state(), state)
        else:  # of one process
            files = self.sparse.checkpoint_files(checkpoint.rng_state())
            checkpoint.save(root, self.done, files, state)
        if self.strategy.is_main:
            # After the new checkpoint is complete: at no moment are there fewer than before.
            checkpoint.prune(root, self.config.keep)
        # The interval to the next checkpoint starts when this one is complete, however long it took.
        self.saved_step, self.saved_at = self.done, time.monotonic()

    def _log(self, step: int, **values: Any) -> None:
        if self.metrics:
            self.metrics.log(step, **values)

    def _make_progress(self) -> Progress:
        config, peak = self.config, peak_flops(self.strategy.device, self.config.dtype)
        return Progress(
            steps=config.steps,
            done=self.done,
            tokens=config.batch * config.length,
            flops=self.plan.model.flops_per_token(config.length),
            peak=peak and peak * self.strategy.world,
            device=self.strategy.device,
            quiet=self.quiet or not self.strategy.is_main,
        )

    def _outcome(self, seconds: float, stop_signal: int | None) -> Outcome:
        config, speed, peak = self.config, None, self.progress.peak
        if self.seconds:
            # A median: a step with a checkpoint or a sample beside it must not change the speed.
            median = sorted(self.seconds)[len(self.seconds) // 2]
            speed = config.batch * config.length / median
        flops = self.plan.model.flops_per_token(config.length)
        pace = self.progress.pace
        return Outcome(
            step=self.done,
            steps=config.steps,
            loss=sum(self.losses) / len(self.losses) if self.losses else None,
            validation=self.validation,
            skipped=self.skipped,
            tokens_a_second=speed,
            mfu=speed * flops / peak if speed and peak else None,
            memory_bytes=pace.memory if pace else None,
            seconds=seconds,
            parameters=self.plan.model.parameters,
            signal=stop_signal,
        )
