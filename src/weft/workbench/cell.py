"""A cell: a process of its own for one candidate, with limits and a private channel.

The judge asks, the guest in the cell answers, as JSON and raw bytes and under a nonce that each
answer must bring back. Whatever the guest does (hang, crash, print for ever, eat memory, leave
children behind), the judge gets one readable reason in bounded time, and after ``close`` no process
and no file of its folder is left. It is no sandbox: a guest has its user's rights. What means harm
can dig the nonce out of its own process, write elsewhere on the disk, or end the judge.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import select
import socket
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

import torch

from weft.core import WeftError
from weft.workbench import cell_frames, cell_pipes, cell_processes, cell_start

TICK = 0.05  # seconds between two looks at the guest's memory
FAMILY = 0.5  # seconds between two looks at which processes it has; /proc is read for it
STARTING = 60.0  # seconds for a fork, on a machine that is out of breath
CLOSING = 15.0  # seconds for the keeper to clear up; it takes at most cell_processes.ENDING
ENDED = 5.0  # seconds from a guest's closed channel to its end, a CUDA context's included
KEEPER_ENDED = "ended the process that keeps it"
FORGED = "answered with a forged or broken message"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a guest may take: ``seconds`` an ask, bytes of host memory, bytes of output kept.

    ``memory_bytes`` is the resident memory of all the cell's processes, read every 50 ms. Where
    ``device_fraction`` is given, PyTorch's allocator in the guest gives no more of a GPU than that.
    """

    seconds: float = 120.0
    memory_bytes: int = 8 << 30
    output_bytes: int = 1 << 20
    device_fraction: float | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_bytes", "output_bytes"):
            if getattr(self, name) <= 0:
                raise WeftError(
                    f"a cell's {name} must be positive",
                    expected="a number above 0",
                    got=getattr(self, name),
                )


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a guest's handler returned: JSON, and tensors, dense and on the CPU."""

    payload: dict[str, Any]
    tensors: list[torch.Tensor] = field(default_factory=list)


