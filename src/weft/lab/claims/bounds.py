"""Bounds of a claimed time: the case that a shape and a data type mean, its cost, and the roof on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from weft.core import registry
from weft.core.cases import ITEMSIZE, SHORT, Case, Input
from weft.core.cost import Cost
from weft.core.errors import WeftError
from weft.machine.specs import GpuSpec, Roof, all_specs

COPY = "copy"  # no operator of Weft: reads and writes each byte once
IMPOSSIBLE, CLOSE, POSSIBLE = "impossible", "close to the limit", "possible"
CLOSE_SHARE = 0.9
# Datasheets round to three digits, and so do claims: up to this share a claim is at the limit, not beyond it.
HIGHEST_SHARE = 1.01
COLD, WARM = "cold", "warm"
MAX_DIMENSIONS = 8
Shape = tuple[int, ...]


def operator_cost(operator: str, case: Case, direction: str) -> Cost:
    """Return the cost of a case for a bound.

    It is the operator's own, except for AdamW: that counts the copies that the workbench makes of the
    tensors that a step overwrites, and a bare step makes none.
    """
    if operator == COPY:
        (x,) = case.inputs
        return Cost(read=x.nbytes, written=x.nbytes)
    cost = registry.operator(operator).cost(case, direction)
    if operator == "adamw":
        written = cost.written // 2
        return Cost(read=cost.read - written, written=written)
    return cost


def _x(name: str, shape: Shape, dtype: str) -> Input:
    return Input(name=name, shape=shape, dtype=dtype)


def _one_input(shape: Shape, dtype: str) -> tuple[Input, ...]:
    return (_x("x", shape, dtype),)


def _with_vectors(*names: str) -> Callable[[Shape, str], tuple[Input, ...]]:
    """Inputs x (and residual) of the whole shape, and vectors of its last dimension."""

    def build(shape: Shape, dtype: str) -> tuple[Input, ...]:
        whole = ("x", "residual")
        return tuple(_x(n, shape if n in whole else shape[-1:], dtype) for n in names)

    return build


def _gated(shape: Shape, dtype: str) -> tuple[Input, ...]:
    return (_x("gate", shape, dtype), _x("up", shape, dtype))


def _matmul(shape: Shape, dtype: str) -> tuple[Input, ...]:
    m, n, k = shape
    return (_x("a", (m, k), dtype), _x("b", (k, n), dtype))


def _scaled_matmul(shape: Shape, dtype: str) -> tuple[Input, ...]:
    scales = (_x("scale_a", (), "float32"), _x("scale_b", (), "float32"))
    return (*_matmul(shape, dtype), *scales)


def _linear(shape: Shape, dtype: str) -> tuple[Input, ...]:
    m, n, k = shape
    return (_x("x", (m, k), dtype), _x("weight", (n, k), dtype), _x("bias", (n,), dtype))


def _linear_residual(shape: Shape, dtype: str) -> tuple[Input, ...]:
    return (*_linear(shape, dtype), _x("residual", shape[:2], dtype))


def _mlp_gelu(shape: Shape, dtype: str) -> tuple[Input, ...]:
    rows, inputs, hidden, outputs = shape
    return (
        _x("x", (rows, inputs), dtype),
        _x("fc_weight", (hidden, inputs), dtype),
        _x("fc_bias", (hidden,), dtype),
        _x("proj_weight", (outputs, hidden), dtype),
        _x("proj_bias", (outputs,), dtype),
    )


def _attention(shape: Shape, dtype: str) -> tuple[Input, ...]:
    lengths = Input(name="key_lengths", shape=shape[:1], dtype="int32")
    return (*(_x(name, shape, dtype) for name in "qkv"), lengths)


def _rope(shape: Shape, dtype: str) -> tuple[Input, ...]:
    tables = ((shape[-2], shape[-1] // 2), "float32")
    return (_x("x", shape, dtype), _x("cos", *tables), _x("sin", *tables))


def _trilinear(shape: Shape, dtype: str) -> tuple[Input, ...]:
    count, width = shape
    return (_x("features", (count, 8, width), dtype), _x("points", (count, 3), "float32"))


def _cross_entropy(shape: Shape, dtype: str) -> tuple[Input, ...]:
    return (_x("logits", shape, dtype), _x("targets", shape[:1], "int64"))


def _linear_cross_entropy(shape: Shape, dtype: str) -> tuple[Input, ...]:
    rows, width, vocabulary = shape
    targets = _x("targets", (rows,), "int64")
    return (_x("x", (rows, width), dtype), _x("weight", (vocabulary, width), dtype), targets)


def _adamw(shape: Shape, dtype: str) -> tuple[Input, ...]:
    names = ("param", "grad", "exp_avg", "exp_avg_sq")
    return tuple(_x(name, shape, dtype) for name in names)


@dataclass(frozen=True)
class Form:
    """Meaning of an operator's shape: what its dimensions are, their number (0: any), and the inputs."""

    dimensions: str
    count: int
    inputs: Callable[[Shape, str], tuple[Input, ...]]
    params: tuple[tuple[str, object], ...] = ()


