"""Threads that work while no call of a candidate is timed: work that a call left behind.

A thread is judged by the CPU time that it uses, not by its existence. A pool's idle threads, tqdm's monitor
and torch.compile's timers wait; a thread that computes after a call has returned does a part of the call's
work outside of its time.
"""

from __future__ import annotations

import operator
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import torch

WORKED = "worked after a call had returned"  # the end of the flag that names such threads
TASKS = Path("/proc/self/task")
# First letters of the names of threads that a driver or torch starts.
_LIBRARY_THREADS = ("cuda", "pt_", "nv")
# CPU time that all threads together may use outside of steps, in all and as a share of the time: tqdm's
# monitor takes 50 us every ten seconds. The measured cost of threads that wait again comes on top: it
# adds up with the steps, and on a busy machine more of it falls behind a step's end.
ALLOWED_NS, ALLOWED_SHARE = 2_000_000, 1e-4
# Work that follows a step is seen sooner: so many pauses, and such a share of them, with so much CPU time
# each. An idle pool takes 7 us after a step to wait again, at most 85; a thread that reads the inputs of
# the last call once more takes 270 (two cores of a server).
BUSY_NS, BUSY_PAUSES, BUSY_SHARE = 100_000, 3, 0.05
# A thread that is seen for the first time is watched this long, this often, since it may end soon.
WATCHES, WATCH_SECONDS = 4, 0.005


def _os_threads() -> int:
    """Count the threads of this process without those of drivers and torch; 0 without a /proc."""
    if not TASKS.is_dir():
        return 0
    names: Counter[bool] = Counter()
    for task in TASKS.iterdir():
        try:
            name = (task / "comm").read_text()
        except OSError:  # the thread ended since the folder was listed
            name = _LIBRARY_THREADS[0]
        names[name.startswith(_LIBRARY_THREADS)] += 1
    return names[False]


def _python_threads() -> set[int]:
    """Return the system's ids of all Python threads that run Python code, except the calling one."""
    known = {t.native_id for t in threading.enumerate() if t.native_id is not None}
    if hasattr(time, "pthread_getcpuclockid"):
        # `threading` does not list what `_thread` started. The chain is one call in C, which keeps the
        # interpreter's lock: no thread can end between its listing and the look at its memory.
        frames = chain.from_iterable(map(operator.call, (sys._current_frames,)))
        clocks = list(map(time.pthread_getcpuclockid, frames))
        known |= {~(clock >> 3) for clock in clocks}  # the system's encoding of a thread's clock
    return known - {threading.get_native_id()}


def _cpu_ns(thread: int) -> int | None:
    """Return the CPU time of a thread of this process; None if it has ended."""
    try:
        return time.clock_gettime_ns((~thread << 3) | 6)  # 6: of one thread, user and system time
    except (OSError, OverflowError):
        return None


class _IdlePool:
    """Pool of one thread that does nothing: it measures what a thread uses to wake up and to wait again.

    A candidate's pool has the same cost on the same machine at the same moment. Part of it falls behind the
    end of a step, by chance or because other processes have the cores.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weft-idle")
        self.thread = self._pool.submit(threading.get_native_id).result()
        self._before: int | None = None
        self._n_wakes = self._used_ns = 0

    def wake(self) -> None:
        """Let the thread take a task without work; its last one is over by now."""
        cpu = _cpu_ns(self.thread)
        if cpu is not None and self._before is not None:
            self._n_wakes += 1
            # Bounded, so that a candidate that slows this thread gains no more than any thread may use.
            self._used_ns += min(cpu - self._before, BUSY_NS)
        self._before = cpu
        self._pool.submit(int).result()

    def mean_ns(self) -> float:
        """Return the mean CPU time (ns) from waking up to waiting again; 0 before the first is over."""
        return self._used_ns / self._n_wakes if self._n_wakes else 0.0


class ThreadMonitor:
    """Python threads that a candidate started, and their CPU time outside of its steps.

    A step is what the worker does on one request: :meth:`begin_step` before it, :meth:`working_threads`
    after it. Without per-thread clocks (not Linux) every thread that outlives a step counts as working.
    """

    def __init__(self) -> None:
        self._has_clocks = sys.platform == "linux"
        self._accepted = _python_threads()
        pools = torch.get_num_threads() + torch.get_num_interop_threads()
        self._expected_tasks = _os_threads() - threading.active_count() + pools
        self._idle_pool: _IdlePool | None = None  # once there is a thread to compare with it
        self.reset()

    def reset(self) -> None:
        """Forget all CPU times: what ran since the last step is not part of a timing."""
        self._cpu: dict[int, int] = {}  # of each watched thread, at the last reading
        self._used: Counter[int] = Counter()  # ns outside of steps, by thread
        self._read_at: int | None = None  # None while a step runs
        self._active: set[int] = set()  # threads that used CPU time since the last step
        self._n_returns = 0  # over all pauses, threads that used CPU time in one
        self._observed_ns = self._pause_ns = self._pauses = self._busy_pauses = 0

    def accept_current(self) -> None:
        """Accept all current threads: the next candidate did not start them."""
        self._accepted |= _python_threads()
        self.reset()

    def begin_step(self) -> None:
        """Count the CPU time that the watched threads used since the last step."""
        self._read()
        self._pauses += bool(self._cpu)
        self._busy_pauses += self._pause_ns > BUSY_NS
        self._n_returns += len(self._active)
        self._active.clear()
        self._pause_ns, self._read_at = 0, None

    def _read(self) -> None:
        now = time.perf_counter_ns()
        if self._read_at is not None:
            self._observed_ns += now - self._read_at
        for thread, before in list(self._cpu.items()):
            if (cpu := _cpu_ns(thread)) is None:
                del self._cpu[thread]
                continue
            if self._read_at is not None:
                self._used[thread] += cpu - before
                self._pause_ns += cpu - before
                if cpu > before:
                    self._active.add(thread)
            self._cpu[thread] = cpu
        self._read_at = now

    def working_threads(self) -> set[str]:
        """Return the names of the threads that use CPU time between steps, once they used too much of it."""
        own = _python_threads() - self._accepted
        names = {t.native_id: t.name for t in threading.enumerate()}
        if not self._has_clocks:
            self._accepted |= own
            return {names.get(t, "a thread") for t in own}
        new = own - self._cpu.keys()
        self._cpu |= dict.fromkeys(new, 0)
        self._read_at = None  # the CPU time up to now belongs to the step
        self._read()
        for _ in range(WATCHES if new else 0):
            time.sleep(WATCH_SECONDS)
            self._read()
        if self._cpu:
            self._wake_idle_pool()
        often = self._busy_pauses >= max(BUSY_PAUSES, BUSY_SHARE * self._pauses)
        if not often and sum(self._used.values()) <= self._allowed_ns():
            return set()
        return {names.get(t, "a thread") for t, _ in self._used.most_common(3)}

    def _wake_idle_pool(self) -> None:
        if self._idle_pool is None:
            self._idle_pool = _IdlePool()
            self._accepted.add(self._idle_pool.thread)
        self._idle_pool.wake()

    def _allowed_ns(self) -> float:
        """Return the CPU time (ns) that the threads may have used outside of steps so far.

        A thread that works in a pause has to wait again too, so work gains nothing by more threads.
        """
        returns = self._n_returns * self._idle_pool.mean_ns() if self._idle_pool else 0.0
        return ALLOWED_NS + ALLOWED_SHARE * self._observed_ns + returns

    def extra_os_threads(self) -> int:
        """Count OS threads beyond those at the start and torch's own pools."""
        return max(0, _os_threads() - threading.active_count() - self._expected_tasks)