class CellDied(Exception):
    """The guest is gone; ``reason`` says how it went, in one line that begins with a verb."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class GuestError(Exception):
    """A handler raised: 'Type: message', in one line. The guest lives on."""


_open: weakref.WeakSet[Cell] = weakref.WeakSet()


class Cell:
    """One guest. ``entry`` names a function ``handlers(argument)``, called in the guest.

    It returns a mapping from verbs to functions from (payload, tensors) to (payload, tensors). The
    guest is in a folder of its own, so paths in ``argument`` are absolute. A cell is used by one
    thread at a time; several cells may be used at once.
    """

    def __init__(
        self,
        entry: str = "weft.workbench.guest:handlers",
        *,
        limits: Limits | None = None,
        argument: dict[str, Any] | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.left: list[int] = []  # processes that could not be ended
        self._reason = ""
        self._facts: dict[str, Any] = {}  # what the keeper said: keeper, guest, ended, left
        self._heard = b""
        self._shut_in = False
        self._kept = cell_pipes.Kept(self.limits.output_bytes)
        self._family: list[int] = []
        self._family_due = self._look_due = 0.0
        self._marker = secrets.token_hex(16)
        self._owner = os.getpid()
        self._folder = tempfile.mkdtemp(prefix="weft-cell-")
        self._keeper, keeper = socket.socketpair()
        self._channel, channel = socket.socketpair()
        self._output, output = os.pipe()
        os.set_blocking(self._output, False)
        _open.add(self)
        try:
            try:
                self._server = cell_start.fork([keeper.fileno(), channel.fileno(), output])
            finally:
                for end in (keeper, channel):
                    end.close()
                os.close(output)
            self._keeper.sendall(self._request(entry, argument or {}))
        except BaseException:
            self.close()
            raise
        self._keeper.setblocking(False)

    def _request(self, entry: str, argument: dict[str, Any]) -> bytes:
        temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), self._folder)
        request = {
            "entry": entry,
            "argument": argument,
            "folder": self._folder,
            "marker": self._marker,
            "path": cell_start.search_path(),
            "device_fraction": self.limits.device_fraction,
            "environment": {
                # Where it is not set it follows TMPDIR, and would be cold each time.
                "TORCHINDUCTOR_CACHE_DIR": cell_start.inductor_cache(),
                **os.environ,
                **temporary,
                cell_processes.MARKER: self._marker,
            },
        }
        return json.dumps(request).encode() + b"\n"

    def ask(
        self,
        verb: str,
        payload: dict[str, Any] | None = None,
        tensors: Sequence[torch.Tensor] = (),
        *,
        seconds: float | None = None,
    ) -> Reply:
        """Call a handler. Raises GuestError if it raised, CellDied if the guest is gone."""
        if self._reason:
            raise CellDied(self._reason)
        nonce = secrets.token_hex(16)
        request = {"nonce": nonce, "verb": verb, "payload": payload or {}}
        parts = cell_frames.pack(request, tensors)
        try:
            self._await_guest()
            header, answers = self._exchange(parts, seconds or self.limits.seconds)
        except CellDied:
            raise
        except cell_frames.Broken:
            self._die(FORGED)
        except BaseException:  # an interrupt above all: what comes next would be out of step
            self.close()
            raise
        if header.get("nonce") != nonce:
            self._die(FORGED)
        if "error" in header:
            raise GuestError(_one_line(str(header["error"])))
        if not isinstance(header.get("payload"), dict):
            self._die(FORGED)
        return Reply(payload=header["payload"], tensors=answers)

    @property
    def output(self) -> str:
        """What the guest printed: of too much, its beginning and its end."""
        self._drain()
        return self._kept.text()

    @property
    def pid(self) -> int:
        """The guest's process."""
        self._await_guest()
        return int(self._facts["guest"])

    def close(self) -> None:
        """End the guest and all that it started, and remove its folder."""
        if self._keeper.fileno() < 0 or self._owner != os.getpid():
            return
        self._reason = self._reason or "was closed"
        try:
            with suppress(OSError):
                self._keeper.setblocking(False)
                self._keeper.shutdown(socket.SHUT_WR)
            self._listen("left", CLOSING)
            if "left" not in self._facts and "guest" in self._facts:  # the keeper was ended, too
                keeper, guest = self._facts["keeper"], self._facts["guest"]
                self._facts["left"] = cell_processes.end(keeper, guest, self._marker)
            self.left = self._facts.get("left", [])
            self._drain()
        finally:
            self._keeper.close()
            self._channel.close()
            os.close(self._output)
            self._output = -1
            cell_processes.remove(self._folder)
            _open.discard(self)

    def __enter__(self) -> Cell:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _die(self, reason: str) -> NoReturn:
        self._reason = reason
        self.close()
        raise CellDied(reason)

    def _await_guest(self) -> None:
        """Until the guest has shut itself in. A failure before that is no candidate's."""
        if self._shut_in:
            return
        self._listen("guest", STARTING)
        self._channel.settimeout(STARTING)
        try:
            self._shut_in = cell_frames.receive(self._channel) is not None
        except OSError:
            self._shut_in = False
        if not self._shut_in:
            self.close()
            said = f"{self._server.said()}\n{self.output}".strip()
            raise RuntimeError(f"a candidate's process did not start: {said}")
        self._channel.setblocking(False)

    def _exchange(self, parts: Sequence[memoryview], seconds: float) -> cell_frames.Message:
        """Send a request and receive one message, with an eye on the clock and on the guest."""
        deadline = time.monotonic() + seconds
        outgoing = deque(parts)
        message = cell_frames.reading(self.limits.memory_bytes)
        want = next(message)
        channel = self._channel.fileno()
        waiting = select.poll()
        for fd in (self._keeper.fileno(), self._output):
            waiting.register(fd, select.POLLIN)
        self._expect_silence()
        while True:
            dead = "ended" in self._facts  # then all that it has sent is there to be read
            waiting.register(channel, select.POLLIN | (select.POLLOUT if outgoing else 0))
            ready = dict(waiting.poll(0 if dead else TICK * 1000))
            state = ready.get(channel, 0)
            self._drain()
            try:
                if state & ~select.POLLOUT:
                    want = cell_pipes.fill(self._channel, message, want)
                elif dead:
                    self._fell()
                elif state:
                    cell_pipes.empty(self._channel, outgoing)
            except StopIteration as whole:
                result: cell_frames.Message = whole.value
                return result
            except (EOFError, OSError):
                self._fell()
            if self._keeper.fileno() in ready and not self._listen():
                self._die(KEEPER_ENDED)
            self._watch(deadline, seconds)

    def _expect_silence(self) -> None:
        with suppress(BlockingIOError, ConnectionResetError):
            if self._channel.recv(1):
                self._die(FORGED)

    def _watch(self, deadline: float, seconds: float) -> None:
        now = time.monotonic()
        if now > deadline:
            self._die(f"ran longer than {seconds:g} s")
        if now < self._look_due:
            return
        self._look_due = now + TICK
        if now >= self._family_due:
            self._family = cell_processes.members(self._facts["keeper"], self._facts["guest"])
            self._family_due = now + FAMILY
        most = self.limits.memory_bytes
        if cell_processes.resident(self._family) > most < cell_processes.proportional(self._family):
            self._die(f"used more than {most / 2**30:.3g} GiB of memory")

    def _fell(self) -> NoReturn:
        """The channel is at its end: say how the guest ended, or that it only closed it."""
        kept = self._listen("ended", ENDED)
        if "ended" in self._facts:
            self._die(cell_processes.ending(self._facts["ended"]))
        self._die("closed its channel without an answer" if kept else KEEPER_ENDED)

    def _listen(self, word: str = "", seconds: float = 0.0) -> bool:
        """Hear the keeper until it has said ``word``; False once it is gone."""
        deadline = time.monotonic() + seconds
        while True:
            with suppress(BlockingIOError):
                try:
                    data = self._keeper.recv(1 << 16)
                except ConnectionResetError:
                    data = b""
                if not data:
                    return False
                *lines, self._heard = (self._heard + data).split(b"\n")
                for line in lines:
                    self._facts |= json.loads(line)
            left = deadline - time.monotonic()
            if not word or word in self._facts or left <= 0:
                return True
            select.select([self._keeper], [], [], left)

    def _drain(self) -> None:
        for _ in range(64):
            try:
                data = os.read(self._output, 1 << 16) if self._output >= 0 else b""
            except BlockingIOError:
                return
            if not data:
                return
            self._kept.add(data)


def _one_line(text: str) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= 300 else f"{line[:297]}..."


@atexit.register
def _close_all() -> None:
    for cell in list(_open):
        cell.close()
