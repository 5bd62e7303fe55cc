"""What cross entropy and the LM head's share: arguments, the layout of a gradient, the reference.

For a row x of V logits with target t, lse = log sum_j exp x_j, smoothing e and factor z:

    loss = lse - (1 - e) x_t - e / V sum_j x_j + z lse^2
    d loss / d x_j = exp(x_j - lse) (1 + 2 z lse) - e / V - (1 - e) [j = t]
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core import YES, Case, Support, WeftError, no
from weft.ops._shared import validate

DTYPES = ("float32", "float16", "bfloat16")


def check_targets(where: str, targets: Any, rows: int, device: torch.device) -> None:
    """Raise :class:`WeftError` unless ``targets`` is (rows,) int64 on ``device``."""
    validate.tensor(where, "targets", targets, ("int64",), dims=range(1, 2))
    if targets.device != device:
        raise WeftError(f"{where}: targets.device", expected=device, got=targets.device)
    if targets.shape[0] != rows:
        raise WeftError(
            f"{where}: one target a row",
            expected=f"targets ({rows},)",
            got=tuple(targets.shape),
            hint="flatten both: logits.view(-1, V), targets.view(-1)",
        )


def check_scalars(where: str, ignore_index: Any, label_smoothing: Any, z_loss: Any) -> None:
    """Raise :class:`WeftError` on a smoothing outside [0, 1], a negative factor, no int."""
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise WeftError(f"{where}: ignore_index", expected="an int", got=repr(ignore_index))
    if not isinstance(label_smoothing, (int, float)) or not 0 <= label_smoothing <= 1:
        raise WeftError(
            f"{where}: label_smoothing", expected="a number in [0, 1]", got=repr(label_smoothing)
        )
    if not isinstance(z_loss, (int, float)) or not 0 <= z_loss < float("inf"):
        raise WeftError(f"{where}: z_loss", expected="a number >= 0", got=repr(z_loss))


def check_range(where: str, targets: torch.Tensor, columns: int, ignore_index: int) -> None:
    """Raise :class:`WeftError` where a target that counts is no column. Waits for the device."""
    wrong = ((targets < 0) | (targets >= columns)) & (targets != ignore_index)
    if bool(wrong.any()):
        row = int(wrong.to(torch.uint8).argmax())
        raise WeftError(
            f"{where}: targets[{row}]",
            expected=f"0 to {columns - 1}, or ignore_index={ignore_index}",
            got=int(targets[row]),
            hint="leave rows out by ignore_index",
        )


def check_reduction(where: str, reduction: Any, known: tuple[str, ...]) -> None:
    if reduction not in known:
        raise WeftError(f"{where}: reduction", expected=" or ".join(known), got=repr(reduction))


def gradient_like(logits: torch.Tensor) -> torch.Tensor:
    """Memory for the gradient of 2-D ``logits``: contiguous, or with the row stride of logits that
    are some columns of a slightly wider tensor (a padded vocabulary), so that a row's gradient is
    aligned as the row is."""
    rows, columns = logits.shape
    stride = logits.stride(0)
    if logits.stride(1) == 1 and columns < stride <= columns + columns // 8:
        return logits.new_empty_strided((rows, columns), (stride, 1))
    return logits.new_empty((rows, columns))


def reference(
    x: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses, lse) by log-probabilities, as a book has them; the gradient is autograd's.

    Ignored rows have 0 in both whatever they hold. A row with NaN or +inf, or of nothing but -inf,
    has NaN, as in torch.
    """
    ignored = targets == ignore_index
    x = x.masked_fill(ignored[:, None], 0.0)  # nothing that stands there may come through
    top = x.amax(-1, keepdim=True).detach()  # cancels out
    lse = top + torch.log(torch.exp(x - top).sum(-1, keepdim=True))
    log_p = x - lse
    losses = -(1 - label_smoothing) * log_p.gather(1, targets.masked_fill(ignored, 0)[:, None])
    if label_smoothing:  # an -inf times 0 would be NaN
        losses = losses - label_smoothing * log_p.mean(-1, keepdim=True)
    losses = losses + z_loss * lse.square()
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return (
        torch.where(ignored, zero, losses.squeeze(-1)),
        torch.where(ignored, zero, lse.squeeze(-1)),
    )


def eager_losses(
    x: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses, lse) of float32 logits, call by call; NaN in both where a target is out of range."""
    ignored, inside, safe = _read(targets, ignore_index, x.shape[1])
    x = x.masked_fill(ignored[:, None], 0.0)
    top = x.amax(-1, keepdim=True).detach()
    lse = (top + torch.log(torch.exp(x - top).sum(-1, keepdim=True))).squeeze(-1)
    lse = torch.where(inside, lse, torch.nan)
    losses = lse - (1 - label_smoothing) * x.gather(1, safe[:, None]).squeeze(-1)
    if label_smoothing:
        losses = losses - label_smoothing * x.mean(-1)
    if z_loss:
        losses = losses + z_loss * lse.square()
    return losses.masked_fill(ignored, 0.0), lse.masked_fill(ignored, 0.0)


def eager_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> torch.Tensor:
    """The gradient of sum(grad losses) with respect to float32 logits ``x``."""
    ignored, _, safe = _read(targets, ignore_index, x.shape[1])
    found = (grad * (1 + 2 * z_loss * lse))[:, None] * torch.exp(x - lse[:, None])
    if label_smoothing:
        found = found - (grad * (label_smoothing / x.shape[1]))[:, None]
    found = found.scatter_add(1, safe[:, None], (grad * -(1 - label_smoothing))[:, None])
    return found.masked_fill(ignored[:, None], 0.0)


def _read(
    targets: torch.Tensor, ignore_index: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ignored, in range or ignored, a column for each row that may be read)."""
    ignored = targets == ignore_index
    inside = (targets >= 0) & (targets < columns)
    return ignored, inside | ignored, targets.masked_fill(ignored | ~inside, 0)


def supports(case: Case, device: str) -> Support:
    """Columns are counted in 32 bits by the kernels; rows and strides are not."""
    if case.inputs[0].shape and case.inputs[0].shape[-1] >= 2**31 - 2**20:
        return no("rows of 2^31 elements and more are not for these kernels; use impl='torch'")
    return YES


def supports_head(case: Case, device: str) -> Support:
    """The same, of the weight (V, C), whose rows are the logits' columns."""
    if case.inputs[1].shape and case.inputs[1].shape[0] >= 2**31 - 2**20:
        return no("2^31 columns and more are not for these kernels; use impl='torch'")
    return YES
