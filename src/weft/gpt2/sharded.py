"""FSDP2: each process holds its part of every weight and moment, and has the whole of a few blocks
at a time (Zhao et al., "PyTorch FSDP", 2023; ZeRO's third stage, Rajbhandari et al., 2020).

A weight is cut by its first dimension. What is kept is float32 and is its own master; what is
gathered for a block's forward and backward is in the run's dtype; gradients are summed in float32,
straight into each process' part.

FSDP2's hooks are Python, run around each unit of what is gathered together and for each parameter
in it. With a unit a block, gathered twice a step, they took the host of an H200 longer than the
model's own operators. The blocks' forward has no such time to hide: there the host is hardly ahead
of the device. So small blocks share a unit, and where memory allows what is gathered stays, and is
filled anew after an update by ``weft.gpt2.gathering``; a step's forward and backward then
take the host less than half as long: results' sweep-fsdp-2026-11-22.ndjson.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from weft.gpt2 import checkpoint, parts
from weft.gpt2.checkpoint import MODEL, OPTIMIZER, Checkpoint, Tensors
from weft.gpt2.distributed import Several
from weft.gpt2.gathering import Gathering, Pair
from weft.gpt2.group import Group, wait
from weft.gpt2.model import GPT
from weft.gpt2.optimizer import Optimizer

RANDOM = "random."
# Parameters that a unit has, about. Three blocks of the 124M, one of the 774M: 160 MB while their
# gradients are summed, 8 bytes each.
UNIT = 20_000_000
KEPT = 1_000_000_000  # up to so many parameters a model's weights stay gathered


class Sharded(Several):
    """FSDP2: a part of the model in each process.

    Args:
        group: the processes.
        reshard: whether a unit's weights are dropped after its forward and after its backward, and
            gathered before either; None: those of models above ``KEPT`` parameters are.
    """

    cut = True

    def __init__(self, group: Group, reshard: bool | None = None) -> None:
        super().__init__(group)
        self._reshard = reshard
        self._gathering: Gathering | None = None
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
        if self._reshard is None:
            self._reshard = model.config.parameters > KEPT
        how: dict[str, Any] = {"mesh": self._mesh, "mp_policy": policy}
        grouped = in_units(list(model.h))
        units = [fully_shard(g, reshard_after_forward=self._reshard, **how)[0] for g in grouped]
        # The tables and the last norm: gathered once a step, and kept until the backward has ended,
        # since the token table is its first operand and its last.
        root = fully_shard(model, reshard_after_forward=False, **how)
        # All in the order of the forward. Each asks for the next one's weights before it begins to
        # compute, so that they come meanwhile even where the device waits for the host.
        self._units: list[FSDPModule] = [root, *units]
        for unit, after in pairwise(self._units):
            unit.set_modules_to_forward_prefetch([after])
        if not self._reshard:  # FSDP2 gathers for the first forward alone
            root.set_reshard_after_backward(False)
        self._owners = dict(model.named_parameters())
        return model, None

    def updated(self) -> None:
        """Gather what stays whole; else FSDP2 does, as each unit's forward and backward begin."""
        if self._reshard:
            return
        if self._gathering is None:
            self._gathering = Gathering(self._buckets(), self.rank, self.world)
        self._gathering()

    def _buckets(self) -> list[list[Pair]]:
        """Parts and wholes, about a unit's in a bucket; called when a backward has been."""
        found: list[list[Pair]] = []
        room = 0
        for name, whole in cast(GPT, self._units[0]).named_parameters():
            part = self._owners[name]
            assert isinstance(part, DTensor) and not isinstance(whole, DTensor)
            if whole.numel() > room:
                found.append([])
                room = UNIT
            found[-1].append((part.to_local().detach(), whole))
            room -= whole.numel()
        return found

    def local(self, x: torch.Tensor) -> torch.Tensor:
        return x.to_local() if isinstance(x, DTensor) else x

    def sampling(self) -> AbstractContextManager[None]:
        """All weights whole, in the run's dtype, gathered once and not for each token."""
        return self._whole()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        if not self._reshard:  # it is all there, or will be with the first forward
            yield
            return
        self._set_up()
        for unit in self._units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        try:
            yield
        finally:
            for unit in self._units:
                unit.reshard()
            for unit in self._units[1:]:
                unit.set_reshard_after_forward(True, recurse=False)

    @torch.no_grad()
    def _set_up(self) -> None:
        """FSDP2 sets itself up in its first forward, and cannot gather before: a run that is done
        when it is begun again has had none."""
        model = cast(GPT, self._units[0])
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


def in_units(blocks: list[torch.nn.Module]) -> list[list[torch.nn.Module]]:
    """Blocks alike, in their order, in lists of about ``UNIT`` parameters, or of one block."""
    each = sum(p.numel() for p in blocks[0].parameters())
    count = max(1, round(UNIT / each))
    return [blocks[i : i + count] for i in range(0, len(blocks), count)]


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
