"""Request handlers of the sandbox tests' workers: an echo, and everything that a candidate must not do."""

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
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from weft.machine import driver
from weft.workbench.sandbox import device_memory, process_tree, protocol
from weft.workbench.selftest.mutants import cheats_conditions

Result = tuple[dict[str, Any], Sequence[torch.Tensor]]
MIB = 1 << 20


def echo(payload: dict, tensors: list[torch.Tensor]) -> Result:
    return payload, tensors


_exported: list[weakref.ref[torch.Tensor]] = []


def last_bytes(payload: dict, tensors: list[torch.Tensor]) -> Result:
    """Reply with the size of a tensor and its last six elements."""
    return {"size": len(tensors[0])}, [tensors[0][-6:]]


def long_reply(payload: dict, tensors: list[torch.Tensor]) -> Result:
    """Reply with a tensor of the size that is asked for, of zeros and five sevens at its end."""
    reply = torch.zeros(payload["size"], dtype=torch.uint8)
    reply[-5:] = 7
    return {"size": len(reply)}, [reply]


def keep_in_memory(payload: dict, tensors: list[torch.Tensor]) -> Result:
    """Reply with tensors that stay in this process, as large GPU tensors do; the parent copies them."""

    def export(tensor: torch.Tensor) -> device_memory.ExportedMemory:
        _exported.append(weakref.ref(tensor))
        return device_memory.ExportedMemory(bytes(device_memory.HANDLE_BYTES), 5)

    device_memory.export = export
    return {"exported": len(_exported)}, tensors


def export_always(payload: dict, tensors: list[torch.Tensor]) -> Result:
    """Describe the tensors' addresses, as `keep_in_memory` does, also for a reply that sends the tensors."""
    pack = protocol.pack
    protocol.pack = lambda header, outputs, exported=None: pack(
        header, outputs, [] if exported is None else exported
    )
    return keep_in_memory(payload, tensors)


def count_on_a_gpu(payload: dict, tensors: list[torch.Tensor]) -> Result:
    """Reply with the numbers from 0 on, on a GPU, whole, transposed, and as a view inside."""
    if payload.get("expandable"):  # memory of a virtual address range cannot be exported
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    whole = torch.arange(payload["count"], device="cuda", dtype=torch.float32)
    return {"allocated": torch.cuda.memory_allocated()}, [whole, whole.view(2, -1).T, whole[7:]]


def allocated_on_a_gpu(payload: dict, tensors: list[torch.Tensor]) -> Result:
    return {"allocated": torch.cuda.memory_allocated()}, []


def alive(payload: dict, tensors: list[torch.Tensor]) -> Result:
    return {"alive": [tensor() is not None for tensor in _exported]}, []


def transposed(payload: dict, tensors: list[torch.Tensor]) -> Result:
    return {}, [t.transpose(0, -1) for t in tensors]


def work(payload: dict, tensors: list[torch.Tensor]) -> Result:
    """Compute a product on every thread, and a gradient, which starts autograd's threads."""
    torch.set_num_threads(2)
    a = torch.arange(360_000, dtype=torch.float64).reshape(600, 600).div(1e7).requires_grad_()
    out = (a @ a.T).exp().log()
    out.sum().backward()
    return {"threads": torch.get_num_threads()}, [out.detach(), a.grad]


def surroundings(payload: dict, tensors: list[torch.Tensor]) -> Result:
    """Return the environment that the worker sees."""
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


def hang(payload: dict, tensors: list[torch.Tensor]) -> Result:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    while True:
        time.sleep(1)


def segfault(payload: dict, tensors: list[torch.Tensor]) -> Result:
    ctypes.string_at(0)
    return {}, []


def abort(payload: dict, tensors: list[torch.Tensor]) -> Result:
    os.abort()


def allocate(payload: dict, tensors: list[torch.Tensor]) -> Result:
    memory = []
    while True:
        memory.append(b"\1" * (8 * MIB))
        time.sleep(0.001)


def allocate_in_a_child(payload: dict, tensors: list[torch.Tensor]) -> Result:
    if os.fork() == 0:
        allocate(payload, tensors)
    return hang(payload, tensors)


def share(payload: dict, tensors: list[torch.Tensor]) -> Result:
    """Start six processes that share the same 400 MiB."""
    memory = b"\1" * (400 * MIB)
    children = []
    for _ in range(5):
        children.append(os.fork())
        if children[-1] == 0:
            hang(payload, tensors)
    time.sleep(1.0)
    return {"size": len(memory), "resident": process_tree.resident_bytes([os.getpid(), *children])}, []


def exit_at_once(payload: dict, tensors: list[torch.Tensor]) -> Result:
    print("PASS", flush=True)
    os._exit(payload["code"])


def exit_politely(payload: dict, tensors: list[torch.Tensor]) -> Result:
    sys.exit(payload["code"])


def exit_after_the_reply(payload: dict, tensors: list[torch.Tensor]) -> Result:
    threading.Timer(0.2, os._exit, (3,)).start()
    return {}, []


