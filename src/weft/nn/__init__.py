"""torch.nn's modules computed by ``weft.ops``: the same arguments, the same state dicts."""

from weft.nn.embedding import Embedding
from weft.nn.norms import LayerNorm, RMSNorm
from weft.nn.optimizer import AdamW

__all__ = ["AdamW", "Embedding", "LayerNorm", "RMSNorm"]
