"""The contracts of the losses: ``cross_entropy``, and ``linear_cross_entropy`` with the LM head's product.

For a row x of V logits with target t, lse = log sum_j exp x_j, label smoothing e and z-loss factor z:

    loss = lse - (1 - e) x_t - e / V sum_j x_j + z lse^2
    d loss / d x_j = exp(x_j - lse) (1 + 2 z lse) - e / V - (1 - e) [j = t]

Label smoothing: Szegedy et al., arXiv:1512.00567. z-loss: Chowdhery et al., arXiv:2204.02311. Chunks of rows
and the gradient in the forward: Liger Kernel, arXiv:2410.10989.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core import FORWARD, YES, Case, Cost, Input, Operator, Property, Support, WeftError, case, no
from weft.core.cases import ITEMSIZE, SHORT
from weft.ops._common import validate
from weft.ops._common.prepared import are_repeatable

DTYPES = ("float32", "float16", "bfloat16")
Tensors = tuple[Tensor, ...]


class LossOptions(NamedTuple):
    """Scalars of a loss. Implementations receive them as keywords: ``LossOptions(**params)``."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def kernel_arguments(self) -> tuple[int, float, float]:
        """The scalars as a kernel takes them: a user's ``label_smoothing=0`` is an int."""
        return self.ignore_index, float(self.label_smoothing), float(self.z_loss)


SMOOTHING_AND_Z_LOSS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3}


