"""Options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from weft.core.errors import WeftError

if TYPE_CHECKING:
    from weft.workbench.sandbox.process import Limits

SECONDS, MEMORY = 120.0, 8.0
MAX_SECONDS, MAX_MEMORY = 1e7, 1e6  # 115 days; a pebibyte
MAX_SEED = 2**62  # so that the seeds after it fit into the 63 bits of torch.Generator too

Names = list[str] | None
Impl = Annotated[
    Names,
    typer.Option(
        "--impl",
        metavar="NAME",
        help="Implementation to run (repeatable); cuda also selects its ladder steps",
    ),
]
Case = Annotated[Names, typer.Option("--case", metavar="NAME", help="Case to run (repeatable)")]


def select_device(context: typer.Context, device: str | None) -> str | None:
    """Return the kind of ``--device``; of several GPUs, ``cuda:N`` selects one for the whole command."""
    from weft.machine.query import select_gpu

    # A shell that completes the line runs nothing.
    return device if device is None or context.resilient_parsing else select_gpu(device)


Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="cpu|cuda",
        callback=select_device,
        help="Device, or cuda:N for GPU number N [default: the GPU if there is one, else the CPU]",
    ),
]
Files = Annotated[Names, typer.Option("--with", metavar="FILE", help="Your own .py or .cu file (repeatable)")]
Seconds = Annotated[
    float, typer.Option("--seconds", metavar="S", help="Time limit for each step of your code, in seconds")
]
Memory = Annotated[
    float, typer.Option("--memory", metavar="GIB", help="Host memory limit for your code, in GiB")
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=0, max=MAX_SEED, help="Random seed of all inputs [default: a new one in each run]"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout")]
Csv = Annotated[bool, typer.Option("--csv", help="Print the table with all columns as CSV to stdout")]


def limits(seconds: float, memory_gib: float) -> Limits:
    """Return the limits of a worker process.

    Raises :class:`WeftError` for a limit that is not above 0, or beyond what a system's limit can hold.
    """
    from weft.workbench.sandbox.process import Limits

    for option, value, most in (("--seconds", seconds, MAX_SECONDS), ("--memory", memory_gib, MAX_MEMORY)):
        if not 0 < value <= most:  # also false for nan
            raise WeftError(option, expected=f"a number above 0, at most {most:g}", got=value)
    return Limits(seconds=seconds, memory_bytes=int(memory_gib * (1 << 30)))
