"""The judge's side of the fork server: started once, asked for guests, ended with the process.

A fork server has read some environment variables for good (Triton's interpreter, numba's simulator,
the number of threads), so there is one for each set of their values.
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

from weft import machine
from weft.backends import environment

# Imported before anything is forked. On a machine with a GPU nothing of Weft's that asks the driver
# (``weft.backends``): CUDA that was started before a fork does not work after it.
HEAVY = ("torch", "numpy", "triton", "triton.language", "numba", "torch._dynamo")
OURS = ("weft.backends", "weft.workbench.check", "weft.ops", "numba.cuda")
READ_AT_IMPORT = (
    *environment.SWITCHES.values(),  # imported here for what it sets, too: guests inherit it
    "CUDA_VISIBLE_DEVICES",
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"),
)
STARTING = 180.0  # seconds for the imports, on a machine whose disk is cold
COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop());"
    "from weft.workbench.cell_keeper import main; main()"
)


class ForkServer:
    """One process that forks; ``ready`` waits until it can."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.control, theirs = socket.socketpair()
        self.errors = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - kept; appended to, wherever it was read
        self.cuda: bool | None = None
        arguments = [str(theirs.fileno()), json.dumps(modules), json.dumps(search_path())]
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C is the judge's to act upon
        )
        theirs.close()

    def ready(self) -> None:
        if self.cuda is None:
            heard = select.select([self.control], [], [], STARTING)[0]
            line = self.control.makefile("rb").readline() if heard else b""
            if not line:
                self.close()
                raise RuntimeError(f"no process can be started for candidates: {self.said()}")
            self.cuda = json.loads(line)["cuda"]
            self.control.settimeout(STARTING)

    def said(self) -> str:
        """The end of what it and the keepers printed."""
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace").strip()[-2000:]

    def fork(self, fds: list[int]) -> None:
        """Raises OSError where the server has ended, or does not answer."""
        socket.send_fds(self.control, [b"+"], fds)
        if not self.control.recv(1):
            raise BrokenPipeError("the fork server has ended")

    def close(self) -> None:
        """Keepers and guests stay: each cell ends its own."""
        self.control.close()
        self.process.kill()
        self.process.wait()


_servers: dict[tuple[object, ...], ForkServer] = {}
_lock = threading.Lock()


def search_path() -> list[str]:
    """``sys.path`` as it means the same from another folder."""
    return [os.path.abspath(p) for p in sys.path]


def _server() -> ForkServer:
    """Under the lock: the server for this environment, started if it is not there."""
    gpu = machine.has_gpu()
    modules = HEAVY if gpu else (*HEAVY, *OURS)
    key = (os.getpid(), modules, *(os.environ.get(name) for name in READ_AT_IMPORT))
    server = _servers.get(key)
    if server is None or server.process.poll() is not None:
        server = _servers[key] = ForkServer(modules)
    return server


def prepare() -> None:
    """Begin to import what guests need, in the background; a first cell then starts sooner."""
    with _lock:
        _server()


def fork(fds: list[int]) -> ForkServer:
    """Have a keeper and its guest forked, with these three: keeper's end, guest's end, output."""
    with _lock:
        server = _server()
        server.ready()
        if server.cuda and machine.has_gpu():
            raise RuntimeError("the process that candidates are forked from has opened the GPU")
        try:
            server.fork(fds)
        except OSError:  # it was killed since; once more, with another
            server.close()
            server = _server()
            server.ready()
            server.fork(fds)
        return server


def inductor_cache() -> str:
    """Where torch.compile caches for this user, by the rule that PyTorch has for it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    name = re.sub(r'[\\/:*?"<>|]', "_", user)
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{name}")


@atexit.register
def shut_down() -> None:
    """End the fork servers of this process."""
    for (pid, *_), server in list(_servers.items()):
        if pid == os.getpid():
            with suppress(OSError):
                server.close()
    _servers.clear()
