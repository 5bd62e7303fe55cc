"""Sandbox: a worker process for one candidate, with limits and a private channel.

The sandbox sends requests; the worker replies with JSON and raw bytes, under a nonce that each reply
must return. Whatever the worker does (hang, crash, print without end, exhaust memory, leave child
processes), the caller gets one readable reason in bounded time, and after ``close`` no process and
no file of its folder remains. It is no security boundary: a worker has its user's rights. Malicious
code can read the nonce in its own process, write elsewhere on the disk, or kill the parent process.
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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from weft.core import WeftError
from weft.workbench.calls.errors import SandboxDied, WorkerError
from weft.workbench.calls.part_times import part
from weft.workbench.sandbox import fork_client, process_tree, protocol
from weft.workbench.sandbox.device_memory import NotShared

POLL_SECONDS = 0.05  # between two readings of the worker's memory
MEMBERS_SECONDS = 0.5  # between two scans of /proc for the worker's child processes
START_SECONDS = 60.0  # for a fork, on an overloaded machine
CLOSE_SECONDS = 15.0  # for the supervisor to clean up; it takes at most process_tree.END_SECONDS
EXIT_SECONDS = 5.0  # from a closed channel to the worker's end, with tearing down a CUDA context
STOP_SLACK_SECONDS = 0.0005  # that threads may run on after the first of their process has stopped
SUPERVISOR_ENDED = "ended the process that keeps it"
FORGED = "answered with a forged or broken message"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resources of a worker: ``seconds`` for each request, bytes of host memory, bytes of output.

    ``memory_bytes`` limits the resident memory of all the sandbox's processes, read every 50 ms. If
    ``device_fraction`` is set, PyTorch's allocator in the worker uses at most that part of a GPU.
    """

    seconds: float = 120.0
    memory_bytes: int = 8 << 30
    output_bytes: int = 1 << 20
    device_fraction: float | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_bytes", "output_bytes"):
            if getattr(self, name) <= 0:
                raise WeftError(
                    f"the limit {name} must be positive",
                    expected="a number above 0",
                    got=getattr(self, name),
                )


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Result of a worker's handler: JSON, and dense tensors on the device of the request.

    ``has_exported``: the worker keeps tensors that were copied from its memory, until the next request.
    """

    payload: dict[str, Any]
    tensors: list[torch.Tensor] = field(default_factory=list)
    has_exported: bool = False


_open_sandboxes: weakref.WeakSet[Sandbox] = weakref.WeakSet()


class Sandbox:
    """A worker process and its channel. ``entry`` names a function ``handlers(argument)`` in it.

    The function returns a mapping from verbs to functions from (payload, tensors) to (payload,
    tensors). The worker has its own folder, so paths in ``argument`` must be absolute. A sandbox is
    used by one thread at a time; several sandboxes may be used at once.
    """

    def __init__(
        self,
        entry: str = "weft.workbench.sandbox.observed_kernels:handlers",
        *,
        limits: Limits | None = None,
        argument: dict[str, Any] | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.remaining_processes: list[int] = []  # processes that could not be ended
        self._death_reason = ""
        self._facts: dict[str, Any] = {}  # reports: supervisor, worker, exit_status, remaining
        self._report_buffer = b""
        self._isolated = False
        self._copies = True  # large tensors of a GPU from the worker's memory, until that fails
        self._printed = protocol.OutputTail(self.limits.output_bytes)
        self._members: list[int] = []
        self._paused: list[int] = []  # the processes that pause() stopped
        self._cpu_at_pause = 0.0
        self._paused_cpu_seconds = 0.0
        self._members_due = self._memory_due = 0.0
        # In the environment of all that the worker execs: it finds processes that left the session.
        self._marker = secrets.token_hex(16)
        self._owner_pid = os.getpid()  # a fork of this process inherits the object, not the worker
        self._folder = tempfile.mkdtemp(prefix="weft-sandbox-")
        self._reports, supervisor_end = socket.socketpair()
        self._channel, worker_end = socket.socketpair()
        self._output, worker_output = os.pipe()
        os.set_blocking(self._output, False)  # read in between, or a full pipe would block the worker
        _open_sandboxes.add(self)
        try:
            try:
                fds = [supervisor_end.fileno(), worker_end.fileno(), worker_output]
                with part("fork server"):
                    self._server = fork_client.fork(fds)
            finally:
                # This process must not hold the other ends, or it would never see them close.
                supervisor_end.close()
                worker_end.close()
                os.close(worker_output)
            self._reports.sendall(self._start_request(entry, argument or {}))
        except BaseException:
            self.close()
            raise
        self._reports.setblocking(False)

    def _start_request(self, entry: str, argument: dict[str, Any]) -> bytes:
        temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), self._folder)
        request = {
            "entry": entry,
            "argument": argument,
            "folder": self._folder,
            "marker": self._marker,
            "path": fork_client.search_path(),
            "device_fraction": self.limits.device_fraction,
            "environment": {
                # By default the cache follows TMPDIR, and would be cold in every worker.
                "TORCHINDUCTOR_CACHE_DIR": fork_client.inductor_cache(),
                **os.environ,
                **temporary,
                process_tree.MARKER: self._marker,
            },
        }
        return json.dumps(request).encode() + b"\n"

    def request(
        self,
        verb: str,
        payload: dict[str, Any] | None = None,
        tensors: Sequence[torch.Tensor] = (),
        *,
        seconds: float | None = None,
        device: str = "cpu",
    ) -> Reply:
        """Call a handler. Raise WorkerError if it raised, SandboxDied if the worker has ended.

        The reply's tensors arrive on ``device``.
        """
        with part(f"request {verb}"):
            return self._request(verb, payload, tensors, seconds, device)

    def _request(
        self,
        verb: str,
        payload: dict[str, Any] | None,
        tensors: Sequence[torch.Tensor],
        seconds: float | None,
        device: str,
    ) -> Reply:
        if self._death_reason:
            raise SandboxDied(self._death_reason)
        self._resume()
        limit = seconds or self.limits.seconds
        # On the host: all pieces are queued at once, and those of a GPU's tensor would share a buffer.
        host_tensors = [protocol.to_host(t) for t in tensors]
        try:
            with part("start of a process"):
                self._await_worker()
            try:
                reply = self._ask(verb, payload or {}, host_tensors, limit, device, self._copies)
                if reply.has_exported:
                    self._ask(protocol.RELEASE, {}, (), limit)
            except NotShared:
                # Its memory cannot be opened here (a container may forbid it): the bytes travel from now on.
                self._copies = False
                reply = self._ask(protocol.RESEND, {}, (), limit, device)
        except SandboxDied:
            raise
        except (protocol.ProtocolError, NotShared):
            # After a broken message no boundary in the stream can be trusted; and what is sent again is sent.
            self._die(FORGED)
        except WorkerError:
            raise
        except BaseException:  # an interrupt above all: a later reply would answer this request
            self.close()
            raise
        return reply

    def _ask(
        self,
        verb: str,
        payload: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        seconds: float,
        device: str = "cpu",
        copies: bool = False,
    ) -> Reply:
        """Send one message and return its answer. ``copies``: large tensors of a GPU are copied from here."""
        # A late or forged reply carries another nonce, so it cannot pass for the answer to this request.
        nonce = secrets.token_hex(16)
        request = {"nonce": nonce, "verb": verb, "payload": payload, "copies": copies and device != "cpu"}
        header, reply_tensors = self._exchange(protocol.pack(request, tensors), seconds, device)
        if header.get("nonce") != nonce:
            self._die(FORGED)
        if "error" in header:
            raise WorkerError(_one_line(str(header["error"])))
        if not isinstance(header.get("payload"), dict):
            self._die(FORGED)
        return Reply(
            payload=header["payload"], tensors=reply_tensors, has_exported=bool(header.get("exported"))
        )

    def pause(self) -> None:
        """Stop the worker and all processes that it started, until the next request.

        The supervisor goes on: it ends a stopped worker like any other.
        """
        if self._paused or self._death_reason or not self._isolated:
            return
        self._paused = process_tree.stop_processes(self._facts["supervisor"], self._facts["worker"])
        self._cpu_at_pause = process_tree.cpu_seconds(self._paused)

    @property
    def paused_cpu_seconds(self) -> float:
        """CPU time that its processes used after they were stopped: a timer can send SIGCONT to its own."""
        if not self._paused:
            return self._paused_cpu_seconds
        used = process_tree.cpu_seconds(self._paused) - self._cpu_at_pause
        return self._paused_cpu_seconds + max(0.0, used - STOP_SLACK_SECONDS)

    def _resume(self) -> None:
        if self._paused:
            self._paused_cpu_seconds = self.paused_cpu_seconds
            paused, self._paused = self._paused, []
            process_tree.continue_processes(paused)

    @property
    def has_ended(self) -> bool:
        """True if the worker answers no further request."""
        return bool(self._death_reason)

    @property
    def output(self) -> str:
        """Text that the worker printed; of a long text, its beginning and its end."""
        self._drain_output()
        return self._printed.text()

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        self._await_worker()
        return int(self._facts["worker"])

    def close(self) -> None:
        """End the worker and all processes that it started, and remove its folder."""
        # A fork of this process must not end its parent's workers.
        if self._reports.fileno() < 0 or self._owner_pid != os.getpid():
            return
        self._death_reason = self._death_reason or "was closed"
        try:
            with suppress(OSError):
                self._reports.setblocking(False)
                self._reports.shutdown(socket.SHUT_WR)  # asks the supervisor to clean up
            self._read_reports("remaining", CLOSE_SECONDS)
            if "remaining" not in self._facts and "worker" in self._facts:
                # The supervisor was killed, too: clean up from here.
                supervisor, worker = self._facts["supervisor"], self._facts["worker"]
                remaining = process_tree.end_processes(supervisor, worker, self._marker)
                self._facts["remaining"] = remaining
            self.remaining_processes = self._facts.get("remaining", [])
            self._drain_output()
        finally:
            self._reports.close()
            self._channel.close()
            os.close(self._output)
            self._output = -1
            process_tree.remove_folder(self._folder)
            _open_sandboxes.discard(self)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _die(self, reason: str) -> NoReturn:
        self._death_reason = reason
        self.close()
        raise SandboxDied(reason)

    def _await_worker(self) -> None:
        """Wait until the worker is isolated. A failure before that is not the candidate's."""
        if self._isolated:
            return
        self._read_reports("worker", START_SECONDS)
        self._channel.settimeout(START_SECONDS)
        try:
            self._isolated = protocol.receive(self._channel) is not None
        except OSError:
            self._isolated = False
        if not self._isolated:
            self.close()
            text = f"{self._server.error_text()}\n{self.output}".strip()
            raise RuntimeError(f"a candidate's process did not start: {text}")
        self._channel.setblocking(False)

    def _exchange(self, pieces: Iterable[memoryview], seconds: float, device: str) -> protocol.Message:
        """Send a request and receive one message, while enforcing the limits."""
        deadline = time.monotonic() + seconds
        # Sending and receiving are interleaved: two processes that only send would fill both buffers
        # and wait for each other.
        outgoing = deque(pieces)
        reader = protocol.read_message(self._reply_bytes(device), device)
        unfilled = next(reader)
        channel = self._channel.fileno()
        poll = select.poll()
        for fd in (self._reports.fileno(), self._output):
            poll.register(fd, select.POLLIN)
        self._check_no_unrequested_reply()
        while True:
            # After the worker's end no more bytes arrive: read what is there without waiting.
            has_ended = "exit_status" in self._facts
            poll.register(channel, select.POLLIN | (select.POLLOUT if outgoing else 0))
            ready = dict(poll.poll(0 if has_ended else POLL_SECONDS * 1000))
            state = ready.get(channel, 0)
            self._drain_output()
            try:
                # Receive before sending: POLLHUP and POLLERR are seen as the channel's end by a read.
                if state & ~select.POLLOUT:
                    unfilled = protocol.receive_available(self._channel, reader, unfilled)
                elif has_ended:
                    self._die_of_closed_channel()
                elif state:
                    protocol.send_available(self._channel, outgoing)
            except StopIteration as stop:
                message: protocol.Message = stop.value
                return message
            except (EOFError, OSError):
                self._die_of_closed_channel()
            if self._reports.fileno() in ready and not self._read_reports():
                self._die(SUPERVISOR_ENDED)
            self._enforce_limits(deadline, seconds)

    def _reply_bytes(self, device: str) -> int:
        """Return the largest size of a reply's tensors: the limit of host memory, or the GPU's memory."""
        if device == "cpu":
            return self.limits.memory_bytes
        return torch.cuda.get_device_properties(torch.device(device)).total_memory

    def _check_no_unrequested_reply(self) -> None:
        # Bytes that arrive before the request are an answer prepared without it.
        with suppress(BlockingIOError, ConnectionResetError):
            if self._channel.recv(1):
                self._die(FORGED)

    def _enforce_limits(self, deadline: float, seconds: float) -> None:
        now = time.monotonic()
        if now > deadline:
            self._die(f"ran longer than {seconds:g} s")
        if now < self._memory_due:
            return
        self._memory_due = now + POLL_SECONDS
        if now >= self._members_due:
            facts = self._facts
            self._members = process_tree.members(facts["supervisor"], facts["worker"])
            self._members_due = now + MEMBERS_SECONDS
        limit = self.limits.memory_bytes
        # The exact figure is slow to read: only if the cheap upper bound exceeds the limit.
        if process_tree.resident_bytes(self._members) <= limit:
            return
        if process_tree.proportional_bytes(self._members) > limit:
            self._die(f"used more than {limit / 2**30:.3g} GiB of memory")

    def _die_of_closed_channel(self) -> NoReturn:
        """Report how the worker ended, or that it only closed its channel."""
        # The channel closes before the process is reaped: wait for the supervisor to report how it ended.
        supervised = self._read_reports("exit_status", EXIT_SECONDS)
        if "exit_status" in self._facts:
            failures = [n for n in self.output.splitlines() if n.startswith(protocol.FAILED)]
            if failures:
                self._die(
                    f"failed outside of a call: {_one_line(failures[-1].removeprefix(protocol.FAILED))}"
                )
            self._die(process_tree.describe_exit(self._facts["exit_status"]))
        self._die("closed its channel without an answer" if supervised else SUPERVISOR_ENDED)

    def _read_reports(self, fact: str = "", seconds: float = 0.0) -> bool:
        """Read the supervisor's reports until ``fact`` is known; return False if it has ended."""
        deadline = time.monotonic() + seconds
        while True:
            with suppress(BlockingIOError):
                try:
                    data = self._reports.recv(1 << 16)
                except ConnectionResetError:  # the supervisor was killed with unread data
                    data = b""
                if not data:
                    return False
                # A report may arrive in pieces: the part after the last newline waits for its rest.
                *lines, self._report_buffer = (self._report_buffer + data).split(b"\n")
                for line in lines:
                    self._facts |= json.loads(line)
            seconds_left = deadline - time.monotonic()
            if not fact or fact in self._facts or seconds_left <= 0:
                return True
            select.select([self._reports], [], [], seconds_left)

    def _drain_output(self) -> None:
        for _ in range(64):  # a worker that prints without end must not hold up the deadline
            try:
                data = os.read(self._output, 1 << 16) if self._output >= 0 else b""
            except BlockingIOError:
                return
            if not data:
                return
            self._printed.add(data)


def _one_line(text: str) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= 300 else f"{line[:297]}..."


def end_workers() -> None:
    """End the workers of all sandboxes, also of those that other threads use.

    A request in progress then raises :class:`SandboxDied` in its thread.
    """
    with suppress(RuntimeError):  # another thread opens a sandbox meanwhile: a later call ends it
        for sandbox in list(_open_sandboxes):
            with suppress(OSError):
                sandbox._reports.shutdown(socket.SHUT_WR)  # asks the supervisor to clean up


@atexit.register
def _close_all() -> None:
    for sandbox in list(_open_sandboxes):
        sandbox.close()
