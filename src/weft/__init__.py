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

    patch: Any  # weft.nn.patching's: a higher floor, so it is named as a string alone

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
    "patch",
]
# Where a name stands that is not in weft.core.
_ELSEWHERE = {
    "implementation": "weft.core.declare",
    "operator": "weft.core.declare",
    "patch": "weft.nn.patching",
}


def __getattr__(name: str) -> Any:
    """What is imported when it is first asked for: the words of one's own file, and ``patch``."""
    if name not in __all__:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE.get(name, "weft.core")), name)
