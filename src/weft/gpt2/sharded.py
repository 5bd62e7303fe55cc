"""FSDP2: each process holds its part of every weight and moment, and has the whole of one block at
a time (Zhao et al., "PyTorch FSDP", 2023; ZeRO's third stage, Rajbhandari et al., 2020).

A weight is cut by its first dimension. What is kept is float32 and is its own master; what is
gathered for a block's forward and backward is in the run's dtype; gradients are summed in float32,
straight into each process' part.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from weft.gpt2 import checkpoint, parts
from weft.gpt2.checkpoint import MODEL, OPTIMIZER, Checkpoint, Tensors
from weft.gpt2.distributed import Several
from weft.gpt2.group import Group, wait
from weft.gpt2.model import GPT
from weft.gpt2.optimizer import Optimizer

RANDOM = "random."


class Sharded(Several):
    """FSDP2: a part of the model in each process."""

    cut = True

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._mesh = init_device_mesh(self.device.type, (self.world,))

    def spread(
        self, model: torch.nn.Module, dtype: torch.dtype
    ) -> tuple[torch.nn.Module, dict[str, torch.Tensor] | None]:
        """Cut the model in place. The whole of it was on the device until now, once."""
        assert isinstance(model, GPT)
        # Said of each block, in torch 2.13: its answer is a view, which must not be written over.
        # No operator of ours writes over its input.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        half = dtype != torch.float32
        policy = MixedPrecisionPolicy(
            param_dtype=dtype if half else None, reduce_dtype=torch.float32 if half else None
        )
        for block in model.h:
            fully_shard(block, mesh=self._mesh, mp_policy=policy)
        # The tables and the last norm: gathered once a step, and kept until the backward has ended,
        # since the token table is its first operand and its last.
        fully_shard(model, mesh=self._mesh, mp_policy=policy)
        self._modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        return model, None

    def local(self, x: torch.Tensor) -> torch.Tensor:
        return x.to_local() if isinstance(x, DTensor) else x

    def sampling(self) -> AbstractContextManager[None]:
        """All weights whole, in the run's dtype, gathered once and not for each token."""
        return self._whole()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        self._set_up()
        for module in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in self._modules:
                module.reshard()
                root = module is self._modules[0]
                module.set_reshard_after_forward(not root, recurse=False)

    @torch.no_grad()
    def _set_up(self) -> None:
        """FSDP2 sets itself up in its first forward, and cannot gather before: a run that is done
        when it is begun again has had none."""
        model = self._modules[0]
        training = model.training
        model.eval()
        model(torch.zeros(1, 1, dtype=torch.int64, device=self.device))
        model.train(training)

    def save(
        self, root: Path, step: int, optimizer: Optimizer, random: Tensors, state: dict[str, Any]
    ) -> Path:
        """Each process writes its part into one folder; the first seals it and renames it."""
        temporary = checkpoint.place(root, step, temporary=True)
        masters, moments = self._placed(optimizer)
        told: dict[str, dict[str, Any]] = {}
        with checkpoint.guarded(root, step, removes=self.first):
            if self.first:
                checkpoint.begin(root, step)
            wait(self.group)
            for name, tensors in ((MODEL, masters), (OPTIMIZER, {**moments, **random})):
                told |= parts.write(temporary, name, tensors, self.rank)
            everyone: list[dict[str, dict[str, Any]]] = [{} for _ in range(self.world)]
            dist.all_gather_object(everyone, told)
            if self.first:
                whole = {name: one for each in everyone for name, one in each.items()}
                checkpoint.finish(root, step, whole, state)
            wait(self.group)
        return checkpoint.place(root, step)

    def newest(self, root: Path, say: Callable[[str], None]) -> Checkpoint | None:
        """The first process holds it against its hashes. Tensors are the random state's alone:
        each process reads its parts of the others in :meth:`load`."""
        step = self.agreed(lambda: checkpoint.newest(root, say, read=checkpoint.check))
        if step is None:
            return None
        path = checkpoint.place(root, step)
        random = parts.read(path, OPTIMIZER, only=RANDOM)
        state = checkpoint.read_state(path)
        return Checkpoint(path=path, step=step, state=state, tensors={OPTIMIZER: random})

    def load(self, optimizer: Optimizer, found: Checkpoint) -> None:
        masters, moments = self._placed(optimizer)
        parts.read_into(found.path, MODEL, masters)
        parts.read_into(found.path, OPTIMIZER, moments)

    def _placed(self, optimizer: Optimizer) -> tuple[Mapping[str, DTensor], Mapping[str, DTensor]]:
        """The optimizer's own tensors, each with its place in the whole: weights and moments."""
        owners = {n: p for g in optimizer.groups for n, p in zip(g.names, g.owners, strict=True)}
        masters = {n: _like(t, owners[n]) for n, t in optimizer.masters().items()}
        moments = {n: _like(t, owners[_owner(n)]) for n, t in optimizer.moments().items()}
        return masters, moments


def _owner(moment: str) -> str:
    return moment.partition(".")[2]


def _like(part: torch.Tensor, whole: torch.Tensor) -> DTensor:
    assert isinstance(whole, DTensor)
    return DTensor.from_local(
        part,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
