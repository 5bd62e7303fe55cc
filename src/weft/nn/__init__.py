"""torch.nn's modules computed by ``weft.ops``, with the same arguments and state dicts."""

from weft.nn.attention import SelfAttention, rotary_angles
from weft.nn.block_sparse import BlockSparseLinear
from weft.nn.embedding import Embedding
from weft.nn.linear import MLP, Linear
from weft.nn.loss import LinearCrossEntropy
from weft.nn.norms import LayerNorm, RMSNorm
from weft.nn.optimizer import AdamW
from weft.nn.sparse import SparseLinear, SparseTrainingLinear

__all__ = [
    "MLP",
    "AdamW",
    "BlockSparseLinear",
    "Embedding",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropy",
    "RMSNorm",
    "SelfAttention",
    "SparseLinear",
    "SparseTrainingLinear",
    "rotary_angles",
]
