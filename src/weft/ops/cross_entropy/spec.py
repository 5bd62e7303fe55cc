"""Cross entropy of logits and class indices, row by row, with smoothing and z-loss.

    loss = lse - (1 - e) x_t - e / V sum_j x_j + z lse^2,    lse = log sum_j exp x_j

Label smoothing: Szegedy et al., arXiv:1512.00567; z-loss: Chowdhery et al., arXiv:2204.02311.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core import FORWARD, Case, Cost, Input, Operator, Property, WeftError, case
from weft.core.cases import ITEMSIZE
from weft.ops._shared import cross_entropy as shared
from weft.ops._shared import validate

DTYPES = shared.DTYPES
Tensors = tuple[torch.Tensor, ...]


def reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    return shared.reference(logits, targets, ignore_index, label_smoothing, z_loss)


def check_arguments(
    logits: Any,
    targets: Any,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> None:
    """Raise :class:`WeftError` on a call without an answer; reads no target."""
    validate.tensor("cross_entropy", "logits", logits, DTYPES, dims=range(2, 3))
    shared.check_targets("cross_entropy", targets, logits.shape[0], logits.device)
    if logits.shape[1] == 0:
        raise WeftError(
            "cross_entropy: logits.shape", expected="a column or more", got=tuple(logits.shape)
        )
    shared.check_scalars("cross_entropy", ignore_index, label_smoothing, z_loss)


def save(inputs: Tensors, output: Any) -> Tensors:
    """The backward wants the logits, the targets and the log-sum-exp of each row."""
    logits, targets = inputs
    return logits, targets, output[1]


def gradient_scale(
    grad: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """|g| (p (1 + 2 z |lse|) + e / V + (1 - e) [j = t]): the terms before they cancel."""
    _, lse = reference(logits, targets, ignore_index=ignore_index)
    p = torch.exp(logits - lse[:, None]) * (1 + 2 * z_loss * lse.abs()[:, None])
    ignored = targets == ignore_index
    at_target = torch.full_like(p[:, :1], 1 - label_smoothing)
    terms = p.scatter_add(1, targets.masked_fill(ignored, 0)[:, None], at_target)
    terms = terms + label_smoothing / logits.shape[1]
    size = grad.abs()[:, None] * terms
    return size.masked_fill(ignored[:, None], 0.0).nan_to_num(nan=0.0, posinf=0.0)


def cost(c: Case, direction: str) -> Cost:
    """Forward reads the logits and writes two numbers a row; backward reads the logits and three
    numbers a row and writes their gradient. Targets are 8 bytes."""
    logits, targets = c.inputs
    rows = targets.numel
    if direction == FORWARD:
        return Cost(read=logits.nbytes + 8 * rows, written=8 * rows)
    return Cost(read=logits.nbytes + 16 * rows, written=logits.numel * ITEMSIZE[logits.dtype])


def _no_less_than_nothing(losses: torch.Tensor, *inputs: torch.Tensor, **params: Any) -> float:
    """A loss without z-loss is -sum q log p >= 0, up to what float32 rounds of the logits."""
    logits = inputs[0]
    finite = losses[losses.isfinite()]
    if not finite.numel():
        return 0.0
    size = logits[logits.isfinite()].abs().amax().double() + 32
    allowed = 8 * torch.finfo(torch.float32).eps * float(size)
    return max(0.0, -float(finite.min())) / allowed


def draw(c: Case, seed: int, device: str) -> Tensors:
    """Logits as the case says; targets in range, of which a tenth are ignored where not timed."""
    logits, targets = c.inputs
    generator = torch.Generator(device)
    generator.manual_seed(seed)
    x = torch.empty(logits.shape, dtype=getattr(torch, logits.dtype), device=device)
    x.normal_(generator=generator)
    _VALUES[logits.values](x, generator)
    rows, columns = logits.shape
    t = torch.randint(columns, targets.shape, generator=generator, device=device)
    if logits.values == "normal" and "bench" not in c.tags:
        ignored = torch.rand(rows, generator=generator, device=device) < 0.1
        t[ignored] = int(c.params.get("ignore_index", -100))  # type: ignore[call-overload]
    return x, t


def _special(x: torch.Tensor, generator: torch.Generator) -> None:
    """NaN, +Inf, -Inf and zeros, each in one row; the other rows are left as they are."""
    values = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0)
    for value in values:
        row, column = (
            int(torch.randint(n, (), generator=generator, device=x.device)) for n in x.shape
        )
        x[row, column] = value


def _neginf(x: torch.Tensor, generator: torch.Generator) -> None:
    x.masked_fill_(torch.rand(x.shape, generator=generator, device=x.device) < 0.25, float("-inf"))
    x[-1] = float("-inf")


_VALUES = {
    "normal": lambda x, generator: None,
    "large": lambda x, generator: x.mul_(1e4),
    "special": _special,
    "neginf": _neginf,
}


def _case(
    rows: int,
    columns: int,
    dtype: str = "float32",
    *,
    layout: str = "contiguous",
    values: str = "normal",
    tags: str = "check",
    devices: tuple[str, ...] = ("cpu", "cuda"),
    **params: Any,
) -> Case:
    logits = Input(name="logits", shape=(rows, columns), dtype=dtype, layout=layout, values=values)
    targets = Input(name="targets", shape=(rows,), dtype="int64")
    return case(logits, targets, tags=tags, devices=devices, **params)


BOTH: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3}
CHECKS = [
    *(_case(3, 263, dtype=d) for d in DTYPES),
    _case(2, 1000, **BOTH),
    _case(2, 1000, dtype="bfloat16", **BOTH),
    _case(4, 32, values="large"),
    *(_case(300, 50257, dtype=d, devices=("cuda",), **BOTH) for d in DTYPES),
    *(_case(600, 131072, dtype=d, devices=("cuda",)) for d in DTYPES[1:]),
]
EDGES = [
    *(_case(*s, tags="edge") for s in ((0, 33), (1, 33), (2, 1))),
    _case(3, 263, dtype="float16", layout="shifted", tags="edge", **BOTH),
    _case(3, 40, layout="sliced", tags="edge", ignore_index=3),
    _case(4, 64, values="special", tags="edge"),
    _case(3, 65, values="neginf", tags="edge"),
    _case(700, 4099, dtype="bfloat16", layout="shifted", tags="edge", devices=("cuda",)),
]
BENCHES = [
    _case(8192, 50304, dtype="bfloat16", tags="bench", devices=("cuda",)),
    _case(8192, 131072, dtype="bfloat16", tags="bench", devices=("cuda",)),
    _case(8192, 50257, dtype="bfloat16", tags="bench", devices=("cuda",)),
    _case(256, 4096, tags="bench", devices=("cpu",)),
]

OPERATOR = Operator(
    name="cross_entropy",
    summary="cross entropy of logits and class indices",
    formula="loss = lse - (1 - e) x_t - e / V sum_j x_j + z lse^2",
    signature="cross_entropy(logits, targets, ignore_index=-100, label_smoothing=0.0, z_loss=0.0)",
    reference=reference,
    cases=(*CHECKS, *EDGES, *BENCHES),
    cost=cost,
    validate=check_arguments,
    dtypes=DTYPES,
    differentiable=("logits",),
    graded=1,
    save=save,
    draw=draw,
    gradient_scale=gradient_scale,
    scale_reason="at a target that is nearly certain p - 1 cancels, each rounded before",
    properties=(
        Property(
            name="no loss is below 0",
            holds=_no_less_than_nothing,
            applies=lambda c: not c.params.get("z_loss"),
        ),
    ),
    backward_note="from the logits and lse: g (p (1 + 2 z lse) - e / V - (1 - e) [j = t])",
)
