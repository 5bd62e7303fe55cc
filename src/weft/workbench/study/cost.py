"""What a step of an MLP cannot do without: the FLOPs and compulsory bytes of its operators.

The MLP is ``depth`` times ``gelu(x @ W.T + b)`` with square W, so x stays (batch, width). Its cost
is its operators' one by one, each reading its inputs once and writing its output once, as the
operators that PyTorch runs do. FLOPs are the matrix products' alone, a multiply-add being 2, as
``torch.utils.flop_counter`` counts them: with B = batch, W = width, D = depth, and an AdamW that
keeps two moments,

    forward alone   2 B W^2 D FLOPs           weights read once
    a step          2 B W^2 (3 D - 1) FLOPs   weights read twice, their gradients written once;
                                              the optimizer reads 4 tensors of them and writes 3

since the first layer's input needs no gradient. The bytes of the weights do not grow with the
batch and the FLOPs do: a small batch is bound by memory, a large one by arithmetic. Where they
cross is the roofline's ridge (Williams, Waterman and Patterson 2009).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.core import Ceilings, Cost, WeftError

DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes of an element
PHASES = ("forward", "step")
MOST = 1 << 24  # the largest batch at which a turn is looked for


@dataclass(frozen=True, kw_only=True)
class Shape:
    """An MLP and its batch: ``depth`` layers of ``width`` x ``width``, inputs (batch, width)."""

    batch: int
    depth: int
    width: int
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        for word in ("batch", "depth", "width"):
            if getattr(self, word) < 1:
                raise WeftError(word, expected="at least 1", got=getattr(self, word))
        if self.dtype not in DTYPES:
            raise WeftError("dtype", expected=" or ".join(DTYPES), got=self.dtype)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's weights and bias."""
        return (self.width + 1) * self.width * DTYPES[self.dtype]

    @property
    def activation_bytes(self) -> int:
        """Bytes of one (batch, width) tensor."""
        return self.batch * self.width * DTYPES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Part:
    """An operator of a step: ``count`` calls of this cost each. ``kind`` is what is profiled."""

    name: str
    kind: str
    count: int
    cost: Cost


def parts(shape: Shape, phase: str) -> tuple[Part, ...]:
    """The operators of ``phase``: ``forward`` (alone, no loss) or ``step`` (with the loss, the
    backward and the optimizer), each with what one call reads, writes (bytes) and computes.

    Raises :class:`WeftError` for another phase.
    """
    if phase not in PHASES:
        raise WeftError("phase", expected=" or ".join(PHASES), got=phase)
    act, layer, depth = shape.activation_bytes, shape.layer_bytes, shape.depth
    bias = shape.width * DTYPES[shape.dtype]
    weights = layer - bias
    flops = 2.0 * shape.batch * shape.width**2

    def part(name: str, kind: str, count: int, read: int, written: int) -> Part:
        cost = Cost(read=read, written=written)
        if kind == "matmul":
            cost = replace(cost, flops=flops, rate=shape.dtype)
        return Part(name=name, kind=kind, count=count, cost=cost)

    forward = (
        part("linear", "matmul", depth, layer + act, act),
        part("gelu", "gelu", depth, act, act),
    )
    if phase == "forward":
        return forward
    return (
        *forward,
        part("loss", "other", 1, 2 * act, 0),
        part("loss backward", "other", 1, 2 * act, act),
        part("gelu backward", "gelu", depth, 2 * act, act),
        part("weight gradient", "matmul", depth, 2 * act, weights),
        part("bias gradient", "other", depth, act, bias),
        # Left out where nothing asks for it: the first layer's input is data.
        *([part("input gradient", "matmul", depth - 1, act + weights, act)] if depth > 1 else []),
        part("optimizer", "optimizer", depth, 4 * layer, 3 * layer),
    )


def total(shape: Shape, phase: str) -> Cost:
    """The whole phase's cost: the sum over :func:`parts`."""
    found = parts(shape, phase)
    return Cost(
        read=sum(p.count * p.cost.read for p in found),
        written=sum(p.count * p.cost.written for p in found),
        flops=sum(p.count * p.cost.flops for p in found),
        rate=shape.dtype,
    )


def resident_bytes(shape: Shape, phase: str) -> int:
    """Bytes that the phase goes through again and again: what must outgrow the cache to be cold.

    A step's weights with gradients and two moments, and two activations a layer kept for the
    backward; a forward's weights, and the two activations that are alive at once.
    """
    if phase == "forward":
        return shape.depth * shape.layer_bytes + 2 * shape.activation_bytes
    return shape.depth * (4 * shape.layer_bytes + 2 * shape.activation_bytes)


def floor(shape: Shape, phase: str, ceilings: Ceilings) -> float:
    """Seconds that the roofline allows: each operator at the larger of its bytes' and its FLOPs'
    time, one after another. Raises :class:`WeftError` where the dtype's rate was not measured."""
    _needs_rate(shape, ceilings)
    return sum(p.count * (ceilings.floor(p.cost) or 0.0) for p in parts(shape, phase))


def times(shape: Shape, phase: str, ceilings: Ceilings) -> tuple[float, float]:
    """Seconds of the whole phase's bytes at the ceiling of their mix, and of its FLOPs."""
    _needs_rate(shape, ceilings)
    cost = total(shape, phase)
    return cost.nbytes / ceilings.bandwidth(cost), cost.flops / ceilings.matrix[shape.dtype]


def turning_batch(shape: Shape, phase: str, ceilings: Ceilings) -> int | None:
    """The least batch at which FLOPs / rate reaches bytes / bandwidth, over the whole phase.

    None where it never does: a width so small that its activations outweigh the products.
    """

    def computes(batch: int) -> bool:
        by_bytes, by_flops = times(replace(shape, batch=batch), phase, ceilings)
        return by_flops >= by_bytes

    low, high = 0, 1
    while not computes(high):
        low, high = high, 2 * high
        if high > MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if computes(middle) else (middle, high)
    return high


def _needs_rate(shape: Shape, ceilings: Ceilings) -> None:
    if shape.dtype not in ceilings.matrix:
        raise WeftError(
            f"the roofline of {shape.dtype}",
            expected=f"a measured rate: {', '.join(ceilings.matrix)}",
            got="none",
            hint="weft device --measure",
        )
