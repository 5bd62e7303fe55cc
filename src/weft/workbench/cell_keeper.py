"""The fork server that cells start from, and the keeper that stands between it and each guest.

The server imports what is slow to import (torch takes seconds) and then only forks; a guest starts
in tens of milliseconds. It must never initialise CUDA, which does not survive a fork. Each fork is
a keeper, which forks the guest, says how it ended, and, when the judge is done or gone, kills all
that descends from the guest and removes its folder.

Not multiprocessing's fork server: that one runs the caller's ``__main__`` again, unpickles, and
leaves its own and the resource tracker's pipes open in every guest.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from weft.workbench import cell_guest, cell_processes


def main() -> None:
    """``python -c ... FD MODULES``: import, then fork on request until the other end closes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in json.loads(sys.argv[2]):
        # One that cannot be imported fails again in the guest that needs it, where it is reported.
        with suppress(ImportError, AttributeError, OSError, SyntaxError):
            importlib.import_module(name)
    ctypes.CDLL(None)  # so that libffi's own memory is there before the fork
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the keepers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    control.sendall(json.dumps({"cuda": cuda_open()}).encode() + b"\n")
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 3)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            keeper, channel = socket.socket(fileno=fds[0]), socket.socket(fileno=fds[1])
            try:
                keep(keeper, channel, fds[2])
            except Exception:  # noqa: BLE001 - the judge reads it in the server's errors
                traceback.print_exc()
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)
        control.sendall(b".")


def cuda_open() -> bool:
    """Whether this process has opened a GPU: then its children cannot use one."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):
            if "/nvidia" in os.readlink(f"/proc/self/fd/{name}"):
                return True
    return False


def keep(keeper: socket.socket, channel: socket.socket, output: int) -> NoReturn:
    """Fork the guest, report its end, wait for the judge to close, and clear up."""
    line = keeper.makefile("rb").readline()
    if not line:
        os._exit(0)
    request = json.loads(line)
    cell_processes.prctl(cell_processes.PR_SET_CHILD_SUBREAPER, 1)
    wake, wakes = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    guest = os.fork()
    if guest == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(wake)
        os.close(wakes)
        keeper.close()
        cell_guest.become(request, channel, output)
    signal.set_wakeup_fd(wakes)
    os.kill(os.getpid(), signal.SIGCHLD)  # the guest may have ended before the line above
    channel.close()
    os.close(output)
    say(keeper, keeper=os.getpid(), guest=guest)
    watch(keeper, wake, guest)
    over = cell_processes.childless
    left = cell_processes.end(os.getpid(), guest, request["marker"], over)
    cell_processes.remove(request["folder"])
    say(keeper, left=left)
    os._exit(0)


def watch(keeper: socket.socket, wake: int, guest: int) -> None:
    """Until the judge closes its end; say when and how the guest ended."""
    ended = None
    waiting = select.poll()
    waiting.register(keeper, select.POLLIN)
    waiting.register(wake, select.POLLIN)
    while True:
        ready = [fd for fd, _ in waiting.poll()]
        if wake in ready:
            with suppress(BlockingIOError):
                os.read(wake, 4096)
        if ended is None and (ended := cell_processes.ended(guest)) is not None:
            say(keeper, ended=ended)
        if keeper.fileno() in ready:
            return


def say(judge: socket.socket, **words: Any) -> None:
    with suppress(OSError):  # the judge has gone; what is left is to clear up
        judge.sendall(json.dumps(words).encode() + b"\n")
