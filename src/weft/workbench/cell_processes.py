"""Which processes belong to a cell, what memory they hold, and how they and its folder are ended.

A process belongs if it descends from the cell's keeper (a subreaper: orphans come to it), is of the
guest's session, or bears the cell's marker in its environment. All three are read from /proc; where
that cannot be read, only the guest's process group is ended, and memory is not watched.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

MARKER = "WEFT_CELL"
PROC = Path("/proc")
PAGE = os.sysconf("SC_PAGE_SIZE")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
ENDING = 10.0  # seconds; a large CUDA context takes a second or two to be torn down


def prctl(option: int, value: int) -> bool:
    """Whether the system took it: elsewhere than on Linux it does not, and less is guarded."""
    call = getattr(ctypes.CDLL(None), "prctl", None)
    return call is not None and call(option, value, 0, 0, 0) == 0


def alive() -> dict[int, tuple[int, int]]:
    """Every process that is not a zombie: its parent and its session."""
    found = {}
    with suppress(OSError):  # no /proc
        for name in os.listdir(PROC):
            with suppress(OSError, ValueError, IndexError):  # not a process, or it ended
                state, parent, _, session = _stat(int(name))[:4]
                if state not in "ZX":
                    found[int(name)] = (int(parent), int(session))
    return found


def _stat(pid: int) -> list[str]:
    # The second field is the program's name in brackets, which may hold anything.
    return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def members(keeper: int, guest: int) -> list[int]:
    """The keeper's living descendants and those of the guest's session; the keeper excepted."""
    processes = alive()
    mine = {pid for pid, (_, session) in processes.items() if session == guest}
    family, grown = {keeper}, 0
    while len(family) > grown:
        grown = len(family)
        family |= {pid for pid, (parent, _) in processes.items() if parent in family}
    return sorted((family | mine) - {keeper})


def marked(marker: str) -> Iterator[int]:
    """Those that were exec'd by the guest or its descendants, wherever they have gone since."""
    wanted = f"{MARKER}={marker}".encode()
    for pid in alive():
        with suppress(OSError):  # another user's, or it ended
            if wanted in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                yield pid


def resident(pids: list[int]) -> int:
    """Bytes of memory the processes hold; pages that they share are counted once each time."""
    total = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            total += PAGE * int((PROC / str(pid) / "statm").read_text().split()[1])
    return total


def proportional(pids: list[int]) -> int:
    """The same with a shared page divided among those that share it: true, but dear to ask."""
    total = 0
    for pid in pids:
        try:
            text = (PROC / str(pid) / "smaps_rollup").read_text()
            total += 1024 * int(text.partition("\nPss:")[2].split()[0])
        except (OSError, ValueError, IndexError):
            total += resident([pid])
    return total


def end(keeper: int, guest: int, marker: str, over: Callable[[], bool] = lambda: True) -> list[int]:
    """Kill all that belongs to the cell; the process ids that are still there after ``ENDING``.

    ``over`` says whether the caller, too, has seen the last of them.
    """
    deadline = time.monotonic() + ENDING
    while True:
        left = (set(members(keeper, guest)) | set(marked(marker))) - {keeper, os.getpid()}
        with suppress(OSError):
            os.killpg(guest, signal.SIGKILL)
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if (over() and not left) or time.monotonic() > deadline:
            return sorted(left)
        time.sleep(0.002)


def childless() -> bool:
    """Reap; whether this process has no child left, not even one whose last thread still goes.

    Such a one is a zombie to /proc, and may hold all of its GPU memory for another second.
    """
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return True
    return False


def ended(pid: int) -> int | None:
    """How a child of this process ended, its code or minus its signal; None while it lives.

    It is not reaped, so that its number, by which its session and group are known, stays its own.
    """
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def remove(folder: str) -> None:
    """Remove a folder, what has been made unwritable in it as well."""
    for place, inner, _ in os.walk(folder):
        for name in inner:
            path = os.path.join(place, name)
            if not os.path.islink(path):
                with suppress(OSError):  # it went away meanwhile
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def ending(code: int) -> str:
    """An exit code, or minus a signal, in words."""
    if code >= 0:
        return f"ended itself (os._exit or sys.exit, code {code}) without an answer"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if -code == signal.SIGKILL:
        return f"killed by {name}, as the system does when memory runs out"
    return f"killed by {name} ({(signal.strsignal(-code) or 'no name').lower()})"
