"""Everything of a run that depends on how many processes take part: here one, and no group.

``weft.gpt2.distributed`` has the same for several. Whoever adds a method here adds it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.gpt2 import checkpoint
from weft.gpt2.checkpoint import MODEL, OPTIMIZER, Checkpoint
from weft.gpt2.optimizer import Optimizer, whole_norm


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a step says of itself before the weights are touched, as numbers.

    ``loss`` is the mean over the whole batch; ``norms`` are those of this process' gradients, one
    a group of the optimizer; ``norm`` is that of all gradients together; ``stop`` and ``save`` are
    what any process asks for: to end after this step, to write a checkpoint after it.
    """

    loss: float
    norms: tuple[float, ...]
    norm: float
    stop: bool
    save: bool


class Ranks:
    """One process.

    Attributes:
        rank, world: this process' number, and how many there are.
        device: where this process computes.
    """

    rank, world = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def first(self) -> bool:
        """Whether this process is the one that talks and writes."""
        return self.rank == 0

    @property
    def graphs(self) -> bool:
        """Whether forward and backward can be one CUDA graph: nothing in them is another's."""
        return self.device.type == "cuda"

    def spread(
        self, model: torch.nn.Module, dtype: torch.dtype
    ) -> tuple[torch.nn.Module, dict[str, torch.Tensor] | None]:
        """A float32 model as this process trains it in ``dtype``, and its float32 weights by name,
        where its parameters are no longer that."""
        if dtype == torch.float32:
            return model, None
        masters = {name: p.detach().clone() for name, p in model.named_parameters()}
        return model.to(dtype), masters

    def local(self, x: torch.Tensor) -> torch.Tensor:
        """This process' part of a parameter or gradient: all of it."""
        return x

    def backward(self, parts: int) -> AbstractContextManager[Any]:
        """Around the forward and backward of each of a step's ``parts`` micro-batches."""
        return nullcontext()

    def reduce(self, gradients: Iterable[list[torch.Tensor]], parts: int) -> None:
        """Called when all of a step's gradients are there, before their norm, with those of its
        ``parts`` micro-batches or their float32 sums: nothing to add."""

    def read(self, loss: torch.Tensor, norms: torch.Tensor, *, stop: bool, save: bool) -> Reading:
        """The step's numbers, in the only wait for the device that a step makes.

        ``loss`` () and ``norms`` (groups,), float32, are this process' own.
        """
        mean, *each = torch.cat([loss.reshape(1), norms]).tolist()
        norm = whole_norm(each)
        return Reading(loss=mean, norms=tuple(each), norm=norm, stop=stop, save=save)

    def updated(self) -> None:
        """Called when the weights have changed: nothing to gather."""

    def mean(self, value: float) -> float:
        """The mean of a number over all processes."""
        return value

    def sampling(self) -> AbstractContextManager[None]:
        """Around sampling from the model: nothing to gather."""
        return nullcontext()

    def together(self) -> bool:
        """Whether all processes raise the error that this one does, and a checkpoint can be written
        of what they hold."""
        return True

    def save(
        self, root: Path, step: int, optimizer: Optimizer, random: Tensors, state: dict[str, Any]
    ) -> Path:
        """Write a checkpoint of the whole model and optimizer; as :func:`checkpoint.save`."""
        files = {MODEL: optimizer.masters(), OPTIMIZER: {**optimizer.moments(), **random}}
        return checkpoint.save(root, step, files, state)

    def newest(self, root: Path, say: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that can be read; as :func:`checkpoint.newest`."""
        return checkpoint.newest(root, say)

    def load(self, optimizer: Optimizer, found: Checkpoint) -> None:
        """Take a checkpoint's weights and moments; as :meth:`Optimizer.load`."""
        moments = {n: t for n, t in found.tensors[OPTIMIZER].items() if not n.startswith("random.")}
        optimizer.load(found.tensors[MODEL], moments)


Tensors = Mapping[str, torch.Tensor]
