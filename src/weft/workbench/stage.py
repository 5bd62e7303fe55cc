"""The stage of a candidate's calls: the inputs of a case between guards, redrawn for each seed.

A scene says what is to be called and what its answer must look like; it holds no answer, so that it
can be sent to a process that must not know one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from weft.core import BACKWARD, Case, Input, Operator
from weft.workbench import inputs as drawing
from weft.workbench.memory import NAN, Arena


@dataclass(frozen=True)
class Form:
    """What an answer must look like: ``strides`` are the baseline's, else None."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Where a candidate is called: ``forms`` of the outputs due, ``grad_form`` of the gradient that
    the backward is given (None in the forward)."""

    operator: Operator
    case: Case
    direction: str
    device: str
    forms: tuple[Form, ...]
    grad_form: Form | None = None


class Stage:
    """The inputs of a case (and the gradient, in the backward) at fixed addresses, between guards.

    Every seed is drawn into the same addresses, so an answer kept by address is an old answer.
    """

    def __init__(self, scene: Scene, poison: int = NAN) -> None:
        self.scene, self.poison = scene, poison
        self.arena = Arena(scene.device, poison)
        self.inputs = [drawing.place(i, scene.device, self.arena) for i in scene.case.inputs]
        self.grad = None
        if scene.direction == BACKWARD:
            assert scene.grad_form is not None
            dtype = str(scene.grad_form.dtype).removeprefix("torch.")
            spec = Input(name="grad", shape=scene.grad_form.shape, dtype=dtype)
            self.grad = drawing.place(spec, scene.device, self.arena)
        self.originals: list[torch.Tensor] = []

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [one.tensor for one in self.inputs]

    def fill(self, seed: int) -> None:
        """Draw this seed's values into the inputs, and keep a copy of every byte, gaps included."""
        drawing.fill_all(self.inputs, self.scene.case, seed)
        if self.grad is not None:
            drawing.fill(self.grad, seed, -1)
        self.originals = [block.payload.clone() for block in self.arena.blocks]

    def spoil(self) -> None:
        """Put poison where the inputs are, for :meth:`restore` to undo on another stream."""
        for block in self.arena.blocks:
            block.spoil()

    def restore(self) -> None:
        for block, original in zip(self.arena.blocks, self.originals, strict=True):
            block.payload.copy_(original)

    def changed(self) -> list[str]:
        """The names of the inputs that are not, bit for bit, what they were."""
        pairs = zip(self.arena.blocks, self.originals, strict=True)
        return [block.name for block, original in pairs if not torch.equal(block.payload, original)]

    @contextmanager
    def on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """With a stream the inputs are poison until that stream, after some idling, restores them:
        work queued anywhere else reads the poison."""
        if stream is None:
            yield
            return
        self.spoil()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # cycles: some 10 ms, in which another would be done
            self.restore()
            yield
            stream.synchronize()