def row_losses(x: Tensor, targets: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Return (losses, lse) by log-probabilities, the textbook form; autograd gives the gradient.

    Ignored rows have 0 in both, whatever they contain. A row with NaN or +inf, or with -inf alone, has
    NaN, as in torch.
    """
    ignore_index, label_smoothing, z_loss = options
    ignored = targets == ignore_index
    x = x.masked_fill(ignored[:, None], 0.0)  # a NaN in an ignored row must not reach the gradient
    top = x.amax(-1, keepdim=True).detach()  # cancels in lse, and with it its gradient
    lse = top + torch.log(torch.exp(x - top).sum(-1, keepdim=True))
    log_p = x - lse
    losses = -(1 - label_smoothing) * log_p.gather(1, targets.masked_fill(ignored, 0)[:, None])
    if label_smoothing:  # a factor of 0 would turn -inf into NaN
        losses = losses - label_smoothing * log_p.mean(-1, keepdim=True)
    losses = losses + float(z_loss) * lse.square()  # torch multiplies by ints of 64 bits only
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return (
        torch.where(ignored, zero, losses.squeeze(-1)),
        torch.where(ignored, zero, lse.squeeze(-1)),
    )


def cross_entropy_reference(logits: Tensor, targets: Tensor, **params: Any) -> tuple[Tensor, Tensor]:
    return row_losses(logits, targets, LossOptions(**params))


def linear_cross_entropy_reference(x: Tensor, weight: Tensor, targets: Tensor, **params: Any) -> Tensors:
    """Return (loss, dx, dweight); the gradients by autograd, whether or not the loss takes one itself."""

    def summed_loss(a: Tensor, b: Tensor) -> Tensor:
        return row_losses(a @ b.T, targets, LossOptions(**params))[0].sum()

    with torch.enable_grad():
        # A graph of its own: the forward returns gradients also when the caller wants none.
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        gradients = torch.autograd.grad(summed_loss(*leaves), leaves)
    return (summed_loss(x, weight), *gradients)


def weight_gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of dweight between forward and backward.

    float16 has not the range of a sum over thousands of rows, before it is divided by their number.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def check_cross_entropy(logits: Any, targets: Any, **params: Any) -> None:
    """Raise :class:`WeftError` unless ``cross_entropy`` accepts these arguments; reads no target."""
    validate.tensor("cross_entropy", "logits", logits, DTYPES, dims=range(2, 3))
    _check_targets("cross_entropy", "logits", logits, targets)
    if logits.shape[1] == 0:
        raise WeftError("cross_entropy: logits.shape", expected="a column or more", got=tuple(logits.shape))
    _check_scalars("cross_entropy", LossOptions(**params))


def check_linear_cross_entropy(x: Any, weight: Any, targets: Any, **params: Any) -> None:
    """Raise :class:`WeftError` unless ``linear_cross_entropy`` accepts these arguments; reads no target."""
    name = "linear_cross_entropy"
    for argument, tensor in (("x", x), ("weight", weight)):
        validate.tensor(name, argument, tensor, DTYPES, dims=range(2, 3))
    validate.same(name, "x and weight", x, weight)
    if x.shape[1] != weight.shape[1]:
        raise WeftError(
            f"{name}: the inner sizes",
            expected="x (N, C) and weight (V, C)",
            got=f"{tuple(x.shape)} and {tuple(weight.shape)}",
        )
    _check_targets(name, "x", x, targets)
    if weight.shape[0] == 0:
        raise WeftError(f"{name}: weight.shape", expected="a row or more", got=tuple(weight.shape))
    _check_scalars(name, LossOptions(**params))


def _check_targets(operator: str, name: str, rows: Tensor, targets: Any) -> None:
    validate.tensor(operator, "targets", targets, ("int64",), dims=range(1, 2))
    validate.same_device(operator, f"{name} and targets", rows, targets)
    if targets.shape[0] != rows.shape[0]:
        raise WeftError(
            f"{operator}: one target per row",
            expected=f"targets ({rows.shape[0]},)",
            got=tuple(targets.shape),
            hint="flatten both: logits.view(-1, V), targets.view(-1)",
        )


def _check_scalars(operator: str, options: LossOptions) -> None:
    ignore_index, label_smoothing, z_loss = options
    is_whole = isinstance(ignore_index, int) and not isinstance(ignore_index, bool)
    if not is_whole or not -(2**63) <= ignore_index < 2**63:
        raise WeftError(f"{operator}: ignore_index", expected="an int of 64 bits", got=repr(ignore_index))
    if not isinstance(label_smoothing, (int, float)) or not 0 <= label_smoothing <= 1:
        raise WeftError(
            f"{operator}: label_smoothing", expected="a number in [0, 1]", got=repr(label_smoothing)
        )
    if not isinstance(z_loss, (int, float)) or not 0 <= z_loss <= sys.float_info.max:
        raise WeftError(f"{operator}: z_loss", expected="a number >= 0", got=repr(z_loss))


def check_target_range(operator: str, targets: Tensor, columns: int, ignore_index: int) -> None:
    """Raise :class:`WeftError` if a target is neither a column nor ignored. Waits for the device."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return  # a transform such as vmap has no values to read
    out_of_range = ((targets < 0) | (targets >= columns)) & (targets != ignore_index)
    if bool(out_of_range.any()):
        # The first such row, for the message; the error path may wait for the device again.
        row = int(out_of_range.to(torch.uint8).argmax())
        raise WeftError(
            f"{operator}: targets[{row}]",
            expected=f"0 to {columns - 1}, or ignore_index={ignore_index}",
            got=int(targets[row]),
            hint="leave rows out by ignore_index",
        )


def gradient_like(logits: Tensor) -> Tensor:
    """Return uninitialised memory for the gradient of 2-D ``logits``.

    It is contiguous, except for columns of a slightly wider tensor (a padded vocabulary): then it has the
    row stride of the logits, so that stores to a row are aligned as loads from it are.
    """
    rows, columns = logits.shape
    stride = logits.stride(0)
    if logits.stride(1) == 1 and columns < stride <= columns + columns // 8:
        return logits.new_empty_strided((rows, columns), (stride, 1))
    return logits.new_empty((rows, columns))


def launch_key(logits: Tensor, targets: Tensor, kind: tuple[Any, ...], params: dict[str, Any]) -> Any:
    """Return the key of a launch over rows of logits; None if tensors have gaps or are not aligned.

    ``kind`` has what the launch depends on besides the tensors and the scalars of the loss.
    """
    if not are_repeatable(logits, targets):
        return None
    return (*kind, logits.shape, logits.dtype, logits.get_device(), *params.values())


def mean_key(losses: Tensor, targets: Tensor, ignore_index: int) -> Any:
    """Return the key of a launch that reduces the losses of rows; None as for :func:`launch_key`."""
    if not are_repeatable(losses, targets):
        return None
    return ("mean", losses.shape, ignore_index, losses.get_device())


# The kernels count columns in 32 bits, and a step of a row's loop may pass the end by less than 2^20. Rows
# and strides are counted in 64 bits.
MAX_COLUMNS = 2**31 - 2**20


def supports_cross_entropy(case: Case, device: str) -> Support:
    shape = case.inputs[0].shape
    if shape and shape[-1] >= MAX_COLUMNS:
        return no("the kernels take rows of fewer than 2^31 - 2^20 elements; use impl='torch'")
    return YES


def supports_linear_cross_entropy(case: Case, device: str) -> Support:
    """The rows of the weight (V, C) are the columns of the logits."""
    shape = case.inputs[1].shape
    if shape and shape[0] >= MAX_COLUMNS:
        return no("the kernels take fewer than 2^31 - 2^20 columns; use impl='torch'")
    return YES


def save_cross_entropy(inputs: Tensors, output: Any) -> Tensors:
    """The backward needs the logits, the targets and the log-sum-exp of each row."""
    logits, targets = inputs
    return logits, targets, output[1]


def save_linear_cross_entropy(inputs: Tensors, output: Any) -> Tensors:
    """The backward needs the gradients that the forward computed."""
    return output[1], output[2]


def _gradient_scale(
    grad: Tensor,
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return |g| (p (1 + 2 z |lse|) + e / V + (1 - e) [j = t]): the terms before they cancel."""
    _, lse = cross_entropy_reference(logits, targets, ignore_index=ignore_index)
    p = torch.exp(logits - lse[:, None]) * (1 + 2 * z_loss * lse.abs()[:, None])
    ignored = targets == ignore_index
    at_target = torch.full_like(p[:, :1], 1 - label_smoothing)
    terms = p.scatter_add(1, targets.masked_fill(ignored, 0)[:, None], at_target)
    terms = terms + label_smoothing / logits.shape[1]
    size = grad.abs()[:, None] * terms
    return size.masked_fill(ignored[:, None], 0.0).nan_to_num(nan=0.0, posinf=0.0)


def _cross_entropy_cost(c: Case, direction: str) -> Cost:
    """Forward: reads the logits, writes two numbers per row. Backward: reads the logits and three numbers
    per row, writes their gradient. Targets take 8 bytes."""
    logits, targets = c.inputs
    rows = targets.numel
    if direction == FORWARD:
        return Cost(read=logits.nbytes + 8 * rows, written=8 * rows)
    return Cost(read=logits.nbytes + 16 * rows, written=logits.numel * ITEMSIZE[logits.dtype])


def _linear_cross_entropy_cost(c: Case, direction: str) -> Cost:
    """Forward: three products of 2 N C V FLOPs; reads x, W and targets, writes both gradients (dweight of
    float16 in float32). Backward: reads these and writes them in the inputs' dtype."""
    x, weight, targets = c.inputs
    item = ITEMSIZE[x.dtype]
    gradient_bytes = x.numel * item + weight.numel * (4 if x.dtype == "float16" else item)
    if direction == FORWARD:
        flops = 6.0 * x.numel * weight.shape[0]
        read = x.nbytes + weight.nbytes + 8 * targets.numel
        return Cost(read=read, written=gradient_bytes + 4, flops=flops, rate=SHORT[x.dtype])
    return Cost(read=gradient_bytes + 4, written=(x.numel + weight.numel) * item)


def _losses_not_negative(losses: Tensor, *inputs: Tensor, **params: Any) -> float:
    """A loss without z-loss is -sum q log p >= 0, up to the rounding of the logits in float32."""
    logits = inputs[0]
    finite = losses[losses.isfinite()]
    if not finite.numel():
        return 0.0
    size = logits[logits.isfinite()].abs().amax().double() + 32
    allowed = 8 * torch.finfo(torch.float32).eps * float(size)
    return max(0.0, -float(finite.min())) / allowed


def _generate_cross_entropy(c: Case, seed: int, device: str) -> Tensors:
    """Logits as the case says. Targets in range; a tenth of them ignored, except in timed cases."""
    logits, targets = c.inputs
    generator = torch.Generator(device)
    generator.manual_seed(seed)
    x = torch.empty(logits.shape, dtype=getattr(torch, logits.dtype), device=device)
    x.normal_(generator=generator)
    _LOGIT_VALUES[logits.values](x, generator)
    rows, columns = logits.shape
    t = torch.randint(columns, targets.shape, generator=generator, device=device)
    if logits.values == "normal" and "bench" not in c.tags:
        ignored = torch.rand(rows, generator=generator, device=device) < 0.1
        t[ignored] = int(c.params.get("ignore_index", -100))  # type: ignore[call-overload]
    return x, t


def _special(x: Tensor, generator: torch.Generator) -> None:
    """Place NaN, +Inf, -Inf and both zeros, each in one row; other rows stay unchanged."""
    values = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0)
    for value in values:
        row, column = (int(torch.randint(n, (), generator=generator, device=x.device)) for n in x.shape)
        x[row, column] = value


def _neginf(x: Tensor, generator: torch.Generator) -> None:
    x.masked_fill_(torch.rand(x.shape, generator=generator, device=x.device) < 0.25, float("-inf"))
    # Nothing but -inf in one row, whose loss is NaN.
    x[-1] = float("-inf")


_LOGIT_VALUES = {
    "normal": lambda x, generator: None,
    "large": lambda x, generator: x.mul_(1e4),
    "special": _special,
    "neginf": _neginf,
}


def _generate_linear_cross_entropy(c: Case, seed: int, device: str) -> Tensors:
    """Normal x, weights of 1/sqrt(C). Targets in range; a tenth ignored, except in timed cases.

    With x of ``values="nan"`` its first row begins with NaN, and its target is not ignored.
    """
    x, weight, targets = c.inputs
    generator = torch.Generator(device)
    generator.manual_seed(seed)

    def normal(description: Input, scale: float) -> Tensor:
        dtype = getattr(torch, description.dtype)
        return torch.empty(description.shape, dtype=dtype, device=device).normal_(
            0, scale, generator=generator
        )

    features, head = normal(x, 1.0), normal(weight, max(1, x.shape[1]) ** -0.5)
    t = torch.randint(weight.shape[0], targets.shape, generator=generator, device=device)
    if "bench" not in c.tags:
        ignored = torch.rand(t.shape, generator=generator, device=device) < 0.1
        if x.values == "nan":
            features[0, 0], ignored[0] = torch.nan, False
        t[ignored] = int(c.params.get("ignore_index", -100))  # type: ignore[call-overload]
    return features, head, t


def _rows_case(
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
    """A case of ``cross_entropy``."""
    logits = Input(name="logits", shape=(rows, columns), dtype=dtype, layout=layout, values=values)
    targets = Input(name="targets", shape=(rows,), dtype="int64")
    return case(logits, targets, tags=tags, devices=devices, **params)


def _head_case(
    rows: int,
    inner: int,
    columns: int,
    dtype: str = "float32",
    *,
    layout: str = "contiguous",
    values: str = "normal",
    tags: str = "check",
    devices: tuple[str, ...] = ("cpu", "cuda"),
    **params: Any,
) -> Case:
    """A case of ``linear_cross_entropy``, named by dtype, N x C x V and parameters; ``values`` are x's."""
    x = Input(name="x", shape=(rows, inner), dtype=dtype, layout=layout, values=values)
    weight = Input(name="weight", shape=(columns, inner), dtype=dtype)
    targets = Input(name="targets", shape=(rows,), dtype="int64")
    parts = [SHORT[dtype], f"{rows}x{inner}x{columns}", *map(str, params.values())]
    parts += [layout] * (layout != "contiguous") + [values] * (values != "normal")
    return case(x, weight, targets, tags=tags, devices=devices, name="-".join(parts), **params)


CROSS_ENTROPY = Operator(
    name="cross_entropy",
    summary="cross entropy of logits and class indices",
    formula="loss = lse - (1 - e) x_t - e / V sum_j x_j + z lse^2",
    signature="cross_entropy(logits, targets, ignore_index=-100, label_smoothing=0.0, z_loss=0.0)",
    reference=cross_entropy_reference,
    cases=(
        *(_rows_case(3, 263, dtype=d) for d in DTYPES),
        _rows_case(2, 1000, **SMOOTHING_AND_Z_LOSS),
        _rows_case(2, 1000, dtype="bfloat16", **SMOOTHING_AND_Z_LOSS),
        _rows_case(4, 32, values="large"),
        *(_rows_case(300, 50257, dtype=d, devices=("cuda",), **SMOOTHING_AND_Z_LOSS) for d in DTYPES),
        *(_rows_case(600, 131072, dtype=d, devices=("cuda",)) for d in DTYPES[1:]),
        *(_rows_case(*s, tags="edge") for s in ((0, 33), (1, 33), (2, 1))),
        _rows_case(3, 263, dtype="float16", layout="shifted", tags="edge", **SMOOTHING_AND_Z_LOSS),
        _rows_case(3, 40, layout="sliced", tags="edge", ignore_index=3),
        _rows_case(4, 64, values="special", tags="edge"),
        _rows_case(3, 65, values="neginf", tags="edge"),
        _rows_case(700, 4099, dtype="bfloat16", layout="shifted", tags="edge", devices=("cuda",)),
        _rows_case(8192, 50304, dtype="bfloat16", tags="bench", devices=("cuda",)),
        _rows_case(8192, 131072, dtype="bfloat16", tags="bench", devices=("cuda",)),
        _rows_case(8192, 50257, dtype="bfloat16", tags="bench", devices=("cuda",)),
        _rows_case(256, 4096, tags="bench", devices=("cpu",)),
    ),
    cost=_cross_entropy_cost,
    validate=check_cross_entropy,
    dtypes=DTYPES,
    differentiable=("logits",),
    rows=("logits", "targets"),
    differentiable_outputs=1,
    save=save_cross_entropy,
    draw=_generate_cross_entropy,
    gradient_scale=_gradient_scale,
    scale_reason="at a target that is nearly certain p - 1 cancels, each rounded before",
    properties=(
        Property(
            name="no loss is below 0",
            holds=_losses_not_negative,
            applies=lambda c: not c.params.get("z_loss"),
        ),
    ),
    backward_note="from the logits and lse: g (p (1 + 2 z lse) - e / V - (1 - e) [j = t])",
)

LINEAR_CROSS_ENTROPY = Operator(
    name="linear_cross_entropy",
    summary="the LM head and its loss, without the logits",
    formula="loss = sum_i cross_entropy(x_i W^T, t_i)",
    signature="linear_cross_entropy(x, weight, targets, ignore_index=-100, label_smoothing=0.0, z_loss=0.0)",
    reference=linear_cross_entropy_reference,
    cases=(
        *(_head_case(3, 24, 263, dtype=d) for d in DTYPES),
        _head_case(2, 16, 65, **SMOOTHING_AND_Z_LOSS),
        *(
            _head_case(5001, 256, 50257, dtype=d, devices=("cuda",), **SMOOTHING_AND_Z_LOSS)
            for d in DTYPES[1:]
        ),
        *(_head_case(3000, 128, 9001, dtype=d, devices=("cuda",)) for d in DTYPES),
        _head_case(4500, 128, 50257, dtype="bfloat16", devices=("cuda",), ignore_index=5, z_loss=1e-3),
        *(_head_case(*s, tags="edge") for s in ((0, 8, 33), (1, 8, 33), (2, 3, 1))),
        _head_case(3, 16, 40, layout="sliced", tags="edge", ignore_index=3),
        *(_head_case(3, 24, 67, dtype=d, values="nan", tags="edge") for d in ("float32", "bfloat16")),
        _head_case(16384, 768, 50304, dtype="bfloat16", tags="bench", devices=("cuda",)),
        _head_case(8192, 4096, 131072, dtype="bfloat16", tags="bench", devices=("cuda",)),
        _head_case(256, 64, 4096, tags="bench", devices=("cpu",)),
    ),
    cost=_linear_cross_entropy_cost,
    validate=check_linear_cross_entropy,
    dtypes=DTYPES,
    differentiable=("x", "weight"),
    differentiable_outputs=1,
    save=save_linear_cross_entropy,
    draw=_generate_linear_cross_entropy,
    backward_note="the forward's own gradients, multiplied: the logits are not computed again",
)
