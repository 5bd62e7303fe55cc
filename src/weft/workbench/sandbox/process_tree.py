"""The processes of a sandbox: find them, measure their memory, end them, and remove their folder.

A process belongs to the sandbox if it descends from the sandbox's supervisor (a subreaper: orphaned
descendants become its children), is in the worker's session, or has the sandbox's marker in its
environment. All three are read from /proc. Without a readable /proc, only the worker's process
group is ended, and memory is not limited.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

MARKER = "WEFT_SANDBOX"
PROC = Path("/proc")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36  # linux/prctl.h
END_SECONDS = 10.0  # tearing down a large CUDA context takes a second or two
STOP_SECONDS = 0.5  # until a process that got SIGSTOP has stopped; one in a driver's call takes longest


def prctl(option: int, value: int) -> bool:
    """Return True if the system call succeeded; it fails on systems other than Linux."""
    call = getattr(ctypes.CDLL(None), "prctl", None)
    return call is not None and call(option, value, 0, 0, 0) == 0


def running_processes() -> dict[int, tuple[int, int]]:
    """Return the parent and the session of every process that is not a zombie."""
    processes = {}
    with suppress(OSError):  # no /proc
        for name in os.listdir(PROC):
            with suppress(OSError, ValueError, IndexError):  # not a process, or it has ended
                # The second field of stat is the program's name in brackets; it may hold anything.
                stat = (PROC / name / "stat").read_text(errors="replace").rpartition(")")[2]
                state, parent, _, session = stat.split()[:4]
                if state not in "ZX":
                    processes[int(name)] = (int(parent), int(session))
    return processes


def members(supervisor: int, worker: int) -> list[int]:
    """Return the supervisor's living descendants and those in the worker's session."""
    processes = running_processes()
    in_session = {pid for pid, (_, session) in processes.items() if session == worker}
    descendants, size = {supervisor}, 0
    while len(descendants) > size:  # until no generation adds a process
        size = len(descendants)
        descendants |= {pid for pid, (parent, _) in processes.items() if parent in descendants}
    return sorted((descendants | in_session) - {supervisor})


def descendants(pid: int) -> list[int] | None:
    """Return the descendants of a process, each parent before its children; None if the kernel lists none.

    It reads the children of each thread (``/proc/PID/task/*/children``), which takes a small part of the
    time of :func:`members`. A subreaper's descendants are all of them, whatever session they are in.
    """
    family = [pid]
    for parent in family:
        tasks = PROC / str(parent) / "task"
        with suppress(OSError):  # it has ended
            for thread in os.listdir(tasks):
                try:
                    family += map(int, (tasks / thread / "children").read_text().split())
                except FileNotFoundError:
                    if parent == pid:
                        return None  # a kernel without CONFIG_PROC_CHILDREN, or no such process
                except OSError:
                    continue  # the thread has ended
    return family[1:]


def stop_processes(supervisor: int, worker: int) -> list[int]:
    """Stop a sandbox's processes, the supervisor excepted; return them when all have stopped.

    One that does not stop within ``STOP_SECONDS`` is returned as well.
    """
    deadline = time.monotonic() + STOP_SECONDS
    stopped: list[int] = []
    while True:
        pids = descendants(supervisor)
        # The worker is the leader of its own group: one call reaches most processes at once.
        with suppress(OSError):
            os.killpg(worker, signal.SIGSTOP)
        pids = members(supervisor, worker) if pids is None else pids
        added = [pid for pid in pids if pid not in stopped]
        for pid in added:
            with suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        stopped += added
        # Repeat: a process may have forked between the listing and its stop. Once stopped it cannot.
        if (not added and all(map(_has_stopped, stopped))) or time.monotonic() > deadline:
            return stopped
        time.sleep(0.0001)


def continue_processes(pids: Iterable[int]) -> None:
    """Let processes that were stopped go on; those that have ended meanwhile are left out."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGCONT)


def _has_stopped(pid: int) -> bool:
    """Return True for a process that is stopped or has ended, or if there is no /proc to tell."""
    try:
        state = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state in "TtZX"


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time that the processes have used; 0 for one that has ended, or off Linux."""
    total = 0.0
    for pid in pids:
        with suppress(OSError, OverflowError):
            # The clock of another process's CPU time, as clock_getcpuclockid(3) makes it on Linux.
            total += time.clock_gettime((~pid << 3) | 2)
    return total


def marked_processes(marker: str) -> Iterator[int]:
    """Yield the processes that the worker or its descendants exec'd, in any session."""
    entry = f"{MARKER}={marker}".encode()
    for pid in running_processes():
        with suppress(OSError):  # another user's process, or it has ended
            # The environment at exec: a process cannot take the marker out of its own /proc entry
            # without rewriting its stack.
            if entry in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                yield pid


def resident_bytes(pids: list[int]) -> int:
    """Return the resident memory of the processes; a shared page counts once for each."""
    total = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            total += PAGE_BYTES * int((PROC / str(pid) / "statm").read_text().split()[1])
    return total


def proportional_bytes(pids: list[int]) -> int:
    """Return resident memory with shared pages divided among their users: exact but slow."""
    total = 0
    for pid in pids:
        try:
            text = (PROC / str(pid) / "smaps_rollup").read_text()
            total += 1024 * int(text.partition("\nPss:")[2].split()[0])
        except (OSError, ValueError, IndexError):
            total += resident_bytes([pid])
    return total


def end_processes(
    supervisor: int, worker: int, marker: str, all_reaped: Callable[[], bool] = lambda: True
) -> list[int]:
    """Kill the sandbox's processes; return the ids of those that remain after ``END_SECONDS``.

    ``all_reaped`` returns True once the caller has reaped its children, too.
    """
    deadline = time.monotonic() + END_SECONDS
    while True:
        remaining = set(members(supervisor, worker)) | set(marked_processes(marker))
        remaining -= {supervisor, os.getpid()}  # the supervisor is the one that cleans up
        # The worker is the leader of its own group (setsid): one call reaches it without a race.
        with suppress(OSError):
            os.killpg(worker, signal.SIGKILL)
        for pid in remaining:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        # Repeat: a process may have forked between the listing and its kill.
        if (all_reaped() and not remaining) or time.monotonic() > deadline:
            return sorted(remaining)
        time.sleep(0.002)


def reap_children() -> bool:
    """Reap ended children; return True if this process has no child left.

    A child whose last thread is still ending is a zombie in /proc, but may hold all of its GPU
    memory for another second. It counts as a child here.
    """
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return True
    return False


def exit_status(pid: int) -> int | None:
    """Return how a child ended: its exit code or minus its signal; None while it lives.

    The child is not reaped (WNOWAIT), so that its id, which names its session and process group,
    is not given to another process.
    """
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def remove_folder(folder: str) -> None:
    """Remove a folder, including subfolders that were made unwritable."""
    for parent, subfolders, _ in os.walk(folder):
        for name in subfolders:
            path = os.path.join(parent, name)
            if not os.path.islink(path):  # a link may lead out of the sandbox
                with suppress(OSError):  # it was removed meanwhile
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def describe_exit(code: int) -> str:
    """Describe an exit code, or minus a signal, in words that begin with a verb."""
    if code >= 0:
        return f"ended itself (os._exit or sys.exit, code {code}) without an answer"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if -code == signal.SIGKILL:
        return f"killed by {name}, as the system does when memory runs out"
    return f"killed by {name} ({(signal.strsignal(-code) or 'no name').lower()})"
