"""Notes about a busy machine, for the commands that measure times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.cli import output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.core import Record


def warn_if_busy(kind: str) -> None:
    """Print a note to stderr if other processes use the machine now; ``kind`` is "cuda" or "cpu"."""
    from weft.machine.load import measure

    if reason := measure(kind).busy:
        output.log(f"note: the machine is busy ({reason}): times will be doubtful")


def log_doubts(records: Sequence[Record]) -> None:
    """Print to stderr why times or shares of the limit among the records are doubtful."""
    from weft.workbench.records import doubts

    for reason in doubts(records):
        output.log(f"note: {reason}")
