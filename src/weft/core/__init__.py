"""Weft's terms as small frozen dataclasses. Nothing here imports torch.

A name is imported when it is first used, so that ``weft --help`` loads none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.core.cases import Case, Input, case
    from weft.core.cost import Ceilings, Cost
    from weft.core.errors import Interrupted, WeftError
    from weft.core.implementation import Implementation
    from weft.core.log import Log, no_log
    from weft.core.operator import BACKWARD, FORWARD, Operator, Property, Tolerance
    from weft.core.record import Finding, Record, Timing, Verdict
    from weft.core.support import YES, Support, check_only, no

_HOME = {
    "cases": ("Case", "Input", "case"),
    "cost": ("Ceilings", "Cost"),
    "errors": ("Interrupted", "WeftError"),
    "log": ("Log", "no_log"),
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
    "Interrupted",
    "Log",
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
    "no_log",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"weft.core.{module}"), name)
    raise AttributeError(f"module 'weft.core' has no attribute {name!r}")
