"""The 2:4 pattern in torch calls: which two of four stay, and how their places are packed.

Of a matrix w (rows, columns), each group of four adjacent columns keeps two elements. ``values``
(rows, columns / 2) has them in the order of their columns. A *code* has four bits for a group: the place of
the first element, 0 to 3, in the lower two, and that of the second, which is larger, in the upper two.

``metadata`` is (ceil(columns / 64), 8 ceil(rows / 128), 32) int32, in the order in which
``wgmma.mma_async.sp`` reads it. Word l of block (c, r) has the codes of rows 16 r + l / 4 (lower 16 bits) and
16 r + l / 4 + 8 (upper) in columns 64 c + 16 (l % 4) to 64 c + 16 (l % 4) + 15, the lowest column in the
lowest bits. Lane l of a warp loads word l: words 0 and 1 of each four lanes, or 2 and 3, serve a product of
32 columns, by the sparsity selector 0 or 1. The blocks of 128 rows, a tile of the kernel, are adjacent for
the same columns. Codes outside of the matrix are ``FILLER``, which names the first two places, because the
hardware allows no code with two equal places.

Source of the order: NVIDIA's PTX ISA, "Matrix fragments for sparse wgmma.mma_async.m64nNk32".
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP, NONZEROS = 4, 2
WORD_COLUMNS, BLOCK_COLUMNS = 16, 64  # of one row in a word; of a block of 32 words
BLOCK_ROWS, TILE_ROWS = 16, 128
WORDS = 32
FILLER = 0b0100
# The bits of infinity; those of NaN are larger.
INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}


def metadata_shape(rows: int, columns: int) -> tuple[int, int, int]:
    """Return the shape of the metadata of a matrix (rows, columns)."""
    row_blocks = -(-rows // TILE_ROWS) * (TILE_ROWS // BLOCK_ROWS)
    return -(-columns // BLOCK_COLUMNS), row_blocks, WORDS


def magnitudes(w: Tensor) -> Tensor:
    """Return int64 numbers in the order of the magnitudes: NaN, all alike, is the largest."""
    signed = torch.int32 if w.dtype == torch.float32 else torch.int16
    bits = w.detach().resolve_neg().view(signed) & torch.iinfo(signed).max
    return bits.long().clamp(max=INFINITY[w.dtype] + 1)


def groups(x: Tensor) -> Tensor:
    """Return (rows, columns / 4, 4) of a matrix (rows, columns)."""
    return x.reshape(x.shape[0], x.shape[1] // GROUP, GROUP)


def places_of(stays: Tensor) -> Tensor:
    """Return the two places, in rising order, of groups (..., 4) of which one, two or no element stays.

    The lowest places that do not stay fill up the two.
    """
    # An element's number: among those that stay, and behind them among the others.
    others = ~stays
    number = torch.where(stays, stays.cumsum(-1), stays.sum(-1, keepdim=True) + others.cumsum(-1)) - 1
    is_chosen = number < NONZEROS
    first = is_chosen.int().argmax(-1)
    second = GROUP - 1 - is_chosen.flip(-1).int().argmax(-1)
    return torch.stack((first, second), -1)


def pack(places: Tensor) -> Tensor:
    """Return the metadata of places (rows, columns / 4, 2)."""
    rows, count = places.shape[:2]
    blocks, row_blocks, _ = metadata_shape(rows, count * GROUP)
    missing = (0, blocks * BLOCK_COLUMNS // GROUP - count, 0, row_blocks * BLOCK_ROWS - rows)
    codes = torch.nn.functional.pad(places[..., 0] | places[..., 1] << 2, missing, value=FILLER)
    # Dimensions: block of rows, half, row; block of columns, quarter (of a quad's lanes), group in the word.
    split = codes.view(row_blocks, 2, BLOCK_ROWS // 2, blocks, GROUP, GROUP)
    ordered = split.permute(3, 0, 2, 4, 1, 5).reshape(blocks, row_blocks, WORDS, 8)
    shifts = torch.arange(0, 32, 4, device=places.device)
    return (ordered << shifts).sum(-1).to(torch.int32)


def unpack(metadata: Tensor, rows: int, columns: int) -> Tensor:
    """Return the places (rows, columns / 4, 2) of a matrix (rows, columns) from its metadata, as int64."""
    blocks, row_blocks, _ = metadata.shape
    shifts = torch.arange(0, 32, 4, device=metadata.device)
    codes = metadata.long()[..., None] >> shifts & 15
    split = codes.view(blocks, row_blocks, BLOCK_ROWS // 2, GROUP, 2, GROUP)
    codes = split.permute(1, 4, 2, 0, 3, 5).reshape(row_blocks * BLOCK_ROWS, blocks * BLOCK_COLUMNS // GROUP)
    codes = codes[:rows, : columns // GROUP]
    return torch.stack((codes & 3, codes >> 2), -1)


def expand(values: Tensor, metadata: Tensor) -> Tensor:
    """Return the matrix (rows, columns) with zeros at the places that the metadata does not name."""
    rows, columns = values.shape[0], values.shape[1] * GROUP // NONZEROS
    places = unpack(metadata, rows, columns)
    pairs = values.reshape(rows, columns // GROUP, NONZEROS)
    zeros = values.new_zeros((rows, columns // GROUP, GROUP))
    return zeros.scatter(-1, places, pairs).view(rows, columns)


def compress(w: Tensor, metadata: Tensor) -> Tensor:
    """Return the elements (rows, columns / 2) of a matrix (rows, columns) that the metadata names."""
    rows, columns = w.shape
    return groups(w).gather(-1, unpack(metadata, rows, columns)).view(rows, columns // NONZEROS)
