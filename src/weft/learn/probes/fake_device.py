"""A device with a clock that only the program moves, so that a fault of a benchmark shows in every run.

Host and device have a time each, in microseconds. A launch takes a little host time and queues work on the
device; ``synchronize`` moves the host to the end of the queue. ``now`` reads the host's clock. The device has
an L2 cache that holds the buffers used last. Nothing here depends on the machine that runs the exercise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import repeat

LAUNCH, SYNCHRONIZE, COMPILE = 5.0, 10.0, 80_000.0  # microseconds of the host
L2_RATE = 5.0  # times the rate of the memory
MEMORY = 1 << 36  # bytes


class Buffer:
    """Memory of the fake device."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes


class FakeDevice:
    """The device that a learner's benchmark gets: ``now``, ``synchronize``, ``allocate`` and ``l2_bytes``."""

    def __init__(self, l2_bytes: int = 1 << 20) -> None:
        self.l2_bytes = l2_bytes
        self.launches = 0
        self._host = 1_000_000.0
        self._idle_at = 0.0  # when the device has finished its queue
        self._next_address = 1 << 20
        self._cached: OrderedDict[int, int] = OrderedDict()  # address -> bytes, least recently used first
        self._cached_bytes = 0

    def now(self) -> float:
        """Return the host's time in microseconds."""
        return self._host

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""
        self._host = max(self._host, self._idle_at) + SYNCHRONIZE

    def allocate(self, nbytes: int) -> Buffer:
        """Return a new buffer, filled with random numbers, which leaves it in the L2 cache."""
        if self._next_address + nbytes > MEMORY:
            raise MemoryError("the fake device has no more memory")
        buffer = Buffer(self._next_address, nbytes)
        self._next_address += -(-nbytes // 512) * 512
        self.queue(nbytes / 1e6)
        self.touch(buffer)
        return buffer

    def queue(self, duration: float) -> None:
        """Queue work of ``duration`` microseconds, as a launch does."""
        self._host += LAUNCH
        self._idle_at = max(self._idle_at, self._host) + duration

    def spend(self, duration: float) -> None:
        """Let the host work for ``duration`` microseconds."""
        self._host += duration

    def touch(self, buffer: Buffer) -> bool:
        """Bring a buffer into the L2 cache; return whether it was there."""
        hit = buffer.address in self._cached
        self._cached_bytes += 0 if hit else buffer.nbytes
        self._cached[buffer.address] = buffer.nbytes
        self._cached.move_to_end(buffer.address)
        while self._cached_bytes > self.l2_bytes:
            self._cached_bytes -= self._cached.popitem(last=False)[1]
        return hit


class FakeKernel:
    """A kernel of the fake device: call it with a buffer. It is compiled in its first call.

    ``duration`` is the time on a cold cache. ``remembers`` makes it a cheat, which returns at once for an
    address that it has seen. ``noise`` yields the factor of each call's duration.
    """

    def __init__(
        self,
        device: FakeDevice,
        duration: float,
        *,
        remembers: bool = False,
        noise: Callable[[], Iterator[float]] = lambda: repeat(1.0),
    ) -> None:
        self._device, self._duration, self._remembers = device, duration, remembers
        self._noise, self._compiled = noise(), False
        self._seen: set[int] = set()

    def __call__(self, buffer: Buffer) -> None:
        device = self._device
        device.launches += 1
        if not self._compiled:
            self._compiled = True
            device.spend(COMPILE)
        duration = self._duration * next(self._noise)
        if device.touch(buffer):
            duration /= L2_RATE
        if self._remembers and buffer.address in self._seen:
            duration = 0.0
        self._seen.add(buffer.address)
        device.queue(duration)
