"""Memory that tells on a kernel: guard bands around each tensor, poison inside until written.

``| guard | payload | guard |``: every byte starts as poison. For floating-point tensors the poison
is a NaN, so that a load past the end spoils the answer, and a store past the end changes a guard
byte. A second poison is a huge finite number, since ``fmax`` and its like swallow a NaN: what
depends on either poison differs between two runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Guard bytes on each side: as wide as a tile, so that an overrun lands inside. Narrower on a
# CPU, where filling more than 32768 elements would wake every core for each small tensor.
GUARD = {"cuda": 1 << 17, "cpu": 1 << 14}
ALIGN = 256  # what the caching allocator gives a kernel on a GPU

# Two bytes repeated. 0x7FFA is a quiet NaN in fp16, bf16, fp32 and fp64 alike, and one that no
# hardware or library makes (those are 7FC0, 7FFF, FFC0, FFFF); 0x7B7B is huge and finite in all
# four (fp16 6.1e4, bf16 and fp32 1.3e36, fp64 1e286). Integers get patterns of their own.
NAN, HUGE = 0x7FFA, 0x7B7B
_FOR_INTEGERS = {NAN: 0x7B7B, HUGE: 0x5A5A}

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers of the same width, so that NaNs can be compared."""
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements of storage a strided tensor reaches over."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


@dataclass
class Block:
    """One guarded allocation: ``whole`` is all its bytes, the payload is ``whole[start:end]``."""

    name: str
    whole: torch.Tensor
    start: int
    end: int
    pattern: int

    @property
    def payload(self) -> torch.Tensor:
        return self.whole[self.start : self.end]

    @property
    def address(self) -> tuple[int, int]:
        """The first byte of the block, guards included, and the one past its last."""
        first = self.whole.data_ptr()
        return first, first + self.whole.numel()

    def overwritten(self) -> torch.Tensor:
        """How many pairs of guard bytes changed, as a 0-d tensor on the device."""
        pairs = self.whole.view(torch.int16)
        front, back = pairs[: self.start // 2], pairs[-(-self.end // 2) :]
        return (front != self.pattern).sum() + (back != self.pattern).sum()

    def spoil(self) -> None:
        """Fill the payload with poison."""
        if self.start % 2 or self.end % 2:
            self.payload.fill_(self.pattern & 0xFF)
        else:
            self.payload.view(torch.int16).fill_(self.pattern)


@dataclass
class Arena:
    """Gives out guarded, poisoned tensors and says afterwards which guards were written on.

    ``limit`` bounds the bytes held; past it :meth:`room` says no and the caller allocates as usual.
    """

    device: str
    poison: int = NAN
    limit: int = 1 << 62
    blocks: list[Block] = field(default_factory=list)
    held: int = 0
    turned_away: int = 0

    def room(self, nbytes: int) -> bool:
        """Whether this many bytes more stay under the limit; a no is counted."""
        if self.held + nbytes <= self.limit:
            return True
        self.turned_away += 1
        return False

    def pattern_for(self, dtype: torch.dtype) -> int:
        """The two bytes of poison of a tensor of this dtype."""
        return self.poison if dtype.is_floating_point else _FOR_INTEGERS[self.poison]

    def take(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        strides: Sequence[int] | None = None,
        offset: int = 0,
        name: str = "a buffer",
    ) -> torch.Tensor:
        """A tensor of poison between guards, ``offset`` elements past a 256-byte boundary.

        It is no view: it is set upon its storage, so that type and layout are exactly as asked.
        """
        strides = dense_strides(shape) if strides is None else tuple(strides)
        nbytes = (offset + span(shape, strides)) * dtype.itemsize
        guard = GUARD[torch.device(self.device).type]
        length = 2 * guard + ALIGN + nbytes + nbytes % 2
        whole = torch.empty(length, dtype=torch.uint8, device=self.device)
        start = guard + (-(whole.data_ptr() + guard)) % ALIGN
        pattern = self.pattern_for(dtype)
        whole.view(torch.int16).fill_(pattern)
        block = Block(name, whole, start + offset * dtype.itemsize, start + nbytes, pattern)
        if dtype is torch.bool:
            block.payload.fill_(1)  # any other byte is no bool
        self.blocks.append(block)
        self.held += whole.numel()
        return alias(block, shape, dtype, strides)

    def broken(self) -> list[str]:
        """One line for each block whose guard bytes changed."""
        if not self.blocks:
            return []
        changed = torch.stack([b.overwritten() for b in self.blocks]).tolist()
        return [
            f"{2 * count} bytes around {block.name} were overwritten"
            for block, count in zip(self.blocks, changed, strict=True)
            if count
        ]


def alias(
    block: Block, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int]
) -> torch.Tensor:
    """A tensor upon the block's payload with a version counter of its own.

    Writing through one alias leaves the other's ``_version`` as it was, so a kernel cannot tell by
    it that the contents behind an address are new.
    """
    tensor = torch.empty(0, dtype=dtype, device=block.whole.device)
    offset = block.start // dtype.itemsize
    return tensor.set_(block.whole.untyped_storage(), offset, tuple(shape), tuple(strides))


_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_ZEROS = {
    torch.ops.aten.zeros.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.new_zeros.default,
}


class Poisoned(TorchDispatchMode):
    """While on, what Python code allocates uninitialised comes guarded and poisoned from an arena.

    What an ATen kernel allocates for its own output is out of reach here: see :func:`prepoison`.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arena = arena

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _EMPTY and func not in _ZEROS:
            return func(*args, **kwargs)
        like = args[0] if args and isinstance(args[0], torch.Tensor) else None
        device = kwargs.get("device")
        if device is None:
            device = like.device if like is not None else torch.device("cpu")
        plain = like is None or type(like) is torch.Tensor
        strided = kwargs.get("layout") in (None, torch.strided)
        here = torch.device(device).type == torch.device(self.arena.device).type
        if not (plain and strided and here) or kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        wanted = func(*args, **{**kwargs, "device": "meta"})
        if not self.arena.room(wanted.numel() * wanted.element_size()):
            return func(*args, **kwargs)
        served = self.arena.take(
            wanted.shape, wanted.dtype, wanted.stride(), name="memory it allocated"
        )
        return served.zero_() if func in _ZEROS else served


def pattern_of(poison: int, itemsize: int) -> int:
    """The poison as one signed integer of ``itemsize`` bytes, to compare :func:`bits` with."""
    whole = poison.to_bytes(2, "little") * max(itemsize // 2, 1)
    return int.from_bytes(whole[:itemsize], "little", signed=True)


def prepoison(device: str, sizes: Iterable[int], poison: int = NAN) -> None:
    """Leave poison in the allocator's free blocks of these sizes (bytes), for what comes next.

    For allocations made below the dispatcher (compiled code, ATen's own kernels), which no mode
    sees. Sure on a GPU, where the caching allocator hands the same block out again; a best effort
    on a CPU, where it is up to the C library.
    """
    counts = [-(-n // 2) for n in sizes for _ in range(2) if n]
    kept = [torch.empty(n, dtype=torch.int16, device=device) for n in counts]
    for block in kept:
        block.fill_(poison)
    del kept


@contextmanager
def served_from(arena: Arena | None) -> Iterator[None]:
    """Serve allocations from ``arena``; with None, leave them alone."""
    if arena is None:
        yield
        return
    with Poisoned(arena):
        yield