_ANY = "any shape, as in 16384x16384 or 2^28"
_MNK = "M x N x K, as in 8192x8192x8192"
_ROWS = "rows x columns"
_DROPOUT = (("p", 0.1), ("seed", 0))
FORMS: dict[str, Form] = {
    COPY: Form(_ANY, 0, _one_input),
    "gelu": Form(_ANY, 0, _one_input),
    "relu": Form(_ANY, 0, _one_input),
    "softmax": Form(_ANY, 0, _one_input),
    "sum": Form(_ANY, 0, _one_input),
    "dropout": Form(_ANY, 0, _one_input, _DROPOUT),
    "bias_gelu": Form(_ANY, 0, _with_vectors("x", "bias")),
    "swiglu": Form(_ANY, 0, _gated),
    "geglu": Form(_ANY, 0, _gated),
    "layer_norm": Form(_ANY, 0, _with_vectors("x", "weight", "bias")),
    "rms_norm": Form(_ANY, 0, _with_vectors("x", "weight")),
    "add_layer_norm": Form(_ANY, 0, _with_vectors("x", "residual", "weight", "bias")),
    "add_rms_norm": Form(_ANY, 0, _with_vectors("x", "residual", "weight")),
    "dropout_add_layer_norm": Form(_ANY, 0, _with_vectors("x", "residual", "weight", "bias"), _DROPOUT),
    "matmul": Form(_MNK, 3, _matmul),
    "scaled_matmul": Form(_MNK, 3, _scaled_matmul, (("out_dtype", "bfloat16"),)),
    "linear": Form("rows x outputs x inputs", 3, _linear),
    "linear_gelu": Form("rows x outputs x inputs", 3, _linear, (("keep", False),)),
    "linear_residual": Form("rows x outputs x inputs", 3, _linear_residual),
    "mlp_gelu": Form("rows x inputs x hidden x outputs", 4, _mlp_gelu),
    "attention": Form("batch x heads x length x head size", 4, _attention, (("padded", False),)),
    "trilinear": Form("points x features", 2, _trilinear),
    "rope": Form("batch x heads x length x head size", 4, _rope),
    "cross_entropy": Form(_ROWS, 2, _cross_entropy),
    "linear_cross_entropy": Form("rows x width x vocabulary", 3, _linear_cross_entropy),
    "adamw": Form("the number of parameters, as in 2^27", 1, _adamw),
}


