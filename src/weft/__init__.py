"""Weft: is a GPU kernel right, how fast is it, and how far is it from the machine's limit?"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weft.core.errors import WeftError

if TYPE_CHECKING:
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
_DECLARE = ("implementation", "operator")


def __getattr__(name: str) -> Any:
    """The words that one's own file needs, imported when they are first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(import_module("weft.core.declare" if name in _DECLARE else "weft.core"), name)
