"""Points of the dispatch audit: random calls with the dimensions of models that people run.

A point is an operator, its sizes, dtype, use (forward, or training: forward plus backward) and mode (eager:
back-to-back calls whose host time counts; captured: in a CUDA graph; compiled: back-to-back calls of a
function that torch.compile compiled). The dimensions are those of
``dispatch/model_shapes.json``. :func:`workload` returns how Weft and torch compute a point.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import weft.dispatch
from weft import ops
from weft.core.cases import ITEMSIZE, SHORT
from weft.core.errors import WeftError
from weft.core.json_files import read_json

SHAPES = Path(weft.dispatch.__file__).with_name("model_shapes.json")
DTYPES = ("bfloat16", "float32")
# Rates by which a call's time is guessed (bytes/s, and FLOP/s by dtype), and the longest call that an audit
# takes: a call of seconds would use up the time of a hundred others.
RATES: dict[str, tuple[float, dict[str, float]]] = {
    "cuda": (3e12, {"bfloat16": 5e14, "float32": 4e13}),
    "cpu": (8e9, {"bfloat16": 1e10, "float32": 2e10}),
}
MAX_CALL_US = {"cuda": 100_000.0, "cpu": 40_000.0}
MAX_TOKENS = {"cuda": 1 << 30, "cpu": 512}
MAX_DRAWS = 10_000  # until a point of the wanted operator is short enough
Sizes = dict[str, int]
Model = Mapping[str, Any]
Call = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class AuditPoint:
    """A call to compare. ``sizes`` are named dimensions; ``model`` is the one that has them."""

    operator: str
    model: str
    sizes: tuple[tuple[str, int], ...]
    dtype: str
    training: bool
    captured: bool
    compiled: bool = False

    @property
    def title(self) -> str:
        """Text such as ``softmax rows=512 columns=4096 bf16 training captured``."""
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes)
        return f"{self.operator} {sizes} {SHORT[self.dtype]} {self.use} {self.mode}"

    @property
    def use(self) -> str:
        return "training" if self.training else "forward"

    @property
    def mode(self) -> str:
        return "compiled" if self.compiled else "captured" if self.captured else "eager"


@dataclass(frozen=True)
class Argument:
    """Tensor argument: floating point of the point's dtype with a gradient; or, with ``below``, int64 numbers
    from 0 to below it; or, with ``is_table``, float32 without a gradient. ``scale``: standard deviation."""

    shape: tuple[int, ...]
    scale: float = 1.0
    below: int | None = None
    is_table: bool = False

    def nbytes(self, dtype: str) -> int:
        itemsize = 8 if self.below is not None else 4 if self.is_table else ITEMSIZE[dtype]
        return math.prod(self.shape) * itemsize


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Computation of a point: arguments, Weft's call, torch's own, output elements and forward FLOPs."""

    arguments: tuple[Argument, ...]
    ours: Call
    torchs: Call
    output_elements: int
    flops: float = 0.0


@cache
def model_shapes() -> dict[str, Any]:
    """Return the contents of ``model_shapes.json``. Raises :class:`WeftError` if it cannot be read."""
    try:
        return dict(read_json(SHAPES))
    except (OSError, ValueError) as error:
        raise WeftError(f"the models' dimensions: {SHAPES}", got=repr(error)) from error


# ---- Sizes


def _row_sizes(rng: random.Random, m: Model, tokens: int) -> Sizes:
    choices = [(tokens, m["width"])]
    if "head_dim" in m:  # a norm of each query
        choices.append((tokens * m["heads"], m["head_dim"]))
    rows, columns = rng.choice(choices)
    return {"rows": rows, "columns": columns}


def _softmax_sizes(rng: random.Random, m: Model, tokens: int) -> Sizes:
    # Over the vocabulary, over a router's experts, and over the scores of a head.
    columns = [m.get("vocab", m["width"]), m.get("experts", m["width"]), rng.choice((197, 512, 2048, 8192))]
    return {"rows": tokens, "columns": rng.choice(columns)}


