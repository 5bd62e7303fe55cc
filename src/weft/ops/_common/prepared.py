"""Launches that are prepared once for a kind of call, and repeated with other addresses.

An implementation decides much before it launches: vector widths, a configuration, a grid, the kernel. All of
it follows from shapes, dtypes, the device and the alignment of the tensors. A ``LaunchCache`` has the outcome
for calls whose tensors are contiguous and aligned; every other call decides anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from weft.backends.nvrtc import is_recording, recorders

Launch = Callable[..., Any]
MAX_LAUNCHES = 1024


class LaunchCache:
    """Prepared launches by kind of call.

    The key of a kind has everything that the launch depends on, except the addresses. Launches are stored for
    tensors that :func:`are_repeatable`, and the caller repeats one with such tensors alone.
    """

    def __init__(self) -> None:
        self._launches: dict[Hashable, Any] = {}

    def get(self, key: Hashable) -> Any:
        """Return what was stored, or None; None too for a call that is recorded, which decides anew."""
        return None if recorders and is_recording() else self._launches.get(key)

    def store(self, key: Hashable, launch: Any) -> None:
        """Store a launch or a tuple with several.

        Nothing is stored without a key, or if a launch is None, where a backend prepares none.
        """
        if key is None or launch is None or (isinstance(launch, tuple) and None in launch):
            return
        # Cleared as a whole: an eviction order would cost each hit more than a rare rebuild costs.
        if len(self._launches) >= MAX_LAUNCHES:
            self._launches.clear()
        self._launches[key] = launch

    def __len__(self) -> int:
        return len(self._launches)


@dataclass(frozen=True)
class MemoryPart:
    """Memory inside a tensor, ``offset`` bytes from its start, as an argument of a kernel."""

    tensor: torch.Tensor
    offset: int

    def data_ptr(self) -> int:
        return self.tensor.data_ptr() + self.offset


class LaunchSequence:
    """Launches of one call in their order, which can be repeated with other buffers.

    ``launch(launch_and_prepare, kernel, *arguments)`` launches, and records in which of ``buffers`` a tensor
    or :class:`MemoryPart` among the arguments lies. ``repeat(*buffers)`` launches all again with the same
    offsets in other buffers. With ``records=False`` nothing is recorded.
    """

    def __init__(self, *buffers: torch.Tensor, records: bool) -> None:
        # An empty tensor counts as one byte: its address is passed too, and never read.
        self._ranges = [(b.data_ptr(), b.data_ptr() + max(b.nbytes, 1)) for b in buffers]
        self._records = records
        self._steps: list[tuple[Launch, list[tuple[int, int]]]] = []
        self.is_complete = records

    def launch(self, start: Callable[..., Launch | None], *arguments: Any, **options: Any) -> None:
        """Call ``start(*arguments, **options)``, which launches and returns the same launch."""
        again = start(*arguments, **options)
        if again is None or not self._records:
            self.is_complete = False
            return
        places = [self._locate(a.data_ptr()) for a in arguments if hasattr(a, "data_ptr")]
        self._steps.append((again, places))

    def _locate(self, address: int) -> tuple[int, int]:
        """Return the index of the buffer that an address lies in, and its offset there."""
        for index, (start, end) in enumerate(self._ranges):
            if start <= address < end:
                return index, address - start
        raise ValueError("an argument of a launch lies in none of the buffers")

    def repeat(self, *buffers: torch.Tensor) -> None:
        """Launch everything again; the buffers have the sizes and the order of the first ones."""
        starts = [b.data_ptr() for b in buffers]
        for launch, places in self._steps:
            launch(*[starts[index] + offset for index, offset in places])


def are_repeatable(*tensors: torch.Tensor | None, alignment: int = 16) -> bool:
    """True if the tensors are contiguous and begin at multiples of ``alignment`` bytes."""
    union = 0  # of the addresses' bits
    for x in tensors:
        if x is not None:
            if not x.is_contiguous():
                return False
            union |= x.data_ptr()
    return not union & (alignment - 1)
