"""The processes of a run: how they connect, and how they end together.

``torchrun`` gives each process its rank and the address of a key-value store (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, MASTER_PORT). The processes form one group over it: gloo for tensors on a CPU,
NCCL for those on GPUs. If one fails, the others would wait for it forever. So the first process that
fails records that in the store and reports the error; a thread in each of the others sees the record and
ends its process silently. The thread also counts in the store while its process lives. torchrun sends SIGTERM
to all once a process is gone; if gloo does not notice, Python's handler never runs in the main thread, and
the thread reports the process that no longer counts.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from weft.core import WeftError
from weft.core.errors import print_error

POLL_SECONDS = 0.5  # between two looks at the store
# A silent process waits this long, so that torchrun sees the reporting process end first and shows its
# exit code.
SILENT_EXIT_DELAY = 5.0
# Processes that fail in the same call reach the store within this time of each other.
JOINT_FAILURE_SECONDS = 3.0
EXIT_FAILED = 2
# After a SIGTERM, a process whose count stands still for so long is gone.
LOST_SECONDS = 5.0
LEFT = 1 << 40  # added to the count of a process that leaves, which counts no more
# Messages of gloo for a connection whose other end is gone; NCCL has its own exception.
CONNECTION_LOST = ("gloo", "Connection closed by peer", "Connection reset by peer")
RESUME_HINT = "finished checkpoints are intact: start it again with the same command and --resume"


class RunProcess:
    """Position of this process in a run.

    Attributes:
        rank, world: number of this process, and number of processes.
        device: where this process computes.
    """

    rank, world = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def is_main(self) -> bool:
        """True in the process that prints and writes files."""
        return self.rank == 0


class ProcessGroup(RunProcess):
    """A run's processes; this base class is a group of one."""

    def all_failed_together(self) -> bool:
        """True if all processes raise an error now, so that they can still do something together."""
        return True


class TorchrunGroup(ProcessGroup):
    """Several processes, started by torchrun or by anything that sets the same variables.

    Raises:
        WeftError: a variable is missing or not a number.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(torch.device(kind))
        self.rank, self.world = _integer_variable("RANK"), _integer_variable("WORLD_SIZE")
        self.local_rank = _integer_variable("LOCAL_RANK")
        address, port = _variable("MASTER_ADDR"), _integer_variable("MASTER_PORT")
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
        # A connection of its own: on the process group's, a blocking call delays all calls behind it.
        self._store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
        # Keys include the restart count: a restarted run must not see its predecessor's failure.
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"weft/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{restarts}/"
        self._leaving, self._reports = threading.Event(), False
        self._signals = _SignalLog() if threading.current_thread() is threading.main_thread() else None
        # A daemon: it must not keep a process alive whose main thread has ended.
        self._watcher = threading.Thread(target=self._watch, name="weft-group", daemon=True)
        self._watcher.start()

    def take_device(self) -> None:
        """Select the GPU of this process's local rank.

        Raises:
            WeftError: the machine has fewer GPUs than processes.
        """
        if self.device.type != "cuda":
            return
        count = torch.cuda.device_count()
        if self.local_rank >= count:
            expected = f"at most {count} processes on this machine, one a GPU"
            got, hint = f"one more, {self.local_rank}", "a smaller --nproc-per-node"
            raise WeftError("torchrun", expected=expected, got=got, hint=hint)
        self.device = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(self.device)

    def all_failed_together(self) -> bool:
        # Each failing process adds 1; only if all of them do can they write a checkpoint together.
        deadline, key = time.monotonic() + JOINT_FAILURE_SECONDS, self._prefix + "failed"
        count = self._store.add(key, 1)
        while count < self.world and time.monotonic() < deadline:
            time.sleep(0.05)
            # Adding 0 reads the count; get() would block until the key exists.
            count = self._store.add(key, 0)
        return count >= self.world

    def claim_report(self) -> bool:
        """Return True in the first process that fails, which must report the error."""
        self._reports = True  # set before the record, or the watcher could end this process
        try:
            self._reports = self._store.add(self._prefix + "reported", 1) == 1
        except RuntimeError:  # the store ended with its process: no other process can report
            return True
        return self._reports

    def leave(self) -> None:
        """Wait for all processes, then leave the group."""
        self._store.add(f"{self._prefix}alive/{self.rank}", LEFT)
        self._leaving.set()
        barrier(self)
        dist.destroy_process_group()

    def close(self) -> None:
        """Stop recording signals."""
        if self._signals is not None:
            self._signals.close()

    def exit_silently(self) -> None:
        """End this process after another one's failure, without a message.

        It uses os._exit, because a collective that waits for the failed process never returns.
        """
        time.sleep(SILENT_EXIT_DELAY)
        sys.stderr.flush()
        os._exit(EXIT_FAILED)

    def _watch(self) -> None:
        counts: dict[int, int] = {}
        changed: dict[int, float] = {}  # when each process last counted, from the SIGTERM on
        while not self._leaving.wait(POLL_SECONDS):
            try:
                self._store.add(f"{self._prefix}alive/{self.rank}", 1)
                failed = self._store.check([self._prefix + "reported"])
                if not failed and self._signals is not None and self._signals.has_sigterm():
                    for rank in range(self.world):
                        count = self._store.add(f"{self._prefix}alive/{rank}", 0)
                        if counts.get(rank) != count or count >= LEFT:
                            counts[rank], changed[rank] = count, time.monotonic()
            except RuntimeError:  # the store's process is gone
                failed = True
            if self._reports:
                return
            if failed:
                self.exit_silently()
            lost = [rank for rank, at in changed.items() if time.monotonic() - at > LOST_SECONDS]
            if lost:
                self._report_lost(lost[0])

    def _report_lost(self, rank: int) -> None:
        """End this process, whose main thread waits for a lost one, with a message in one of them."""
        if not self.claim_report():
            self.exit_silently()
        got = f"no sign of process {rank} for {LOST_SECONDS:.0f} s"
        print_error(WeftError(self.lost_message(), got=got, hint=RESUME_HINT))
        sys.stderr.flush()
        os._exit(EXIT_FAILED)

    def lost_message(self) -> str:
        """Return what an error says where another process has ended without a report."""
        return f"another of the run's {self.world} processes is gone"


class _SignalLog:
    """Signals that this process has received, also while its main thread is in a call that never returns."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._sigterm = False

    def has_sigterm(self) -> bool:
        """Return True from the first SIGTERM on."""
        with suppress(BlockingIOError):
            self._sigterm |= signal.SIGTERM in os.read(self._reader, 4096)
        return self._sigterm

    def close(self) -> None:
        """Stop; the pipe stays open for a thread that still reads it."""
        signal.set_wakeup_fd(self._previous)


