"""Weft's words as small frozen dataclasses. Nothing here imports torch."""

from weft.core.case import Case, Input, case
from weft.core.cost import Ceilings, Cost
from weft.core.errors import WeftError
from weft.core.implementation import Implementation
from weft.core.operator import BACKWARD, FORWARD, Operator, Property, Tolerance
from weft.core.record import Finding, Record, Timing, Verdict
from weft.core.support import YES, Support, check_only, no

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
