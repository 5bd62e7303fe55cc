"""Checks in several processes: each has its own registry and takes the next point that waits.

A process computes on one thread, since the cases of a check are small. Compiled kernels are in the caches on
the disk, which the processes share. The processes take names and return verdicts, so that only Weft's own
implementations can be checked in this way; external code has its worker processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait

from weft.core import Finding, Verdict, registry
from weft.core.record import FAIL
from weft.workbench.check.check import check_all

MAX_PROCESSES = 8  # each holds torch and its compiled kernels in memory: half a GiB
COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop());"
    "from weft.workbench.check.parallel import main; main()"
)
END_SECONDS = 10.0  # for a process that closed its connection, until it is killed
READY = "ready"  # the first message of a process; then verdicts, and None after the last one of a task
# Inductor compiles in as many processes of its own as there are cores, for each of ours.
ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class CheckTask:
    """Checks of some implementations at one point, by name; without ``seeds``, ``n_seeds`` new ones."""

    operator: str
    case: str
    direction: str
    device: str
    implementations: tuple[str, ...]
    seeds: tuple[int, ...] = ()
    n_seeds: int

    def run(self) -> Iterator[Verdict]:
        """Yield the verdict on each implementation."""
        operator = registry.operator(self.operator)
        return check_all(
            operator,
            # One at a time: a module that cannot be imported fails its own check only.
            (registry.implementation(self.operator, name) for name in self.implementations),
            operator.case(self.case),
            self.direction,
            self.device,
            seeds=self.seeds,
            n_seeds=self.n_seeds,
        )


def default_processes() -> int:
    """Return the number of processes: one for each core that this process may use, at most eight."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_PROCESSES, cores)


def check_in_processes(tasks: Sequence[CheckTask], processes: int) -> Generator[Verdict]:
    """Yield the verdicts of all tasks, in the order in which they arrive.

    Half of the processes take the first task that waits and the others the last: where alike tasks stand
    together, few are compiled for in two processes.
    A process that ends within a check fails that check; the other checks go to another process. Closing
    the iterator ends all processes at once. Raises RuntimeError if a process cannot be started.
    """
    waiting = deque(tasks)
    workers: list[_Worker] = []
    try:
        while waiting or any(w.task for w in workers):
            while len(workers) < min(processes, len(waiting) + sum(w.task is not None for w in workers)):
                workers.append(_Worker(takes_last=sum(w.takes_last for w in workers) * 2 < len(workers)))
            ready = wait([w.connection for w in workers if w.task or not w.is_ready])
            for worker in [w for w in workers if w.connection in ready]:
                try:
                    message = worker.connection.recv()
                except (EOFError, OSError):
                    workers.remove(worker)
                    verdict, rest = worker.ended()
                    if rest.implementations:
                        waiting.appendleft(rest)
                    if verdict is not None:
                        yield verdict
                    continue
                if isinstance(message, Verdict):
                    worker.answered += 1
                    yield message
                else:
                    worker.is_ready, worker.task = True, None
            for worker in workers:
                if waiting and worker.is_ready and worker.task is None:
                    worker.give(waiting.pop() if worker.takes_last else waiting.popleft())
    finally:
        for worker in workers:
            worker.kill()


class _Worker:
    """Process that runs one task after another."""

    def __init__(self, takes_last: bool) -> None:
        self.takes_last = takes_last
        self.connection, far_end = Pipe()
        path = json.dumps([os.path.abspath(p) for p in sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(far_end.fileno()), path],
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__,  # a kernel's own output does not mix with the command's JSON
            pass_fds=(far_end.fileno(),),
            env=os.environ | ENVIRONMENT,
            start_new_session=True,  # the terminal's Ctrl-C goes to this process, which ends the others
        )
        far_end.close()
        self.is_ready = False
        self.task: CheckTask | None = None
        self.answered = 0

    def give(self, task: CheckTask) -> None:
        self.task, self.answered = task, 0
        with suppress(OSError):  # it has ended: its end is the next event
            self.connection.send(task)

    def ended(self) -> tuple[Verdict | None, CheckTask]:
        """Return the verdict on the check in which the process ended, and the task without what is done."""
        with suppress(subprocess.TimeoutExpired):  # killed at once, it would not tell how it ended
            self.process.wait(END_SECONDS)
        self.kill()
        code = self.process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if self.task is None:
            raise RuntimeError(f"a process for checks ended at its start ({how})")
        left = self.task.implementations[self.answered :]
        if not left:
            return None, replace(self.task, implementations=())
        detail = f"the process that checked it ended ({how})"
        verdict = Verdict(
            operator=self.task.operator,
            implementation=left[0],
            case=self.task.case,
            direction=self.task.direction,
            status=FAIL,
            reason=f"channel: {detail}",
            findings=(Finding(check="channel", status=FAIL, detail=detail),),
        )
        return verdict, replace(self.task, implementations=left[1:])

    def kill(self) -> None:
        """End the process and what it has started (a compiler), unless it has ended by itself."""
        self.connection.close()
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def main() -> None:
    """``python -c ... FD PATH``: run the tasks that come, until the other end closes."""
    import torch

    torch.set_num_threads(1)
    connection = Connection(int(sys.argv[1]))
    with suppress(EOFError, BrokenPipeError):  # the command has ended
        connection.send(READY)
        while True:
            task = connection.recv()
            for verdict in task.run():
                connection.send(verdict)
            connection.send(None)
