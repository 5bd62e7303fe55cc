"""The operators, callable: ``weft.ops.gelu(x)``, each with ``impl=`` to name one implementation."""

from weft.ops.gelu import gelu

__all__ = ["gelu"]