def build_case(operator: str, shape: Shape, dtype: str, *, causal: bool = False, tf32: bool = False) -> Case:
    """Return the case that a shape and a dtype mean for an operator.

    Raises :class:`WeftError` for another number of dimensions, an empty one, or a dtype that the operator
    has not.
    """
    form = FORMS.get(operator)
    if form is None:
        names = ", ".join(c.name for c in registry.operator(operator).select("bench", "cuda")[:2])
        raise WeftError(
            f"the shape of {operator}", expected=f"the name of a case, such as {names}", got=shape
        )
    text = "x".join(map(str, shape))
    if form.count and len(shape) != form.count:
        raise WeftError(f"the shape of {operator}", expected=form.dimensions, got=text)
    if min(shape) < 1 or len(shape) > MAX_DIMENSIONS:
        expected = f"at most {MAX_DIMENSIONS} dimensions of at least 1"
        raise WeftError(f"the shape of {operator}", expected=expected, got=text)
    dtypes = tuple(ITEMSIZE) if operator == COPY else registry.operator(operator).dtypes
    if dtype not in dtypes:
        expected = ", ".join(SHORT.get(d, d) for d in dtypes)
        raise WeftError(f"the data type of {operator}", expected=expected, got=SHORT.get(dtype, dtype))
    params: dict[str, Any] = dict(form.params)
    if operator == "attention":
        params["causal"] = causal
    if operator == "matmul" and tf32:
        params["precision"] = "tf32"
    return Case(
        name=f"{SHORT.get(dtype, dtype)}-{text}",
        inputs=form.inputs(shape, dtype),
        params=params,
        tags=frozenset({"bench"}),
    )


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A claim as it was understood. ``cases`` has more than one reading where the sentence leaves one open.

    ``figure`` is the number as it was written, with its unit; ``unit`` is ``s``, ``B/s`` or ``FLOP/s``, and
    ``value`` the figure in it. ``caches`` are the states of the caches that the sentence allows.
    """

    operator: str
    direction: str
    cases: dict[str, Case]
    value: float
    unit: str
    figure: str
    gpu: str
    gpus: tuple[GpuSpec, ...]
    caches: tuple[str, ...]

    def seconds(self, cost: Cost) -> float:
        """Return the claimed time. Raise :class:`WeftError` for a rate that the operator has not."""
        if self.unit == "s":
            return self.value
        if self.unit == "B/s":
            return cost.nbytes / self.value
        if not cost.flops:
            hint = f"say a time or GB/s: {self.operator} is bound by its bytes"
            raise WeftError(f"FLOP/s of {self.operator}", expected="a product", got=self.figure, hint=hint)
        return cost.flops / self.value


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One reading of a claim: a GPU, a state of its caches and a case, with the roof there.

    ``share`` is the shortest possible time over the claimed one: 1 is the limit.
    """

    gpu: GpuSpec
    cache: str
    reading: str
    cost: Cost
    claimed: float
    roof: Roof
    fits: bool

    @property
    def share(self) -> float:
        return self.roof.seconds / self.claimed

    @property
    def verdict(self) -> str:
        if not self.fits or self.share > HIGHEST_SHARE:
            return IMPOSSIBLE
        return CLOSE if self.share >= CLOSE_SHARE else POSSIBLE

    def to_json(self) -> dict[str, Any]:
        rate = self.cost.rate
        return {
            "gpu": self.gpu.key,
            "cache": self.cache,
            "reading": self.reading,
            "verdict": self.verdict,
            "shortest_us": self.roof.seconds * 1e6,
            "share_of_limit": self.share,
            "limit": self.roof.limit,
            "claimed_us": self.claimed * 1e6,
            "nbytes": self.cost.nbytes,
            "flops": self.cost.flops,
            "rate": rate,
            "intensity": self.cost.flops / self.cost.nbytes if self.cost.nbytes else None,
            "ridge": None if rate is None else self.gpu.ridge(rate),
            "fits_memory": self.fits,
        }


@cache
def _l2_bytes(arch: str) -> int:
    """Return the largest L2 of an architecture, for its GPUs whose own is not in the table."""
    return max(spec.l2_mib or 0 for spec in all_specs() if spec.arch == arch) << 20


def bounds(statement: Statement) -> Iterator[Bound]:
    """Yield the bound of each reading. Raise :class:`WeftError` for a GPU without the case's rate."""
    for gpu, (reading, case), state in product(statement.gpus, statement.cases.items(), statement.caches):
        cost = operator_cost(statement.operator, case, statement.direction)
        l2 = gpu.l2_mib << 20 if gpu.l2_mib else _l2_bytes(gpu.arch)
        roof = gpu.roof(cost, cached_bytes=l2 if state == WARM else 0)
        if roof is None:
            expected = ", ".join(gpu.tflops)
            raise WeftError(f"{gpu.key}: a rate of its datasheet", expected=expected, got=str(cost.rate))
        fits = gpu.memory_gb is None or cost.nbytes <= gpu.memory_gb * (1 << 30)
        yield Bound(
            gpu=gpu,
            cache=state,
            reading=reading,
            cost=cost,
            claimed=statement.seconds(cost),
            roof=roof,
            fits=fits,
        )


def decide(rows: list[Bound]) -> str:
    """Return the verdict that all readings share. Raise :class:`WeftError` if they disagree."""
    impossible = [row for row in rows if row.verdict == IMPOSSIBLE]
    if len(impossible) == len(rows):
        return IMPOSSIBLE
    if not impossible:
        return CLOSE if any(row.verdict == CLOSE for row in rows) else POSSIBLE
    differing = {
        "the GPU": ({row.gpu.key for row in rows}, lambda row: row.gpu.key),
        "the cache": ({row.cache for row in rows}, lambda row: row.cache),
        "the mask": ({row.reading for row in rows}, lambda row: row.reading),
    }
    for subject, (values, key) in differing.items():
        refuted = {key(row) for row in impossible}
        if len(values) > 1 and not refuted & {key(row) for row in rows if row not in impossible}:
            others = sorted(values - refuted)
            raise WeftError(
                f"ambiguous: the answer depends on {subject}",
                expected=f"one of {', '.join(sorted(values))} in the sentence",
                got=f"none: impossible for {', '.join(sorted(refuted))}, possible for {', '.join(others)}",
            )
    readings = ", ".join(f"{r.gpu.key} {r.cache} {r.reading}".strip() for r in impossible)
    raise WeftError(
        "ambiguous: the answer depends on the reading",
        expected="the exact GPU, cold or warm, and for attention causal or full",
        got=f"impossible only for {readings}",
    )
