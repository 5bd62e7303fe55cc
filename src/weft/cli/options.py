"""Options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from weft.workbench.cell import Limits

Names = list[str] | None

Files = Annotated[
    Names, typer.Option("--with", metavar="FILE", help="Your own .py or .cu (repeatable).")
]
Seconds = Annotated[
    float, typer.Option(metavar="S", help="The longest that one step of your own code may take.")
]
Memory = Annotated[
    float, typer.Option(metavar="GIB", help="The most memory that your own code may take, in GiB.")
]
SECONDS, MEMORY = 120.0, 8.0


def limits(seconds: float, memory: float) -> Limits:
    """The limits of a stranger's process; raises :class:`WeftError` where one is not positive."""
    from weft.workbench.cell import Limits

    return Limits(seconds=seconds, memory_bytes=int(memory * (1 << 30)))
