"""Staged inputs of a candidate's calls: guarded, at fixed addresses, overwritten for each seed.

A call specification names the call and the form of its outputs. It holds no expected output, so it can
be sent to a worker process, which must not know one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from weft.core import BACKWARD, Case, Input, Operator
from weft.workbench.calls import inputs as case_inputs
from weft.workbench.calls.guarded_memory import NAN, Arena, are_equal, digest

# Inputs of more bytes are not copied: a digest stands for them, and a copy of their beginning. Both are
# even numbers, since poison is written in pairs of bytes.
LARGE_INPUT, BEGINNING = 1 << 26, 1 << 24


@dataclass(frozen=True)
class TensorForm:
    """Required form of an output: ``strides`` are the baseline's, else None."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class CallSpec:
    """Specification of a call: its point, the forms of its outputs and of the incoming gradient.

    ``grad_form`` is None in the forward.
    """

    operator: Operator
    case: Case
    direction: str
    device: str
    output_forms: tuple[TensorForm, ...]
    grad_form: TensorForm | None = None


class StagedCall:
    """Inputs of a case (in the backward: and the gradient) at fixed addresses, between guard bands.

    Every seed's values are written to the same addresses, so an output cached by address is stale.
    """

    def __init__(self, spec: CallSpec, poison: int = NAN) -> None:
        self.spec, self.poison = spec, poison
        self.arena = Arena(spec.device, poison)
        self.inputs = [case_inputs.allocate(i, spec.device, self.arena) for i in spec.case.inputs]
        self.grad = None
        if spec.direction == BACKWARD:
            assert spec.grad_form is not None
            dtype = str(spec.grad_form.dtype).removeprefix("torch.")
            grad_input = Input(name="grad", shape=spec.grad_form.shape, dtype=dtype)
            self.grad = case_inputs.allocate(grad_input, spec.device, self.arena)
        self.originals: list[torch.Tensor] = []
        self.digests: list[tuple[int, int] | None] = []

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [i.tensor for i in self.inputs]

    def load(self, seed: int) -> None:
        """Write this seed's values into the inputs; copy every byte, the gaps of a sliced input too.

        Of a large input only the beginning is copied, and a digest stands for the whole.
        """
        case_inputs.fill_all(self.inputs, self.spec.case, seed)
        if self.grad is not None:
            # Inputs are numbered from 0: -1 gives the gradient random numbers of its own.
            case_inputs.fill(self.grad, seed, -1)
        self.originals.clear()  # before the new ones: both would be in memory
        payloads = [block.payload for block in self.arena.blocks]
        self.originals = [p[: self._copied_bytes(p)].clone() for p in payloads]
        self.digests = [digest(p) if p.numel() > LARGE_INPUT else None for p in payloads]

    @staticmethod
    def _copied_bytes(payload: torch.Tensor) -> int:
        return BEGINNING if payload.numel() > LARGE_INPUT else payload.numel()

    def poison_inputs(self) -> None:
        """Overwrite the inputs, or the beginning of large ones, with poison until :meth:`restore`."""
        for block in self.arena.blocks:
            block.poison(self._copied_bytes(block.payload))

    def restore(self) -> None:
        """Copy the bytes stored by :meth:`load` back into the inputs, on the current stream."""
        for block, original in zip(self.arena.blocks, self.originals, strict=True):
            block.payload[: original.numel()].copy_(original)

    def changed(self) -> list[str]:
        """Return the names of the inputs whose bytes changed since :meth:`load`."""
        # Payloads are bytes: NaN equals itself, and gaps between elements of a slice count too.
        blocks = list(zip(self.arena.blocks, self.originals, self.digests, strict=True))
        changed = {b.name for b, _, before in blocks if before is not None and digest(b.payload) != before}
        copied = [(b, original) for b, original, before in blocks if before is None]
        pairs = [(b.payload, original) for b, original in copied]
        changed |= {b.name for (b, _), same in zip(copied, are_equal(pairs), strict=True) if not same}
        return [b.name for b, *_ in blocks if b.name in changed]

    @contextmanager
    def on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Make ``stream`` current (None: no change), where the inputs become valid only after a delay.

        The stream waits and then restores the poisoned inputs, so work that a candidate queues on
        any other stream without synchronisation reads poison.
        """
        if stream is None:
            yield
            return
        self.poison_inputs()
        # All poison is written before the delay starts: no restored input can be overwritten by it.
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            # About 10 ms at 1.98 GHz: longer than a kernel on another stream takes to start and read.
            torch.cuda._sleep(20_000_000)
            self.restore()
            yield
            # The caller reads the outputs on the default stream, which does not wait for this one.
            stream.synchronize()
