"""The sparsity study: time dense, 2:4, block and unstructured weights by density, and find where each pays.

A *contender* is one implementation of y = x W^T at one density. All contenders of a size and a mode are
sampled round by round in random order, each after a flush of the cache, in a captured graph on a GPU. The
*mode* is inference (the forward pass) or training (forward, and the gradients of x and of the weight's stored
elements). The weights are random: a weight of a density has the blocks of largest norm, or the elements of
largest magnitude. Before it is timed, each output is compared with the dense product of the same weight.

The result is plain data, a record: every table, sentence and picture is generated from it.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from weft import machine, ops
from weft.core import Interrupted, Log, WeftError
from weft.lab.study.measure import DTYPES, NOISY, sample_rounds, timing_context
from weft.machine.clocks import Sampler
from weft.ops.block_sparse import to_blocks, to_dense, transposed_index
from weft.ops.block_sparse.blocks import SIDES
from weft.workbench.calls.buffers import InputBuffers
from weft.workbench.timing.gpu_clocks import Readings
from weft.workbench.timing.plan import Candidate, Plan, TimedCandidate, TimingBackend
from weft.workbench.timing.stats import summarise

FORMAT = 1
MODES = ("inference", "training")
DENSE, SEMI, BLOCK, CSR = "dense", "2:4", "block", "csr"
DENSITIES = (0.5, 0.25, 0.1, 0.05, 0.02)
QUICK_DENSITIES = (0.5, 0.1, 0.02)
# Rows of x, outputs, inputs: a square product, an MLP's first layer, and decoding.
SIZES = {
    "cuda": ((4096, 4096, 4096), (16384, 3072, 768), (16, 4096, 4096)),
    "cpu": ((256, 1024, 1024), (4, 1024, 1024)),
}
QUICK_SIZES = {"cuda": ((4096, 4096, 4096),), "cpu": ((64, 256, 256),)}
SECONDS, QUICK_SECONDS = {"cuda": 6.0, "cpu": 8.0}, 1.0  # of sampling, for each size and mode
PREPARE_SECONDS = {"cuda": 25.0, "cpu": 3.0}
IMPLEMENTATIONS = {
    "cuda": {
        DENSE: ("torch", "cuda"),
        SEMI: ("cuda",),
        BLOCK: ("torch", "triton", "cuda"),
        CSR: ("torch", "cuda"),
    },
    "cpu": {DENSE: ("torch",), SEMI: ("eager",), BLOCK: ("torch", "eager"), CSR: ("torch", "eager")},
}  # fmt: skip
# The gradient of CSR's values gathers a row of x for each nonzero: beyond this it takes seconds.
MAX_CSR_PRODUCTS = 2e10
FEW_ROWS, COPIES = 64, 8  # with few rows of x a sample has calls with this many copies of the weight
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}  # of an output: relative error of its norm
Size = tuple[int, int, int]
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One implementation at one density; ``block`` is 0 unless the weight has blocks."""

    kind: str
    impl: str
    density: float
    block: int = 0

    @property
    def title(self) -> str:
        block = f" {self.block}" if self.block else ""
        return f"{self.kind}{block} {self.impl} at density {self.density:g}"


def contenders(device: str, densities: Sequence[float]) -> Iterator[Contender]:
    """Yield every contender on a device, the dense ones first."""
    impls = IMPLEMENTATIONS[device]
    yield from (Contender(kind=DENSE, impl=i, density=1.0) for i in impls[DENSE])
    yield from (Contender(kind=SEMI, impl=i, density=0.5) for i in impls[SEMI])
    for density in densities:
        for block in SIDES:
            for impl in impls[BLOCK]:
                if impl != "cuda" or block >= 64:  # the kernel takes no others
                    yield Contender(kind=BLOCK, impl=impl, density=density, block=block)
        yield from (Contender(kind=CSR, impl=i, density=density) for i in impls[CSR])