def _mlp_sizes(rng: random.Random, m: Model, tokens: int) -> Sizes:
    return {"rows": tokens, "columns": rng.choice([m["mlp"], m.get("expert_mlp", m["mlp"])])}


def _vocabulary_sizes(rng: random.Random, m: Model, tokens: int) -> Sizes:
    return {"rows": tokens, "columns": m["vocab"]}


def _embedding_sizes(rng: random.Random, m: Model, tokens: int) -> Sizes:
    return {"rows": tokens, "columns": m["width"], "vocabulary": m["vocab"]}


def _product_sizes(rng: random.Random, m: Model, tokens: int) -> Sizes:
    width, mlp = m["width"], m["mlp"]
    pairs = [(mlp, width), (width, mlp)]  # (N, K)
    if "head_dim" in m:
        heads = m["heads"] * m["head_dim"]
        pairs += [(heads + 2 * m["kv_heads"] * m["head_dim"], width), (width, heads)]
    if "expert_mlp" in m:
        pairs += [(m["expert_mlp"], width), (width, m["expert_mlp"])]
    if "vocab" in m:
        pairs.append((m["vocab"], width))
    n, k = rng.choice(pairs)
    return {"M": tokens, "N": n, "K": k}


def _loss_product_sizes(rng: random.Random, m: Model, tokens: int) -> Sizes:
    return {"M": tokens, "N": m["vocab"], "K": m["width"]}


