"""The operators, callable: ``weft.ops.gelu(x)``, each with ``impl=`` to name one implementation."""

from weft.ops.adamw import adamw
from weft.ops.add_layer_norm import add_layer_norm
from weft.ops.add_rms_norm import add_rms_norm
from weft.ops.attention import attention, attention_packed
from weft.ops.bias_gelu import bias_gelu
from weft.ops.cross_entropy import cross_entropy
from weft.ops.dropout import dropout
from weft.ops.dropout_add_layer_norm import dropout_add_layer_norm
from weft.ops.embedding import embedding
from weft.ops.geglu import geglu
from weft.ops.gelu import gelu
from weft.ops.layer_norm import layer_norm
from weft.ops.linear import linear
from weft.ops.linear_cross_entropy import linear_cross_entropy
from weft.ops.linear_gelu import linear_gelu
from weft.ops.linear_residual import linear_residual
from weft.ops.matmul import matmul
from weft.ops.relu import relu
from weft.ops.rms_norm import rms_norm
from weft.ops.rope import rope
from weft.ops.softmax import softmax
from weft.ops.sum import sum
from weft.ops.swiglu import swiglu

__all__ = [
    "adamw",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "attention_packed",
    "bias_gelu",
    "cross_entropy",
    "dropout",
    "dropout_add_layer_norm",
    "embedding",
    "geglu",
    "gelu",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_gelu",
    "linear_residual",
    "matmul",
    "relu",
    "rms_norm",
    "rope",
    "softmax",
    "sum",
    "swiglu",
]
