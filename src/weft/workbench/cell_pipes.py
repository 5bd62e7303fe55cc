"""A channel and an output that are never waited for: what is there is taken, and no more."""

from __future__ import annotations

import socket
from collections import deque
from contextlib import suppress

from weft.workbench.cell_frames import Reading

AT_ONCE = 64  # pieces, then the judge looks at its clock again


class Kept:
    """The first and the last bytes of a stream of any length."""

    def __init__(self, limit: int) -> None:
        self.half = max(limit // 2, 1)
        self.first, self.last, self.dropped = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        room = self.half - len(self.first)
        self.first += data[:room]
        self.last += data[max(room, 0) :]
        if len(self.last) > 2 * self.half:
            self._trim()

    def _trim(self) -> None:
        self.dropped += max(len(self.last) - self.half, 0)
        del self.last[: -self.half]

    def text(self) -> str:
        self._trim()
        gap = f"\n... {self.dropped} bytes left out ...\n" if self.dropped else ""
        first, last = (bytes(part) for part in (self.first, self.last))
        if not gap:
            return (first + last).decode(errors="replace")
        return first.decode(errors="replace") + gap + last.decode(errors="replace")


def fill(channel: socket.socket, message: Reading, want: memoryview) -> memoryview:
    """Receive what is there, at most ``AT_ONCE`` pieces; what is still to be filled.

    StopIteration bears the whole message, EOFError says that the channel has ended.
    """
    for _ in range(AT_ONCE):
        try:
            got = channel.recv_into(want)
        except BlockingIOError:
            break
        if not got:
            raise EOFError
        want = want[got:] or next(message)
    return want


def empty(channel: socket.socket, outgoing: deque[memoryview]) -> None:
    """Send what the channel takes."""
    with suppress(BlockingIOError):
        for _ in range(AT_ONCE):
            if not outgoing:
                return
            outgoing[0] = outgoing[0][channel.send(outgoing[0]) :]
            if not outgoing[0]:
                outgoing.popleft()