def _sequence(rng: random.Random, m: Model, tokens: int) -> tuple[int, int]:
    """Return (batch, tokens of a sequence) of about ``tokens`` in all."""
    if "sequence" in m:
        return max(1, tokens // m["sequence"]), m["sequence"]
    length = rng.choice([t for t in model_shapes()["tokens"] if t <= tokens])
    return tokens // length, length


def _attention_sizes(rng: random.Random, m: Model, tokens: int) -> Sizes:
    batch, keys = _sequence(rng, m, tokens)
    # A fifth of the calls have one query for each sequence, as in generation.
    queries = 1 if rng.random() < 0.2 else keys
    causal = m.get("causal", True) and queries > 1
    sizes = {"batch": batch, "heads": m["heads"], "kv_heads": m["kv_heads"]}
    return {**sizes, "queries": queries, "keys": keys, "head_dim": m["head_dim"], "causal": int(causal)}


def _rope_sizes(rng: random.Random, m: Model, tokens: int) -> Sizes:
    batch, length = _sequence(rng, m, tokens)
    head_dim = m.get("rope_head_dim") or m["head_dim"]
    return {"batch": batch, "heads": m["heads"], "queries": length, "head_dim": head_dim}


# ---- Calls


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _torch_add_layer_norm(x: Any, residual: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
    s = x + residual
    return functional.layer_norm(s, s.shape[-1:], weight, bias, 1e-5), s


def _torch_add_rms_norm(x: Any, residual: Any, weight: Any) -> tuple[Any, Any]:
    s = x + residual
    return functional.rms_norm(s, s.shape[-1:], weight, 1e-6), s


# Operator -> Weft's call and torch's own on the same arguments. PyTorch has no rotary embedding: its calls
# are those of Weft's `torch` implementation.
CALLS: dict[str, tuple[Call, Call]] = {
    "softmax": (ops.softmax, lambda x: torch.softmax(x, -1)),
    "layer_norm": (ops.layer_norm, lambda x, w, b: functional.layer_norm(x, x.shape[-1:], w, b, 1e-5)),
    "rms_norm": (ops.rms_norm, lambda x, w: functional.rms_norm(x, x.shape[-1:], w, 1e-6)),
    "add_layer_norm": (ops.add_layer_norm, _torch_add_layer_norm),
    "add_rms_norm": (ops.add_rms_norm, _torch_add_rms_norm),
    "gelu": (ops.gelu, _gelu),
    "relu": (ops.relu, torch.relu),
    "bias_gelu": (ops.bias_gelu, lambda x, b: _gelu(x + b)),
    "swiglu": (ops.swiglu, lambda gate, up: functional.silu(gate) * up),
    "geglu": (ops.geglu, lambda gate, up: _gelu(gate) * up),
    "cross_entropy": (ops.cross_entropy, functional.cross_entropy),
    "linear_cross_entropy": (
        ops.linear_cross_entropy,
        lambda x, w, targets: functional.cross_entropy(functional.linear(x, w), targets),
    ),
    "embedding": (ops.embedding, functional.embedding),
    "rope": (ops.rope, lambda x, cos, sin: ops.rope(x, cos, sin, impl="torch")),
    "matmul": (ops.matmul, torch.matmul),
    "linear": (ops.linear, functional.linear),
    "linear_gelu": (ops.linear_gelu, lambda x, w, b: _gelu(functional.linear(x, w, b))),
    "linear_residual": (ops.linear_residual, lambda x, w, b, r: functional.linear(x, w, b) + r),
}
# Operator -> how its sizes follow from a model and a number of tokens, and the keys that the model must have.
SIZES: dict[str, tuple[Callable[[random.Random, Model, int], Sizes], tuple[str, ...]]] = {
    "softmax": (_softmax_sizes, ()),
    **dict.fromkeys(("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"), (_row_sizes, ())),
    **dict.fromkeys(("gelu", "relu", "bias_gelu"), (_mlp_sizes, ())),
    **dict.fromkeys(("swiglu", "geglu"), (_mlp_sizes, ("gated",))),
    "cross_entropy": (_vocabulary_sizes, ("vocab",)),
    "linear_cross_entropy": (_loss_product_sizes, ("vocab",)),
    "embedding": (_embedding_sizes, ("vocab",)),
    "rope": (_rope_sizes, ("heads",)),
    **dict.fromkeys(("matmul", "linear", "linear_gelu", "linear_residual"), (_product_sizes, ())),
    "attention": (_attention_sizes, ("head_dim",)),
}


def workload(point: AuditPoint) -> Workload:
    """Return how to compute a point."""
    s = dict(point.sizes)
    if point.operator == "attention":
        return _attention(s)
    if point.operator == "rope":
        heads = (s["batch"], s["heads"], s["queries"], s["head_dim"])
        table = Argument((s["queries"], s["head_dim"] // 2), is_table=True)
        return _workload(point, (Argument(heads), table, table), math.prod(heads))
    if "M" in s:
        m, n, k = s["M"], s["N"], s["K"]
        flops = 2.0 * m * n * k
        # Outputs of unit variance, as in a model before training. Logits of +-64 would make a nearly one-hot
        # softmax. Its gradient is then wrong by some percent wherever logits are rounded to bfloat16, as
        # PyTorch's are, and Weft's product of exponentials would run twice (ops/losses/README.md).
        weight = Argument((k, n) if point.operator == "matmul" else (n, k), scale=k**-0.5)
        inputs: tuple[Argument, ...] = (Argument((m, k)), weight)
        if point.operator == "linear_cross_entropy":
            inputs += (Argument((m,), below=n),)
        elif point.operator != "matmul":
            inputs += (Argument((n,)),)
        if point.operator == "linear_residual":
            inputs += (Argument((m, n)),)
        return _workload(point, inputs, m * n, flops)
    rows, columns = s["rows"], s["columns"]
    if point.operator == "embedding":
        ids = Argument((1, rows), below=s["vocabulary"])
        return _workload(point, (ids, Argument((s["vocabulary"], columns))), rows * columns)
    x, vector = (rows, columns), (columns,)
    if point.operator == "cross_entropy":
        return _workload(point, (Argument(x), Argument((rows,), below=columns)), rows)
    matrices = 2 if point.operator in ("swiglu", "geglu") or point.operator.startswith("add_") else 1
    vectors = {"rms_norm": 1, "add_rms_norm": 1, "bias_gelu": 1, "layer_norm": 2, "add_layer_norm": 2}
    arguments = (Argument(x),) * matrices + (Argument(vector),) * vectors.get(point.operator, 0)
    outputs = 2 if point.operator.startswith("add_") else 1
    return _workload(point, arguments, outputs * rows * columns)


def _workload(
    point: AuditPoint, arguments: tuple[Argument, ...], output: int, flops: float = 0.0
) -> Workload:
    ours, torchs = CALLS[point.operator]
    return Workload(arguments=arguments, ours=ours, torchs=torchs, output_elements=output, flops=flops)


def _attention(s: Sizes) -> Workload:
    q = (s["batch"], s["heads"], s["queries"], s["head_dim"])
    k = (s["batch"], s["kv_heads"], s["keys"], s["head_dim"])
    causal, grouped = bool(s["causal"]), s["heads"] != s["kv_heads"]

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return ops.attention(q, k, v, causal=causal)

    def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    flops = 4.0 * math.prod(q) * s["keys"] * (0.5 if causal else 1.0)
    arguments = (Argument(q), Argument(k), Argument(k))
    return Workload(arguments=arguments, ours=ours, torchs=torchs, output_elements=math.prod(q), flops=flops)


# ---- Random points


def memory_bytes(point: AuditPoint) -> int:
    """Return about how many bytes one call of torch's needs: arguments, results, and what autograd saves."""
    work = workload(point)
    inputs = sum(a.nbytes(point.dtype) for a in work.arguments)
    output = work.output_elements * ITEMSIZE[point.dtype]
    if point.operator == "attention" and point.dtype == "float32":
        # Without a fused kernel the scores are stored.
        s = dict(point.sizes)
        output += s["batch"] * s["heads"] * s["queries"] * s["keys"] * 4
    return 2 * inputs + 4 * output if point.training else inputs + 2 * output


def expected_us(point: AuditPoint, device: str) -> float:
    """Return a guess of the time of one call, from its bytes and FLOPs."""
    bandwidth, rates = RATES[device]
    factor = 3.0 if point.training else 1.0
    seconds = workload(point).flops * factor / rates[point.dtype] + memory_bytes(point) / bandwidth
    return 1e6 * seconds


def random_points(
    count: int, seed: int, device: str, operators: Sequence[str] | None = None
) -> list[AuditPoint]:
    """Return ``count`` random points; the same ones for the same arguments.

    Operators come in turn, in random order, so that each has as many points as another. A point whose call
    would take longer than ``MAX_CALL_US`` is replaced by another one. On a CPU every point is eager. Raises
    :class:`WeftError` for an operator that the audit does not have.
    """
    for name in operators or ():
        if name not in SIZES:
            raise WeftError("weft tune --audit", expected=f"one of {', '.join(SIZES)}", got=name)
    rng = random.Random(seed)
    points: list[AuditPoint] = []
    turn: list[str] = []
    while len(points) < count:
        if not turn:
            turn = list(operators or SIZES)
            rng.shuffle(turn)
        points.append(_random_point(rng, turn.pop(), device))
    return points


def _random_point(rng: random.Random, operator: str, device: str) -> AuditPoint:
    sizes, needed = SIZES[operator]
    models = [m for m in model_shapes()["models"] if all(m.get(key) for key in needed)]
    tokens = [t for t in model_shapes()["tokens"] if t <= MAX_TOKENS[device]]
    for _ in range(MAX_DRAWS):
        model = rng.choice(models)
        point = AuditPoint(
            operator=operator,
            model=model["name"],
            sizes=tuple(sizes(rng, model, rng.choice(tokens)).items()),
            dtype=rng.choice(DTYPES),
            training=rng.random() < 0.5,
            captured=rng.random() < 0.5 and device == "cuda",
        )
        if expected_us(point, device) <= MAX_CALL_US[device]:
            return point
    raise WeftError(f"weft tune --audit: {operator}", got=f"no call short enough for {device}")
