"""Guarded memory: guard bands around each tensor, and poison inside it until it is written.

``| guard | payload | guard |``: every byte starts as poison. The poison of floating-point tensors is a
NaN, so a load past the end makes the output wrong; a store past the end changes a guard byte. There is
a second poison, a huge finite number, because ``fmax`` and similar functions ignore a NaN. An output
that depends on poison differs between a run with one and a run with the other.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Guard bytes on each side: as wide as a tile, so that an overrun lands inside. Narrower on a
# CPU, where filling more than 32768 elements would wake every core for each small tensor.
GUARD = {"cuda": 1 << 17, "cpu": 1 << 14}
ALIGN = 256  # bytes; alignment of a tensor from the CUDA caching allocator is at least this (512)

# Two bytes repeated. 0x7FFA is a quiet NaN in fp16, bf16, fp32 and fp64 alike, and one that no
# hardware or library makes (those are 7FC0, 7FFF, FFC0, FFFF); 0x7B7B is huge and finite in all
# four (fp16 6.1e4, bf16 and fp32 1.3e36, fp64 1e286). Integers get patterns of their own.
NAN, HUGE = 0x7FFA, 0x7B7B
# Both are large in every integer dtype: read as an index they are hardly a valid row or class.
_FOR_INTEGERS = {NAN: 0x7B7B, HUGE: 0x5A5A}

LARGE_OUTPUT = 1 << 26  # bytes

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's elements as integers of the same width, so that NaNs can be compared."""
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def are_equal(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Return for each pair of vectors of bytes whether they are equal, in one transfer from a GPU."""
    if not pairs or pairs[0][0].device.type == "cpu":
        return [torch.equal(a, b) for a, b in pairs]
    return torch.stack([(a == b).all() for a, b in pairs]).tolist()


_DIGEST_KEY = secrets.randbits(62)  # of this process: digests of two processes are not compared
_DIGEST_WORDS = 1 << 20  # int64 words that are multiplied at once: temporaries of 8 MiB
_MASK = (1 << 64) - 1


@cache
def _digest_factors(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two sets of random odd numbers on a device."""
    generator = torch.Generator(device).manual_seed(_DIGEST_KEY)
    numbers = torch.randint(
        -(1 << 62), 1 << 62, (2, _DIGEST_WORDS), generator=generator, device=device, dtype=torch.int64
    )
    first, second = numbers.mul_(2).add_(1)
    return first, second


def digest(tensor: torch.Tensor) -> tuple[int, int]:
    """Return two 64-bit sums that differ if a bit of the tensor differs; shape and dtype do not count.

    Each word is multiplied by a random odd number. A change of one word always shows, a change of
    several with a probability of all but about 2^-63 in each sum. A digest replaces the copy of a
    large tensor that is compared later.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:  # words of 8 bytes must begin at a multiple of 8
        flat = flat.clone()
    tail = flat.numel() % 8
    words = flat[: flat.numel() - tail].view(torch.int64)
    factors = _digest_factors(tensor.device)
    sums = [
        (piece * factor[: piece.numel()]).sum() for piece in words.split(_DIGEST_WORDS) for factor in factors
    ]
    # One transfer for all pieces: on a GPU each `.item()` would synchronise.
    numbers = torch.stack(sums).tolist() if sums else []
    rest = int.from_bytes(bytes(flat[flat.numel() - tail :].tolist()), "little")
    weights = random.Random(_DIGEST_KEY)  # of the pieces: two that change places change the sum
    results = [rest, rest]
    for index, number in enumerate(numbers):
        results[index % 2] += number * (2 * weights.getrandbits(62) + 1)
    return results[0] & _MASK, results[1] & _MASK


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the elements of storage that a strided tensor spans."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


@dataclass
class Block:
    """Guarded allocation: ``whole`` is all its bytes, the payload is ``whole[start:end]``."""

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
        """Address of the block's first byte, guards included, and of the byte past its last."""
        first = self.whole.data_ptr()
        return first, first + self.whole.numel()

    def overwritten(self) -> torch.Tensor:
        """Count the pairs of guard bytes that changed, as a 0-d tensor on the device."""
        # In pairs of bytes, as the poison was written. A single guard byte that shares its pair with the
        # payload is not compared.
        pairs = self.whole.view(torch.int16)
        front, back = pairs[: self.start // 2], pairs[-(-self.end // 2) :]
        return (front != self.pattern).sum() + (back != self.pattern).sum()

    def poison(self, limit: int) -> None:
        """Fill the payload, or its first ``limit`` bytes (an even number), with poison."""
        payload = self.payload[:limit]
        if self.start % 2 or payload.numel() % 2:
            payload.fill_(self.pattern & 0xFF)
        else:
            payload.view(torch.int16).fill_(self.pattern)


@dataclass
class Arena:
    """Allocator of guarded, poisoned tensors that can list the guards that were overwritten.

    ``limit`` bounds the allocated bytes; past it :meth:`reserve` returns False and the caller allocates
    ordinary memory.
    """

    device: str
    poison: int = NAN
    limit: int = 1 << 62
    blocks: list[Block] = field(default_factory=list)
    used_bytes: int = 0
    unguarded: int = 0

    def reserve(self, nbytes: int) -> bool:
        """Return True if ``nbytes`` more stay under the limit; else count one unguarded allocation."""
        if self.used_bytes + nbytes <= self.limit:
            return True
        self.unguarded += 1
        return False

    def pattern_for(self, dtype: torch.dtype) -> int:
        """Return the two bytes of poison for a tensor of this dtype."""
        return self.poison if dtype.is_floating_point else _FOR_INTEGERS[self.poison]

    def take(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        strides: Sequence[int] | None = None,
        offset: int = 0,
        name: str = "a buffer",
    ) -> torch.Tensor:
        """Return a poisoned tensor between guards, ``offset`` elements past a 256-byte boundary.

        The tensor is not a view: it is set on its storage, so its type and layout are exactly those
        requested.
        """
        strides = dense_strides(shape) if strides is None else tuple(strides)
        nbytes = (offset + span(shape, strides)) * dtype.itemsize
        guard = GUARD[torch.device(self.device).type]
        length = 2 * guard + ALIGN + nbytes + nbytes % 2
        whole = torch.empty(length, dtype=torch.uint8, device=self.device)
        # ALIGN spare bytes let the payload start on the boundary wherever the block itself starts.
        start = guard + (-(whole.data_ptr() + guard)) % ALIGN
        pattern = self.pattern_for(dtype)
        whole.view(torch.int16).fill_(pattern)
        block = Block(name, whole, start + offset * dtype.itemsize, start + nbytes, pattern)
        if dtype is torch.bool:
            block.payload.fill_(1)  # a bool must be the byte 0 or 1; anything else is undefined
        self.blocks.append(block)
        self.used_bytes += whole.numel()
        return alias(block, shape, dtype, strides)

    def broken(self) -> list[str]:
        """Return a line for each block whose guard bytes changed."""
        if not self.blocks:
            return []
        # One transfer for all blocks: on a GPU each `.item()` would synchronise.
        changed = torch.stack([b.overwritten() for b in self.blocks]).tolist()
        return [
            f"{2 * count} bytes around {block.name} were overwritten"
            for block, count in zip(self.blocks, changed, strict=True)
            if count
        ]


def alias(block: Block, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int]) -> torch.Tensor:
    """Return a tensor on the block's payload with a version counter of its own.

    Writing through one alias leaves the ``_version`` of the other unchanged, so a candidate cannot
    notice new contents behind an address by it.
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
    """Mode that serves allocations of Python code (``torch.empty`` and others) from an arena.

    It cannot see the allocations that an ATen kernel makes for its own output: see :func:`prepoison`.
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
        same_device = torch.device(device).type == torch.device(self.arena.device).type
        if not (plain and strided and same_device) or kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        # The meta device resolves shape, dtype and strides of every overload without allocating.
        template = func(*args, **{**kwargs, "device": "meta"})
        if not self.arena.reserve(template.numel() * template.element_size()):
            return func(*args, **kwargs)
        served = self.arena.take(
            template.shape, template.dtype, template.stride(), name="memory it allocated"
        )
        return served.zero_() if func in _ZEROS else served


def pattern_of(poison: int, itemsize: int) -> int:
    """Return the poison as a signed integer of ``itemsize`` bytes, to compare with :func:`bits`."""
    whole = poison.to_bytes(2, "little") * max(itemsize // 2, 1)
    return int.from_bytes(whole[:itemsize], "little", signed=True)


def prepoison(device: str, sizes: Iterable[int], poison: int = NAN) -> None:
    """Leave poison in the allocator's free blocks of these sizes (bytes), for the next allocations.

    It reaches allocations below the dispatcher (compiled code, ATen's own kernels), which no mode sees.
    On a GPU the caching allocator returns the same block again, so it is reliable there. On a CPU it
    depends on the C library and is a best effort.
    """
    # Two of each size: a call may allocate a temporary of its output's size first. Of large sizes one:
    # the memory is needed.
    counts = [-(-n // 2) for n in sizes for _ in range(1 if n > LARGE_OUTPUT else 2) if n]
    buffers = [torch.empty(n, dtype=torch.int16, device=device) for n in counts]
    for block in buffers:
        block.fill_(poison)
    del buffers


@contextmanager
def served_from(arena: Arena | None) -> Iterator[None]:
    """Serve allocations from ``arena``; with None, leave them alone."""
    if arena is None:
        yield
        return
    with Poisoned(arena):
        yield