class BrokenMessage(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def raise_error(payload: dict, tensors: list[torch.Tensor]) -> Result:
    if payload["how"] == "rudely":
        raise BrokenMessage
    if payload["how"] == "interrupt":
        raise KeyboardInterrupt("not by the user")
    raise ValueError(payload["how"])


def not_serializable(payload: dict, tensors: list[torch.Tensor]) -> Result:
    return {"value": object()}, []


def print_much(payload: dict, tensors: list[torch.Tensor]) -> Result:
    print("the first line")
    block = b"x" * (MIB - 1) + b"\n"
    for _ in range(payload["mib"]):
        os.write(1, block)
    print("the last line", file=sys.stderr)
    return {}, []


def print_for_ever(payload: dict, tensors: list[torch.Tensor]) -> Result:
    while True:
        os.write(2, b"again and again\n" * 1000)


def leave_a_child(payload: dict, tensors: list[torch.Tensor]) -> Result:
    child = os.fork()
    if child == 0:
        hang(payload, tensors)
    return {"pids": [child]}, []


def _daemon(command: list[str] | None) -> int:
    """Return the id of a process in its own session whose parent has ended."""
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        os.write(write_end, str(os.getpid()).encode())
        if command is None:
            hang({}, [])
        os.execvp(command[0], command)
    os.wait()
    return int(os.read(read_end, 20))


def leave_a_running_child(payload: dict, tensors: list[torch.Tensor]) -> Result:
    """Leave a process in a session of its own that computes, also after SIGSTOP."""
    child = os.fork()
    if not child:
        cheats_conditions.run_for_ever()
    return {"pids": [child]}, []


def leave_daemons(payload: dict, tensors: list[torch.Tensor]) -> Result:
    return {"pids": [_daemon(["sleep", "1000"]), _daemon(None)]}, []


def litter(payload: dict, tensors: list[torch.Tensor]) -> Result:
    inner = Path(tempfile.mkdtemp(), "a", "b")
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    (inner / "elsewhere").symlink_to(payload["outside"])
    inner.chmod(0)
    inner.parent.chmod(0o500)
    return {"created": str(inner)}, []


def _channels() -> list[int]:
    return [fd for n in os.listdir("/proc/self/fd") if (fd := int(n)) > 2 and _is_socket(fd)]


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:  # opened by the listing itself and closed again
        return False


def garbage(payload: dict, tensors: list[torch.Tensor]) -> Result:
    for fd in range(3, 1000):
        with suppress(OSError):
            os.write(fd, b"\x80\x04garbage" * 100)
    return {}, []


def modules_and_driver(payload: dict, tensors: list[torch.Tensor]) -> Result:
    """Reply with the named modules that are loaded, and the driver's own answer."""
    loaded = [name for name in payload["names"] if name in sys.modules]
    return {"loaded": loaded, "reason": driver.find().reason}, ()


def fail_to_send(payload: dict, tensors: list[torch.Tensor]) -> Result:
    """Raise when the answer's bytes are taken, as a copy from a GPU can."""

    def pieces(start: bytes, dense: list[torch.Tensor]) -> Iterator[memoryview]:
        yield memoryview(start)
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20.00 MiB")

    protocol._pieces = pieces
    return {}, [torch.ones(3)]


def forge(payload: dict, tensors: list[torch.Tensor]) -> Result:
    """Send a complete message with an invented nonce."""
    header = {"nonce": "0" * 32, "payload": {"correct": True}, **payload}
    for fd in _channels():
        with socket.socket(fileno=os.dup(fd)) as channel:
            protocol.send(channel, protocol.pack(header, []))
    return hang(payload, tensors)


def raw(payload: dict, tensors: list[torch.Tensor]) -> Result:
    """Send a message with any header; then nothing."""
    text = payload["text"].encode()
    for fd in _channels():
        os.write(fd, protocol.PREFIX.pack(protocol.MAGIC, len(text)) + text)
    return hang(payload, tensors)


def reply_twice(payload: dict, tensors: list[torch.Tensor]) -> Result:
    """Reply in time, and send a second, unrequested reply later."""

    def later() -> None:
        time.sleep(0.2)
        for fd in _channels():
            os.write(fd, json.dumps(payload).encode())

    threading.Thread(target=later).start()
    return {}, []


def close_channel(payload: dict, tensors: list[torch.Tensor]) -> Result:
    os.closerange(3, 1000)
    return hang(payload, tensors)


def kill_the_supervisor(payload: dict, tensors: list[torch.Tensor]) -> Result:
    os.kill(os.getppid(), signal.SIGKILL)
    return hang(payload, tensors)


def leave_and_kill_the_supervisor(payload: dict, tensors: list[torch.Tensor]) -> Result:
    Path(payload["note"]).write_text(json.dumps([os.getpid(), _daemon(["sleep", "1000"])]))
    return kill_the_supervisor(payload, tensors)


def on_cuda(payload: dict, tensors: list[torch.Tensor]) -> Result:
    memory = torch.empty(payload["mib"] * MIB, dtype=torch.uint8, device="cuda")
    return {"size": memory.numel()}, [2 * t.cuda() for t in tensors]


def break_cuda(payload: dict, tensors: list[torch.Tensor]) -> Result:
    """Trigger a device-side assertion by an index out of range; the context is unusable afterwards."""
    out = torch.zeros(4, device="cuda")[torch.tensor([1 << 30], device="cuda")]
    torch.cuda.synchronize()
    return {}, [out]


def handlers(argument: dict) -> dict[str, Callable[[dict, list[torch.Tensor]], Result]]:
    if argument.get("raise"):
        raise ImportError(argument["raise"])
    if argument.get("source"):
        compile(argument["source"], "mine.py", "exec")
    functions = {k: v for k, v in globals().items() if callable(v) and getattr(v, "__module__", "")}
    return {name: v for name, v in functions.items() if v.__module__ == __name__}
