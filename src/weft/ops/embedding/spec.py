"""Token and position embedding: y[b, t] = weight[ids[b, t]] + positions[t].

The gradient of a row of ``weight`` is the sum over the tokens with its id, in a fixed order; a row
that no id names has a gradient of zero. ``positions`` without rows, (0, C), means no positions.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Input, Operator, Tolerance, WeftError
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate

DTYPES = ("float32", "float16", "bfloat16")


def reference(weight: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    # Plain indexing: check_ids has refused every other id, and the cases have valid ids only.
    rows = weight[ids]
    return rows + positions[: ids.shape[1]] if positions.shape[0] else rows


def save(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """Save the ids and the rows of each gradient; dtype and columns follow from the incoming gradient."""
    weight, ids, positions = inputs
    return ids, weight.shape[0], positions.shape[0]


def check_arguments(weight: Any, ids: Any, positions: Any) -> None:
    """Raise :class:`WeftError` if the arguments are invalid; :func:`check_ids` checks the ids' values."""
    validate.tensor("embedding", "weight", weight, DTYPES, dims=range(2, 3))
    validate.tensor("embedding", "ids", ids, ("int64",), dims=range(2, 3))
    validate.tensor("embedding", "positions", positions, DTYPES, dims=range(2, 3))
    validate.same("embedding", "weight and positions", weight, positions)
    validate.same_device("embedding", "weight and ids", weight, ids)
    if positions.shape[1] != weight.shape[1]:
        raise WeftError(
            "embedding: the columns of positions",
            expected=f"{weight.shape[1]}, as weight has",
            got=positions.shape[1],
        )
    if not weight.shape[0] and ids.numel():
        raise WeftError("embedding: ids", expected="none, as weight has no rows", got=tuple(ids.shape))
    if 0 < positions.shape[0] < ids.shape[1]:
        raise WeftError(
            "embedding: the rows of positions",
            expected=f"at least {ids.shape[1]}, one for each token of a sequence",
            got=positions.shape[0],
            hint="cut the sequences, or leave positions out",
        )


def check_ids(ids: torch.Tensor, rows: int) -> None:
    """Raise :class:`WeftError` if an id is not below ``rows``; reads every id: on a GPU it waits for the
    device."""
    if not ids.numel():
        return
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < 0 or high >= rows:
        raise WeftError(
            "embedding: ids",
            expected=f"at least 0 and below {rows}, the rows of weight",
            got=low if low < 0 else high,
        )


@cache
def distinct(rows: int, tokens: int, zipf: bool) -> int:
    """Return the expected number of distinct ids among ``tokens`` random ids."""
    if not zipf:
        return round(rows * (1 - (1 - 1 / rows) ** tokens)) if rows else 0
    # The k-th id has the probability 1 / (k whole), and is missing from n tokens with (1 - p)^n.
    whole = sum(1 / (k + 1) for k in range(rows))
    return round(sum(1 - (1 - 1 / ((k + 1) * whole)) ** tokens for k in range(rows)))


def _kind(c: Case) -> str:
    last = c.name.rsplit("-", 1)[-1]
    return last if last in ("zipf", "one", "nan") else "uniform"


def cost(c: Case, direction: str) -> Cost:
    """Count bytes. Forward reads the ids, the rows of weight that ids name and T positions, once each, and
    writes the output. Backward reads ids and gradient and writes every row of both gradients."""
    weight, ids, positions = c.inputs
    rows, columns = weight.shape
    line = columns * ITEMSIZE[c.dtype]
    kind, places = _kind(c), positions.shape[0]
    if direction == FORWARD:
        # A row that several tokens name is read from memory once; the floor must not count it again.
        named = min(1, ids.numel) if kind == "one" else distinct(rows, ids.numel, kind == "zipf")
        read = named + (ids.shape[1] if places else 0)
        return Cost(read=ids.nbytes + read * line, written=ids.numel * line)
    return Cost(read=ids.nbytes + ids.numel * line, written=(rows + places) * line)


