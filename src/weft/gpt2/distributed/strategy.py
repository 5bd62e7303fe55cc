"""Strategies: everything in a run that depends on the number of processes.

:class:`SingleProcess` is one process and defines the interface. :class:`DataParallel` is DDP (Li et
al., 2020): each process has the whole model, and gradients are averaged. ``fsdp.FullySharded`` is FSDP2:
each process has its shards of weights and moments. Each process computes its part of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.gpt2.distributed.process_group import ProcessGroup, RunProcess, barrier
from weft.gpt2.train import checkpoint
from weft.gpt2.train.checkpoint import Checkpoint
from weft.gpt2.train.checkpoint_files import MODEL, OPTIMIZER, RNG_PREFIX, Tensors, checkpoint_path
from weft.gpt2.train.optimizer import Optimizer, combined_norm

NO_STEP = -1  # broadcast when there is no checkpoint
# A model as a process trains it, and its float32 weights by name, if its parameters are not float32.
PreparedModel = tuple[torch.nn.Module, dict[str, torch.Tensor] | None]


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """Numbers of a step before its update.

    ``loss`` is the mean over the whole batch; ``group_norms`` are the norms of this process's gradients,
    one for each group of the optimizer; ``norm`` is that of all gradients together. ``stop`` and ``save``
    are requests of any process: to end after this step, to write a checkpoint after it.
    """

    loss: float
    group_norms: tuple[float, ...]
    norm: float
    stop: bool
    save: bool


class SingleProcess(RunProcess):
    """Strategy of a run with one process."""

    @property
    def can_capture_graph(self) -> bool:
        """True if forward and backward can be one CUDA graph: they contain no communication."""
        return self.device.type == "cuda"

    def prepare_model(self, model: torch.nn.Module, dtype: torch.dtype) -> PreparedModel:
        """Turn a float32 model into the one that this process trains in ``dtype``."""
        if dtype == torch.float32:
            return model, None
        # Copied before the model is rounded: the masters start with all float32 digits.
        masters = {name: p.detach().clone() for name, p in model.named_parameters()}
        # The optimizer updates the masters and rounds them to the model's weights.
        return model.to(dtype), masters

    def local_part(self, x: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a parameter or gradient."""
        return x

    def micro_batch_context(self, accumulate: int) -> AbstractContextManager[Any]:
        """Context of forward and backward of each of a step's ``accumulate`` micro-batches."""
        return nullcontext()

    def reduce_gradients(self, gradients: Iterable[list[torch.Tensor]], accumulate: int) -> None:
        """Combine the gradients of all processes, before their norm is computed."""

    def step_numbers(
        self, loss: torch.Tensor, group_norms: torch.Tensor, *, stop: bool, save: bool
    ) -> StepNumbers:
        """Copy the step's numbers to the host; the only time that a step waits for the device.

        ``loss`` () and ``group_norms`` (groups,), float32, are this process's.
        """
        mean, *norms = torch.cat([loss.reshape(1), group_norms]).tolist()
        return StepNumbers(
            loss=mean, group_norms=tuple(norms), norm=combined_norm(norms), stop=stop, save=save
        )

    def after_update(self) -> None:
        """Distribute the updated weights where processes need those of others."""

    def mean(self, value: float) -> float:
        """Return the mean of a number over all processes."""
        return value

    def sampling(self) -> AbstractContextManager[None]:
        """Context of sampling from the model."""
        return nullcontext()

    def all_failed_together(self) -> bool:
        """True if all processes raise this error, so that they can still write a checkpoint."""
        return True

    def save(self, root: Path, step: int, optimizer: Optimizer, rng: Tensors, state: dict[str, Any]) -> Path:
        """Write a checkpoint of the whole model and optimizer; as :func:`checkpoint.save`."""
        files = {MODEL: optimizer.masters(), OPTIMIZER: {**optimizer.moments(), **rng}}
        return checkpoint.save(root, step, files, state)

    def load_newest(self, root: Path, log: Callable[[str], None]) -> Checkpoint | None:
        """Read the newest checkpoint; as :func:`checkpoint.load_newest`."""
        return checkpoint.load_newest(root, log)

    def restore(self, optimizer: Optimizer, saved: Checkpoint) -> None:
        """Restore a checkpoint's weights and moments; as :meth:`Optimizer.load`."""
        moments = {n: t for n, t in saved.tensors[OPTIMIZER].items() if not n.startswith(RNG_PREFIX)}
        optimizer.load(saved.tensors[MODEL], moments)


