"""Demonstrations: pairs of a bad and a good way to the same answer, and what tells them apart.

Each is one ``.cu`` of a few dozen lines and one ``.py`` of the same name, which holds its
:class:`~weft.workbench.demos.demo.Demo`: how both ways are launched, what ratio arithmetic
predicts, and which counter shows the cause. A new one is those two files and a line in ``DEMOS``.
"""

from __future__ import annotations

from importlib import import_module

from weft.core.operator import unknown_name
from weft.workbench.demos.demo import Demo

DEMOS = (
    "coalescing",
    "bank-conflicts",
    "divergence",
    "vectorised-loads",
    "unified-memory",
    "unrolling",
    "wave-quantization",
    "occupancy",
    "output-staging",
    "launch-overhead",
)


def demo(name: str) -> Demo:
    """The demonstration of this name; raises :class:`WeftError` where there is none."""
    if name not in DEMOS:
        raise unknown_name("demo", name, list(DEMOS))
    found = import_module(f"weft.workbench.demos.{name.replace('-', '_')}").DEMO
    assert isinstance(found, Demo) and found.name == name
    return found


def all_demos() -> tuple[Demo, ...]:
    """Every demonstration, in the order they are best read."""
    return tuple(map(demo, DEMOS))
