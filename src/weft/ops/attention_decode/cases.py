"""Cases of attention for decoding, with inputs that have NaN wherever no query may look.

A contiguous cache is k, v (B, Hkv, Tmax, D) with a block table that nothing reads. A paged one is k, v
(P, Hkv, page_size, D) with a block table (B, max_pages). The lengths follow from the case alone, not from a
seed, because the compulsory bytes depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from weft.core import Case, Input
from weft.core.cases import SHORT

DTYPES = ("float32", "float16", "bfloat16")
GPU = ("cuda",)
RAGGED = "ragged"  # in a case's name: its sequences have different lengths


def capacity_of(case: Case) -> int:
    """Return the number of keys that a sequence of the case has room for."""
    k, block_table = case.inputs[1].shape, case.inputs[4].shape
    return k[2] * block_table[1] if case.params.get("paged") else k[2]


def lengths_of(case: Case) -> list[int]:
    """Return the lengths that a case is run with: full ones, or ragged ones with a 0 and a full one."""
    batch, capacity = case.inputs[0].shape[0], capacity_of(case)
    if RAGGED not in case.name.split("-"):
        return [capacity] * batch
    # The third is longer than the capacity, and counts as full. A step of 7919, a prime, spreads the rest.
    first = (0, capacity, capacity + 3)
    return [first[i] if i < 3 else 1 + i * 7919 % max(capacity, 1) for i in range(batch)]


def draw(case: Case, seed: int, device: str) -> Sequence[torch.Tensor]:
    """Generate normal queries and keys. Keys and values past a length are NaN.

    With queries of ``values="nan"`` the first number of each second head is NaN.

    Pages lie in a random order, and those that no sequence has are NaN as a whole. Entries of the block
    table past a length are -1.
    """
    generator = torch.Generator(device)
    generator.manual_seed(seed)

    def normal(i: Input) -> torch.Tensor:
        return torch.randn(i.shape, generator=generator, device=device, dtype=getattr(torch, i.dtype))

    q, k, v = (normal(i) for i in case.inputs[:3])
    if case.inputs[0].values == "nan":
        q[:, :, ::2, 0] = torch.nan
    lengths = torch.tensor(lengths_of(case), dtype=torch.int32, device=device)
    capacity, batch = capacity_of(case), q.shape[0]
    visible = lengths.clamp(0, capacity)
    if not case.params.get("paged"):
        rows = torch.arange(capacity, device=device) >= visible[:, None]
        for cache in (k, v):
            cache.masked_fill_(rows[:, None, :, None], torch.nan)
        return q, k, v, lengths, torch.full((batch, 1), -1, dtype=torch.int32, device=device)
    pages, page_size, max_pages = k.shape[0], k.shape[2], case.inputs[4].shape[1]
    order = torch.randperm(pages, generator=generator, device=device)
    # The cases have pages enough for all sequences; another number, as a thinned case may have, repeats.
    count = batch * max_pages
    block_table = order.repeat(-(-count // max(pages, 1)))[:count].view(batch, max_pages)
    used = torch.arange(max_pages, device=device) * page_size < visible[:, None]
    hidden = torch.ones((pages, page_size), dtype=torch.bool, device=device)
    inside = torch.arange(capacity, device=device).view(max_pages, page_size) < visible[:, None, None]
    # Pages of two sequences are equal only in a case with too few of them: a key that one sees stays.
    for sequence in range(batch):
        own = block_table[sequence][used[sequence]]
        hidden[own] &= ~inside[sequence][used[sequence]]
    for cache in (k, v):
        cache.masked_fill_(hidden[:, None, :, None], torch.nan)
    return q, k, v, lengths, block_table.masked_fill(~used, -1).int()


def decode_case(
    *q: int,
    kv: tuple[int, int],
    page_size: int = 0,
    dtype: str = "float32",
    layouts: tuple[str, str, str] = ("contiguous",) * 3,
    ragged: bool = False,
    values: str = "normal",
    tags: str = "check",
    devices: tuple[str, ...] = ("cpu", "cuda"),
    **params: Any,
) -> Case:
    """Return a case of queries ``q`` (B, T, H, D) and ``kv`` (Hkv, capacity).

    Its name tells these sizes, e.g. ``bf16-32x1x32x128-8x8192`` or ``fp32-3x2x4x16-2x40-paged-8-ragged``.
    ``values`` are those of the queries.
    """
    (b, t, h, d), (kv_heads, capacity) = q, kv
    parts = [SHORT[dtype], f"{b}x{t}x{h}x{d}", f"{kv_heads}x{capacity}"]
    parts += [f"paged-{page_size}"] if page_size else []
    parts += [RAGGED] * ragged + [values] * (values != "normal")
    parts += ["-".join(layouts)] if layouts != ("contiguous",) * 3 else []
    shape, table = (b, kv_heads, capacity, d), (b, 1)
    if page_size:
        max_pages = -(-capacity // page_size)
        # One page more than all sequences can have: the number of pages is not that of the sequences.
        shape, table = (b * max_pages + 1, kv_heads, page_size, d), (b, max_pages)
    shapes = {"q": (b, t, h, d), "k": shape, "v": shape}
    inputs = [
        Input(name=name, shape=s, dtype=dtype, layout=layout)
        for (name, s), layout in zip(shapes.items(), layouts, strict=True)
    ]
    inputs[0] = replace(inputs[0], values=values)
    inputs.append(Input(name="lengths", shape=(b,), dtype="int32"))
    inputs.append(Input(name="block_table", shape=table, dtype="int32"))
    return Case(
        name="-".join(parts),
        inputs=tuple(inputs),
        params={"paged": bool(page_size), **params},
        tags=frozenset({tags}),
        devices=devices,
    )


CHECKS = [
    # One new token; groups of 1, 2 and 4 heads; a page that no tile of keys divides.
    decode_case(2, 1, 2, 16, kv=(2, 37)),
    decode_case(4, 1, 4, 16, kv=(2, 40), ragged=True),
    decode_case(4, 1, 4, 16, kv=(1, 40), page_size=8, ragged=True),
    decode_case(2, 1, 2, 16, kv=(1, 40), dtype="float16", page_size=16, ragged=True),
    decode_case(2, 1, 4, 32, kv=(2, 40), dtype="bfloat16"),
    decode_case(2, 1, 4, 32, kv=(2, 48), dtype="bfloat16", page_size=16),
    # Several new tokens, of which the first may see no key.
    decode_case(4, 3, 2, 16, kv=(1, 19), ragged=True),
    decode_case(2, 5, 2, 16, kv=(1, 33), page_size=4, scale=0.3),
    # Two splits, the second of one key.
    decode_case(1, 1, 2, 8, kv=(1, 513)),
]
ON_GPU: list[Case] = [
    decode_case(*q, kv=kv, page_size=page_size, dtype=dtype, ragged=True, devices=GPU)
    for dtype, q, kv, page_size in (
        ("bfloat16", (5, 1, 32, 128), (8, 2100), 0),
        ("bfloat16", (5, 1, 32, 128), (8, 2100), 64),
        ("bfloat16", (4, 4, 16, 64), (2, 700), 0),
        ("bfloat16", (4, 16, 16, 128), (2, 1030), 32),
        ("bfloat16", (4, 1, 4, 256), (1, 900), 0),
        ("bfloat16", (4, 2, 6, 80), (2, 600), 16),
        ("float16", (4, 1, 12, 64), (12, 1024), 0),
        ("float16", (4, 1, 8, 192), (2, 600), 48),
        ("float16", (4, 1, 71, 64), (1, 1500), 0),
        ("float32", (4, 1, 12, 64), (12, 1024), 0),
        ("float32", (4, 3, 8, 128), (2, 600), 24),
    )
]
EDGES = [
    *(decode_case(*s, kv=kv, tags="edge") for s, kv in (((0, 1, 2, 16), (1, 5)), ((2, 1, 2, 16), (1, 0)))),
    decode_case(2, 0, 2, 16, kv=(1, 5), tags="edge"),
    decode_case(1, 1, 1, 8, kv=(1, 1), tags="edge"),
    # Heads that share keys, and so a tile, of which only some have a NaN.
    decode_case(2, 2, 4, 16, kv=(1, 40), values="nan", tags="edge"),
    decode_case(2, 1, 4, 32, kv=(1, 48), dtype="bfloat16", page_size=16, values="nan", tags="edge"),
    decode_case(2, 1, 4, 16, kv=(2, 20), layouts=("sliced", "shifted", "transposed"), tags="edge"),
    decode_case(
        2, 1, 4, 16, kv=(2, 20), dtype="bfloat16", layouts=("shifted", "sliced", "shifted"), tags="edge"
    ),
    decode_case(
        2, 1, 2, 24, kv=(1, 40), page_size=16, layouts=("contiguous", "sliced", "shifted"), tags="edge"
    ),
]
BENCH: dict[str, Any] = {"dtype": "bfloat16", "tags": "bench", "devices": GPU}
BENCHES = [
    decode_case(32, 1, 32, 128, kv=(8, 8192), **BENCH),
    decode_case(32, 1, 32, 128, kv=(8, 8192), page_size=64, **BENCH),
    decode_case(1, 1, 32, 128, kv=(8, 32768), **BENCH),
    decode_case(64, 1, 12, 64, kv=(12, 1024), **BENCH),
    decode_case(8, 4, 32, 128, kv=(8, 8192), page_size=64, **BENCH),
    decode_case(2, 1, 8, 64, kv=(2, 1024), tags="bench", devices=("cpu",)),
]
CASES = (*CHECKS, *ON_GPU, *EDGES, *BENCHES)
