"""Weft: is a GPU kernel right, how fast is it, and how far is it from the machine's limit?"""

from weft.core import (
    YES,
    Case,
    Cost,
    Implementation,
    Input,
    Operator,
    Property,
    Support,
    Tolerance,
    WeftError,
    case,
    check_only,
    no,
)
from weft.core.declare import implementation, operator

__version__ = "0.1.0"
__all__ = [
    "YES",
    "Case",
    "Cost",
    "Implementation",
    "Input",
    "Operator",
    "Property",
    "Support",
    "Tolerance",
    "WeftError",
    "__version__",
    "case",
    "check_only",
    "implementation",
    "no",
    "operator",
]
