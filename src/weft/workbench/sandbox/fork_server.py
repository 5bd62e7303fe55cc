"""Fork server of the sandboxes, and the supervisor process of each worker.

The server imports the slow modules (torch takes seconds) and then only forks, so that a worker
starts in tens of milliseconds. It must never initialise CUDA, which does not survive a fork. Each
fork is a supervisor. It forks the worker and reports the worker's end. When the sandbox closes or
its process is gone, the supervisor kills all descendants of the worker and removes its folder.

``multiprocessing`` has a fork server, too. It is not used because it runs the caller's ``__main__``
again, unpickles, and leaves pipes of its own and of the resource tracker open in every child.
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
from contextlib import nullcontext, suppress
from typing import Any, NoReturn

from weft.machine import driver
from weft.machine.driver import DriverInfo
from weft.workbench.sandbox import process_tree, worker_main


def main() -> None:
    """``python -c ... FD MODULES INFO``: import, then fork on request until the other end closes.

    INFO is what the driver answers, or null where it may be asked: each worker asks it for itself.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    info = json.loads(sys.argv[3])
    with nullcontext() if info is None else driver.assume(DriverInfo(**info)):
        for name in json.loads(sys.argv[2]):
            # A module that cannot be imported fails again in the worker that needs it, and is reported.
            with suppress(ImportError, AttributeError, OSError, SyntaxError):
                importlib.import_module(name)
    ctypes.CDLL(None)  # libffi allocates its memory before the fork
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the supervisors
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # the collector would otherwise touch, and so copy, every shared page in a child
    control.sendall(json.dumps({"cuda": has_opened_gpu()}).encode() + b"\n")
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 3)
        if not message:
            return
        # A fork copies only the calling thread, with the locks that others hold: the server starts none.
        if os.fork() == 0:
            control.close()  # a supervisor that held it would keep the server's end open
            report, channel = socket.socket(fileno=fds[0]), socket.socket(fileno=fds[1])
            try:
                supervise(report, channel, fds[2])
            except Exception:  # noqa: BLE001 - the sandbox reads it in the server's errors
                traceback.print_exc()
            finally:
                os._exit(1)
        for fd in fds:  # the server's copies: with them open, the sandbox would never see the end
            os.close(fd)
        control.sendall(b".")


def has_opened_gpu() -> bool:
    """Return True if this process has opened a GPU: then its children cannot use one."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):
            if "/nvidia" in os.readlink(f"/proc/self/fd/{name}"):
                return True
    return False


def supervise(report: socket.socket, channel: socket.socket, output: int) -> NoReturn:
    """Fork the worker, report its end, wait until the sandbox closes, and clean up."""
    line = report.makefile("rb").readline()
    if not line:
        os._exit(0)
    request = json.loads(line)
    # Orphans of the worker become children of this process and not of init, so they can be found.
    process_tree.prctl(process_tree.PR_SET_CHILD_SUBREAPER, 1)
    # SIGCHLD writes a byte to this pipe, so that poll() wakes up when the worker ends.
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    worker = os.fork()
    if worker == 0:
        # A candidate gets the default signals: subprocess and Ctrl-C must work as in any program.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(wake_read)
        os.close(wake_write)
        report.close()
        worker_main.run(request, channel, output)
    signal.set_wakeup_fd(wake_write)
    os.kill(os.getpid(), signal.SIGCHLD)  # the worker may have ended before the line above
    # Only the worker may hold these ends: the sandbox sees the end of both when the worker ends.
    channel.close()
    os.close(output)
    send_report(report, supervisor=os.getpid(), worker=worker)
    watch(report, wake_read, worker)
    marker, reap_children = request["marker"], process_tree.reap_children
    remaining = process_tree.end_processes(os.getpid(), worker, marker, reap_children)
    process_tree.remove_folder(request["folder"])
    send_report(report, remaining=remaining)
    os._exit(0)


def watch(report: socket.socket, wake_read: int, worker: int) -> None:
    """Report the worker's exit status; return when the sandbox closes its end."""
    status = None
    poll = select.poll()
    poll.register(report, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        if wake_read in ready:
            with suppress(BlockingIOError):
                os.read(wake_read, 4096)
        if status is None and (status := process_tree.exit_status(worker)) is not None:
            send_report(report, exit_status=status)
        # Readable means closed: the sandbox sends nothing after its one request.
        if report.fileno() in ready:
            return


def send_report(report: socket.socket, **facts: Any) -> None:
    """Send facts to the sandbox as one JSON line."""
    with suppress(OSError):  # the sandbox's process is gone; only the clean-up remains
        report.sendall(json.dumps(facts).encode() + b"\n")
