"""Launch a learner's Triton kernel on memory with guard bands, in Triton's interpreter.

A grader that launches the kernel itself chooses the sizes, the strides and the blocks, and sees what a result
alone does not show: a store outside a tensor, a load outside it, an input that was changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import weft.backends.triton_jit  # noqa: F401 - it silences the overflows that the interpreter reports
from weft.learn.candidate import Candidate
from weft.learn.grading import Refused, require

# Elements before and after a tensor. A kernel without its mask overruns by less than a block of rows here.
GUARD = 1 << 15


class Guarded:
    """A tensor between two guard bands of NaN.

    A load outside the tensor reads NaN and spoils the result. A store outside it is seen by :meth:`check`.
    """

    def __init__(self, name: str, values: np.ndarray) -> None:
        self.name = name
        copied = torch.from_numpy(np.array(values))
        fill = float("nan") if copied.is_floating_point() else torch.iinfo(copied.dtype).min
        self._storage = torch.full((copied.numel() + 2 * GUARD,), fill, dtype=copied.dtype)
        self.tensor = self._storage[GUARD : GUARD + copied.numel()].view(copied.shape)
        self.tensor.copy_(copied)
        self._before = self._bytes().clone()

    def _bytes(self) -> torch.Tensor:
        return self._storage.view(torch.uint8)

    def numpy(self) -> np.ndarray:
        return self.tensor.numpy()

    def check(self, case: str, *, read_only: bool = False) -> None:
        """Raise :class:`Refused` if a guard band, or a tensor that is only read, has changed."""
        changed = self._bytes() != self._before
        size = self._storage.element_size()
        if not read_only:
            changed[GUARD * size : -GUARD * size] = False
        if changed.any():
            first, end = int(changed.nonzero()[0]) // size - GUARD, self.tensor.numel()
            if 0 <= first < end:
                raise Refused(case, f"the kernel changed its input {self.name}, at element {first}")
            reason = f"the kernel wrote element {first} of {self.name}, which has the elements 0 to {end - 1}"
            raise Refused(case, f"{reason}: the store needs a mask")


def unwritten(name: str, *shape: int, dtype: Any = np.float32) -> Guarded:
    """Return an output in guarded memory, filled with NaN so that an element left out is seen."""
    return Guarded(name, np.full(shape, np.nan, dtype))


def launch(
    candidate: Candidate,
    name: str,
    grid: tuple[int, ...],
    case: str,
    arguments: Sequence[Any],
    *,
    outputs: Sequence[Guarded],
    **constants: Any,
) -> None:
    """Launch the kernel ``name``, then check all guard bands and that inputs are unchanged.

    What the kernel raises becomes a reason with the line of the learner's file.
    """
    kernel: Any = getattr(candidate.module, name, None)
    require(kernel is not None, "import", f"the file has no {name}; keep the name of the starting file")
    require(hasattr(kernel, "__getitem__"), "import", f"{name} is no Triton kernel: it needs @triton.jit")

    def start(*values: Any) -> None:
        kernel[grid](*values, **constants)

    # A function of the candidate explains what it raises, with the line.
    start_name = f"launch of {name}"
    setattr(candidate.module, start_name, start)
    candidate.function(start_name)(*(a.tensor if isinstance(a, Guarded) else a for a in arguments))
    for argument in arguments:
        if isinstance(argument, Guarded):
            argument.check(case, read_only=all(argument is not output for output in outputs))
