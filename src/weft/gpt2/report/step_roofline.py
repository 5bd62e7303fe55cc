"""Time limits of the parts of a training step: the operators' own costs at the model's sizes.

The limit of a case is the larger of its bytes over the measured bandwidth and its FLOPs over the measured
rate (``weft.core.Ceilings``). The optimizer's is that of a bare step: gradient, moments and float32
weights read, all but the gradient written, and the rounded weights written.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from weft.core import BACKWARD, FORWARD, Case, Ceilings, Cost, Input, registry
from weft.core.cases import ITEMSIZE, SHORT
from weft.gpt2.model.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]
CountedCosts = list[tuple[int, Cost]]  # how often each cost occurs in a micro-batch
INTEGERS = ("ids", "targets", "key_lengths")


def step_limits(
    config: ModelConfig,
    *,
    batch: int,
    length: int,
    accumulate: int,
    dtype: str,
    mlp: str,
    ceilings: Ceilings,
) -> dict[str, float | None]:
    """Return the microseconds per step that each row of ``step_profile`` takes at least; None where a
    rate was not measured.

    Args:
        config: sizes of the model.
        batch: sequences of a micro-batch, of which a step has ``accumulate``.
        length: tokens of a sequence.
        accumulate: micro-batches of a step.
        dtype: of weights and activations, float32 or bfloat16.
        mlp: the operator that has the MLP's GELU: ``gelu``, ``linear_gelu`` or ``mlp_gelu``.
        ceilings: the device's measured bandwidth and rates.
    """
    item = ITEMSIZE[dtype]
    costs = _layer_costs(config, batch, length, dtype, mlp)
    for row, products in _product_costs(config, batch * length, dtype, mlp).items():
        costs[row] = [(config.layers, cost) for cost in products]
    limits = {row: _limit(ceilings, row_costs, accumulate) for row, row_costs in costs.items()}
    # Once per step, whatever the number of micro-batches.
    n, rounded_weight = config.parameters, 0 if dtype == "float32" else item
    # Bytes per parameter: two moments and the float32 weight, 4 each, read and written; the gradient read;
    # a half-precision weight written.
    update = Cost(read=n * (12 + item), written=n * (12 + rounded_weight))
    limits["optimizer"] = _limit(ceilings, [(1, update)], 1)
    limits["gradients' norm"] = _limit(ceilings, [(1, Cost(read=n * item, written=0))], 1)
    return limits


def _limit(ceilings: Ceilings, costs: CountedCosts, times: int) -> float | None:
    floors = [(count, ceilings.floor(cost)) for count, cost in costs]
    if any(floor is None for _, floor in floors):
        return None
    return 1e6 * times * math.fsum(count * (floor or 0.0) for count, floor in floors)


def _layer_costs(
    config: ModelConfig, batch: int, length: int, dtype: str, mlp: str
) -> dict[str, CountedCosts]:
    """Return the costs of every row except the linear layers'."""
    c, n, layers = config.width, batch * length, config.layers
    heads = (batch, config.heads, length, c // config.heads)
    qkv: Shapes = {"q": heads, "k": heads, "v": heads, "key_lengths": (0,)}
    norm: Shapes = {"x": (n, c), "weight": (c,), "bias": (c,)}
    tables: Shapes = {
        "weight": (config.padded_vocab, c), "ids": (batch, length), "positions": (length, c)
    }  # fmt: skip
    head: Shapes = {"x": (n, c), "weight": (config.vocab_size, c), "targets": (n,)}
    # The inputs of the operator that has GELU, and its parameters.
    shapes_of_mlp: dict[str, tuple[Shapes, dict[str, Any]]] = {
        "gelu": ({"x": (n, 4 * c)}, {}),
        "linear_gelu": ({"x": (n, c), "weight": (4 * c, c), "bias": (4 * c,)}, {"keep": True}),
        "mlp_gelu": (
            {
                "x": (n, c),
                "fc_weight": (4 * c, c),
                "fc_bias": (4 * c,),
                "proj_weight": (c, 4 * c),
                "proj_bias": (c,),
            },
            {},
        ),
    }
    costs: dict[str, CountedCosts] = {}
    for direction in (FORWARD, BACKWARD):
        attention = _cost("attention", direction, dtype, qkv, {"causal": True})
        costs[f"attention {direction}"] = [(layers, attention)]
        # The first norm has nothing to add; the other 2 layers (the last is ln_f) add the stream.
        added = _cost("add_layer_norm", direction, dtype, {"residual": (n, c), **norm})
        if direction == BACKWARD:  # in the step, both terms of the sum get one gradient, stored once
            added = replace(added, written=added.written - n * c * ITEMSIZE[dtype])
        costs[f"norms {direction}"] = [
            (1, _cost("layer_norm", direction, dtype, norm)), (2 * layers, added)
        ]  # fmt: skip
        costs[f"embedding {direction}"] = [(1, _cost("embedding", direction, dtype, tables))]
        costs[f"head and loss {direction}"] = [(1, _cost("linear_cross_entropy", direction, dtype, head))]
        costs[f"{mlp} {direction}"] = [(layers, _cost(mlp, direction, dtype, *shapes_of_mlp[mlp]))]
    return costs


def _product_costs(config: ModelConfig, m: int, dtype: str, mlp: str) -> dict[str, list[Cost]]:
    """Return the costs of a block's linear layers, y (m, n) = x (m, k) W^T, and of their backwards."""
    c, item, rate = config.width, ITEMSIZE[dtype], SHORT[dtype]
    costs: dict[str, list[Cost]] = {}
    layers = [(3 * c, c), (c, c), (c, 4 * c), (4 * c, c)]
    if mlp == "mlp_gelu":  # a row of its own has the MLP's layers
        layers = layers[:2]
    for n, k in layers:
        x, w, y = m * k * item, n * k * item, m * n * item
        shapes: Shapes = {"x": (m, k), "weight": (n, k), "bias": (n,)}
        name, flops = "linear", 2.0 * m * n * k
        # Each product reads both operands and writes its result once.
        layer = {
            "dx": Cost(read=y + w, written=x, flops=flops, rate=rate),
            "dW": Cost(read=y + x, written=w, flops=flops, rate=rate),
            "bias": Cost(read=y, written=n * item),
        }
        if (
            mlp == "linear_gelu" and n > 3 * c
        ):  # the pass that sums the bias gradient also applies GELU's slope
            name, layer["bias"] = "linear_gelu", Cost(read=2 * y, written=y + n * item)
        else:
            layer |= {d: _cost("linear", d, dtype, shapes) for d in (FORWARD, BACKWARD)}
        for part, cost in layer.items():
            costs.setdefault(f"{name} {part}", []).append(cost)
    return costs


def _cost(
    name: str, direction: str, dtype: str, shapes: Shapes, params: dict[str, Any] | None = None
) -> Cost:
    """Return an operator's cost for inputs of these shapes."""
    inputs = tuple(
        Input(name=n, shape=s, dtype="int64" if n in INTEGERS else dtype) for n, s in shapes.items()
    )
    case = Case(name="step", inputs=inputs, params=params or {})
    return registry.operator(name).cost(case, direction)
