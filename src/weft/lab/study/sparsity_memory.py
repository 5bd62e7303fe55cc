"""Memory of a weight by its kind of sparsity, counted to the byte: values, metadata, both orientations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.ops.sparse24 import pattern

INDEX_BYTES = 4  # of int32


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of ``values``, of ``metadata``, and of what the ``transposed`` product needs beside them."""

    values: int
    metadata: int
    transposed: int

    @property
    def inference(self) -> int:
        return self.values + self.metadata

    @property
    def training(self) -> int:
        """Bytes while a gradient is computed, without gradients and the optimizer's state."""
        return self.inference + self.transposed


def dense(n: int, k: int, itemsize: int) -> WeightBytes:
    """Return the bytes of a dense weight (N, K), which both products read as it is."""
    return WeightBytes(n * k * itemsize, 0, 0)


def semi_structured(n: int, k: int, itemsize: int) -> WeightBytes:
    """Return the bytes of a 2:4 weight; ``transposed`` is that of a pruning of both orientations."""

    def metadata(rows: int, columns: int) -> int:
        return INDEX_BYTES * math.prod(pattern.metadata_shape(rows, columns))

    values = n * (k // 2) * itemsize
    other = k * (n // 2) * itemsize + metadata(k, n)
    return WeightBytes(values, metadata(n, k), other)


def in_blocks(n: int, k: int, itemsize: int, block: int, density: float) -> WeightBytes:
    """Return the bytes of a weight in blocks; its transposed product needs an index, and no second values."""
    rows, columns = n // block, k // block
    count = min(rows * columns, max(round(density * rows * columns), int(density > 0)))
    index = INDEX_BYTES * (rows + 1 + count)
    return WeightBytes(count * block * block * itemsize, index, INDEX_BYTES * (columns + 1 + 2 * count))


def unstructured(n: int, k: int, itemsize: int, density: float) -> WeightBytes:
    """Return the bytes of a weight in CSR; a backward makes the transposed matrix."""
    count = round(density * n * k)
    index = INDEX_BYTES * (count + n + 1)
    return WeightBytes(count * itemsize, index, count * (itemsize + INDEX_BYTES) + INDEX_BYTES * (k + 1))
