"""The operators, callable: ``weft.ops.gelu(x)``, each with ``impl=`` to name one implementation."""

from weft.ops.adamw import adamw
from weft.ops.geglu import geglu
from weft.ops.gelu import gelu
from weft.ops.matmul import matmul
from weft.ops.relu import relu
from weft.ops.softmax import softmax
from weft.ops.sum import sum
from weft.ops.swiglu import swiglu

__all__ = ["adamw", "geglu", "gelu", "matmul", "relu", "softmax", "sum", "swiglu"]
