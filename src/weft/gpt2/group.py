"""The processes of one run: how they find each other, and how they end together.

``torchrun`` tells each process its number and the address of a store that all reach (RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). Over it they form one group: gloo for tensors on
a CPU, NCCL for those on GPUs. Where one fails, the others wait for it for ever: so the first to
fail says so in the store, and a thread in each of the others ends that one, without a word.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from weft.core import WeftError

LOOK, LINGER = 0.5, 5.0  # seconds between looks; and those that the one which tells needs to end
GRACE = 3.0  # seconds within which processes that fail at the same come to say so
FAILED = 2
# What gloo says of a connection whose other end is gone; NCCL has an exception of its own.
GONE = ("gloo", "Connection closed by peer", "Connection reset by peer")
HINT = "what was kept stands: start it again with the same command and --resume"


class Group:
    """One process, which needs no other.

    Attributes:
        rank, world: this process' number, and how many there are.
        device: where this process computes.
    """

    rank, world = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def first(self) -> bool:
        """Whether this process is the one that talks and writes."""
        return self.rank == 0

    def together(self) -> bool:
        """Whether all processes failed at the same, and can still do something together."""
        return True


class Torchrun(Group):
    """Several processes, started by torchrun or by whatever sets the same variables.

    Raises:
        WeftError: a variable is missing or no number.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(torch.device(kind))
        self.rank, self.world = _number("RANK"), _number("WORLD_SIZE")
        self.local = _number("LOCAL_RANK")
        address, port = _word("MASTER_ADDR"), _number("MASTER_PORT")
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
        # A connection of its own: the group's waits in a thread's call, and others behind it.
        self._store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._key = f"weft/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{again}/"
        self._leaving, self._tells = threading.Event(), False
        self._watcher = threading.Thread(target=self._watch, name="weft-group", daemon=True)
        self._watcher.start()

    def take_device(self) -> None:
        """Compute on the GPU of this process' number on its machine.

        Raises:
            WeftError: the machine has fewer GPUs than processes.
        """
        if self.device.type != "cuda":
            return
        count = torch.cuda.device_count()
        if self.local >= count:
            expected = f"at most {count} processes on this machine, one a GPU"
            hint = "a smaller --nproc-per-node"
            raise WeftError("torchrun", expected=expected, got=f"one more, {self.local}", hint=hint)
        self.device = torch.device("cuda", self.local)
        torch.cuda.set_device(self.device)

    def together(self) -> bool:
        until, key = time.monotonic() + GRACE, self._key + "failed"
        count = self._store.add(key, 1)
        while count < self.world and time.monotonic() < until:
            time.sleep(0.05)
            count = self._store.add(key, 0)
        return count >= self.world

    def tells(self) -> bool:
        """Whether this process is the first to fail, and so the one to say why."""
        self._tells = True
        try:
            self._tells = self._store.add(self._key + "told", 1) == 1
        except RuntimeError:  # the store went with the process that held it: nobody else can tell
            return True
        return self._tells

    def leave(self) -> None:
        """Wait until all are done, and part."""
        self._leaving.set()
        wait(self)
        dist.destroy_process_group()

    def end(self) -> None:
        """End this process for another's failure: without a word, and at once, since a call that
        waits for the other would never return."""
        time.sleep(LINGER)  # so that torchrun sees the one which failed end first
        sys.stderr.flush()
        os._exit(FAILED)

    def _watch(self) -> None:
        while not self._leaving.wait(LOOK):
            try:
                told = self._store.check([self._key + "told"])
            except RuntimeError:
                told = True
            if self._tells:
                return
            if told:
                self.end()


def wait(group: Group) -> None:
    """Until all processes are here."""
    if group.world > 1:
        dist.all_reduce(torch.zeros(1))


@contextmanager
def joined(kind: str) -> Iterator[Group]:
    """The group of the processes that this one was started with; ``kind`` is cuda or cpu.

    Whatever is raised within is raised by one process alone; the others end without a word. That
    one outlives torchrun's SIGTERM, sent to all as soon as one is gone, until its error is told.

    Raises:
        WeftError: the environment is half set; or another process is gone without a word.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield Group(torch.device(kind))
        return
    group = Torchrun(kind)
    before = _at_sigterm(_after_the_error)
    try:
        group.take_device()
        yield group
        group.leave()
        _at_sigterm(before)
    except BaseException as error:
        if not group.tells():
            _at_sigterm(signal.SIG_DFL)
            group.end()
        if _gone(error):
            got = str(error).partition("\n")[0]
            what = f"another of the run's {group.world} processes is gone"
            raise WeftError(what, got=got, hint=HINT) from error
        raise


def _at_sigterm(handler: Any) -> Any:
    """Have SIGTERM do this, and return what it did. Only a main thread can."""
    if threading.current_thread() is threading.main_thread():
        return signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
    return None


def _after_the_error(number: int, frame: FrameType | None) -> None:
    """End by this signal, unless an error is on its way up: it ends this process anyway."""
    if sys.exc_info()[1] is None:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _gone(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in GONE)


def _word(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        expected = f"{name} beside WORLD_SIZE {os.environ['WORLD_SIZE']}"
        hint = "torchrun sets them: torchrun --nproc-per-node 2 -m weft train"
        raise WeftError("the environment", expected=expected, got="none", hint=hint)
    return value


def _number(name: str) -> int:
    value = _word(name)
    if not value.isdigit():
        raise WeftError(f"the environment's {name}", expected="a whole number", got=value)
    return int(value)
