"""What a run does otherwise where several processes take part; each has its share of a batch.

:class:`Replicated` is DDP (Li et al., 2020): each process holds the whole model, and gradients are
averaged. :class:`~weft.gpt2.sharded.Sharded` is FSDP2: each holds its part of weights and moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.gpt2 import checkpoint
from weft.gpt2.checkpoint import Checkpoint, Tensors
from weft.gpt2.group import Group, wait
from weft.gpt2.optimizer import Optimizer, whole_norm
from weft.gpt2.ranks import Ranks, Reading

NONE = -1  # over the wire: no step


def ranks(group: Group, strategy: str, reshard: bool | None = None) -> Ranks:
    """The processes of a group, sharing the work by ``strategy``, ``ddp`` or ``fsdp``; ``reshard``
    is :class:`~weft.gpt2.sharded.Sharded`'s."""
    if group.world == 1:
        return Ranks(group.device)
    if strategy == "ddp":
        return Replicated(group)
    from weft.gpt2.sharded import Sharded

    return Sharded(group, reshard)


class Several(Ranks):
    """What both ways have in common.

    Attributes:
        cut: whether each process holds a part of the gradients, or all of them.
    """

    cut: bool

    def __init__(self, group: Group) -> None:
        super().__init__(group.device)
        self.group, self.rank, self.world = group, group.rank, group.world

    @property
    def graphs(self) -> bool:
        return False

    def read(self, loss: torch.Tensor, norms: torch.Tensor, *, stop: bool, save: bool) -> Reading:
        """As one process' own, after the one reduction over all that a step makes."""
        count = len(norms)
        # Filled on the device: a copy from the host would wait for what runs there.
        asked = [torch.full((1,), float(ask), device=self.device) for ask in (stop, save)]
        # float64: squares of norms beyond 1e19 are no float32
        shared = torch.cat([loss.reshape(1), *asked, norms]).double()
        shared[3:].square_()
        dist.all_reduce(shared)
        values = torch.cat([shared, norms.double()]).tolist()
        total, stops, saves = values[:3]
        squares, own = values[3 : 3 + count], values[3 + count :]
        return Reading(
            loss=total / self.world,
            norms=tuple(own),
            norm=math.sqrt(math.fsum(squares)) if self.cut else whole_norm(own),
            stop=stops > 0,
            save=saves > 0,
        )

    def mean(self, value: float) -> float:
        shared = torch.full((1,), value, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared)
        return shared.item() / self.world

    def together(self) -> bool:
        return self.group.together()

    def agreed(self, find: Callable[[], Checkpoint | None]) -> int | None:
        """The step of the checkpoint that the first process finds; the others ask it."""
        found = find() if self.first else None
        step = torch.tensor([NONE if found is None else found.step])
        dist.broadcast(step, src=0)
        return None if step.item() == NONE else int(step.item())


class Replicated(Several):
    """DDP: the whole model in each process."""

    cut = False

    def spread(
        self, model: torch.nn.Module, dtype: torch.dtype
    ) -> tuple[torch.nn.Module, dict[str, torch.Tensor] | None]:
        own, masters = super().spread(model, dtype)
        self._module = torch.nn.parallel.DistributedDataParallel(
            own,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # reduced where they lie, with no copy of them
        )
        return self._module, masters

    def backward(self, parts: int) -> AbstractContextManager[Any]:
        """Where a step has one micro-batch, its gradients are averaged while the backward runs, in
        their own dtype. Of several the float32 sums are, once, in :meth:`reduce`."""
        return nullcontext() if parts == 1 else self._module.no_sync()

    def reduce(self, gradients: Iterable[list[torch.Tensor]], parts: int) -> None:
        if parts == 1:
            return
        for sums in gradients:
            waiting = [dist.all_reduce(s, async_op=True) for s in sums]
            for work in waiting:
                work.wait()
            torch._foreach_div_(sums, self.world)

    def save(
        self, root: Path, step: int, optimizer: Optimizer, random: Tensors, state: dict[str, Any]
    ) -> Path:
        """The first process writes, since it has all; the others wait until it is there."""
        path = checkpoint.place(root, step)
        if self.first:
            super().save(root, step, optimizer, random, state)
        wait(self.group)
        return path

    def newest(self, root: Path, say: Callable[[str], None]) -> Checkpoint | None:
        found: list[Checkpoint | None] = []

        def find() -> Checkpoint | None:
            found.append(checkpoint.newest(root, say))
            return found[0]

        step = self.agreed(find)
        if found or step is None:
            return found[0] if found else None
        return checkpoint.load(checkpoint.place(root, step))
