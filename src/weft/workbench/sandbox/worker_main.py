"""Main function of a worker process: isolate the process, then answer requests one after another.

The candidate's code is imported at the first request, after the isolation.
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

from weft import machine
from weft.workbench.sandbox import process_tree, protocol

Handler = Callable[[dict[str, Any], list[torch.Tensor]], tuple[dict[str, Any], Sequence[Any]]]


def run(request: dict[str, Any], channel: socket.socket, output: int) -> NoReturn:
    """Turn a new fork of the supervisor into the worker; never return."""
    code = 1
    try:
        isolate(request, output)
        protocol.send(channel, protocol.pack({"isolated": True}, ()))
        code = serve(channel, request)
    except BaseException as error:  # noqa: BLE001 - it goes to the worker's output, which the parent shows
        traceback.print_exc()
        print(f"\n{protocol.FAILED}{' '.join(error_line(error).split())}", file=sys.stderr)
    finally:
        flush_output()
        os._exit(code)  # not sys.exit: the fork server's atexit handlers must not run here


def isolate(request: dict[str, Any], output: int) -> None:
    """Give the process its own session, environment, folder and output."""
    supervisor = os.getppid()
    # A session of its own: a signal to the candidate's group cannot reach the sandbox, and killing the
    # group ends all that stayed in it.
    os.setsid()
    process_tree.prctl(process_tree.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it died before the line above, so no signal will come
        os._exit(1)
    # A crash is an ordinary verdict here, and a core dump of such a process can have gigabytes.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, the system must kill this process first
    null = os.open(os.devnull, os.O_RDONLY)
    # By dup2, not by sys.stdout alone: C code and child processes print to the descriptors.
    for fd, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(fd, target)
    os.close(null)
    os.close(output)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(fd, "w", buffering=1, errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.enable(sys.stderr)  # a segmentation fault then prints the Python lines that led to it
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    tempfile.tempdir = None  # it was cached before the fork
    sys.path[:] = request["path"]
    sys.argv[:] = ["weft-worker"]
    importlib.invalidate_caches()


def serve(channel: socket.socket, request: dict[str, Any]) -> int:
    """Answer requests until the channel closes; return the code to exit with."""
    handlers: Mapping[str, Handler] | None = None
    # The last reply and its tensors, if the parent process copies some of these by itself.
    last_reply: tuple[dict[str, Any], Sequence[Any], list[torch.Tensor]] | None = None
    while (message := protocol.receive(channel)) is not None:
        header, tensors = message
        nonce, verb = header["nonce"], header["verb"]
        exported: list[torch.Tensor] | None = [] if header.get("copies") else None
        try:
            payload, outputs = last_reply[:2] if last_reply and verb == protocol.RESEND else ({}, ())
            last_reply = None
            if verb not in (protocol.RELEASE, protocol.RESEND):
                handlers = handlers or import_handlers(request)
                payload, outputs = handlers[verb](header["payload"], tensors)
            pieces = protocol.pack({"nonce": nonce, "payload": payload}, outputs, exported)
            last_reply = (payload, outputs, exported) if exported else None
            del payload, outputs, exported  # a waiting worker must not hold memory
        except SystemExit as stop:
            return exit_code(stop)
        except BaseException as error:  # noqa: BLE001 - a candidate's code may raise anything
            traceback.print_exc()
            pieces = protocol.pack({"nonce": nonce, "error": error_line(error)}, ())
        flush_output()
        protocol.send(channel, pieces)
        del header, message, pieces, tensors
    return 0


def import_handlers(request: dict[str, Any]) -> Mapping[str, Handler]:
    """Return the handlers of the request's entry, a function named ``module:function``."""
    machine.has_gpu()  # asks the driver, before any of the candidate's code is here
    fraction = request["device_fraction"]
    if fraction is not None and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(fraction)
    module, _, function = request["entry"].partition(":")
    make_handlers = getattr(importlib.import_module(module), function)
    handlers: Mapping[str, Handler] = make_handlers(request["argument"])
    return handlers


def exit_code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return (stop.code or 0) & 255
    print(stop.code, file=sys.stderr)
    return 1


def error_line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a candidate's exception may fail even at this
        text = "(its message cannot be read)"
    return f"{type(error).__name__}: {text}"


def flush_output() -> None:
    """Flush printed text before the reply is sent; the candidate may have closed the stream."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