def csr_of(w: Tensor, density: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, columns and offsets of the elements of largest magnitude."""
    count = round(density * w.numel())
    places = w.abs().flatten().topk(count).indices.sort().values
    row = places // w.shape[1]
    offsets = torch.searchsorted(row, torch.arange(w.shape[0] + 1, device=w.device)).int()
    return w.flatten()[places].clone(), (places % w.shape[1]).int(), offsets


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Trained tensors of a contender's weight, x as it takes it, the product, and the dense weight."""

    x: Tensor
    values: Tensor
    product: Callable[[Tensor, Tensor], Tensor]  # of x and the values
    weight: Tensor

    is_column_major: bool = False  # x is (K, M) and the result (N, M)

    def expected(self) -> Tensor:
        """Return the dense product in the shape of ``product``'s result, in float32."""
        x = self.x.t() if self.is_column_major else self.x
        y = x.float() @ self.weight.float().t()
        return y.t() if self.is_column_major else y


def operands(contender: Contender, x: Tensor, w: Tensor) -> Operands:
    """Return a contender's operands for x (M, K) and the dense weight (N, K)."""
    impl = contender.impl
    if contender.kind == DENSE:
        weight = w.clone()
        return Operands(x=x, values=weight, weight=w, product=lambda a, v: ops.linear(a, v, impl=impl))
    if contender.kind == SEMI:
        values, metadata = ops.prune_2_4(w)
        bias = w.new_zeros(w.shape[0])
        return Operands(
            x=x,
            values=values,
            weight=ops.expand_2_4(values, metadata),
            product=lambda a, v: ops.sparse_linear(a, v, metadata, bias, impl=impl),
        )
    if contender.kind == BLOCK:
        values, crow, col = to_blocks(w, contender.block, contender.density)
        index = transposed_index(crow, col, w.shape[1] // contender.block)
        bias = w.new_zeros(w.shape[0])
        return Operands(
            x=x,
            values=values,
            weight=to_dense(values, crow, col, w.shape[1]),
            product=lambda a, v: ops.block_sparse_linear(a, v, crow, col, index, bias, impl=impl),
        )
    values, columns, offsets = csr_of(w, contender.density)
    weight = torch.zeros_like(w)
    rows = torch.repeat_interleave(torch.arange(w.shape[0], device=w.device), offsets.diff().long())
    weight[rows, columns.long()] = values
    return Operands(
        x=x.t().contiguous(),
        values=values,
        weight=weight,
        product=lambda a, v: ops.spmm(v, columns, offsets, a, impl=impl),
        is_column_major=True,
    )


def call_of(parts: Operands, mode: str) -> Callable[[], Any]:
    """Return the closure to time: the product, or with ``training`` its gradients too."""
    # The closures must not keep the dense weight: with copies it would be most of the memory.
    product, x, values = parts.product, parts.x.detach(), parts.values.detach()
    if mode == "inference":

        def infer() -> Tensor:
            with torch.no_grad():
                return product(x, values)

        return infer
    with torch.no_grad():
        grad = torch.randn_like(product(x, values))
    x, values = x.requires_grad_(), values.requires_grad_()

    def train() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            y = product(x, values)
        return torch.autograd.grad(y, (x, values), grad)

    return train


def relative_error(parts: Operands) -> float:
    """Return the error of a product as a share of the norm of the dense one."""
    with torch.no_grad():
        y, expected = parts.product(parts.x, parts.values).float(), parts.expected()
    norm = float(expected.norm())
    return float((y - expected).norm()) / norm if norm else float(y.norm())


def reason_to_skip(contender: Contender, size: Size, mode: str) -> str:
    """Return why a contender is not timed at a size, or nothing."""
    m, n, k = size
    if contender.block and (n % contender.block or k % contender.block):
        return f"{n} x {k} is not in blocks of {contender.block}"
    if mode == "training" and contender.kind == CSR and contender.density * m * n * k > MAX_CSR_PRODUCTS:
        return "the gradient of unstructured values takes seconds at this size"
    return ""


def _prepared(
    backend: TimingBackend, contender: Contender, x: Tensor, w: Tensor, mode: str, dtype: str
) -> tuple[TimedCandidate, float]:
    """Return a runner and the error of the product. With few rows it has several copies of the weight."""
    copies = COPIES if x.shape[0] <= FEW_ROWS and mode == "inference" else 1
    all_parts = [operands(contender, x, w) for _ in range(copies)]
    error = relative_error(all_parts[0])
    calls = [call_of(parts, mode) for parts in all_parts]
    # The calls own their tensors: the buffers that they are bound to are empty, and number them.
    candidate = Candidate(name=contender.title, bind=lambda buffers: calls[buffers.seed])
    buffers = [InputBuffers([], seed=i) for i in range(copies)]
    plan = Plan(calls=copies, flush=True)
    return backend.prepare(candidate, buffers, lambda seed: InputBuffers([], seed=0), plan), error


def run(
    device: str, sizes: Sequence[Size], densities: Sequence[float], dtype: str, *, quick: bool, log: Log
) -> dict[str, Any]:
    """Measure; return the study as a record. ``log`` gets a line for each stage.

    Raises :class:`Interrupted` for a ``KeyboardInterrupt``, with the study of the sizes that are complete.
    """
    record: dict[str, Any] = {
        "study": "sparsity",
        "format": FORMAT,
        "quick": quick,
        "device": device,
        "dtype": dtype,
        "sizes": [list(size) for size in sizes],
        "densities": sorted(densities, reverse=True),
        "rows": [],
        "clocks": [],
        "wrong": [],
        "machine": machine.fingerprint(device),
    }
    seconds = QUICK_SECONDS if quick else SECONDS[device]
    with timing_context(device) as backend:
        for size in sizes:
            for mode in MODES:
                try:
                    log(f"{'x'.join(map(str, size))}, {mode}")
                    rows, clocks = _time_size(backend, device, size, mode, densities, dtype, seconds, log)
                except KeyboardInterrupt as error:
                    raise Interrupted(record if record["rows"] else None) from error
                record["rows"] += rows
                record["clocks"].append(clocks)
    record["wrong"] = faults(record)
    return record


def _time_size(
    backend: TimingBackend,
    device: str,
    size: Size,
    mode: str,
    densities: Sequence[float],
    dtype: str,
    seconds: float,
    log: Log,
) -> tuple[list[dict[str, Any]], dict[str, object]]:
    """Time all contenders of a size and a mode side by side."""
    m, n, k = size
    scale = k**-0.5  # y is standard normal
    x = torch.randn(m, k, device=device).to(DTYPES[dtype])
    w = (scale * torch.randn(n, k, device=device)).to(DTYPES[dtype])
    runners: dict[Contender, TimedCandidate] = {}
    rows: dict[Contender, dict[str, Any]] = {}
    chosen = list(contenders(device, densities))
    for number, contender in enumerate(chosen):
        row = {"size": list(size), "mode": mode, "kind": contender.kind, "block": contender.block}
        row |= {"impl": contender.impl, "density": contender.density, "us": None, "reason": ""}
        rows[contender] = row
        row["reason"] = reason_to_skip(contender, size, mode)
        if row["reason"]:
            continue
        if number % 10 == 0:
            log(f"prepared {number} of {len(chosen)}")
        try:
            runners[contender], row["error"] = _prepared(backend, contender, x, w, mode, dtype)
        except (
            WeftError,
            torch.OutOfMemoryError,
        ) as error:  # it lacks this machine, this dtype or the memory
            row["reason"] = " ".join(str(error).split())[:200]
        except (NotImplementedError, RuntimeError) as error:
            row["reason"] = " ".join(str(error).split())[:200]
            # The library says so of what it lacks; from a kernel of Weft it is a fault. The study goes on.
            row["failed"] = contender.impl != "torch"
    samples, clocks = sample_rounds(runners, Readings(Sampler(device)), seconds, log)
    for contender, values in samples.items():
        summary, flags = summarise(values), set(runners[contender].flags)
        flags |= {"noisy"} if summary.width > NOISY else set()
        rows[contender] |= {"us": summary.median, "interval": list(summary.interval), "samples": summary.n}
        rows[contender]["flags"] = sorted(flags)
    runners.clear()
    gc.collect()  # graphs and their memory
    if device == "cuda":
        torch.cuda.empty_cache()
    return list(rows.values()), clocks


def faults(record: dict[str, Any]) -> list[str]:
    """List results that differ from the dense product by more than the dtype explains, kernels of Weft that
    failed, and doubtful times."""
    allowed, lines = TOLERANCE[record["dtype"]], []
    for row in record["rows"]:
        name = f"{row['kind']} {row['block'] or ''} {row['impl']}".replace("  ", " ")
        at = f"{name} at density {row['density']:g}, {'x'.join(map(str, row['size']))}, {row['mode']}"
        error = row.get("error", 0.0)
        if not error <= allowed:  # also true for NaN
            lines.append(f"the result of {at} is off by {error:.2g} of its norm")
        if row.get("failed"):
            lines.append(f"{at} failed: {row['reason']}")
        lines += [f"{flag}: {at}" for flag in row.get("flags", ()) if flag.startswith("suspect")]
    return lines


def expected_seconds(device: str, sizes: int, quick: bool) -> float:
    """Return about how long a study takes."""
    sampling = QUICK_SECONDS if quick else SECONDS[device]
    return sizes * len(MODES) * (sampling + PREPARE_SECONDS[device])


def fastest(
    record: dict[str, Any], size: Sequence[int], mode: str, kind: str, block: int = 0
) -> dict[float, Any]:
    """Return the fastest row of a kind of weight for each density at which one was timed, rising."""
    best: dict[float, Any] = {}
    for row in record["rows"]:
        identity = (list(row["size"]), row["mode"], row["kind"], row["block"])
        if identity == (list(size), mode, kind, block) and row["us"] is not None:
            known = best.get(row["density"])
            best[row["density"]] = row if known is None or row["us"] < known["us"] else known
    return dict(sorted(best.items()))


def crossover(times: dict[float, float], dense: float) -> tuple[str, float | None]:
    """Return where times by density cross that of the dense product: how, and the density.

    ("below", d): faster below the density d, found by interpolation on logarithmic axes. ("all", d): faster
    up to the largest density d that was timed. ("none", d): slower even at the smallest. ("unknown", None):
    nothing was timed. The first crossing from the smallest density on counts.
    """
    if not times:
        return "unknown", None
    points = sorted(times.items())
    if points[0][1] > dense:
        return "none", points[0][0]
    for (low, fast), (high, slow) in pairwise(points):
        if slow > dense:
            share = (math.log(dense) - math.log(fast)) / (math.log(slow) - math.log(fast))
            return "below", math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return "all", points[-1][0]