def barrier(group: ProcessGroup) -> None:
    """Wait until all processes have called this."""
    if group.world > 1:
        # A CPU tensor goes over gloo: NCCL's would need the GPU, which may be busy or have failed.
        dist.all_reduce(torch.zeros(1))


@contextmanager
def joined(kind: str) -> Iterator[ProcessGroup]:
    """Join the group of processes that this one was started with; ``kind`` is cuda or cpu.

    An exception inside is raised by one process only; the others end silently. torchrun sends SIGTERM
    to all as soon as one process is gone: the reporting process ignores it until its error is printed.

    Raises:
        WeftError: the environment is incomplete; or another process has died without a report.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield ProcessGroup(torch.device(kind))
        return
    group = TorchrunGroup(kind)
    previous = _set_sigterm(_sigterm_unless_reporting)
    try:
        group.take_device()
        yield group
        # Inside the try: a process that dies while the others leave is reported too.
        group.leave()
        _set_sigterm(previous)
    except BaseException as error:
        if not group.claim_report():
            _set_sigterm(signal.SIG_DFL)
            group.exit_silently()
        if _is_connection_lost(error):
            got = str(error).partition("\n")[0]
            raise WeftError(group.lost_message(), got=got, hint=RESUME_HINT) from error
        raise
    finally:
        group.close()


def _set_sigterm(handler: Any) -> Any:
    """Set the handler of SIGTERM and return the previous one. Only a main thread can."""
    if threading.current_thread() is threading.main_thread():
        return signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
    return None


def _sigterm_unless_reporting(number: int, frame: FrameType | None) -> None:
    """End by this signal, unless an exception is being handled: it ends this process anyway."""
    if sys.exc_info()[1] is None:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _is_connection_lost(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in CONNECTION_LOST)


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        expected = f"{name} beside WORLD_SIZE {os.environ['WORLD_SIZE']}"
        hint = "torchrun sets them: torchrun --nproc-per-node 2 -m weft train"
        raise WeftError("the environment", expected=expected, got="none", hint=hint)
    return value


def _integer_variable(name: str) -> int:
    value = _variable(name)
    if not value.isdigit():
        raise WeftError(f"the environment's {name}", expected="a whole number", got=value)
    return int(value)
