"""Weft's words as small frozen dataclasses. Nothing here imports torch.

A word is imported when it is first asked for, so that ``weft --help`` waits for none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.core.cases import Case, Input, case
    from weft.core.cost import Ceilings, Cost
    from weft.core.errors import WeftError
    from weft.core.implementation import Implementation
    from weft.core.operator import BACKWARD, FORWARD, Operator, Property, Tolerance
    from weft.core.record import Finding, Record, Timing, Verdict
    from weft.core.support import YES, Support, check_only, no

_HOME = {
    "cases": ("Case", "Input", "case"),
    "cost": ("Ceilings", "Cost"),
    "errors": ("WeftError",),
    "implementation": ("Implementation",),
    "operator": ("BACKWARD", "FORWARD", "Operator", "Property", "Tolerance"),
    "record": ("Finding", "Record", "Timing", "Verdict"),
    "support": ("YES", "Support", "check_only", "no"),
}

__all__ = [
    "BACKWARD",
    "FORWARD",
    "YES",
    "Case",
    "Ceilings",
    "Cost",
    "Finding",
    "Implementation",
    "Input",
    "Operator",
    "Property",
    "Record",
    "Support",
    "Timing",
    "Tolerance",
    "Verdict",
    "WeftError",
    "case",
    "check_only",
    "no",
]


def __getattr__(name: str) -> Any:
    for module, words in _HOME.items():
        if name in words:
            return getattr(import_module(f"weft.core.{module}"), name)
    raise AttributeError(f"module 'weft.core' has no attribute {name!r}")
