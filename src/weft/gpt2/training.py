"""The loop: batch, loss, backward, a look at the numbers, update; and what is done between steps.

    for step in range(done, steps):
        losses and gradients of the micro-batches      launched, not waited for
        the step before is told: metrics, progress     while the device works
        loss and norms come to the host                the only wait of a step
        guards judge them                              NaN, an outlier: the weights stay
        one AdamW over all parameters                  clipping folded in

From the wait to the next step's first kernels the device has nothing to do, so that only what must
be is done there: judge and launch. What AdamW needs beside numbers, the next batch and all that is
written are made while it is busy. A step is told at once where something is due after it.

A step's batch and its dropout are functions of (seed, step), so that a run that is resumed computes
what it would have computed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from weft.core import WeftError
from weft.gpt2 import checkpoint
from weft.gpt2.data import Batches, Prefetch
from weft.gpt2.files import Unwritten
from weft.gpt2.folder import Folder, Plan
from weft.gpt2.guards import Guard, Signals, memory
from weft.gpt2.metrics import Metrics, missing
from weft.gpt2.model import GPT
from weft.gpt2.optimizer import Optimizer
from weft.gpt2.passes import Pass
from weft.gpt2.profiling import Profiler, check
from weft.gpt2.progress import Progress, peak
from weft.gpt2.ranks import Ranks, Reading
from weft.gpt2.samples import sample
from weft.gpt2.schedule import cosine
from weft.gpt2.sequence import Tokens
from weft.gpt2.tokens import Tokeniser

LATEST = 100  # steps whose median time gives the outcome's speed


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run stands when it ends: ``signal`` is what ended it early, or None.

    ``loss`` is the mean of the last ten steps', ``validation`` the last; in nats a token, None
    where there was none. ``seconds`` are those of this process.
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
        """Plain data."""
        return asdict(self)


class Run:
    """A run: model, optimizer, data and guards, as its plan and the newest checkpoint make them.

    Args:
        plan: what is trained, on what, and how.
        tokens: the training and the validation part.
        tokeniser: for samples.
        folder: the run's; opened for this plan.
        ranks: the processes that take part.
        quiet: nothing is reported but what is wrong.
        start: the first weights by name, unless there is a checkpoint; else they are drawn.
        profiled: how many steps are put under the profiler, or None.
    """

    def __init__(
        self,
        plan: Plan,
        tokens: tuple[Tokens, Tokens],
        tokeniser: Tokeniser,
        folder: Folder,
        ranks: Ranks,
        quiet: bool = False,
        start: Mapping[str, torch.Tensor] | None = None,
        profiled: int | None = None,
    ) -> None:
        self.plan, self.config, self.folder, self.ranks = plan, plan.train, folder, ranks
        self.tokeniser, config = tokeniser, plan.train
        size, self.parts = plan.model.vocab_size, {"accumulate": config.accumulate}
        config.micro(ranks.world)
        self.train, self.held = (
            Batches(t, config.batch, config.length, config.seed, size) for t in tokens
        )
        self.model = GPT(plan.model, seed=config.seed, device=ranks.device)
        if start is not None:
            self.model.load_state_dict(start)
        self.module, masters = ranks.spread(self.model, getattr(torch, config.dtype))
        self.optimizer = Optimizer(
            self.model.named_parameters(),
            masters=masters,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            local=ranks.local,
        )
        self.forward: Any = torch.compile(self.module) if config.compile else self.module
        self.passes = Pass(
            self.forward,
            list(self.model.parameters()),
            config.accumulate,
            graph=config.graph and not config.compile and profiled is None and ranks.graphs,
        )
        self.guard = Guard(config.outlier_z, config.outlier_window, config.patience)
        self.done = self.updates = self.skipped = 0
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.began = time.perf_counter()
        self.validation: float | None = None
        self.quiet, self.whole = quiet, True
        self._untold: Callable[[], None] | None = None
        found = ranks.newest(folder.checkpoints, folder.say) if folder.resumed else None
        if found is not None:
            self._go_on(found)
        self.saved = self.done if found else -1
        self.saved_at = time.monotonic()
        check(profiled, config.steps - self.done)
        self.profiler = Profiler(steps=profiled, device=ranks.device)

    def _go_on(self, found: checkpoint.Checkpoint) -> None:
        self.folder.agree(found.state["plan"])
        self.ranks.load(self.optimizer, found)
        self.guard.load(found.state["guard"])
        self.done, self.updates = found.step, found.state["updates"]
        self.skipped = found.state["skipped"]
        checkpoint.restore_random(found.tensors[checkpoint.OPTIMIZER])
        if self.ranks.first:
            for path in checkpoint.set_aside(self.folder.checkpoints, self.done):
                self.folder.say(f"set aside: {path}")

    def go(self) -> Outcome:
        """Train to the end, or to a signal; the last step's checkpoint is on the disk then.

        Raises:
            WeftError: a step cannot be taken (no memory, a token outside the vocabulary, losses
                that stay NaN), after a checkpoint of the last good one; or a checkpoint cannot be
                written.
        """
        config, began = self.config, time.perf_counter()
        first, tensorboard = self.ranks.first, config.tensorboard
        self.metrics = (
            Metrics(self.folder.path, after=self.done, tensorboard=tensorboard) if first else None
        )
        if first and tensorboard and (lacking := missing()):
            self.folder.say(lacking)
        self.progress = self._progress()
        where = {"rank": self.ranks.rank, "world": self.ranks.world, **self.parts}
        stopped = None
        try:
            with Signals() as signals, Prefetch(self.train, self.ranks.device, **where) as batches:
                if self.done == 0 and config.validate_every:
                    with self._memory():
                        self._validate()
                self.began = time.perf_counter()
                while self.done < config.steps and stopped is None:
                    with self._memory():
                        if self._turn(batches, signals):
                            stopped = signals.caught or 15
        except Unwritten:
            raise
        except WeftError:
            self._tell()
            self.optimizer.drop()
            if self.done > self.saved and self.whole and self.ranks.together():
                self._save()
            raise
        finally:
            try:
                self.profiler.close()
                self._tell()
            finally:
                self.progress.close()
                if self.metrics:
                    self.metrics.close()
        return self._outcome(time.perf_counter() - began, stopped)

    def _memory(self) -> AbstractContextManager[None]:
        config = self.config
        parts = config.accumulate
        return memory(self.done + 1, config.micro(self.ranks.world) * parts, parts)

    def _turn(self, batches: Prefetch, signals: Signals) -> bool:
        """One step and what is due after it; whether the run was asked to end."""
        config = self.config
        with self.profiler.turn(self.seconds, self._clear(self.profiler.steps or 0)):
            reading = self._step(batches, signals)
        last = self.done == config.steps
        validates = config.validate_every is not None and (last or self._due(config.validate_every))
        samples = self._due(config.sample_every) and not last
        saves = self._due(config.checkpoint_every) or last or reading.save or reading.stop
        if validates or samples or saves:
            self._tell()
        since = self.progress.pause()
        self.seconds = [*self.seconds[1 - LATEST :], since - self.began]
        if validates:
            self._validate()
        if samples:
            self.progress.say(self.sample())
        if saves:
            self._save()
        self.began = self.progress.resume(since)
        return reading.stop

    def _due(self, every: int | None, ahead: int = 0) -> bool:
        return every is not None and (self.done + ahead) % every == 0

    def _clear(self, steps: int) -> bool:
        """Whether so many steps come one after another, with nothing due between them."""
        config = self.config
        each = (config.validate_every, config.sample_every, config.checkpoint_every)
        return not any(self._due(every, ahead) for every in each for ahead in range(1, steps))

    def _step(self, batches: Prefetch, signals: Signals) -> Reading:
        config, optimizer, step = self.config, self.optimizer, self.done
        parts = config.accumulate
        total = torch.zeros((), device=self.ranks.device)
        for micro in range(parts):
            x, y = batches.at(step, micro)
            with self.ranks.backward(parts):
                total += self.passes(x, y, self._draw(micro))
            if parts > 1:
                optimizer.gather(first=micro == 0)
            batches.ahead()
        self.ranks.reduce(optimizer.gradients(), parts)
        norms = optimizer.norms()
        optimizer.ready(config.clip is not None)
        self._tell()
        waited = time.monotonic() - self.saved_at
        save = config.checkpoint_seconds is not None and waited > config.checkpoint_seconds
        stop = signals.caught is not None
        reading = self.ranks.read(total, norms, stop=stop, save=save)
        self._update(reading)
        return reading

    def _update(self, reading: Reading) -> None:
        """Judge the step; take it or leave it."""
        config, step = self.config, self.done
        rate = cosine(
            step, steps=config.steps, lr=config.lr, warmup=config.warmup, floor=config.lr_floor
        )
        reason = self.guard.judge(reading.loss, reading.norm)
        told: dict[str, Any] = {"loss": reading.loss, "norm": reading.norm, "lr": rate}
        if reason is None:
            self.updates += 1
            self.whole = False  # what fails in the midst of an update must not be kept
            self.optimizer.step(self.updates, rate, reading.norms, reading.norm, config.clip)
            self.whole = True
            self.ranks.updated()
        else:
            self.optimizer.drop()
            self.skipped += 1
            told["skipped"] = reason
            self.progress.say(f"step {step + 1} is skipped, the weights stay as they are: {reason}")
        now = time.perf_counter()
        told["tokens_a_second"] = config.batch * config.length / (now - self.began)
        self._untold = partial(self._write, step + 1, told, now)
        if reason is not None:
            self._tell()
            self.guard.check(step + 1, reason)
        self.done += 1

    def _tell(self) -> None:
        """Write down the last step, if it is not yet: the device may be busy with the next."""
        untold, self._untold = self._untold, None
        if untold is not None:
            untold()

    def _write(self, step: int, told: dict[str, Any], now: float) -> None:
        self.losses = [*self.losses[-9:], told["loss"]]
        self._log(step, **told)
        self.progress.step(step, told["loss"], now)

    def _draw(self, micro: int) -> dict[str, int]:
        """Dropout's seed, where there is dropout, of the run's, the step and the part."""
        if not self.plan.model.dropout:
            return {}
        told = f"dropout {self.config.seed} {self.done} {micro} {self.ranks.rank}"
        digest = hashlib.blake2b(told.encode(), digest_size=8).digest()
        return {"seed": int.from_bytes(digest, "little") >> 1}

    @torch.no_grad()
    def _validate(self) -> None:
        """The mean loss over the same batches each time, logged."""
        config, ranks = self.config, self.ranks
        total = torch.zeros((), device=ranks.device)
        self.forward.eval()
        for step in range(config.validate_batches):
            for micro in range(config.accumulate):
                x, y = self.held.at(step, micro, config.accumulate, ranks.rank, ranks.world)
                total += self.forward(x.to(ranks.device), y.to(ranks.device)).float()
        self.forward.train()
        self.validation = ranks.mean(total.item() / (config.validate_batches * config.accumulate))
        self._log(self.done, validation=self.validation)
        self.progress.say(f"step {self.done}/{config.steps}  validation {self.validation:.4f}")

    def sample(self) -> str:
        """Text by the model as it is, by the run's seed: the same for the same weights. Shards can
        be trained on where GPT-2's tokeniser has not its files: then there is none."""
        config, missing = self.config, None
        try:
            self.tokeniser.ready()
        except WeftError as error:
            missing = error
        if self.ranks.mean(float(missing is not None)):  # one process alone cannot sample
            self.folder.say(f"no sample: {missing or 'a process has no tokeniser'}")
            return ""
        with self.ranks.sampling():
            return sample(self.model, self.tokeniser, config.sample_tokens, config.seed)

    def _save(self) -> None:
        if self.metrics:
            self.metrics.sync()
        state = {
            "plan": self.plan.to_json(), "guard": self.guard.state(), "updates": self.updates,
            "skipped": self.skipped,
        }  # fmt: skip
        root = self.folder.checkpoints
        self.ranks.save(root, self.done, self.optimizer, checkpoint.random_state(), state)
        if self.ranks.first:
            checkpoint.prune(root, self.config.keep)
        self.saved, self.saved_at = self.done, time.monotonic()

    def _log(self, step: int, **values: Any) -> None:
        if self.metrics:
            self.metrics.log(step, **values)

    def _progress(self) -> Progress:
        config, most = self.config, peak(self.ranks.device, self.config.dtype)
        return Progress(
            steps=config.steps,
            done=self.done,
            tokens=config.batch * config.length,
            flops=self.plan.model.flops_a_token(config.length),
            peak=most and most * self.ranks.world,
            device=self.ranks.device,
            quiet=self.quiet or not self.ranks.first,
        )

    def _outcome(self, seconds: float, stopped: int | None) -> Outcome:
        speed, flops = None, self.plan.model.flops_a_token(self.config.length)
        most = self.progress.peak
        if self.seconds:
            median = sorted(self.seconds)[len(self.seconds) // 2]
            speed = self.config.batch * self.config.length / median
        pace = self.progress.pace
        return Outcome(
            step=self.done,
            steps=self.config.steps,
            loss=sum(self.losses) / len(self.losses) if self.losses else None,
            validation=self.validation,
            skipped=self.skipped,
            tokens_a_second=speed,
            mfu=speed * flops / most if speed and most else None,
            memory_bytes=pace.memory if pace else None,
            seconds=seconds,
            parameters=self.plan.model.parameters,
            signal=stopped,
        )
