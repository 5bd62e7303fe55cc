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

    # From higher layers, so that only strings name them: weft.dispatch.invariance and weft.nn.patching.
    batch_invariant: Any
    patch: Any

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
    "batch_invariant",
    "case",
    "check_only",
    "implementation",
    "no",
    "operator",
    "patch",
]
SUBMODULES = ("nn", "ops")  # packages that users import: weft.ops.softmax works after `import weft`
# Modules of the names that are not in weft.core.
_ELSEWHERE = {
    "batch_invariant": "weft.dispatch.invariance",
    "implementation": "weft.core.declare",
    "operator": "weft.core.declare",
    "patch": "weft.nn.patching",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import weft`` stays light."""
    if name in SUBMODULES:
        return import_module(f"weft.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE.get(name, "weft.core")), name)


def __dir__() -> list[str]:
    """List the public names, for completion in an interactive session; import nothing."""
    return sorted({*__all__, *SUBMODULES})
