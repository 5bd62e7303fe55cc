"""The LM head and its loss: the sum of the cross entropies of x W^T, which is never kept whole.

The gradients of that sum come with the loss, while a chunk's logits are there; the backward only
multiplies. Method: chunks of rows and the gradient in the forward, as in Liger Kernel
(arXiv:2410.10989).
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Input, Operator, WeftError, case
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._shared import cross_entropy as shared
from weft.ops._shared import validate

DTYPES = shared.DTYPES
Tensors = tuple[torch.Tensor, ...]


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensors:
    """(loss, dx, dweight); the gradients by autograd, apart from what is asked of the loss."""

    def loss_of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        losses, _ = shared.reference(a @ b.T, targets, ignore_index, label_smoothing, z_loss)
        return losses.sum()

    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        gradients = torch.autograd.grad(loss_of(*leaves), leaves)
    return (loss_of(x, weight), *gradients)


def check_arguments(
    x: Any,
    weight: Any,
    targets: Any,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> None:
    """Raise :class:`WeftError` on a call without an answer; reads no target."""
    where = "linear_cross_entropy"
    for name, tensor in (("x", x), ("weight", weight)):
        validate.tensor(where, name, tensor, DTYPES, dims=range(2, 3))
    validate.same(where, "x and weight", x, weight)
    if x.shape[1] != weight.shape[1]:
        raise WeftError(
            f"{where}: the inner sizes",
            expected="x (N, C) and weight (V, C)",
            got=f"{tuple(x.shape)} and {tuple(weight.shape)}",
        )
    shared.check_targets(where, targets, x.shape[0], x.device)
    if weight.shape[0] == 0:
        raise WeftError(f"{where}: weight.shape", expected="a row or more", got=tuple(weight.shape))
    shared.check_scalars(where, ignore_index, label_smoothing, z_loss)


def save(inputs: Tensors, output: Any) -> Tensors:
    """The backward wants the gradients that the forward left."""
    return output[1], output[2]


def cost(c: Case, direction: str) -> Cost:
    """Forward: three products of 2 N C V FLOPs; reads x, W, targets, writes two gradients (dweight
    in float32). Backward: reads these and writes them in the inputs' dtype."""
    x, weight, targets = c.inputs
    item = ITEMSIZE[x.dtype]
    found = x.numel * item + weight.numel * 4
    if direction == FORWARD:
        flops = 6.0 * x.numel * weight.shape[0]
        read = x.nbytes + weight.nbytes + 8 * targets.numel
        return Cost(read=read, written=found + 4, flops=flops, rate=SHORT[x.dtype])
    return Cost(read=found + 4, written=(x.numel + weight.numel) * item)


def draw(c: Case, seed: int, device: str) -> Tensors:
    """Normal x, weights of 1/sqrt(C); targets in range, a tenth ignored where not timed."""
    x, weight, targets = c.inputs
    generator = torch.Generator(device)
    generator.manual_seed(seed)

    def normal(one: Input, scale: float) -> torch.Tensor:
        made = torch.empty(one.shape, dtype=getattr(torch, one.dtype), device=device)
        return made.normal_(0, scale, generator=generator)

    features, head = normal(x, 1.0), normal(weight, max(1, x.shape[1]) ** -0.5)
    t = torch.randint(weight.shape[0], targets.shape, generator=generator, device=device)
    if "bench" not in c.tags:
        ignored = torch.rand(t.shape, generator=generator, device=device) < 0.1
        t[ignored] = int(c.params.get("ignore_index", -100))  # type: ignore[call-overload]
    return features, head, t


def _case(
    rows: int,
    inner: int,
    columns: int,
    dtype: str = "float32",
    *,
    layout: str = "contiguous",
    tags: str = "check",
    devices: tuple[str, ...] = ("cpu", "cuda"),
    **params: Any,
) -> Case:
    x = Input(name="x", shape=(rows, inner), dtype=dtype, layout=layout)
    weight = Input(name="weight", shape=(columns, inner), dtype=dtype)
    targets = Input(name="targets", shape=(rows,), dtype="int64")
    parts = [SHORT[dtype], f"{rows}x{inner}x{columns}", *map(str, params.values())]
    parts += [layout] * (layout != "contiguous")
    return case(x, weight, targets, tags=tags, devices=devices, name="-".join(parts), **params)


BOTH: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3}
CHECKS = [
    *(_case(3, 24, 263, dtype=d) for d in DTYPES),
    _case(2, 16, 65, **BOTH),
    *(_case(5001, 256, 50257, dtype=d, devices=("cuda",), **BOTH) for d in DTYPES[1:]),
    *(_case(3000, 128, 9001, dtype=d, devices=("cuda",)) for d in DTYPES),
]
EDGES = [
    *(_case(*s, tags="edge") for s in ((0, 8, 33), (1, 8, 33), (2, 3, 1))),
    _case(3, 16, 40, layout="sliced", tags="edge", ignore_index=3),
]
BENCHES = [
    _case(16384, 768, 50304, dtype="bfloat16", tags="bench", devices=("cuda",)),
    _case(8192, 4096, 131072, dtype="bfloat16", tags="bench", devices=("cuda",)),
    _case(256, 64, 4096, tags="bench", devices=("cpu",)),
]

OPERATOR = Operator(
    name="linear_cross_entropy",
    summary="the LM head and its loss, without the logits",
    formula="loss = sum_i cross_entropy(x_i W^T, t_i)",
    signature="linear_cross_entropy(x, weight, targets, ignore_index=-100, label_smoothing=0.0, "
    "z_loss=0.0)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("x", "weight"),
    graded=1,
    save=save,
    draw=draw,
    backward_note="the forward's own gradients, multiplied: the logits are not computed again",
)
