"""The operators, callable: ``weft.ops.gelu(x)``, each with ``impl=`` to name one implementation."""

from weft.ops.activations import bias_gelu, gelu, relu
from weft.ops.adamw import adamw
from weft.ops.attention import attention, attention_packed
from weft.ops.attention_decode import attention_decode
from weft.ops.block_sparse import block_sparse_linear
from weft.ops.conv1d import conv1d
from weft.ops.conv2d import conv2d
from weft.ops.cumsum import cumsum
from weft.ops.dropout import dropout
from weft.ops.embedding import embedding
from weft.ops.gated import geglu, swiglu
from weft.ops.histogram import histogram
from weft.ops.linear import linear, linear_gelu, linear_residual, mlp_gelu
from weft.ops.losses import cross_entropy, linear_cross_entropy
from weft.ops.matmul import matmul
from weft.ops.norms import (
    add_layer_norm,
    add_rms_norm,
    dropout_add_layer_norm,
    layer_norm,
    rms_norm,
)
from weft.ops.reduce import argreduce, reduce
from weft.ops.rope import rope
from weft.ops.scaled_matmul import quantize_fp8, scaled_matmul
from weft.ops.segments import segmented_cumsum, segmented_sum
from weft.ops.softmax import softmax
from weft.ops.sort import sort, sort_keys
from weft.ops.sparse import spmm, spmv
from weft.ops.sparse24 import expand_2_4, prune_2_4, prune_2_4_transposable, sparse_linear
from weft.ops.stencil import stencil
from weft.ops.sum import sum
from weft.ops.topk import topk
from weft.ops.transpose import transpose
from weft.ops.trilinear import trilinear

__all__ = [
    "adamw",
    "add_layer_norm",
    "add_rms_norm",
    "argreduce",
    "attention",
    "attention_decode",
    "attention_packed",
    "bias_gelu",
    "block_sparse_linear",
    "conv1d",
    "conv2d",
    "cross_entropy",
    "cumsum",
    "dropout",
    "dropout_add_layer_norm",
    "embedding",
    "expand_2_4",
    "geglu",
    "gelu",
    "histogram",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_gelu",
    "linear_residual",
    "matmul",
    "mlp_gelu",
    "prune_2_4",
    "prune_2_4_transposable",
    "quantize_fp8",
    "reduce",
    "relu",
    "rms_norm",
    "rope",
    "scaled_matmul",
    "segmented_cumsum",
    "segmented_sum",
    "softmax",
    "sort",
    "sort_keys",
    "sparse_linear",
    "spmm",
    "spmv",
    "stencil",
    "sum",
    "swiglu",
    "topk",
    "transpose",
    "trilinear",
]
