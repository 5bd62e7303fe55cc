"""What each part of a step cannot go below on a device: the operators' own costs, at its sizes.

The floor of a case is the larger of its bytes over the measured bandwidth and its FLOPs over the
measured rate (``weft.core.Ceilings``). The optimizer's is the bare step's: gradient, moments and
the float32 weights read, all but the gradient written, and the rounded weights.
"""

from __future__ import annotations

import math
from typing import Any

from weft.core import BACKWARD, FORWARD, Case, Ceilings, Cost, Input, registry
from weft.core.cases import ITEMSIZE, SHORT
from weft.gpt2.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]
Costs = list[tuple[int, Cost]]  # how often each
INTEGERS = ("ids", "targets", "key_lengths")


def floors(
    config: ModelConfig,
    *,
    batch: int,
    length: int,
    parts: int,
    dtype: str,
    fused: bool,
    ceilings: Ceilings,
) -> dict[str, float | None]:
    """Microseconds a step for rows of ``weft.gpt2.shares``; None where a rate is not measured.

    Args:
        batch: sequences that a process takes at once, ``parts`` times a step.
        length: tokens of each.
        dtype: of weights and activations, float32 or bfloat16.
        fused: whether the MLP's first product and GELU are one operator.
    """
    item = ITEMSIZE[dtype]
    costs = _layers(config, batch, length, dtype, fused)
    costs |= {row: [(config.layers, c) for c in each] for row, each in
              _products(config, batch * length, dtype, fused).items()}  # fmt: skip
    found = {row: _floor(ceilings, each, parts) for row, each in costs.items()}
    held, rounded = config.parameters, 0 if dtype == "float32" else item
    step = Cost(read=held * (12 + item), written=held * (12 + rounded))
    found["optimizer"] = _floor(ceilings, [(1, step)], 1)
    found["gradients' norm"] = _floor(ceilings, [(1, Cost(read=held * item, written=0))], 1)
    return found


def _floor(ceilings: Ceilings, costs: Costs, times: int) -> float | None:
    each = [(count, ceilings.floor(cost)) for count, cost in costs]
    if any(floor is None for _, floor in each):
        return None
    return 1e6 * times * math.fsum(count * (floor or 0.0) for count, floor in each)


def _layers(
    config: ModelConfig, batch: int, length: int, dtype: str, fused: bool
) -> dict[str, Costs]:
    """The costs of every row but the products', by row."""
    c, n, layers = config.width, batch * length, config.layers
    heads = (batch, config.heads, length, c // config.heads)
    qkv: Shapes = {"q": heads, "k": heads, "v": heads, "key_lengths": (0,)}
    norm: Shapes = {"x": (n, c), "weight": (c,), "bias": (c,)}
    tables: Shapes = {
        "weight": (config.padded_vocab, c), "ids": (batch, length), "positions": (length, c)
    }  # fmt: skip
    head: Shapes = {"x": (n, c), "weight": (config.vocab_size, c), "targets": (n,)}
    wide: Shapes = {"x": (n, c), "weight": (4 * c, c), "bias": (4 * c,)}
    found: dict[str, Costs] = {}
    for way in (FORWARD, BACKWARD):
        causal = {"causal": True}
        added = _cost("add_layer_norm", way, dtype, {"residual": (n, c), **norm})
        found[f"attention {way}"] = [(layers, _cost("attention", way, dtype, qkv, causal))]
        found[f"norms {way}"] = [
            (1, _cost("layer_norm", way, dtype, norm)), (2 * layers, added)
        ]  # fmt: skip
        found[f"embedding {way}"] = [(1, _cost("embedding", way, dtype, tables))]
        found[f"head and loss {way}"] = [(1, _cost("linear_cross_entropy", way, dtype, head))]
        if fused:
            kept = _cost("linear_gelu", way, dtype, wide, {"keep": True})
            found[f"linear_gelu {way}"] = [(layers, kept)]
        else:
            found[f"gelu {way}"] = [(layers, _cost("gelu", way, dtype, {"x": (n, 4 * c)}))]
    return found


def _products(config: ModelConfig, m: int, dtype: str, fused: bool) -> dict[str, list[Cost]]:
    """The linear layers of a block: y (m, n) = x (m, k) W^T, and what its backward computes."""
    c, item, rate = config.width, ITEMSIZE[dtype], SHORT[dtype]
    found: dict[str, list[Cost]] = {}
    for n, k in ((3 * c, c), (c, c), (c, 4 * c), (4 * c, c)):
        x, w, y = m * k * item, n * k * item, m * n * item
        sizes: Shapes = {"x": (m, k), "weight": (n, k), "bias": (n,)}
        name, flops = "linear", 2.0 * m * n * k
        costs = {
            "dx": Cost(read=y + w, written=x, flops=flops, rate=rate),
            "dW": Cost(read=y + x, written=w, flops=flops, rate=rate),
            "bias": Cost(read=y, written=n * item),
        }
        if fused and n > 3 * c:  # GELU's slope is taken where the bias' gradient is summed
            name, costs["bias"] = "linear_gelu", Cost(read=2 * y, written=y + n * item)
        else:
            costs |= {way: _cost("linear", way, dtype, sizes) for way in (FORWARD, BACKWARD)}
        for part, cost in costs.items():
            found.setdefault(f"{name} {part}", []).append(cost)
    return found


def _cost(
    name: str, direction: str, dtype: str, shapes: Shapes, params: dict[str, Any] | None = None
) -> Cost:
    """An operator's cost at a case of these shapes."""
    inputs = tuple(
        Input(name=n, shape=s, dtype="int64" if n in INTEGERS else dtype) for n, s in shapes.items()
    )
    case = Case(name="step", inputs=inputs, params=params or {})
    return registry.operator(name).cost(case, direction)
