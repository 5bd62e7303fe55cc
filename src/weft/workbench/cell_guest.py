"""A cell's inside: the guest shuts itself in, then answers one request after the other.

What is a stranger's is imported at the first request, once the walls stand.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import resource
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch

from weft.workbench import cell_frames, cell_processes

Handler = Callable[[dict[str, Any], list[torch.Tensor]], tuple[dict[str, Any], Sequence[Any]]]


def become(request: dict[str, Any], channel: socket.socket, output: int) -> NoReturn:
    """From a fresh fork to the guest; never returns."""
    code = 1
    try:
        shut_in(request, output)
        cell_frames.send(channel, cell_frames.pack({"walls": "stand"}, ()))
        code = serve(channel, request)
    except BaseException:  # noqa: BLE001 - it goes to the guest's output, which the parent shows
        traceback.print_exc()
    finally:
        flush()
        os._exit(code)


def shut_in(request: dict[str, Any], output: int) -> None:
    """A session, an environment, a folder and an output of its own."""
    keeper = os.getppid()
    os.setsid()
    cell_processes.prctl(cell_processes.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:  # it died before the line above
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as mine:
        mine.write("1000")  # where memory runs out, the system is to end this and not the judge
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, to in ((null, 0), (output, 1), (output, 2)):
        os.dup2(fd, to)
    os.close(null)
    os.close(output)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(fd, "w", buffering=1, errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.enable(sys.stderr)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    tempfile.tempdir = None  # what was found before the fork
    sys.path[:] = request["path"]
    sys.argv[:] = ["weft-cell"]
    importlib.invalidate_caches()


def serve(channel: socket.socket, request: dict[str, Any]) -> int:
    """Answer until the channel closes; the code to exit with."""
    handlers: Mapping[str, Handler] | None = None
    while (message := cell_frames.receive(channel)) is not None:
        header, tensors = message
        nonce = header["nonce"]
        try:
            if handlers is None:
                handlers = open_entry(request)
            answer, results = handlers[header["verb"]](header["payload"], tensors)
            parts = cell_frames.pack({"nonce": nonce, "payload": answer}, results)
            del answer, results  # a waiting guest holds none
        except SystemExit as stop:
            return exit_code(stop)
        except BaseException as error:  # noqa: BLE001 - a stranger's code may raise anything
            traceback.print_exc()
            parts = cell_frames.pack({"nonce": nonce, "error": one_line(error)}, ())
        flush()
        cell_frames.send(channel, parts)
        del header, message, parts, tensors
    return 0


def open_entry(request: dict[str, Any]) -> Mapping[str, Handler]:
    fraction = request["device_fraction"]
    if fraction is not None and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(fraction)
    module, _, function = request["entry"].partition(":")
    found: Mapping[str, Handler] = getattr(importlib.import_module(module), function)(
        request["argument"]
    )
    return found


def exit_code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return (stop.code or 0) & 255
    print(stop.code, file=sys.stderr)
    return 1


def one_line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a stranger's exception may break even at this
        text = "(its message cannot be read)"
    return f"{type(error).__name__}: {text}"


def flush() -> None:
    """What was printed goes out before the answer does; a stranger may have closed the stream."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