class MultiProcess(SingleProcess):
    """Common parts of the strategies for several processes.

    Attributes:
        shards_gradients: True if each process has a shard of the gradients, False if all of them.
    """

    shards_gradients: bool

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.device)
        self.group, self.rank, self.world = group, group.rank, group.world

    @property
    def can_capture_graph(self) -> bool:
        return False

    def step_numbers(
        self, loss: torch.Tensor, group_norms: torch.Tensor, *, stop: bool, save: bool
    ) -> StepNumbers:
        """Combine the numbers of all processes in one reduction, the only one of a step."""
        count = len(group_norms)
        # Filled on the device: a copy from the host would wait for the kernels that run there.
        # Floats, so that the requests travel in the same reduction as the loss.
        requests = [torch.full((1,), float(flag), device=self.device) for flag in (stop, save)]
        # float64, because squares of norms beyond 1e19 overflow float32.
        shared = torch.cat([loss.reshape(1), *requests, group_norms]).double()
        shared[3:].square_()
        # After the sum: mean loss times world, numbers of requests, squared norms of all shards.
        dist.all_reduce(shared)
        values = torch.cat([shared, group_norms.double()]).tolist()
        total, stops, saves = values[:3]
        squares, own_norms = values[3 : 3 + count], values[3 + count :]
        # Shards partition the gradients, so their squares add up. With DDP every process has all gradients,
        # and its own norm is the norm.
        norm = math.sqrt(math.fsum(squares)) if self.shards_gradients else combined_norm(own_norms)
        return StepNumbers(
            loss=total / self.world,
            group_norms=tuple(own_norms),
            norm=norm,
            stop=stops > 0,
            save=saves > 0,
        )

    def mean(self, value: float) -> float:
        shared = torch.full((1,), value, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared)
        return shared.item() / self.world

    def all_failed_together(self) -> bool:
        return self.group.all_failed_together()

    def broadcast_step(self, find: Callable[[], Checkpoint | None]) -> int | None:
        """Return the step of the checkpoint that ``find`` returns in the main process, in all of them."""
        saved = find() if self.is_main else None
        # On the CPU: gloo broadcasts it, and no GPU has to wait.
        # Only the step is sent: each process reads the checkpoint from the shared disk.
        step = torch.tensor([NO_STEP if saved is None else saved.step])
        dist.broadcast(step, src=0)
        return None if step.item() == NO_STEP else int(step.item())


class DataParallel(MultiProcess):
    """DDP: the whole model in each process."""

    shards_gradients = False

    def prepare_model(self, model: torch.nn.Module, dtype: torch.dtype) -> PreparedModel:
        model, masters = super().prepare_model(model, dtype)
        self._module = torch.nn.parallel.DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # reduced in place, without a copy
        )
        return self._module, masters

    def micro_batch_context(self, accumulate: int) -> AbstractContextManager[Any]:
        """Average during the backward, in the gradients' dtype, if a step has one micro-batch. Of
        several, :meth:`reduce_gradients` averages the float32 sums once."""
        return nullcontext() if accumulate == 1 else self._module.no_sync()

    def reduce_gradients(self, gradients: Iterable[list[torch.Tensor]], accumulate: int) -> None:
        if accumulate == 1:
            return
        for sums in gradients:
            # Asynchronous, so that the reductions of many small tensors overlap.
            pending = [dist.all_reduce(s, async_op=True) for s in sums]
            for work in pending:
                work.wait()
            torch._foreach_div_(sums, self.world)

    def save(self, root: Path, step: int, optimizer: Optimizer, rng: Tensors, state: dict[str, Any]) -> Path:
        """Write in the main process, which has everything; the others wait for it."""
        if self.is_main:
            super().save(root, step, optimizer, rng, state)
        # No process may go on, or end, before the files are complete.
        barrier(self.group)
        return checkpoint_path(root, step)

    def load_newest(self, root: Path, log: Callable[[str], None]) -> Checkpoint | None:
        """Read in the main process, which may skip broken ones; the others read the same step."""
        in_main: list[Checkpoint | None] = []

        def find() -> Checkpoint | None:
            in_main.append(checkpoint.load_newest(root, log))
            return in_main[0]

        step = self.broadcast_step(find)
        # ``find`` ran in the main process only, which has read the tensors already.
        if in_main or step is None:
            return in_main[0] if in_main else None
        return checkpoint.load(checkpoint_path(root, step))
