"""What guests of the cell's tests do: an echo, and everything that a candidate should not do."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from weft.workbench import cell_frames, cell_processes

Answer = tuple[dict[str, Any], Sequence[torch.Tensor]]
MIB = 1 << 20


def echo(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    return payload, tensors


def turned(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    return {}, [t.transpose(0, -1) for t in tensors]


def work(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    """A product on every thread, and a gradient, which starts autograd's threads."""
    torch.set_num_threads(2)
    a = torch.arange(360_000, dtype=torch.float64).reshape(600, 600).div(1e7).requires_grad_()
    out = (a @ a.T).exp().log()
    out.sum().backward()
    return {"threads": torch.get_num_threads()}, [out.detach(), a.grad]


def around(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    """What a guest sees of its surroundings."""
    return {
        "folder": os.getcwd(),
        "temporary": tempfile.gettempdir(),
        "mode": os.stat(".").st_mode & 0o777,
        "stdin": os.readlink("/proc/self/fd/0"),
        "session": os.getsid(0),
        "pid": os.getpid(),
        "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
        "home": os.environ.get("HOME"),
        "fds": sorted(int(n) for n in os.listdir("/proc/self/fd")),
        "inherited": subprocess.run(
            [sys.executable, "-c", "import os; print(len(os.listdir('/proc/self/fd')))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip(),
    }, []


def hang(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    while True:
        time.sleep(1)


def segfault(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    ctypes.string_at(0)
    return {}, []


def abort(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    os.abort()


def eat(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    held = []
    while True:
        held.append(b"\1" * (8 * MIB))
        time.sleep(0.001)


def eat_in_a_child(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    if os.fork() == 0:
        eat(payload, tensors)
    return hang(payload, tensors)


def share(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    """Six processes that hold the same 400 MiB."""
    held = b"\1" * (400 * MIB)
    children = []
    for _ in range(5):
        children.append(os.fork())
        if children[-1] == 0:
            hang(payload, tensors)
    time.sleep(1.0)
    return {"held": len(held), "resident": cell_processes.resident([os.getpid(), *children])}, []


def exit_at_once(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    print("PASS", flush=True)
    os._exit(payload["code"])


def exit_politely(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    sys.exit(payload["code"])


def exit_after_the_answer(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    threading.Timer(0.2, os._exit, (3,)).start()
    return {}, []


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def complain(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    if payload["how"] == "rudely":
        raise Rude
    if payload["how"] == "interrupt":
        raise KeyboardInterrupt("not by the user")
    raise ValueError(payload["how"])


def unspeakable(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    return {"value": object()}, []


def chatter(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    print("the first line")
    block = b"x" * (MIB - 1) + b"\n"
    for _ in range(payload["mib"]):
        os.write(1, block)
    print("the last line", file=sys.stderr)
    return {}, []


def chatter_for_ever(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    while True:
        os.write(2, b"again and again\n" * 1000)


def leave_a_child(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    child = os.fork()
    if child == 0:
        hang(payload, tensors)
    return {"pids": [child]}, []


def _daemon(command: list[str] | None) -> int:
    """The id of a process in a session of its own whose parent has gone."""
    told, tell = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        os.write(tell, str(os.getpid()).encode())
        if command is None:
            hang({}, [])
        os.execvp(command[0], command)
    os.wait()
    return int(os.read(told, 20))


def leave_daemons(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    return {"pids": [_daemon(["sleep", "1000"]), _daemon(None)]}, []


def litter(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    inner = Path(tempfile.mkdtemp(), "a", "b")
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    (inner / "elsewhere").symlink_to(payload["outside"])
    inner.chmod(0)
    inner.parent.chmod(0o500)
    return {"made": str(inner)}, []


def _channels() -> list[int]:
    return [fd for n in os.listdir("/proc/self/fd") if (fd := int(n)) > 2 and _is_socket(fd)]


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:  # the listing's own, closed since
        return False


def garbage(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    for fd in range(3, 1000):
        with suppress(OSError):
            os.write(fd, b"\x80\x04garbage" * 100)
    return {}, []


def forge(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    """A message that is whole but bears a nonce of the guest's own making."""
    header = {"nonce": "0" * 32, "payload": {"correct": True}, **payload}
    for fd in _channels():
        with socket.socket(fileno=os.dup(fd)) as channel:
            cell_frames.send(channel, cell_frames.pack(header, []))
    return hang(payload, tensors)


def raw(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    """A message with any header, its text given; then nothing."""
    text = payload["text"].encode()
    for fd in _channels():
        os.write(fd, cell_frames.HEAD.pack(cell_frames.MARK, len(text)) + text)
    return hang(payload, tensors)


def say_more(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    """An answer in time, and another some time after it, which no one asked for."""

    def later() -> None:
        time.sleep(0.2)
        for fd in _channels():
            os.write(fd, json.dumps(payload).encode())

    threading.Thread(target=later).start()
    return {}, []


def shut(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    os.closerange(3, 1000)
    return hang(payload, tensors)


def kill_the_keeper(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    os.kill(os.getppid(), signal.SIGKILL)
    return hang(payload, tensors)


def leave_and_kill_the_keeper(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    Path(payload["note"]).write_text(json.dumps([os.getpid(), _daemon(["sleep", "1000"])]))
    return kill_the_keeper(payload, tensors)


def on_cuda(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    held = torch.empty(payload["mib"] * MIB, dtype=torch.uint8, device="cuda")
    return {"held": held.numel()}, [2 * t.cuda() for t in tensors]


def break_cuda(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    """An index out of range asserts on the device, after which the context is of no use."""
    out = torch.zeros(4, device="cuda")[torch.tensor([1 << 30], device="cuda")]
    torch.cuda.synchronize()
    return {}, [out]


def handlers(argument: dict) -> dict[str, Callable[[dict, list[torch.Tensor]], Answer]]:
    if argument.get("raise"):
        raise ImportError(argument["raise"])
    if argument.get("source"):
        compile(argument["source"], "mine.py", "exec")
    made = {k: v for k, v in globals().items() if callable(v) and getattr(v, "__module__", "")}
    return {name: v for name, v in made.items() if v.__module__ == __name__}
