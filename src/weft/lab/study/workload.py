"""The workload of the MLP study: its shapes, the points that are timed, and their FLOPs and bytes.

The MLP is ``depth`` times ``gelu(x @ W.T + b)`` with square W, so x stays (batch, width). Its cost
is the sum over its operators, as PyTorch runs them: each operator reads its inputs once and writes
its output once. FLOPs are the matrix products' alone, a multiply-add being 2, as
``torch.utils.flop_counter`` counts them. With B = batch, W = width, D = depth, and an AdamW that
stores two moments,

    forward pass    2 B W^2 D FLOPs           weights read once
    training step   2 B W^2 (3 D - 1) FLOPs   weights read twice, their gradients written once;
                                              the optimizer reads 4 tensors of them and writes 3

The first layer's input needs no gradient, hence the - 1. The bytes of the weights do not grow with
the batch and the FLOPs do: a small batch is bound by memory, a large one by arithmetic. The
transition is at the roofline's ridge (Williams, Waterman and Patterson 2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from weft.core import Ceilings, Cost, WeftError

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
PHASES = ("forward", "step")
KINDS = ("matmul", "gelu", "optimizer", "other")  # of operators, in tables and profiles
MAX_BATCH = 1 << 24  # the search for the transition batch ends here
MIN_POINTS = {"depths": 3, "widths": 3, "batches": 5, "steps": 3}  # as many as a fit needs


@dataclass(frozen=True, kw_only=True)
class Shape:
    """An MLP and its batch: ``depth`` layers of ``width`` x ``width``, inputs (batch, width)."""

    batch: int
    depth: int
    width: int
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        for field in ("batch", "depth", "width"):
            if getattr(self, field) < 1:
                raise WeftError(field, expected="at least 1", got=getattr(self, field))
        if self.dtype not in ITEM_BYTES:
            raise WeftError("dtype", expected=" or ".join(ITEM_BYTES), got=self.dtype)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's weights and bias."""
        return (self.width + 1) * self.width * ITEM_BYTES[self.dtype]

    @property
    def activation_bytes(self) -> int:
        """Bytes of one (batch, width) tensor."""
        return self.batch * self.width * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class OperatorCost:
    """An operator of a phase: ``count`` calls of this cost each. ``kind`` is the profile's kind."""

    name: str
    kind: str
    count: int
    cost: Cost


def operator_costs(shape: Shape, phase: str) -> tuple[OperatorCost, ...]:
    """List the operators of ``phase`` with the bytes and FLOPs of one call.

    ``forward`` is the forward pass without loss; ``step`` adds the loss, the backward pass and the
    optimizer. Raises :class:`WeftError` for another phase.
    """
    if phase not in PHASES:
        raise WeftError("phase", expected=" or ".join(PHASES), got=phase)
    act, layer, depth = shape.activation_bytes, shape.layer_bytes, shape.depth
    bias = shape.width * ITEM_BYTES[shape.dtype]
    weights = layer - bias
    flops = 2.0 * shape.batch * shape.width**2

    def operator(name: str, kind: str, count: int, read: int, written: int) -> OperatorCost:
        cost = Cost(read=read, written=written)
        if kind == "matmul":
            cost = replace(cost, flops=flops, rate=shape.dtype)
        return OperatorCost(name=name, kind=kind, count=count, cost=cost)

    forward = (
        operator("linear", "matmul", depth, layer + act, act),
        operator("gelu", "gelu", depth, act, act),
    )
    if phase == "forward":
        return forward
    # The first layer's input is data, so depth - 1 layers compute a gradient of their input.
    input_gradient = [operator("input gradient", "matmul", depth - 1, act + weights, act)]
    return (
        *forward,
        operator("loss", "other", 1, 2 * act, 0),
        operator("loss backward", "other", 1, 2 * act, act),
        operator("gelu backward", "gelu", depth, 2 * act, act),
        operator("weight gradient", "matmul", depth, 2 * act, weights),
        operator("bias gradient", "other", depth, act, bias),
        *(input_gradient if depth > 1 else []),
        # Reads weights, gradients and two moments; writes all of them but the gradients.
        operator("optimizer", "optimizer", depth, 4 * layer, 3 * layer),
    )


def total_cost(shape: Shape, phase: str) -> Cost:
    """Sum the cost of the whole phase over :func:`operator_costs`."""
    operators = operator_costs(shape, phase)
    return Cost(
        read=sum(p.count * p.cost.read for p in operators),
        written=sum(p.count * p.cost.written for p in operators),
        flops=sum(p.count * p.cost.flops for p in operators),
        rate=shape.dtype,
    )


def resident_bytes(shape: Shape, phase: str) -> int:
    """Return the bytes that every call of the phase touches; a cold call needs them to outgrow the cache.

    For a step: weights, gradients and two moments, and two activations a layer that the backward
    pass reads. For a forward pass: the weights and the two activations that are alive at once.
    """
    if phase == "forward":
        return shape.depth * shape.layer_bytes + 2 * shape.activation_bytes
    return shape.depth * (4 * shape.layer_bytes + 2 * shape.activation_bytes)


def floor(shape: Shape, phase: str, ceilings: Ceilings) -> float:
    """Return the seconds that the roofline allows: the sum of each operator's floor.

    Raises :class:`WeftError` if the dtype's rate was not measured.
    """
    _require_rate(shape, ceilings)
    return sum(p.count * (ceilings.floor(p.cost) or 0.0) for p in operator_costs(shape, phase))


