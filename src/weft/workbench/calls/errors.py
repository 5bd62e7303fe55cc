"""Exceptions of a call made in a worker process, for those that ask for calls and judge them.

They are defined below the sandbox so that checks and timings can catch them without importing it.
"""

from __future__ import annotations

from weft.core.text import printable


class SandboxDied(Exception):
    """Raised when the worker process has ended; ``reason`` is one line that begins with a verb."""

    def __init__(self, reason: str) -> None:
        self.reason = printable(reason)
        super().__init__(self.reason)


class WorkerError(Exception):
    """Raised when a handler of the worker raised; the text is 'Type: message'. The worker lives on."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


CALL_FAILURES = (SandboxDied, WorkerError)
