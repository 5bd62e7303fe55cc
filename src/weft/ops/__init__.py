"""The operators, callable: ``weft.ops.gelu(x)``, each with ``impl=`` to name one implementation."""

from weft.ops.gelu import gelu
from weft.ops.matmul import matmul
from weft.ops.softmax import softmax
from weft.ops.sum import sum

__all__ = ["gelu", "matmul", "softmax", "sum"]
