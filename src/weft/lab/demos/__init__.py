"""Demonstrations: pairs of a bad and a good kernel for one computation, and the evidence for their ratio.

Each is one ``.cu`` of a few dozen lines and one ``.py`` of the same name, which has its
:class:`~weft.lab.demos.demo.Demo`: the launch of both variants, the ratio that arithmetic predicts,
and the counter that shows the cause. A new one is those two files and a line in ``DEMOS``.
"""

from __future__ import annotations

from importlib import import_module

from weft.core.operator import unknown_name
from weft.lab.demos.demo import Demo

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
    "pinned-memory",
    "overlapped-copies",
    "volatile",
    "fused-gelu",
    "fused-chain",
)


def demo(name: str) -> Demo:
    """Return the demonstration of this name; raises :class:`WeftError` if there is none."""
    if name not in DEMOS:
        raise unknown_name("demo", name, list(DEMOS))
    demonstration = import_module(f"weft.lab.demos.{name.replace('-', '_')}").DEMO
    assert isinstance(demonstration, Demo) and demonstration.name == name
    return demonstration


def all_demos() -> tuple[Demo, ...]:
    """Return every demonstration, in reading order."""
    return tuple(map(demo, DEMOS))
