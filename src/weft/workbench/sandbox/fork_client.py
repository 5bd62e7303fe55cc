"""Client of the fork server: start it once, request workers, end it with this process.

A fork server reads some environment variables only once (Triton's interpreter, numba's simulator,
the number of threads), so there is one server for each set of their values.
"""

from __future__ import annotations

import atexit
import getpass
import json
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict

from weft import machine
from weft.backends import environment
from weft.machine import driver
from weft.machine.driver import DriverInfo

# Modules imported before any fork. CUDA initialised before a fork does not work after it: on a machine with a
# GPU the server is told what the driver would answer, and if a Weft module opens the GPU all the same, they
# are left out. The first operation under a dispatch mode, which guarded calls have, imports torch._dynamo
# (since PyTorch 2.11): that takes a second in every worker that does not inherit it.
LIBRARY_MODULES = ("torch", "numpy", "triton", "triton.language", "numba", "torch._dynamo", "tqdm")
WEFT_MODULES = (
    *("weft.backends", "weft.workbench.check.check", "weft.ops"),
    "weft.workbench.sandbox.observed_kernels",
)
CPU_MODULES = ("numba.cuda",)  # its simulator
READ_AT_IMPORT = (
    # importing `environment` also sets these switches, and workers inherit them
    *environment.SWITCHES.values(),
    "CUDA_VISIBLE_DEVICES",
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"),
)
START_SECONDS = 180.0  # for the imports, on a machine with a cold disk cache
COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop());"
    "from weft.workbench.sandbox.fork_server import main; main()"
)


class ForkServer:
    """Process that forks supervisors; ``wait_until_ready`` waits for its imports."""

    def __init__(self, modules: tuple[str, ...], driver_info: DriverInfo | None = None) -> None:
        self.control, server_end = socket.socketpair()
        # Opened for appending: reading it moves the position, but not where the server writes.
        self.errors = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - open as long as the server
        self.cuda: bool | None = None
        info = None if driver_info is None else asdict(driver_info)
        arguments = [str(server_end.fileno()), *map(json.dumps, (modules, info, search_path()))]
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            pass_fds=(server_end.fileno(),),
            start_new_session=True,  # Ctrl-C goes to the parent process only
        )
        server_end.close()

    def wait_until_ready(self) -> None:
        if self.cuda is None:
            readable = select.select([self.control], [], [], START_SECONDS)[0]
            line = self.control.makefile("rb").readline() if readable else b""
            if not line:
                self.close()
                raise RuntimeError(f"no process can be started for candidates: {self.error_text()}")
            self.cuda = json.loads(line)["cuda"]
            self.control.settimeout(START_SECONDS)

    def error_text(self) -> str:
        """Return the end of what the server and the supervisors printed."""
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace").strip()[-2000:]

    def fork(self, fds: list[int]) -> None:
        """Fork a supervisor; raise OSError if the server has ended or does not answer."""
        # File descriptors are passed over the socket: the server was started before they existed.
        socket.send_fds(self.control, [b"+"], fds)
        if not self.control.recv(1):
            raise BrokenPipeError("the fork server has ended")

    def close(self) -> None:
        """End the server. Its supervisors and workers remain: each sandbox ends its own."""
        self.control.close()
        self.process.kill()
        self.process.wait()


_servers: dict[tuple[object, ...], ForkServer] = {}
_lock = threading.Lock()
_opened_gpu: list[ForkServer] = []  # the server whose Weft modules opened the GPU


def search_path() -> list[str]:
    """Return ``sys.path`` with absolute entries, valid in any working directory."""
    return [os.path.abspath(p) for p in sys.path]


def _server() -> ForkServer:
    """Return the server for this environment, started if necessary. The caller holds the lock."""
    has_gpu = machine.has_gpu()
    further = (() if _opened_gpu else WEFT_MODULES) + (() if has_gpu else CPU_MODULES)
    modules = (*LIBRARY_MODULES, *further)
    # With the process id: a fork of this process has the table, but must not share the server's socket.
    key = (os.getpid(), modules, *(os.environ.get(name) for name in READ_AT_IMPORT))
    server = _servers.get(key)
    if server is None or server.process.poll() is not None:
        server = _servers[key] = ForkServer(modules, driver.find() if has_gpu else None)
    return server


def prepare(wait: bool = False) -> None:
    """Start the server's imports in the background, so that the first worker starts sooner, or ``wait``."""
    with _lock:
        server = _server()
        if wait:
            with suppress(RuntimeError):  # the first worker's start fails again, and its error is reported
                server.wait_until_ready()


def fork(fds: list[int]) -> ForkServer:
    """Fork a supervisor with its report socket, the worker's channel and the worker's output."""
    with _lock:
        server = _server()
        server.wait_until_ready()
        if server.cuda and machine.has_gpu() and not _opened_gpu:
            _opened_gpu.append(server)  # by a Weft module, or by a library: then again
            server.close()
            server = _server()
            server.wait_until_ready()
        # A library that opens the GPU on import would make every worker's CUDA fail, each with a message
        # of its own that does not name the cause.
        if server.cuda and machine.has_gpu():
            raise RuntimeError("the process that candidates are forked from has opened the GPU")
        try:
            server.fork(fds)
        except OSError:  # the server was killed meanwhile: retry once with a new one
            server.close()
            server = _server()
            server.wait_until_ready()
            server.fork(fds)
        return server


def inductor_cache() -> str:
    """Return the folder in which torch.compile caches for this user, by PyTorch's own rule."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user of a container may have no name
        user = str(os.getuid())
    name = re.sub(r'[\\/:*?"<>|]', "_", user)
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{name}")


@atexit.register
def shut_down() -> None:
    """End the fork servers of this process."""
    for (pid, *_), server in list(_servers.items()):
        if pid == os.getpid():  # a fork of this process must not end its parent's servers
            with suppress(OSError):
                server.close()
    _servers.clear()
