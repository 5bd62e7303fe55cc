"""Products that were launched before: the same launch with other addresses.

The first call of a kind chooses a configuration, makes tensor maps and fills the kernel's structure of
arguments, which takes the host longer than the product where the product is small. Calls of the same kind
differ in addresses alone: a ``RepeatedProduct`` keeps the structure and replaces what depends on them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MakeMap = Callable[[int], ctypes.Structure]  # address of a matrix -> its tensor map


class _Buffer:
    """A structure of arguments, the address of a pointer to it, and the addresses of tensors in it."""

    def __init__(self, structure: ctypes.Structure) -> None:
        self.structure = type(structure).from_buffer_copy(structure)
        self._pointer = ctypes.c_void_p(ctypes.addressof(self.structure))
        self.address = ctypes.addressof(self._pointer)
        self.pointers: tuple[int, ...] = ()


class RepeatedProduct:
    """The launch of a product, repeated with other addresses: those of ``maps``, then those of ``fields``.

    Args:
        launch: starts the kernel with a structure, given the address of a pointer to it
            (``Kernel.prepare_structure``).
        structure: arguments of the first launch.
        maps: by field of the structure, the function that returns the tensor map of a matrix at an address.
        fields: fields that are addresses themselves.
    """

    def __init__(
        self,
        launch: Callable[[int], None],
        structure: ctypes.Structure,
        maps: Mapping[str, MakeMap],
        fields: Sequence[str],
    ) -> None:
        self._launch, self._structure = launch, structure
        self._maps, self._fields = tuple(maps.items()), tuple(fields)
        # Appending to a list and popping from it are atomic in CPython: two threads never share a buffer.
        self._free: list[_Buffer] = []

    def __call__(self, *pointers: int) -> None:
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = _Buffer(self._structure)
        # PyTorch's allocator gives a loop the same addresses again and again.
        if buffer.pointers != pointers:
            self._write(buffer, pointers)
        self._launch(buffer.address)
        self._free.append(buffer)

    def _write(self, buffer: _Buffer, pointers: tuple[int, ...]) -> None:
        structure: Any = buffer.structure
        for (field, make_map), pointer in zip(self._maps, pointers, strict=False):
            setattr(structure, field, make_map(pointer))
        for field, pointer in zip(self._fields, pointers[len(self._maps) :], strict=True):
            setattr(structure, field, pointer)
        buffer.pointers = pointers
