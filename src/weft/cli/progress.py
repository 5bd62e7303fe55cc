"""Progress, duration and interruption of commands.

:class:`Progress` writes to stderr: a status line on a terminal, in a pipe a line every ten seconds.
:func:`stoppable` ends the work on SIGINT or SIGTERM, so that a command can show what is done by then.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from weft.cli.ending import about, elapsed_text
from weft.cli.output import log
from weft.core.errors import WeftError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

PERMANENT = "Skipped"  # lines that begin so stay on the screen above the status line
INTERVAL = 10.0  # seconds between two lines in a pipe
INTERVAL_VARIABLE = "WEFT_PROGRESS_SECONDS"  # sets another interval, for whoever records a command's output
REFRESH = 1.0  # seconds between two updates of the status line on a terminal
ANNOUNCED = 20.0  # a command that takes longer says so before it starts
# Seconds of work as expected that count like measured ones: the first steps alone would make the
# estimate jump.
PRIOR = 5.0
COUNT = re.compile(r"\[(\d+)/(\d+)\] ?")  # prefix of a line of progress: number of the step, steps in all


def _interval() -> float:
    """Return the seconds between two lines in a pipe; raise :class:`WeftError` if they are no number."""
    text = os.environ.get(INTERVAL_VARIABLE, str(INTERVAL))
    try:
        return float(text)
    except ValueError as error:
        raise WeftError(INTERVAL_VARIABLE, expected="a number of seconds", got=text) from error


class Progress:
    """Progress of a command: steps done and in all, the current one, elapsed and estimated time.

    An instance is a ``Log``: a call describes the current step; a prefix ``[3/40]`` sets its number. In a
    pipe a line is printed every ten seconds, also within a long step, the first one at once with
    ``at_once``. With ``every_line`` each line is printed, for work of few steps.
    ``clock`` returns seconds, ``write`` prints a line.
    """

    def __init__(
        self,
        *,
        total: int = 0,
        at_once: bool = False,
        every_line: bool = False,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] = log,
    ) -> None:
        self.expected: tuple[float, ...] = ()
        self._estimate: Callable[[], float] | None = None
        self.total = total
        self.done = 0
        self._every_line, self._clock, self._write = every_line, clock, write
        self._point = self._printed_point = ""
        self._start = clock()
        self._interval = _interval()
        self._due = self._start + (0.0 if at_once else self._interval)
        self._console: Console | None = None
        self._status: Status | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._ticker: threading.Thread | None = None

    def __enter__(self) -> Progress:
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        if console.is_terminal:
            self._console, self._status = console, console.status("")
        self._ticker = threading.Thread(target=self._tick, name="weft-progress", daemon=True)
        self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._ticker is not None:
            self._ticker.join(timeout=REFRESH)
        self.clear()

    def expect(self, seconds: Sequence[float], what: str) -> None:
        """Set the expected seconds of each step; announce their sum."""
        self.expected, self.total = tuple(seconds), len(seconds)
        self.announce(sum(seconds), what)

    def expect_by(self, estimate: Callable[[], float], total: int, what: str) -> None:
        """Set the number of steps, and a function that returns the seconds that are left; announce them."""
        self._estimate, self.total = estimate, total
        self.announce(estimate(), what)

    def announce(self, seconds: float, what: str) -> None:
        """Say about how long ``what`` will take, if that is over ``ANNOUNCED`` seconds."""
        if seconds > ANNOUNCED:
            self.keep(f"{what} will take {about(seconds)}")

    def __call__(self, line: str) -> None:
        """Describe the current step; raise ``KeyboardInterrupt`` if the work is to stop."""
        raise_if_stopped()
        if line.startswith(PERMANENT):
            self.keep(line)
            return
        with self._lock:
            count = COUNT.match(line)
            if count:
                self.done, self.total = int(count[1]) - 1, int(count[2])
            self._point = line[count.end() :] if count else line
            if self._status is not None:
                self._status.start()
        self.show()

    def describe(self, line: str) -> None:
        """Describe the current step by a line of a part of it, whose own count is left out."""
        self(COUNT.sub("", line))

    def advance(self) -> None:
        """Count the current step as done."""
        raise_if_stopped()
        with self._lock:
            self.done += 1

    def keep(self, line: str) -> None:
        """Print a line that stays on the screen."""
        with self._lock:
            if self._console is not None:
                self._console.print(line, markup=False, soft_wrap=True)
            else:
                self._write(line)

    def clear(self) -> None:
        """Remove the status line, so that a table can be printed. The next call shows it again."""
        if self._status is not None:
            self._status.stop()

    def remaining(self) -> float | None:
        """Return the estimated seconds that are left; None before anything is known.

        The expected seconds are corrected by the measured ones of the steps that are done.
        """
        if self._estimate is not None:
            return self._estimate()
        if not self.total:
            return None
        from_table = len(self.expected) == self.total
        expected = self.expected if from_table else (1.0,) * self.total
        prior = PRIOR if from_table else 0.0
        done = sum(expected[: self.done])
        if not done + prior:
            return None
        return sum(expected[self.done :]) * (self.elapsed + prior) / (done + prior)

    @property
    def elapsed(self) -> float:
        """Seconds since the progress was made."""
        return self._clock() - self._start

    def line(self) -> str:
        """Return ``[3/40] softmax eager fp32-64x64 forward (14 s, about 3 min left)``."""
        count = f"[{min(self.done + 1, self.total)}/{self.total}] " if self.total else ""
        remaining = self.remaining()
        left = "" if remaining is None else f", {about(remaining)} left"
        return f"{count}{self._point} ({elapsed_text(self.elapsed)}{left})"

    def show(self) -> None:
        """Update the status line; in a pipe print a line if one is due."""
        from rich.text import Text

        with self._lock:
            if self._status is not None:
                self._status.update(Text(self.line()))
            elif self._point and (self._clock() >= self._due or self._is_new_line()):
                self._due = self._clock() + self._interval
                self._printed_point = self._point
                self._write(self.line())

    def _is_new_line(self) -> bool:
        return self._every_line and self._point != self._printed_point

    def _tick(self) -> None:
        while not self._ended.wait(REFRESH):
            self.show()


class StopRequest:
    """SIGINT or SIGTERM as received inside :func:`stoppable`, and the results that were ready then.

    ``number`` is the signal's, None if there was none. True if the work was stopped.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.partial: Any = None

    def __bool__(self) -> bool:
        return self.number is not None

    @property
    def exit_code(self) -> int:
        """Exit code of a stopped command: 130 after SIGINT, 143 after SIGTERM; 0 if it was not stopped."""
        return 0 if self.number is None else 128 + self.number

    def to_json(self) -> dict[str, bool]:
        """Return ``{"stopped": true}`` for the JSON of a stopped command, else an empty mapping."""
        return {"stopped": True} if self else {}


_current: StopRequest | None = None


@contextmanager
def stoppable() -> Iterator[StopRequest]:
    """Context that ends at SIGINT or SIGTERM without an error; the result is in the yielded request.

    The signal raises ``KeyboardInterrupt`` in the work, so that contexts inside end their worker
    processes. A second signal ends this process at once. A signal that is ignored stays ignored, as
    SIGINT is for jobs in the background of a script.
    """
    global _current
    request, previous = StopRequest(), {}

    def handle(number: int, _: FrameType | None) -> None:
        if request:
            os._exit(128 + number)  # supervisors see the closed channels and end the workers
        request.number = number
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, handle)
    # Where one context is inside another, the outer one is current again at the inner one's end.
    outer, _current = _current, request
    try:
        yield request
    except (KeyboardInterrupt, Exception) as error:
        # After the signal any error is a consequence of the interruption, in whatever form a library
        # reports it.
        if not request:
            raise
        request.partial = getattr(error, "partial", None)
    finally:
        _current = outer
        for number, handler in previous.items():
            signal.signal(number, handler)


def raise_if_stopped() -> None:
    """Raise ``KeyboardInterrupt`` again, if a callback of a library swallowed the first one."""
    if _current:
        raise KeyboardInterrupt