def memory_and_compute_time(shape: Shape, phase: str, ceilings: Ceilings) -> tuple[float, float]:
    """Return the seconds of all bytes at the bandwidth ceiling, and of all FLOPs at the rate ceiling."""
    _require_rate(shape, ceilings)
    cost = total_cost(shape, phase)
    return cost.nbytes / ceilings.bandwidth(cost), cost.flops / ceilings.matrix[shape.dtype]


def transition_batch(shape: Shape, phase: str, ceilings: Ceilings) -> int | None:
    """Return the smallest batch at which FLOPs / rate reaches bytes / bandwidth, over the whole phase.

    None if no batch does: at a small width the activations' bytes always outweigh the products.
    """

    def is_compute_bound(batch: int) -> bool:
        memory, compute = memory_and_compute_time(replace(shape, batch=batch), phase, ceilings)
        return compute >= memory

    # The FLOPs grow with the batch and the weights' bytes do not, so there is one transition at most:
    # double until it is passed, then bisect.
    low, high = 0, 1
    while not is_compute_bound(high):
        low, high = high, 2 * high
        if high > MAX_BATCH:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_compute_bound(middle) else (middle, high)
    return high


def _require_rate(shape: Shape, ceilings: Ceilings) -> None:
    if shape.dtype not in ceilings.matrix:
        raise WeftError(
            f"the roofline of {shape.dtype}",
            expected=f"a measured rate: {', '.join(ceilings.matrix)}",
            got="none",
            hint="weft device --measure",
        )


@dataclass(frozen=True)
class Point:
    """One thing to time: ``steps`` training steps in a row (``phase`` step), or one forward pass."""

    shape: Shape
    phase: str
    steps: int = 1

    @property
    def title(self) -> str:
        shape, steps = self.shape, f" x {self.steps}" if self.steps > 1 else ""
        size = f"batch {shape.batch}, {shape.depth} layers of {shape.width}"
        return f"{self.phase}{steps}, {size}, {shape.dtype}"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Four rising lists. One varies in a sweep; each of the others stays at its middle element.

    Raises :class:`WeftError` if a list is too short for its fit.
    """

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    batches: tuple[int, ...]
    steps: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        for field, least in MIN_POINTS.items():
            values = getattr(self, field)
            rising = all(a < b for a, b in pairwise(values))
            if len(values) < least or values[0] < 1 or not rising:
                expected = f"{least} or more whole numbers from 1, rising"
                raise WeftError(f"--{field}", expected=expected, got=list(values))
        self.base  # noqa: B018 - building the base's Shape refuses an unknown dtype here

    @property
    def base(self) -> Shape:
        return Shape(
            batch=middle(self.batches),
            depth=middle(self.depths),
            width=middle(self.widths),
            dtype=self.dtype,
        )

    def sweeps(self) -> dict[str, list[Point]]:
        """Return the points of each sweep in rising order, for every phase. Each sweep has the base."""
        base = self.base
        shapes = {
            "layers": [replace(base, depth=d) for d in self.depths],
            "width": [replace(base, width=w) for w in self.widths],
            "batch": [replace(base, batch=b) for b in self.batches],
        }
        sweeps = {"steps": [Point(base, "step", n) for n in self.steps]}
        for name, values in shapes.items():
            sweeps[name] = [Point(shape, phase) for phase in PHASES for shape in values]
        return sweeps

    def points(self) -> list[Point]:
        """Return every point once, also one that is in several sweeps."""
        return list(dict.fromkeys(p for points in self.sweeps().values() for p in points))

    def model_depth(self, width: int) -> int:
        """Return the layers of the model of this width: all depths are timed at the base's width."""
        return max(self.depths) if width == self.base.width else self.base.depth

    def memory(self) -> int:
        """Return the bytes that the study needs at once.

        They are each width's weights, gradients and two moments, and for each point the private
        memory of its captured graph, estimated as half of what the point touches.
        """
        models = sum(4 * self.model_depth(w) * replace(self.base, width=w).layer_bytes for w in self.widths)
        graphs = sum(resident_bytes(p.shape, p.phase) // 2 for p in self.points())
        return models + graphs


def middle(values: Sequence[int]) -> int:
    """Return the element in the middle, the upper one of two."""
    return values[len(values) // 2]


def default_sizes(device: str, quick: bool = False, dtype: str | None = None) -> Sizes:
    """Return the sizes of a device ('cuda' or 'cpu').

    The weights outgrow the last-level cache at the base, and the batches lie on both sides of the
    transition. ``quick`` sizes are small and show neither.
    """
    if quick:
        return Sizes(
            depths=(1, 2, 3),
            widths=(64, 128, 256),
            batches=(1, 4, 16, 64, 256),
            steps=(1, 2, 3),
            dtype=dtype or ("bf16" if device == "cuda" else "fp32"),
        )
    if device == "cuda":
        return Sizes(
            depths=(4, 8, 16, 24, 32),
            widths=(512, 1024, 2048, 4096, 6144, 8192),
            batches=tuple(2**i for i in range(13)),
            steps=(1, 2, 4, 8, 16),
            dtype=dtype or "bf16",
        )
    return Sizes(
        depths=(8, 10, 12, 16, 20),
        widths=(256, 512, 1024, 1536, 2048, 2560),
        batches=tuple(2**i for i in range(10)),
        steps=(1, 2, 4, 8),
        dtype=dtype or "fp32",
    )