def draw(c: Case, seed: int, device: str) -> list[torch.Tensor]:
    """Generate normal tables, and ids that are uniform, follow Zipf's law (the k-th id is 1/k as likely as
    the first), or are all the same. With ``nan`` each third row of the weights begins with NaN."""
    generator = torch.Generator(device)
    generator.manual_seed(seed)
    weight, ids, positions = c.inputs
    normal = [
        torch.randn(i.shape, generator=generator, device=device).to(getattr(torch, i.dtype))
        for i in (weight, positions)
    ]
    rows, kind = weight.shape[0], _kind(c)
    if kind == "nan":
        normal[0][::3, 0] = torch.nan
    if kind == "zipf":
        chance = 1 / torch.arange(1, rows + 1, device=device, dtype=torch.float64)
        # float64: a float32 cumulative sum over 128256 ids would merge the rare ones.
        cumulative = chance.cumsum(0)
        where = torch.rand(ids.shape, generator=generator, device=device, dtype=torch.float64)
        asked = torch.searchsorted(cumulative, where * cumulative[-1]).clamp_(max=rows - 1)
    else:
        shape = () if kind == "one" else ids.shape
        asked = torch.randint(max(rows, 1), shape, generator=generator, device=device)
        asked = asked.expand(ids.shape)
    return [normal[0], asked, normal[1]]


def _case(
    tokens: tuple[int, int],
    rows: int,
    columns: int,
    places: int,
    dtype: str = "float32",
    *,
    kind: str = "",
    layout: str = "contiguous",
    tags: str = "check",
    devices: tuple[str, ...] = ("cpu", "cuda"),
) -> Case:
    """Return a case named by B x T tokens of C columns, V and P rows: ``bf16-64x1024x768-50304-1024``."""
    b, t = tokens
    parts = [SHORT[dtype], f"{b}x{t}x{columns}", str(rows), str(places)]
    parts += [layout] if layout != "contiguous" else []
    weight = Input(name="weight", shape=(rows, columns), dtype=dtype, layout=layout)
    ids = Input(name="ids", shape=tokens, dtype="int64", layout=layout)
    positions = Input(name="positions", shape=(places, columns), dtype=dtype, layout=layout)
    return Case(
        name="-".join([*parts, *([kind] if kind else [])]),
        inputs=(weight, ids, positions),
        tags=frozenset({tags}),
        devices=devices,
    )


CHECKS = [
    *(_case((3, 17), 29, 40, 20, d) for d in DTYPES),
    _case((2, 64), 37, 24, 64, kind="zipf"),
    # All tokens have one id: a single row takes every addition, the worst case for atomics.
    _case((5, 31), 11, 13, 0, kind="one"),
    *(
        _case((16, 257), 3001, 768, 300, d, kind=k, devices=("cuda",))
        for d, k in (("bfloat16", "zipf"), ("float32", ""), ("float16", "one"))
    ),
]
EDGES = [
    *(_case(*s, tags="edge") for s in (((0, 4), 5, 8, 4), ((3, 0), 0, 8, 2), ((2, 3), 4, 0, 3))),
    _case((1, 1), 1, 1, 1, tags="edge"),
    _case((3, 17), 29, 40, 20, kind="nan", tags="edge"),
    *(_case((3, 7), 9, 18, 7, layout=k, tags="edge") for k in ("sliced", "shifted")),
    # More than 65536 rows (16-bit sort keys do not suffice) and rows of an odd number of columns.
    _case((33, 999), 70001, 99, 1000, "bfloat16", kind="zipf", tags="edge", devices=("cuda",)),
    _case((64, 1024), 50304, 768, 1024, "bfloat16", kind="one", tags="edge", devices=("cuda",)),
]
BENCHES = [
    # GPT-2's batch, with uniform ids and with ids as frequent as words; Llama 3's table without positions.
    _case((64, 1024), 50304, 768, 1024, "bfloat16", tags="bench", devices=("cuda",)),
    _case((64, 1024), 50304, 768, 1024, "bfloat16", kind="zipf", tags="bench", devices=("cuda",)),
    _case((8, 2048), 128256, 4096, 0, "bfloat16", kind="zipf", tags="bench", devices=("cuda",)),
    _case((8, 256), 4096, 256, 256, tags="bench", devices=("cpu",)),
]

OPERATOR = Operator(
    name="embedding",
    summary="token and position embedding",
    formula="y[b, t] = weight[ids[b, t]] + positions[t]",
    signature="embedding(ids, weight, positions)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("weight", "positions"),
    rows=("ids",),
    save=save,
    draw=draw,
    tolerance=Tolerance(
        chain=8.0,
        reason="the gradients of a row's tokens may be summed in any order, and a row may have thousands",
    ),
    backward_note="tokens sorted by id; the gradients of each row summed in a fixed order, in float32",
)
